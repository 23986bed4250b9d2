"""Background threads that receive the batches of one iteration, one thread per server."""

from __future__ import annotations

import threading
from typing import Final

from teleloader.dataset import RemoteDataset
from teleloader.fetch.fetcher import Fetcher, FetchOptions
from teleloader.fetch.reorder import ReorderBuffer
from teleloader.fetch.scheduler import RangeScheduler
from teleloader.sampling import index_frame
from teleloader.stats import Measures
from teleloader_shared import local

CLOSE_TIMEOUT: Final = 5.0
"""Maximum wait for the end of each thread, in seconds; shutting its connections down usually ends it at once."""

MEMORY_LIMIT_FACTOR: Final = 4
"""Maximum memory of buffered batches, as a multiple of `max_batch_bytes`; beyond it, requests are paused."""


class Receiver:
    """Group of background threads that receive the batches of one epoch into a reorder buffer.

    Args:
        dataset: Dataset with the servers to receive from.
        registered_at: Index of the server at which the loader is registered.
        options: Parameters of the requests.
        scheduler: Scheduler of the requests.
        measures: Counters of received batches.
        stays: Whether to keep the loader's private workers until `close`, even if all batches have arrived.
    """

    loads_ahead: Final = True
    """True if batches are loaded before the training loop waits for them."""
    index_list = staticmethod(index_frame)
    """Encodes an index list for `ReorderBuffer.feed`, given the identifier of its batch and the list."""

    def __init__(
        self,
        dataset: RemoteDataset,
        registered_at: int,
        options: FetchOptions,
        scheduler: RangeScheduler,
        measures: Measures,
        *,
        stays: bool,
    ) -> None:
        servers = [*dataset.servers[registered_at:], *dataset.servers[:registered_at]]
        self.reorder_buffer = ReorderBuffer(
            scheduler,
            [server.url for server in servers],
            measures,
            MEMORY_LIMIT_FACTOR * options.max_batch_bytes,
            complete=options.spec.order != "client",
            stays=stays,
        )
        groups = [[server] for server in servers] if scheduler.shared else [servers]
        self.key = options.key
        self._fetchers = [
            Fetcher(number, group, options, self.reorder_buffer, is_registered=number == 0)
            for number, group in enumerate(groups)
        ]

    def close(self, why: BaseException | None = None) -> None:
        """Stop the receiving threads and close their connections.

        Args:
            why: Exception to raise in threads that wait for a batch; None for a `TeleloaderError`.
        """
        self.reorder_buffer.close(why)
        for fetcher in self._fetchers:
            if threading.current_thread() is not fetcher.thread and not local.is_server_thread():
                # a daemon thread that runs torch's code when the interpreter exits would abort the process
                fetcher.join(CLOSE_TIMEOUT)

    def end_session(self) -> None:
        """Request the end of the loader's private workers from all servers."""
        for fetcher in self._fetchers:
            for server in fetcher.registered_at.copy():
                if local.is_server_thread():  # a server's thread must not wait for its own response
                    threading.Thread(target=server.end_session, args=(self.key,), daemon=True).start()
                else:
                    server.end_session(self.key)
