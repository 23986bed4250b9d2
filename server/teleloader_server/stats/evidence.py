"""Evidence for the diagnosis of a training loop: measurements over the last `WINDOW` seconds. Records without I/O.

A measurement that the kernel, an older client or a short run does not provide is None: the diagnosis is then less
certain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from teleloader_shared.stats import WINDOW

MIN_TRAINING_FRACTION: Final = 0.05
"""Fraction of time spent on training below which a training loop counts as consuming batches as fast as they arrive.

The demand of such a loop is unknown, so no number of workers can be recommended.
"""
IDLE_GRACE_S: Final = 2.0
"""Seconds without a request after which a consumer counts as inactive."""
IDLE_GRACE_BATCHES: Final = 20
"""Number of batches that a client may have prefetched; `IDLE_GRACE_S` is extended to the time for consuming them."""


class Receiving(NamedTuple):
    """Recent measurements of a client's receiving threads."""

    pending: float
    """Fraction of time for which the training loop waited for a response of which no byte had arrived."""
    reading: float
    """Fraction of time for which it waited for a response that was arriving."""
    elsewhere: float
    """Fraction of time for which it waited for responses of other servers."""
    busy: float
    """Number of receiving threads that had a response to read or to decode, on average."""
    cpu: float
    """Number of receiving threads that computed, on average."""
    process: float
    """Number of CPUs that the training process used while its training loop waited, on average over these waits."""
    wakeups: float
    """Waits of the training loop per second that ended with the delivery of a batch."""
    late: float
    """Fraction of them after which the training loop did not continue at once, because it had no GIL or no CPU."""

    @property
    def others(self) -> float:
        """CPUs that other threads of the training process used while the training loop waited."""
        return max(0.0, self.process - self.cpu)


class Link(NamedTuple):
    """State of the TCP connection to a client, or to the proxy in front of it (``TCP_INFO``)."""

    rtt: float
    """Smoothed round-trip time in seconds."""
    delivery_rate: float
    """Most recent delivery rate in bytes/s."""
    retransmitted: float | None = None
    """Recent fraction of the segments that were retransmitted."""
    busy: float | None = None
    """Recent fraction of time with unacknowledged data."""
    unread: float | None = None
    """Recent fraction of time for which the receiver's window was full."""


class Straggler(NamedTuple):
    """Recent batch that took unusually long."""

    batch: int
    sample: int | None
    """Index of the sample that took longest; None if it is unknown."""
    seconds: float
    share: float
    """Recent time of all batches that took long, as a fraction of the time."""


class ConsumerRates(NamedTuple):
    """Measurements of one training loop."""

    known_for: float
    """Length of the measurement period in seconds."""
    idle: float
    """Seconds since the consumer's last request; 0 while a request is open."""
    batch_rate: float
    """Sent batches/s."""
    byte_rate: float
    """Sent bytes/s."""
    starved_fraction: float
    """Fraction of time during which requested batches were not ready."""
    sending_fraction: float
    """Fraction of time during which a response was in transit."""
    data_wait_fraction: float | None
    """Fraction of time during which the training loop waited for data, as reported by the client; None if unknown."""
    stages: Mapping[str, float]
    """Mean time of a worker per batch in each stage (fetch, collate, encode), in seconds."""
    step: float = 0.0
    """Seconds per batch of the training loop without its data wait; 0 if unknown."""
    receiving: Receiving | None = None
    link: Link | None = None
    straggler: Straggler | None = None
    """Slowest recent batch; None if no batch took longer than the prefetch window hides."""
    typical: float | None = None
    """Median of the computing times of recent batches in seconds."""
    p99: float | None = None
    """99th percentile of these times in seconds."""
    window: int = 0
    """Number of batches that the client has requested, or that are computed for it ahead of its requests."""
    is_compressed: bool = False
    has_checksum: bool = True
    is_finished: bool = False
    """True if the training loop has consumed all batches of the epoch, or, if this is unknown, has been sent them."""

    @property
    def demand(self) -> float:
        """Number of workers that the training loop would keep busy if it had no data wait.

        Equals the current load if the data wait is unknown, or if the training loop consumes batches as fast as they
        arrive.
        """
        training = 1.0 if self.data_wait_fraction is None or self.is_unthrottled else 1.0 - self.data_wait_fraction
        return self.batch_rate / training * sum(self.stages.values())

    @property
    def is_active(self) -> bool:
        """True if the consumer is expected to send further requests, judging by its recent batch rate."""
        return self.batch_rate > 0 and self.idle <= min(WINDOW, max(IDLE_GRACE_S, IDLE_GRACE_BATCHES / self.batch_rate))

    @property
    def is_unthrottled(self) -> bool:
        """True if the consumer's training loop consumes batches as fast as they arrive."""
        return self.data_wait_fraction is not None and 1.0 - self.data_wait_fraction < MIN_TRAINING_FRACTION


class Machine(NamedTuple):
    """CPUs of the server's machine, as far as the server may use them."""

    cpus: int
    own: float
    """Number of CPUs that the server and its workers use."""
    idle: float | None = None
    """Idle fraction of the CPUs."""
    quota: float | None = None
    """CPU quota of the container in CPUs; None if there is no quota."""
    throttled: float | None = None
    """Fraction of the quota's periods in which the kernel throttled the container; None without a quota."""
    cpu_pressure: float | None = None
    """Fraction of time for which a process of the machine waited for a CPU (PSI)."""
    io_pressure: float | None = None
    """Fraction of time for which a process of the machine waited for a disk (PSI)."""

    @property
    def others(self) -> float | None:
        """Number of CPUs that other programs use; None if unknown."""
        return None if self.idle is None else max(0.0, (1 - self.idle) * self.cpus - self.own)


class MainProcess(NamedTuple):
    """Event loop of the server's main process."""

    lag: float = 0.0
    """Mean lag of the event loop in seconds."""
    cpu: float | None = None
    """Fraction of time for which its thread computes."""
    cpu_wait: float | None = None
    """Fraction of time for which its thread has no CPU."""


class PoolLoad(NamedTuple):
    """Load of a consumer's worker pool and of the server."""

    workers: int
    """Worker processes; 0 if batches are loaded in the server process itself."""
    busy: float
    """Recent busy fraction of the workers."""
    demand: float
    """Number of workers that all training loops would keep busy if they never waited; see `total_demand`."""
    consumers: int
    """Number of active consumers."""
    setting: str
    """Setting for the number of workers as shown to users, such as ``--num-workers {}``; ``{}`` stands for the number.
    """
    machine: Machine
    main: MainProcess = MainProcess()
    cpu: float | None = None
    """Mean number of workers that compute."""
    cpu_wait: float = 0.0
    """Mean number of busy workers that have no CPU."""
    memory_full: float = 0.0
    """Fraction of time for which batches were not started because the memory budget was full."""
    memory_budget: int = 0
    """Memory budget in bytes."""
    servers: int = 1
    """Number of servers under the same supervisor, which divides the workers of the setting among them."""

    @property
    def load(self) -> float:
        """Mean number of busy workers; loading in the server process counts as one worker."""
        return self.busy * max(1, self.workers)


class Parts(NamedTuple):
    """Parts of a training loop's data wait, as fractions of the time."""

    not_ready: float
    """The batch was not ready on the server."""
    in_transit: float
    """The batch was ready, and had not arrived."""
    in_client: float
    """The batch had arrived, and was not delivered."""
    elsewhere: float = 0.0
    """Another server had to send the batch."""

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return sum(self)


def total_demand(demands: Iterable[tuple[object, float]]) -> float:
    """Return the number of workers that consumers with these demands would keep busy together.

    Consumers of the same epoch share batches: only the highest of their demands counts.

    Args:
        demands: Epoch and demand, in workers, of each consumer.
    """
    highest: dict[object, float] = {}
    for epoch, demand in demands:
        highest[epoch] = max(demand, highest.get(epoch, 0.0))
    return sum(highest.values())
