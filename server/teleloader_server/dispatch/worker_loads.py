"""Workers of a dispatcher, by the number of batches that are assigned to each."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from teleloader_server.workers.health import WorkerHealth


class WorkerLoads:
    """Index of workers by load: finds the least busy worker without examining all others.

    The load of a worker is its number of open tasks. The pool changes it; `update` records the change.
    """

    def __init__(self) -> None:
        self._workers: dict[int, WorkerHealth] = {}
        self._heaps: dict[int, list[int]] = {}
        """Heap of worker IDs for each load. An entry whose worker has another load by now is outdated."""
        self._entries: set[tuple[int, int]] = set()
        """Load and worker ID of each entry."""

    @property
    def workers(self) -> Mapping[int, WorkerHealth]:
        """Workers by ID."""
        return self._workers

    def add(self, worker: int, health: WorkerHealth) -> None:
        """Add a worker, or replace its record."""
        self._workers[worker] = health
        self.update(worker)

    def remove(self, worker: int) -> None:
        """Remove a worker, if it is known."""
        self._workers.pop(worker, None)

    def update(self, worker: int) -> None:
        """Record the load of a worker after a change, if the worker is known."""
        health = self._workers.get(worker)
        if health is None:
            return
        load = len(health.tasks)
        if (load, worker) not in self._entries:
            self._entries.add((load, worker))
            heapq.heappush(self._heaps.setdefault(load, []), worker)

    def least_busy(self, accepts: Callable[[WorkerHealth], bool]) -> int | None:
        """Return the accepted worker with the lowest load, and of these the one with the lowest ID.

        Returns None if no worker is accepted.
        """
        for load in sorted(self._heaps):
            found = self._first(load, accepts)
            if found is not None:
                return found
        return None

    def _first(self, load: int, accepts: Callable[[WorkerHealth], bool]) -> int | None:
        heap, rejected, found = self._heaps[load], [], None
        while heap and found is None:
            worker = heap[0]
            health = self._workers.get(worker)
            if health is None or len(health.tasks) != load:
                heapq.heappop(heap)
                self._entries.remove((load, worker))
                self.update(worker)
            elif accepts(health):
                found = worker
            else:
                rejected.append(heapq.heappop(heap))
        for worker in rejected:
            heapq.heappush(heap, worker)
        if not heap:
            del self._heaps[load]
        return found
