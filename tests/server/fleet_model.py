"""Model of a fleet under an autoscaler: nodes with CPUs, servers that take time to start, training loops."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from teleloader_server.fleet.scaler import Report, Scaler
from teleloader_server.stats.demand import ConsumerLoad, demand, is_saturated

EMPTY_STEP: Final = 1e-5
"""Seconds of a step of a loop that does nothing."""
LOOK_S: Final = 5.0
"""Seconds between two decisions."""
START_S: Final = 15.0
"""Seconds until a server reports."""


@dataclass
class Loop:
    """A training loop with an epoch of its own."""

    workers: Callable[[float], float]
    """Workers that it would keep busy at a time if it never waited; 0 while it pauses, infinite for an empty loop."""
    work: float = 2.0
    """Seconds of a worker per batch."""
    since: float | None = None
    """Time of its first batch after a pause."""


@dataclass
class Node:
    """A machine."""

    cpus: float
    others: float = 0.0
    """CPUs that other programs use."""
    is_filled: bool = False
    """True if other programs of lower priority use all CPUs that are left."""


@dataclass
class Running:
    """A server."""

    name: str
    node: str
    ready_at: float


@dataclass
class Fleet:
    """A fleet whose servers are started and ended as the scaler decides."""

    scaler: Scaler
    num_workers: int
    nodes: dict[str, Node]
    loops: list[Loop]
    noise: float = 0.0
    """Relative error of the measurements."""
    now: float = 0.0
    running: list[Running] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    """Numbers of servers that should run."""
    served: float = 1.0
    """Fraction of the demand of measured loops that is met."""
    silent: set[str] = field(default_factory=set)
    """Servers that do not respond to the scaler."""
    _started: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self, seconds: float) -> None:
        """Let a time pass."""
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_S
            decision = self.scaler.decide(self.reports(), self.now)
            self.history.append(decision.servers)
            self.running = [server for server in self.running if server.name not in decision.drain]
            while len(self.running) < decision.servers and self._start(decision.avoid):
                pass
            del self.running[decision.servers :]  # pending ones that are not needed any more

    @property
    def changes(self) -> int:
        """Number of changes of the number of servers."""
        return sum(a != b for a, b in zip(self.history, self.history[1:], strict=False))

    def _start(self, avoid: frozenset[str]) -> bool:
        """Start a server on the node with the fewest servers; return False if there is none."""
        counts = {name: sum(server.node == name for server in self.running) for name in self.nodes if name not in avoid}
        if not counts:
            return False
        self._started += 1
        node = min(counts, key=lambda name: counts[name])
        self.running.append(Running(f"server-{self._started}", node, self.now + START_S))
        return True

    def reports(self) -> dict[str, Report | None]:
        """Return the reports of the servers, after consumers have adapted to them."""
        ready = [server for server in self.running if server.ready_at <= self.now]
        if not ready:
            return {}
        capacity = {server.name: self._capacity(server, ready) for server in ready}
        wishes = [loop.workers(self.now) for loop in self.loops]
        measured = sum(wish for wish in wishes if wish != float("inf"))
        total = sum(capacity.values())
        empty = sum(wish == float("inf") for wish in wishes)
        share = min(1.0, total / (1 + (empty > 0)) / measured) if measured else 1.0  # empty loops take half at least
        self.served = share
        idle = total - measured * share
        used = [idle / empty if wish == float("inf") else wish * share for wish in wishes]
        return {
            server.name: None if server.name in self.silent else self._report(
                server, capacity[server.name] / total, used, capacity[server.name], sum(used)
            )
            for server in ready
        }  # fmt: skip

    def _capacity(self, server: Running, ready: list[Running]) -> float:
        """Return the workers of a server that find a CPU."""
        node = self.nodes[server.node]
        there = sum(other.node == server.node for other in ready)
        return max(0.1, min(self.num_workers, (node.cpus - node.others) / there))

    def _report(self, server: Running, part: float, used: list[float], capacity: float, total: float) -> Report:
        """Return the report of a server that serves a part of each loop."""
        loads = []
        for loop, load in zip(self.loops, used, strict=True):
            wish = loop.workers(self.now)
            if load <= 0:
                loop.since = None
                continue
            if loop.since is None:
                loop.since = self.now
            rate = load / loop.work * self._random.uniform(1 - self.noise, 1 + self.noise)
            step = EMPTY_STEP if wish == float("inf") else loop.work / wish
            wait = max(0.0, 1 - rate * step)
            loads.append(ConsumerLoad(id(loop), part * rate, wait, step, self.now - loop.since, loop.work))
        load = part * total
        found = demand(loads, load)
        # at full load each worker has a task; below, a task finds a CPU
        busy = self.num_workers if load > 0.95 * capacity else load
        node = self.nodes[server.node]
        there = sum(other.node == server.node and other.ready_at <= self.now for other in self.running)
        idle = 0.0 if node.is_filled else 1 - (node.others + load * there) / node.cpus
        full = is_saturated(busy, load, idle)
        return Report(server.node, self.num_workers, found.total, found.unmeasured, busy, load, full)
