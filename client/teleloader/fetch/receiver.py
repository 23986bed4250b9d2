"""Background threads that receive the batches of one iteration, one thread per server."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from teleloader.dataset import RemoteDataset
from teleloader.fetch.fetcher import Fetcher, FetchOptions
from teleloader.fetch.progress import Consumer, Target, reporter
from teleloader.fetch.reorder import ReorderBuffer
from teleloader.fetch.scheduler import RangeScheduler
from teleloader.fleet.servers import nearest
from teleloader.sampling import index_frame
from teleloader.stats import Measures
from teleloader.transport.interface import BatchServer
from teleloader_shared import local
from teleloader_shared.spec import LoaderSpec

CLOSE_TIMEOUT: Final = 5.0
"""Maximum wait for the end of each thread, in seconds; shutting its connections down usually ends it at once."""

MEMORY_LIMIT_FACTOR: Final = 4
"""Maximum memory of buffered batches, as a multiple of `max_batch_bytes`; beyond it, requests are paused."""


class Receiver:
    """Group of background threads that receive the batches of one epoch into a reorder buffer.

    Args:
        dataset: Dataset with the servers to receive from.
        registered_at: Server at which the loader is registered; None to register it in the background.
        options: Parameters of the requests.
        scheduler: Scheduler of the requests.
        measures: Counters of received batches.
        groups: Number of servers among which the shards are divided (`groups_of`); 1 for map-style datasets.
        stays: Whether to keep the loader's private workers until `close`, even if all batches have arrived.
    """

    loads_ahead: Final = True
    """True if batches are loaded before the training loop waits for them."""
    index_list = staticmethod(index_frame)
    """Encodes an index list for `ReorderBuffer.feed`, given the identifier of its batch and the list."""

    def __init__(
        self,
        dataset: RemoteDataset,
        registered_at: BatchServer | None,
        options: FetchOptions,
        scheduler: RangeScheduler,
        measures: Measures,
        *,
        groups: int,
        stays: bool,
    ) -> None:
        self.key = options.key
        self.requests = scheduler
        """Scheduler of the requests to servers."""
        self._options = options
        self._servers = dataset.servers
        self._subset = replace(options.spec, fingerprint=None).key
        """Key that selects the loader's servers in a large fleet."""
        self._registrations: list[tuple[set[BatchServer], str]] = []
        """Of each fetcher, the servers with which the loader was registered, and its key there."""
        self._lock = threading.RLock()
        """Held while servers join and leave; reentrant, because a finalizer in its thread may call `close`."""
        # a shard is iterated by a worker of one server: whole shards are divided among the servers
        first = registered_at or nearest(self._servers.known, self._subset)[0]
        group = self._in_turn(first) if scheduler.has_shards else [first]
        self.reorder_buffer = ReorderBuffer(
            scheduler,
            [server.url for server in group],
            measures,
            MEMORY_LIMIT_FACTOR * options.max_batch_bytes,
            complete=options.spec.order != "client" and options.compute_stop is None,
            stays=stays,
        )
        with self.reorder_buffer.changed:  # the scheduler must know all servers before the first request
            if groups > 1:
                scheduler.divide(groups)
            is_registered = registered_at is not None
            self._fetchers = [
                self._fetcher(number, _rotated(group, number), groups, is_registered=is_registered and number == 0)
                for number in range(groups)
            ]
            """Fetchers whose threads may still run."""
            self._current = {first.url: self._fetchers[0]}
            """Fetchers of the servers that are requested batches, by URL; one fetcher if the dataset has shards."""
            self.follow(self._servers.known)
        if not scheduler.is_background:
            self._begin_following()

    def _begin_following(self) -> None:
        """Follow the list of servers, and report the training loop's progress to them."""
        self._servers.follow(self)
        options, registrations = self._options, self._registrations

        def targets() -> list[Target]:  # without a reference to this object
            return list({(server, key) for servers, key in registrations for server in servers.copy()})

        consumer = Consumer(options.consumer, options.epoch, self.reorder_buffer.measures, targets)
        reporter.follow(self, consumer)

    def follow(self, servers: Sequence[BatchServer]) -> None:
        """Request batches from these servers from now on; pending responses of other servers are still received."""
        buffer = self.reorder_buffer
        with self._lock:
            if buffer.is_over():
                return
            used = {server.url: server for server in nearest(servers, self._subset, self._current)}
            buffer.set_servers(used)
            if buffer.scheduler.has_shards:
                for fetcher in self._fetchers:
                    fetcher.follow(list(used.values()))
                return
            for url, server in used.items():
                if url not in self._current:
                    self._join(url, server)
            for url in self._current.keys() - used.keys():
                buffer.remove_server(self._current.pop(url).number)
            self._fetchers = [fetcher for fetcher in self._fetchers if fetcher.thread.is_alive()]

    def _join(self, url: str, server: BatchServer) -> None:
        number = self.reorder_buffer.add_server()
        try:
            self._current[url] = self._fetcher(number, [server])
        except RuntimeError:  # the process cannot start further threads
            with self.reorder_buffer.changed:
                self.reorder_buffer.remove_server(number)
                self.reorder_buffer.scheduler.forget_server(number)
            raise
        self._fetchers.append(self._current[url])

    def _in_turn(self, first: BatchServer) -> list[BatchServer]:
        """Return all servers in the order in which the loader moves from one to the next."""
        used = list(nearest(self._servers.known, self._subset))
        place = used.index(first) if first in used else 0
        return [first, *(other for other in used[place:] + used[:place] if other is not first)]

    def _fetcher(
        self, number: int, servers: list[BatchServer], groups: int = 1, *, is_registered: bool = False
    ) -> Fetcher:
        options = self._options if groups == 1 else self._options.of_group(number, groups)
        fetcher = Fetcher(
            number, servers, options, self.reorder_buffer, self._servers.failed, is_registered=is_registered
        )
        self._registrations.append((fetcher.registered_at, fetcher.key))
        return fetcher

    def begin(self) -> bool:
        """Receive with normal priority from now on, because the training loop starts the epoch.

        Returns:
            False if prefetching the epoch has failed; the receiver must be closed.
        """
        buffer = self.reorder_buffer
        if self._options.compute_stop is not None and not buffer.await_end():
            return False
        with buffer.lock:
            if not buffer.begin():
                return False
            for fetcher in self._fetchers:
                fetcher.expedite()
        buffer.measures.begin()
        self.follow(self._servers.known)
        self._begin_following()
        return True

    def close(self, why: BaseException | None = None) -> None:
        """Stop the receiving threads and close their connections.

        Args:
            why: Exception to raise in threads that wait for a batch; None for a `TeleloaderError`.
        """
        self._servers.unfollow(self)
        reporter.unfollow(self)
        self.reorder_buffer.close(why)
        with self._lock:
            fetchers = list(self._fetchers)
        for fetcher in fetchers:
            if threading.current_thread() is not fetcher.thread and not local.is_server_thread():
                # a daemon thread that runs torch's code when the interpreter exits would abort the process
                fetcher.join(CLOSE_TIMEOUT)

    def end_session(self) -> None:
        """Request the end of the loader's private workers from all servers."""
        for fetcher in self._fetchers:
            for server in fetcher.registered_at.copy():
                if local.is_server_thread():  # a server's thread must not wait for its own response
                    threading.Thread(target=server.end_session, args=(fetcher.key,), daemon=True).start()
                else:
                    server.end_session(fetcher.key)


def groups_of(servers: Sequence[BatchServer], spec: LoaderSpec) -> int:
    """Return the number of servers among which the shards of an iterable-style dataset are divided."""
    return max(1, min(len(nearest(servers, replace(spec, fingerprint=None).key)), spec.shards))


def _rotated(servers: list[BatchServer], number: int) -> list[BatchServer]:
    """Return the servers in the order in which group `number` of the shards uses them: those with an error are last."""
    usable = [server for server in servers if server.last_error is None]
    first = number % max(1, len(usable))
    return [*usable[first:], *usable[:first], *(server for server in servers if server.last_error is not None)]
