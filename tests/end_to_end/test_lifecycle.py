"""Lifecycle of a server over HTTP: drain it, and change the number of its workers while it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import httpx
import psutil
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from teleloader_server.config import DatasetConfig
from teleloader_server.limits import Limits
from teleloader_server.workers.forkserver import ForkServer
from teleloader_server.workers.messages import PoolResized
from teleloader_server.workers.processes import ProcessPool
from teleloader_shared.spec import LoaderSpec
from tests.conftest import ServerProcess, StartServer, eventually
from tests.raw import Raw

TARGET = "tests.end_to_end.hosted:"


def resize(server: ServerProcess, num_workers: object) -> httpx.Response:
    """Change the number of workers."""
    return httpx.put(f"{server.url}/v1/workers", json={"num_workers": num_workers})


def workers(server: ServerProcess, state: str = "") -> dict[int, int]:
    """Return the process IDs of the workers, by worker ID."""
    found = server.stats()["workers"]
    return {worker["worker"]: worker["pid"] for worker in found if not state or worker["state"] == state}


def ready(server: ServerProcess, count: int) -> Callable[[], bool]:
    """Return a condition: so many workers run, and all are ready."""
    return lambda: len(workers(server)) == count and not workers(server, "starting")


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The dataset `slow` returns samples once this file exists."""
    path = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(path))
    return path


# -- number of workers


def test_the_order_is_the_same_while_the_number_of_workers_changes(start_server: StartServer) -> None:
    """Each batch arrives once, from previous and from new workers."""
    server = start_server(TARGET + "unhurried", "--num-workers", "2")

    def batches(sizes: dict[int, int]) -> list[Any]:
        loader = DataLoader(RemoteDataset(server.url, "unhurried"), batch_size=4, shuffle=True, seed=3)
        received = []
        for number, batch in enumerate(loader):
            if number in sizes:
                response = resize(server, sizes[number])
                assert (response.status_code, response.json()) == (200, {"num_workers": sizes[number]})
            received.append(batch.tolist())
        return received

    before = workers(server)
    expected = batches({})
    assert sorted(sample for batch in expected for sample in batch) == list(range(1000))
    eventually(lambda: server.stats()["consumers"][0]["idle"] > 0)
    computed = server.stats()["datasets"][0]["batches_computed"]
    assert batches({20: 4, 60: 1, 61: 3, 100: 1, 150: 5, 151: 2, 200: 3}) == expected
    eventually(ready(server, 3))
    assert workers(server)[0] == before[0], "worker 0 was never surplus"
    stats = server.stats()
    assert stats["server"]["num_workers"] == 3
    assert stats["server"]["worker_restarts"] == 0, "a planned stop does not count as a restart"
    assert stats["datasets"][0]["batches_computed"] - computed <= 250, "no batch is computed twice"
    assert not psutil.Process(before[0]).parent().children()[3:], "stopped workers have exited"  # type: ignore[union-attr]
    assert not any("WARNING" in line or "ERROR" in line for line in server.log), "".join(server.log)


def test_new_workers_compute_batches(start_server: StartServer) -> None:
    """New workers compute batches, and registrations state the new number of workers."""
    server = start_server(TARGET + "unhurried", "--num-workers", "1")
    assert resize(server, 3).status_code == 200
    eventually(ready(server, 3))
    registration = httpx.post(f"{server.url}/v1/loaders", json={"dataset": "unhurried", "batch_size": 10}).json()
    assert registration["num_workers"] == 3
    path = f"/v1/loaders/{registration['key']}/epochs/0/batches?ranges=0:100"
    assert httpx.get(server.url + path, timeout=60).status_code == 200
    assert all(worker["batches"] for worker in server.stats()["workers"])


def test_workers_know_the_new_number(start_server: StartServer) -> None:
    """`get_worker_info` reports the new number of workers in all workers."""
    server = start_server(TARGET + "colleagues", "--num-workers", "2")
    loader = DataLoader(RemoteDataset(server.url, "colleagues"), batch_size=1, prefetch_next_epoch=False)

    def known() -> set[int]:
        return {int(batch[0]) for batch in loader}

    assert known() == {2}
    for count in (3, 1):
        assert resize(server, count).status_code == 200
        eventually(ready(server, count))
        assert known() == {count}


def test_a_surplus_worker_completes_its_batch(start_server: StartServer, gate: Path) -> None:
    """A surplus worker completes its batch, gets no other one, and is replaced if the number grows again."""
    server = start_server(TARGET + "slow", "--num-workers", "2")
    before = workers(server)
    key = httpx.post(f"{server.url}/v1/loaders", json={"dataset": "slow"}).json()["key"]
    path = f"/v1/loaders/{key}/epochs/0/batches"
    with Raw(server.url) as first, Raw(server.url) as second, Raw(server.url) as third:
        first.send_get(f"{path}/0")
        second.send_get(f"{path}/1")
        eventually(lambda: len(workers(server, "busy")) == 2)
        assert resize(server, 1).status_code == 200
        third.send_get(f"{path}/2")
        time.sleep(0.5)
        assert workers(server) == before
        gate.touch()
        assert [client.receive().status for client in (first, second, third)] == [200, 200, 200]
        eventually(ready(server, 1))
    assert workers(server) == {0: before[0]}
    eventually(lambda: not psutil.pid_exists(before[1]))


def test_a_surplus_worker_that_is_killed_is_not_restarted(start_server: StartServer, gate: Path) -> None:
    """The batch of a surplus worker that is killed is computed by another worker."""
    server = start_server(TARGET + "slow", "--num-workers", "2")
    key = httpx.post(f"{server.url}/v1/loaders", json={"dataset": "slow"}).json()["key"]
    with Raw(server.url) as first, Raw(server.url) as second:
        for k, client in enumerate((first, second)):
            client.send_get(f"/v1/loaders/{key}/epochs/0/batches/{k}")
        eventually(lambda: len(workers(server, "busy")) == 2)
        assert resize(server, 1).status_code == 200
        os.kill(workers(server)[1], signal.SIGKILL)
        eventually(ready(server, 1))
        gate.touch()
        assert [client.receive().status for client in (first, second)] == [200, 200]
    assert resize(server, 2).status_code == 200
    eventually(ready(server, 2))


def test_the_number_changes_while_the_fork_server_is_replaced(start_server: StartServer) -> None:
    """During a restart of the fork server, a request takes effect or fails with a status that is retried."""
    server = start_server("--demo", "--num-workers", "2")
    for count in (4, 1, 3):
        forkserver = psutil.Process(workers(server)[0]).parent()
        assert forkserver is not None
        forkserver.kill()

        def resized(count: int = count) -> bool:
            response = resize(server, count)
            assert response.status_code in (200, 503), response.text
            return response.status_code == 200

        eventually(resized)
        eventually(ready(server, count))
        assert server.stats()["server"]["num_workers"] == count


@pytest.mark.parametrize("count", [0, -1, 1025, 1.5, True, "2", None])
def test_invalid_numbers_are_refused(server: ServerProcess, count: object) -> None:
    """An invalid number of workers does not change the number."""
    before = workers(server)
    response = resize(server, count)
    assert (response.status_code, response.json()["code"]) == (422, "InvalidRequest")
    assert workers(server) == before


@pytest.fixture(scope="module")
def server() -> Any:
    """A server for requests that change nothing."""
    running = ServerProcess("--port", "0", "--demo", "--num-workers", "1")
    yield running
    running.end()


def test_a_server_without_worker_processes_cannot_be_resized(start_server: StartServer) -> None:
    """A server that loads in its own process rejects a new number of workers."""
    response = resize(start_server("--demo", "--num-workers", "0"), 2)
    assert (response.status_code, response.json()["code"]) == (409, "CannotResize")
    assert "--num-workers 0" in response.json()["detail"]


def test_workers_that_compute_batches_in_turn_cannot_be_resized() -> None:
    """The number of a loader's private workers is fixed, because batch k is computed by worker k modulo it."""
    spec = LoaderSpec(dataset="x", session="s", num_workers=2)
    pool = ProcessPool(lambda: pytest.fail("no process is started"), Limits(num_workers=2), spec)
    with pytest.raises(ValueError, match="in turn"):
        pool.resize(3)


async def test_the_scheduler_learns_that_a_worker_is_removed() -> None:
    """A removed worker is reported to the scheduler once its process gets no more batches."""
    config = DatasetConfig(name="digits", factory="teleloader_server.demo:digits_train")
    pool = ProcessPool(lambda: ForkServer.spawn([config]), Limits(num_workers=2, memory_budget=2**20))
    listener = Mock()
    await pool.start(listener)
    try:
        while listener.worker_ready.call_count < 2:
            await asyncio.sleep(0.01)
        with patch.object(pool._places[0].process, "send", wraps=pool._places[0].process.send) as sent:
            pool.resize(1)
        sent.assert_called_once_with(PoolResized(1, 2**20))  # its share of the memory
        while not listener.worker_removed.called:
            await asyncio.sleep(0.01)
        listener.worker_removed.assert_called_once_with(1)
        listener.worker_lost.assert_not_called()
        assert [state.worker for state in pool.workers()] == [0]
    finally:
        await pool.close()


# -- drain


def test_a_drained_server_completes_its_requests_and_exits(start_server: StartServer, gate: Path) -> None:
    """A repeated drain request does not abort pending requests."""
    server = start_server(TARGET + "slow", "--num-workers", "1", "--shutdown-grace", "60")
    drain = f"{server.url}/v1/drain"
    assert httpx.get(drain).json() == {"state": "ready", "in_flight": 0}
    key = httpx.post(f"{server.url}/v1/loaders", json={"dataset": "slow"}).json()["key"]
    with Raw(server.url) as waiting:
        waiting.send_get(f"/v1/loaders/{key}/epochs/0/batches/3")
        eventually(lambda: workers(server, "busy"))
        for _ in range(3):
            response = httpx.post(drain)
            assert (response.status_code, response.json()) == (202, {"state": "draining", "in_flight": 1})
        eventually(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
        assert httpx.get(drain).json() == {"state": "draining", "in_flight": 1}
        gate.touch()
        assert waiting.receive().status == 200
    assert server.process.wait(20) == 0
    assert not any("ERROR" in line or "Traceback" in line for line in server.log), "".join(server.log)


def test_a_training_loop_continues_when_one_of_two_servers_is_drained(start_server: StartServer) -> None:
    """Every batch arrives once and in order while one of two servers drains."""
    servers = [start_server(TARGET + "unhurried", "--num-workers", "1") for _ in range(2)]
    dataset = RemoteDataset([server.url for server in servers], "unhurried")
    received = []
    for number, batch in enumerate(DataLoader(dataset, batch_size=4, shuffle=True, seed=3)):
        if number == 50:
            assert httpx.post(f"{servers[0].url}/v1/drain").status_code == 202
        received.append(batch.tolist())
    assert servers[0].process.wait(20) == 0
    alone = DataLoader(RemoteDataset(servers[1].url, "unhurried"), batch_size=4, shuffle=True, seed=3)
    assert received == [batch.tolist() for batch in alone]


def test_a_server_in_another_program_is_not_drained() -> None:
    """An embedded server rejects a drain request, because its program controls the shutdown."""
    with serve([1, 2, 3]) as url:
        response = httpx.post(f"{url}/v1/drain")
        assert (response.status_code, response.json()["code"]) == (409, "CannotDrain")
        assert httpx.get(f"{url}/v1/drain").json()["state"] == "ready"
        response = httpx.put(f"{url}/v1/workers", json={"num_workers": 2})
        assert (response.status_code, response.json()["code"]) == (409, "CannotResize")


def test_a_server_without_tokens_is_controlled_from_its_own_machine_only(start_server: StartServer) -> None:
    """Without tokens, remote control from other machines is rejected, even with --insecure."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has loopback addresses only")
        address = probe.getsockname()[0]
    server = start_server("--demo", "--num-workers", "1", "--host", "0.0.0.0", "--insecure")
    remote = f"http://{address}:{server.url.rpartition(':')[2]}"
    for response in (
        httpx.post(f"{remote}/v1/drain", trust_env=False),
        httpx.put(f"{remote}/v1/workers", json={"num_workers": 2}, trust_env=False),
    ):
        assert (response.status_code, response.json()["code"]) == (403, "Forbidden")
    assert httpx.get(f"{remote}/v1/drain", trust_env=False).json()["state"] == "ready"
    assert resize(server, 2).status_code == 200
