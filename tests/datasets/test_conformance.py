"""Datasets of common libraries, hosted by a server with two workers, yield the same batches as torch's DataLoader.

The datasets are the recipes of docs/datasets.md. Each library is tested if it is installed; with
TELELOADER_TEST_FRAMEWORKS=1, all must be installed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from tests.conftest import ROOT, ServerProcess
from tests.datasets import files
from tests.end_to_end.contract import assert_same, few_cpus_are_fine, torch, torch_is_there, torchs
from tests.end_to_end.test_streaming_libraries import STAND_INS
from tests.examples.running import need_framework

__all__ = ["torch_is_there"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:lance is not fork-safe:UserWarning"),  # this process has imported all libraries
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),  # by torch_geometric
    pytest.mark.filterwarnings("ignore:unclosed file .*index.json:ResourceWarning"),  # by mosaicml-streaming
]

BATCH_SIZE = 4
PAGE = (ROOT / "docs" / "datasets.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Recipe:
    """A recipe of the page, and the files that it reads."""

    factory: str
    """``module:name`` in the folder ``recipes``."""
    write: Callable[[Path], files.Kwargs]
    needs: tuple[str, ...] = ()
    """Libraries, by module name."""
    kwargs: files.Kwargs = field(default_factory=dict)
    collate: str | None = None
    start_method: str = "fork"


MAP = {
    "Hugging Face, torch": Recipe("hugging_face:rows", files.hugging_face, ("datasets",)),
    "Hugging Face, numpy": Recipe("hugging_face:rows", files.hugging_face, ("datasets",), {"format": "numpy"}),
    "Lance": Recipe("lance_rows:Rows", files.lance, ("lance",), start_method="spawn"),
    "HDF5": Recipe("hdf5:Images", files.hdf5, ("h5py",)),
    "Zarr": Recipe("zarr_images:Images", files.zarr, ("zarr",)),
    "LMDB": Recipe("lmdb_samples:Samples", files.lmdb, ("lmdb",)),
    "Arrow": Recipe("arrow_rows:Rows", files.arrow, ("pyarrow",)),
    "images": Recipe("images:Images", files.jpegs, ("albumentations", "cv2")),
    "audio": Recipe("audio:Clips", files.audio, ("soundfile",)),
    "video": Recipe("video:Clips", files.video, ("av",)),
    "graphs": Recipe("graphs:graphs", files.graphs, ("torch_geometric",), collate="graphs:collate"),
    "TensorDataset": Recipe("tensors:pairs", files.tensors),
    "StackDataset": Recipe("tensors:named", files.tensors),
    "ConcatDataset": Recipe("tensors:joined", files.tensors),
    "Subset": Recipe("tensors:first_half", files.tensors),
    "random_split": Recipe("tensors:training", files.tensors),
}
TOKENS = Recipe("tokens:Crops", files.tokens)
ITERABLE = {
    "Hugging Face": Recipe("hugging_face:stream", files.parquet, ("datasets",), {"shuffle": False}),
    "Hugging Face, shuffled": Recipe("hugging_face:stream", files.parquet, ("datasets",)),
    "WebDataset": Recipe("web_dataset:Shards", files.tar, ("webdataset",), {"shuffle": False}),
    "WebDataset, shuffled": Recipe("web_dataset:Shards", files.tar, ("webdataset",)),
    "mosaicml-streaming": Recipe("mosaic:stream", files.mosaic, ("streaming",), {"shuffle": False}),
    "mosaicml-streaming, shuffled": Recipe("mosaic:stream", files.mosaic, ("streaming",)),
    "litdata": Recipe("lit:stream", files.lit, ("litdata",), {"shuffle": False}),
    "litdata, shuffled": Recipe("lit:stream", files.lit, ("litdata",)),
    "Parquet": Recipe("parquet_rows:Rows", files.parquet, ("pyarrow",)),
}


@dataclass(frozen=True)
class Hosted:
    """A recipe whose dataset a server hosts."""

    url: str
    dataset: Any
    collate: Callable[[list[Any]], Any] | None

    def loader(self, **arguments: Any) -> DataLoader:
        """Create a loader, as a new training process does."""
        return DataLoader(RemoteDataset(self.url), BATCH_SIZE, **arguments)

    def epochs(self, **arguments: Any) -> list[list[Any]]:
        """Load three epochs with torch's DataLoader."""
        loader = torchs(self.dataset, **{"collate_fn": self.collate, "batch_size": BATCH_SIZE, **arguments})
        return [self._epoch(loader, epoch) for epoch in range(3)]

    def _epoch(self, loader: Any, epoch: int) -> list[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        with few_cpus_are_fine():
            return [received(batch) for batch in loader]


def received(batch: Any) -> Any:
    """Return torch's batch as teleloader yields it: the only difference is that `np.str_` becomes `str`."""
    if isinstance(batch, dict):
        return {key: received(value) for key, value in batch.items()}
    if isinstance(batch, list):
        return [received(value) for value in batch]
    return str(batch) if isinstance(batch, np.str_) else batch


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the page's recipes to a folder, from which they can be imported."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "recipes").mkdir()
    for name, code in re.findall(r"^```python\n# (recipes/\w+\.py)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        (folder / name).write_text(code, encoding="utf-8")
    if find_spec("streaming") and not find_spec("torchvision"):
        for module, members in STAND_INS.items():
            package = folder.joinpath(*module.split("."))
            package.mkdir()
            (package / "__init__.py").write_text("".join(f"{member} = object\n" for member in members))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
            patch.setenv(name, "1")
        for name in ("HF_HOME", "HF_DATASETS_CACHE"):
            patch.setenv(name, str(folder / "cache"))
        yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "recipes"]:
        del sys.modules[name]


@contextmanager
def serving(named: dict[str, Recipe], folder: Path, data: Path) -> Iterator[tuple[str, files.Kwargs]]:
    """Host recipes on a server with two workers; yield its URL and the keyword arguments of the last recipe."""
    config, kwargs = "", {}
    for name, recipe in named.items():
        for module in recipe.needs:
            need_framework(module)
        kwargs = {**recipe.write(data), **recipe.kwargs}
        settings = {"factory": recipe.factory, **({"collate": recipe.collate} if recipe.collate else {})}
        lines = {key: f"recipes.{value}" for key, value in settings.items()}
        lines["start_method"] = recipe.start_method
        lines |= {f"kwargs.{key}": value for key, value in kwargs.items()}
        config += f"[datasets.{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items())
    path = data / "loader.toml"
    path.write_text(config)
    server = ServerProcess("--port", "0", "--num-workers", "2", "--config", str(path), folder=folder)
    try:
        yield server.url, kwargs
    finally:
        server.end()


@pytest.fixture
def hosted(request: Any, recipes: Path, tmp_path: Path) -> Iterator[Hosted]:
    """Host a recipe."""
    recipe: Recipe = request.param
    with serving({"train": recipe}, recipes, tmp_path) as (url, kwargs):
        collate = _found(recipe.collate) if recipe.collate else None
        yield Hosted(url, _found(recipe.factory)(**kwargs), collate)


def _found(name: str) -> Any:
    module, _, member = name.partition(":")
    return getattr(import_module(f"recipes.{module}"), member)


def resumed(hosted: Hosted, fresh: Callable[[], dict[str, Any]]) -> list[list[Any]]:
    """Interrupt the second epoch after two batches; return the rest of it, and the third, from a new loader."""
    loader = hosted.loader(**fresh())
    list(loader)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    again = hosted.loader(**fresh())
    again.load_state_dict(state)
    return [list(again), list(again)]


def assert_conforms(hosted: Hosted, expected: list[list[Any]], fresh: Callable[[], dict[str, Any]], order: str) -> None:
    """Assert that two epochs equal the expected ones, and that a resumed loader continues them."""
    loader = hosted.loader(**fresh())
    assert_same([list(loader) for _ in range(2)], expected[:2], f"{order} epochs")
    assert_same(resumed(hosted, fresh), [expected[1][2:], expected[2]], f"resumed {order} epochs")


@pytest.mark.parametrize("hosted", MAP.values(), ids=MAP, indirect=True)
def test_map_style_datasets_conform(hosted: Hosted) -> None:
    """Epochs have torch's containers, dtypes, shapes and values: unshuffled, shuffled, and in the seeded order."""
    assert_conforms(hosted, hosted.epochs(), dict, "unshuffled")
    assert_conforms(hosted, hosted.epochs(**shuffled()), shuffled, "shuffled")
    seeded = {"shuffle": True, "seed": 7}
    plans = [[indices.tolist() for indices in hosted.loader(**seeded).plan(epoch)] for epoch in range(3)]
    expected = [hosted.epochs(batch_size=1, batch_sampler=plan)[epoch] for epoch, plan in enumerate(plans)]
    assert_conforms(hosted, expected, lambda: seeded, "seeded")


def shuffled() -> dict[str, Any]:
    """Return arguments for torch's shuffled order."""
    return {"shuffle": True, "generator": torch.Generator().manual_seed(3)}


@pytest.mark.parametrize("hosted", ITERABLE.values(), ids=ITERABLE, indirect=True)
def test_iterable_style_datasets_conform(hosted: Hosted) -> None:
    """Epochs of two workers have torch's containers, dtypes, shapes and values."""
    two_workers = {"num_workers": 2}
    assert_conforms(hosted, hosted.epochs(**two_workers), lambda: two_workers, "iterable")


@pytest.mark.parametrize("hosted", [TOKENS], indirect=True)
def test_random_samples_are_seeded_from_the_batch(hosted: Hosted) -> None:
    """Unlike with torch, random samples do not depend on the worker; their types and shapes are torch's."""
    seeded = {"shuffle": True, "seed": 7}
    loader = hosted.loader(**seeded)
    epochs = [list(loader) for _ in range(3)]
    assert_conforms(hosted, epochs, lambda: seeded, "seeded")
    assert not torch.equal(epochs[0][0][0], epochs[1][0][0])
    for batch, torchs_batch in zip(epochs[0], hosted.epochs()[0], strict=True):
        assert type(batch) is type(torchs_batch)
        for tokens, others in zip(batch, torchs_batch, strict=True):
            assert (tokens.dtype, tokens.shape) == (others.dtype, others.shape)
        assert torch.equal(batch[0][:, 1:], batch[1][:, :-1])


def test_two_datasets_share_an_lmdb_environment(recipes: Path, tmp_path: Path) -> None:
    """A worker that hosts both opens the environment once."""
    recipe = MAP["LMDB"]
    with serving({"train": recipe, "validation": recipe}, recipes, tmp_path) as (url, _):
        train, validation = (list(DataLoader(RemoteDataset(url, name), BATCH_SIZE)) for name in ("train", "validation"))
    assert_same(train, validation)
