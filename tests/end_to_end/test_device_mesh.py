"""Loaders of a device mesh: gloo processes, and a real server with two workers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")


from teleloader import DataLoader, RemoteDataset
from tests.conftest import ServerProcess, StartServer
from tests.end_to_end import mesh_rank
from tests.end_to_end.mesh_rank import LENGTH
from tests.end_to_end.ranks import Raised, Ranks
from tests.examples.running import RANKS, run_example

pytestmark = pytest.mark.timeout(300)

MODULE = "tests.end_to_end.mesh_rank"
SERVER = (
    "--num-workers", "2",
    *(f"{name.lower()}={MODULE}:{name}" for name in ("Noisy", "Odd", "Failing", "Large", "Slow", "Stream", "Stateful")),
)  # fmt: skip
TWO_BY_TWO = ((2, 2), ("dp", "tp"))
ONE_GROUP = ((4,), ("tp",))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Start a server for the tests of this module."""
    process = ServerProcess("--port", "0", *SERVER)
    yield process
    process.end()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Start four ranks for the tests of this module."""
    with Ranks(4) as started:
        yield started


names = (f"loader {number}" for number in itertools.count())


@pytest.fixture
def name() -> str:
    """Return the name of a loader that no other test uses."""
    return next(names)


def grouped(results: list[Any], groups: list[list[int]]) -> list[Any]:
    """Return the result of each group, and check that it is the same on all of its ranks."""
    for group in groups:
        for rank in group[1:]:
            assert results[rank] == results[group[0]]
    return [results[group[0]] for group in groups]


def consumers_of(server: ServerProcess, ranks: Ranks, loader: str) -> set[int]:
    """Return the ranks that have requested batches of a dataset."""
    pids = {process.pid: rank for rank, process in enumerate(ranks.processes)}
    return {
        pids[int(each["consumer"].partition("/")[0].rpartition(":")[2])]
        for each in server.stats()["consumers"]
        if each["batches_sent"] and each["dataset"] == loader
    }


@pytest.mark.parametrize(
    ("mesh", "groups"),
    [
        (((2, 2), ("dp", "tp")), [[0, 1], [2, 3]]),
        (((2, 2), ("pp", "dp_shard")), [[0, 2], [1, 3]]),
        (((2, 2), ("dp_replicate", "cp")), [[0, 1], [2, 3]]),
        (((2, 2), ("dp_replicate", "dp_shard")), [[0], [1], [2], [3]]),
        (((1, 2, 2), ("pp", "cp", "tp")), [[0, 1, 2, 3]]),
    ],
    ids=["dp-tp", "pp-dp", "dp-cp", "dp-dp", "pp-cp-tp"],
)
def test_ranks_of_a_group_get_equal_batches_and_groups_share_the_epoch(
    server: ServerProcess, ranks: Ranks, name: str, mesh: Any, groups: list[list[int]]
) -> None:
    """Batches are equal bit for bit in a group; the groups together get each sample once in each epoch."""
    ranks.each(mesh_rank.create, name, server.url, "noisy", mesh, batch_size=4, shuffle=True)
    orders = []
    for _ in range(2):
        batches = grouped(ranks.each(mesh_rank.epoch, name), groups)
        assert {len(each) for each in batches} == {LENGTH // 4 // len(groups)}
        order = [index for each in batches for found, _ in each for index in found]
        assert sorted(order) == list(range(LENGTH))
        orders.append(order)
    assert orders[0] != orders[1]
    assert len(set(ranks.each(mesh_rank.state, name))) == 1
    found = ranks.each(mesh_rank.facts, name)
    assert {(each["length"], each["steps"], each["visits"]) for each in found} == {
        (LENGTH // 4 // len(groups), LENGTH // 4 // len(groups), LENGTH // len(groups))
    }


def test_only_leaders_request_batches(start_server: StartServer, ranks: Ranks, name: str) -> None:
    """The server computes and sends each batch once, to the first rank of each group."""
    server = start_server(*SERVER)
    ranks.each(mesh_rank.create, name, server.url, "noisy", TWO_BY_TWO, batch_size=4)
    grouped(ranks.each(mesh_rank.epoch, name), [[0, 1], [2, 3]])
    assert consumers_of(server, ranks, "noisy") == {0, 2}
    assert sum(each["batches_sent"] for each in server.stats()["consumers"]) == LENGTH // 4
    received = [each["bytes"] for each in ranks.each(mesh_rank.facts, name)]
    assert received[0] == received[1] > 0


@pytest.mark.parametrize("tail", ["pad", "drop", "uneven"])
def test_the_division_of_the_last_samples(server: ServerProcess, ranks: Ranks, name: str, tail: Any) -> None:
    """All ranks of a group get the batches that the data rank gets without a group."""
    ranks.each(mesh_rank.create, name, server.url, "odd", ((2, 2), ("dp", "tp")), batch_size=7, tail=tail, seed=3)
    found = grouped(ranks.each(mesh_rank.epoch, name), [[0, 1], [2, 3]])
    for rank, batches in enumerate(found):
        alone = DataLoader(RemoteDataset(server.url, "odd"), 7, rank=rank, world_size=2, tail=tail, seed=3)
        assert [digest for _, digest in batches] == [mesh_rank.digest(batch) for batch in alone]


@pytest.mark.parametrize("dataset", ["stream", "stateful"])
def test_an_iterable_style_dataset(server: ServerProcess, ranks: Ranks, name: str, dataset: str) -> None:
    """The ranks of a group get the samples of all shards, also after a resume in the middle of an epoch."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "seed": 1}
    ranks.each(mesh_rank.create, name, server.url, dataset, ONE_GROUP, **options)
    (batches,) = grouped(ranks.each(mesh_rank.epoch, name), [[0, 1, 2, 3]])
    assert sorted(index for found, _ in batches for index in found) == list(range(21))
    (first,) = grouped(ranks.each(mesh_rank.epoch, name, 2), [[0, 1, 2, 3]])
    (state,) = grouped(ranks.each(mesh_rank.state, name), [[0, 1, 2, 3]])
    (second,) = grouped(ranks.each(mesh_rank.epoch, name), [[0, 1, 2, 3]])
    ranks.each(mesh_rank.create, name, server.url, dataset, ONE_GROUP, **options)
    ranks.each(mesh_rank.restore, name, state)
    (rest,) = grouped(ranks.each(mesh_rank.epoch, name), [[0, 1, 2, 3]])
    assert sorted(index for found, _ in first + rest for index in found) == list(range(21))
    assert second != rest


def test_persistent_workers(server: ServerProcess, ranks: Ranks, name: str) -> None:
    """The workers of the leader continue with the next epoch, also if the training loop ended the last one early."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "persistent_workers": True}
    ranks.each(mesh_rank.create, name, server.url, "stream", ONE_GROUP, **options)
    for count in (None, 2, None):
        (batches,) = grouped(ranks.each(mesh_rank.epoch, name, count), [[0, 1, 2, 3]])
        (_,) = grouped(ranks.each(mesh_rank.state, name), [[0, 1, 2, 3]])
    assert sorted(index for found, _ in batches for index in found) == list(range(21))


def test_a_resume_on_another_mesh(server: ServerProcess, ranks: Ranks, name: str) -> None:
    """A state of two data ranks is valid for one and for four, if the global batch size is the same."""
    ranks.each(mesh_rank.create, name, server.url, "noisy", TWO_BY_TWO, batch_size=8, shuffle=True)
    before = grouped(ranks.each(mesh_rank.epoch, name, 2), [[0, 1], [2, 3]])
    state = ranks.each(mesh_rank.state, name)[3]
    for mesh, batch_size, groups in (
        (ONE_GROUP, 16, [[0, 1, 2, 3]]),
        (((4,), ("fsdp",)), 4, [[0], [1], [2], [3]]),
        (((2, 2), ("pp", "dp")), 8, [[0, 2], [1, 3]]),
    ):
        ranks.each(mesh_rank.create, name, server.url, "noisy", mesh, batch_size=batch_size, shuffle=True)
        ranks.each(mesh_rank.restore, name, state)
        after = grouped(ranks.each(mesh_rank.epoch, name), groups)
        found = [index for batches in before + after for indices, _ in batches for index in indices]
        assert sorted(found) == list(range(LENGTH))


def test_ranks_that_end_an_epoch_early(server: ServerProcess, ranks: Ranks, name: str) -> None:
    """The next epoch is complete on all ranks, also if they have ended the last one after different batches."""
    ranks.each(mesh_rank.create, name, server.url, "noisy", ONE_GROUP, batch_size=4)
    for counts in ((3, 3, 3, 3), (6, 2, 1, 6), (0, 0, 0, 0)):
        for rank, count in enumerate(counts):
            ranks.start(rank, mesh_rank.epoch, name, count)
        assert [len(ranks.result(rank)) for rank in range(4)] == list(counts)
    (batches,) = grouped(ranks.each(mesh_rank.epoch, name), [[0, 1, 2, 3]])
    assert [index for found, _ in batches for index in found] == list(range(LENGTH))


def test_a_leader_that_ends_an_epoch_early(server: ServerProcess, ranks: Ranks, name: str) -> None:
    """The other ranks raise an exception if they request more batches than the leader, and can start another epoch."""
    ranks.each(mesh_rank.create, name, server.url, "large", ONE_GROUP)
    for rank in range(4):
        ranks.start(rank, mesh_rank.epoch, name, 1 if rank == 0 else None)
    leader, *others = [ranks.result(rank) for rank in range(4)]
    assert len(leader) == 1
    for raised in others:
        assert raised.type == "TeleloaderError"
        assert re.match("rank 0, which fetches the batches of this rank, ended its iteration at batch ", raised.text)
    (batches,) = grouped(ranks.each(mesh_rank.epoch, name, 2), [[0, 1, 2, 3]])
    assert [found for found, _ in batches] == [[0], [1]]


def test_a_second_iterator_closes_the_first(server: ServerProcess, ranks: Ranks, name: str) -> None:
    """Messages of an iterator that is not used any more do not delay the next iterator."""
    ranks.each(mesh_rank.create, name, server.url, "large", ONE_GROUP)
    ranks.each(mesh_rank.begin, name)
    ranks.each(mesh_rank.proceed, name, 2)
    (batches,) = grouped(ranks.each(mesh_rank.epoch, name, 3), [[0, 1, 2, 3]])
    assert [found for found, _ in batches] == [[0], [1], [2]]
    for raised in ranks.outcomes(mesh_rank.proceed, name):
        assert raised == Raised("TeleloaderError", "this iterator is closed: call iter(loader) for another iterator")


def test_two_loaders_of_the_same_ranks(server: ServerProcess, ranks: Ranks, name: str) -> None:
    """Batches of two loaders do not interleave, whichever of them each rank advances first."""
    other = f"{name} of evaluation"
    for loader, dataset in ((name, "noisy"), (other, "large")):
        ranks.each(mesh_rank.create, loader, server.url, dataset, TWO_BY_TWO, batch_size=2)
        ranks.each(mesh_rank.begin, loader)
    for rank in range(4):
        ranks.start(rank, mesh_rank.alternate, *((name, other) if rank % 2 else (other, name)))
    found = [ranks.result(rank) for rank in range(4)]
    grouped(found, [[0, 1], [2, 3]])
    assert sorted(index for each in (0, 2) for batch in found[each][other] for index in batch) == list(range(40))


def test_the_number_of_prefetched_batches_is_limited(server: ServerProcess, ranks: Ranks, name: str) -> None:
    """The leader waits for a rank whose training loop is paused, and no batch is lost."""
    ranks.each(mesh_rank.create, name, server.url, "large", ONE_GROUP, num_workers=1, timeout=2)
    ranks.each(mesh_rank.begin, name)
    for rank in range(3):
        ranks.start(rank, mesh_rank.proceed_until_timeout, name)
    counts = [ranks.result(rank) for rank in range(3)]
    assert max(counts) < 20
    rest = ranks.each(mesh_rank.proceed, name)
    for count, batches in zip([*counts, 0], rest, strict=True):
        assert batches == [[index] for index in range(count, 40)]


def test_a_batch_that_is_changed_in_place(server: ServerProcess, ranks: Ranks, name: str) -> None:
    """Changes of a batch on one rank are not visible on the others."""
    ranks.each(mesh_rank.create, name, server.url, "large", ONE_GROUP)
    (sums,) = grouped(ranks.each(mesh_rank.change_in_place, name), [[0, 1, 2, 3]])
    assert sums == [2**20 * index for index in range(40)]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"on_error": "replace", "max_errors": 0.1}, {"on_error": "skip", "max_errors": 0.0}],
    ids=["raise", "replace", "too many"],
)
def test_an_exception_of_the_dataset(server: ServerProcess, ranks: Ranks, name: str, arguments: dict[str, Any]) -> None:
    """All ranks of a group raise the same exception in place of the same batch, and continue with the next one."""
    ranks.each(mesh_rank.create, name, server.url, "failing", ONE_GROUP, batch_size=4, **arguments)
    (found,) = grouped(ranks.each(mesh_rank.epoch_with_errors, name), [[0, 1, 2, 3]])
    grouped(ranks.each(mesh_rank.state, name), [[0, 1, 2, 3]])
    assert len(found) == LENGTH // 4
    raised = [each for each in found if isinstance(each, tuple)]
    if "on_error" not in arguments:
        assert [each[0] for each in raised] == ["KeyError"]
        assert "no sample 40" in raised[0][1]
    else:
        assert [each[0] for each in raised] == ([] if arguments["max_errors"] else ["TooManyErrors"])


def test_ranks_at_different_positions(server: ServerProcess, ranks: Ranks, name: str) -> None:
    """A rank whose epoch differs from the leader's raises an exception, and can start the next epoch."""
    ranks.each(mesh_rank.create, name, server.url, "noisy", ONE_GROUP, batch_size=4)
    for rank in range(4):
        ranks.start(rank, mesh_rank.set_epoch, name, 7 if rank == 2 else 5)
        ranks.result(rank)
    found = ranks.outcomes(mesh_rank.epoch, name)
    assert found[2] == Raised(
        "StateMismatch",
        "this rank starts at batch 0 of epoch 7, but rank 0, which fetches its batches, starts at batch 0 of epoch 5. "
        "Call set_epoch, load_state_dict and iter alike on all ranks that receive the same batches",
    )
    assert found[0] == found[1] == found[3]
    ranks.each(mesh_rank.set_epoch, name, 9)
    grouped(ranks.each(mesh_rank.epoch, name), [[0, 1, 2, 3]])


def test_ranks_with_different_arguments(server: ServerProcess, ranks: Ranks, name: str) -> None:
    """A rank whose arguments differ from the leader's raises an exception."""
    for rank in range(4):
        ranks.start(rank, mesh_rank.create, name, server.url, "noisy", ONE_GROUP, batch_size=4, seed=int(rank == 1))
    assert [ranks.result(rank) for rank in range(4)] == [None] * 4
    found = ranks.outcomes(mesh_rank.epoch, name)
    assert found[1].type == "StateMismatch"
    assert "the loader of this rank has another dataset, other arguments" in found[1].text
    assert found[0] == found[2] == found[3]


def test_numpy_arrays(server: ServerProcess, ranks: Ranks) -> None:
    """With ``output="numpy"``, all ranks get equal arrays."""
    found = ranks.each(mesh_rank.numpy_arrays, server.url, ONE_GROUP)
    assert {kind for kind, _ in found} == {"ndarray"}
    assert len({content for _, content in found}) == 1


def test_an_accelerator(server: ServerProcess, ranks: Ranks) -> None:
    """Each rank copies the batches to its own device."""
    (found,) = grouped(ranks.each(mesh_rank.on_device, server.url, ONE_GROUP), [[0, 1, 2, 3]])
    assert len(found) == 40
    assert len(set(found)) == 40


def test_a_dataset_object_of_each_rank(ranks: Ranks) -> None:
    """The leader's worker loads the object of the leader for all ranks of its group."""
    found = grouped(ranks.each(mesh_rank.objects, TWO_BY_TWO), [[0, 1], [2, 3]])
    assert [len(each) for each in found] == [LENGTH // 16] * 2
    assert found[0] != found[1]


def test_a_restart_of_the_server(free_port: int, ranks: Ranks, name: str) -> None:
    """All ranks get the whole epoch if the server is killed, and another one is started at the same address."""
    server = ServerProcess("--port", str(free_port), *SERVER)
    try:
        ranks.each(mesh_rank.create, name, server.url, "slow", TWO_BY_TWO, batch_size=2)
        ranks.each(mesh_rank.begin, name)
        before = grouped(ranks.each(mesh_rank.proceed, name, 4), [[0, 1], [2, 3]])
        server.kill()
        for rank in range(4):
            ranks.start(rank, mesh_rank.proceed, name)
        server = ServerProcess("--port", str(free_port), *SERVER)
        after = grouped([ranks.result(rank) for rank in range(4)], [[0, 1], [2, 3]])
    finally:
        server.end()
    assert sorted(index for batches in before + after for batch in batches for index in batch) == list(range(LENGTH))


def test_a_server_that_does_not_return(start_server: StartServer, ranks: Ranks, name: str) -> None:
    """All ranks raise the exception of the leader: in the middle of an epoch, and at the start of the next one."""
    server = start_server(*SERVER)
    ranks.each(mesh_rank.create, name, server.url, "slow", ONE_GROUP, {"reconnect_timeout": 0}, batch_size=2)
    ranks.each(mesh_rank.begin, name)
    ranks.each(mesh_rank.proceed, name, 2)
    server.kill()
    for _ in range(2):
        (raised,) = grouped(ranks.outcomes(mesh_rank.proceed, name), [[0, 1, 2, 3]])
        assert raised.type == "ServerUnavailable"
    (raised,) = grouped(ranks.outcomes(mesh_rank.epoch, name), [[0, 1, 2, 3]])
    assert raised.type == "ServerUnavailable"


@pytest.mark.parametrize("way", ["finished", "early", "open"])
def test_ranks_that_exit(server: ServerProcess, way: str) -> None:
    """Without ``destroy_process_group``, ranks exit without errors: after an epoch, in the middle of one or at once."""
    program = [*RANKS, "tests/end_to_end/mesh_exit.py", server.url, way]
    printed = run_example(*program)
    assert sorted(printed.split()) == ["0", "1"]


@pytest.mark.parametrize("killed", [0, 3], ids=["leader", "member"])
def test_a_rank_that_is_killed(server: ServerProcess, name: str, killed: int) -> None:
    """All other ranks of its group raise an exception, now and at the next ``iter()``."""
    with Ranks(4) as ranks:
        ranks.each(mesh_rank.create, name, server.url, "large", ONE_GROUP)
        ranks.each(mesh_rank.begin, name)
        ranks.each(mesh_rank.proceed, name, 2)
        others = [rank for rank in range(4) if rank != killed]
        ranks.kill(killed)
        for function in (mesh_rank.proceed, mesh_rank.epoch):
            for rank in others:
                ranks.start(rank, function, name)
            for rank in others:
                raised = ranks.result(rank)
                assert raised.type == "TeleloaderError"
                assert "lost the connection to a rank that receives the same batches" in raised.text


def test_a_rank_that_is_killed_leaves_the_other_groups_alone(server: ServerProcess, name: str) -> None:
    """Another group gets its whole epoch."""
    with Ranks(4) as ranks:
        ranks.each(mesh_rank.create, name, server.url, "noisy", TWO_BY_TWO, batch_size=4)
        ranks.each(mesh_rank.begin, name)
        ranks.kill(1)
        for rank in (2, 3):
            ranks.start(rank, mesh_rank.proceed, name)
        assert [len(ranks.result(rank)) for rank in (2, 3)] == [LENGTH // 8] * 2
