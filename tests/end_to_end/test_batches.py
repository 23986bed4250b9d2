"""Batches equal those of a local loop, whichever worker computed them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import default_collate, serve
from teleloader_shared.orders.plan import audit
from tests.conftest import ROOT, StartServer, need
from tests.end_to_end import hosted
from tests.end_to_end.compare import assert_same, reference


@pytest.mark.parametrize("num_workers", [0, 1, 4])
@pytest.mark.parametrize("kind", hosted.SAMPLES)
def test_numpy_batches_equal_the_local_loop(kind: str, num_workers: int) -> None:
    """Elements and dtypes are equal for each kind of sample and any number of workers."""
    dataset = hosted.Samples(hosted.SAMPLES[kind])
    with serve(dataset, num_workers=num_workers) as url:
        loader = DataLoader(RemoteDataset(url), batch_size=7, shuffle=True, output="numpy")
        expected = [_plain(batch) for batch in reference(dataset, list(loader.plan(0)), default_collate)]
        got = list(loader)
    assert len(got) == len(expected) == len(loader)
    assert_same(got, expected)


def _plain(batch: Any) -> Any:
    """Return the batch with plain arrays in place of those marked to become tensors."""
    if isinstance(batch, dict):
        return {key: _plain(item) for key, item in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_plain, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(_plain, batch))
    return np.asarray(batch) if isinstance(batch, np.ndarray) else batch


@pytest.mark.parametrize("kind", hosted.SAMPLES)
def test_torch_batches_equal_torchs_own(kind: str) -> None:
    """With torch on the client, a batch equals the result of torch's default_collate."""
    need("torch")
    from torch.utils.data import default_collate as torch_collate

    dataset = hosted.Samples(hosted.SAMPLES[kind])
    with serve(dataset, num_workers=2) as url:
        loader = DataLoader(RemoteDataset(url), batch_size=6, drop_last=True)
        assert_same(list(loader), list(reference(dataset, list(loader.plan(0)), torch_collate)))


def test_tensors_travel_with_their_type() -> None:
    """Torch tensors, including bfloat16, arrive as torch's default_collate returns them."""
    need("torch")
    from torch.utils.data import default_collate as torch_collate

    with serve(hosted.with_torch, num_workers=2) as url:
        loader = DataLoader(RemoteDataset(url), batch_size=6)
        assert_same(list(loader), list(reference(hosted.with_torch, list(loader.plan(0)), torch_collate)))


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("checksum", [True, False])
def test_the_wire_changes_nothing(compression: Any, checksum: bool) -> None:
    """Compression and checksums do not change batches."""
    dataset = hosted.Samples(lambda i: np.full((64, 64), i, np.float32))
    with serve(dataset, num_workers=1) as url:
        loader = DataLoader(
            RemoteDataset(url), batch_size=10, output="numpy", compression=compression, checksum=checksum
        )
        assert_same(list(loader), [_plain(b) for b in reference(dataset, list(loader.plan(0)), default_collate)])


def test_single_samples_are_converted_not_collated() -> None:
    """batch_size=None yields single samples, converted as by torch's default_convert."""
    need("torch")
    from torch.utils.data import default_convert

    dataset = hosted.Samples(hosted.SAMPLES["dict"])
    with serve(dataset, num_workers=2) as url:
        loader = DataLoader(RemoteDataset(url), batch_size=None, shuffle=True, seed=0)
        assert len(loader) == len(dataset)
        expected = [default_convert(dataset[int(indices[0])]) for indices in loader.plan(0)]
        assert_same(list(loader), expected)


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [
        ("default_collate", 3),
        ("default_convert", None),
        ("default_convert", 3),
        ("default_collate", None),
    ],
)
def test_torchs_own_functions_are_called_as_they_are_passed(name: str, batch_size: int | None) -> None:
    """An explicit function of torch is called even where torch's default would be another one."""
    need("torch")
    from torch.utils import data

    dataset = hosted.Samples(lambda i: [np.arange(3) + i, np.arange(3)], 6)
    function = getattr(data, name)
    with serve(dataset, num_workers=1) as url:
        got = list(DataLoader(RemoteDataset(url), batch_size, collate_fn=function))
    assert_same(got, list(data.DataLoader(dataset, batch_size, collate_fn=function)))


def test_a_collate_function_of_ones_own() -> None:
    """The result of a collate function arrives with its types; arrays stay arrays."""
    dataset = hosted.Samples(lambda i: np.arange(i % 3 + 1))

    def pad(samples: list[Any]) -> Any:
        width = max(map(len, samples))
        return {
            "rows": np.stack([np.pad(s, (0, width - len(s))) for s in samples]),
            "lengths": tuple(map(len, samples)),
        }

    with serve(dataset, num_workers=2, collate_fn=pad) as url:
        loader = DataLoader(RemoteDataset(url), batch_size=4)
        assert_same(list(loader), list(reference(dataset, list(loader.plan(0)), pad)))


def test_augmentation_is_a_function_of_the_batch_id(start_server: StartServer) -> None:
    """Two servers with different numbers of workers compute bit-identical epochs with random, NumPy and torch."""
    need("torch")
    target = "augmented=tests.end_to_end.hosted:augmented"
    epochs = []
    for num_workers in ("1", "3"):
        server = start_server(target, "--num-workers", num_workers)
        loader = DataLoader(RemoteDataset(server.url, "augmented"), batch_size=3, shuffle=True, seed=5)
        epochs.append([list(loader), list(loader)])
    assert_same(epochs[0], epochs[1])
    assert epochs[0][0][0]["python"][0] != epochs[0][1][0]["python"][0], "epochs must differ"


def test_random_numbers_of_the_calling_process_are_its_own() -> None:
    """A server without workers, which loads in this process, does not change its random numbers.

    An exception is a loader of this process without `seed`, which draws from them as torch's does.
    """
    need("torch")
    import torch

    torch.manual_seed(1)
    np.random.seed(1)
    expected = (torch.rand(1), np.random.rand())
    torch.manual_seed(1)
    np.random.seed(1)
    with serve(hosted.augmented, num_workers=0) as url:
        list(DataLoader(RemoteDataset(url), batch_size=4, seed=0))
    assert_same((torch.rand(1), np.random.rand()), expected)


def test_ranks_share_an_epoch() -> None:
    """Four ranks together load each sample exactly once."""
    with serve(hosted.Samples(lambda i: i, 103), num_workers=2) as url:
        seen = [
            np.asarray(batch)
            for rank in range(4)
            for batch in DataLoader(RemoteDataset(url), 5, True, rank=rank, world_size=4, tail="uneven", output="numpy")
        ]
    assert audit(seen, 103).exact


RESUME = """
import json, sys
from teleloader import DataLoader, RemoteDataset
url, state, arguments = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
loader = DataLoader(RemoteDataset(url, "numbers"), output="numpy", **arguments)
loader.load_state_dict(state)
print(json.dumps([batch[0].tolist() for batch in loader]))
"""


def _resume(url: str, state: dict[str, Any], **arguments: Any) -> list[list[int]]:
    """Return the rest of the epoch, loaded in a new process."""
    command = [sys.executable, "-W", "error", "-c", RESUME, url, json.dumps(state), json.dumps(arguments)]
    batches: list[list[int]] = json.loads(subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE).stdout)
    return batches


def test_resume_at_any_batch(start_server: StartServer) -> None:
    """A state after any batch resumes in a new process, on a restarted server with other workers."""
    server = start_server("tests.end_to_end.hosted:numbers", "--num-workers", "2")
    arguments: dict[str, Any] = {"batch_size": 9, "shuffle": True, "seed": 3}
    loader = DataLoader(RemoteDataset(server.url, "numbers"), output="numpy", **arguments)
    whole, states = [], [loader.state_dict()]
    for batch in loader:
        whole.append(batch[0].tolist())
        states.append(loader.state_dict())
    assert len(json.dumps(states[5])) < 150
    server.end()
    restarted = start_server("tests.end_to_end.hosted:numbers", "--num-workers", "1")
    second_epoch = [batch[0].tolist() for batch in loader_of(restarted.url, 1, arguments)]
    for done in (0, 1, 5, len(whole) - 1):
        assert _resume(restarted.url, states[done], **arguments) == whole[done:]
    assert _resume(restarted.url, states[-1], **arguments) == second_epoch, "after the last batch comes the next epoch"


def loader_of(url: str, epoch: int, arguments: dict[str, Any]) -> DataLoader:
    """Return a loader that starts with the given epoch."""
    loader = DataLoader(RemoteDataset(url, "numbers"), output="numpy", **arguments)
    loader.set_epoch(epoch)
    return loader


def test_resume_with_twice_the_ranks() -> None:
    """With W doubled and B halved, the ranks together continue with exactly the next samples."""
    with serve(hosted.Samples(lambda i: i, 96), num_workers=2) as url:
        dataset = RemoteDataset(url)

        def loader(rank: int, world_size: int, batch_size: int) -> DataLoader:
            return DataLoader(dataset, batch_size, True, rank=rank, world_size=world_size, output="numpy")

        old = [loader(rank, 2, 8) for rank in range(2)]
        before: list[int] = []
        for iterator in map(iter, old):
            before += [i for _ in range(2) for i in next(iterator).tolist()]
        state = old[0].state_dict()
        assert state == old[1].state_dict(), "the state is the same on every rank"
        after: list[int] = []
        for rank in range(4):
            new = loader(rank, 4, 4)
            new.load_state_dict(json.loads(json.dumps(state)))
            after += [i for batch in new for i in batch.tolist()]
        order = [i for batch in loader(0, 1, 16).plan(0) for i in batch.tolist()]
    assert sorted(before) == sorted(order[:32])
    assert sorted(after) == sorted(order[32:])


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    """The error for another dataset, seed or global batch size has both values."""
    with serve({"a": hosted.Samples(lambda i: i), "b": hosted.Samples(lambda i: i, 60)}, num_workers=1) as url:
        state = DataLoader(RemoteDataset(url, "a"), 4, seed=1).state_dict()
        with pytest.raises(ValueError, match="seed = 1, but this loader has 2"):
            DataLoader(RemoteDataset(url, "a"), 4, seed=2).load_state_dict(state)
        with pytest.raises(ValueError, match="dataset = "):
            DataLoader(RemoteDataset(url, "b"), 4, seed=1).load_state_dict(state)
        with pytest.raises(ValueError, match="not a multiple of this loader's batch_size"):
            DataLoader(RemoteDataset(url, "a"), 4, seed=1).load_state_dict({**state, "samples": 6})
