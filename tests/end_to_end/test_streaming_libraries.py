"""Datasets of well-known streaming libraries: every sample of each epoch once, in another order each epoch.

Each library is tested if it is installed; with TELELOADER_TEST_FRAMEWORKS=1, all must be installed.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from tests.examples.running import need_framework

LENGTH = 64
STAND_INS: dict[str, dict[str, object]] = {
    "torchvision": {},
    "torchvision.datasets": {"VisionDataset": object},
    "torchvision.transforms": {},
    "torchvision.transforms.functional": {"to_tensor": None},
}
"""Replacements of torchvision's modules, with members that are imported by name."""


def needed(module: str) -> Any:
    """Import a library, or skip the test."""
    need_framework(module)
    return import_module(module)


def hugging_face(_: Path) -> Any:
    """Create a shuffled IterableDataset of Hugging Face, which needs set_epoch() for another order."""
    datasets = needed("datasets")
    rows = datasets.Dataset.from_dict({"index": list(range(LENGTH))})
    return rows.to_iterable_dataset(num_shards=8).shuffle(seed=1, buffer_size=4)


def litdata(folder: Path) -> Any:
    """Create a StreamingDataset of litdata over local chunks."""
    lit = needed("litdata")
    out = str(folder / "litdata")
    lit.optimize(fn=_row, inputs=list(range(LENGTH)), output_dir=out, chunk_size=8, num_workers=1)
    return lit.StreamingDataset(out, shuffle=True, seed=1)


def _row(index: int) -> dict[str, int]:
    return {"index": index}


def mosaic(folder: Path) -> Any:
    """Create a StreamingDataset of mosaicml-streaming over local shards."""
    if "torchvision" not in sys.modules and find_spec("torchvision") is None:
        # streaming imports it for datasets of images; its wheels need torch with CUDA
        for name, used in STAND_INS.items():
            sys.modules[name] = module_from_spec(ModuleSpec(name, None, is_package=True))
            vars(sys.modules[name]).update(used)
    streaming = needed("streaming")
    out = str(folder / "mosaic")
    with streaming.MDSWriter(out=out, columns={"index": "int"}, size_limit=1024) as writer:
        for index in range(LENGTH):
            writer.write({"index": index})
    streaming.base.util.clean_stale_shared_memory()
    return streaming.StreamingDataset(local=out, shuffle=True, shuffle_seed=1, batch_size=4, num_canonical_nodes=1)


def indices(loader: Any) -> list[int]:
    """Return the samples of an epoch."""
    return [int(index) for batch in loader for index in np.asarray(batch["index"]).ravel()]


@pytest.mark.filterwarnings("ignore:unclosed file .*index.json:ResourceWarning")  # by mosaicml-streaming
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("make", [hugging_face, litdata, mosaic])
def test_each_epoch_has_all_samples_in_an_order_of_its_own(make: Any, num_workers: int, tmp_path: Path) -> None:
    """Each worker sets the dataset's epoch, and calls only methods with the right signature."""
    with serve(make(tmp_path), num_workers=2) as url:
        loader = DataLoader(RemoteDataset(url), 4, num_workers=num_workers, output="numpy")
        epochs = [indices(loader) for _ in range(3)]
        if make is not mosaic:
            loader.set_epoch(1)
            assert indices(loader) == epochs[1]
    assert [sorted(epoch) for epoch in epochs] == [list(range(LENGTH))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_loaders_in_different_epochs_do_not_share_the_epoch_of_a_dataset() -> None:
    """Hugging Face's keeps its epoch in memory shared by forks; each worker has its own copy."""
    with serve(hugging_face(Path()), num_workers=2) as url:
        loaders = [DataLoader(RemoteDataset(url), 4, num_workers=2, output="numpy") for _ in range(2)]
        expected = [indices(loaders[0]) for _ in range(3)]
        for loader, epoch in zip(loaders, (0, 2), strict=True):
            loader.set_epoch(epoch)
        running = [iter(loader) for loader in loaders]
        found: list[list[int]] = [[], []]
        for pair in zip(*running, strict=True):
            for samples, batch in zip(found, pair, strict=True):
                samples += np.asarray(batch["index"]).tolist()
    assert found == [expected[0], expected[2]]


def test_a_killed_worker_continues_from_the_state_of_the_dataset(tmp_path: Path) -> None:
    """Batches contain the state of Hugging Face's datasets, from which a replacement continues."""
    datasets = needed("datasets")
    rows = datasets.Dataset.from_dict({"index": list(range(LENGTH))}).to_iterable_dataset(num_shards=2)
    died = tmp_path / "died"

    def once(row: dict[str, int]) -> dict[str, int]:
        if row["index"] == 25 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    with serve(rows.map(once), num_workers=2) as url:
        assert sorted(indices(DataLoader(RemoteDataset(url), 4, num_workers=2, output="numpy"))) == list(range(LENGTH))
    assert died.exists()


def test_no_sample_of_a_shuffle_buffer_is_lost(tmp_path: Path) -> None:
    """The state of Hugging Face's datasets lacks the buffer, so resumed shards and replacements iterate again."""
    datasets = needed("datasets")
    rows = datasets.Dataset.from_dict({"index": list(range(LENGTH))}).to_iterable_dataset(num_shards=4)
    died = tmp_path / "died"

    def once(row: dict[str, int]) -> dict[str, int]:
        if row["index"] == 50 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    with serve(rows.shuffle(seed=1, buffer_size=8).map(once), num_workers=2) as url:
        whole = indices(DataLoader(RemoteDataset(url), 4, num_workers=2, output="numpy"))
        loader = DataLoader(RemoteDataset(url), 4, num_workers=2, output="numpy")
        iterator = iter(loader)
        first = [next(iterator) for _ in range(5)]
        resumed = DataLoader(RemoteDataset(url), 4, num_workers=2, output="numpy")
        resumed.load_state_dict(loader.state_dict())
        assert indices(first) + indices(resumed) == whole
    assert died.exists()
    assert sorted(whole) == list(range(LENGTH))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent the libraries' network access."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
