"""`RemoteDataset`: a dataset that loader servers host."""

from __future__ import annotations

import logging
import operator
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final, SupportsIndex, TypeVar
from urllib.parse import urlsplit

from teleloader.api.backoff import Backoff
from teleloader.api.control import Server, Unreached
from teleloader.api.credentials import Credentials
from teleloader.errors import exception_of
from teleloader.sampling import index_frame
from teleloader_shared import local
from teleloader_shared.codec import Address, Failure, Frame
from teleloader_shared.errors import (
    DatasetChanged,
    ProtocolError,
    ServerUnavailable,
    TeleloaderError,
    UnknownDataset,
)
from teleloader_shared.messages import PREVIEW, DatasetInfo, Registration
from teleloader_shared.secret import Secret
from teleloader_shared.spec import LoaderSpec

DEFAULT_RECONNECT_TIMEOUT: Final = 60.0
DEFAULT_STALL_TIMEOUT: Final = 10.0

logger = logging.getLogger("teleloader")

_Result = TypeVar("_Result")


class RemoteDataset:
    """A dataset on a loader server, or on several that host the same.

    With several, consecutive batches are spread over them, faster ones make more, and what one does not send in time is
    asked of another. One that fails is left, and tried again now and then for as long as another one is there. (The
    shards of an iterable-style dataset are on one server at a time.)

    Args:
        url: Where the server is, e.g. ``"http://cpu-box:8000"``, or a list of such.
        name: The dataset's name there; None takes the only one that is hosted.
        token: The token that authenticates the client; None takes ``TELELOADER_TOKEN``, or the content of the file that
            ``TELELOADER_TOKEN_FILE`` names. Prefer those: a token in a script is a token in its repository.
        ca: File (PEM) of the CA of an ``https://`` server's certificate; None is ``TELELOADER_CA``, or the system's.
        cert: File (PEM) of a client certificate, where the server wants one; None is ``TELELOADER_CERT``.
        key: File (PEM) of its key, if that is in another file; None is ``TELELOADER_KEY``.
        reconnect_timeout: Seconds for which servers are tried again when none answers, now and later.
        stall_timeout: Seconds without a byte after which a server counts as gone, unless it answers when it is asked
            whether it is there: a batch may take as long as it takes.

    Raises:
        ServerUnavailable: When no server answered for so long.
        UnknownDataset: When a server hosts no dataset of that name.
        DatasetChanged: When the servers do not host the same.
        Unauthorized: When a server wants a token and gets none, or none of its own.
        Forbidden: When the token is not for this dataset.
        TlsError: When a server's certificate is not to be trusted.
        ValueError: When `url` is no HTTP URL, or holds a password.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        name: str | None = None,
        *,
        token: str | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        reconnect_timeout: float = DEFAULT_RECONNECT_TIMEOUT,
        stall_timeout: float = DEFAULT_STALL_TIMEOUT,
    ) -> None:
        token = None if token is None else Secret(token)  # first: the frame of an error must not show it
        several: Any = url if isinstance(url, Sequence) and not isinstance(url, str) else [url]
        urls = list(dict.fromkeys(several))
        if not urls:
            raise ValueError("RemoteDataset needs the URL of at least one server, was given an empty list")
        if not stall_timeout > 0:
            raise ValueError(f"stall_timeout must be greater than 0 seconds, was {stall_timeout!r}")
        credentials = Credentials(token, ca, cert, key)
        self.servers = tuple(Server(url, stall_timeout, credentials) for url in urls)
        self.reconnect_timeout = reconnect_timeout
        self._info = self._persistently(lambda: self._found(name))

    @property
    def url(self) -> str:
        """The server's URL; of several, the first one's."""
        return self.servers[0].url

    @property
    def is_here(self) -> bool:
        """Whether the server is in this process."""
        return local.is_served_here(self.url)

    @property
    def info(self) -> DatasetInfo:
        """What the server says of the dataset: when it was connected to, or now for an object of this process."""
        if self.is_here:
            self._info = self._persistently(lambda: self.servers[0].dataset(self._info.name))
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
        spec = LoaderSpec(dataset=self.name, batch_size=None)
        frame = self._batch(spec, 0, position, consumer=f"{consumers_prefix()}samples")
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
        return self._batch(spec, epoch, k, indices, consumer=PREVIEW)

    def _batch(self, spec: LoaderSpec, epoch: int, k: int, indices: list[int] | None = None, *, consumer: str) -> Frame:
        return self._persistently(lambda: self._registered_batch(spec, epoch, k, indices, consumer))

    def _registered_batch(
        self, spec: LoaderSpec, epoch: int, k: int, indices: list[int] | None, consumer: str
    ) -> Frame:
        number, registered = self._register(spec)
        server, address = self.servers[number], Address(registered.key, epoch, k)
        try:
            listed = None if indices is None else index_frame(address, indices)
            frame = server.batch(address, listed, consumer=consumer)
            server.answered()
        finally:
            if spec.session is not None:
                server.end_session(address.loader)
        return frame

    def __repr__(self) -> str:
        if not hasattr(self, "_info"):  # an error report shows a dataset whose __init__ failed
            return "<RemoteDataset, not connected>"
        where = [server.url for server in self.servers]
        return f"RemoteDataset({where[0] if len(where) == 1 else where!r}, {self.name!r})"

    def register(self, spec: LoaderSpec) -> tuple[int, Registration]:
        """Make a loader known to the first server that answers.

        Returns:
            The server's number, and its answer.

        Raises:
            ServerUnavailable: When none answers.
            DatasetChanged: When other data are hosted now than `spec` was made for.
            VersionMismatch: When another version of the protocol is spoken.
        """
        return self._persistently(lambda: self._register(spec))

    def _register(self, spec: LoaderSpec) -> tuple[int, Registration]:
        errors: list[TeleloaderError] = []
        news: list[TeleloaderError] = []
        count = len(self.servers)
        in_turn = [(spec.rank + i) % count for i in range(count)]  # not the shards of all ranks on the same server
        for number in sorted(in_turn, key=lambda number: self.servers[number].last_error is not None):
            server = self.servers[number]
            try:
                registered = server.register(spec)
            except TeleloaderError as error:
                if server.last_error is None:
                    news.append(error)
                server.last_error = ServerUnavailable if isinstance(error, ServerUnavailable) else type(error)
                errors.append(error)
                continue
            for trouble in news:
                logger.warning("%s; another server is asked", trouble)
            return number, registered
        raise _final(errors)

    def _found(self, name: str | None) -> DatasetInfo:
        """The dataset, as all servers that answer have it."""
        hosted: list[tuple[Server, DatasetInfo]] = []
        missing: list[TeleloaderError] = []
        for server, answer in zip(self.servers, _concurrently(_datasets_of, self.servers), strict=True):
            if isinstance(answer, TeleloaderError):
                server.last_error = type(answer)
                missing.append(answer)
                continue
            server.answered()
            found = {info.name: info for info in answer}
            wanted = next(iter(found)) if name is None and len(found) == 1 else name
            if wanted not in found:
                if name is not None:
                    with suppress(UnknownDataset):
                        server.dataset(name)  # it may be there, and not for this client: then the server says so
                known = ", ".join(repr(known) for known in found)
                asked = "no name was given" if name is None else f"{name!r} was asked for"
                raise UnknownDataset(f"{server.url} hosts {known or 'nothing'}, and {asked}: name one of these")
            hosted.append((server, found[wanted]))
        if not hosted:
            raise _final(missing)
        for error in missing:
            logger.warning("%s; going on without it until it answers", error)
        if len({info.fingerprint for _, info in hosted}) > 1:
            each = "; ".join(
                f"{server.url} has {info.name!r} with length {info.length}, version {info.version!r}, fingerprint "
                f"{info.fingerprint}"
                for server, info in hosted
            )
            raise DatasetChanged(f"the servers do not host the same: {each}. Update them all, or leave some out")
        return hosted[0][1]

    def _persistently(self, request: Callable[[], _Result]) -> _Result:
        """The result of a request; waits for a server that is only being started."""
        backoff = Backoff(self.reconnect_timeout)
        while True:
            try:
                return request()
            except ServerUnavailable as error:
                if backoff.first and self.reconnect_timeout > 0:
                    logger.warning("%s; trying again for %g s", error, self.reconnect_timeout)
                if not backoff.pause(error.retry_after):
                    tried = f" (tried for {self.reconnect_timeout:g} s)" if self.reconnect_timeout > 0 else ""
                    hint = self._hint() if isinstance(error, Unreached) else ""
                    raise ServerUnavailable(f"{error}{tried}{hint}") from None

    def _hint(self) -> str:
        """What may be wrong where nobody takes a connection."""
        here = all(urlsplit(server.url).hostname in ("localhost", "127.0.0.1", "::1") for server in self.servers)
        others = "" if here else " Other machines than its own reach it only if it was started with --host."
        return f". Is teleloader-server running there, and is the address right?{others}"


def consumers_prefix() -> str:
    """What the names of all consumers of this process begin with."""
    return f"{socket.gethostname()}:{os.getpid()}/"


def _final(errors: list[TeleloaderError]) -> TeleloaderError:
    """Of the errors of all servers the first that another attempt does not resolve, or the first if there is none."""
    return next((error for error in errors if not isinstance(error, ServerUnavailable)), errors[0])


def _datasets_of(server: Server) -> list[DatasetInfo] | ServerUnavailable | ProtocolError:
    try:
        return server.datasets()
    except (ServerUnavailable, ProtocolError) as error:
        return error


def _concurrently(ask: Callable[[Server], _Result], servers: Sequence[Server]) -> list[_Result]:
    """What each server answers: one that is silent shall not hold up the others."""
    if len(servers) == 1:
        return [ask(servers[0])]
    with ThreadPoolExecutor(len(servers)) as executor:
        return list(executor.map(ask, servers))
