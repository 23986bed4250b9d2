"""Demand of consumers for workers, from which an autoscaler computes the number of servers: a pure function.

The demand is the number of workers that the training loops would keep busy if they never waited for data. It must not
depend on how fast the present servers are, or a scaler would add servers without end:

- The work of a batch is the time that its worker computes or is blocked (for example by a disk), without the time that
  it waits for a CPU. On a machine without idle CPUs batches take longer, but their work stays the same.
- A training loop without steps of its own (a benchmark, an evaluation that has just started) takes all that it is sent.
  Its demand is unmeasured, and counts as its present load.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

MIN_STEP_S: Final = 0.001
"""A loop with shorter steps does not train."""
MIN_KNOWN_S: Final = 10.0
"""Seconds after which the step time of a loop is known."""

MIN_IDLE: Final = 0.05
"""Idle fraction of the CPUs below which they count as full."""
MIN_WAITING: Final = 0.1
"""Workers without a CPU, also as a fraction of the busy ones, from which the CPUs or the quota count as full."""


class ConsumerLoad(NamedTuple):
    """Recent measurements of a consumer on one server."""

    epoch: object
    """Its epoch: a batch is computed once for all consumers of an epoch."""
    batch_rate: float
    """Batches/s that this server sends to it."""
    data_wait_fraction: float | None
    """Fraction of the time for which its training loop waits for data; None if the client does not report it."""
    step: float
    """Seconds per batch of its training loop, without the time that it waits for data."""
    known_for: float
    """Seconds for which it has been measured."""
    work: float
    """Seconds per batch that a worker computes or is blocked."""

    @property
    def is_measured(self) -> bool:
        """True if the demand of its training loop is known."""
        return self.data_wait_fraction is not None and self.step >= MIN_STEP_S and self.known_for >= MIN_KNOWN_S


class Demand(NamedTuple):
    """Workers that consumers would keep busy."""

    total: float
    unmeasured: float
    """Part of consumers whose demand is unknown: the workers that they keep busy now."""


def demand(consumers: Iterable[ConsumerLoad], load: float) -> Demand:
    """Return the demand of the consumers of a server; of several that share an epoch, the highest counts.

    Args:
        consumers: Active consumers.
        load: Workers that compute or are blocked: a consumer may receive batches faster, if they were computed before.
    """
    measured: dict[object, float] = {}
    unmeasured: dict[object, float] = {}
    for consumer in consumers:
        workers = consumer.batch_rate * consumer.work
        if consumer.is_measured and consumer.data_wait_fraction is not None:
            # the loop takes 1 / (1 - wait) times as many batches if it never waits; a step takes some of the time
            workers /= max(1 - consumer.data_wait_fraction, consumer.step * consumer.batch_rate)
            measured[consumer.epoch] = max(workers, measured.get(consumer.epoch, 0.0))
        else:
            unmeasured[consumer.epoch] = max(workers, unmeasured.get(consumer.epoch, 0.0))
    known = sum(measured.values())
    unknown = min(load, sum(workers for epoch, workers in unmeasured.items() if epoch not in measured))
    return Demand(known + unknown, unknown)


def is_saturated(busy: float, load: float, idle_fraction: float | None) -> bool:
    """Return True if further workers would find no idle CPU.

    Args:
        busy: Workers that have a task.
        load: Those of them that compute or are blocked. The others wait for a CPU: the machine's CPUs are in use, or
            the quota of the container is.
        idle_fraction: Idle fraction of the CPUs that the server may use; None if unknown.
    """
    return (idle_fraction is not None and idle_fraction < MIN_IDLE) or busy - load >= max(
        MIN_WAITING, MIN_WAITING * busy
    )
