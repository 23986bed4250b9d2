"""The loader service: which datasets, loaders and engines there are, and what clients may ask of them."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from contextvars import Context
from dataclasses import replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

from teleloader_server.access import Principal
from teleloader_server.accounts import Account, Accounts, Memory, too_many
from teleloader_server.config import DEFAULT_LIMITS, ClientLimits, ConfigError, Limits
from teleloader_server.engine import NOTHING_SAID, BatchStream, Engine, Loader, Said
from teleloader_server.hosts import Host
from teleloader_server.metrics import DatasetTally
from teleloader_server.observing import Observer, Place, Whole
from teleloader_shared.errors import (
    BatchOutOfRange,
    DatasetChanged,
    InvalidSpec,
    ServerUnavailable,
    TeleloaderError,
    UnknownDataset,
    UnknownLoader,
)
from teleloader_shared.messages import DatasetInfo, Registration
from teleloader_shared.plan import Plan
from teleloader_shared.spec import MAX_EPOCH, LoaderSpec
from teleloader_shared.stats import Stats
from teleloader_shared.units import counted

SESSION_IDLE: Final = 60.0
"""Seconds without a word after which the client of a session has probably gone. One that comes back goes on."""
HOUSEKEEPING_INTERVAL: Final = 5.0
DEFAULT_CONSUMERS: Final = 100
"""How many consumers ``/stats`` lists if it is not told."""


class _Known(NamedTuple):
    """A loader that is known."""

    loader: Loader
    length: int | None
    """What its dataset says of its length."""
    account: Account
    """Of who registered it."""


class _Session(NamedTuple):
    """An engine of one loader's own."""

    starting: asyncio.Task[Engine]
    """It is started, or about to be."""
    account: Account
    num_workers: int


class LoaderService:
    """Everything that the endpoints offer, without HTTP. Lives in one event loop.

    Args:
        host: Where datasets and workers come from.
        limits: What workers may take.
        client_limits: What clients may take.
    """

    def __init__(self, host: Host, limits: Limits, client_limits: ClientLimits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        self.client_limits = client_limits
        self.accounts = Accounts(client_limits, limits.memory_budget)
        """What each principal has taken."""
        self._memory = Memory(limits.memory_budget)
        self._draining = asyncio.Event()
        self._host = host
        self._observer = Observer(limits, self._places)
        self.connections: Callable[[], int] = lambda: 0
        """Says how many are open, where somebody counts them."""
        self._infos: dict[str, DatasetInfo] = {}
        """The datasets as the shared engine has them, once it is started."""
        self._shared: asyncio.Task[Engine] | None = None
        self._loaders: OrderedDict[str, _Known] = OrderedDict()
        self._sessions: dict[str, _Session] = {}
        """By loader."""
        self._ending: set[asyncio.Task[None]] = set()
        self._sending = 0
        self._plan = lru_cache(maxsize=256)(Plan)

    # -- life

    async def start(self) -> None:
        """Make the datasets available.

        Raises:
            ConfigError: When a dataset cannot be built.
        """
        if self._host.infos() is None:
            await self._shared_engine()
        self._always = [asyncio.create_task(self._keep_house()), asyncio.create_task(self._observer.run())]

    def give_up(self, error: TeleloaderError) -> None:
        """Tell those who wait for a batch that it will not come."""
        for engine in self._engines():
            engine.give_up(error)

    async def close(self) -> None:
        """End the workers."""
        for task in self._always:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        ending = [self.end_session(key) for key in list(self._sessions)]
        if self._shared is not None:
            ending.append(_close(self._shared))
        await asyncio.gather(*ending, *self._ending)

    def drain(self) -> None:
        """Take nothing new from now on."""
        self._draining.set()

    @property
    def draining(self) -> bool:
        """Whether the server is stopping."""
        return self._draining.is_set()

    async def drained(self) -> None:
        """Wait until the server is told to stop."""
        await self._draining.wait()

    @property
    def ready(self) -> bool:
        """Whether batches can be had now."""
        if self.draining:
            return False
        # objects of this process are always there: workers are forked when somebody comes
        return self._shared is None or any(state.ready for engine in self._engines() for state, _ in engine.workers())

    @property
    def datasets(self) -> dict[str, DatasetInfo]:
        """What is hosted now, by name."""
        infos = self._host.infos()
        return self._infos if infos is None else {info.name: info for info in infos}

    # -- what clients ask

    async def register(self, spec: LoaderSpec, principal: Principal) -> Registration:
        """Make a loader known, however often; a session's workers are started with its first registration.

        Args:
            spec: The loader.
            principal: Who asks for it.

        Raises:
            UnknownDataset: When the spec names none that is hosted.
            DatasetChanged: When it insists on another fingerprint than that of the hosted one.
            InvalidSpec: When no such loader of the dataset can be.
            ServerUnavailable: When there are too many sessions, or the server is stopping.
        """
        self.refuse_when_draining()
        if spec.session is None:
            await self._shared_engine()
        info = self._infos[self.dataset(spec.dataset).name] if spec.session is None else self.dataset(spec.dataset)
        if spec.fingerprint is not None and spec.fingerprint != info.fingerprint:
            raise DatasetChanged(
                f"dataset {info.name!r} has fingerprint {info.fingerprint} (length {info.length}, version "
                f"{info.version!r}), and the loader was made for {spec.fingerprint}: the data, their version or how "
                "they are collated changed. Start a new run, or host what the loader was made for"
            )
        spec = replace(spec, fingerprint=info.fingerprint)
        key = spec.key
        if key not in self._loaders:
            await self._add_loader(key, spec, info, self.accounts.of(principal))
        return self.registration(key, principal)

    def registration(self, key: str, principal: Principal) -> Registration:
        """What the registration of a loader was answered with; it keeps a session from counting as idle.

        Args:
            key: The loader's.
            principal: Who asks.

        Raises:
            UnknownLoader: When no loader of that key is known.
        """
        loader, length, _ = self._known(key, principal)
        loader.engine.touch()
        return Registration(
            key=key,
            batches=None if loader.batches == MAX_EPOCH else loader.batches,
            length=length,
            fingerprint=loader.spec.fingerprint or "",
            num_workers=loader.engine.num_workers,
            max_batch_bytes=self.limits.max_batch_bytes,
        )

    async def _add_loader(self, key: str, spec: LoaderSpec, info: DatasetInfo, account: Account) -> None:
        if info.kind == "iterable" and spec.session is None:
            raise InvalidSpec(f"dataset {info.name!r} is iterable-style: its loaders need a session, which was null")
        if info.kind == "iterable" and (spec.order == "client" or spec.shuffle):
            raise InvalidSpec(f"dataset {info.name!r} is iterable-style: it gives its samples in an order of its own")
        batches = MAX_EPOCH
        if info.kind == "map" and spec.order == "plan":
            if info.length is None:
                raise InvalidSpec(f"dataset {info.name!r} has no length: only a client's own order can index it")
            batches = len(self._plan(spec, info.length, 0))
        engine = await self._engine_of(key, spec, info, account)
        if key in self._loaders:
            return  # somebody asked for the same meanwhile
        length = 0 if info.kind == "iterable" else info.length or 0
        self._loaders[key] = _Known(Loader(key, spec, length, batches, engine), info.length, account)
        account.counts["loaders"] += 1
        if account.counts["loaders"] > self.client_limits.max_loaders:
            self._forget_some_loaders(account)

    async def _engine_of(self, key: str, spec: LoaderSpec, info: DatasetInfo, account: Account) -> Engine:
        own = self._host.own_pool(spec, info)
        if own is None:
            return await self._shared_engine()
        if key not in self._sessions:
            self._refuse_too_many(account, own.num_workers)
            # a client that asks for workers has them used as torch uses them; user code may count on it
            in_turn = spec.shards if info.kind == "iterable" else spec.num_workers
            if own.num_workers == 0:
                in_turn = 0
            engine = Engine(own, self._memory, self._observer.metrics, in_turn)
            self._sessions[key] = _Session(_apart(_started(engine)), account, own.num_workers)
            account.counts["sessions"] += 1
            account.counts["session workers"] += own.num_workers
        session = self._sessions[key]
        try:
            engine = await asyncio.shield(session.starting)
        except (ConfigError, OSError) as error:
            if self._sessions.get(key) is session:
                self._drop_session(key)
            raise ServerUnavailable(f"the session's workers cannot be started: {error}") from None
        if self._sessions.get(key) is not session:
            raise ServerUnavailable("the session was ended while its workers were started: register it again")
        return engine

    def _refuse_too_many(self, account: Account, num_workers: int) -> None:
        limits, counts = self.client_limits, account.counts
        if not account.is_alone:
            if counts["sessions"] >= (most := limits.max_sessions_per_principal):
                raise too_many(account, most, "sessions", "max_sessions_per_principal")
            if counts["session workers"] + num_workers > (most := limits.max_session_workers_per_principal):
                what = f"workers of sessions ({counts['session workers']:,} now, {num_workers:,} more asked for)"
                raise too_many(account, most, what, "max_session_workers_per_principal")
        if len(self._sessions) >= limits.max_sessions:
            raise ServerUnavailable(
                f"the server has {counted(limits.max_sessions, 'session')}, its limit (max_sessions): ask later, or "
                "another one"
            )
        running = sum(session.num_workers for session in self._sessions.values())
        if running + num_workers > limits.max_session_workers:
            raise ServerUnavailable(
                f"the server's sessions have {counted(running, 'worker')}, and with {num_workers:,} more they would "
                f"have more than {limits.max_session_workers:,}, its limit (max_session_workers): ask for fewer, or "
                "later"
            )

    def _drop_session(self, key: str) -> _Session | None:
        """Count it no more."""
        session = self._sessions.pop(key, None)
        if session is not None:
            session.account.counts["sessions"] -= 1
            session.account.counts["session workers"] -= session.num_workers
        return session

    def _drop_loader(self, key: str) -> None:
        known = self._loaders.pop(key)
        known.account.counts["loaders"] -= 1
        known.loader.engine.forget_loader(key)

    async def _shared_engine(self) -> Engine:
        if self._shared is None or (self._shared.done() and not _has_started(self._shared)):
            self._shared = _apart(self._start_shared())
        return await asyncio.shield(self._shared)

    async def _start_shared(self) -> Engine:
        engine = Engine(self._host.shared_pool(), self._memory, self._observer.metrics)
        self._infos = {info.name: info for info in await engine.start()}
        return engine

    async def end_session_of(self, key: str, principal: Principal) -> None:
        """End a session's workers, which its client needs no more. One that is not known has ended already."""
        if key in self._loaders:
            self._known(key, principal)
            await self.end_session(key)

    async def end_session(self, key: str) -> None:
        """End a session's workers, whoever's it is."""
        known = self._loaders.get(key)
        if known is not None and known.loader.spec.session is not None:
            self._drop_loader(key)
        session = self._drop_session(key)
        if session is not None:
            # a client that does not wait for the answer must not stop it half-way
            ending = asyncio.create_task(_close(session.starting))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.shield(ending)

    def _forget_some_loaders(self, account: Account) -> None:
        """Of a principal that has too many, those that were asked longest ago and are not in use; some at once."""
        in_use = {consumer.run[0] for engine in self._engines() for consumer, _ in engine.consumers()}
        idle = [
            key
            for key, known in list(self._loaders.items())[:-1]
            if known.account is account and key not in in_use and key not in self._sessions
        ]
        for key in idle[: max(1, self.client_limits.max_loaders // 16)]:
            self._drop_loader(key)

    def dataset(self, name: str) -> DatasetInfo:
        """What is known of a dataset.

        Raises:
            UnknownDataset: When it is not hosted.
        """
        datasets = self.datasets
        if name not in datasets:
            hosted = ", ".join(repr(known) for known in datasets)
            raise UnknownDataset(f"no dataset {name[:200]!r} is hosted here; there is {hosted}")
        return datasets[name]

    def loader(self, principal: Principal, key: str, epoch: int, *batches: int) -> Loader:
        """A loader that is known, of whose epoch these are batches.

        Args:
            principal: Who asks.
            key: The loader's.
            epoch: Which epoch.
            batches: Numbers of its batches.

        Raises:
            UnknownLoader: When no loader of that key is known.
            BatchOutOfRange: When the epoch has no such batches.
        """
        loader = self._known(key, principal).loader
        for k in batches:
            if k < loader.batches:
                continue
            if loader.batches == MAX_EPOCH:
                raise BatchOutOfRange(f"batch {k} is out of range: no epoch has more than 2**62")
            self._plan(loader.spec, loader.length, epoch).check(k)
        return loader

    def dataset_of(self, key: str) -> str | None:
        """The dataset of a loader, None when no loader of that key is known."""
        known = self._loaders.get(key)
        return None if known is None else known.loader.spec.dataset

    def _known(self, key: str, principal: Principal) -> _Known:
        known = self._loaders.get(key)
        if known is not None and known.loader.spec.session is not None and known.account.name != principal.name:
            known = None  # a session is of whoever began it: another one that asks for batches would move it on
        if known is None:
            raise UnknownLoader(
                f"no loader {key[:64]!r} is known here (the server may have restarted): POST its spec to /v1/loaders "
                "and go on"
            )
        self._loaders.move_to_end(key)
        return known

    def refuse_when_draining(self) -> None:
        """Take nothing new while the server is stopping.

        Raises:
            ServerUnavailable: When it is.
        """
        if self.draining:
            raise ServerUnavailable("the server is stopping: ask another one, or wait until it is back")

    @asynccontextmanager
    async def batches(
        self, principal: Principal, consumer: str, key: str, epoch: int, start: int, stop: int, ahead: int,
        indices: Mapping[int, bytes] | None = None, said: Said = NOTHING_SAID,
    ) -> AsyncIterator[BatchStream]:  # fmt: skip
        """The batches [start, stop) of an epoch; work on them, and `ahead` more, begins now.

        Args:
            principal: Who asks.
            consumer: What that one calls itself.
            key: The loader's.
            epoch: Which epoch.
            start: The first batch.
            stop: The batch after the last.
            ahead: How many more will be wanted.
            indices: For an order of the client's own, the frames that list what each batch holds.
            said: What the client says besides.

        Raises:
            UnknownLoader: When no loader of that key is known.
            BatchOutOfRange: When the epoch has no such batches.
            InvalidSpec: When what the batches hold is said and not needed, or needed and not said.
            ServerUnavailable: When the server is stopping, or the principal has too many consumers.
        """
        self.refuse_when_draining()
        most = self.client_limits.max_window
        if ahead > most:
            raise InvalidSpec(f"ahead must be at most {most:,} on this server (max_window), was {ahead:,}")
        loader = self.loader(principal, key, epoch, start, stop - 1)
        if (loader.spec.order == "client") != (indices is not None):
            what = "POST the indices of each batch" if indices is None else "its batches hold what the plan says: GET"
            raise InvalidSpec(f"loader {key[:64]!r} has the order {loader.spec.order!r}: {what}")
        if loader.spec.order == "client":
            ahead = 0
        account = self.accounts.of(principal)
        asked = loader.engine.batches(loader, account, consumer, epoch, start, stop, ahead, indices or {}, said)
        async with asked as stream:
            yield stream

    @contextmanager
    def sending(self, nbytes: int, of: BatchStream) -> Iterator[None]:
        """Count the frames of an answer while they are sent: the memory budget is for those that are not."""
        consumer, account = of.consumer, of.consumer.holder.account
        self._sending += nbytes
        account.sending += nbytes
        consumer.sending += nbytes
        loop = of.tally.loop
        loop.sending.begin(time.monotonic())
        try:
            with nullcontext() if of.trace is None else of.trace.sending(nbytes):
                yield
        finally:
            loop.sending.end(time.monotonic())
            self._sending -= nbytes
            was_too_much = account.unread > 1
            account.sending -= nbytes
            consumer.sending -= nbytes
            if was_too_much:
                for engine in self._engines():
                    engine.wake()

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_INTERVAL)
            for engine in self._engines():
                engine.forget_idle()
                engine.relieve()
            self.accounts.forget_idle(time.monotonic())
            for key, engine in self._session_engines().items():
                if engine.idle > SESSION_IDLE:
                    await self.end_session(key)

    # -- what can be seen

    def _engines(self) -> list[Engine]:
        shared = [self._shared.result()] if self._shared is not None and _has_started(self._shared) else []
        return [*shared, *self._session_engines().values()]

    def _session_engines(self) -> dict[str, Engine]:
        return {
            key: session.starting.result() for key, session in self._sessions.items() if _has_started(session.starting)
        }

    def _places(self) -> dict[Engine, Place]:
        """The engines, and where their workers come from."""
        shared = Place(None, self._host.setting)
        of_session = {engine: key for key, engine in self._session_engines().items()}
        return {
            engine: Place(of_session[engine], "num_workers={} of the DataLoader") if engine in of_session else shared
            for engine in self._engines()
        }

    async def stats(self, limit: int = DEFAULT_CONSUMERS, offset: int = 0) -> Stats:
        """The records of ``/stats``, with `limit` of the consumers after the first `offset`."""
        whole = Whole(self.datasets, self._sending, self.connections(), self.draining)
        return await self._observer.stats(whole, limit, offset)

    @property
    def counts(self) -> Mapping[str, DatasetTally]:
        """What was counted of each dataset of which there is something."""
        return self._observer.metrics.datasets


def _apart(starting: Coroutine[Any, Any, Engine]) -> asyncio.Task[Engine]:
    """Start an engine, whose workers will do and log things long after the request that they are started for."""
    return asyncio.create_task(starting, context=Context())


async def _started(engine: Engine) -> Engine:
    await engine.start()
    return engine


async def _close(starting: asyncio.Task[Engine]) -> None:
    """Close an engine, waiting until it has started."""
    try:
        engine = await starting
    except (ConfigError, OSError):
        return  # whoever asked for it was told
    await engine.close()


def _has_started(starting: asyncio.Task[Engine]) -> bool:
    return starting.done() and not starting.cancelled() and starting.exception() is None
