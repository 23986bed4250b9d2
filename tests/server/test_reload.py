"""Folders that are watched for changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from teleloader_server.cli.reload import folders_of
from teleloader_server.config import DatasetConfig


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder from which modules can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path.resolve()


def test_of_a_package_all_folders_with_code_are_watched(code: Path) -> None:
    """Folders with data only are not watched, and no module is imported."""
    for folder in ("pack_one", "pack_one/inner", "pack_one/images"):
        (code / folder).mkdir()
    for file in ("pack_one/__init__.py", "pack_one/inner/transforms.py"):
        (code / file).write_text("raise RuntimeError('imported')")
    (code / "pack_one/images/0.png").write_bytes(b"")
    config = DatasetConfig(name="a", factory="pack_one.inner.transforms:make")
    assert folders_of([config]) == {code / "pack_one", code / "pack_one/inner"}


def test_of_a_single_module_its_own_folder_is_watched(code: Path) -> None:
    """Its folder is watched, because the module may import neighboring ones."""
    (code / "alone.py").write_text("raise RuntimeError('imported')")
    (code / "data").mkdir()
    assert folders_of([DatasetConfig(name="a", factory="alone:make")]) == {code}


def test_the_code_of_functions_is_watched_too(code: Path) -> None:
    """Collate functions and worker-init functions may be elsewhere."""
    for number, name in enumerate(("collating", "starting", "others")):
        (code / str(number)).mkdir()
        (code / str(number) / name).mkdir()
        (code / str(number) / name / "__init__.py").write_text("")
    config = DatasetConfig(
        name="a", factory="json:loads", collate="collating:f", worker_init="starting:f", functions=["others:f"]
    )
    with pytest.MonkeyPatch.context() as patch:
        for number in range(3):
            patch.syspath_prepend(code / str(number))
        watched = folders_of([config])
    assert {code / "0/collating", code / "1/starting", code / "2/others"} < watched


def test_what_cannot_be_imported_is_not_watched() -> None:
    """A module that cannot be imported is ignored: the server itself reports it."""
    assert folders_of([DatasetConfig(name="a", factory="no_such_module:make")]) == set()
