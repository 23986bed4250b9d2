"""Actor that adapts the number of servers of a fleet to the demand of the training processes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import ray
from ray.exceptions import RayError

from teleloader_server.fleet.scaler import Report, Scaler
from teleloader_server.ray import control
from teleloader_server.ray.process import ServerStatus

RECONCILE_INTERVAL_S: Final = 5.0
"""Seconds between two decisions."""
PLACEMENT_S: Final = 300.0
"""Seconds after which a server that Ray cannot place is replaced: other nodes may be saturated by then."""

FAILED_S: Final = 60.0
"""Seconds after which a failed server is replaced: the cause may be its node, for example a missing mount."""

logger = logging.getLogger("teleloader_server")


class Autoscaler:
    """Actor that starts servers, and drains those that are not needed any more.

    Args:
        fleet: Name of the fleet.
        minimum: Minimum number of servers.
        maximum: Maximum number of servers.
        downscale_delay: Seconds for which a server must not have been needed before it is removed.
    """

    def __init__(self, fleet: str, minimum: int, maximum: int, downscale_delay: float) -> None:
        self._fleet = fleet
        self._limits = minimum, maximum
        self._scaler: Scaler | None = None
        self._downscale_delay = downscale_delay
        self._draining: set[int] = set()
        self._placed: dict[int, float] = {}
        """Times at which servers were started that must not run on certain nodes, until Ray has placed them."""
        self._failed_at: dict[int, float] = {}
        """Times since which servers are failed."""
        self._ready_at: dict[int, float] = {}
        """Times at which servers were last ready."""
        threading.Thread(target=self._run, name="teleloader-autoscaler", daemon=True).start()

    def limits(self) -> tuple[int, int]:
        """Return the minimum and the maximum number of servers."""
        return self._limits

    def _run(self) -> None:
        while True:
            try:
                self._reconcile(time.monotonic())
            except Exception:  # a failure of Ray or of the registry, which may pass
                logger.exception("cannot scale fleet %r: trying again after %g s", self._fleet, RECONCILE_INTERVAL_S)
            time.sleep(RECONCILE_INTERVAL_S)

    def _reconcile(self, now: float) -> None:
        """Start and drain servers as the scaler decides."""
        present = control.servers(self._fleet)
        statuses = dict(zip(present, control.statuses(list(present.values())), strict=True))
        leaving = {number for number, status in statuses.items() if status.state in {"draining", "stopped"}}
        active = {number: actor for number, actor in present.items() if number not in leaving | self._draining}
        statuses = {number: statuses[number] for number in active}
        ready = {number: active[number] for number, status in statuses.items() if status.state == "ready"}
        if self._scaler is None:
            self._scaler = Scaler(*self._limits, len(active), now, self._downscale_delay)
        silent = self._silent(statuses, now)
        decision = self._scaler.decide(_reports(ready) | {str(number): None for number in silent}, now)
        surplus = max(0, len(active) - decision.servers)
        failed = self._failed(statuses, now)
        waiting = [number for number in active if number not in ready and number not in silent]
        waiting.sort(key=lambda number: (number in self._failed_at, number), reverse=True)
        ended = {*failed, *self._misplaced(statuses, now), *waiting[:surplus], *map(int, decision.drain)}
        self._drain({number: active[number] for number in ended})
        missing = decision.servers - len(active.keys() - ended)
        for number in control.start(self._fleet, missing, present, decision.avoid):
            logger.info("fleet %r: starting server %d of %d", self._fleet, number, decision.servers)
            if decision.avoid:
                self._placed[number] = now

    def _silent(self, statuses: Mapping[int, ServerStatus], now: float) -> set[int]:
        """Return the servers that were ready recently and do not respond: their consumers may need them."""
        ready_at = {number: now for number, status in statuses.items() if status.state == "ready"}
        self._ready_at = {number: since for number, since in self._ready_at.items() if number in statuses} | ready_at
        pending = {number for number, status in statuses.items() if status.state == "pending"}
        return {number for number, since in self._ready_at.items() if number in pending and now - since < PLACEMENT_S}

    def _failed(self, statuses: Mapping[int, ServerStatus], now: float) -> Iterable[int]:
        """Return the failed servers to replace. The delay limits the rate if the cause persists."""
        failed = {number for number, status in statuses.items() if status.state == "failed"}
        self._failed_at = {number: self._failed_at.get(number, now) for number in failed}
        return [number for number, since in self._failed_at.items() if now - since >= FAILED_S]

    def _misplaced(self, statuses: Mapping[int, ServerStatus], now: float) -> Iterable[int]:
        """Return the servers that Ray has not placed because of nodes that were saturated when they were started."""
        pending = {number for number, status in statuses.items() if status.state == "pending"}
        self._placed = {number: since for number, since in self._placed.items() if number in pending}
        return [number for number, since in self._placed.items() if now - since > PLACEMENT_S]

    def _drain(self, actors: Mapping[int, Any]) -> None:
        """Drain servers in the background."""
        for number, actor in actors.items():
            logger.info("fleet %r: draining server %d", self._fleet, number)
            self._draining.add(number)
            threading.Thread(target=self._stop, args=(number, actor), name="teleloader-drain", daemon=True).start()

    def _stop(self, number: int, actor: Any) -> None:
        try:
            control.stop([actor])
        finally:
            self._draining.discard(number)


def _reports(ready: Mapping[int, Any]) -> dict[str, Report | None]:
    """Return the reports of servers by number; None for a server that does not respond."""
    requests = control.wait([actor.report.remote() for actor in ready.values()])
    return {str(number): _report(request) for number, request in zip(ready, requests, strict=True)}


def _report(request: Any) -> Report | None:
    try:
        report: Report | None = ray.get(request, timeout=0)
    except RayError:  # the actor does not respond, or its server does not
        return None
    return report
