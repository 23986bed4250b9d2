"""`RemoteDataset`: a dataset hosted by one or more loader servers."""

from __future__ import annotations

import copy
import logging
import operator
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, SupportsIndex, TypeVar
from urllib.parse import urlsplit

import numpy as np

from teleloader.api.backoff import Backoff
from teleloader.api.control import Server, Unreached
from teleloader.api.credentials import Credentials
from teleloader.construction import Construction
from teleloader.errors import exception_of
from teleloader.fleet.servers import Servers, nearest
from teleloader.fleet.trust import check_environment
from teleloader.sampling import index_frame
from teleloader.transport.interface import BatchServer
from teleloader.transport.pool import ConnectionPool
from teleloader.transport.selection import server_at
from teleloader_shared import local
from teleloader_shared.codec import BatchId, Failure, Frame
from teleloader_shared.errors import (
    DatasetChanged,
    InvalidSpec,
    ProtocolError,
    ServerUnavailable,
    TeleloaderError,
    TlsError,
    UnknownDataset,
)
from teleloader_shared.lengths import Lengths
from teleloader_shared.messages import PREVIEW, DatasetInfo, Registration
from teleloader_shared.orders.plan import other_lengths
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.secret import Secret
from teleloader_shared.spec import DEFAULT_COLLATE, LoaderSpec
from teleloader_shared.text import did_you_mean

DEFAULT_RECONNECT_TIMEOUT: Final = 60.0
DEFAULT_STALL_TIMEOUT: Final = 10.0

_LENGTHS: Final = 2**18
"""Lengths per batch of their download."""

logger = logging.getLogger("teleloader")

_Result = TypeVar("_Result")
_Value = TypeVar("_Value")


class RemoteDataset:
    """Dataset on a loader server, or on several servers that host the same dataset.

    With several servers, blocks of batches are distributed over them in proportion to their speeds (in the first epoch:
    to their numbers of workers). All clients request a block from the same server, which computes it once. A request
    that takes too long is also sent to a second server. A failed server is taken out of rotation and retried
    periodically. The shards of an iterable-style dataset are divided among the servers.

    A copy (`copy`, pickle) is a new object with the same arguments, which connects to the servers itself. Pickles
    contain no `token`, except while `multiprocessing` starts a process with the object as an argument.

    Args:
        url: URL of the server, such as ``"http://cpu-box:8000"``, or a sequence of URLs, or a directory that lists
            URLs: a function without arguments, ``"file:///shared/job.servers"`` (one URL per line),
            ``"dns+http://name:8000"`` (the servers at all IP addresses of a DNS name), or
            ``"registry+http://a:8000,b:8000"`` (the servers that announced themselves to these servers). Directories
            are read every 0.5 s, and servers join and leave during training.
        name: Name of the dataset on the server. None (the default) selects the only dataset that the server hosts.
        version: Version of the dataset. None (the default) selects the newest version that all servers have, or the
            version of the state that `DataLoader.load_state_dict` restores. This object and its copies keep the version
            when another one is published.
        token: Token that authenticates the client. None (the default) reads ``TELELOADER_TOKEN``, or the file that
            ``TELELOADER_TOKEN_FILE`` names. Prefer these variables: a token in a script ends up in its repository.
        ca: File (PEM) of the CA that signed the certificate of an ``https://`` server, or the PEM text itself. None
            (the default) reads ``TELELOADER_CA``, or uses the CAs of the system.
        cert: File (PEM) of a client certificate, if the server requires one. None (the default) reads
            ``TELELOADER_CERT``.
        key: File (PEM) of the certificate's key, if it is in a file of its own. None (the default) reads
            ``TELELOADER_KEY``.
        trust_directory: Whether the client uses every server that a file, DNS name or registry lists; these servers
            receive the token. By default (False), servers on other machines require an ``https://`` URL and a `ca`
            (with ``"dns+https://name"``: a certificate for the name). Servers that a function returns are always used.
        allow_mixed_environments: Whether to use servers with other versions of Python, NumPy or torch than most
            servers, whose batches could have other bits; False by default.
        reconnect_timeout: Seconds for which requests are retried while no server responds; 60 by default, 0 does not
            retry.
        stall_timeout: Seconds without a received byte after which the client checks the health of a server, and counts
            it as disconnected if the check fails; 10 by default. The time to compute a batch is not limited.

    Raises:
        ServerUnavailable: If no server responded within `reconnect_timeout`.
        UnknownDataset: If a server hosts no dataset of that name; with ``name=None``, if it hosts none or several; if
            no server has the version.
        DatasetChanged: If the servers host different data, or if only servers of another environment respond.
        Unauthorized: If a server requires a token, and no token or an invalid one was provided.
        Forbidden: If the token does not permit access to this dataset.
        TlsError: If the certificate of a server cannot be verified, a certificate file cannot be loaded, or a directory
            lists only servers that require ``trust_directory=True``.
        ProtocolError: If the responses are not those of a loader server.
        ValueError: If `url` is neither HTTP URLs nor a directory, a URL contains a password, no URL is given, the token
            is malformed or its file cannot be read, or `stall_timeout` is not positive.

    Example:
        >>> dataset = RemoteDataset("http://cpu-box:8000", "train")  # doctest: +SKIP
        >>> loader = DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8)  # doctest: +SKIP
    """

    def __init__(
        self,
        url: str | Sequence[str] | Callable[[], Iterable[str]],
        name: str | None = None,
        *,
        version: str | None = None,
        token: str | None = None,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        trust_directory: bool = False,
        allow_mixed_environments: bool = False,
        reconnect_timeout: float = DEFAULT_RECONNECT_TIMEOUT,
        stall_timeout: float = DEFAULT_STALL_TIMEOUT,
    ) -> None:
        token = None if token is None else Secret(token)  # first: tracebacks of later errors must not show it
        self._construction = Construction(self, locals())
        if not stall_timeout > 0:
            raise ValueError(f"stall_timeout must be greater than 0 seconds, got {stall_timeout!r}")
        credentials = Credentials(token, ca, cert, key)
        connect = partial(server_at, timeout=stall_timeout, credentials=credentials)
        self.servers = Servers(url, connect, credentials, trust_directory=trust_directory)
        self.reconnect_timeout = reconnect_timeout
        self.environment: str | None = None
        """Versions of libraries that all servers must have: those of most servers. None to accept any."""
        self._allow_mixed_environments = allow_mixed_environments
        self._lengths: Lengths | None = None
        self._sample_pool: ConnectionPool | None = None
        """Connections for `__getitems__` to the server with which the samples' loader is registered; None without."""
        self._given_version = version
        self._is_used = False
        """True once a loader was registered."""
        self._info = self._persistently(lambda: self._found(name))
        self._keep_version()
        self._construction.end(self)

    @property
    def url(self) -> str:
        """Server URL; with several servers, the URL of the first one without an error; the address of a directory."""
        return self.servers.description

    @property
    def is_here(self) -> bool:
        """True if the server runs in this process."""
        return local.is_served_in_process(self.url)

    @property
    def info(self) -> DatasetInfo:
        """Dataset description, fetched at construction; if the server runs in this process, fetched at each access."""
        if self.is_here:
            self._info = self._persistently(lambda: self.servers.require()[0].dataset(self._info.name))
        return self._info

    @property
    def name(self) -> str:
        """Name of the dataset on the server."""
        return self._info.name

    @property
    def version(self) -> str:
        """Version of the dataset, as in the server's configuration; "" by default."""
        return self._info.version

    def _keep_version(self) -> None:
        """Make copies select the same version, if the operator distinguishes versions."""
        if self._info.version:
            self._construction.set_argument("version", self._info.version)

    def select_version(self, fingerprint: str) -> bool:
        """Select the version with a fingerprint, if no version was given and no loader has used another one.

        Returns:
            True if a server has such a version, which is selected now.
        """
        if self._given_version is not None or self._is_used or self.is_here:
            return False
        for server in nearest(self.servers.require(), self.name):
            with suppress(TeleloaderError):
                found = server.dataset(self.name, fingerprint=fingerprint)
                if found.kind == self._info.kind:
                    self._info = found
                    self._keep_version()
                    return True
        return False

    @property
    def cpus(self) -> int:
        """Number of CPUs available to the server."""
        return self._info.cpus

    @property
    def iterable(self) -> bool:
        """True if the dataset is iterable-style."""
        return self._info.kind == "iterable"

    def __len__(self) -> int:
        info = self.info
        if info.length is None:
            raise TypeError(f"object of type {info.type!r} has no len()")
        return info.length

    def __getitem__(self, index: SupportsIndex) -> Any:
        """Return one sample of a map-style dataset in epoch 0, converted by torch's ``default_convert``.

        A collate function that the server's configuration specifies is not used, because it expects a list of samples.
        Each call sends a request, and random augmentation of a sample is the same in each call. To fetch several
        samples together, use `__getitems__`; for training use a `DataLoader`.

        Args:
            index: Index of the sample; negative indices count from the end.

        Raises:
            IndexError: If the index is out of range.
            TypeError: If the dataset is iterable-style.
            Exception: If the dataset raises an exception for the sample.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """Return several samples, equal to ``[dataset[index] for index in indices]``, with a common request.

        torch's `DataLoader`, `Subset` and `random_split` call this method with the indices of a batch. The samples are
        always those of epoch 0, so random augmentation is the same in each epoch of torch's `DataLoader`. They are
        computed by all workers of the server. All calls in a process share a registration with the server, and each
        thread that calls concurrently uses a connection, which stays open until the dataset is garbage-collected.

        Args:
            indices: Indices of the samples; negative indices count from the end. An index may occur repeatedly.

        Raises:
            IndexError: If an index is out of range.
            TypeError: If the dataset is iterable-style.
            Exception: If the dataset raises an exception for a sample; that of the first such sample.
        """
        if self.iterable:
            raise TypeError(f"iterable-style dataset {self.name!r} cannot be indexed: iterate over a DataLoader")
        length = len(self)
        positions = [self._position(operator.index(index), length) for index in indices]
        samples = self._samples(sorted(set(positions))) if positions else {}
        found: list[Any] = []
        repeated: set[int] = set()
        for position in positions:
            frame = samples[position]
            if isinstance(frame.content, Failure):
                raise exception_of(frame.content, frame.batch_id, self.url)
            # a caller that changes a sample in place must not change another one
            found.append(copy.deepcopy(frame.content) if position in repeated else frame.content)
            repeated.add(position)
        return found

    def _position(self, index: int, length: int) -> int:
        position = index + length if index < 0 else index
        if not 0 <= position < length:
            raise IndexError(f"index {index} is out of range: dataset {self.name!r} has {length} samples")
        return position

    def _samples(self, positions: list[int]) -> dict[int, Frame]:
        """Fetch the frames of samples, by index."""
        numbers = BatchRanges.of(positions)
        frames = self._persistently(lambda: self._fetch_samples(numbers))
        return dict(zip(positions, frames, strict=True))

    def _fetch_samples(self, numbers: BatchRanges) -> list[Frame]:
        """Fetch the frames of samples with the registration and connections of earlier calls, if there are any."""
        pool = self._sample_pool
        if pool is not None and pool.is_own and pool.server in self.servers.require():
            with suppress(TeleloaderError):  # the server may have restarted or evicted the loader
                return self._fetch_from(pool, numbers)
        try:
            return self._fetch_from(self._open_sample_pool(), numbers)
        except (ServerUnavailable, TlsError):
            raise
        except TeleloaderError:  # any refusal may result from a corrupted bit
            return self._fetch_from(self._open_sample_pool(), numbers)

    def _open_sample_pool(self) -> ConnectionPool:
        # a collate function of the dataset expects a list of samples
        spec = LoaderSpec(
            dataset=self.name, batch_size=None, fingerprint=self._info.fingerprint, collate=DEFAULT_COLLATE
        )
        server, registered = self._register(spec, epoch=0)
        return ConnectionPool(server, registered.key, 0, f"{consumers_prefix()}samples")

    def _fetch_from(self, pool: ConnectionPool, numbers: BatchRanges) -> list[Frame]:
        """Fetch the frames of samples; keep the pool for the next call, unless an error occurs."""
        try:
            frames = pool.fetch(numbers)
        except TeleloaderError as error:
            self._sample_pool = None
            if isinstance(error, ServerUnavailable):
                pool.server.failed(error)  # the next registration prefers another server
            raise
        pool.server.succeeded()
        self._sample_pool = pool
        return frames

    def batch(
        self, spec: LoaderSpec, epoch: int, k: int, indices: list[int] | None = None, *, consumer: str = PREVIEW
    ) -> Frame:
        """Fetch one batch as a frame, for example to inspect the dataset; the frame may contain a failure.

        Args:
            spec: Parameters of the loader.
            epoch: Epoch number, from 0.
            k: Batch number, from 0.
            indices: Sample indices of the batch, if `spec` has ``order="client"``.
            consumer: Consumer name for the server's statistics; consumers with the default name are omitted from them.

        Raises:
            BatchOutOfRange: If the epoch has no such batch.
        """

        def request() -> Frame:
            server, registered = self._register(spec, epoch)
            batch_id = BatchId(registered.key, epoch, k)
            try:
                listed = None if indices is None else index_frame(batch_id, indices)
                frame = server.batch(batch_id, listed, consumer=consumer)
                server.succeeded()
            finally:
                if spec.session is not None:
                    server.end_session(batch_id.loader)
            return frame

        return self._persistently(request)

    def lengths(self) -> Lengths:
        """Return the lengths of all samples, which are downloaded at the first call and kept.

        Raises:
            InvalidSpec: If the dataset states no lengths.
            DatasetChanged: If they differ from those that the servers describe.
        """
        info = self.info
        if self._lengths is None or self._lengths.digest != info.lengths:
            self._lengths = self._download_lengths(info)
        return self._lengths

    def _download_lengths(self, info: DatasetInfo) -> Lengths:
        if info.lengths is None:
            raise InvalidSpec(f"dataset {info.name!r} states no lengths: define its attribute sample_lengths")
        spec = LoaderSpec(dataset=info.name, batch_size=_LENGTHS, batch_of="lengths", fingerprint=info.fingerprint)
        count = len(self)
        values = np.empty(count, np.int64 if (info.longest or 0) >= 2**31 else np.int32)
        for k in range(-(-count // _LENGTHS)):
            frame = self.batch(spec, 0, k)
            if isinstance(frame.content, Failure):
                raise exception_of(frame.content, frame.batch_id, self.url)
            values[k * _LENGTHS : (k + 1) * _LENGTHS] = np.asarray(frame.content)
        found = Lengths(values, count)
        if found.digest != info.lengths:
            raise DatasetChanged(other_lengths(info.name, found.digest, info.lengths))
        return found

    if not TYPE_CHECKING:  # a type checker would permit any attribute

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError; for the name of a possible attribute of the hosted dataset, with advice."""
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)  # raises the error of the attribute or property
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}: attributes of the hosted dataset are not "
                "available on the client. Define the value in the training script",
                name=name,
                obj=self,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return self._construction.reduce(self, RemoteDataset.__init__)

    def __repr__(self) -> str:
        if not hasattr(self, "_info"):  # __init__ failed, and an error reporter prints the object
            return "<RemoteDataset, not connected>"
        return f"RemoteDataset({self.servers!r}, {self.name!r})"

    def register(self, spec: LoaderSpec, epoch: int) -> tuple[BatchServer, Registration]:
        """Register a loader with the first server that accepts it; servers without a recent error are tried first.

        Args:
            spec: Specification of the loader.
            epoch: Epoch to load.

        Returns:
            The server, and its response.

        Raises:
            ServerUnavailable: If no server responds.
            DatasetChanged: If the servers host data with another fingerprint than that of `spec`.
            VersionMismatch: If the server uses another version of the protocol.
        """
        self._is_used = True
        return self._persistently(lambda: self._register(spec, epoch))

    def _register(self, spec: LoaderSpec, epoch: int) -> tuple[BatchServer, Registration]:
        servers = self.servers.require()
        try:
            return self._register_at(servers, spec, epoch)
        except ServerUnavailable:
            raise
        except TeleloaderError:
            self.servers.refresh()  # other servers may have replaced these
            if self.servers.known == servers:
                raise
            return self._register_at(self.servers.known, spec, epoch)

    def _register_at(
        self, known: tuple[BatchServer, ...], spec: LoaderSpec, epoch: int
    ) -> tuple[BatchServer, Registration]:
        errors: list[TeleloaderError] = []
        news: list[TeleloaderError] = []
        servers = nearest(known, replace(spec, fingerprint=None).key)
        first = spec.rank % len(servers)  # distributes the shards of the ranks over servers
        for server in sorted(servers[first:] + servers[:first], key=lambda server: server.last_error is not None):
            try:
                registered = server.register(spec, epoch)
                try:
                    check_environment(server.url, registered.environment, self.environment)
                except DatasetChanged:
                    if spec.session is not None:
                        server.end_session(spec.key)
                    raise
            except TeleloaderError as error:
                if server.last_error is None:
                    news.append(error)
                server.failed(error)
                self.servers.failed(server.url)
                errors.append(error)
                continue
            for problem in news:
                logger.warning("%s; using another server", problem)
            return server, registered
        raise _final(errors, news)

    def _found(self, name: str | None) -> DatasetInfo:
        """Return the description of the dataset; raise DatasetChanged if the available servers host different data."""
        hosted: list[tuple[Server, DatasetInfo]] = []
        missing: list[TeleloaderError] = []
        news: list[TeleloaderError] = []
        # the same ones in all training processes, which must choose the same data if servers differ
        servers = nearest(self.servers.require(), name or "")
        # a directory may list servers of other users, whose errors must not stop the client
        tolerated = (TeleloaderError,) if self.servers.is_dynamic else (ServerUnavailable, ProtocolError)
        version = self._given_version
        if version is not None:
            tolerated = (*tolerated, UnknownDataset)  # other servers may have it
        responses = _concurrently(partial(_info_at, name=name, version=version, tolerated=tolerated), servers)
        for server, response in zip(servers, responses, strict=True):
            if isinstance(response, TeleloaderError):
                if server.last_error is None:
                    news.append(response)
                server.failed(response)
                missing.append(response)
            else:
                server.succeeded()
                self.servers.learn(server.url, response.ports)
                hosted.append((server, response))
        if not hosted:
            raise _final(missing, news)
        # the other versions of a server matter only if any version may be selected
        found = [info if version is None else replace(info, available=None) for _, info in hosted]
        common = _newest_common(found)
        if common is None:
            each = "; ".join(
                f"{server.url} has {info.name!r} with length {info.length}, version {info.version!r}, fingerprint "
                f"{info.fingerprint}"
                for server, info in hosted
            )
            changed = DatasetChanged(
                f"the servers host different data: {each}. Host the same data on all servers, or remove URLs"
            )
            if not self.servers.is_dynamic:
                raise changed
            missing.append(changed)
        for error in missing:
            logger.warning("%s; using the other servers, and retrying this one periodically", error)
        fingerprint = common or _most_common(info.fingerprint for _, info in hosted)
        usable = [info for _, info in hosted if fingerprint in (info.fingerprint, *(info.available or ()))]
        if not self._allow_mixed_environments:
            self.environment = self.environment or _most_common(info.environment for info in usable)
        chosen = next((info for info in usable if info.fingerprint == fingerprint), None)
        return chosen or hosted[0][0].dataset(usable[0].name, fingerprint=fingerprint)

    def _persistently(self, request: Callable[[], _Result]) -> _Result:
        """Call `request`; retry for `reconnect_timeout` while no server responds, for example during a restart."""
        backoff = Backoff(self.reconnect_timeout)
        while True:
            try:
                return request()
            except ServerUnavailable as error:
                if backoff.first and self.reconnect_timeout > 0:
                    logger.warning("%s; retrying for %g s", error, self.reconnect_timeout)
                if not backoff.pause(error.retry_after):
                    if isinstance(error, _SomeUnavailable):
                        raise error.refusal from None
                    tried = f" (tried for {self.reconnect_timeout:g} s)" if self.reconnect_timeout > 0 else ""
                    hint = self._hint() if isinstance(error, Unreached) else ""
                    raise ServerUnavailable(f"{error}{tried}{hint}") from None

    def _hint(self) -> str:
        """Return advice for the error message of a connection that could not be established."""
        here = all(urlsplit(server.url).hostname in ("localhost", "127.0.0.1", "::1") for server in self.servers.known)
        others = "" if here else " A server without --host accepts only local connections."
        return f". Check that teleloader-server is running, and that the URL is correct.{others}"


def consumers_prefix() -> str:
    """Return the prefix of all consumer names in this process: ``hostname:pid/``."""
    return f"{socket.gethostname()}:{os.getpid()}/"


def _most_common(values: Iterable[_Value]) -> _Value:
    """Return the value that most servers have; the greatest of equally common ones, whatever their order."""
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], str(value)))


def _newest_common(infos: Sequence[DatasetInfo]) -> str | None:
    """Return the fingerprint of the newest version that all servers have; None if they have no version in common.

    Servers may have different newest versions while an operator publishes on one after the other.
    """
    offers = [info.available or [info.fingerprint] for info in infos]
    common = set(offers[0]).intersection(*offers[1:])
    return min(common, key=lambda each: (sum(offer.index(each) for offer in offers), each), default=None)


class _SomeUnavailable(ServerUnavailable):
    """A server is unavailable, and others refused the request.

    Args:
        unavailable: Error of the unavailable server.
        refusal: First error of the others, to raise if no server becomes available.
    """

    def __init__(self, unavailable: ServerUnavailable, refusal: TeleloaderError) -> None:
        super().__init__(str(unavailable))
        self.retry_after = unavailable.retry_after
        self.refusal = refusal


def _final(errors: list[TeleloaderError], news: list[TeleloaderError]) -> TeleloaderError:
    """Return the error of a request to several servers, which a retry may resolve if one of them is unavailable.

    Args:
        errors: Errors of all servers.
        news: Those of servers that had no error before, to log if a retry may resolve another one.
    """
    unavailable = next((error for error in errors if isinstance(error, ServerUnavailable)), None)
    if unavailable is None:
        return errors[0]
    for error in news:
        if not isinstance(error, ServerUnavailable):
            logger.warning("%s; waiting for the other servers", error)
    refusal = next((error for error in errors if not isinstance(error, ServerUnavailable)), None)
    return unavailable if refusal is None else _SomeUnavailable(unavailable, refusal)


def _info_at(
    server: Server, name: str | None, version: str | None, tolerated: tuple[type[TeleloaderError], ...]
) -> DatasetInfo | TeleloaderError:
    """Return the description of the dataset on a server, or the error if it is of a tolerated type."""
    try:
        info = _select(server, name, server.datasets())
        return info if version in (None, info.version) else server.dataset(info.name, version)
    except tolerated as error:
        return error


def _select(server: Server, name: str | None, datasets: list[DatasetInfo]) -> DatasetInfo:
    """Return the description of dataset `name`, or of the server's only dataset if `name` is None."""
    found = {info.name: info for info in datasets}
    wanted = next(iter(found)) if name is None and len(found) == 1 else name
    if wanted in found:
        return found[wanted]
    if name is not None:
        with suppress(UnknownDataset):
            server.dataset(name)  # raises Forbidden if the dataset is hosted, but not for this client
    known = ", ".join(map(repr, found)) or "no datasets"
    problem = "no dataset name was given" if name is None else f"unknown dataset {name!r}"
    hint = did_you_mean(name or "", found) or "Pass the name of a hosted dataset"
    raise UnknownDataset(f"{problem}: {server.url} hosts {known}. {hint}")


def _concurrently(request: Callable[[Server], _Result], servers: Sequence[Server]) -> list[_Result]:
    """Send a request to all servers concurrently and return their responses."""
    if len(servers) == 1:
        return [request(servers[0])]
    with ThreadPoolExecutor(len(servers)) as executor:
        return list(executor.map(request, servers))
