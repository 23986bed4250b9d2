"""Loader service: operations on datasets, loaders and batches, with authorization but without HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache
from typing import Final, NamedTuple

from teleloader_server.dispatch.counters import Counters
from teleloader_server.dispatch.engine import BatchStream, Engine
from teleloader_server.dispatch.error_log import batch_preview, sample_preview
from teleloader_server.dispatch.grants import Grants
from teleloader_server.dispatch.lending import Lender
from teleloader_server.dispatch.publishing import Publisher
from teleloader_server.dispatch.quotas import BodyBudget, Memory, Quota, Quotas
from teleloader_server.dispatch.records import Loader, RangeRequest
from teleloader_server.dispatch.sessions import Engines
from teleloader_server.dispatch.stragglers import SlowFetches, SlowSamples, SlowTables
from teleloader_server.dispatch.versions import Version, VersionTable
from teleloader_server.limits import DEFAULT_LIMITS, ClientLimits, Limits
from teleloader_server.loading.environment import environment
from teleloader_server.loading.index_lists import Rules
from teleloader_server.loading.tasks import Task
from teleloader_server.permissions import ADMIN, READ, Caller, Principal, allows
from teleloader_server.workers.factory import PoolFactory
from teleloader_shared.errors import (
    BatchOutOfRange,
    DatasetChanged,
    InvalidSpec,
    ServerUnavailable,
    TeleloaderError,
    UnknownDataset,
    UnknownLoader,
)
from teleloader_shared.inspection import ClientTimes, SlowSample, SlowSampleList
from teleloader_shared.messages import ConsumerReport, DatasetInfo, Registration
from teleloader_shared.orders.plan import Plan, check_limit, check_windows, other_lengths
from teleloader_shared.sources import describe
from teleloader_shared.spec import MAX_EPOCH, LoaderSpec

SESSION_IDLE: Final = 60.0
"""Seconds without a request or heartbeat after which a session ends; clients must then register the loader again."""
HOUSEKEEPING_INTERVAL: Final = 5.0


class _Known(NamedTuple):
    """Registration of a loader."""

    loader: Loader
    engine: Engine
    """Engine that computes the loader's batches."""
    length: int | None
    """Length of the dataset; None if unknown."""
    quota: Quota
    """Quota of the principal that registered the loader."""
    held: ExitStack
    """Context manager stack that releases the resources counted in the quota."""
    versions: list[Version]
    """Versions of the loader's datasets; empty for dataset objects, which have one version."""

    def mark_used(self, now: float) -> None:
        """Record that a loader uses its versions at the time `now`, by ``time.monotonic()``."""
        for version in self.versions:
            version.last_used = now


class LoaderService:
    """Service that registers loaders and streams batches, without HTTP. Not thread-safe: use from one event loop.

    Args:
        host: Factory of worker pools; its pools describe the datasets.
        limits: Limits of workers.
        client_limits: Limits of clients.
    """

    def __init__(self, host: PoolFactory, limits: Limits, client_limits: ClientLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.client_limits = client_limits
        self.quotas = Quotas(client_limits, limits.memory_budget)
        """Resources and limits of each principal."""
        self.draining: Final = asyncio.Event()
        """Set when the shutdown of the server begins: new requests are rejected from then on."""
        self._host = host
        self.counters = Counters()
        """Counters of all engines, for the statistics."""
        self.engines: Final = Engines(host, Memory(limits.memory_budget), self.counters, client_limits)
        self.versions: Final = VersionTable()
        """Versions of configured datasets; empty for dataset objects."""
        self.publisher: Final = Publisher(self.engines, self.versions, self._end_loaders)
        self.connections: Callable[[], int] = lambda: 0
        """Function that returns the number of open connections; set by the web server."""
        self.is_shared: Callable[[], bool] = lambda: False
        """Function that returns True if there are several principals; set by the web application."""
        self.ports: list[int] | None = None
        """Ports of all servers under the same supervisor; None for a single server."""
        self._loaders: OrderedDict[str, _Known] = OrderedDict()
        self._specs = BodyBudget(
            client_limits.max_total_spec_bytes, lambda: self.is_shared(), "loader specs", "max_total_spec_bytes"
        )
        self.grants: Final = Grants()
        """Authorizations of open requests; each ends with its token."""
        self.lender: Final = Lender(client_limits)
        """Loans of shared memory to clients on this machine."""
        self._plan = lru_cache(maxsize=256)(Plan)
        self._slow_tables = SlowTables()

    # -- life

    async def start(self) -> None:
        """Start the background tasks and the shared workers; the workers construct the configured datasets.

        Raises:
            ConfigError: If a dataset cannot be constructed.
        """
        if self._host.infos() is None:
            await self.engines.shared()
            self.versions.add(1, self.engines.revisions[1].infos, self._host.configs, time.monotonic())
        self._background_tasks = [asyncio.create_task(task) for task in (self._run_housekeeping(), self.grants.run())]

    def give_up(self, error: TeleloaderError) -> None:
        """Raise an error in all requests that wait for a batch."""
        for engine in self.engines.started():
            engine.give_up(error)

    async def close(self) -> None:
        """Stop the background tasks and all workers."""
        self.publisher.close()
        for task in self._background_tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await self.engines.close()

    @property
    def ready(self) -> bool:
        """True if the server is not shutting down, and a worker is ready or workers start at the first registration."""
        return not self.draining.is_set() and self.engines.ready

    @property
    def datasets(self) -> dict[str, DatasetInfo]:
        """Hosted datasets by name, in their newest versions."""
        infos = self._host.infos()
        return self.versions.datasets if infos is None else {info.name: info for info in infos}

    def resize(self, num_workers: int) -> None:
        """Change the number of shared workers; the private workers of sessions stay as they are.

        Args:
            num_workers: Number of workers, at least 1.

        Raises:
            InvalidSpec: If the workers are not processes, or have not started yet.
            ServerUnavailable: If the machine lacks memory, processes or file descriptors for all of them.
        """
        try:
            self.engines.resize(num_workers)
        except ValueError as error:
            raise InvalidSpec(f"cannot change the number of workers to {num_workers}: {error}") from None
        except OSError as error:
            raise ServerUnavailable(f"cannot start {num_workers} workers: {error.strerror}") from None

    @property
    def num_workers(self) -> int:
        """Number of shared workers."""
        running = self.engines.num_workers
        return self.limits.num_workers if running is None else running

    def tokens_changed(self) -> None:
        """End the requests and loans whose tokens were revoked; called after tokens have changed or expired."""
        self.grants.tokens_changed.set()
        self.quotas.forget_owners()
        self.lender.forget_accounts()

    # -- loaders

    async def register(self, spec: LoaderSpec, caller: Caller, epoch: int | None = None) -> Registration:
        """Register a loader, and return its key and properties; idempotent.

        The first registration of a session starts the session's workers.

        Args:
            spec: Specification of the loader.
            caller: Caller of the request.
            epoch: Epoch whose batch rate is part of the response; None if the client is not loading an epoch.

        Raises:
            AccessDenied: If the caller may not use the dataset, or may not load in the server process itself.
            UnknownDataset: If the dataset is not hosted.
            DatasetChanged: If the fingerprint of the hosted dataset differs from the spec's.
            InvalidSpec: If the dataset does not support the spec.
            ServerUnavailable: If there are too many sessions, or the server is shutting down.
        """
        self.refuse_when_draining()
        infos = [self.dataset(caller, name) for name in spec.datasets]
        if spec.in_process:  # loading then blocks all other clients
            caller.authorize(ADMIN)
        versions = self.versions.of_loader(spec.datasets, spec.fingerprint) if self._host.configs else []
        if versions:
            infos = [version.info for version in versions]
        elif spec.session is None:
            await self.engines.shared()
            described = self.engines.revisions[1].infos
            infos = [described[info.name] for info in infos]
        info = _described_as_one(spec, infos)
        if spec.fingerprint is not None and spec.fingerprint != info.fingerprint:
            raise DatasetChanged(
                f"dataset {info.name!r} has fingerprint {info.fingerprint} (length {info.length}, version "
                f"{info.version!r}), but the loader requires {spec.fingerprint}: the data, the version or the "
                "collate function changed. Start a new run, or host the previous data"
            )
        spec = replace(spec, fingerprint=info.fingerprint)
        key = spec.key
        if key not in self._loaders:
            await self._add_loader(key, spec, info, caller, versions)
        return self.registration(key, caller, epoch)

    def registration(self, key: str, caller: Caller, epoch: int | None = None) -> Registration:
        """Return the registration of a loader, and record a heartbeat of the loader's session.

        Args:
            key: Key of the loader.
            caller: Caller of the request.
            epoch: Epoch whose capacity is part of the response; None for the present number of workers.

        Raises:
            AccessDenied: If the caller may not use the loader's dataset.
            UnknownLoader: If no loader with this key is registered.
        """
        loader, engine, length, *_ = self._resolve(caller, key)
        engine.touch()
        num_workers, batch_rate = engine.pool.num_workers, None
        if epoch is not None:
            num_workers, batch_rate = loader.capacity_of(epoch, num_workers)
        return Registration(
            key=key,
            batches=None if loader.batches == MAX_EPOCH else loader.batches,
            length=length,
            fingerprint=loader.spec.fingerprint or "",
            num_workers=num_workers,
            max_batch_bytes=self.limits.max_batch_bytes,
            batch_rate=batch_rate,
            environment=environment(),
            handoff=self.lender.offer(_authorize(caller, loader.spec).name),
            replayed=_replayed(engine),
        )

    async def _add_loader(
        self, key: str, spec: LoaderSpec, info: DatasetInfo, caller: Caller, versions: list[Version]
    ) -> None:
        _check_kind(spec, info)
        quota = self.quotas.of(_authorize(caller, spec))
        batches = MAX_EPOCH
        if info.kind == "map" and spec.order == "plan":
            if info.length is None:
                raise InvalidSpec(f"dataset {info.name!r} has no length: define __len__, or pass a sampler")
            if not spec.is_prepared:  # the number depends on the epoch, and workers refuse those beyond it
                batches = len(self._plan(spec, info.length, 0))
        self._make_room(quota, spec.memory)
        with ExitStack() as held:
            held.enter_context(self._specs.hold(quota.name, spec.memory))
            revision = versions[0].revision if versions else 1
            engine = await self.engines.of(key, spec, info, quota, revision)
            if any(version.is_retired for version in versions):
                await self.engines.end_session(key)
                raise DatasetChanged(f"{versions[0]} was retired while the workers started: register the loader again")
            if key not in self._loaders:  # not registered concurrently
                length = 0 if info.kind == "iterable" else info.length or 0
                kind = self.engines.revisions[revision].host.index_kind(spec.dataset)
                # lengths are loaded without the samples
                slow = SlowSamples() if spec.batch_of == "lengths" else self._slow_tables.of(spec)
                loader = Loader(key, spec, length, batches, kind, slow=slow)
                quota.loaders.add(key)
                held.callback(quota.loaders.remove, key)
                self._loaders[key] = _Known(loader, engine, info.length, quota, held.pop_all(), versions)

    def _make_room(self, quota: Quota, nbytes: int) -> None:
        """Remove idle loaders of a principal until another loader with a spec of `nbytes` meets the limits.

        Stops early if the principal has no more idle loaders.
        """
        most = self.client_limits.max_loaders
        while len(quota.loaders) >= most or not self._specs.has_room(quota.name, nbytes):
            if not self._forget_some_loaders(quota):
                break

    def _drop_loader(self, key: str) -> None:
        known = self._loaders.pop(key)
        known.held.close()
        if key not in self.engines.sessions:  # the workers of a session end with the session
            known.engine.pool.forget(key)

    async def end_session_of(self, key: str, caller: Caller) -> None:
        """End a session of the caller and stop its workers; do nothing for an unknown session.

        Raises:
            AccessDenied: If the caller may not use the loader's dataset.
            UnknownLoader: If the session belongs to another principal.
        """
        if key in self._loaders:
            self._resolve(caller, key)
            await self.end_session(key)

    async def end_session(self, key: str) -> None:
        """End a session of any principal and stop its workers; do nothing for an unknown session."""
        known = self._loaders.get(key)
        if known is not None and known.loader.spec.session is not None:
            self._drop_loader(key)
        await self.engines.end_session(key)

    async def _end_loaders(self, version: Version, error: DatasetChanged) -> int:
        """End the requests and sessions of a version's loaders; return the number of loaders."""
        keys = [key for key, known in self._loaders.items() if version in known.versions]
        for key in keys:
            known = self._loaders[key]
            self._drop_loader(key)
            known.engine.end_loader(key, error)
        for key in keys:
            await self.engines.end_session(key)
        return len(keys)

    def _mark_used(self) -> None:
        """Mark the versions of loaders with open requests as used."""
        now = time.monotonic()
        for engine in self.engines.started():
            for consumer in engine.consumers():
                known = self._loaders.get(consumer.epoch[0]) if consumer.requests else None
                if known is not None:
                    known.mark_used(now)

    def loaders_by_version(self) -> Counter[Version]:
        """Return the number of registered loaders of each version."""
        return Counter(version for known in self._loaders.values() for version in set(known.versions))

    def version_of(self, loader: Loader) -> str | None:
        """Return the version of a loader's dataset; None for a mixture, and if it is unknown."""
        known = self._loaders.get(loader.key)
        return known.versions[0].info.version if known is not None and len(known.versions) == 1 else None

    def _forget_some_loaders(self, quota: Quota) -> int:
        """Remove some of a principal's loaders that are not in use, least recently used first.

        Returns:
            The number of removed loaders.
        """
        in_use = {consumer.epoch[0] for engine in self.engines.started() for consumer in engine.consumers()}
        idle = [
            key
            for key, known in self._loaders.items()
            if known.quota is quota and key not in in_use and key not in self.engines.sessions
        ]
        forgotten = idle[: max(1, self.client_limits.max_loaders // 16)]
        for key in forgotten:
            self._drop_loader(key)
        return len(forgotten)

    # -- authorization: all objects are resolved here, without an await between check and use

    def datasets_for(self, caller: Caller) -> list[DatasetInfo]:
        """Return the descriptions of the datasets that a caller may use.

        Raises:
            AccessDenied: If the caller may not use any dataset.
        """
        scopes = caller.authorize(READ).scopes
        return [self._described(info) for info in self.datasets.values() if allows(scopes, READ, info.name)]

    def dataset(
        self, caller: Caller, name: str, version: str | None = None, fingerprint: str | None = None
    ) -> DatasetInfo:
        """Return the description of a hosted dataset: by default of its newest version.

        Args:
            caller: Caller of the request.
            name: Name of the dataset.
            version: Version of the dataset; None for any.
            fingerprint: Fingerprint of the version; None for any.

        Raises:
            AccessDenied: If the caller may not use a dataset with this name.
            UnknownDataset: If the dataset is not hosted, or the server does not have this version.
        """
        caller.authorize(READ, name)
        datasets = self.datasets
        if name not in datasets:
            hosted = ", ".join(repr(info.name) for info in self.datasets_for(caller)) or "no dataset for this token"
            raise UnknownDataset(f"unknown dataset {name[:200]!r}: this server hosts {hosted}")
        info = datasets[name]
        if self._host.configs:
            info = self.versions.find(name, version, fingerprint).info
        return self._described(info)

    def _described(self, info: DatasetInfo) -> DatasetInfo:
        """Return the description of a dataset with what all datasets of this server have in common."""
        available = [version.info.fingerprint for version in self.versions.available(info.name)]
        return replace(
            info,
            ports=self.ports,
            environment=environment(),
            available=available if len(available) > 1 else None,
        )

    def slow_samples(self, limit: int) -> SlowSampleList:
        """Return the slow samples of all datasets, slowest first, and at most `limit` of them."""
        found = [
            (seconds, index, content, table.fetches[index])
            for content, table in self._slow_tables.all()
            for index, seconds in table.seconds.items()
        ]
        found.sort(key=lambda each: each[0], reverse=True)
        return SlowSampleList(len(found), [self._slow_sample(*each) for each in found[:limit]])

    def _slow_sample(self, seconds: float, index: int, content: str, fetches: SlowFetches) -> SlowSample:
        batch_id = fetches.batch_id
        known = None if batch_id is None else self._loaders.get(batch_id.loader)
        task = None
        if known is not None and batch_id is not None:
            task = Task(known.loader.spec, known.loader.length, batch_id)
        return SlowSample(
            dataset=content if task is None else task.spec.dataset,
            index=index,
            seconds=seconds,
            typical=fetches.typical,
            times=fetches.times,
            epoch=None if batch_id is None else batch_id.epoch,
            batch=None if batch_id is None else batch_id.batch,
            batch_preview=None if task is None else batch_preview(task, None),
            sample_preview=None if task is None else sample_preview(task, index),
        )

    def _resolve(self, caller: Caller, key: str) -> _Known:
        known = self._loaders.get(key)
        principal = caller.authorize(READ) if known is None else _authorize(caller, known.loader.spec)
        if known is not None and known.loader.spec.session is not None and known.quota.name != principal.name:
            known = None  # requests of another principal would advance the session
        if known is not None and known.loader.spec.in_process:
            caller.authorize(ADMIN)
        if known is None:
            raise UnknownLoader(
                f"unknown loader {key[:64]!r}: the server may have restarted. Register the loader with POST /v1/loaders"
            )
        self._loaders.move_to_end(key)
        known.mark_used(time.monotonic())
        return known

    def loader(self, caller: Caller, key: str, epoch: int, *batches: int) -> Loader:
        """Return a registered loader, and check that the requested batch numbers are in the range of the epoch.

        Args:
            caller: Caller of the request.
            key: Key of the loader.
            epoch: The epoch.
            batches: Batch numbers to check.

        Raises:
            AccessDenied: If the caller may not use the loader's dataset.
            UnknownLoader: If no loader with this key is registered.
            BatchOutOfRange: If a batch number is out of range.
        """
        loader = self._resolve(caller, key).loader
        for k in batches:
            if k < loader.batches:
                continue
            if loader.batches == MAX_EPOCH:
                raise BatchOutOfRange(f"batch {k} is out of range: an epoch has at most 2**62 batches")
            self._plan(loader.spec, loader.length, epoch).check(k)
        return loader

    def index_rules(self, caller: Caller, key: str, epoch: int, *batches: int) -> Rules:
        """Return the index list rules of a loader; same arguments and errors as `loader`."""
        loader = self.loader(caller, key, epoch, *batches)
        return Rules(loader.indices, loader.spec.batch_size is None, self.client_limits.max_batches_per_request)

    def refuse_when_draining(self) -> None:
        """Raise an error if the server is shutting down.

        Raises:
            ServerUnavailable: If the server is shutting down.
        """
        if self.draining.is_set():
            raise ServerUnavailable("the server is stopping: use another server, or retry later")

    def batches(self, caller: Caller, request: RangeRequest) -> BatchStream:
        """Start a request, and return a stream of the requested batches, whose exit closes the request.

        Args:
            caller: Caller of the request.
            request: The request.

        Raises:
            AccessDenied: If the caller may not use the loader's dataset, or loses this permission before the last
                batch.
            UnknownLoader: If no loader with this key is registered.
            BatchOutOfRange: If a batch number is out of range.
            InvalidSpec: If the loader's order requires index lists and the request has none, or vice versa.
            ServerUnavailable: If the server is shutting down, or the principal has too many consumers with open
                requests.
        """
        self.refuse_when_draining()
        most = self.client_limits.max_batches_per_request
        if request.prefetch > most:
            raise InvalidSpec(f"ahead must be at most {most:,} (max_batches_per_request), got {request.prefetch:,}")
        first, last = request.batches.start, request.batches.stop - 1
        loader = self.loader(caller, request.key, request.epoch, first, last)
        lists = request.indices is not None
        if (loader.spec.order == "client") != lists:
            what = "use GET, because the server computes the indices" if lists else "use POST with the indices"
            raise InvalidSpec(f"loader {request.key[:64]!r} has order={loader.spec.order!r}: {what}")
        if lists and request.prefetch:
            request = replace(request, prefetch=0)
        spec, need = loader.spec, ADMIN if loader.spec.in_process else READ
        quota = self.quotas.of(_authorize(caller, spec, need))
        engine = self._loaders[loader.key].engine
        stream = engine.batches(loader, quota, request, lambda: _authorize(caller, spec, need))
        stream.on_close = self.grants.add(caller, need, spec.datasets, stream.end)
        return stream

    def progressed(self, caller: Caller, key: str, epoch: int, consumer: str, report: ConsumerReport | None) -> None:
        """Record the progress of a consumer that sends no requests; do nothing if the consumer is unknown.

        Args:
            caller: Caller of the request.
            key: Key of the loader.
            epoch: Epoch number.
            consumer: Name of the consumer.
            report: Report of the client; None if it is invalid.

        Raises:
            AccessDenied: If the caller may not use the loader's dataset.
            UnknownLoader: If no loader with this key is registered.
        """
        known = self._resolve(caller, key)
        principal = _authorize(caller, known.loader.spec)
        known.engine.tally.progressed(principal.name, consumer, (key, epoch), report)

    def timed(self, caller: Caller, key: str, times: ClientTimes | None) -> None:
        """Add a client's part to the timeline.

        Args:
            caller: Caller of the request.
            key: Key of the loader.
            times: The times; None if the client only measures the clock.

        Raises:
            AccessDenied: If the caller may not use the loader's dataset.
            UnknownLoader: If no loader with this key is registered.
        """
        known = self._resolve(caller, key)
        _authorize(caller, known.loader.spec)
        if times is not None:
            self.counters.timeline.add_client(times)

    @contextmanager
    def sending(self, nbytes: int, of: BatchStream) -> Iterator[None]:
        """Context manager for sending frames: checks authorization, then counts `nbytes` as unread until its exit.

        Unread bytes count toward the principal's limit on unread responses, not toward the memory budget.

        Raises:
            AccessDenied: If the caller is no longer authorized.
        """
        of.authorize()
        consumer, quota = of.consumer, of.consumer.principal_share.quota
        quota.sending += nbytes
        consumer.sending += nbytes
        loop = of.tally.loop
        began = time.monotonic()
        loop.sending.begin(began)
        try:
            with nullcontext() if of.trace is None else of.trace.sending(nbytes):
                yield
        finally:
            ended = time.monotonic()
            loop.sending.end(ended)
            self.counters.timeline.add_sent(
                consumer.epoch, of.sent_since_last(), (consumer.name, quota.name), began, ended, nbytes
            )
            was_too_much = quota.unread > 1
            quota.sending -= nbytes
            consumer.sending -= nbytes
            if was_too_much:
                for engine in self.engines.started():
                    engine.wake()

    async def _run_housekeeping(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(HOUSEKEEPING_INTERVAL)
            for engine in self.engines.started():
                engine.forget_idle()
                engine.preempt()
            self.quotas.forget_idle(time.monotonic())
            self._mark_used()
            await self.publisher.retire_idle(self.limits.retire_after)
            if time.monotonic() - began > 2 * HOUSEKEEPING_INTERVAL:
                continue  # the server itself was suspended (Ctrl-Z): wait one more round for heartbeats
            for key, engine in self.engines.started_sessions().items():
                if engine.idle > SESSION_IDLE:
                    await self.end_session(key)


def _replayed(engine: Engine) -> list[int] | None:
    """Return the progress of the worker that has the most batches to iterate again; None if there is none."""
    found = [state.replayed for state in engine.pool.workers() if state.replayed is not None]
    longest = max(found, key=lambda each: each.total - each.batches, default=None)
    return None if longest is None else [longest.batches, longest.total]


def _authorize(caller: Caller, spec: LoaderSpec, need: str = READ) -> Principal:
    """Check that a caller may use all datasets of a loader; return its principal.

    Raises:
        AccessDenied: If the caller may not use one of them.
    """
    first, *others = spec.datasets
    principal = caller.authorize(need, first)
    for name in others:
        caller.authorize(need, name)
    return principal


def _described_as_one(spec: LoaderSpec, infos: list[DatasetInfo]) -> DatasetInfo:
    """Return the description of a loader's dataset; of a mixture, that of all sources together.

    Raises:
        InvalidSpec: If the datasets cannot be mixed, or have other lengths than the sources in the spec.
        DatasetChanged: If the samples have other lengths than in the spec.
    """
    if spec.mixture is None:
        required, lengths = spec.required_lengths, infos[0].lengths
        if required is not None and lengths is not None and lengths != required:
            raise DatasetChanged(other_lengths(spec.dataset, lengths, required))
        return infos[0]
    if spec.dataset != infos[0].name:
        raise InvalidSpec(f"dataset must be the first source of the mixture, {infos[0].name!r}: got {spec.dataset!r}")
    info = describe(infos)
    for (name, length), hosted in zip(spec.mixture.sources, infos, strict=True):
        if spec.fingerprint in (None, info.fingerprint) and hosted.length != length:
            raise InvalidSpec(f"source {name!r} of the mixture must have length {hosted.length}, got {length}")
    return info


def _check_kind(spec: LoaderSpec, info: DatasetInfo) -> None:
    """Check that a spec is valid for the kind of its dataset (map-style or iterable-style).

    Raises:
        InvalidSpec: If the spec is invalid for this kind of dataset.
    """
    if (spec.required_lengths is not None or spec.batch_of == "lengths") and info.lengths is None:
        field = "batch_of=lengths" if spec.required_lengths is None else "packing" if spec.packing else "balance"
        raise InvalidSpec(
            f"{field} requires the lengths of the samples, and dataset {info.name!r} has none: define sample_lengths "
            "on the server, a 1-D integer array or the path of a .npy file"
        )
    if spec.balance is not None:
        check_limit(spec.balance, info.length or 0, info.longest or 0, info.longest_sample or 0)
    if spec.packing is not None:
        check_windows(spec.packing.window, info.length or 0)
    if info.kind == "map":
        for field in ("shard_states", "delivered"):
            if getattr(spec, field) is not None:
                raise InvalidSpec(f"{field} must be null for map-style dataset {info.name!r}, which has no shards")
        if spec.shuffle_buffer_size is not None:
            raise InvalidSpec(
                f"shuffle_buffer_size must be null for map-style dataset {info.name!r}: use shuffle=true, which "
                "shuffles the whole dataset"
            )
        return
    if spec.session is None:
        raise InvalidSpec(f"iterable-style dataset {info.name!r} requires a session, got session=null")
    if spec.order == "client" or spec.shuffle:
        raise InvalidSpec(f"iterable-style dataset {info.name!r} determines the order: use order=plan, shuffle=false")
