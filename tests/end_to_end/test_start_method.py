"""``start_method = "spawn"``: each worker builds the dataset itself, and no process is forked that has it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from teleloader import DataLoader, LoaderTimeout, RemoteDataset, RemoteError, WorkerDied
from tests.conftest import ServerProcess, StartServer, eventually
from tests.end_to_end.spawned import builders
from tests.end_to_end.terminal import SERVER, piped

MODULE = "tests.end_to_end.spawned"
SPAWN = 'start_method = "spawn"'
FORK = 'start_method = "fork"'
Serve = Callable[..., ServerProcess]


@pytest.fixture(autouse=True)
def _builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Datasets record in this file where they are built."""
    monkeypatch.setenv("BUILDERS", str(tmp_path / "builders"))


def config(folder: Path, **datasets: str) -> str:
    """Write a configuration file with datasets of `MODULE`, given the further keys of each."""
    path = folder / "loader.toml"
    tables = [f'[datasets.{name}]\nfactory = "{MODULE}:{name}"\n{keys}' for name, keys in datasets.items()]
    path.write_text("\n".join(tables))
    return str(path)


@pytest.fixture
def serve(tmp_path: Path, start_server: StartServer) -> Serve:
    """Start a server with datasets of `MODULE`."""

    def start(*arguments: str, **datasets: str) -> ServerProcess:
        return start_server("--config", config(tmp_path, **datasets), *arguments)

    return start


def load(server: ServerProcess, dataset: str, **arguments: Any) -> list[Any]:
    """Return the batches of an epoch as lists."""
    loader = DataLoader(RemoteDataset(server.url, dataset), output="numpy", **arguments)
    return [[part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist() for batch in loader]


def test_a_dataset_that_hangs_when_forked_works_when_spawned(serve: Serve) -> None:
    """Its thread does not exist in forked workers; workers that build it themselves have the thread."""
    forked = serve("--batch-timeout", "1", "--num-workers", "1", Identified=FORK)
    with pytest.raises(LoaderTimeout, match="exceeded the timeout of 1 s"):
        load(forked, "Identified", batch_size=4)
    forked.end()
    spawned = serve("--num-workers", "2", Identified=SPAWN)
    for arguments in ({}, {"shuffle": True, "seed": 3}):
        batches = load(spawned, "Identified", batch_size=2, **arguments)
        assert sorted(value for values, _ in batches for value in values) == [index * index for index in range(40)]
        assert {pid for _, pids in batches for pid in pids} <= set(spawned.worker_pids())


def test_an_iterable_dataset_is_built_by_the_worker_of_each_shard(serve: Serve) -> None:
    """Private workers build the dataset too, and divide it by their worker information; each epoch is the same."""
    server = serve("--num-workers", "1", ThreadedStream=SPAWN)
    loader = DataLoader(RemoteDataset(server.url), 2, num_workers=2, output="numpy")
    for _ in range(2):
        assert [batch.tolist() for batch in loader][:3] == [[0, 2], [1, 3], [4, 6]]


def test_only_workers_that_need_a_dataset_build_it(serve: Serve) -> None:
    """One process builds the dataset to describe it, and exits; a worker builds it before its first batch."""
    server = serve("--num-workers", "2", recorded=f'{SPAWN}\nworker_init = "{MODULE}:remember"',
                   Identified=SPAWN, shuffled=FORK)  # fmt: skip
    (describer,) = builders()
    eventually(lambda: not Path(f"/proc/{describer}").exists())
    assert load(server, "Identified", batch_size=20)
    assert load(server, "shuffled", batch_size=20)
    assert builders() == [describer]
    batches = load(server, "recorded", batch_size=1)
    assert [numbers for numbers, _, _ in batches] == [[index] for index in range(50)]
    assert {count for _, _, counts in batches for count in counts} == {1}, "worker_init is called once, after the build"
    assert {pid for _, pids, _ in batches for pid in pids} == set(builders()[1:]) <= set(server.worker_pids())


def test_a_replacement_of_a_worker_builds_the_dataset_again(serve: Serve) -> None:
    """A worker that was killed is replaced by one that works."""
    server = serve("--num-workers", "1", Identified=SPAWN)
    before = load(server, "Identified", batch_size=10)
    os.kill(server.worker_pids()[0], signal.SIGKILL)
    after = load(server, "Identified", batch_size=10, seed=1)  # another loader: the server keeps batches of the first
    assert [values for values, _ in after] == [values for values, _ in before]
    assert after[0][1] != before[0][1]


def test_all_workers_build_the_same_dataset(serve: Serve) -> None:
    """The generators are seeded for the factory, so an order that it draws does not depend on the process."""
    server = serve("--num-workers", "1", shuffled=SPAWN)
    ((first, before),) = load(server, "shuffled", batch_size=40)
    os.kill(server.worker_pids()[0], signal.SIGKILL)
    ((again, after),) = load(server, "shuffled", batch_size=40, seed=1)
    assert first == again != list(range(40))
    assert before != after


def test_several_servers_of_one_machine(serve: Serve) -> None:
    """The workers of each server build the dataset themselves."""
    server = serve("--servers", "2", "--num-workers", "2", Identified=SPAWN)
    batches = load(server, "Identified", batch_size=1)
    assert [values for values, _ in batches] == [[index * index] for index in range(40)]


def test_an_exception_of_the_factory_in_a_worker_is_that_of_the_batch(serve: Serve) -> None:
    """The client gets the exception with its traceback, and the next batch calls the factory again."""
    server = serve("--num-workers", "1", fails_at_first=SPAWN, shuffled=FORK)
    pids = server.worker_pids()
    with pytest.raises(ConnectionError, match="the store is not available") as caught:
        load(server, "fails_at_first", batch_size=10)
    text = "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "in fails_at_first" in text
    assert "while it built dataset 'fails_at_first'" in text
    assert len(load(server, "shuffled", batch_size=10)) == 4
    assert load(server, "fails_at_first", batch_size=10)[4] == [40, 41, 42, 43, 44, 45, 46, 47, 48, 49]
    assert server.worker_pids() == pids, "the worker lives on"


def test_a_factory_that_ends_workers_fails_the_batch(serve: Serve) -> None:
    """The batch fails after some workers, and other datasets are served."""
    server = serve("--num-workers", "1", kills_workers=SPAWN, shuffled=FORK)
    with pytest.raises(WorkerDied, match="exited with code 3"):
        load(server, "kills_workers", batch_size=10)
    assert len(load(server, "shuffled", batch_size=10)) == 4


def test_a_dataset_that_differs_from_its_description_is_an_error(serve: Serve) -> None:
    """Batches would have other indices than the client knows."""
    server = serve("--num-workers", "1", grows=SPAWN)
    with pytest.raises(RemoteError, match="dataset 'grows' has changed since the server started"):
        load(server, "grows", batch_size=10)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("fails", "RuntimeError: the disk is not mounted"),
        ("crashes", "the process that builds dataset 'crashes' was killed by signal SIGSEGV"),
        ("missing", "module 'tests.end_to_end.spawned' has no attribute 'missing'"),
    ],
)
def test_a_dataset_that_cannot_be_built_prevents_the_start(tmp_path: Path, name: str, shown: str) -> None:
    """The server exits with the reason, as for other datasets."""
    done = piped(SERVER, "--config", config(tmp_path, **{name: SPAWN}), "--port", "0")
    assert done.code == 2
    assert shown in done.err


def test_without_worker_processes_the_dataset_is_built_in_the_server(serve: Serve) -> None:
    """With ``--num-workers 0``, no process is forked."""
    server = serve("--num-workers", "0", Identified=SPAWN)
    assert load(server, "Identified", batch_size=1)[3] == [[9], [server.pid]]
