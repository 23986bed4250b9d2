"""Versions of hosted datasets: which version a request gets, what a publication changes, and which versions retire.

Synchronous functions over plain state, without processes or clocks; `Publisher` carries the decisions out.

A publication adds a *revision*: the new versions of one or several datasets, whose workers are forked from a fork
server of their own. Its processes end once all of its versions are retired.

Rules:

1. A request that requires a fingerprint gets the version with this fingerprint, or an error: never another version.
2. Other requests get the newest version of a dataset, which is the one that was published last.
3. All datasets of a mixture are of one revision, because one worker computes a batch.
4. The newest version of a dataset never retires. Another one retires once no loader has used it for a while, or by
   command of an operator.
5. A publication with the configuration of a version whose revision still runs makes this version the newest one again.
6. A publication must not reuse the text of a version for another configuration: fingerprints would be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from teleloader_server.config import ConfigError, DatasetConfig
from teleloader_shared.errors import DatasetChanged, InvalidSpec, UnknownDataset
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.sources import describe
from teleloader_shared.text import short

MAX_REVISIONS: Final = 4
"""Maximum number of revisions whose processes run at the same time."""
MAX_RETIRED: Final = 64
"""Number of retired versions that are remembered for error messages."""


@dataclass(slots=True, eq=False)
class Version:
    """Version of a dataset."""

    info: DatasetInfo
    config: DatasetConfig
    revision: int
    """Number of the revision that added the version, from 1."""
    last_used: float
    """Time of the last registration or request of a loader."""
    is_retired: bool = False
    """True if the version is not available; its processes run as long as other versions of the revision need them."""

    def __str__(self) -> str:
        return f"version {self.info.version!r} of dataset {self.info.name!r}"


class Plan(NamedTuple):
    """Effect of a publication."""

    added: list[DatasetConfig]
    """Configurations whose datasets must be constructed."""
    restored: list[Version]
    """Versions that become the newest ones again."""
    unchanged: list[Version]
    """Versions that are the newest ones already."""


@dataclass(slots=True, eq=False)
class VersionTable:
    """All versions of the datasets of a server."""

    _versions: dict[str, list[Version]] = field(default_factory=dict)
    """Versions of the running revisions by dataset name, in the order of publication."""
    _retired: dict[tuple[str, str], str] = field(default_factory=dict)
    """Texts of the last retired versions, by dataset name and fingerprint."""

    def __iter__(self) -> Iterator[Version]:
        return (version for versions in self._versions.values() for version in versions)

    # -- publication

    def plan(self, configs: Sequence[DatasetConfig]) -> Plan:
        """Return the effect of publishing configurations, which removes no dataset.

        Raises:
            ConfigError: If a version was published with another configuration, or too many revisions run.
        """
        plan = Plan([], [], [])
        for config in configs:
            known = self._versions.get(config.name, [])
            same = next((version for version in known if version.config == config), None)
            if same is not None and same is known[-1]:
                plan.unchanged.append(same)
            elif same is not None:
                plan.restored.append(same)
            elif any(version.config.version == config.version for version in known):
                raise ConfigError(
                    f"cannot publish dataset {config.name!r}: version {config.version!r} was published with another "
                    "configuration. Change version in the configuration file, so that clients do not mix the data"
                )
            else:
                plan.added.append(config)
        if plan.added and len(self.revisions) >= MAX_REVISIONS:
            raise ConfigError(
                f"cannot publish: {len(self.revisions)} revisions run, and the limit is {MAX_REVISIONS}. "
                f"{self._advice_at_limit()}"
            )
        return plan

    def _advice_at_limit(self) -> str:
        """Return what ends the processes of a revision."""
        used = [version for version in self if not version.is_retired]
        needed = {version.revision for version in used if self.is_newest(version)}
        ends = min((version.revision for version in used if version.revision not in needed), default=None)
        if ends is None:
            return "Each of them has the newest version of a dataset: set another version for several datasets at once"
        named = " and ".join(str(version) for version in used if version.revision == ends)
        return f"Retire {named}, or wait until no loader uses it"

    def add(
        self, revision: int, infos: Mapping[str, DatasetInfo], configs: Iterable[DatasetConfig], now: float
    ) -> list[Version]:
        """Add the versions of a revision, which become the newest ones, and return them."""
        added = [Version(infos[config.name], config, revision, now) for config in configs]
        for version in added:
            self._versions.setdefault(version.info.name, []).append(version)
        return added

    def restore(self, version: Version, now: float) -> None:
        """Make a version of a running revision the newest one of its dataset."""
        versions = self._versions[version.info.name]
        versions.remove(version)
        versions.append(version)
        version.is_retired, version.last_used = False, now

    # -- requests

    @property
    def datasets(self) -> dict[str, DatasetInfo]:
        """Descriptions of the newest versions, by dataset name."""
        return {name: versions[-1].info for name, versions in self._versions.items()}

    def available(self, name: str) -> list[Version]:
        """Return the versions of a dataset that loaders can use, newest first."""
        return [version for version in reversed(self._versions.get(name, [])) if not version.is_retired]

    def is_newest(self, version: Version) -> bool:
        """Return True if new runs get this version by default."""
        return self._versions[version.info.name][-1] is version

    def find(self, name: str, text: str | None = None, fingerprint: str | None = None) -> Version:
        """Return a version of a dataset: by default the newest one.

        Args:
            name: Name of the dataset, which is hosted.
            text: Version as in the configuration; None for any.
            fingerprint: Fingerprint; None for any.

        Raises:
            UnknownDataset: If the server does not have this version.
        """
        found = self.available(name)
        for version in found:
            if text in (None, version.info.version) and fingerprint in (None, version.info.fingerprint):
                return version
        wanted = f"version {short(text)}" if fingerprint is None else f"fingerprint {short(fingerprint)}"
        raise UnknownDataset(
            f"dataset {name!r} has no {wanted}: available versions are {_listed(found)}"
            f"{self._advice(name, text, fingerprint)}"
        )

    def of_loader(self, names: Sequence[str], fingerprint: str | None) -> list[Version]:
        """Return the versions of all datasets of a loader, which are of one revision.

        Args:
            names: Names of the datasets, which are hosted: one, or the sources of a mixture.
            fingerprint: Fingerprint of the dataset, or of the mixture; None for the newest versions.

        Raises:
            DatasetChanged: If no versions have this fingerprint.
            InvalidSpec: If the datasets cannot be mixed.
        """
        newest = [self._versions[name][-1] for name in names]
        if fingerprint is None or _has_fingerprint(newest, fingerprint):
            return _of_one_revision(newest)
        for candidates in self._combinations(names):
            if _has_fingerprint(candidates, fingerprint):
                return candidates
        info = _described(newest)
        raise DatasetChanged(
            f"dataset {info.name!r} has fingerprint {info.fingerprint} (length {info.length}, version "
            f"{info.version!r}), but the loader requires {fingerprint}: "
            f"{self._retired_text(info.name, fingerprint) or 'the data, the version or the collate function changed'}. "
            "Start a new run, or host the previous data"
        )

    def _combinations(self, names: Sequence[str]) -> Iterator[list[Version]]:
        """Yield the available versions of datasets in each revision that has all of them, newest revision first."""
        for revision in sorted(self.revisions, reverse=True):
            found = [
                next((version for version in self.available(name) if version.revision == revision), None)
                for name in names
            ]
            if all(version is not None for version in found):
                yield [version for version in found if version is not None]

    def _retired_text(self, name: str, fingerprint: str | None) -> str | None:
        text = self._retired.get((name, fingerprint or ""))
        return None if text is None else f"version {text!r} was retired"

    def _advice(self, name: str, text: str | None, fingerprint: str | None) -> str:
        is_known = (name, fingerprint) in self._retired or any(
            dataset == name and retired == text for (dataset, _), retired in self._retired.items()
        )
        return ". The version was retired: publish it again" if is_known else ""

    # -- retirement

    @property
    def revisions(self) -> set[int]:
        """Numbers of the revisions whose processes run."""
        return {version.revision for version in self}

    def idle(self, now: float, seconds: float) -> list[Version]:
        """Return the versions that no loader has used for `seconds`, and that are not the newest ones."""
        return [
            version
            for versions in self._versions.values()
            for version in versions[:-1]
            if not version.is_retired and now - version.last_used >= seconds
        ]

    def retire(self, version: Version) -> None:
        """Make a version unavailable.

        Raises:
            InvalidSpec: If it is the newest version of its dataset.
        """
        if self.is_newest(version):
            raise InvalidSpec(f"cannot retire {version}, which new runs get: publish another version first")
        version.is_retired = True
        self._retired[version.info.name, version.info.fingerprint] = version.info.version
        while len(self._retired) > MAX_RETIRED:
            del self._retired[next(iter(self._retired))]

    def remove_unused(self) -> set[int]:
        """Remove the revisions whose versions are all retired, and return their numbers."""
        used = {version.revision for version in self if not version.is_retired}
        unused = self.revisions - used
        for name, versions in self._versions.items():
            self._versions[name] = [version for version in versions if version.revision not in unused]
        return unused


def _described(versions: Sequence[Version]) -> DatasetInfo:
    infos = [version.info for version in versions]
    return infos[0] if len(infos) == 1 else describe(infos)


def _has_fingerprint(versions: Sequence[Version], fingerprint: str) -> bool:
    try:
        return _described(versions).fingerprint == fingerprint
    except InvalidSpec:  # other versions of the sources may be mixed
        return False


def _of_one_revision(versions: list[Version]) -> list[Version]:
    first = versions[0]
    for version in versions:
        if version.revision != first.revision:
            raise InvalidSpec(
                f"cannot mix {first} and {version}: they were not published together, so different workers have them. "
                "Publish new versions of all sources together"
            )
    return versions


def _listed(versions: Sequence[Version]) -> str:
    return ", ".join(f"{version.info.version!r} (fingerprint {version.info.fingerprint})" for version in versions)
