"""A failure frame becomes the exception that it tells of, with torch's text and more."""

from __future__ import annotations

import builtins
import sys

from teleloader_shared import errors, local
from teleloader_shared.codec import Address, Failure
from teleloader_shared.errors import RemoteError, TeleloaderError
from teleloader_shared.text import harmless

_SHOWN_INDICES = 20


class _Message(str):
    """A KeyError shows the repr of its message: this one keeps its lines, as torch's KeyErrorMessage does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def exception_of(failure: Failure, address: Address, server: str) -> Exception:
    """The exception to raise for `failure`.

    It has the original type where that is a builtin one (as ``torch.utils.data.DataLoader`` does it), or one of
    teleloader's; any other is a `RemoteError`, because nothing is imported on a server's word. A builtin type that
    cannot be made from a message becomes a RuntimeError, as in torch.
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
    except Exception:  # noqa: BLE001 - its constructor wants something else
        return RuntimeError(text)


def _class_of_this_process(name: str) -> object:
    """The class of that qualified name, for an exception that was raised in a process forked from this one."""
    parts = name.split(".")
    for i in range(len(parts) - 1, 0, -1):
        found: object = sys.modules.get(".".join(parts[:i]))
        for part in parts[i:]:
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        if found is not None:
            return found
    return None


def known_error(name: str, text: str) -> TeleloaderError | None:
    """Teleloader's own error of that name, if there is one that a sentence makes."""
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
