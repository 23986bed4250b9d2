"""Publication of dataset versions while the server runs, and the end of versions that are not used."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from teleloader_server import audit
from teleloader_server.config import ConfigError, DatasetConfig
from teleloader_server.dispatch.engine import Engine
from teleloader_server.dispatch.sessions import Engines
from teleloader_server.dispatch.versions import Plan, Version, VersionTable
from teleloader_server.workers.factory import PoolFactory
from teleloader_server.workers.health import MAX_FAILED_STARTS
from teleloader_shared.errors import DatasetChanged, ServerUnavailable
from teleloader_shared.messages import Change, PublishedVersion

POLL_S: Final = 0.05
"""Interval in seconds at which the start of the first worker is polled."""
_AUDITED: Final[dict[Change, str]] = {"added": "published", "restored": "rolled_back"}

logger = logging.getLogger(__name__)


class ConfigSource(NamedTuple):
    """Source of the configurations that are published."""

    read: Callable[[], Sequence[DatasetConfig]]
    """Function that reads the configuration file again; raises `ConfigError` if it is invalid."""
    pools: Callable[[Sequence[DatasetConfig], int], PoolFactory]
    """Function that returns the pools of datasets, given the number of shared workers."""


@dataclass(eq=False)
class Publisher:
    """Publisher of dataset versions; used in one event loop."""

    engines: Engines
    versions: VersionTable
    end_loaders: Callable[[Version, DatasetChanged], Awaitable[int]]
    """Function that ends the requests and sessions of a version's loaders, and returns the number of loaders."""
    source: ConfigSource | None = None
    """Source of the configurations; None if the server cannot publish."""
    reserve: Callable[[int], object] = lambda num_workers: None
    """Function that reserves file descriptors for all shared workers, given their number; set by the web server. It
    raises `ConfigError` if there are too few."""
    last_error: str | None = None
    """Error of the last publication; None if it succeeded."""
    _running: asyncio.Task[list[PublishedVersion]] | None = field(default=None, init=False)

    async def publish(self) -> list[PublishedVersion]:
        """Read the configuration again, and publish the versions that changed; return all versions in it.

        A client that disconnects does not interrupt the publication.

        Raises:
            ConfigError: If the server has no configuration file, the configuration is invalid, a dataset cannot be
                constructed, or no worker starts. The versions that were available before stay as they are.
        """
        if self.source is None:
            raise ConfigError(
                "cannot publish: the server has no configuration file to read again. Start it with --config, and at "
                "least one worker"
            )
        if self._is_publishing:
            raise ConfigError("cannot publish: another publication is in progress. Retry when it has ended")
        self._running = asyncio.create_task(self._publish(self.source))
        return await asyncio.shield(self._running)

    @property
    def _is_publishing(self) -> bool:
        """True while a publication is in progress, during which no version retires: its plan refers to them."""
        return self._running is not None and not self._running.done()

    async def _publish(self, source: ConfigSource) -> list[PublishedVersion]:
        try:
            plan = self.versions.plan(source.read())
            added = await self._add(source, plan.added) if plan.added else []
        except (ConfigError, OSError) as error:
            self.last_error = str(error)
            logger.error("publication failed, keeping the previous versions: %s", error)
            audit.record("publication_failed", reason=str(error).strip().rpartition("\n")[2])
            raise ConfigError(str(error)) from None
        self.last_error = None
        for version in plan.restored:
            self.versions.restore(version, time.monotonic())
        return self._report(plan, added)

    async def _add(self, source: ConfigSource, configs: Sequence[DatasetConfig]) -> list[Version]:
        """Start the workers of new versions, and add the versions once a worker is ready."""
        named = ", ".join(f"{config.name} {config.version!r}" for config in configs)
        logger.info("publishing %s: starting workers in a new fork server", named)
        num_workers = self.engines.num_workers or 1
        number = self.engines.add(source.pools(configs, num_workers))
        try:
            self.reserve(num_workers * len(self.engines.revisions))
            engine = await self.engines.shared(number)
            await _until_ready(engine)
        except BaseException:
            self._remove(number)
            raise
        return self.versions.add(number, self.engines.revisions[number].infos, configs, time.monotonic())

    def close(self) -> None:
        """Cancel a publication that is in progress."""
        if self._running is not None:
            self._running.cancel()

    @staticmethod
    def _report(plan: Plan, added: Sequence[Version]) -> list[PublishedVersion]:
        changes: tuple[tuple[Change, Sequence[Version]], ...] = (
            ("added", added), ("restored", plan.restored), ("unchanged", plan.unchanged),
        )  # fmt: skip
        published = []
        for change, versions in changes:
            for version in versions:
                info = version.info
                published.append(PublishedVersion(info.name, info.version, info.fingerprint, change))
                if change in _AUDITED:
                    logger.info("%s is the newest one now (%s, revision %d)", version, change, version.revision)
                    audit.record(
                        _AUDITED[change], dataset=info.name, version=info.version, fingerprint=info.fingerprint
                    )
        return published

    async def retire(self, name: str, text: str) -> int:
        """Retire a version, although loaders may use it; return the number of its loaders.

        Raises:
            UnknownDataset: If the server does not have this version.
            InvalidSpec: If it is the newest version.
            ServerUnavailable: If a publication is in progress.
        """
        if self._is_publishing:
            raise ServerUnavailable(f"cannot retire version {text!r}: a publication is in progress. Retry later")
        return await self._retire(self.versions.find(name, text), "by an operator")

    async def retire_idle(self, seconds: float) -> None:
        """Retire the versions that no loader has used for `seconds`, except the newest ones."""
        for version in () if self._is_publishing else self.versions.idle(time.monotonic(), seconds):
            await self._retire(version, f"because no loader used it for {seconds:g} s")

    async def _retire(self, version: Version, reason: str) -> int:
        self.versions.retire(version)
        error = DatasetChanged(
            f"{version} was retired {reason}. To continue a run with it, publish the version again; otherwise start a "
            "new run"
        )
        count = await self.end_loaders(version, error)
        logger.info("retired %s %s", version, reason)
        info = version.info
        audit.record("retired", dataset=info.name, version=info.version, fingerprint=info.fingerprint, loaders=count)
        for number in self.versions.remove_unused():
            logger.info("stopping the workers of revision %d, whose versions are all retired", number)
            self._remove(number)
        return count

    def _remove(self, number: int) -> None:
        """Stop the workers of a revision, and release the file descriptors that were reserved for them."""
        self.engines.remove(number)
        with suppress(ConfigError):  # too few for the others: they were reserved before a resize
            self.reserve((self.engines.num_workers or 1) * len(self.engines.revisions))


async def _until_ready(engine: Engine) -> None:
    """Wait until a worker is ready.

    Raises:
        ConfigError: If no worker starts.
    """
    while True:
        states = engine.pool.workers()
        if any(state.ready for state in states):
            return
        failed = [state.restarts for state in states if state.restarts.failed_starts >= MAX_FAILED_STARTS]
        if failed:
            raise ConfigError(f"no worker starts: {failed[0].last_exit}. See the log of the server")
        await asyncio.sleep(POLL_S)
