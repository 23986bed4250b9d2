"""What holds a consumer back, and how many workers would not: a function of a few numbers.

- The loop hardly waits for data (`LOOP_WAITS`): it is the trainer, or a balance when the workers hardly rest.
- It waits, and meanwhile what it had asked for was not ready on the server: the loader.
- It waits, and what it asked for was ready: the network.

How long the loop waits is known to the client only. Of one that does not say it, the server knows whether what it asks
for is ready, and whether an answer is on its way: what takes most of the time is it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from teleloader_shared.stats import WINDOW, Diagnosis
from teleloader_shared.units import number, seconds

LOOP_WAITS: Final = 0.05
"""Share of the time from which on a loop that waits for data is held back."""
SERVERS_SHARE: Final = 0.5
"""From this share of that time on, the server is seen to be late with the batches; else the network is."""
MOST: Final = 0.5
"""What takes this share of the time holds a consumer back whose client does not say how long its loop waits."""
WORKERS_BUSY: Final = 0.8
"""Workers that are at work for this share of the time hardly rest."""
CPUS_BUSY: Final = 0.8
"""Processors that are used to this share are the limit, whatever the number of workers."""
LEAST_SECONDS: Final = 2.0
"""For how long a consumer must be known."""
LEAST_OWN_SHARE: Final = 0.05
"""A loop that has less of the time for itself takes batches as fast as they come: no number of workers is enough."""
LEAST_PACE: Final = 0.01
"""Batches a second from which on they come at all."""
MAX_WORKERS: Final = 1024
"""What a server can be told to have."""
WORKERS_PER_CPU: Final = 4
"""More are not advised at once: whether so many wait for their data, and not for a processor, will have to show."""
IDLE_GRACE_S: Final = 2.0
"""Seconds without an ask after which a loop is over, or does something else, unless it is slow:"""
IDLE_GRACE_BATCHES: Final = 20
"""so many batches it may have ahead."""
LATE_LOOP: Final = 0.01
"""Seconds by which the server's event loop is late when its own process is what requests wait for."""


class ConsumerRates(NamedTuple):
    """What is seen of one consumer; rates and shares are recent."""

    known_for: float
    """Seconds, of its passes together."""
    idle: float
    """Seconds since it asked last; 0 while it waits for an answer."""
    pace: float
    """Batches a second that it is sent."""
    nbytes: float
    """Bytes a second."""
    waiting: float
    """Share of the time for which what it had asked for was not ready."""
    sending: float
    """Share of the time for which an answer was being sent."""
    loop_waiting: float | None
    """Share of the time for which its loop waited, if it says so."""
    stages: Mapping[str, float]
    """Seconds that a worker spends on one of its batches, on average: in fetch, collate and encode."""

    @property
    def demand(self) -> float:
        """How many workers its loop would keep busy if it never waited; what it gets now, where that is not known."""
        own = 1.0 if self.loop_waiting is None or self.takes_all else 1.0 - self.loop_waiting
        return self.pace / own * sum(self.stages.values())

    @property
    def goes_on(self) -> bool:
        """Whether its loop will ask for more, as it seems; one that takes long steps asks seldom."""
        return self.pace > 0 and self.idle <= min(WINDOW, max(IDLE_GRACE_S, IDLE_GRACE_BATCHES / self.pace))

    @property
    def takes_all(self) -> bool:
        """Whether its loop takes batches as fast as they come."""
        return self.loop_waiting is not None and 1.0 - self.loop_waiting < LEAST_OWN_SHARE


class PoolLoad(NamedTuple):
    """The workers that make a consumer's batches, and the server that they belong to."""

    workers: int
    """How many; 0 for the server's own process."""
    busy: float
    """Recent share of the time for which they were at work."""
    demand: float
    """How many the loops of all their consumers would keep busy together if they never waited; see `total_demand`."""
    consumers: int
    """How many these are, now."""
    setting: str
    """What sets the number of workers: ``{}`` stands for it."""
    cpus: int
    """Processors of the server."""
    cpu: float
    """How many of them it uses."""
    event_loop_lag: float
    """Seconds by which its event loop is late."""


def total_demand(demands: Iterable[tuple[object, float]]) -> float:
    """The demand of several consumers, each with what its batches are: those that share them need them made once."""
    highest: dict[object, float] = {}
    for run, demand in demands:
        highest[run] = max(demand, highest.get(run, 0.0))
    return sum(highest.values())


def diagnose(seen: ConsumerRates, by: PoolLoad) -> Diagnosis:
    """What holds a consumer back.

    The number of workers is what all consumers of these workers need together: more consumers, more workers.
    """
    if seen.idle > WINDOW:
        return Diagnosis("unknown", None, f"It has asked for nothing for {seen.idle:.0f} s.")
    if seen.known_for < LEAST_SECONDS:
        return Diagnosis("unknown", None, "It is too early to say.")
    needed = _needed(by)
    if seen.loop_waiting is None:
        late, slow = seen.waiting >= MOST, seen.sending >= MOST
    else:
        held_back = seen.loop_waiting >= LOOP_WAITS
        late = held_back and seen.waiting >= SERVERS_SHARE * seen.loop_waiting
        slow = held_back and not late
    if late:
        return _loader_bound(seen, by, needed)
    if slow:
        return Diagnosis("network", needed, _of_network(seen, by))
    return _loop_bound(seen, by, needed)


def _needed(by: PoolLoad) -> int | None:
    """How many workers would keep up; None where that is not known, or more than can be."""
    # a loop that waits for less than that is kept up with
    needed = max(1, math.ceil(by.demand * (1 - LOOP_WAITS)))
    return needed if by.demand > 0 and needed <= MAX_WORKERS else None


def _loader_bound(seen: ConsumerRates, by: PoolLoad, needed: int | None) -> Diagnosis:
    if seen.loop_waiting is None or seen.takes_all:
        needed = None
    waits = _waits(seen, "for batches that are not ready")
    if _has_other_causes(seen, by):
        enough = needed if needed is not None and needed <= by.workers else None
        return Diagnosis(
            "loader", enough, f"{waits}, though the workers rest {_percent(1 - by.busy)} of it: {_others(by)}."
        )
    return Diagnosis("loader", needed, f"{waits}{_of_workers(seen, by, needed)}, or {_faster(seen.stages)}.")


def _has_other_causes(seen: ConsumerRates, by: PoolLoad) -> bool:
    """Whether most of what it waits for is not the workers' work: all together they are at work for less time."""
    return by.workers > 0 and seen.pace >= LEAST_PACE and by.busy * by.workers < SERVERS_SHARE * seen.waiting


def _others(by: PoolLoad) -> str:
    """What helps where the workers' work is not what is waited for."""
    if by.event_loop_lag >= LATE_LOOP:
        return _late(by)
    return (
        "more or faster ones help little, but longer epochs (each begins with a wait), larger batches where they are "
        "tiny, or more ahead (prefetch_factor) where other programs take the processors"
    )


def _late(by: PoolLoad) -> str:
    return f"the server's own process is late by {1000 * by.event_loop_lag:.0f} ms, so add another server"


def _of_workers(seen: ConsumerRates, by: PoolLoad, needed: int | None) -> str:
    """How many workers would do, and what helps where there are as many."""
    if seen.takes_all and seen.pace >= LEAST_PACE:
        return f" and takes all that come: {_enough_for(seen, by)}"
    if needed is None:
        return f": more workers ({by.setting.format('N')}) make more"
    if needed > by.workers:
        return f": {_workers(needed)}{_instead(by, needed)}"
    ahead = "let more be fetched ahead (prefetch_factor), for those that take longer"
    return f", though {_workers(needed)} would do on average: {_late(by) if by.event_loop_lag >= LATE_LOOP else ahead}"


def _instead(by: PoolLoad, needed: int) -> str:
    """Whether to have so many workers, who are more than there are."""
    whom = "keep up" if by.consumers == 1 else f"keep up with all {by.consumers} consumers"
    if needed > by.cpus and by.cpu >= CPUS_BUSY * by.cpus:
        return f" would {whom}, but {_processors(by)} are busy already: add another server"
    if needed > (most := WORKERS_PER_CPU * by.cpus):
        at_once = max(most, by.workers)
        return (
            f" would {whom}, which are many for {_processors(by)}: try {at_once} and look again "
            f"({by.setting.format(at_once)})"
        )
    instead = f" instead of {by.workers}" if by.workers else ""
    return f"{instead} would {whom} ({by.setting.format(needed)})"


def _enough_for(seen: ConsumerRates, by: PoolLoad) -> str:
    """What the workers can do, for a loop that shows no limit of its own."""
    makers = _workers(by.workers) if by.workers else "the server's own process"
    shared = f" for it, one of {by.consumers} consumers," if by.consumers > 1 else ""
    now = f"{makers} make{'s' if by.workers < 2 else ''}{shared} {number(seen.pace)} batches/s"
    enough = f"enough for training steps of {seconds(1 / seen.pace)}"
    if by.cpu >= CPUS_BUSY * by.cpus:
        return f"{now}, {enough}, with {_processors(by)} busy; for shorter ones add another server"
    twice = 2 * max(1, by.workers)
    return f"{now}, {enough}; for steps of half that it takes {twice} ({by.setting.format(twice)})"


def _processors(by: PoolLoad) -> str:
    return f"the machine's {by.cpus} processors" if by.cpus > 1 else "the machine's processor"


def _of_network(seen: ConsumerRates, by: PoolLoad) -> str:
    waits = _waits(seen, "though batches are ready") if seen.loop_waiting is not None else "Answers are on their way "
    if seen.loop_waiting is None:
        waits += f"{_percent(seen.sending)} of the time"
    if by.event_loop_lag >= LATE_LOOP:
        return f"{waits}: {_late(by)}."
    return (
        f"{waits}: {seen.nbytes / 1e6:,.1f} MB/s arrive; if the network carries no more, use a faster one or send less "
        "(smaller dtypes, compression), else the way is long: let more be fetched ahead (prefetch_factor), and epochs "
        "be longer."
    )


def _loop_bound(seen: ConsumerRates, by: PoolLoad, needed: int | None) -> Diagnosis:
    if not seen.pace:
        return Diagnosis("unknown", None, "It was sent no batch lately.")
    waits = "Its batches are ready when it asks" if seen.loop_waiting is None else _waits(seen, "for data")
    workers = needed if by.workers else 0
    if by.busy >= WORKERS_BUSY:
        busy = f"the workers are busy {_percent(by.busy)} of it"
        return Diagnosis("balanced", workers, f"{waits}, and {busy}: nothing is to be gained.")
    fewer = f": {_workers(needed)} would do" if needed is not None and needed < by.workers else ""
    return Diagnosis(
        "training", workers,
        f"{waits}, and the workers rest {_percent(1 - by.busy)} of it, so training is the bottleneck{fewer}.",
    )  # fmt: skip


def _faster(stages: Mapping[str, float]) -> str:
    """What to make faster."""
    whole = sum(stages.values())
    if not whole:
        return "make its samples faster"
    longest = max(stages, key=lambda stage: stages[stage])
    return f"make the {longest} faster, which takes {_percent(stages[longest] / whole)} of a batch's time"


def _waits(seen: ConsumerRates, why: str) -> str:
    if seen.loop_waiting is None:
        return f"What it asks for is not ready {_percent(seen.waiting)} of the time"
    return f"The loop waits {_percent(seen.loop_waiting)} of the time {why}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _workers(count: int) -> str:
    return f"{count} worker" if count == 1 else f"{count} workers"
