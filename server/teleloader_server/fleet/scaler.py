"""Number of servers that a fleet needs. No I/O, no clock of its own.

The rules:

1. Servers are added at once: as many as have the workers that the consumers would keep busy (`/stats`: ``demand``).
2. A server whose machine has no idle CPU (``saturated``) counts with the fraction of its workers that finds a CPU.
   Servers on other nodes make up for the rest: another server on that node would only divide its CPUs.
3. Consumers whose demand is unknown may at most double the servers that the others need, or the minimum.
4. One server at a time is removed, and only down to the highest number that was needed within a window. A training
   loop that pauses for an evaluation or oscillates finds its servers again.
   If a removed server is needed again within the window, the window doubles (up to `MAX_WINDOW_S`) until a removal
   lasts: the capacity of a machine without spare CPUs is known only once its CPUs are full.
5. While a running server does not report, no server is removed: its consumers are unknown.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

TOLERANCE: Final = 0.05
"""Fraction of the demand that need not be met: a training loop that waits so little for data is not held back."""
UNMEASURED_FACTOR: Final = 2
"""Limit of the servers for consumers of unknown demand, as a multiple of those that are needed without them."""
WINDOW_S: Final = 300.0
"""Default of the window whose highest need counts when servers are removed (as Kubernetes' stabilization window)."""
MAX_WINDOW_S: Final = 3600.0
"""Limit of the window when it grows, unless its initial value is greater."""
STEP_S: Final = 30.0
"""Seconds between two removals."""


class Report(NamedTuple):
    """State of a running server, as ``/stats`` reports it."""

    node: str
    """Machine that it runs on."""
    num_workers: int
    demand: float
    """Workers that its consumers would keep busy."""
    unmeasured: float
    """Part of `demand` of consumers whose demand is unknown."""
    busy: float
    """Workers that have a task."""
    load: float
    """Those of them that compute or are blocked; the others wait for a CPU."""
    saturated: bool
    """True if its machine has no idle CPU."""

    @property
    def missing(self) -> float:
        """Workers that would find no CPU if all had a task."""
        waiting = max(0.0, 1 - self.load / self.busy) if self.busy > 0 else 0.0
        return self.num_workers * waiting if self.saturated else 0.0


class Decision(NamedTuple):
    """Servers that should run."""

    servers: int
    drain: frozenset[str]
    """Reported servers to drain and end."""
    avoid: frozenset[str]
    """Nodes on which no server should be started, because they have no idle CPU."""


class Scaler:
    """Controller of the number of servers, see the module.

    Args:
        minimum: Servers that always run, at least 1.
        maximum: Limit of the servers.
        servers: Servers at the start.
        now: Time of the start, in seconds of a monotonic clock.
        window: Initial window in seconds whose highest need counts when servers are removed.
    """

    def __init__(self, minimum: int, maximum: int, servers: int, now: float, window: float = WINDOW_S) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._servers = min(maximum, max(minimum, servers))
        self._needs: deque[tuple[float, int]] = deque([(now, self._servers)])
        """Times and numbers of needed servers within the window."""
        self._initial_window = self._window = window
        self._removed_at = -math.inf
        self._added_at = now

    def decide(self, reports: Mapping[str, Report | None], now: float) -> Decision:
        """Return the servers that should run.

        Args:
            reports: Reports of the running servers by name, None for those that do not respond. Without servers that
                are drained.
            now: The time.
        """
        running = [report for report in reports.values() if report is not None]
        needed = min(self._maximum, max(self._minimum, self._needed(running)))
        while self._needs and now - self._needs[0][0] > self._window:
            self._needs.popleft()
        self._needs.append((now, needed))
        highest = max(number for _, number in self._needs)
        if needed > self._servers:
            self._add(needed, now)
        elif highest < self._servers and len(running) == len(reports) and now - self._removed_at >= STEP_S:
            self._servers -= 1
            self._removed_at = now
        order = sorted(reports, key=lambda name: _removal_order(name, reports[name]))
        return Decision(
            self._servers,
            frozenset(order[: max(0, len(order) - self._servers)]),
            frozenset(report.node for report in running if report.saturated),
        )

    def _add(self, needed: int, now: float) -> None:
        if self._added_at < self._removed_at:
            has_lasted = now - self._removed_at >= self._window
            doubled = max(self._window, min(2 * self._window, MAX_WINDOW_S))
            self._window = self._initial_window if has_lasted else doubled
        self._servers = needed
        self._added_at = now

    def _needed(self, running: Collection[Report]) -> int:
        """Return the number of servers that have the workers which consumers would keep busy."""
        missing = sum(report.missing for report in running)
        total = sum(report.demand for report in running)
        unmeasured = sum(report.unmeasured for report in running)
        num_workers = max(1.0, sum(report.num_workers for report in running) / max(1, len(running)))

        def servers_for(demand: float) -> int:
            return math.ceil(((1 - TOLERANCE) * demand + missing) / num_workers) if demand > 0 else 0

        measured = servers_for(total - unmeasured)
        limit = UNMEASURED_FACTOR * max(self._minimum, measured)
        return max(measured, min(limit, servers_for(total + unmeasured)))


def report_of(stats: Mapping[str, Any], node: str) -> Report:
    """Return the report of a server.

    Args:
        stats: Response of ``/stats``.
        node: Machine that the server runs on.
    """
    server = stats["server"]
    return Report(
        node,
        server["num_workers"],
        server["demand"],
        server["demand_unmeasured"],
        sum(worker["busy_fraction"] for worker in stats["workers"]),
        server["load"],
        server["saturated"],
    )


def _removal_order(name: str, report: Report | None) -> tuple[bool, bool, float, str]:
    """Return the key by which servers are removed: on saturated nodes first, then those with the lowest demand."""
    return (True, True, math.inf, name) if report is None else (False, not report.saturated, report.demand, name)
