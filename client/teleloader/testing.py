"""`FakeServer`: in-process loader server for unit tests of training code, without processes and sockets."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from teleloader.api.control import Unreached
from teleloader.api.credentials import Credentials
from teleloader.fetch.direct import Workers
from teleloader.hosting import load_in_process
from teleloader.tensors.memory import HostBuffers, pageable_memory
from teleloader.tensors.output import choose_output
from teleloader.transport.interface import BatchServer, TransportError
from teleloader.transport.request import BatchRequest
from teleloader.transport.selection import fakes
from teleloader.transport.tracing import RequestTrace
from teleloader_shared import codec, local
from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES, PROLOGUE_SIZE, BatchId, Frame, Memory
from teleloader_shared.errors import (
    DatasetChanged,
    InvalidSpec,
    ProtocolError,
    ServerUnavailable,
    UnknownDataset,
    UnknownLoader,
)
from teleloader_shared.messages import ConsumerReport, DatasetInfo, Registration
from teleloader_shared.orders.plan import Plan
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.spec import LoaderSpec

_numbers = itertools.count()
_loading: Final = threading.Lock()
"""Held while a batch is loaded, because loading changes the global random generators of the process. The thread that
holds it is marked as a server thread: if garbage collection finalizes an iterator there, the finalizer must not wait
for this lock."""


class FakeServer:
    """In-process loader server for unit tests of training code.

    In the ``with`` block, ``RemoteDataset(server.url, name)`` connects to it. Batches, their order, saved states and
    errors are those of a server that hosts the same datasets. A background thread loads one batch at a time; it seeds
    the global random generators of the process for the batch, and restores them afterwards. Each shard of an
    iterable-style dataset is a deep copy of the dataset, or the dataset itself if copying fails.

    Args:
        datasets: Datasets by name, as torch accepts them.
        functions: Functions that loaders may pass as `collate_fn` and `worker_init_fn`; none by default.
        before_batch: Called as ``before_batch(dataset, epoch, batch)`` before each batch is loaded, in the background
            thread, and again if the client repeats the request. A ConnectionError breaks the connection, and the client
            retries; another exception is raised by ``next()`` in place of the batch; a function that sleeps delays the
            batch. None (the default) calls nothing.

    Raises:
        TypeError: If the server package is not installed.
        TeleloaderError: If an object is not a dataset.

    Example:
        >>> with FakeServer({"train": [1, 2, 3]}) as server:  # doctest: +SKIP
        ...     train(server.url)
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        *,
        functions: Iterable[Callable[..., Any]] = (),
        before_batch: Callable[[str, int, int], object] | None = None,
    ) -> None:
        self.url: Final = f"http://fake-{next(_numbers)}.localhost:1"
        """URL for `RemoteDataset`. No socket listens at it: outside of the ``with`` block, connections fail."""
        self._datasets = {name: load_in_process(dataset, name) for name, dataset in datasets.items()}
        self._functions = {f"{function.__module__}:{function.__qualname__}": function for function in functions}
        self._before_batch = before_batch
        self._loaders: dict[str, tuple[str, Workers]] = {}
        """Dataset name and workers of each registered loader, by loader key."""

    def __enter__(self) -> FakeServer:
        fakes[self.url] = partial(_InProcessServer, self)
        return self

    def __exit__(self, *_: object) -> None:
        del fakes[self.url]
        for key in list(self._loaders):
            self._forget(key)

    def _loader(self, key: str) -> tuple[str, Workers]:
        found = self._loaders.get(key)
        if found is None:
            raise UnknownLoader(f"unknown loader {key}: register the loader with the fake server at {self.url}")
        return found

    def _forget(self, key: str) -> None:
        with local.serving(), _loading:
            _, workers = self._loaders.pop(key, (None, None))
            if workers is not None:
                workers.close()

    def _frame(self, batch_id: BatchId, listed: bytes | None) -> NDArray[np.uint8]:
        dataset, _ = self._loader(batch_id.loader)
        error = None
        try:
            if self._before_batch is not None:
                self._before_batch(dataset, batch_id.epoch, batch_id.batch)
        except ConnectionError:
            raise
        except BaseException as raised:  # noqa: BLE001 - pytest.fail() too: it stands for an exception of the dataset
            error = raised
        with local.serving(), _loading:
            _, workers = self._loader(batch_id.loader)  # once more: the session may have ended meanwhile
            return workers.frame(batch_id, listed, error)


class _InProcessServer(BatchServer):
    computes_in_background = False  # `before_batch` is called only for batches of epochs that the test starts

    def __init__(
        self, fake: FakeServer, url: str, timeout: float, credentials: Credentials, server_name: str | None
    ) -> None:
        super().__init__(url, timeout, credentials, server_name)
        self._running = fake

    @property
    def _fake(self) -> FakeServer:
        if self.url not in fakes:
            raise Unreached(f"cannot connect to {self.url}: the FakeServer was closed. Connect within its with block")
        return self._running

    def datasets(self) -> list[DatasetInfo]:
        functions = list(self._fake._functions)
        return [replace(loader.info, functions=functions) for loader in self._fake._datasets.values()]

    def dataset(self, name: str, version: str | None = None, fingerprint: str | None = None) -> DatasetInfo:
        for info in self.datasets():
            if info.name == name and version in (None, info.version) and fingerprint in (None, info.fingerprint):
                return info
        raise UnknownDataset(f"unknown dataset {name!r}: {self.url} hosts {', '.join(map(repr, self._fake._datasets))}")

    def register(self, spec: LoaderSpec, epoch: int) -> Registration:
        fake, info = self._fake, self.dataset(spec.dataset)
        if spec.mixture is not None:
            raise InvalidSpec("FakeServer does not support a Mixture: use teleloader_server.serve()")
        if spec.fingerprint not in (None, info.fingerprint):
            raise DatasetChanged(
                f"dataset {info.name!r} has fingerprint {info.fingerprint}, and the loader was created for "
                f"{spec.fingerprint}: the length of the dataset changed. Create another loader"
            )
        spec = replace(spec, fingerprint=info.fingerprint)
        key = spec.key
        with local.serving(), _loading:
            if key not in fake._loaders:
                workers = fake._datasets[info.name].workers(spec, fake._functions)
                fake._loaders[key] = (info.name, workers)
        is_planned = info.kind == "map" and spec.order == "plan"
        return Registration(
            key=key,
            batches=len(Plan(spec, info.length or 0, 0)) if is_planned and not spec.is_prepared else None,
            length=info.length,
            fingerprint=info.fingerprint,
            num_workers=spec.shards,
            max_batch_bytes=DEFAULT_MAX_BATCH_BYTES,
        )

    def touch(self, key: str) -> None:
        self._fake._loader(key)

    def end_session(self, key: str) -> None:
        self._running._forget(key)

    def report_progress(self, key: str, epoch: int, consumer: str, report: ConsumerReport, timeout: float) -> None:
        pass  # there are no statistics

    def batch(self, batch_id: BatchId, listed: bytes | None = None, *, consumer: str) -> Frame:
        try:
            frame = self._fake._frame(batch_id, listed)
        except ConnectionError as error:
            reason = str(error) or type(error).__name__
            raise ServerUnavailable(f"{self.url} did not send batch {batch_id.batch}: {reason}") from error
        return codec.read(pageable_memory(choose_output(None), frame))

    def connect(self, key: str, epoch: int, consumer: str, report: Callable[[], ConsumerReport]) -> _Connection:
        if self.url not in fakes:
            raise TransportError("the FakeServer was closed")
        return _Connection(self, key, epoch)


class _Connection:
    def __init__(self, server: _InProcessServer, key: str, epoch: int) -> None:
        self._server = server
        self._first = BatchId(key, epoch, 0)
        self._wanted = BatchRequest(BatchRanges())
        self.trace: RequestTrace | None = None
        self.first_byte = 0
        self.wants_timings = False
        self.verified = 0
        self.is_usable = True

    def send(self, wanted: BatchRequest, trace: RequestTrace | None = None) -> None:
        self._check()
        self._wanted, self.trace = wanted, trace

    def receive(self, buffers: HostBuffers, batches: int, max_bytes: int) -> Memory:
        self._check()
        start, listed = self._wanted.batches.start, self._wanted.listed
        if listed is not None:
            listed = listed[: codec.frame_size(listed[:PROLOGUE_SIZE])]
        try:
            frame = self._server._fake._frame(self._first._replace(batch=start), listed)
        except ConnectionError as error:
            self.close()
            raise TransportError(str(error) or type(error).__name__) from error
        self._check()
        if len(frame) > max_bytes:
            raise ProtocolError(
                f"batch {start} has {len(frame):,} bytes, and the limit is {max_bytes:,}: increase max_batch_bytes"
            )
        self.first_byte = time.time_ns()
        memory = buffers.take(len(frame), batches)
        memory.data[:] = frame
        return memory

    def shut_down(self) -> None:
        self.is_usable = False

    close = shut_down

    def _check(self) -> None:
        if not self.is_usable:
            raise TransportError("the connection was closed")
