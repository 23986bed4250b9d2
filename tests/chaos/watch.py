"""Monitoring of the memory that the processes of a run use, and of processes that outlive it."""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from tests.chaos.cluster import MARK, MEMORY_BUDGET, SLOT, Cluster, memory_of

INTERVAL: Final = 0.5
SLACK: Final = 32 * 2**20
CLIENT_BOUND: Final = 192 * 2**20
"""Maximum memory of a consumer: Python with NumPy, and its prefetched batches."""
LEAVE_TIME: Final = 10.0
"""Seconds in which processes must exit after the run."""

_SHM = re.compile(r"/dev/shm/\S+")


class Watch:
    """Thread that samples a cluster repeatedly.

    Args:
        cluster: Cluster to sample.
        patience: Seconds in which a consumer must receive a batch.
    """

    def __init__(self, cluster: Cluster, patience: float) -> None:
        self._cluster = cluster
        self._patience = patience
        self.server_peaks = [0] * len(cluster.hosts)
        self.client_peaks = [0] * len(cluster.trainers)
        self.hung: dict[str, str] = {}
        """Stack of each consumer that received no batch for too long."""
        self.borrowers: set[int] = set()
        """Indices of the consumers that have mapped a slot of a server."""
        self._given = [(0, time.monotonic())] * len(cluster.trainers)
        self._shared_files: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def server_bounds(self) -> list[int]:
        """Return the maximum memory of each server with its workers."""
        return [int(host.baseline + 1.5 * MEMORY_BUDGET + SLACK) for host in self._cluster.hosts]

    def files_left(self) -> list[str]:
        """Return the files in /dev/shm that the run's processes opened and that still exist."""
        return [path for path in sorted(self._shared_files) if Path(path).exists()]

    def _run(self) -> None:
        while not self._over.wait(INTERVAL):
            for number, host in enumerate(self._cluster.hosts):
                family = host.processes()
                self._look_for_files(family)
                taken = sum(memory_of(family).values())
                self.server_peaks[number] = max(self.server_peaks[number], taken)
            for number, trainer in enumerate(self._cluster.trainers):
                with suppress(psutil.NoSuchProcess, OSError):
                    process = psutil.Process(trainer.process.pid)
                    self._look_for_files([process])
                    if SLOT in Path(f"/proc/{process.pid}/maps").read_text():
                        self.borrowers.add(number)
                    self.client_peaks[number] = max(self.client_peaks[number], *memory_of([process]).values(), 0)
                self._look_for_progress(number)

    def _look_for_progress(self, number: int) -> None:
        trainer = self._cluster.trainers[number]
        batches = trainer.batches()
        before, since = self._given[number]
        if batches != before or trainer.process.poll() is not None:
            self._given[number] = (batches, time.monotonic())
        elif time.monotonic() - since > self._patience and trainer.name not in self.hung:
            self.hung[trainer.name] = trainer.where_it_hangs()
            trainer.process.kill()

    def _look_for_files(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            with suppress(OSError):
                self._shared_files.update(_SHM.findall(Path(f"/proc/{process.pid}/maps").read_text()))


def processes_left(mark: str) -> list[str]:
    """Return the processes of the run, except this one, that still exist some time after it."""
    deadline = time.monotonic() + LEAVE_TIME
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _marked(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"pid {entry.name}: {command[:100]}")
    return found
