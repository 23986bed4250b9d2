"""Diagnosis of a training loop's bottleneck: a pure function of measurements.

The data wait of the training loop has three parts, which the client measures for each response that the loop waits for:

- until the first byte of the response: the batch was not ready, or the response took long to arrive. The server knows
  for which fraction of the time requested batches were not ready;
- until the last byte: the response arrived slowly;
- until the batch is delivered: the client decodes it, or copies it to a device.

The largest part is explained by what was measured there, such as the time for which workers compute, are blocked, or
have no CPU. If the parts do not explain the wait, the bottleneck is ``unknown``. `advice` has the texts.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from teleloader_server.stats import advice
from teleloader_server.stats.evidence import ConsumerRates, Parts, PoolLoad, Receiving
from teleloader_shared.stats import WINDOW, Bottleneck, Diagnosis

MIN_DATA_WAIT: Final = 0.05
"""Data wait, as a fraction of the time, below which data loading does not limit training."""
SURE_DATA_WAIT: Final = 0.15
"""Data wait from which it is certain that the training loop waits."""
MAJORITY: Final = 0.5
"""Minimum share of an effect that its cause must explain."""
WORKERS_BUSY: Final = 0.65
"""Busy fraction of the workers from which they count as the limit of the batch rate."""
MIN_IDLE: Final = 0.1
"""Idle fraction of the machine's CPUs below which further workers would find no CPU."""
THROTTLED: Final = 0.2
"""Fraction of throttled periods from which the CPU quota counts as the limit."""
MEMORY_FULL: Final = 0.3
"""Fraction of time with a full memory budget from which it counts as the reason that workers are idle."""
MAIN_BUSY: Final = 0.85
"""CPU use of the main process's event loop from which it counts as full."""
MAIN_ACTIVE: Final = 0.3
"""Fraction of time for which the main process computes or has no CPU, from which its lag counts."""
MAIN_LOADED: Final = 0.5
"""CPU use from which it is the most probable reason why idle workers get no batches."""
MAIN_QUEUED: Final = 0.25
"""Fraction of time without a CPU from which the main process is delayed by the CPUs and not by its work."""
SLOW_EVENT_LOOP_S: Final = 0.01
"""Event loop lag in seconds above which the server's main process is the bottleneck."""
LATE: Final = 0.1
"""Fraction of late wake-ups of the training loop from which other threads that compute hold the GIL."""
OTHERS: Final = 0.5
"""CPUs of other threads of the training process, while its training loop waits, from which they may hold the GIL."""
GIL_S: Final = 0.015
"""Maximum delay of a response by a thread that holds the GIL, in seconds: CPython lets others wait for 5 ms, and the
response needs the GIL when it begins to arrive, when it has been read, and when the training loop continues."""
LOSS: Final = 0.02
"""Fraction of retransmitted segments from which the network loses packets."""
STRAGGLER_FACTOR: Final = 3.0
"""Multiple of the median computing time from which a batch is a straggler."""
STARVED: Final = 0.4
"""Minimum share of a data wait without a main part for which workers or main process must need a CPU."""
BATCHES_PER_WORKER: Final = 2
"""Requested and prefetched batches per worker above which more prefetching would not keep the workers busier."""
MIN_SECONDS: Final = 2.0
"""Loading time in seconds before the first diagnosis."""
MAX_WORKERS: Final = 1024
"""Maximum of the setting `num_workers`."""


class Finding(NamedTuple):
    """Bottleneck with its certainty, if all measurements are available."""

    bottleneck: Bottleneck
    certainty: float
    text: str
    """Cause and remedy."""


def diagnose(consumer: ConsumerRates, pool: PoolLoad) -> Diagnosis:
    """Diagnose the bottleneck of a training loop, with advice to the user.

    The recommended number of workers suffices for all consumers of the pool.
    """
    parts = split(consumer)
    evidence = advice.measurements(consumer, pool, parts)
    if consumer.is_finished:
        return Diagnosis("finished", None, "The epoch is finished.", 1.0)
    if consumer.idle > WINDOW:
        return Diagnosis("idle", None, f"No request for {consumer.idle:.0f} s.", 1.0)
    if consumer.known_for < MIN_SECONDS:
        return Diagnosis("unknown", None, f"A diagnosis needs {MIN_SECONDS:g} s of loading.")
    if not consumer.batch_rate and not consumer.starved_fraction:
        return Diagnosis("unknown", None, "No batch was sent recently.")
    needed = needed_workers(pool)
    finding = _finding(consumer, pool, parts, needed)
    confidence = finding.certainty * _quality(consumer, pool)
    workers = needed
    if finding.bottleneck == "unknown" or consumer.is_unthrottled or consumer.data_wait_fraction is None:
        workers = None if finding.bottleneck != "training" else needed
    return Diagnosis(finding.bottleneck, workers, finding.text, round(confidence, 2), evidence)


def split(consumer: ConsumerRates) -> Parts:
    """Split the data wait into its parts."""
    wait, starved = consumer.data_wait_fraction, consumer.starved_fraction
    if wait is None:
        return Parts(starved, consumer.sending_fraction, 0.0)
    receiving = consumer.receiving
    if receiving is None:
        not_ready = min(wait, starved)
        return Parts(not_ready, wait - not_ready, 0.0)
    elsewhere = min(wait, receiving.elsewhere)
    pending = min(wait - elsewhere, receiving.pending)
    reading = min(wait - elsewhere - pending, receiving.reading)
    not_ready = min(pending, starved)
    in_transit, in_client = pending - not_ready, wait - elsewhere - pending - reading
    if is_contended(receiving):
        # each read waits for the GIL, so that bytes that have arrived seem to be in transit
        delayed = min(in_transit + reading, GIL_S * receiving.wakeups)
        return Parts(not_ready, in_transit + reading - delayed, in_client + delayed, elsewhere)
    if receiving.busy > 0 and receiving.cpu >= MAJORITY * receiving.busy:
        return Parts(not_ready, in_transit, in_client + reading, elsewhere)
    return Parts(not_ready, in_transit + reading, in_client, elsewhere)


def needed_workers(pool: PoolLoad) -> int | None:
    """Return the number of workers that meets the demand, or None if the demand is unknown or above `MAX_WORKERS`."""
    # a data wait below MIN_DATA_WAIT counts as keeping up
    needed = max(1, math.ceil(pool.demand * (1 - MIN_DATA_WAIT)))
    return needed if pool.demand > 0 and needed <= MAX_WORKERS else None


def is_straggling(consumer: ConsumerRates) -> bool:
    """Return True if a recent batch took much longer than the others, and such batches explain the wait."""
    slowest, typical = consumer.straggler, consumer.typical
    if slowest is None or typical is None or slowest.seconds < STRAGGLER_FACTOR * typical:
        return False
    return slowest.share >= MAJORITY * split(consumer).not_ready


def _quality(consumer: ConsumerRates, pool: PoolLoad) -> float:
    """Return the maximum confidence that the available measurements permit."""
    missing = {
        0.6: consumer.data_wait_fraction is None,
        0.75: consumer.receiving is None,
        0.8: pool.cpu is None,
        0.9: pool.machine.idle is None,
        0.95: pool.main.cpu is None,
    }
    known = 0.7 + 0.3 * min(1.0, consumer.known_for / WINDOW)
    return known * math.prod(factor for factor, is_missing in missing.items() if is_missing)


def _finding(consumer: ConsumerRates, pool: PoolLoad, parts: Parts, needed: int | None) -> Finding:
    wait = consumer.data_wait_fraction
    if wait is None:
        if max(parts) < MAJORITY:
            return Finding("training", 1 - max(parts), advice.training(consumer, pool, needed))
        largest, certainty = max(parts), max(parts)
    elif wait < MIN_DATA_WAIT:
        return Finding("training", 1 - 0.5 * wait / MIN_DATA_WAIT, advice.training(consumer, pool, needed))
    else:
        largest = max(parts)
        sure = 0.6 + 0.4 * min(1.0, (wait - MIN_DATA_WAIT) / (SURE_DATA_WAIT - MIN_DATA_WAIT))
        certainty = sure * largest / wait
        if largest < MAJORITY * wait:
            return _of_several(consumer, pool, parts, wait)
    if parts.elsewhere == largest:
        return Finding("unknown", 0.0, advice.elsewhere(consumer))
    if parts.not_ready == largest:
        cause = _of_unready(consumer, pool, needed)
    elif parts.in_client == largest:
        is_gil = consumer.receiving is not None and is_contended(consumer.receiving)
        cause = Finding("client", 1.0, advice.client(consumer, is_contended=is_gil))
    else:
        cause = _of_transit(consumer, pool, parts)
    return cause._replace(certainty=cause.certainty * certainty)


def _of_several(consumer: ConsumerRates, pool: PoolLoad, parts: Parts, wait: float) -> Finding:
    """Explain a wait without a main part: CPUs that are full delay workers, main process and client alike."""
    computing = ((pool.cpu or 0.0) + pool.cpu_wait) / pool.load if pool.load else 0.0
    main = min(1.0, (pool.main.cpu or 0.0) + (pool.main.cpu_wait or 0.0))
    of_cpus = parts.not_ready * min(1.0, computing) + parts.in_transit * main
    if _has_no_cpu(pool) and of_cpus >= STARVED * wait:
        return Finding("machine", of_cpus / wait, _machine_advice(consumer, pool))
    return Finding("unknown", 0.0, advice.unexplained(consumer, parts))


def _has_no_cpu(pool: PoolLoad) -> bool:
    """Return True if the CPUs of the machine are full, or the quota is used up."""
    machine = pool.machine
    return (machine.idle is not None and machine.idle < MIN_IDLE) or _is_throttled(pool)


def _is_throttled(pool: PoolLoad) -> bool:
    return (pool.machine.throttled or 0.0) >= THROTTLED


def _machine_advice(consumer: ConsumerRates, pool: PoolLoad) -> str:
    return advice.machine(consumer, pool, is_throttled=_is_throttled(pool))


def is_contended(receiving: Receiving) -> bool:
    """Return True if other threads of the training process hold the GIL while its training loop waits."""
    return receiving.late >= LATE and receiving.others >= OTHERS


# -- batches that are not ready


def _of_unready(consumer: ConsumerRates, pool: PoolLoad, needed: int | None) -> Finding:
    """Explain why batches are not ready when they are requested."""
    if pool.busy >= WORKERS_BUSY:
        return _of_workers(consumer, pool, needed)
    if pool.memory_full >= MEMORY_FULL:
        return Finding("memory", 0.5 + 0.5 * pool.memory_full, advice.memory(consumer, pool))
    if _is_main_process_full(pool):
        return _of_main_process(consumer, pool)
    if pool.load >= MAJORITY * consumer.starved_fraction:
        return _of_latency(consumer, pool, needed)
    if (pool.main.cpu or 0.0) >= MAIN_LOADED:
        return Finding("server", 0.6, advice.server(consumer, pool))
    if (pool.main.cpu_wait or 0.0) >= MAIN_QUEUED:
        return _of_main_process(consumer, pool)
    return Finding("unknown", 0.0, advice.idle_workers(consumer, pool))


def _of_workers(consumer: ConsumerRates, pool: PoolLoad, needed: int | None) -> Finding:
    """Explain why the workers are busy: they compute, are blocked, or have no CPU."""
    load = pool.load
    if pool.cpu is None or load <= 0:
        return Finding("workers", 0.8, advice.workers(consumer, pool, needed))
    queued = min(pool.cpu_wait, load)
    computing = min(pool.cpu, load - queued)
    blocked = load - computing - queued
    short = queued + (computing if _has_no_cpu(pool) else 0.0)
    if short >= MAJORITY * load:
        return Finding("machine", short / load, _machine_advice(consumer, pool))
    if blocked >= MAJORITY * load:
        return Finding("io", blocked / load, advice.blocked(consumer, pool, needed))
    if computing >= MAJORITY * load:
        return Finding("workers", (computing + queued) / load, advice.workers(consumer, pool, needed))
    return Finding("unknown", 0.0, advice.mixed(consumer, pool))


def _of_latency(consumer: ConsumerRates, pool: PoolLoad, needed: int | None) -> Finding:
    """Explain a wait for single batches, while other workers are idle."""
    of_workers = _of_workers(consumer, pool, needed)
    if of_workers.bottleneck == "machine":
        return of_workers
    if _has_no_cpu(pool) and (pool.main.cpu_wait or 0.0) >= MAIN_QUEUED:
        return _of_main_process(consumer, pool)
    if is_straggling(consumer):
        label: Bottleneck = "io" if of_workers.bottleneck == "io" else "workers"
        return Finding(label, 0.8, advice.straggler(consumer, pool))
    if consumer.window > BATCHES_PER_WORKER * max(1, pool.workers):
        # batches wait for workers, which are idle only until the next one is assigned
        return of_workers._replace(certainty=0.75 * of_workers.certainty)
    return Finding("prefetch", 0.75, advice.prefetch(consumer, pool))


# -- the main process, and the network


def _is_main_process_full(pool: PoolLoad) -> bool:
    """Return True if the main process computes all the time, or is often late.

    A single late timer is a lag of the event loop, too; a thread that rarely has work delays nothing.
    """
    main = pool.main
    is_active = main.cpu is None or main.cpu + (main.cpu_wait or 0.0) >= MAIN_ACTIVE
    return (main.lag >= SLOW_EVENT_LOOP_S and is_active) or (main.cpu or 0.0) >= MAIN_BUSY


def _of_main_process(consumer: ConsumerRates, pool: PoolLoad) -> Finding:
    """Explain why the main process is late: it computes, or has no CPU."""
    computes, waits = pool.main.cpu or 0.0, pool.main.cpu_wait or 0.0
    if waits >= MAIN_QUEUED and waits >= computes:
        return Finding("machine", 0.9, _machine_advice(consumer, pool))
    return Finding("server", 0.9, advice.server(consumer, pool))


def _of_transit(consumer: ConsumerRates, pool: PoolLoad, parts: Parts) -> Finding:
    """Explain why ready batches do not arrive."""
    link, receiving = consumer.link, consumer.receiving
    is_slow = receiving is not None and receiving.reading >= MAJORITY * parts.in_transit
    # an event loop that lags delays the start of a response, and not its bytes
    if (pool.main.cpu or 0.0) >= MAIN_BUSY or (_is_main_process_full(pool) and not is_slow):
        return _of_main_process(consumer, pool)
    # a kernel without idle CPUs acknowledges late, and the peer retransmits what was not lost
    if not _has_no_cpu(pool) and link is not None and (link.retransmitted or 0.0) >= LOSS:
        return Finding("network", 0.95, advice.loss(consumer))
    if receiving is not None and not is_slow:
        return Finding("network", 0.9, advice.delay(consumer, pool))
    return Finding("network", 0.95, advice.rate(consumer))
