"""The errors that teleloader raises, all of them.

::

    TeleloaderError
    ├── InvalidSpec             (ValueError)       a loader that cannot exist
    ├── UnknownDataset          (LookupError)      no dataset of that name is hosted
    ├── UnknownLoader           (LookupError)      the server does not know the key (any more)
    ├── BatchOutOfRange         (IndexError)       k is not a batch of the epoch
    ├── DatasetChanged          (ValueError)       what is hosted is not what the loader was made for
    ├── StateMismatch           (ValueError)       a saved state does not fit this loader
    ├── EncodeError             (TypeError)        a batch holds something that cannot travel
    │   └── BatchTooLarge       (ValueError)       a batch is larger than the stated limit
    ├── ProtocolError                              bytes that break the wire format
    │   ├── CorruptFrame                           the checksum does not match
    │   └── VersionMismatch                        the two sides speak different versions
    ├── ServerUnavailable       (ConnectionError)  no answer from the server in the stated time
    ├── AccessDenied                               the server does not let this client do it
    │   ├── Unauthorized                           no token, or none of the server's
    │   └── Forbidden                              the token is not for this
    ├── TlsError                                   the two sides do not come to trust each other
    ├── LoaderTimeout           (RuntimeError)     a batch did not come within ``timeout``, or hung on the server
    ├── WorkerDied              (RuntimeError)     a batch killed its worker, again and again
    └── RemoteError             (RuntimeError)     an exception of a type that is not a builtin one

An exception in a dataset is raised in the client under its own builtin type where it has one, else as
`RemoteError`.
"""

from __future__ import annotations

from typing import Final


class TeleloaderError(Exception):
    """Base of every error of teleloader's own."""


class InvalidSpec(TeleloaderError, ValueError):
    """A field of a `LoaderSpec` has a value that no loader can have."""


class UnknownDataset(TeleloaderError, LookupError):
    """No dataset of that name is hosted."""


class UnknownLoader(TeleloaderError, LookupError):
    """The server knows no loader of that key: it was never registered there, or the server restarted."""


class BatchOutOfRange(TeleloaderError, IndexError):
    """The epoch has fewer batches than the number that was asked for."""


class DatasetChanged(TeleloaderError, ValueError):
    """The dataset that is hosted now has another fingerprint than the one the loader was made for."""


class StateMismatch(TeleloaderError, ValueError):
    """A ``state_dict`` belongs to another dataset, order or global batch size."""


class EncodeError(TeleloaderError, TypeError):
    """A batch holds something that cannot travel; the message has its path inside the batch."""


class BatchTooLarge(EncodeError, ValueError):
    """An encoded batch is larger than ``max_batch_bytes``."""


class ProtocolError(TeleloaderError):
    """Bytes that are not what docs/protocol.md says."""


class CorruptFrame(ProtocolError):
    """A frame's checksum does not match its content."""


class VersionMismatch(ProtocolError):
    """Client and server speak different versions of the protocol."""


class ServerUnavailable(TeleloaderError, ConnectionError):
    """The server gave no answer for as long as the client was told to try.

    Attributes:
        retry_after: Seconds that the server asked the client to wait before the next request; 0.0 by default.
    """

    retry_after: float = 0.0


class AccessDenied(TeleloaderError):
    """The server does not let this client do what it asked for; asking again does not help."""


class Unauthorized(AccessDenied):
    """The request had no token, or one that is not, or is no longer, one of the server's."""


class Forbidden(AccessDenied):
    """The token that came with the request is not for what was asked."""


class TlsError(TeleloaderError):
    """A connection that TLS cannot protect: a certificate is not trusted, or one side speaks plain HTTP."""


class LoaderTimeout(TeleloaderError, RuntimeError):
    """A batch did not arrive within the loader's ``timeout``, or took a worker longer than the server's limit."""


class WorkerDied(TeleloaderError, RuntimeError):
    """A batch ended each worker that tried to load it."""


class RemoteError(TeleloaderError, RuntimeError):
    """An exception of user code on the server whose type is not a builtin one.

    Attributes:
        type: The original type's qualified name, e.g. ``"PIL.UnidentifiedImageError"``.
    """

    def __init__(self, message: str, type: str) -> None:  # noqa: A002 - the attribute users read is called type
        super().__init__(message)
        self.type = type


PUBLIC_MODULE: Final = "teleloader"
"""The module from which users import the errors: tracebacks and failure frames name this path."""

for _kind in [kind for kind in globals().values() if isinstance(kind, type)]:
    _kind.__module__ = PUBLIC_MODULE
