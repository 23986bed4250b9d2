"""Schedule of faults and their targets: a pure function of a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Final

SERVERS: Final = 2
CONSUMERS: Final = 4
GAPS: Final = (0.1, 1.0)
"""Minimum and maximum time between the starts of two faults, in seconds."""
MAX_AWAY: Final = 4.0
"""Maximum time in seconds for which a fault itself makes a server unavailable."""
DOUBLE: Final = 0.3
"""Probability that a server becomes unavailable although the other one has not recovered."""


class Kind(StrEnum):
    """Kind of fault."""

    WORKER_KILL = "worker killed"
    WORKER_STOP = "worker stopped"
    WORKERS_KILL = "all workers killed"
    FORKSERVER_KILL = "fork server killed"
    SERVER_KILL = "server killed, restarted"
    SERVER_DRAIN = "server drained, restarted"
    SERVER_STOP = "server stopped"
    RESET = "reset in mid-frame"
    CUT = "cut in mid-frame"
    CORRUPT = "bit flipped"
    DUPLICATE = "bytes doubled"
    LATENCY = "latency"
    BANDWIDTH = "narrow line"
    STALL = "black hole"
    STORM = "connections dropped"
    MEMORY = "memory filled"
    GARBAGE = "hostile connection"
    CONSUMER_KILL = "consumer killed, resumed"


RETURN: Final = {
    Kind.FORKSERVER_KILL: 2.0,
    Kind.SERVER_KILL: 3.0,
    Kind.SERVER_DRAIN: 3.0,
    Kind.SERVER_STOP: 1.0,
    Kind.STALL: 1.0,
}
"""Faults that make a server unavailable, and the seconds in which it should recover afterwards."""
MAX_BOTH_AWAY: Final = MAX_AWAY + max(RETURN.values())
"""Maximum time in seconds without any server; the clients' reconnect_timeout must be longer."""
LASTING: Final = {
    Kind.WORKER_STOP: (1.0, 5.0),
    Kind.SERVER_KILL: (0.0, 3.0),
    Kind.SERVER_DRAIN: (0.0, 2.0),
    Kind.SERVER_STOP: (0.5, MAX_AWAY),
    Kind.LATENCY: (0.5, 3.0),
    Kind.BANDWIDTH: (0.5, 3.0),
    Kind.STALL: (0.5, MAX_AWAY),
    Kind.STORM: (0.2, 1.0),
    Kind.MEMORY: (1.0, 4.0),
}
"""Minimum and maximum duration in seconds, for faults that are not instantaneous."""


ROUND: Final = (*Kind, *[Kind.CONSUMER_KILL] * (CONSUMERS - 1))
"""Faults that all occur, in random order, before any of them occurs again."""


@dataclass(frozen=True)
class Fault:
    """Fault of one server or consumer."""

    at: float
    """Seconds after the start of the run."""
    kind: Kind
    target: int
    """Index of the server or consumer."""
    seconds: float
    """Duration in seconds."""
    seed: int
    """Seed of the fault's other random choices."""

    @property
    def who(self) -> str:
        """Name of the target."""
        return f"{'consumer' if self.kind is Kind.CONSUMER_KILL else 'server'} {self.target}"

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.at:7.2f} s  {self.who:<10}  {self.kind}{lasting}"


def faults(seed: int) -> Iterator[Fault]:
    """Yield the faults of a seed without end.

    Each kind comes once in a `ROUND`, and each consumer is killed once.
    """
    rng = random.Random(seed)
    back = [0.0] * SERVERS
    """Time at which each server should be available again."""
    now = 0.0
    while True:
        consumers = rng.sample(range(CONSUMERS), CONSUMERS)
        for kind in rng.sample(ROUND, len(ROUND)):
            now += rng.uniform(*GAPS)
            seconds = rng.uniform(*LASTING[kind]) if kind in LASTING else 0.0
            target = rng.randrange(SERVERS)
            if kind is Kind.CONSUMER_KILL:
                target = consumers.pop()
            elif kind in RETURN:
                both = rng.random() < DOUBLE
                now = max(now, back[target] if both else max(back))
                back[target] = now + seconds + RETURN[kind]
            elif back[target] > now:
                target = back.index(min(back))  # there is nothing to break at a server that is away
            yield Fault(round(now, 3), kind, target, round(seconds, 3), rng.getrandbits(32))


def plan(seed: int, seconds: float) -> list[Fault]:
    """Return the faults of a seed that start within `seconds`."""
    return list(takewhile(lambda fault: fault.at <= seconds, faults(seed)))
