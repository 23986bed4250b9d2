"""Large batches in shared memory: clients on the server's machine receive each batch once, whoever dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader.transport import handoff, http
from teleloader_server import serve
from teleloader_server.limits import ClientLimits
from tests.conftest import ROOT, ServerProcess, eventually
from tests.end_to_end.hosted import images, make_squares

MIB = 2**20
SLOT = 3 * MIB
"""Approximate size of a batch of `images`."""
LAST = 60
BUDGET = 64 * MIB
"""Memory budget, so small that slots are reused."""
OPTIONS = ("tests.end_to_end.hosted:images", "--num-workers", "1", "--memory-budget", "64MiB")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="requires memfd")


@pytest.fixture
def url() -> Iterator[str]:
    """Run a server in this process, with the dataset `images`."""
    with serve(images(), num_workers=1, memory_budget=BUDGET) as running:
        yield running


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """Run a server in another process."""
    running = ServerProcess("--port", "0", *OPTIONS)
    yield running
    running.end()


def loader_of(url: str, **arguments: Any) -> DataLoader:
    """Return a loader of single samples as NumPy arrays, in seeded order, so that it uses the shared workers."""
    return DataLoader(RemoteDataset(url), 1, output="numpy", **{"seed": 0, **arguments})


def stats_of(url: str) -> Any:
    """Return the current /stats."""
    return httpx.get(f"{url}/stats").raise_for_status().json()


def lent_bytes(url: str) -> int:
    """Return the size of all lent slots."""
    return int(stats_of(url)["server"]["memory_lent"])


def lent_batches(url: str) -> int:
    """Return the number of batches that were lent."""
    return sum(consumer["batches_lent"] for consumer in stats_of(url)["consumers"])


def check(batch: Any, number: int) -> None:
    """Check the content of a batch."""
    assert batch.shape == (1, SLOT)
    assert (batch == 1 + number % 251).all()


def test_large_batches_arrive_in_shared_memory(url: str) -> None:
    """Each batch arrives once and in order, and all of them were lent."""
    count = 0
    for number, batch in enumerate(loader_of(url)):
        check(batch, number)
        count += 1
    assert count == LAST
    assert lent_batches(url) == LAST


@pytest.mark.parametrize("num_workers", [1, 2])
def test_dataset_objects_use_shared_memory(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`DataLoader(object)` needs no setting."""
    received = []
    mapped = handoff._mapped

    def counted(descriptor: int, nbytes: int, released: Any) -> Any:
        received.append(nbytes)
        return mapped(descriptor, nbytes, released)

    monkeypatch.setattr(handoff, "_mapped", counted)
    loader = DataLoader(images(), 1, output="numpy", num_workers=num_workers)
    for _ in range(2):
        for number, batch in enumerate(loader):
            check(batch, number)
    assert len(received) == 2 * LAST


def test_small_batches_are_sent() -> None:
    """Batches below the minimum size arrive over HTTP."""
    with serve(make_squares(50), num_workers=1) as url:
        assert len(list(loader_of(url))) == 50
        assert lent_batches(url) == 0


def test_changes_of_a_batch_stay_private(url: str) -> None:
    """In-place changes appear neither in later batches, which reuse the memory, nor for another client."""
    others = iter(loader_of(url))
    for number, batch in enumerate(loader_of(url)):
        batch += 7
        check(next(others), number)
        check(batch - 7, number)


def test_slots_are_reused_once_arrays_are_deleted(url: str) -> None:
    """The second half of an epoch is written to the slots of the first half, up to a few."""
    iterator = enumerate(loader_of(url))
    for number, batch in iterator:
        check(batch, number)
        if number == LAST // 2:
            mapped = stats_of(url)["server"]["memory_mapped"]
    assert stats_of(url)["server"]["memory_mapped"] <= mapped + LAST // 6 * SLOT
    assert lent_bytes(url) > 0, "the last batch is in use"
    del batch, iterator  # enumerate() keeps its last item
    gc.collect()
    eventually(lambda: lent_bytes(url) == 0)


def test_several_clients_share_one_copy(server: ServerProcess) -> None:
    """The same batch of two consumers is the same slot, which is not computed twice."""
    first, second = (iter(loader_of(server.url)) for _ in range(2))
    kept = [(next(first), next(second)) for _ in range(10)]
    for number, (mine, theirs) in enumerate(kept):
        check(mine, number)
        check(theirs, number)
    assert server.stats()["datasets"][0]["batches_computed"] < 2 * LAST


@pytest.mark.parametrize("limits", [{"max_lent_slots": 2}, {"max_lent_bytes": 8 * MIB}, {"max_lent_slots": 0}])
def test_batches_beyond_the_limits_are_sent(limits: dict[str, int]) -> None:
    """A client that keeps all batches gets the others over HTTP."""
    with serve(images(), num_workers=1, memory_budget=BUDGET, limits=ClientLimits(**limits)) as url:
        kept = list(loader_of(url))
        assert lent_bytes(url) <= limits.get("max_lent_bytes", limits.get("max_lent_slots", 9) * SLOT * 1.25)
        assert lent_batches(url) == min(2, limits.get("max_lent_slots", 2))
    for number, batch in enumerate(kept):
        check(batch, number)


def test_batches_that_are_kept_too_long_stay_valid() -> None:
    """The server closes the channel, does not reuse the slots, and lends further batches on another channel."""
    with serve(images(), num_workers=1, memory_budget=BUDGET, limits=ClientLimits(max_lent_time=0.5)) as url:
        iterator = iter(loader_of(url))
        kept = [next(iterator) for _ in range(5)]
        time.sleep(2.5)  # the limit, and the interval of its check
        before = lent_batches(url)
        rest = [np.array(batch) for batch in iterator]
        assert lent_batches(url) > before
        for number, batch in enumerate(kept + rest):
            check(batch, number)
        assert lent_bytes(url) >= 5 * SLOT, "kept slots count until they are released"
        del kept, batch
        eventually(lambda: lent_bytes(url) == 0)


def test_a_client_elsewhere_receives_batches_over_http(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that cannot connect to the Unix socket, as in another network namespace, needs no setting."""
    monkeypatch.setattr(http, "open_channel", lambda offer: None)
    for number, batch in enumerate(loader_of(url)):
        check(batch, number)
    assert lent_batches(url) == 0


@pytest.mark.parametrize("position", [0, 7, 30])
def test_a_killed_server_is_replaced(server: ServerProcess, position: int) -> None:
    """Batches in use stay valid, and the epoch continues on the restarted server."""
    iterator = iter(loader_of(server.url))
    kept = [next(iterator) for _ in range(position)]
    server.kill()
    again = ServerProcess("--port", server.url.rsplit(":", 1)[1], *OPTIONS)
    try:
        kept += iterator
        assert len(kept) == LAST
        for number, batch in enumerate(kept):
            check(batch, number)
        assert lent_batches(again.url) > 0
    finally:
        again.end()


def test_a_killed_worker_is_replaced(server: ServerProcess) -> None:
    """Lent slots of a dead worker stay valid, and are released by their clients."""
    iterator = iter(loader_of(server.url))
    kept = []
    for number in range(LAST):
        kept.append(next(iterator))
        if number in (5, 25):
            for pid in server.worker_pids():
                os.kill(pid, signal.SIGKILL)
    for number, batch in enumerate(kept):
        check(batch, number)
    del kept, batch
    eventually(lambda: lent_bytes(server.url) == 0)


CLIENT = """
import sys, time
from teleloader import DataLoader, RemoteDataset
iterator = iter(DataLoader(RemoteDataset(sys.argv[1]), 1, output="numpy", seed=0))
kept = [next(iterator) for _ in range(int(sys.argv[2]))]
print("holds", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("held", [1, 20])
def test_the_slots_of_a_killed_client_are_released(server: ServerProcess, held: int) -> None:
    """What a client held is free at once when it dies."""
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, server.url, str(held)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    with client, client.stdout:
        assert client.stdout.readline() == "holds\n"
        assert lent_bytes(server.url) >= held * SLOT
        client.kill()
    eventually(lambda: lent_bytes(server.url) == 0)
    check(next(iter(loader_of(server.url))), 0)


def test_a_forked_child_keeps_what_it_inherited(server: ServerProcess) -> None:
    """A slot that a child has mapped is not reused after the parent gave it back; the child gives nothing back."""
    iterator = iter(loader_of(server.url))
    batches = [next(iterator) for _ in range(3)]
    read, write = os.pipe()
    go, start = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(go, 1)
        is_unchanged = all((batch == 1 + number).all() for number, batch in enumerate(batches))
        batches.clear()
        gc.collect()
        os.write(write, b"1" if is_unchanged else b"0")
        time.sleep(600)
        os._exit(0)
    try:
        first = batches[0]
        del batches[1:]
        gc.collect()
        for number, batch in enumerate(iterator, 3):
            check(batch, number)
        os.write(start, b"x")
        assert os.read(read, 1) == b"1"
        check(first, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for descriptor in (read, write, go, start):
            os.close(descriptor)
    del batches, batch, first
    gc.collect()
    eventually(lambda: lent_bytes(server.url) == 0)
