"""Failure records of exceptions, whatever text the exceptions have."""

from __future__ import annotations

import traceback

import numpy as np

from teleloader_server.loading.tasks import Indices
from teleloader_shared.codec import MAX_INDICES, MAX_TEXT, Failure


def describe(error: BaseException, indices: Indices, worker: int, sample: int | None = None) -> Failure:
    """Convert an exception to the failure record that is sent to the client."""
    name, message = type_of(error), message_of(error)
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - traceback calls str() of notes and causes
        text = f"{name}: {message}\n"
    first = indices[:MAX_INDICES]
    numbers = [
        index for index in (first.tolist() if isinstance(first, np.ndarray) else first) if isinstance(index, int)
    ]
    return Failure(name, message[:MAX_TEXT], _cut(text), numbers, worker, sample)


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
