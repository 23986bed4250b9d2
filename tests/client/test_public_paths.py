"""Errors show the module from which users import them, and are documented."""

from __future__ import annotations

from typing import Final

import teleloader
from teleloader import TeleloaderError
from teleloader_server.web.problem_responses import STATUS
from teleloader_shared import errors
from tests.conftest import ROOT

ERRORS: Final = {
    name: kind
    for name, kind in vars(errors).items()
    if not name.startswith("_") and isinstance(kind, type) and issubclass(kind, TeleloaderError)
}
"""All errors by name."""


def test_errors_show_their_public_path() -> None:
    """A traceback names teleloader.WorkerDied, which can be imported, and not the module that defines it."""
    assert len(ERRORS) > 15
    assert {kind.__module__ for kind in ERRORS.values()} == {"teleloader"}
    assert [name for name, kind in ERRORS.items() if vars(teleloader).get(name) is not kind] == []


def test_each_error_is_documented() -> None:
    """The hierarchy and the page of the API contain each error."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines()
    assert [name for name in ERRORS if f".. autoexception:: {name}" not in page] == []
    assert [name for name in ERRORS if name not in (errors.__doc__ or "").split()] == []


def test_the_protocol_lists_the_errors_of_responses() -> None:
    """The page of the protocol contains each error with its status."""
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    rows = {kind.__name__: f"| {status.value} | `{kind.__name__}` |" for kind, status in STATUS.items()}
    assert [name for name, row in rows.items() if row not in page] == []
