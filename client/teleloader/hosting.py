"""A dataset of this process needs no server that somebody has started: one is started here, while it is used."""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from typing import Any, Final

from teleloader.dataset import RemoteDataset
from teleloader_shared import local
from teleloader_shared.errors import TeleloaderError

ENTRY_POINT_GROUP: Final = "teleloader.serve"
"""Under which the server's part of the distribution offers its ``serve``: the client does not import it."""
_NAME: Final = "dataset"


def host_here(dataset: Any) -> RemoteDataset:
    """`dataset`, served by this process for as long as the result is referred to.

    Without workers of a loader's own it is loaded in this process itself.

    Raises:
        TypeError: When no server is installed, or `dataset` is no dataset.
        TeleloaderError: When the server cannot start, with the cause: a package or a file descriptor is missing, say.
    """
    if not (callable(dataset) or hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise TypeError(
            f"dataset must be a RemoteDataset, or define __getitem__ and __len__, or __iter__; got {dataset!r:.80} "
            f"({type(dataset).__qualname__})"
        )
    found = list(entry_points(group=ENTRY_POINT_GROUP))
    if not found:
        raise TypeError(
            f"dataset must be a RemoteDataset, was {type(dataset).__qualname__}, and no server is installed that could "
            "host it here: pip install 'teleloader[server]'"
        )
    serving = found[0].load()({_NAME: dataset}, num_workers=0)
    try:
        url = serving.__enter__()
    except Exception as error:
        kind = type(dataset).__qualname__
        raise TeleloaderError(f"a dataset of type {kind} cannot be hosted in this process: {error}") from error
    remote = RemoteDataset(url, _NAME)
    weakref.finalize(remote, _stop, serving, os.getpid())
    return remote


def _stop(serving: AbstractContextManager[str], pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked copy: the server is the parent's
    if local.is_server_thread():
        threading.Thread(target=serving.__exit__, args=(None, None, None)).start()
    else:
        serving.__exit__(None, None, None)
