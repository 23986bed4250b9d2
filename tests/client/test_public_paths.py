"""Errors show the module from which users import them."""

from __future__ import annotations

import teleloader
from teleloader import TeleloaderError


def test_errors_show_their_public_path() -> None:
    """A traceback names teleloader.WorkerDied, which can be imported, and not the module that defines it."""
    errors = [
        kind for kind in vars(teleloader).values() if isinstance(kind, type) and issubclass(kind, TeleloaderError)
    ]
    assert len(errors) > 15
    assert {kind.__module__ for kind in errors} == {"teleloader"}
