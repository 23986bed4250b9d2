"""`RemoteDataset`: a dataset that a loader server hosts; and the control plane to that server."""

from __future__ import annotations

import dataclasses
import json
import logging
import operator
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, SupportsIndex, TypeVar
from urllib.parse import quote

import httpx
import numpy as np

from teleloader.backoff import Backoff
from teleloader.failures import exception_of, known_error
from teleloader.output import array_maker, choose_output
from teleloader_shared import codec, local
from teleloader_shared.codec import Address, Failure, Frame
from teleloader_shared.errors import ProtocolError, ServerUnavailable, TeleloaderError, UnknownDataset, VersionMismatch
from teleloader_shared.messages import (
    DATASETS_PATH,
    FRAME_MEDIA_TYPE,
    LOADERS_PATH,
    PROTOCOL_HEADER,
    PROTOCOL_VERSION,
    DatasetInfo,
    Registration,
    batches_path,
    loader_path,
)
from teleloader_shared.spec import LoaderSpec

DEFAULT_RECONNECT_TIMEOUT: Final = 60.0
"""Seconds for which a server that does not answer is tried again."""
REQUEST_TIMEOUT: Final = 10.0
END_TIMEOUT: Final = 2.0
"""Seconds that an iterator which is dropped waits for the server to take note."""

logger = logging.getLogger("teleloader")

_Record = TypeVar("_Record", DatasetInfo, Registration)


class RemoteDataset:
    """A dataset on a loader server.

    Args:
        url: Where the server is, e.g. ``"http://cpu-box:8000"``.
        name: The dataset's name there; None takes the only one that is hosted.
        reconnect_timeout: Seconds for which a server that does not answer is tried again, now and later.

    Raises:
        ServerUnavailable: When the server did not answer for so long.
        UnknownDataset: When it hosts no dataset of that name.
        ValueError: When `url` is no HTTP URL.
    """

    def __init__(
        self, url: str, name: str | None = None, *, reconnect_timeout: float = DEFAULT_RECONNECT_TIMEOUT
    ) -> None:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError(f"the server's URL must look like http://host:8000, was {url!r}")
        self.url = url.rstrip("/")
        self.reconnect_timeout = reconnect_timeout
        hosted = {info.name: info for info in self._datasets()}
        if name is None and len(hosted) == 1:
            name = next(iter(hosted))
        if name not in hosted:
            known = ", ".join(repr(known) for known in hosted)
            raise UnknownDataset(f"{self.url} hosts {known}, and {name!r} was asked for")
        self._info = hosted[name]

    @property
    def info(self) -> DatasetInfo:
        """What the server says of the dataset: when it was connected to, or now for an object of this process."""
        if local.is_served_here(self.url):
            path = f"{DATASETS_PATH}/{quote(self._info.name, safe='')}"
            self._info = _record(DatasetInfo, self._persistently(lambda: self._request("GET", path)))
        return self._info

    @property
    def name(self) -> str:
        """The dataset's name on the server."""
        return self._info.name

    @property
    def cpus(self) -> int:
        """How many CPUs the server may use."""
        return self._info.cpus

    @property
    def iterable(self) -> bool:
        """Whether it is iterable-style."""
        return self._info.kind == "iterable"

    def __len__(self) -> int:
        info = self.info
        if info.length is None:
            raise TypeError(f"object of type {info.type!r} has no len()")
        return info.length

    def __getitem__(self, index: SupportsIndex) -> Any:
        """One sample of a map-style dataset, as ``batch_size=None`` gives it: to look at; a `DataLoader` is fast.

        Raises:
            IndexError: When there is no such sample, so that ``for sample in dataset`` ends.
            TypeError: For an iterable-style dataset.
            Exception: What the dataset raises.
        """
        if self.iterable:
            raise TypeError(f"dataset {self.name!r} is iterable-style: its samples have no numbers")
        length = len(self)
        position = operator.index(index) + (length if operator.index(index) < 0 else 0)
        if not 0 <= position < length:
            raise IndexError(f"sample {operator.index(index)} is out of range: dataset {self.name!r} has {length}")
        frame = self.batch(LoaderSpec(dataset=self.name, batch_size=None), 0, position)
        if isinstance(frame.content, Failure):
            raise exception_of(frame.content, frame.address, self.url)
        return frame.content

    def batch(self, spec: LoaderSpec, epoch: int, k: int, indices: list[int] | None = None) -> Frame:
        """One batch, or the failure in its place, by its address, for looking at; a `DataLoader` is fast.

        Args:
            spec: The loader.
            epoch: The epoch.
            k: Number of the batch.
            indices: What it holds, for an order of the client's own.

        Raises:
            BatchOutOfRange: When the epoch has no such batch.
        """
        key = self.register(spec).key
        try:
            if indices is None:
                raw = self._request("GET", f"{batches_path(key, epoch)}/{k}", timeout=None)
            else:
                listed = codec.to_bytes(Address(key, epoch, k), indices)
                raw = self._request("POST", f"{batches_path(key, epoch)}?start={k}", timeout=None, content=listed)
        finally:
            if spec.session is not None:
                self.end_session(key)
        return codec.read(np.frombuffer(bytearray(raw), np.uint8), array_maker(choose_output(None), pin_memory=False))

    def __repr__(self) -> str:
        return f"RemoteDataset({self.url!r}, {self.name!r})"

    def register(self, spec: LoaderSpec, *, wait: bool = True) -> Registration:
        """Make a loader known to the server, however often.

        Args:
            spec: The loader.
            wait: Whether to try a server that does not answer again for `reconnect_timeout`.

        Raises:
            ServerUnavailable: When the server does not answer.
            DatasetChanged: When it hosts other data now than `spec` was made for.
            VersionMismatch: When it speaks another version of the protocol.
        """

        def request() -> Any:
            return self._request("POST", LOADERS_PATH, json=spec.to_json())

        answer = self._persistently(request) if wait else request()
        registered = _record(Registration, answer)
        if registered.protocol != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"{self.url} speaks protocol version {registered.protocol} and this client {PROTOCOL_VERSION}: install "
                "the same release of teleloader on both sides"
            )
        return registered

    def end_session(self, key: str) -> None:
        """Tell the server that a loader's own workers are not needed any more; it would find out by itself, later."""
        if local.is_server_thread():
            threading.Thread(target=self._end_session, args=(key,), daemon=True).start()
        else:
            self._end_session(key)

    def _end_session(self, key: str) -> None:
        with suppress(TeleloaderError):
            self._request("DELETE", loader_path(key), timeout=END_TIMEOUT)

    def _datasets(self) -> list[DatasetInfo]:
        """What the server hosts; waits for one that is only being started."""
        return [
            _record(DatasetInfo, found) for found in self._persistently(lambda: self._request("GET", DATASETS_PATH))
        ]

    def _persistently(self, request: Callable[[], Any]) -> Any:
        backoff = Backoff(self.reconnect_timeout)
        while True:
            try:
                return request()
            except ServerUnavailable as error:
                if backoff.first:
                    logger.warning("%s; trying again for %g s", error, self.reconnect_timeout)
                if not backoff.pause():
                    raise ServerUnavailable(
                        f"{error} (tried for {self.reconnect_timeout:g} s). Is teleloader-server running there, and is "
                        "the address right?"
                    ) from None

    def _request(self, method: str, path: str, timeout: float | None = REQUEST_TIMEOUT, **options: Any) -> Any:
        headers = {PROTOCOL_HEADER: str(PROTOCOL_VERSION)}
        try:
            # a client for each of these few requests: no socket is left open between them. What the environment says
            # of proxies is ignored, because the batches themselves do not go through one either
            with httpx.Client(verify=self.url.startswith("https"), trust_env=False) as client:
                answer = client.request(method, self.url + path, headers=headers, timeout=timeout, **options)
        except httpx.TransportError as error:
            raise ServerUnavailable(
                f"no loader server answers at {self.url}: {error or type(error).__name__}"
            ) from None
        if answer.status_code == httpx.codes.NO_CONTENT:
            return None
        if answer.status_code != httpx.codes.OK:
            raise error_of(answer.status_code, answer.content, str(answer.url))
        if answer.headers.get("content-type") == FRAME_MEDIA_TYPE:
            return answer.content
        try:
            return answer.json()
        except ValueError:
            raise ProtocolError(f"{answer.url} answers with something that is not JSON: no loader server?") from None


def error_of(status: int, body: bytes, url: str) -> TeleloaderError:
    """The error that an answer other than 200 stands for."""
    problem = _problem_of(body)
    detail = problem.get("detail", body[:200].decode(errors="replace"))
    return known_error(problem.get("code", ""), detail) or ProtocolError(f"{url} answered {status}: {detail}")


def _problem_of(body: bytes) -> dict[str, str]:
    """The fields of a problem+json body, {} when it is none."""
    try:
        content = json.loads(body)
    except ValueError:
        return {}
    return {key: str(value) for key, value in content.items()} if isinstance(content, dict) else {}


def _record(kind: type[_Record], fields: Any) -> _Record:
    """A record from JSON; fields that a newer server adds are ignored."""
    names = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(fields, dict) or not set(names) <= set(fields):
        raise ProtocolError(f"the server's answer lacks some of {', '.join(names)}: is it a loader server?")
    return kind(**{name: fields[name] for name in names})
