"""Engines of a server: a shared engine, and one engine per session (a loader with private workers)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
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


class Engines:
    """Manager of all engines of a server; enforces the session limits. Not thread-safe: use from one event loop.

    Args:
        host: Factory of worker pools; its pools describe the datasets.
        memory: Memory budget that all engines share.
        counters: Counters that all engines add to.
        limits: Limits of clients.
    """

    def __init__(self, host: PoolFactory, memory: Memory, counters: Counters, limits: ClientLimits) -> None:
        self._host = host
        self._memory = memory
        self._counters = counters
        self._limits = limits
        self.infos: dict[str, DatasetInfo] = {}
        """Descriptions of the datasets by name, from the shared engine; empty until the engine has started."""
        self._shared: asyncio.Task[Engine] | None = None
        self.sessions: Final[dict[str, _Session]] = {}
        """Sessions by loader key."""
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def ready(self) -> bool:
        """True if at least one worker is ready, or if workers start only when the first loader is registered."""
        return self._shared is None or any(state.ready for engine in self.started() for state, _ in engine.workers())

    async def shared(self) -> Engine:
        """Return the shared engine, starting it on the first call.

        Raises:
            ConfigError: If a dataset cannot be constructed.
        """
        if self._shared is None or (self._shared.done() and not _has_started(self._shared)):
            self._shared = _detached(self._start_shared())
        return await asyncio.shield(self._shared)

    @property
    def num_workers(self) -> int | None:
        """Number of shared workers; None before they start."""
        engine = self._started_shared()
        return None if engine is None else engine.pool.num_workers

    def resize(self, num_workers: int) -> None:
        """Change the number of shared workers; errors as of `Pool.resize`."""
        engine = self._started_shared()
        if engine is None:
            raise ValueError("the server has no shared workers yet: they start with the first loader that uses them")
        engine.pool.resize(num_workers)

    def _started_shared(self) -> Engine | None:
        return self._shared.result() if self._shared is not None and _has_started(self._shared) else None

    async def _start_shared(self) -> Engine:
        source = EngineSource(None, self._host.setting)
        engine = Engine(self._host.shared_pool(), self._memory, self._counters, source)
        self.infos = {info.name: info for info in await engine.start()}
        return engine

    async def of(self, key: str, spec: LoaderSpec, info: DatasetInfo, quota: Quota) -> Engine:
        """Return the engine of a loader: the shared engine, or the engine of its session, started on the first call.

        Args:
            key: Key of the loader.
            spec: Specification of the loader.
            info: Description of the loader's dataset.
            quota: Quota of the client's principal.

        Raises:
            ServerUnavailable: If there are too many sessions, or the workers cannot be started.
        """
        own = self._host.own_pool(spec, info)
        if own is None:
            return await self.shared()
        if key not in self.sessions:
            self._refuse_too_many(quota, own.num_workers)
            # the batches of a loader with private workers are computed in turn, as in torch: user code may depend on it
            in_turn = spec.shards if info.kind == "iterable" else spec.num_workers
            source = EngineSource(key, "num_workers={} of the DataLoader")
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
            # a task, because a client that does not wait for the response must not interrupt it
            ending = asyncio.create_task(_close(session.starting))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.shield(ending)

    async def close(self) -> None:
        """Stop all engines and their workers."""
        ending = [self.end_session(key) for key in list(self.sessions)]
        if self._shared is not None:
            ending.append(_close(self._shared))
        await asyncio.gather(*ending, *self._ending)

    def started(self) -> list[Engine]:
        """Return the engines that are running."""
        shared = self._started_shared()
        return [*([] if shared is None else [shared]), *self.started_sessions().values()]

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
    except Exception:  # noqa: BLE001
        return  # reported to the client that requested it
    await engine.close()


def _has_started(starting: asyncio.Task[Engine]) -> bool:
    return starting.done() and not starting.cancelled() and starting.exception() is None
