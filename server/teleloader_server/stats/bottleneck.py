"""Diagnosis of a consumer's bottleneck, with the recommended worker count: a pure function of measurements.

- The training loop waits for data during less than `MIN_DATA_WAIT` of the time: training is the bottleneck, or loading
  and training are balanced if the workers are busy.
- The training loop waits, and the requested batches were not ready on the server: the loader is the bottleneck.
- The training loop waits, and the requested batches were ready: the network is the bottleneck.

Only the client can measure the data wait of its training loop. If a client does not report it, the server uses its own
measurements: the fractions of time for which requested batches were not ready, and for which responses were in transit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from teleloader_shared.stats import WINDOW, Diagnosis
from teleloader_shared.units import number, seconds

MIN_DATA_WAIT: Final = 0.05
"""Data wait, as a fraction of the time, below which data loading does not limit training."""
MIN_STARVED_SHARE: Final = 0.5
"""Minimum ratio of the time with unready batches to the data wait at which the loader, not the network, is at fault."""
MAJORITY: Final = 0.5
"""Minimum fraction of time with unready batches (loader) or responses in transit (network) for this bottleneck.

Applies only if the client reports no data wait.
"""
WORKERS_BUSY: Final = 0.8
"""Minimum busy fraction of the workers at which loading and training count as balanced."""
CPUS_BUSY: Final = 0.8
"""CPU utilization above which additional workers would not increase the throughput."""
MIN_SECONDS: Final = 2.0
"""Loading time in seconds before the first diagnosis."""
MIN_TRAINING_FRACTION: Final = 0.05
"""Fraction of time spent on training below which a training loop counts as consuming batches as fast as they arrive.

The demand of such a loop is unknown, so no number of workers can be recommended.
"""
MIN_BATCH_RATE: Final = 0.01
"""Batches/s below which a consumer counts as receiving no batches."""
MAX_WORKERS: Final = 1024
"""Maximum of the setting `num_workers`."""
WORKERS_PER_CPU: Final = 4
"""Maximum recommended workers per CPU: only a trial shows whether further workers would wait for I/O or for CPUs."""
IDLE_GRACE_S: Final = 2.0
"""Seconds without a request after which a consumer counts as inactive."""
IDLE_GRACE_BATCHES: Final = 20
"""Number of batches that a client may have prefetched; `IDLE_GRACE_S` is extended to the time for consuming them."""
SLOW_EVENT_LOOP_S: Final = 0.01
"""Event loop lag in seconds above which the server's main process is the bottleneck."""


class ConsumerRates(NamedTuple):
    """Measurements of one consumer: recent rates, and recent fractions of time by activity."""

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


class PoolLoad(NamedTuple):
    """Load of a consumer's worker pool and of the server."""

    workers: int
    """Number of worker processes; 0 if batches are loaded in the server process itself."""
    busy: float
    """Recent busy fraction of the workers."""
    demand: float
    """Number of workers that all training loops would keep busy if they never waited; see `total_demand`."""
    consumers: int
    """Number of active consumers."""
    setting: str
    """Setting for the number of workers as shown to users, such as ``--num-workers {}``; ``{}`` stands for the number.
    """
    cpus: int
    """Number of CPUs of the server."""
    cpu: float
    """Mean number of CPUs in use."""
    event_loop_lag: float
    """Recent mean lag of the event loop in seconds."""
    servers: int = 1
    """Number of servers under the same supervisor, which divides the workers of the setting among them."""


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


def diagnose(consumer: ConsumerRates, pool: PoolLoad) -> Diagnosis:
    """Diagnose the bottleneck of a consumer, with advice to the user.

    The recommended number of workers suffices for all consumers of the pool.
    """
    if consumer.idle > WINDOW:
        return Diagnosis("unknown", None, f"No request for {consumer.idle:.0f} s.")
    if consumer.known_for < MIN_SECONDS:
        return Diagnosis("unknown", None, f"A diagnosis needs {MIN_SECONDS:g} s of loading.")
    needed = _needed(pool)
    if consumer.data_wait_fraction is None:
        starved, in_transit = consumer.starved_fraction >= MAJORITY, consumer.sending_fraction >= MAJORITY
    else:
        waits = consumer.data_wait_fraction >= MIN_DATA_WAIT
        starved = waits and consumer.starved_fraction >= MIN_STARVED_SHARE * consumer.data_wait_fraction
        in_transit = waits and not starved
    if starved:
        return _loader_bound(consumer, pool, needed)
    if in_transit:
        return Diagnosis("network", needed, _network_advice(consumer, pool))
    return _training_bound(consumer, pool, needed)


def _needed(pool: PoolLoad) -> int | None:
    """Return the number of workers that meets the demand, or None if the demand is unknown or above `MAX_WORKERS`."""
    # a data wait below MIN_DATA_WAIT counts as keeping up
    needed = max(1, math.ceil(pool.demand * (1 - MIN_DATA_WAIT)))
    return needed if pool.demand > 0 and needed <= MAX_WORKERS else None


def _loader_bound(consumer: ConsumerRates, pool: PoolLoad, needed: int | None) -> Diagnosis:
    if consumer.data_wait_fraction is None or consumer.is_unthrottled:
        needed = None
    waits = _waits(consumer, "for batches that are not ready")
    if _has_other_causes(consumer, pool):
        enough = needed if needed is not None and needed <= pool.workers else None
        idle = _percent(1 - pool.busy)
        return Diagnosis(
            "loader", enough, f"{waits}, although workers are idle {idle} of the time: {_other_causes(pool)}."
        )
    return Diagnosis("loader", needed, f"{waits}{_enough_workers(consumer, pool, needed)}, or {_faster(consumer)}.")


def _has_other_causes(consumer: ConsumerRates, pool: PoolLoad) -> bool:
    """Return True if the computing time of all workers explains less than half of the time with unready batches."""
    busy = pool.busy * pool.workers
    return (
        pool.workers > 0
        and consumer.batch_rate >= MIN_BATCH_RATE
        and busy < MIN_STARVED_SHARE * consumer.starved_fraction
    )


def _other_causes(pool: PoolLoad) -> str:
    if pool.event_loop_lag >= SLOW_EVENT_LOOP_S:
        return _lag(pool)
    return (
        "more workers or faster samples would help little. Use longer epochs (each one starts with a wait), larger "
        "batches if they are tiny, or more prefetching (prefetch_factor) if other programs use the CPUs"
    )


def _lag(pool: PoolLoad) -> str:
    return f"the server's event loop lags by {1000 * pool.event_loop_lag:.0f} ms, so add another server"


def _enough_workers(consumer: ConsumerRates, pool: PoolLoad, needed: int | None) -> str:
    """Recommend a sufficient number of workers, or another remedy if the pool has as many already."""
    if consumer.is_unthrottled and consumer.batch_rate >= MIN_BATCH_RATE:
        return f" and consumes each batch at once: {_throughput(consumer, pool)}"
    if needed is None:
        return f": add workers ({_setting(pool, 'N')})"
    if needed > pool.workers:
        return f": {_workers(needed)}{_instead(pool, needed)}"
    prefetch = "prefetch more (prefetch_factor), so that slow batches start earlier"
    return (
        f", although {_workers(needed)} would suffice on average: "
        f"{_lag(pool) if pool.event_loop_lag >= SLOW_EVENT_LOOP_S else prefetch}"
    )


def _instead(pool: PoolLoad, needed: int) -> str:
    """Recommend an increased number of workers, or another remedy if the CPUs are busy."""
    keep_up = "keep up" if pool.consumers == 1 else f"keep up with all {pool.consumers} consumers"
    if needed > pool.cpus and pool.cpu >= CPUS_BUSY * pool.cpus:
        return (
            f" would {keep_up}, but {_cpus(pool)} {'is' if pool.cpus == 1 else 'are'} already busy: add another server"
        )
    if needed > (most := WORKERS_PER_CPU * pool.cpus):
        first = max(most, pool.workers)
        return f" would {keep_up}, many more than {_cpus(pool)}: try {first} first ({_setting(pool, first)})"
    instead = f" instead of {pool.workers}" if pool.workers else ""
    return f"{instead} would {keep_up} ({_setting(pool, needed)})"


def _throughput(consumer: ConsumerRates, pool: PoolLoad) -> str:
    """Describe the throughput of the workers, for a training loop that consumes batches as fast as they arrive."""
    workers = _workers(pool.workers) if pool.workers else "the server's own process"
    share = f" for this one of {pool.consumers} consumers" if pool.consumers > 1 else ""
    verb = "computes" if pool.workers < 2 else "compute"
    now = f"{workers} {verb} {number(consumer.batch_rate)} batches/s{share}"
    enough = f"enough for training steps of {seconds(1 / consumer.batch_rate)}"
    if pool.cpu >= CPUS_BUSY * pool.cpus:
        return f"{now}, {enough}, with {_cpus(pool)} busy; for shorter steps add another server"
    twice = 2 * max(1, pool.workers)
    return f"{now}, {enough}; steps of half that time need {twice} workers ({_setting(pool, twice)})"


def _setting(pool: PoolLoad, workers: int | Literal["N"]) -> str:
    """Return the setting for a number of workers of this server."""
    if pool.servers == 1:
        return pool.setting.format(workers)
    total = workers if workers == "N" else pool.servers * workers
    return f"{pool.setting.format(total)}, divided among {pool.servers} servers"


def _cpus(pool: PoolLoad) -> str:
    return f"the server's {pool.cpus} CPUs" if pool.cpus > 1 else "the server's only CPU"


def _network_advice(consumer: ConsumerRates, pool: PoolLoad) -> str:
    if consumer.data_wait_fraction is None:
        waits = f"Responses are in transit {_percent(consumer.sending_fraction)} of the time"
    else:
        waits = _waits(consumer, "although batches are ready")
    if pool.event_loop_lag >= SLOW_EVENT_LOOP_S:
        return f"{waits}: {_lag(pool)}."
    return (
        f"{waits}: {consumer.byte_rate / 1e6:,.1f} MB/s arrive. If this rate saturates the network, use a faster "
        "network or send fewer bytes (smaller dtypes, compression). Otherwise latency dominates: prefetch more "
        "(prefetch_factor) and use longer epochs."
    )


def _training_bound(consumer: ConsumerRates, pool: PoolLoad, needed: int | None) -> Diagnosis:
    if not consumer.batch_rate:
        return Diagnosis("unknown", None, "No batch was sent recently.")
    if consumer.data_wait_fraction is None:
        waits = "Batches are ready when they are requested"
    else:
        waits = _waits(consumer, "for data")
    workers = needed if pool.workers else 0
    if pool.busy >= WORKERS_BUSY:
        busy = f"the workers are busy {_percent(pool.busy)} of the time"
        return Diagnosis("balanced", workers, f"{waits}, and {busy}: loading and training are balanced.")
    fewer = f": {_workers(needed)} would suffice" if needed is not None and needed < pool.workers else ""
    idle = f"the workers are idle {_percent(1 - pool.busy)} of the time"
    return Diagnosis("training", workers, f"{waits}, and {idle}, so training is the bottleneck{fewer}.")


def _faster(consumer: ConsumerRates) -> str:
    """Recommend speeding up the slowest stage."""
    total = sum(consumer.stages.values())
    if not total:
        return "speed up the samples"
    longest = max(consumer.stages, key=lambda stage: consumer.stages[stage])
    share = _percent(consumer.stages[longest] / total)
    return f"speed up the stage {longest!r}, which takes {share} of the time per batch"


def _waits(consumer: ConsumerRates, why: str) -> str:
    if consumer.data_wait_fraction is None:
        return f"Requested batches are not ready {_percent(consumer.starved_fraction)} of the time"
    return f"The training loop waits {_percent(consumer.data_wait_fraction)} of the time {why}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"
