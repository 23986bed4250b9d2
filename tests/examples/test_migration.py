"""The code of docs/migration.md yields the same samples before and after a migration.

Each library is tested if it is installed; with TELELOADER_TEST_FRAMEWORKS=1, all must be installed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from teleloader import StateMismatch
from tests.conftest import ROOT, ServerProcess
from tests.datasets import files
from tests.end_to_end.contract import assert_same, few_cpus_are_fine, torch, torch_is_there
from tests.end_to_end.test_streaming_libraries import STAND_INS
from tests.examples.running import need_framework

__all__ = ["torch_is_there"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # by torchdata
    pytest.mark.filterwarnings("ignore:unclosed file .*index.json:ResourceWarning"),  # by mosaicml-streaming
    pytest.mark.filterwarnings("ignore:unclosed file .*[.]tar:ResourceWarning"),  # by webdataset
]

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
URL = "http://10.0.0.5:8000"

IMAGES = """
class Images:
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return float(index), index % 10
"""


class Section:
    """Code of a section of the page, and the server that hosts its dataset."""

    def __init__(self, heading: str, folder: Path, stack: ExitStack) -> None:
        text = re.split(rf"^## {re.escape(heading)}\n", PAGE, flags=re.MULTILINE)[1]
        text = re.split(r"^## ", text, flags=re.MULTILINE)[0]
        blocks: list[str] = []
        for code in re.findall(r"^```(?:python|toml)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if named := re.match(r"# ([\w.]+)\n", code):
                (folder / named[1]).write_text(code)
            else:
                blocks.append(code)
        self.before, self.after, *self.moving = blocks
        self._folder, self._stack = folder, stack
        self._url = ""

    def run(self, code: str, **names: Any) -> dict[str, Any]:
        """Run a block with the names of earlier blocks; return all names."""
        if URL in code and not self._url:
            server = ServerProcess("--config", "loader.toml", "--num-workers", "2", "--port", "0", folder=self._folder)
            self._stack.callback(server.end)
            self._url = server.url
        exec(compile(code.replace(URL, self._url), "docs/migration.md", "exec"), names)
        return names


@pytest.fixture
def section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Section]]:
    """Return a function that writes the files of a section to the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    present = set(sys.modules)
    with ExitStack() as stack, few_cpus_are_fine():
        yield lambda heading: Section(heading, tmp_path, stack)
    for name in set(sys.modules) - present:
        if name.startswith("my_"):
            del sys.modules[name]


def test_torchdata_in_order(section: Callable[[str], Section]) -> None:
    """Without shuffle, the batches of each epoch are the same."""
    page, loaders = _torchdata(section)
    before, after = (page.run(code.replace("shuffle=True", "shuffle=False"))["loader"] for code in loaders)
    for _ in range(2):
        assert_same(list(after), list(before))


@pytest.mark.parametrize("taken", [0, 5, 12])
def test_a_running_training_moves_from_torchdata(section: Callable[[str], Section], taken: int) -> None:
    """After any batch, the remaining batches of the epoch are the same, and the next epoch can keep its order."""
    page, (before, after) = _torchdata(section)
    torch.manual_seed(1)
    names = page.run(before.rpartition("for images")[0])
    batches = iter(names["loader"])
    for _ in range(taken):
        next(batches)
    state = names["loader"].state_dict()
    rest, later = list(batches), list(names["loader"])
    torch.manual_seed(2)
    new = page.run(after)
    with pytest.raises(StateMismatch):
        new["loader"].load_state_dict(state)
    moved = page.run(page.moving[0], **{**names, **new, "state": state})
    assert_same(list(moved["loader"]), rest)
    assert len(rest) == 12 - taken
    again = moved["DataLoader"](moved["dataset"], batch_sampler=list(moved["order"]))
    assert_same(list(again), later)


def _torchdata(section: Callable[[str], Section]) -> tuple[Section, tuple[str, str]]:
    need_framework("torchdata")
    Path("my_images.py").write_text(IMAGES)
    page = section("torchdata")
    return page, (page.before, page.after)


def test_webdataset(section: Callable[[str], Section]) -> None:
    """The batches of each epoch are the same, and the second epoch is in another order."""
    need_framework("webdataset")
    Path("shards").mkdir()
    files.tar(Path("shards"))
    page = section("WebDataset")
    before, after = (page.run(code)["loader"] for code in (page.before, page.after))
    assert after.state_dict()["epoch"] == 1
    after.set_epoch(0)
    epochs = [list(after) for _ in range(3)]
    # the block has iterated the loader once: its workers are persistent and continue with epoch 1
    for epoch in epochs[1:]:
        assert_same(epoch, list(before))
    assert len({str([labels.tolist() for _, labels in epoch]) for epoch in epochs}) == 3
    after.set_epoch(2)
    moved = iter(after)
    next(moved)
    again = page.run(page.after)["loader"]
    again.load_state_dict(after.state_dict())
    assert_same(list(again), list(moved))


def test_mosaic(section: Callable[[str], Section]) -> None:
    """The batches of each epoch are the same, and a running training continues with the next batch."""
    need_framework("streaming")
    if not find_spec("torchvision"):
        # streaming imports it for datasets of images, also in the server
        for module, used in STAND_INS.items():
            path = Path("torchvision", *module.split(".")[1:], "__init__.py")
            path.parent.mkdir(parents=True)
            path.write_text("".join(f"{name} = object\n" for name in used))
    streaming = import_module("streaming")
    files.mosaic(Path())
    Path("mosaic").rename("shards")
    page = section("MosaicML Streaming")
    streaming.base.util.clean_stale_shared_memory()
    names = page.run(page.before)
    batches = iter(names["loader"])
    for _ in range(3):
        next(batches)
    state = names["loader"].state_dict()
    rest = list(batches)
    del batches, names
    loader = page.run(page.after)["loader"]
    with pytest.raises(StateMismatch):
        loader.load_state_dict(state)
    collected: list[Any] = []
    page.run(page.moving[0].replace("...", "collected.append(batch)"), loader=loader, state=state, collected=collected)
    assert state["epoch"] == 1
    assert_same(collected, rest)


def test_tf_data_service(section: Callable[[str], Section]) -> None:
    """The samples of each epoch are the same, and each epoch has every sample once."""
    need_framework("tensorflow")
    service = import_module("tensorflow").data.experimental.service
    dispatcher = service.DispatchServer()
    target = dispatcher.target
    config = service.WorkerConfig(dispatcher_address=target.partition("://")[2])
    workers = [service.WorkerServer(config) for _ in range(2)]
    page = section("tf.data service")
    dataset = page.run(page.before.replace("grpc://10.0.0.5:5000", target))["dataset"]
    before = sorted((int(number), int(square)) for number, square in dataset.as_numpy_iterator())
    loader = page.run(page.after)["loader"]
    for _ in range(2):
        assert sorted(_pairs(loader)) == before == [(number, number**2) for number in range(64)]
    del workers, dispatcher


def _pairs(loader: Any) -> list[tuple[int, int]]:
    return [pair for numbers, squares in loader for pair in zip(numbers.tolist(), squares.tolist(), strict=True)]
