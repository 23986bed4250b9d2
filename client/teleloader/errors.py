"""Conversion of failure frames to exceptions, with the text of torch and where the failure occurred."""

from __future__ import annotations

import builtins
import sys

from teleloader_shared import errors, local
from teleloader_shared.codec import Address, Failure
from teleloader_shared.errors import RemoteError, TeleloaderError
from teleloader_shared.text import harmless

_SHOWN_INDICES = 20


class _Message(str):
    """Message whose repr keeps its lines, as torch's KeyErrorMessage: a KeyError shows the repr."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def exception_of(failure: Failure, address: Address, server: str) -> Exception:
    """Return the exception to raise for `failure`.

    Builtin types (as in ``torch.utils.data.DataLoader``) and types of teleloader are kept. Other types become a
    `RemoteError`: a server cannot make the client import modules. A builtin type that cannot be created from a message
    becomes a RuntimeError, as in torch.

    Args:
        failure: Content of the failure frame.
        address: Address of the batch.
        server: URL of the server.
    """
    text = _text(failure, address, server)
    name = failure.type.rpartition(".")[2]
    if failure.type == f"{errors.PUBLIC_MODULE}.{name}":
        return known_error(name, text) or RemoteError(text, failure.type)
    kind = vars(builtins).get(failure.type) or (
        _class_of_this_process(failure.type) if local.is_served_here(server) else None
    )
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RemoteError(text, failure.type)
    if issubclass(kind, StopIteration | StopAsyncIteration):
        return RuntimeError(text)  # raised as it is, it would end the iteration silently
    try:
        if getattr(kind, "message", None):
            return kind(**{"message": text})
        return kind(_Message(text) if issubclass(kind, KeyError) else text)
    except Exception:  # noqa: BLE001 - its constructor takes other arguments
        return RuntimeError(text)


def _class_of_this_process(name: str) -> object:
    """Return the class of that qualified name, for an exception of a process that was forked from this one."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        found: object = sys.modules.get(".".join(parts[:i]))
        for part in parts[i:]:
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        if found is not None:
            return found
    return None


def known_error(name: str, text: str) -> TeleloaderError | None:
    """Return teleloader's own error of that name; None if no such class can be created from a message."""
    kind = vars(errors).get(name)
    if isinstance(kind, type) and issubclass(kind, TeleloaderError) and kind is not RemoteError:
        return kind(text)
    return None


def _text(failure: Failure, address: Address, server: str) -> str:
    where = "in the loader server" if failure.worker < 0 else f"in DataLoader worker process {failure.worker}"
    cause = failure.message
    if failure.traceback:
        cause = f"Caught {failure.type.rpartition('.')[2]} {where}.\nOriginal {failure.traceback.rstrip()}"
    which = f"batch {address.batch} of epoch {address.epoch}"
    if failure.indices:
        shown = ", ".join(map(str, failure.indices[:_SHOWN_INDICES]))
        more = ", ..." if len(failure.indices) > _SHOWN_INDICES else ""
        which += f", with the indices [{shown}{more}]"
    hint = ""
    if failure.type == "AttributeError" and failure.message.startswith("'NoneType' object has no attribute"):
        hint = " If that is get_worker_info(): it is None with num_workers=0, and with num_workers=1 it is not."
    return harmless(f"{cause}\n\nThis was {which}, on {server}.{hint}")
