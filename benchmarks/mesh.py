"""Device mesh: four ranks with the same batches, fetched by each rank or by one rank that broadcasts them.

    python -m benchmarks.mesh
    python -m benchmarks.mesh --quick      # checks that everything runs; not a measurement

The ranks form one tensor-parallel group of gloo processes on this machine. The server is on the same machine, and lends
large batches in shared memory; or it is behind a link of 1 Gbit/s, which all connections share: a relay that delays the
responses.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from benchmarks.processes import free_port, running

RANKS: Final = 4
LINK_RATE: Final = 125e6
"""Rate of the link in bytes/s: 1 Gbit/s."""
CHUNK: Final = 64 * 1024


class Samples:
    """Dataset of equal arrays.

    Args:
        length: Number of samples.
        sample: Each sample.
    """

    def __init__(self, length: int, sample: Any) -> None:
        self._length, self._sample = length, sample

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._sample


def images() -> Samples:
    """Return images of 96 x 96 pixels."""
    return Samples(1_000_000, np.zeros((3, 96, 96), np.uint8))


def tokens() -> Samples:
    """Return sequences of 4,096 tokens."""
    return Samples(1_000_000, np.zeros(4096, np.int32))


class Workload(NamedTuple):
    """Batches of a measurement."""

    dataset: str
    batch_size: int
    batches: int
    """Number of measured batches."""


WORKLOADS: Final = (Workload("images", 128, 100), Workload("tokens", 16, 600))


class Relay:
    """Relay to a server, whose responses share a link of limited rate.

    Args:
        url: URL of the server.
    """

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._free_at = 0.0
        """Time at which the link has transferred all earlier chunks."""
        self.nbytes = 0
        """Bytes of all responses."""
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0, limit=CHUNK))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the relay."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        responses, requests = await asyncio.open_connection(self._target.hostname, self._target.port)
        await asyncio.gather(self._copy(reader, requests, limited=False), self._copy(responses, writer, limited=True))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, limited: bool) -> None:
        try:
            while data := await reader.read(CHUNK):
                if limited:
                    self.nbytes += len(data)
                    self._free_at = max(self._free_at, time.monotonic()) + len(data) / LINK_RATE
                    await asyncio.sleep(self._free_at - time.monotonic())
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@contextmanager
def link(url: str, *, limited: bool) -> Iterator[tuple[str, Relay | None]]:
    """Yield the URL at which the ranks reach the server, and the relay if the link is limited."""
    if not limited:
        yield url, None
        return
    relay = Relay(url)
    try:
        yield relay.url, relay
    finally:
        relay.close()


def rank_main(
    rank: int, port: int, url: str, workload: Workload, *, broadcasts: bool, limited: bool, results: Queue[float]
) -> None:
    """Iterate on one rank; rank 0 reports the batches/s."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from teleloader import DataLoader, RemoteDataset
    from teleloader.transport import http

    if limited:
        vars(http)["open_channel"] = lambda _offer: None  # no shared memory, as on another machine
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    division: dict[str, Any] = {"mesh": mesh} if broadcasts else {"rank": 0, "world_size": 1}
    loader = DataLoader(RemoteDataset(url, workload.dataset), workload.batch_size, seed=0, **division)
    batches = iter(loader)
    for _ in range(8):
        next(batches)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(workload.batches):
        next(batches)
    dist.barrier()
    if rank == 0:
        results.put(workload.batches / (time.perf_counter() - began))
    dist.barrier()
    del batches
    dist.destroy_process_group()


def measure(server_url: str, workload: Workload, *, broadcasts: bool, limited: bool) -> tuple[float, float | None]:
    """Return batches/s, and bytes over the link per batch of the group (None without a link)."""
    context = get_context("spawn")
    results: Queue[float] = context.Queue()
    with link(server_url, limited=limited) as (url, relay):
        port = free_port()
        options = {"broadcasts": broadcasts, "limited": limited, "results": results}
        ranks = [
            context.Process(target=rank_main, args=(rank, port, url, workload), kwargs=options, daemon=True)
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        rate = results.get(timeout=600)
        for process in ranks:
            process.join()
        # batches that were prefetched beyond the measured ones are a small part
        return rate, None if relay is None else relay.nbytes / (workload.batches + 8)


def main() -> None:
    """Print batches/s and transferred bytes of both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="measure a few batches only")
    quick = parser.parse_args().quick
    with running([f"{each.dataset}=benchmarks.mesh:{each.dataset}" for each in WORKLOADS], 2) as server:
        for workload in WORKLOADS:
            measured = workload._replace(batches=10) if quick else workload
            for limited in (False, True):
                for broadcasts in (False, True):
                    rate, nbytes = measure(server.url, measured, broadcasts=broadcasts, limited=limited)
                    way = "one rank fetches and broadcasts" if broadcasts else "each rank fetches"
                    where = "1 Gbit/s" if limited else "same machine"
                    transferred = "" if nbytes is None else f", {nbytes / 1e6:.1f} MB over the link per batch"
                    print(f"{workload.dataset}, {where}, {way}: {rate:.1f} batches/s{transferred}", flush=True)


if __name__ == "__main__":
    main()
