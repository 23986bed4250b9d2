"""Conversion of failure frames to exceptions: torch's message, extended by the batch and the server."""

from __future__ import annotations

import builtins
import sys
from contextlib import suppress

from teleloader_shared import errors, local
from teleloader_shared.codec import BatchId, Failure
from teleloader_shared.errors import RemoteError, TeleloaderError
from teleloader_shared.text import printable

_SHOWN_INDICES = 20


class _Message(str):
    """Message whose repr preserves line breaks, like torch's KeyErrorMessage: ``str()`` of a KeyError is a repr."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def exception_of(failure: Failure, batch_id: BatchId, server: str) -> Exception:
    """Convert a failure frame to the exception that the client raises.

    Builtin exception types (as in ``torch.utils.data.DataLoader``) and teleloader's own types are preserved; if the
    server runs in this process, so are the types of imported modules. Other types become a `RemoteError`, because a
    server must not be able to make the client import modules. A type that cannot be created from a message becomes a
    RuntimeError, as in torch; so does StopIteration, which would end the iteration.

    Args:
        failure: Content of the failure frame.
        batch_id: Identifier of the batch.
        server: URL of the server.
    """
    text = _text(failure, batch_id, server)
    name = failure.type.rpartition(".")[2]
    if failure.type == f"{errors.PUBLIC_MODULE}.{name}":
        return known_error(name, text) or RemoteError(text, failure.type)
    kind = vars(builtins).get(failure.type) or (
        _class_of_this_process(failure.type) if local.is_served_in_process(server) else None
    )
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RemoteError(text, failure.type)
    if issubclass(kind, StopIteration | StopAsyncIteration):
        return RuntimeError(text)  # a StopIteration would silently end the iteration
    try:
        if getattr(kind, "message", None):
            return kind(**{"message": text})
        return kind(_Message(text) if issubclass(kind, KeyError) else text)
    except Exception:  # noqa: BLE001 - the constructor takes other arguments
        return RuntimeError(text)


def _class_of_this_process(name: str) -> object:
    """Return the class with a qualified name if its module is imported, else None; for servers in this process."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        found: object = sys.modules.get(".".join(parts[:i]))
        for part in parts[i:]:
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        if found is not None:
            return found
    return None


def known_error(name: str, text: str) -> TeleloaderError | None:
    """Create the teleloader exception with the given class name, or return None if no such class exists."""
    kind = vars(errors).get(name)
    if isinstance(kind, type) and issubclass(kind, TeleloaderError) and kind is not RemoteError:
        return kind(text)
    return None


def error_of(name: str, text: str) -> Exception:
    """Create the exception that another rank reports: a type of teleloader, a builtin type or a `RemoteError`.

    Args:
        name: Name of the type.
        text: Message of the exception.
    """
    known = known_error(name, text)
    if known is not None:
        return known
    kind = vars(builtins).get(name)
    # a StopIteration would silently end the iteration
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration):
        with suppress(Exception):  # the constructor takes other arguments
            return kind(text)
    return RemoteError(text, name)


def _text(failure: Failure, batch_id: BatchId, server: str) -> str:
    where = "in the loader server" if failure.worker < 0 else f"in DataLoader worker process {failure.worker}"
    cause = failure.message
    if failure.traceback:
        cause = f"Caught {failure.type.rpartition('.')[2]} {where}.\nOriginal {failure.traceback.rstrip()}"
    place = "in" if failure.sample is None else f"at sample index {failure.sample} in"
    which = f"{place} batch {batch_id.batch} of epoch {batch_id.epoch}"
    if failure.indices:
        shown = ", ".join(map(str, failure.indices[:_SHOWN_INDICES]))
        more = ", ..." if len(failure.indices) > _SHOWN_INDICES else ""
        which += f", with the indices [{shown}{more}]"
    hint = ""
    if failure.type == "AttributeError" and failure.message.startswith("'NoneType' object has no attribute"):
        hint = " get_worker_info() returns None if num_workers is 0: pass num_workers=1 to get a worker info."
    return printable(f"{cause}\n\nThe error occurred {which}, on {server}.{hint}")
