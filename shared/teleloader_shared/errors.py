"""Exceptions that teleloader raises.

::

    TeleloaderError
    ├── InvalidSpec             (ValueError)       invalid loader argument
    ├── UnknownDataset          (LookupError)      the server hosts no dataset of that name
    ├── UnknownLoader           (LookupError)      the loader is not registered with the server
    ├── BatchOutOfRange         (IndexError)       batch number beyond the end of the epoch
    ├── DatasetChanged          (ValueError)       the hosted dataset changed since the loader was created
    ├── StateMismatch           (ValueError)       a saved state does not match this loader
    ├── EncodeError             (TypeError)        a batch holds a value that cannot be sent
    │   └── BatchTooLarge       (ValueError)       a batch exceeds the size limit
    ├── DecodeError             (TypeError)        a batch holds a value that this process cannot restore
    ├── ProtocolError                              received bytes violate the wire format
    │   ├── CorruptFrame                           checksum mismatch
    │   └── VersionMismatch                        client and server use different protocol versions
    ├── ServerUnavailable       (ConnectionError)  no response from the server within the timeout
    ├── AccessDenied                               the server denied the request
    │   ├── Unauthorized                           missing or invalid token
    │   └── Forbidden                              the token lacks permission
    ├── TlsError                                   TLS handshake failed, or a certificate file cannot be loaded
    ├── LoaderTimeout           (RuntimeError)     a batch exceeded ``timeout``, or the server's limit per batch
    ├── TooManyErrors           (RuntimeError)     more samples failed than ``max_errors`` permits
    ├── WorkerDied              (RuntimeError)     no worker can compute the batch
    └── RemoteError             (RuntimeError)     exception of user code whose type is not builtin

The client raises an exception of a dataset with its original type if this is a Python built-in, or the server runs in
the client's process; otherwise as `RemoteError`.
"""

from __future__ import annotations

from typing import Final


class TeleloaderError(Exception):
    """Base class of all exceptions that teleloader defines."""


class InvalidSpec(TeleloaderError, ValueError):
    """A field of a `LoaderSpec` has an invalid value."""


class UnknownDataset(TeleloaderError, LookupError):
    """The server hosts no dataset with the requested name."""


class UnknownLoader(TeleloaderError, LookupError):
    """The server has no loader with the requested key: never registered, expired, or lost in a server restart."""


class BatchOutOfRange(TeleloaderError, IndexError):
    """The requested batch number is beyond the end of the epoch."""


class DatasetChanged(TeleloaderError, ValueError):
    """The hosted dataset's fingerprint has changed since the loader was created."""


class StateMismatch(TeleloaderError, ValueError):
    """A ``state_dict`` is damaged, or belongs to another dataset, sample order or global batch size."""


class EncodeError(TeleloaderError, TypeError):
    """A batch contains a value that the wire format cannot represent; the message includes the value's path."""


class BatchTooLarge(EncodeError, ValueError):
    """An encoded batch is larger than ``max_batch_bytes``."""


class DecodeError(TeleloaderError, TypeError):
    """A batch contains a value of a registered type that this process cannot restore."""


class ProtocolError(TeleloaderError):
    """Received bytes violate the protocol (docs/protocol.md)."""


class CorruptFrame(ProtocolError):
    """A frame's checksum does not match its content."""


class VersionMismatch(ProtocolError):
    """Client and server use different versions of the protocol."""


class ServerUnavailable(TeleloaderError, ConnectionError):
    """The server did not respond within the client's timeout, despite retries.

    Attributes:
        retry_after: The server's ``Retry-After``: seconds to wait before the next request; 0.0 by default.
    """

    retry_after: float = 0.0


class AccessDenied(TeleloaderError):
    """The server denied the request because of its token; a retry would fail again."""


class Unauthorized(AccessDenied):
    """The token of the request is missing, unknown, revoked or expired."""


class Forbidden(AccessDenied):
    """The request's token does not have the required permission."""


class TlsError(TeleloaderError):
    """The TLS handshake failed (untrusted certificate, plain HTTP), or a certificate file cannot be loaded."""


class LoaderTimeout(TeleloaderError, RuntimeError):
    """A batch did not arrive within the loader's ``timeout``, or exceeded the server's per-batch time limit."""


class TooManyErrors(TeleloaderError, RuntimeError):
    """More samples of the epoch were skipped or replaced than ``max_errors`` permits."""


class WorkerDied(TeleloaderError, RuntimeError):
    """No worker can compute the batch.

    Either three workers died while they loaded the batch, no worker can start, or the worker of a shard died and the
    shard cannot continue without losing or repeating samples.
    """


class RemoteError(TeleloaderError, RuntimeError):
    """User code on the server raised an exception whose type is not a Python built-in.

    Attributes:
        type: The original type's qualified name, e.g. ``"PIL.UnidentifiedImageError"``.
    """

    def __init__(self, message: str, type: str) -> None:  # noqa: A002 - the attribute users read is called type
        super().__init__(message)
        self.type = type


PUBLIC_MODULE: Final = "teleloader"
"""Module from which users import the errors: tracebacks and failure frames show this name."""

for _kind in [kind for kind in globals().values() if isinstance(kind, type)]:
    _kind.__module__ = PUBLIC_MODULE
