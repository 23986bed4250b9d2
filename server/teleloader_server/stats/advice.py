"""Texts of diagnoses: the measured cause, and the setting to change with its value. Pure functions.

A text recommends a setting only if it exists for the consumer, and only values that were not reached.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, Literal

from teleloader_server.stats.evidence import ConsumerRates, Parts, PoolLoad
from teleloader_shared.messages import READY_BYTES
from teleloader_shared.stats import Measurement
from teleloader_shared.units import number, seconds, size

CPUS_BUSY: Final = 0.8
"""CPU utilization above which additional workers would not increase the throughput."""
HARDLY_FASTER: Final = 0.8
"""Busy fraction of the workers above which loading is hardly faster than training."""
SMALL_BATCH_S: Final = 0.0005
"""Median computing time of a batch in seconds below which its transport takes more CPU time than its computation."""
MIN_BATCH_RATE: Final = 0.01
"""Batches/s below which a consumer counts as receiving no batches."""
WORKERS_PER_CPU: Final = 4
"""Maximum recommended workers per CPU: only a trial shows whether further workers would wait for I/O or for CPUs."""
MAX_PREFETCH_FACTOR: Final = 256
"""Maximum recommended prefetch factor: above it, prefetching does not hide the latency."""
MIN_COMPUTING: Final = 0.5
"""CPU share of the receiving threads below which they mostly wait."""


# -- workers


def workers(consumer: ConsumerRates, pool: PoolLoad, needed: int | None) -> str:
    """Return the text for workers that compute."""
    return f"{_waits(consumer)} for batches that workers compute{_enough(consumer, pool, needed)}"


def blocked(consumer: ConsumerRates, pool: PoolLoad, needed: int | None) -> str:
    """Return the text for workers that are blocked."""
    idle = max(0.0, pool.load - (pool.cpu or 0.0) - pool.cpu_wait) / max(pool.load, 1e-9)
    what = f"whose workers are blocked {_percent(idle)} of their time (by disks, networks, locks or sleep)"
    return f"{_waits(consumer)} for batches {what}{_enough(consumer, pool, needed)}"


def mixed(consumer: ConsumerRates, pool: PoolLoad) -> str:
    """Return the text for workers whose time has no main cause."""
    computing, queued = pool.cpu or 0.0, pool.cpu_wait
    rest = max(0.0, pool.load - computing - queued)
    return (
        f"{_waits(consumer)} for batches that are not ready. Of {number(pool.load)} busy workers, {number(computing)} "
        f"compute, {number(rest)} are blocked, and {number(queued)} wait for a CPU."
    )


def machine(consumer: ConsumerRates, pool: PoolLoad, *, is_throttled: bool) -> str:
    """Return the text for CPUs that are full."""
    found, cpus = pool.machine, _cpus(pool)
    if is_throttled and found.throttled is not None:
        quota = "" if found.quota is None else f" of {number(found.quota)} CPUs"
        return (
            f"{_waits(consumer)}, and the CPU quota{quota} of the server's container throttles it in "
            f"{_percent(found.throttled)} of the periods: increase the quota (docker run --cpus, "
            "resources.limits.cpu in Kubernetes), or add another server."
        )
    others = found.others or 0.0
    queued = f"{number(pool.cpu_wait)} of {_workers(pool.workers)} {'wait' if pool.workers > 1 else 'waits'} for a CPU"
    if others > found.own:
        return (
            f"{_waits(consumer)}, and other programs use {number(others)} of {cpus}, so that {queued}: stop them, or "
            "run the server on another machine."
        )
    full = f"{_waits(consumer)}, and the server uses {number(found.own)} of {cpus}, so that more workers would not help"
    if consumer.typical is not None and consumer.typical < SMALL_BATCH_S:
        return (
            f"{full}. A worker computes a batch in {seconds(consumer.typical)}, so that most of the CPU time is "
            "overhead per batch: use larger batches (batch_size= of the DataLoader), or add another server."
        )
    return f"{full}: add another server, or {_faster(consumer)}."


def straggler(consumer: ConsumerRates, pool: PoolLoad) -> str:
    """Return the text for single batches that take much longer than others."""
    found, typical = consumer.straggler, consumer.typical
    if found is None or typical is None:
        return prefetch(consumer, pool)
    what = f"batch {found.batch}" if found.sample is None else f"sample {found.sample}"
    more = _prefetch(consumer, pool, found.seconds)
    return (
        f"{_waits(consumer)} for slow batches: {what} took {seconds(found.seconds)}, and the median of all batches is "
        f"{seconds(typical)}. Speed up {'this batch' if found.sample is None else 'this sample'}"
        f"{'' if more is None else f', or {more}'}."
    )


def prefetch(consumer: ConsumerRates, pool: PoolLoad) -> str:
    """Return the text for batches that start too late."""
    idle = f"although workers are idle {_percent(1 - pool.busy)} of the time"
    longest = consumer.p99 or sum(consumer.stages.values())
    more = _prefetch(consumer, pool, 2 * longest)
    remedy = f"{more}, so that batches start earlier" if more is not None else _faster(consumer)
    return (
        f"{_waits(consumer)} for batches that are not ready, {idle}: {remedy}. If epochs are short, set "
        "prefetch_next_epoch=True of the DataLoader."
    )


def memory(consumer: ConsumerRates, pool: PoolLoad) -> str:
    """Return the text for a full memory budget."""
    return (
        f"{_waits(consumer)}, and the memory budget of {size(pool.memory_budget)} is full "
        f"{_percent(pool.memory_full)} of the time, so that batches are not computed ahead: double it "
        f"({_memory_setting(pool)})."
    )


def idle_workers(consumer: ConsumerRates, pool: PoolLoad) -> str:
    """Return the text for idle workers that no measurement explains."""
    return (
        f"{_waits(consumer)} for batches that are not ready, although workers are idle {_percent(1 - pool.busy)} of "
        "the time, and no measurement explains it. If epochs are short, set prefetch_next_epoch=True of the "
        "DataLoader; if a batch takes less than 1 ms, use larger batches."
    )


def _enough(consumer: ConsumerRates, pool: PoolLoad, needed: int | None) -> str:
    """Recommend a sufficient number of workers, or another remedy if the pool has as many already."""
    faster = _faster(consumer)
    if consumer.is_unthrottled and consumer.batch_rate >= MIN_BATCH_RATE:
        return f" and consumes each batch at once: {_throughput(consumer, pool)}, or {faster}."
    if needed is None or consumer.data_wait_fraction is None:
        return f": add workers ({_setting(pool, 'N')}), or {faster}."
    if needed > pool.workers:
        return f": {_workers(needed)}{_instead(pool, needed)}, or {faster}."
    more = _prefetch(consumer, pool, 2 * (consumer.p99 or 0.0))
    return f", although {_workers(needed)} would suffice on average: {'' if more is None else f'{more}, or '}{faster}."


def _instead(pool: PoolLoad, needed: int) -> str:
    """Recommend an increased number of workers, or another remedy if the CPUs are busy."""
    keep_up = "keep up" if pool.consumers == 1 else f"keep up with all {pool.consumers} consumers"
    if needed > pool.machine.cpus and pool.machine.own >= CPUS_BUSY * pool.machine.cpus:
        verb = "is" if pool.machine.cpus == 1 else "are"
        return f" would {keep_up}, but {_cpus(pool)} {verb} already busy: add another server"
    if needed > (most := WORKERS_PER_CPU * pool.machine.cpus):
        first = max(most, 2 * pool.workers)
        if first < needed:
            return f" would {keep_up}, many more than {_cpus(pool)}: try {first} first ({_setting(pool, first)})"
    instead = f" instead of {pool.workers}" if pool.workers else ""
    return f"{instead} would {keep_up} ({_setting(pool, needed)})"


def _throughput(consumer: ConsumerRates, pool: PoolLoad) -> str:
    """Describe the throughput of the workers, for a training loop that consumes batches as fast as they arrive."""
    who = _workers(pool.workers) if pool.workers else "the server's own process"
    share = f" for this one of {pool.consumers} consumers" if pool.consumers > 1 else ""
    verb = "computes" if pool.workers < 2 else "compute"
    now = f"{who} {verb} {number(consumer.batch_rate)} batches/s{share}"
    enough = f"enough for training steps of {seconds(1 / consumer.batch_rate)}"
    if pool.machine.own >= CPUS_BUSY * pool.machine.cpus:
        return f"{now}, {enough}, with {_cpus(pool)} busy; for shorter steps add another server"
    twice = 2 * max(1, pool.workers)
    return f"{now}, {enough}; steps of half that time need {twice} workers ({_setting(pool, twice)})"


def _faster(consumer: ConsumerRates) -> str:
    """Recommend speeding up the slowest stage."""
    total = sum(consumer.stages.values())
    if not total:
        return "speed up the samples"
    longest = max(consumer.stages, key=lambda stage: consumer.stages[stage])
    share = _percent(consumer.stages[longest] / total)
    return f"speed up the stage {longest!r}, which takes {share} of the time per batch"


# -- main process, network and client


def server(consumer: ConsumerRates, pool: PoolLoad) -> str:
    """Return the text for a main process that is busy."""
    main = pool.main
    if main.cpu is None or main.lag >= 2 * main.cpu:
        why = f"the event loop of the server's main process lags by {1000 * main.lag:.0f} ms"
    else:
        why = f"the server's main process computes {_percent(main.cpu)} of the time"
    another = "add another server"
    if pool.setting.startswith("--") and pool.machine.cpus > 1:
        another = f"start the server with --servers {pool.servers + 1}, which needs at least as many workers"
    return f"{_waits(consumer)}, and {why}: use larger batches (batch_size= of the DataLoader), or {another}."


def rate(consumer: ConsumerRates) -> str:
    """Return the text for responses that arrive slowly."""
    return (
        f"{_waits(consumer)}, although batches are ready: they arrive at {consumer.byte_rate / 1e6:,.1f} MB/s, as fast "
        f"as the network permits. Send fewer bytes ({_fewer_bytes(consumer)}), or use a faster network."
    )


def delay(consumer: ConsumerRates, pool: PoolLoad) -> str:
    """Return the text for responses that begin to arrive late."""
    link = consumer.link
    rtt = "" if link is None else f"; the round-trip time to the client or to a proxy is {seconds(link.rtt)}"
    large = consumer.batch_rate > 0 and consumer.byte_rate / consumer.batch_rate >= READY_BYTES / 2
    if large:  # a response carries one batch, and two are in flight, regardless of the prefetch window
        remedy = f"send fewer bytes ({_fewer_bytes(consumer)}), or run the server nearer to the client"
    else:
        latency = 1.0 if link is None else 4 * link.rtt
        more = _prefetch(consumer, pool, latency)
        nearer = "run the server nearer to the client"
        remedy = nearer if more is None else f"{more}, or {nearer}"
    return f"{_waits(consumer)}, although batches are ready: responses take long to arrive{rtt}. To hide it, {remedy}."


def loss(consumer: ConsumerRates) -> str:
    """Return the text for a network that loses packets."""
    lost = 0.0 if consumer.link is None else consumer.link.retransmitted or 0.0
    return (
        f"{_waits(consumer)}, although batches are ready: {100 * lost:.1f} % of the packets to the client are "
        "retransmitted. Check the network for errors and congestion (ss -ti, ethtool -S)."
    )


def client(consumer: ConsumerRates, *, is_contended: bool) -> str:
    """Return the text for batches that arrived, and were not delivered."""
    receiving = consumer.receiving
    waits = f"{_waits(consumer)}, although batches have arrived"
    if is_contended and receiving is not None:
        return (
            f"{waits}: other threads of the training process compute {number(receiving.others)} s/s meanwhile, and "
            "hold the GIL. Move their work to processes, or to libraries that release the GIL."
        )
    if receiving is not None and receiving.cpu >= MIN_COMPUTING * receiving.busy:
        return (
            f"{waits}: its receiving threads compute {number(receiving.cpu)} s/s to receive and decode "
            f"{consumer.byte_rate / 1e6:,.1f} MB/s. {_cheaper(consumer)}."
        )
    return (
        f"{waits}: the training process has no CPU for its receiving threads, or copies to its device take long "
        "(DataLoader.stats().copy). Give it more CPUs, or stop other programs on its machine."
    )


def _fewer_bytes(consumer: ConsumerRates) -> str:
    smaller = "smaller dtypes such as uint8"
    return smaller if consumer.is_compressed else f'{smaller}, or compression="zstd" of the DataLoader'


def _cheaper(consumer: ConsumerRates) -> str:
    """Recommend less work per received byte."""
    options = [
        *(["compression=None"] if consumer.is_compressed else []),
        *(["checksum=False"] if consumer.has_checksum else []),
    ]
    if not options:
        return "Send fewer bytes (smaller dtypes such as uint8), or use several training processes"
    return f"Set {' and '.join(options)} of the DataLoader, or send fewer bytes (smaller dtypes such as uint8)"


# -- training


def training(consumer: ConsumerRates, pool: PoolLoad, needed: int | None) -> str:
    """Return the text for a training loop that receives its batches in time."""
    if consumer.data_wait_fraction is None:
        waits = "Batches are ready when they are requested"
    else:
        waits = f"{_waits(consumer)} for data"
    if pool.busy >= HARDLY_FASTER:
        busy = f"the workers are busy {_percent(pool.busy)} of the time, so loading is hardly faster"
        return f"{waits}, so training is the bottleneck; {busy}."
    fewer = f": {_workers(needed)} would suffice" if needed is not None and needed < pool.workers else ""
    idle = f"the workers are idle {_percent(1 - pool.busy)} of the time"
    return f"{waits}, and {idle}, so training is the bottleneck{fewer}."


def elsewhere(consumer: ConsumerRates) -> str:
    """Return the text for a data wait that other servers cause."""
    return f"{_waits(consumer)}, mostly for other servers: run teleloader stats with the URLs of all servers."


def unexplained(consumer: ConsumerRates, parts: Parts) -> str:
    """Return the text for a data wait without a main cause."""
    return (
        f"{_waits(consumer)}, for several reasons: {_percent(parts.not_ready)} for batches that are not ready, "
        f"{_percent(parts.in_transit)} for batches in transit, and {_percent(parts.in_client)} for batches that have "
        "arrived."
    )


# -- measurements


def measurements(consumer: ConsumerRates, pool: PoolLoad, parts: Parts) -> list[Measurement]:
    """Return the measurements on which a diagnosis rests, for display."""
    return [Measurement(name, value) for name, value in _measured(consumer, pool, parts)]


def _measured(consumer: ConsumerRates, pool: PoolLoad, parts: Parts) -> Iterator[tuple[str, str]]:
    if consumer.data_wait_fraction is not None:
        yield "data wait", _percent(consumer.data_wait_fraction)
    yield "batches not ready", _percent(parts.not_ready)
    yield "batches in transit", _percent(parts.in_transit)
    yield "batches in the client", _percent(parts.in_client)
    if parts.elsewhere:
        yield "batches of other servers", _percent(parts.elsewhere)
    of = f" of {max(1, pool.workers)}"
    yield "workers busy", number(pool.load) + of
    if pool.cpu is not None:
        yield "workers computing", number(pool.cpu) + of
        yield "workers blocked", number(max(0.0, pool.load - pool.cpu - pool.cpu_wait)) + of
    yield "workers waiting for a CPU", number(pool.cpu_wait) + of
    yield from _of_machine(pool)
    if pool.memory_full:
        yield "memory budget full", _percent(pool.memory_full)
    if consumer.receiving is not None:
        yield "receiving threads computing", number(consumer.receiving.cpu)
        yield "other threads of the client computing", number(consumer.receiving.others)
        yield "waits that ended late", _percent(consumer.receiving.late)
    link = consumer.link
    if link is not None:
        yield "round-trip time", seconds(link.rtt)
        yield "delivery rate", f"{size(link.delivery_rate)}/s"
        if link.retransmitted is not None:
            yield "packets retransmitted", f"{100 * link.retransmitted:.2f} %"
        if link.busy is not None:
            yield "connection busy", _percent(link.busy)
        if link.unread is not None:
            yield "receive window full", _percent(link.unread)


def _of_machine(pool: PoolLoad) -> Iterator[tuple[str, str]]:
    machine, main = pool.machine, pool.main
    yield "CPUs used by the server", f"{number(machine.own)} of {machine.cpus}"
    if machine.others is not None:
        yield "CPUs used by other programs", f"{number(machine.others)} of {machine.cpus}"
    if machine.quota is not None:
        yield "CPU quota", number(machine.quota)
    if machine.throttled is not None:
        yield "throttled periods", _percent(machine.throttled)
    if machine.cpu_pressure is not None:
        yield "CPU pressure", _percent(machine.cpu_pressure)
    if machine.io_pressure is not None:
        yield "I/O pressure", _percent(machine.io_pressure)
    if main.cpu is not None:
        yield "main process computing", _percent(main.cpu)
    if main.cpu_wait is not None:
        yield "main process waiting for a CPU", _percent(main.cpu_wait)
    yield "event loop lag", seconds(main.lag)


# -- parts of sentences


def _prefetch(consumer: ConsumerRates, pool: PoolLoad, latency: float) -> str | None:
    """Recommend to prefetch as many batches as training consumes during a latency in seconds.

    Returns None if the client prefetches as many already, or if no prefetch factor suffices.
    """
    step = consumer.step
    if consumer.is_unthrottled or step <= 0:
        step = 0.5 / max(consumer.batch_rate, MIN_BATCH_RATE)
    batches = max(1 + math.ceil(min(1e9, latency / step)), 2 * consumer.window)
    factor = max(4, math.ceil(batches / max(1, pool.workers)))
    if factor > MAX_PREFETCH_FACTOR or factor * max(1, pool.workers) <= consumer.window:
        return None
    private = "" if pool.setting.endswith("of the DataLoader") else "num_workers=1 and "
    return f"prefetch more ({private}prefetch_factor={factor} of the DataLoader)"


def _setting(pool: PoolLoad, count: int | Literal["N"]) -> str:
    """Return the setting for a number of workers of this server."""
    if pool.servers == 1:
        return pool.setting.format(count)
    total = count if count == "N" else pool.servers * count
    return f"{pool.setting.format(total)}, divided among {pool.servers} servers"


def _memory_setting(pool: PoolLoad) -> str:
    """Return the setting for twice the memory budget."""
    twice = 2 * pool.memory_budget * pool.servers
    if pool.setting.endswith("of serve()"):
        return f"memory_budget={twice} of serve()"
    return f"--memory-budget {math.ceil(twice / 2**20)}MiB"


def _cpus(pool: PoolLoad) -> str:
    return f"the server's {pool.machine.cpus} CPUs" if pool.machine.cpus > 1 else "the server's only CPU"


def _waits(consumer: ConsumerRates) -> str:
    if consumer.data_wait_fraction is None:
        return f"Requested batches are not ready {_percent(consumer.starved_fraction)} of the time"
    return f"The training loop waits {_percent(consumer.data_wait_fraction)} of the time"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"
