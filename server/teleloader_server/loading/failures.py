"""Failure records of exceptions, whatever text the exceptions have."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final

import numpy as np

import teleloader_shared
from teleloader_server.loading.tasks import Indices
from teleloader_shared.codec import MAX_INDICES, MAX_TEXT, Failure

_INTERNAL: Final = (f"{Path(__file__).parents[1]}/", f"{Path(teleloader_shared.__file__).parent}/")
_COLLATE: Final = f"{Path(__file__).parent}/collate.py"
"""File of the default collate function, whose frames show which function failed."""


def describe(error: BaseException, indices: Indices, worker: int, sample: int | None = None) -> Failure:
    """Convert an exception to the failure record that is sent to the client."""
    name, message = type_of(error), message_of(error)
    try:
        shown = traceback.TracebackException.from_exception(error)
        _drop_internal_frames(shown)
        text = "".join(shown.format())
    except Exception:  # noqa: BLE001 - traceback calls str() of notes and causes
        text = f"{name}: {message}\n"
    first = indices[:MAX_INDICES]
    numbers = [
        index for index in (first.tolist() if isinstance(first, np.ndarray) else first) if isinstance(index, int)
    ]
    return Failure(name, message[:MAX_TEXT], _cut(text), numbers, worker, sample)


def _drop_internal_frames(shown: traceback.TracebackException) -> None:
    """Remove the frames of the server before the first one of user code; keep all if there is no such frame."""
    chain: list[traceback.TracebackException | None] = [shown]
    while chain:
        each = chain.pop()
        if each is None:
            continue
        first = next((place for place, frame in enumerate(each.stack) if not _is_internal(frame.filename)), 0)
        each.stack = traceback.StackSummary.from_list(each.stack[first:])
        chain += [each.__cause__, each.__context__, *(each.exceptions or ())]


def _is_internal(file: str) -> bool:
    return file.startswith(_INTERNAL) and file != _COLLATE


def type_of(error: BaseException) -> str:
    """Return the qualified name of an exception's type; without a module for built-in types."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def message_of(error: BaseException) -> str:
    """Return the message of an exception; a placeholder if its ``str()`` raises an exception."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - user code; the failure of the batch must still be reported
        return f"<{type_of(error)} whose str() fails>"


def _cut(text: str) -> str:
    """Shorten a traceback in the middle, so that a long message does not displace the lines that raised the error."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT // 2 - 10]}\n[...]\n{text[-MAX_TEXT // 2 + 10 :]}"
