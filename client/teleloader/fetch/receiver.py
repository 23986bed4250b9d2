"""The background threads that receive a pass through an epoch: one for each server."""

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
"""Seconds to wait for the threads to end; it takes long only while they connect to a machine that is silent."""

HELD_FACTOR: Final = 4
"""How many times the largest batch all that has arrived, and was not taken, may take before no more is asked for."""


class Receiver:
    """Receives the batches of one epoch.

    Args:
        dataset: Where they come from.
        registered_at: Number of the server that knows the loader.
        options: What to receive.
        scheduler: What to ask for.
        measures: Where to count what arrives.
        stays: Whether the workers of a loader's own are to be kept until `close`, though all has arrived.
    """

    loads_ahead: Final = True
    """Whether batches are loaded before the training loop waits for them."""
    index_list = staticmethod(index_frame)
    """Returns what `ReorderBuffer.feed` takes for a batch's address and what the sampler yielded for it."""

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
        """End the threads and their connections; `why` is raised where somebody waits for a batch."""
        self.reorder_buffer.close(why)
        for fetcher in self._fetchers:
            if threading.current_thread() is not fetcher.thread and not local.is_server_thread():
                # a daemon thread that is in torch's code when the interpreter ends would abort the process
                fetcher.join(CLOSE_TIMEOUT)

    def end_session(self) -> None:
        """Tell the servers that the loader's own workers are not needed any more."""
        for fetcher in self._fetchers:
            for server in fetcher.registered_at.copy():
                if local.is_server_thread():  # it must not wait for its own answer
                    threading.Thread(target=server.end_session, args=(self.key,), daemon=True).start()
                else:
                    server.end_session(self.key)
