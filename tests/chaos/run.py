"""One run: a cluster, the faults of a seed, and the outcome."""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

from tests.chaos.cluster import MARK, Cluster, Host, Trainer
from tests.chaos.faults import inject
from tests.chaos.history import Verdict, check
from tests.chaos.roles import ROLES
from tests.chaos.schedule import Fault, Kind, faults
from tests.chaos.watch import CLIENT_BOUND, Watch, processes_left
from tests.launcher import start_launcher

RECONNECT_TIMEOUT: Final = 60.0
STALL_TIMEOUT: Final = 2.0
PATIENCE: Final = RECONNECT_TIMEOUT + 30
"""Seconds without a batch after which a consumer counts as hanging, far beyond the time until an error."""
LEAST_BATCHES: Final = 3
"""Batches that each consumer receives before the first fault."""
RELEASE_TIME: Final = 10.0
"""Seconds in which a server must release the resources of disconnected clients."""
LOG_LINES: Final = 60


@dataclass
class Memory:
    """Peak memory of one process, or of a server with its workers."""

    name: str
    peak: int
    bound: int


@dataclass
class Outcome:
    """Outcome of a run."""

    seed: int
    injected: Counter[Kind] = field(default_factory=Counter)
    missed: Counter[Kind] = field(default_factory=Counter)
    """Faults whose target was not running."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """Results of the checks, by consumer."""
    memory: list[Memory] = field(default_factory=list)
    leftovers: dict[str, int] = field(default_factory=dict)
    """Resources that were not released, by kind: processes, descriptors, files, threads."""
    borrowers: set[str] = field(default_factory=set)
    """Names of the consumers that received batches in shared memory."""
    problems: list[str] = field(default_factory=list)
    """Descriptions of the problems."""
    logs: list[str] = field(default_factory=list)
    """End of each server's log."""

    @property
    def failed(self) -> bool:
        """Return True if the run found a problem."""
        return bool(self.problems)


Tell = Callable[[str], None]


def run(seed: int, seconds: float | None, epochs: int | None, tell: Tell = lambda line: None) -> Outcome:
    """Run the faults of a seed.

    Args:
        seed: Decides the faults, and the order and augmentation of what is loaded.
        seconds: How long faults are injected; the consumers then finish their epochs. None is until they have loaded
            `epochs`.
        epochs: How many each consumer loads; None is as many as fit.
        tell: Called with a line about how far it is, now and then.
    """
    outcome = Outcome(seed)
    start_launcher()
    threads = set(threading.enumerate())
    descriptors = len(os.listdir("/proc/self/fd"))
    with tempfile.TemporaryDirectory(prefix="chaos") as folder, _marked() as mark:
        with Cluster(Path(folder), seed, epochs, RECONNECT_TIMEOUT, STALL_TIMEOUT) as cluster:
            with Watch(cluster, PATIENCE) as watch:
                _Storm(cluster, outcome, tell).run(seconds)
            _check_histories(cluster, watch, outcome)
            _check_memory(cluster, watch, outcome)
            outcome.leftovers["server connections"] = _left_of_clients(cluster, lambda host: host.connections)
            outcome.leftovers["server descriptors"] = _left_of_clients(cluster, lambda host: host.more_descriptors)
            outcome.leftovers["lent bytes"] = _left_of_clients(cluster, lambda host: host.lent)
            outcome.borrowers = {cluster.trainers[number].name for number in watch.borrowers}
            outcome.logs = ["".join(host.server.log[-LOG_LINES:]) for host in cluster.hosts]
        left = processes_left(mark)
        outcome.problems += [f"is still there after the run: {process}" for process in left]
        outcome.leftovers["processes"] = len(left)
        outcome.leftovers["files in /dev/shm"] = len(watch.files_left())
    outcome.leftovers["threads"] = len(set(threading.enumerate()) - threads)
    outcome.leftovers["descriptors"] = max(0, len(os.listdir("/proc/self/fd")) - descriptors)
    outcome.problems += [f"{count} {what} left" for what, count in outcome.leftovers.items() if count]
    return outcome


class _Storm:
    """Injection of a seed's faults while the consumers load."""

    def __init__(self, cluster: Cluster, outcome: Outcome, tell: Tell) -> None:
        self._cluster = cluster
        self._outcome = outcome
        self._tell = tell
        self._seconds: float | None = None

    def run(self, seconds: float | None) -> None:
        """Inject faults until the time is over or all epochs are loaded; return after the consumers have ended."""
        self._seconds = seconds
        self._await(lambda trainer: trainer.batches() >= LEAST_BATCHES, "waiting for the first batches")
        self._began = time.monotonic()
        injecting: list[tuple[Fault, Future[bool]]] = []
        with ThreadPoolExecutor(max_workers=64) as threads:
            for fault in faults(self._outcome.seed):
                if not self._wait_until(fault.at):
                    break
                injecting.append((fault, threads.submit(inject, self._cluster, fault)))
                self._tell(f"{fault}   {self._progress()}")
        for fault, done in injecting:
            self._count(fault, done)
        for host in self._cluster.hosts:
            host.proxy.disarm()
        for trainer in self._cluster.trainers:
            trainer.tell_to_end()
        self._await(lambda trainer: trainer.process.poll() is not None, "consumers finish their epochs")

    def _count(self, fault: Fault, done: Future[bool]) -> None:
        error = done.exception()
        if error is not None:
            self._outcome.problems.append(f"the fault could not be undone: {fault}: {error!r}")
        elif done.result():
            self._outcome.injected[fault.kind] += 1
        else:
            self._outcome.missed[fault.kind] += 1

    def _wait_until(self, at: float) -> bool:
        """Wait for the time of a fault; return False if the run ends before."""
        if self._seconds is not None and at > self._seconds:
            return False
        while (left := self._began + at - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))
            if all(trainer.process.poll() is not None for trainer in self._cluster.trainers):
                return False
        return True

    def _await(self, condition: Callable[[Trainer], bool], what: str) -> None:
        """Wait for all consumers; the watch ends those that hang."""
        told = 0.0
        while not all(condition(trainer) or trainer.process.poll() is not None for trainer in self._cluster.trainers):
            time.sleep(0.1)
            if time.monotonic() - told > 1:
                told = time.monotonic()
                self._tell(f"{what}   {self._progress()}")

    def _progress(self) -> str:
        return f"batches: {', '.join(f'{trainer.batches():,}' for trainer in self._cluster.trainers)}"


def _check_histories(cluster: Cluster, watch: Watch, outcome: Outcome) -> None:
    for role, trainer in zip(ROLES, cluster.trainers, strict=True):
        if trainer.name in watch.hung:
            outcome.problems.append(f"{trainer.name} was given nothing for long:\n{watch.hung[trainer.name]}")
        elif trainer.process.returncode:
            outcome.problems.append(f"{trainer.name} ended with {trainer.process.returncode}:\n{trainer.errors}")
        expected = lru_cache(maxsize=2)(lambda epoch, role=role: role.expected(outcome.seed, epoch))
        verdict = outcome.verdicts[trainer.name] = check(trainer.lines, expected)
        outcome.problems += [f"{trainer.name} {told}" for told in verdict.told]
        if verdict.wrong:
            outcome.problems.append(f"{trainer.name} said:\n{trainer.errors}")


def _check_memory(cluster: Cluster, watch: Watch, outcome: Outcome) -> None:
    for number, (peak, bound) in enumerate(zip(watch.server_peaks, watch.server_bounds, strict=True)):
        outcome.memory.append(Memory(f"server {number}", peak, bound))
    for trainer, peak in zip(cluster.trainers, watch.client_peaks, strict=True):
        outcome.memory.append(Memory(trainer.name, peak, CLIENT_BOUND))
    for found in outcome.memory:
        if found.peak > found.bound:
            outcome.problems.append(
                f"{found.name} took {found.peak / 2**20:.0f} MiB, its bound is {found.bound / 2**20:.0f}"
            )


def _left_of_clients(cluster: Cluster, count: Callable[[Host], int]) -> int:
    """Return the resources that servers still hold some time after all clients have disconnected."""
    deadline = time.monotonic() + RELEASE_TIME
    while (left := sum(map(count, cluster.hosts))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@contextmanager
def _marked() -> Iterator[str]:
    """Mark processes that start inside, so that they can be found later."""
    mark = os.environ[MARK] = secrets.token_hex(8)
    try:
        yield mark
    finally:
        del os.environ[MARK]
