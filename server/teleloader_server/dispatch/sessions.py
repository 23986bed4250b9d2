"""Engines of a server: a shared engine per revision, and one engine per session (a loader with private workers)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from teleloader_server.config import ConfigError
from teleloader_server.dispatch.counters import Counters, EngineSource
from teleloader_server.dispatch.engine import Engine
from teleloader_server.dispatch.quotas import Memory, Quota, too_many
from teleloader_server.limits import ClientLimits
from teleloader_server.workers.factory import PoolFactory
from teleloader_shared.errors import ServerUnavailable
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.spec import LoaderSpec


class _Session(NamedTuple):
    """Session: the engine of a loader with private workers."""

    starting: asyncio.Task[Engine]
    """Task that starts the engine and returns it."""
    quota: Quota
    num_workers: int


@dataclass(eq=False)
class Revision:
    """Datasets that were published together, and the shared engine of their loaders (`versions`)."""

    number: int
    """Number of the revision, from 1."""
    host: PoolFactory
    """Factory of worker pools; its pools describe the datasets."""
    infos: dict[str, DatasetInfo] = field(default_factory=dict)
    """Descriptions of the datasets by name, from the shared engine; empty until the engine has started."""
    starting: asyncio.Task[Engine] | None = None
    """Task that starts the shared engine and returns it; None before the first use."""

    @property
    def started(self) -> Engine | None:
        """The shared engine, if it runs."""
        return self.starting.result() if self.starting is not None and _has_started(self.starting) else None


class Engines:
    """Manager of all engines of a server; enforces the session limits. Not thread-safe: use from one event loop.

    Args:
        host: Factory of worker pools; its pools describe the datasets.
        memory: Memory budget that all engines share.
        counters: Counters that all engines add to.
        limits: Limits of clients.
    """

    def __init__(self, host: PoolFactory, memory: Memory, counters: Counters, limits: ClientLimits) -> None:
        self._memory = memory
        self._counters = counters
        self._limits = limits
        self._count = itertools.count(2)
        self.revisions: Final[dict[int, Revision]] = {1: Revision(1, host)}
        """Revisions whose processes run, by number; the first one has the datasets of the start."""
        self.sessions: Final[dict[str, _Session]] = {}
        """Sessions by loader key."""
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        """True if at least one worker is ready, or if workers start only when the first loader is registered."""
        starts_later = all(revision.starting is None for revision in self.revisions.values())
        return starts_later or any(state.ready for engine in self.started() for state, _ in engine.workers())

    async def shared(self, number: int = 1) -> Engine:
        """Return the shared engine of a revision, starting it on the first call.

        Raises:
            ConfigError: If a dataset cannot be constructed.
        """
        revision = self.revisions[number]
        if revision.starting is None or (revision.starting.done() and not _has_started(revision.starting)):
            revision.starting = _detached(self._start_shared(revision))
        return await asyncio.shield(revision.starting)

    @property
    def num_workers(self) -> int | None:
        """Number of shared workers of the latest revision; None before they start."""
        engines = self._started_shared()
        return engines[-1].pool.num_workers if engines else None

    def resize(self, num_workers: int) -> None:
        """Change the number of shared workers of each revision; errors as of `Pool.resize`."""
        engines = self._started_shared()
        if not engines:
            raise ValueError("the server has no shared workers yet: they start with the first loader that uses them")
        for engine in engines:
            engine.pool.resize(num_workers)

    def _started_shared(self) -> list[Engine]:
        return [engine for revision in self.revisions.values() if (engine := revision.started) is not None]

    async def _start_shared(self, revision: Revision) -> Engine:
        source = EngineSource(None, revision.host.setting, revision.number)
        engine = Engine(revision.host.shared_pool(), self._memory, self._counters, source)
        revision.infos = {info.name: info for info in await engine.start()}
        return engine

    def add(self, host: PoolFactory) -> int:
        """Add a revision, whose shared engine `shared` starts, and return its number."""
        number = next(self._count)
        self.revisions[number] = Revision(number, host)
        return number

    def remove(self, number: int) -> asyncio.Task[None] | None:
        """Stop the shared engine of a revision, whose sessions have ended; return the task that stops it, if any."""
        starting = self.revisions.pop(number).starting
        if starting is None:
            return None
        starting.cancel()  # if it has not ended: the construction of a dataset may take long
        return self._end(starting)

    async def of(self, key: str, spec: LoaderSpec, info: DatasetInfo, quota: Quota, number: int = 1) -> Engine:
        """Return the engine of a loader: a shared engine, or the engine of its session, started on the first call.

        Args:
            key: Key of the loader.
            spec: Specification of the loader.
            info: Description of the loader's dataset.
            quota: Quota of the client's principal.
            number: Number of the revision that has the loader's dataset.

        Raises:
            ServerUnavailable: If there are too many sessions, or the workers cannot be started.
        """
        own = self.revisions[number].host.own_pool(spec, info)
        if own is None:
            return await self.shared(number)
        if key not in self.sessions:
            self._refuse_too_many(quota, own.num_workers)
            # the batches of a loader with private workers are computed in turn, as in torch: user code may depend on it
            in_turn = spec.shards if info.kind == "iterable" else spec.num_workers
            source = EngineSource(key, "num_workers={} of the DataLoader", number)
            engine = Engine(own, self._memory, self._counters, source, in_turn if own.num_workers else 0)
            self.sessions[key] = _Session(_detached(_started(engine)), quota, own.num_workers)
            quota.sessions[key] = own.num_workers
        session = self.sessions[key]
        try:
            engine = await asyncio.shield(session.starting)
        except Exception as error:
            if self.sessions.get(key) is session:
                self._drop(key)
            if not isinstance(error, (ConfigError, OSError)):
                raise
            raise ServerUnavailable(f"cannot start the workers of the session: {error}") from None
        if self.sessions.get(key) is not session:
            raise ServerUnavailable("the session ended while the workers started: register the loader again")
        return engine

    def _refuse_too_many(self, quota: Quota, num_workers: int) -> None:
        """Raise `ServerUnavailable` if a further session with `num_workers` workers exceeds a limit."""
        limits, workers = self._limits, sum(quota.sessions.values())
        if not quota.is_alone:
            if len(quota.sessions) >= (most := limits.max_sessions_per_principal):
                raise too_many(quota, most, "sessions", "max_sessions_per_principal")
            if workers + num_workers > (most := limits.max_session_workers_per_principal):
                raise ServerUnavailable(
                    f"too many session workers of {quota.name!r}: {workers:,} running, {num_workers:,} requested, and "
                    f"the limit is {most:,} (max_session_workers_per_principal). Request fewer workers, or retry later"
                )
        if len(self.sessions) >= limits.max_sessions:
            raise ServerUnavailable(
                f"too many sessions: {len(self.sessions):,} running, and the limit is {limits.max_sessions:,}. Retry "
                "later, or increase max_sessions in [limits]"
            )
        running = sum(session.num_workers for session in self.sessions.values())
        if running + num_workers > limits.max_session_workers:
            raise ServerUnavailable(
                f"too many session workers: {running:,} running, {num_workers:,} requested, and the limit is "
                f"{limits.max_session_workers:,} (max_session_workers). Request fewer workers, or retry later"
            )

    def _drop(self, key: str) -> _Session | None:
        session = self.sessions.pop(key, None)
        if session is not None:
            del session.quota.sessions[key]
        return session

    async def end_session(self, key: str) -> None:
        """End a session and stop its workers; do nothing if no session has this key."""
        session = self._drop(key)
        if session is not None:
            await asyncio.shield(self._end(session.starting))

    def _end(self, starting: asyncio.Task[Engine]) -> asyncio.Task[None]:
        # a task, because a client that does not wait for the response must not interrupt it
        ending = asyncio.create_task(_close(starting))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def close(self) -> None:
        """Stop all engines and their workers."""
        ending = [self.end_session(key) for key in list(self.sessions)]
        for number in list(self.revisions):
            self.remove(number)
        await asyncio.gather(*ending, *self._ending)

    def started(self) -> list[Engine]:
        """Return the engines that are running."""
        return [*self._started_shared(), *self.started_sessions().values()]

    def started_sessions(self) -> dict[str, Engine]:
        """Return the running engines of sessions, by loader key."""
        return {
            key: session.starting.result() for key, session in self.sessions.items() if _has_started(session.starting)
        }


def _detached(starting: Coroutine[Any, Any, Engine]) -> asyncio.Task[Engine]:
    """Start an engine outside of the request's context, because its workers log long after the request."""
    return asyncio.create_task(starting, context=Context())


async def _started(engine: Engine) -> Engine:
    await engine.start()
    return engine


async def _close(starting: asyncio.Task[Engine]) -> None:
    """Close an engine once it has started."""
    try:
        engine = await starting
    except (Exception, asyncio.CancelledError):  # noqa: BLE001
        return  # reported to the client that requested it, or cancelled by `Engines.remove`
    await engine.close()


def _has_started(starting: asyncio.Task[Engine]) -> bool:
    return starting.done() and not starting.cancelled() and starting.exception() is None
