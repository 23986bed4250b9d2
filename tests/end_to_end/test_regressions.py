"""Regression tests, each named after the rule that was broken."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset, ServerUnavailable, WorkerDied
from teleloader_server import serve
from tests.client.fake_server import Request, fake_server
from tests.conftest import StartServer, need
from tests.end_to_end import hosted

TARGET = "tests.end_to_end.hosted:"


def test_torch_that_is_loaded_in_the_middle_of_a_batch_is_seeded(start_server: StartServer) -> None:
    """The first batch of each worker is computed again, with the worker's info."""
    need("torch")
    epochs = []
    for num_workers in ("1", "2", "3"):
        server = start_server(f"lazy={TARGET}lazy_torch", "--num-workers", num_workers)
        loader = DataLoader(RemoteDataset(server.url, "lazy"), 4, output="numpy")
        epochs.append([batch.tolist() for batch in loader])
    assert epochs[0] == epochs[1] == epochs[2]


def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    """Each consumer's request for a failed batch is a new attempt."""
    broken = tmp_path / "broken"
    broken.touch()

    def sample(index: int) -> int:
        if broken.exists():
            raise OSError("stale file handle")
        return index

    with serve(hosted.Samples(sample, 8), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 4, output="numpy")
        with pytest.raises(OSError, match="stale file handle"):
            next(iter(loader))
        broken.unlink()
        loader.set_epoch(0)
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("seed", [None, 0], ids=["as torch", "ahead"])
def test_a_stuck_sample_does_not_keep_a_server_without_workers(seed: int | None) -> None:
    """Leaving the block ends the server although user code hangs, and waiting clients get an error."""
    stuck, entered = threading.Event(), threading.Event()

    def sample(index: int) -> int:
        entered.set()
        stuck.wait()
        return index

    with ThreadPoolExecutor(1) as thread:
        with serve(hosted.Samples(sample), num_workers=0) as url:
            batches = iter(DataLoader(RemoteDataset(url, reconnect_timeout=0), seed=seed, output="numpy"))
            waiting = thread.submit(next, batches)
            entered.wait()
        stuck.set()
        with pytest.raises(ServerUnavailable, match="did not send batch 0 of epoch 0"):
            waiting.result()
    del batches


def test_sys_exit_in_a_server_without_workers_is_an_error_of_its_batch() -> None:
    """SystemExit does not end the loading thread."""

    def sample(index: int) -> int:
        return sys.exit(3) if index == 1 else index

    with serve(hosted.Samples(sample, 3), num_workers=0) as url:
        batches = iter(DataLoader(RemoteDataset(url), output="numpy"))
        assert next(batches).tolist() == [0]
        with pytest.raises(RuntimeError, match="SystemExit"):
            next(batches)
        assert next(batches).tolist() == [2]


def test_a_stopping_server_does_not_end_its_clients(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    """After SIGTERM a waiting client continues with the next server, without a traceback in the log."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    arguments = (f"slow={TARGET}slow", "--num-workers", "1", "--shutdown-grace", "1")
    first = start_server(*arguments, port=free_port)
    loader = DataLoader(RemoteDataset(first.url, "slow"), 2, output="numpy")
    with ThreadPoolExecutor(1) as thread:
        epoch = thread.submit(lambda: [i for batch in loader for i in batch.tolist()])
        while not any(worker["state"] == "busy" for worker in first.stats()["workers"]):
            assert not epoch.done(), "it waits for the gate"
        assert first.end() == 0
        gate.touch()
        start_server(*arguments, port=free_port)
        assert epoch.result() == list(range(8))
    assert "Traceback" not in "".join(first.log)


def test_iterators_of_one_loader_do_not_share_memory_that_is_in_use() -> None:
    """Two concurrent iterators yield equal batches in separate memory."""
    with serve(hosted.Samples(lambda i: np.full(50_000, i % 251, np.uint8), 600), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 4, output="numpy")

        def check(_: int) -> bool:
            batches = iter(loader)
            loader.set_epoch(0)
            return all((batch == (np.arange(4 * k, 4 * k + 4) % 251)[:, None]).all() for k, batch in enumerate(batches))

        with ThreadPoolExecutor(3) as threads:
            assert all(threads.map(check, range(6)))


def test_a_server_that_was_left_gives_its_memory_back() -> None:
    """No mapping of shared memory outlives the block of `serve`."""
    before = _shared_mappings()
    with serve(hosted.Samples(lambda i: np.zeros(200_000, np.uint8), 40), num_workers=1) as url:
        list(DataLoader(RemoteDataset(url), seed=0, output="numpy"))
        assert _shared_mappings() > before
    assert _shared_mappings() <= before


def test_a_session_that_was_ended_gives_its_memory_back() -> None:
    """The memory of a loader's private workers is released with them, while the server continues."""
    before = _shared_mappings()
    with serve(hosted.Samples(lambda i: np.zeros(200_000, np.uint8), 40), num_workers=1) as url:
        batches = iter(DataLoader(RemoteDataset(url), output="numpy"))
        next(batches)
        assert _shared_mappings() > before
        assert len(list(batches)) == 39
        assert _shared_mappings() <= before
        assert httpx.get(f"{url}/stats").json()["workers"] == []


def test_loops_that_are_left_are_no_errors_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """Abandoned loops cause no log entry, whatever was in transit."""
    with serve(hosted.Samples(lambda i: np.zeros(1000), 3000), num_workers=2) as url:
        dataset = RemoteDataset(url)
        for _ in range(25):
            next(iter(DataLoader(dataset, num_workers=2, prefetch_factor=20, output="numpy")))
            gc.collect()
    assert [record.getMessage() for record in caplog.records] == []


def _shared_mappings() -> int:
    """Return the number of this process's mappings, after collecting those of other tests."""
    gc.collect()
    return sum("memfd:teleloader" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_requests_without_a_name_do_not_fill_the_memory() -> None:
    """Batches that only a disconnected client could request are evicted for awaited ones."""
    dataset = hosted.Samples(lambda i: np.zeros(2**20, np.uint8), 60)
    with serve(dataset, num_workers=1, memory_budget=8 * 2**20) as url:
        key = httpx.post(f"{url}/v1/loaders", json={"dataset": "dataset"}).json()["key"]
        for k in range(60):
            httpx.get(f"{url}/v1/loaders/{key}/epochs/0/batches/{k}").raise_for_status()
        server = httpx.get(f"{url}/stats").json()["server"]
    assert server["memory_used"] <= server["memory_budget"]


def test_a_thread_of_the_dataset_does_not_keep_the_server(start_server: StartServer) -> None:
    """SIGTERM ends a server whose dataset has started an endless thread."""
    server = start_server(f"threaded={TARGET}threaded", "--num-workers", "1")
    assert server.end(signal.SIGTERM) == 0


def test_a_long_configuration_reaches_the_forkserver(start_server: StartServer, tmp_path: Path) -> None:
    """The configuration may be longer than one read of its channel."""
    config = tmp_path / "loader.toml"
    names = json.dumps([f"file-{i:060}" for i in range(5000)])
    config.write_text(f'[datasets.many]\nfactory = "{TARGET}of_names"\nkwargs = {{ names = {names} }}\n')
    server = start_server("--config", str(config), "--num-workers", "1")
    assert len(RemoteDataset(server.url, "many")) == 5000


def test_single_damaged_responses_are_not_three_in_a_row() -> None:
    """Each damaged response is requested again, whatever their number in an epoch."""

    def answer(request: Request) -> bytes:
        body = bytearray(request.right())
        if request.number % 3 == 2:
            body[-70] ^= 1
        return bytes(body)

    with fake_server(answer) as url:
        loader = DataLoader(RemoteDataset(url), output="numpy")
        for _ in range(4):
            assert len(list(loader)) == 8


def test_workers_that_never_start_are_an_error() -> None:
    """Waiting clients get an error instead of waiting forever."""

    def end(worker: int) -> None:
        os._exit(7)

    with (
        serve(hosted.Samples(lambda i: i), num_workers=2, worker_init_fn=end) as url,
        pytest.raises(WorkerDied, match=r"the server cannot start a worker: worker .* exited with code 7"),
    ):
        next(iter(DataLoader(RemoteDataset(url), output="numpy")))


@pytest.mark.parametrize("length", [5, 7, 8])
def test_the_state_is_the_same_on_every_rank_also_with_uneven_tails(length: int) -> None:
    """States of all ranks are equal after each step, and after the epoch."""
    with serve(hosted.Samples(lambda i: i, length), num_workers=1) as url:
        loaders = [
            DataLoader(RemoteDataset(url), 1, rank=rank, world_size=3, tail="uneven", output="numpy")
            for rank in range(3)
        ]
        steps = [_states(loader) for loader in loaders]
        for states in zip(*(step[0] for step in steps), strict=False):
            assert all(state == states[0] for state in states)
        assert [after for _, after in steps] == [steps[0][1]] * 3


def _states(loader: DataLoader) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    during = [loader.state_dict() for _ in loader]
    return during, loader.state_dict()


@pytest.mark.parametrize("value", [-1, "a", 1.0, True, None])
def test_an_epoch_is_a_whole_number(value: Any) -> None:
    """Other values are rejected immediately; NumPy's integers are valid."""
    with serve(hosted.Samples(lambda i: i), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), output="numpy")
        with pytest.raises(ValueError, match="epoch must be a non-negative integer, got"):
            loader.set_epoch(value)
        loader.set_epoch(np.int64(3))
        assert json.loads(json.dumps(loader.state_dict()))["epoch"] == 3
