"""Hosting of dataset objects of this process, either in a server in this process or without a server."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import entry_points
from typing import Any, Final

from teleloader.dataset import RemoteDataset
from teleloader.fetch.direct import DirectDataset, Loader
from teleloader.mixture import Mixture, RemoteMixture
from teleloader_shared import local
from teleloader_shared.errors import TeleloaderError

_NAME: Final = "dataset"


def find_dataset(dataset: Any, num_workers: int) -> RemoteDataset | DirectDataset:
    """Resolve a loader's `dataset` argument to the dataset to load from; start a server in this process if needed.

    A `RemoteDataset` is returned unchanged, and a `Mixture` of them as a `RemoteMixture`. Any other dataset object is
    hosted by a server in this process, which stops when the result is garbage-collected; with ``num_workers=0``, the
    calling thread loads the object without a server. Server and loader are entry points of the server package, so that
    the client does not import this package.

    Raises:
        TypeError: If the server package is not installed, or `dataset` is not a dataset.
        TeleloaderError: If the object cannot be hosted, for example because it has no length, a package is missing,
            or the operating system is not supported.
    """
    if isinstance(dataset, RemoteDataset):
        return dataset
    if isinstance(dataset, Mixture) and dataset.is_remote:
        return RemoteMixture(list(dataset.sources.values()))
    if not (callable(dataset) or hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise TypeError(
            f"dataset must be a RemoteDataset, or define __getitem__ and __len__, or __iter__; got {dataset!r:.80} "
            f"({type(dataset).__qualname__})"
        )
    if sys.platform == "win32" or (sys.platform != "linux" and num_workers > 0):
        raise TeleloaderError(
            f"cannot load a dataset of type {type(dataset).__qualname__} with num_workers={num_workers} "
            f"on {sys.platform}: workers require Linux, and num_workers=0 requires Linux or macOS. Pass a "
            "RemoteDataset of a server on Linux"
        )
    return DirectDataset(load_in_process(dataset, _NAME)) if num_workers == 0 else _host_in_process(dataset)


def load_in_process(dataset: Any, name: str) -> Loader:
    """Create a loader that loads a dataset object in the calling thread.

    Raises:
        TypeError: If the server package is not installed.
        TeleloaderError: If `dataset` is not a dataset.
    """
    load = _entry_point("teleloader.load", dataset)
    with _as_teleloader_error(dataset):
        loader: Loader = load(dataset, name)
        return loader


def _host_in_process(dataset: Any) -> RemoteDataset:
    hosted = dataset.sources if isinstance(dataset, Mixture) else {_NAME: dataset}
    serving = _entry_point("teleloader.serve", dataset)(hosted, num_workers=0)
    with _as_teleloader_error(dataset):
        url = serving.__enter__()
    remotes = [RemoteDataset(url, name) for name in hosted]
    remote = RemoteMixture(remotes) if isinstance(dataset, Mixture) else remotes[0]
    weakref.finalize(remote, _stop, serving, os.getpid())
    return remote


def _entry_point(group: str, dataset: Any) -> Any:
    found = list(entry_points(group=group))
    if not found:
        raise TypeError(
            f"dataset must be a RemoteDataset, got {type(dataset).__qualname__}. To load other datasets in this "
            "process, install the server: pip install 'teleloader[server]'"
        )
    return found[0].load()


@contextmanager
def _as_teleloader_error(dataset: Any) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        kind = type(dataset).__qualname__
        raise TeleloaderError(f"cannot host a dataset of type {kind} in this process: {error}") from error


def _stop(serving: AbstractContextManager[str], pid: int) -> None:
    if os.getpid() != pid:
        return  # in a forked child: the server belongs to the parent
    if local.is_server_thread():
        threading.Thread(target=serving.__exit__, args=(None, None, None)).start()
    else:
        serving.__exit__(None, None, None)
