"""A loop that was interrupted at any batch and resumed elsewhere gets the batches of torch's uninterrupted loader."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from teleloader import DataLoader, RemoteDataset, StateMismatch
from teleloader_server import serve
from tests.conftest import ROOT, StartServer
from tests.end_to_end.contract import (
    Made,
    Noisy,
    Numbers,
    ShardedRange,
    assert_same,
    few_cpus_are_fine,
    ours,
    random_states,
    seed_everything,
    torch,
    torch_is_there,
    torchs,
)
from tests.end_to_end.test_parity import ORDERS

__all__ = ["torch_is_there"]

Fresh = Callable[[], dict[str, Any]]

CASES: dict[str, tuple[Any, Fresh]] = {
    **{
        name: (Numbers(), ORDERS[name])
        for name in (
            "in sequence", "ragged tail dropped", "single samples", "shuffled", "shuffled, tail dropped",
            "shuffled single samples", "shuffled by a generator", "RandomSampler", "RandomSampler with replacement",
            "RandomSampler with a generator of its own", "one generator for the sampler and the loader",
            "WeightedRandomSampler", "SubsetRandomSampler", "a sampler of one's own",
            "a sampler of one's own that draws", "BatchSampler", "a batch sampler of one's own",
        )
    },
    "shuffled with workers": (Numbers(), lambda: {"batch_size": 3, "shuffle": True, "num_workers": 2}),
    "one shard": (Noisy(5), lambda: {"batch_size": 2, "num_workers": 1}),
    "two shards": (Noisy(5, 2), lambda: {"batch_size": 1, "num_workers": 2}),
    "three shards, tail dropped": (Noisy(5, 1, 4), lambda: {"batch_size": 2, "num_workers": 3, "drop_last": True}),
    "four shards, single samples": (Noisy(2, 0, 1, 3), lambda: {"batch_size": None, "num_workers": 4}),
    "a stream with a generator": (
        Noisy(5, 2), lambda: {"batch_size": 2, "num_workers": 2, "generator": torch.Generator().manual_seed(4)}
    ),
    "a stream without workers": (ShardedRange(0, 9), lambda: {"batch_size": 2}),
}  # fmt: skip


def _in_one_go(dataset: Any, fresh: Fresh, epochs: int) -> list[list[Any]]:
    seed_everything()
    loader = torchs(dataset, **fresh())
    return [list(loader) for _ in range(epochs)]


def _through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def _interrupt(url: str, arguments: dict[str, Any], epoch: int, batch: int) -> tuple[list[Any], dict[str, Any]]:
    """Stop before a batch; return the epoch's batches so far, and the saved state."""
    loader = DataLoader(RemoteDataset(url), **arguments)
    for _ in range(epoch):
        list(loader)
    if not batch:
        return [], _through_json(loader.state_dict())
    iterator = iter(loader)
    before = [next(iterator) for _ in range(batch)]
    return before, _through_json(loader.state_dict())


def _go_on(loader: DataLoader, state: dict[str, Any], epoch: int, before: list[Any]) -> list[Any]:
    """Return the whole interrupted epoch; the state may be at the next one if the end was known."""
    return before + list(loader) if state["epoch"] == epoch else before


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_interrupted_at_every_batch(name: str, epoch: int) -> None:
    """Batches before and after the resume, the next epoch and the final generators equal torch's."""
    dataset, fresh = CASES[name]
    with few_cpus_are_fine():
        expected = _in_one_go(dataset, fresh, epoch + 2)
        states = random_states()
        with serve(dataset) as url:
            for batch in range(len(expected[epoch]) + 1):
                seed_everything()
                before, state = _interrupt(url, fresh(), epoch, batch)
                loader = DataLoader(RemoteDataset(url), **fresh())
                loader.load_state_dict(state)
                got = [_go_on(loader, state, epoch, before), list(loader)]
                assert_same(got, expected[epoch:], f"interrupted before batch {batch}: epochs")
                now = random_states()
                assert now[:2] == states[:2], f"interrupted before batch {batch}"
                assert now[2].equal(states[2]), f"interrupted before batch {batch}"


@pytest.mark.parametrize(
    ("dataset", "fresh"),
    [
        (Numbers(), lambda: {"batch_size": 3, "shuffle": True, "num_workers": 2, "persistent_workers": True}),
        (ShardedRange(0, 9), lambda: {"batch_size": 2, "num_workers": 2, "persistent_workers": True}),
        (Noisy(4, 2), lambda: {"batch_size": 1, "num_workers": 2, "persistent_workers": True}),
    ],
    ids=["map-style", "stream", "stream that draws"],
)
def test_interrupted_with_persistent_workers(dataset: Any, fresh: Fresh) -> None:
    """The state contains the base seed of persistent workers."""
    expected = _in_one_go(dataset, fresh, 3)
    with serve(dataset) as url:
        for batch in range(len(expected[0]) + 1):
            seed_everything()
            before, state = _interrupt(url, fresh(), 0, batch)
            loader = DataLoader(RemoteDataset(url), **fresh())
            loader.load_state_dict(state)
            got = [_go_on(loader, state, 0, before), list(loader), list(loader)]
            assert_same(got, expected, f"interrupted before batch {batch}: epochs")


@pytest.mark.parametrize("name", ["shuffled with workers", "shuffled by a generator", "two shards"])
def test_interrupted_between_iter_and_the_first_batch(name: str) -> None:
    """An epoch that was started without a batch continues as this epoch, followed by the right one."""
    dataset, fresh = CASES[name]
    expected = _in_one_go(dataset, fresh, 2)
    seed_everything()
    with serve(dataset) as url:
        loader = DataLoader(RemoteDataset(url), **fresh())
        iterator = iter(loader)
        state = _through_json(loader.state_dict())
        del iterator
        other = DataLoader(RemoteDataset(url), **fresh())
        other.load_state_dict(state)
        assert_same([list(other), list(other)], expected)


@pytest.mark.parametrize("name", ["shuffled", "shuffled by a generator", "a sampler of one's own that draws"])
def test_interrupted_twice(name: str) -> None:
    """A resumed loop can be interrupted again, even before its first batch."""
    dataset, fresh = CASES[name]
    expected = _in_one_go(dataset, fresh, 2)
    with serve(dataset) as url:
        seed_everything()
        first, state = _interrupt(url, fresh(), 0, 1)
        again = DataLoader(RemoteDataset(url), **fresh())
        again.load_state_dict(state)
        assert _through_json(again.state_dict()) == state
        iterator = iter(again)
        assert _through_json(again.state_dict()) == state
        second = [next(iterator)]
        last = DataLoader(RemoteDataset(url), **fresh())
        last.load_state_dict(_through_json(again.state_dict()))
        assert_same([first + second + list(last), list(last)], expected)


def test_augmentation_goes_on_as_well() -> None:
    """Random numbers of the dataset in the rest of an epoch are the same, shuffled or not."""

    def arguments(shuffle: bool) -> dict[str, Any]:
        return {"batch_size": 2, "shuffle": shuffle, "num_workers": 2}

    with serve(Made(lambda i: (i, random.random(), torch.rand(2)))) as url:
        for shuffle in (False, True):
            seed_everything()
            loader = DataLoader(RemoteDataset(url), **arguments(shuffle))
            whole = [list(loader), list(loader)]
            seed_everything()
            before, state = _interrupt(url, arguments(shuffle), 0, 2)
            other = DataLoader(RemoteDataset(url), **arguments(shuffle))
            other.load_state_dict(state)
            assert_same([before + list(other), list(other)], whole, f"shuffle={shuffle}: epochs")


def test_the_state_of_a_finished_epoch_is_the_next_ones_beginning() -> None:
    """A state saved after the end of a loop resumes with the next epoch."""
    _, fresh = CASES["shuffled"]
    expected = _in_one_go(Numbers(), fresh, 3)
    seed_everything()
    with ours(Numbers(), **fresh()) as loader:
        list(loader)
        state = _through_json(loader.state_dict())
        with ours(Numbers(), **fresh()) as other:
            other.load_state_dict(state)
            assert_same([list(other), list(other)], expected[1:])


def test_loading_the_state_into_the_same_loader() -> None:
    """A loader returns to its saved position, whatever it drew in the meantime."""
    seed_everything()
    with ours(Numbers(), batch_size=2, shuffle=True) as loader:
        iterator = iter(loader)
        next(iterator)
        state = _through_json(loader.state_dict())
        rest = list(iterator)
        list(loader)
        loader.load_state_dict(state)
        assert_same(list(loader), rest)


def test_the_number_of_workers_does_not_matter_to_indices() -> None:
    """For a map-style dataset a state fits any number of workers; the batches do not depend on it."""
    expected = _in_one_go(Numbers(), lambda: {"batch_size": 3, "shuffle": True}, 1)
    with serve(Numbers()) as url:
        seed_everything()
        before, state = _interrupt(url, {"batch_size": 3, "shuffle": True, "num_workers": 1}, 0, 2)
        other = DataLoader(RemoteDataset(url), batch_size=3, shuffle=True, num_workers=2)
        other.load_state_dict(state)
        assert_same([before + list(other)], expected)


@pytest.mark.parametrize("change", [{"num_workers": 1}, {"batch_size": 3}])
def test_other_shards_are_refused(change: dict[str, Any]) -> None:
    """A state of a stream depends on its shards: with others, the error has both values."""
    arguments = {"batch_size": 2, "num_workers": 2}
    with serve(ShardedRange(0, 20)) as url:
        _, state = _interrupt(url, arguments, 0, 3)
        (name, value), *_ = change.items()
        with pytest.raises(StateMismatch, match=rf"{name} = {arguments[name]}, but this loader has {value}"):
            DataLoader(RemoteDataset(url), **{**arguments, **change}).load_state_dict(state)


_SCRIPT = """
import base64, json, sys
import torch
from teleloader import DataLoader, RemoteDataset

url, batches, saved = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
torch.manual_seed(20)
if {generator}:
    loader = DataLoader(
        RemoteDataset(url), 3, True, num_workers={workers}, generator=torch.Generator().manual_seed(8)
    )
else:
    loader = DataLoader(RemoteDataset(url), 3, True, num_workers={workers})
if saved is not None:
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(saved["rng"])), dtype=torch.uint8))
    loader.load_state_dict(saved["loader"])
iterator = iter(loader)
got = [next(iterator).tolist() for _ in range(batches)]
if saved is not None:
    got = [[batch.tolist() for batch in iterator], [batch.tolist() for batch in loader]]
rng = base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
print(json.dumps({{"got": got, "rng": rng, "loader": loader.state_dict()}}))
"""


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("generator", [False, True], ids=["global generator", "own generator"])
def test_resumed_in_another_process_on_another_server(
    start_server: StartServer, generator: bool, num_workers: int
) -> None:
    """A new process on a new server needs only the loader's state and the state of torch's generator."""

    def fresh() -> dict[str, Any]:
        own = {"generator": torch.Generator().manual_seed(8)} if generator else {}
        return {"batch_size": 3, "shuffle": True, "num_workers": num_workers, **own}

    expected = [[batch.tolist() for batch in epoch] for epoch in _in_one_go(Numbers(), fresh, 2)]
    script = _SCRIPT.format(generator=generator, workers=num_workers)
    answers: list[Any] = [None]
    for batches in (2, 0):
        url = start_server("numbers=tests.end_to_end.contract:Numbers").url
        command = [sys.executable, "-c", script, url, str(batches), json.dumps(answers[-1])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert [answers[1]["got"] + answers[2]["got"][0], answers[2]["got"][1]] == expected


def test_a_state_has_nothing_but_json() -> None:
    """A state of any sampling order survives JSON unchanged, and has a limited size."""
    for dataset, fresh in CASES.values():
        with few_cpus_are_fine(), ours(dataset, **fresh()) as loader:
            next(iter(loader))
            text = json.dumps(loader.state_dict())
            assert json.loads(text) == loader.state_dict()
            assert len(text) < 40_000
