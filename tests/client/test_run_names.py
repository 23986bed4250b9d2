"""Names of training runs: the argument `name`, or the file name of the script."""

from __future__ import annotations

import copy
import sys

import pytest

from teleloader import DataLoader
from teleloader.arguments import run_name
from teleloader_shared.messages import RUN_NAME


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("/jobs/train.py", "train.py"),
        ("train my model.py", "train my model.py"),
        ("/jobs/package/__main__.py", "package"),
        ("/jobs/modèle=1.py", "mod_le_1.py"),
        ("/jobs/" + "x" * 100 + ".py", "x" * 64),
        ("-c", None),
        ("", None),
        (".", None),
    ],
)
def test_the_default_is_the_file_name_of_the_script(
    command: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Characters that names may not contain are replaced, and long names are cut."""
    monkeypatch.setattr(sys, "argv", [command])
    assert run_name(None) == name
    assert name is None or RUN_NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["", " x", "x" * 65, "a,b", "a=b", "a\nb", "é", 3])
def test_an_invalid_name_is_refused(name: str) -> None:
    """The message has the name and the rule."""
    with pytest.raises(ValueError, match=r"invalid name .*: expected 1 to 64 letters"):
        DataLoader([1, 2, 3], name=name)


def test_a_copy_has_the_same_name() -> None:
    """A subclass may have an attribute `name`, which is not the name of the run."""

    class Named(DataLoader[int]):
        name = "<any> text"

    loader = Named([1, 2, 3], name="resnet50/lr-0.1")
    again = Named(**loader._other_arguments)
    assert loader._run_name == copy.copy(loader)._run_name == again._run_name == "resnet50/lr-0.1"
