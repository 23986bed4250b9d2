"""Background threads that receive the batches of one iteration: one for each server."""

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
"""Seconds to wait for the threads to end. Only connecting to an unresponsive machine takes long."""

HELD_FACTOR: Final = 4
"""Memory limit of buffered batches, as a multiple of the largest batch; at the limit no further batch is requested."""


class Receiver:
    """Receives the batches of one epoch.

    Args:
        dataset: Names the servers.
        registered_at: Number of the server that knows the loader.
        options: The batches, and how to receive them.
        scheduler: Schedules the requests.
        measures: Counts the batches that arrive.
        stays: Keep the loader's private workers until `close`, even if all batches have arrived.
    """

    loads_ahead: Final = True
    """True if batches are loaded before the training loop waits for them."""
    index_list = staticmethod(index_frame)
    """Encodes the indices of a batch for `ReorderBuffer.feed`; takes the batch's address and the sampler's value."""

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
            HELD_FACTOR * options.max_batch_bytes,
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
        """End the threads and their connections; a thread that waits for a batch raises `why`."""
        self.reorder_buffer.close(why)
        for fetcher in self._fetchers:
            if threading.current_thread() is not fetcher.thread and not local.is_server_thread():
                # a daemon thread that is in torch's code when the interpreter ends would abort the process
                fetcher.join(CLOSE_TIMEOUT)

    def end_session(self) -> None:
        """Tell the servers to end the loader's private workers."""
        for fetcher in self._fetchers:
            for server in fetcher.registered_at.copy():
                if local.is_server_thread():  # it must not wait for its own answer
                    threading.Thread(target=server.end_session, args=(self.key,), daemon=True).start()
                else:
                    server.end_session(self.key)
