"""A failure on the server becomes an exception of torch's form."""

from __future__ import annotations

import pytest

from teleloader import EncodeError, RemoteError, WorkerDied
from teleloader.errors import exception_of
from teleloader_shared.codec import BatchId, Failure

BATCH_ID = BatchId("a" * 32, 2, 7)


def raised(type_name: str, message: str = "it broke", worker: int = 1) -> Exception:
    """Return the exception for a failure of a type."""
    traceback = f"Traceback (most recent call last):\n  ...\n{type_name}: {message}\n"
    return exception_of(Failure(type_name, message, traceback, [1, 2], worker), BATCH_ID, "http://here")


@pytest.mark.parametrize("kind", [ValueError, TypeError, IndexError, FileNotFoundError, ZeroDivisionError, MemoryError])
def test_builtin_types_are_kept(kind: type[Exception]) -> None:
    """Builtin exceptions keep their type, so that `except ValueError` catches them."""
    assert type(raised(kind.__name__)) is kind


def test_the_text_is_torchs_and_more() -> None:
    """The text has torch's form, the original traceback, and the batch that failed."""
    assert str(raised("ValueError")) == (
        "Caught ValueError in DataLoader worker process 1.\n"
        "Original Traceback (most recent call last):\n  ...\nValueError: it broke\n\n"
        "The error occurred in batch 7 of epoch 2, with the indices [1, 2], on http://here."
    )


def test_a_key_error_keeps_its_lines() -> None:
    """Python shows the repr of a KeyError's message, which would hide the traceback."""
    assert "\nOriginal Traceback" in str(raised("KeyError"))


@pytest.mark.parametrize("name", ["UnicodeDecodeError", "StopIteration", "StopAsyncIteration"])
def test_types_that_cannot_be_raised_with_a_text_are_runtime_errors(name: str) -> None:
    """Such exceptions are raised as RuntimeError, as by torch; a StopIteration would end the loop silently."""
    assert type(raised(name)) is RuntimeError


@pytest.mark.parametrize("name", ["PIL.UnidentifiedImageError", "os.system", "KeyboardInterrupt", "eval", "__import__"])
def test_other_types_are_remote_errors(name: str) -> None:
    """Unknown types are raised as RemoteError; the client imports and calls nothing that a server names."""
    error = raised(name)
    assert isinstance(error, RemoteError)
    assert error.type == name


@pytest.mark.parametrize("kind", [EncodeError, WorkerDied])
def test_teleloaders_own_types_are_kept(kind: type[Exception]) -> None:
    """Exceptions of teleloader, which both sides know, keep their type."""
    assert type(raised(f"{kind.__module__}.{kind.__name__}")) is kind


def test_many_indices_are_not_all_shown() -> None:
    """A message contains at most twenty indices."""
    error = exception_of(Failure("ValueError", "", "", list(range(100)), -1), BATCH_ID, "x")
    assert "18, 19, ...]" in str(error)
