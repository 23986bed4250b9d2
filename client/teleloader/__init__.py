"""teleloader: PyTorch's DataLoader, with its workers on another machine.

from teleloader import DataLoader, RemoteDataset

dataset = RemoteDataset("http://cpu-box:8000", "train")
loader = DataLoader(dataset, batch_size=256, shuffle=True)
for images, labels in loader: ...
"""

from __future__ import annotations

from teleloader.balance import LengthBalance
from teleloader.dataset import RemoteDataset
from teleloader.loader import DataLoader
from teleloader.mixture import Mixture
from teleloader.packing import Packing
from teleloader.stats import LoaderStats
from teleloader_shared.errors import (
    AccessDenied,
    BatchOutOfRange,
    BatchTooLarge,
    CorruptFrame,
    DatasetChanged,
    DecodeError,
    EncodeError,
    Forbidden,
    InvalidSpec,
    LoaderTimeout,
    ProtocolError,
    RemoteError,
    ServerUnavailable,
    StateMismatch,
    TeleloaderError,
    TlsError,
    TooManyErrors,
    Unauthorized,
    UnknownDataset,
    UnknownLoader,
    VersionMismatch,
    WorkerDied,
)
from teleloader_shared.registry import register
from teleloader_shared.version import VERSION as __version__

__all__ = [
    "AccessDenied",
    "BatchOutOfRange",
    "BatchTooLarge",
    "CorruptFrame",
    "DataLoader",
    "DatasetChanged",
    "DecodeError",
    "EncodeError",
    "Forbidden",
    "InvalidSpec",
    "LengthBalance",
    "LoaderStats",
    "LoaderTimeout",
    "Mixture",
    "Packing",
    "ProtocolError",
    "RemoteDataset",
    "RemoteError",
    "ServerUnavailable",
    "StateMismatch",
    "TeleloaderError",
    "TlsError",
    "TooManyErrors",
    "Unauthorized",
    "UnknownDataset",
    "UnknownLoader",
    "VersionMismatch",
    "WorkerDied",
    "__version__",
    "register",
]
