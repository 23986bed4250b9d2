"""Shards of an iterable-style dataset on several servers: batches are equal, also if servers fail, leave or join."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from teleloader import DataLoader, RemoteDataset
from tests.conftest import ServerProcess, StartServer

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")

TARGET = "tests.end_to_end.hosted:"


def start(start_server: StartServer, dataset: str = "long_stream", port: int = 0) -> ServerProcess:
    """Start a server with one shared worker."""
    return start_server(f"data={TARGET}{dataset}", "--num-workers", "1", port=port)


def loader_of(*servers: ServerProcess, **more: Any) -> DataLoader:
    """Return a loader with three shards."""
    dataset = RemoteDataset([server.url for server in servers], "data")
    arguments = {"batch_size": 4, "num_workers": 3, "prefetch_factor": 2, "output": "numpy", **more}
    return DataLoader(dataset, **arguments)


def rest(batches: Iterator[Any]) -> list[list[int]]:
    """Return the remaining batches."""
    return [batch.tolist() for batch in batches]


def computing(server: ServerProcess) -> set[int]:
    """Return the workers of sessions that have computed batches, which are the numbers of their shards."""
    return {worker["worker"] for worker in server.stats()["workers"] if worker["loader"] and worker["batches"]}


def shards_of(batches: list[list[int]], shards: int = 3) -> list[int]:
    """Return the shard of each batch."""
    return [batch[0] % shards for batch in batches]


@pytest.mark.parametrize("dataset", ["stream", "long_stream"])
def test_batches_are_those_of_one_server(start_server: StartServer, dataset: str) -> None:
    """Shard j is on server j mod S; batches come in torch's order, epoch after epoch."""
    servers = [start(start_server, dataset) for _ in range(2)]
    expected = rest(iter(loader_of(servers[0])))
    divided = loader_of(*servers)
    assert rest(iter(divided)) == expected
    batches = iter(divided)
    seen = [next(batches).tolist() for _ in range(3)]
    assert shards_of(seen) == [0, 1, 2]
    on = [computing(server) for server in servers]
    assert sorted(on, key=len) == [{1}, {0, 2}]
    assert seen + rest(batches) == expected


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_shards_of_a_failed_server_move(start_server: StartServer, failing: int, how: signal.Signals) -> None:
    """They continue on another server, the other shards go on, and each batch arrives once and in order."""
    servers = [start(start_server) for _ in range(2)]
    expected = rest(iter(loader_of(servers[0])))
    loader = loader_of(*servers)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(30)]
    servers[failing].end(how)
    assert seen + rest(batches) == expected
    assert rest(iter(loader)) == expected  # the next epoch, with the other server alone


@pytest.mark.parametrize("size", [None, 50])
def test_shards_move_with_their_shuffle_buffer(start_server: StartServer, size: int | None) -> None:
    """Position, order and random numbers are restored, with persistent workers too."""
    more: dict[str, Any] = {"shuffle_buffer_size": size, "seed": 3, "persistent_workers": True}
    servers = [start(start_server) for _ in range(3)]
    alone = loader_of(servers[0], **more)
    expected = [rest(iter(alone)) for _ in range(2)]
    loader = loader_of(*servers, **more)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(40)]
    servers[1].kill()
    assert seen + rest(batches) == expected[0]
    assert rest(iter(loader)) == expected[1]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1)])
def test_a_state_resumes_on_another_number_of_servers(start_server: StartServer, before: int, after: int) -> None:
    """The state does not depend on the servers."""
    servers = [start(start_server) for _ in range(3)]
    loader = loader_of(*servers[:before], shuffle_buffer_size=20, seed=1)
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(25)]
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = loader_of(*servers[:after], shuffle_buffer_size=20, seed=1)
    resumed.load_state_dict(state)
    assert rest(iter(resumed)) == rest(batches)
    assert len(seen) == 25


def test_sessions_end_with_the_epoch(start_server: StartServer) -> None:
    """No server keeps workers of a session."""
    servers = [start(start_server) for _ in range(2)]
    assert len(rest(iter(loader_of(*servers)))) == 252
    for server in servers:
        assert not any(worker["loader"] for worker in server.stats()["workers"])
