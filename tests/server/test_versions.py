"""Decisions about versions of datasets: which one a request gets, and which ones retire."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from teleloader_server.config import ConfigError, DatasetConfig
from teleloader_server.dispatch.versions import MAX_RETIRED, MAX_REVISIONS, Version, VersionTable
from teleloader_shared.errors import DatasetChanged, InvalidSpec, UnknownDataset
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.sources import describe

NAMES = ("train", "test")


def config(name: str = "train", version: str = "v1", **kwargs: object) -> DatasetConfig:
    """Return the configuration of a dataset."""
    return DatasetConfig(name=name, factory="module:make", version=version, kwargs=kwargs)


def info(of: DatasetConfig) -> DatasetInfo:
    """Return a description whose fingerprint is determined by name and version, as that of a hosted dataset."""
    return DatasetInfo(
        name=of.name, kind="map", type="list", length=10, version=of.version, fingerprint=f"{of.name}-{of.version}",
        collate="default", worker_init=None, functions=[], seeding="batch", cpus=1,
    )  # fmt: skip


def table(*revisions: Sequence[DatasetConfig]) -> VersionTable:
    """Return a table with the versions of revisions 1, 2, ..., which were added at time 0."""
    found = VersionTable()
    for number, configs in enumerate(revisions, 1):
        add(found, number, configs)
    return found


def add(versions: VersionTable, number: int, configs: Sequence[DatasetConfig], now: float = 0) -> list[Version]:
    """Add a revision."""
    return versions.add(number, {each.name: info(each) for each in configs}, configs, now)


# -- requests


def test_a_request_without_a_fingerprint_gets_the_newest_version() -> None:
    """The newest version is the one that was published last, whatever its text."""
    versions = table([config(version="v2")], [config(version="v1")])
    (found,) = versions.of_loader(["train"], None)
    assert found.info.version == "v1"
    assert versions.find("train").info.version == "v1"
    assert versions.datasets["train"].version == "v1"


def test_a_retired_version_is_refused_with_the_reason() -> None:
    """The error names the version, although its description is not known any more."""
    versions = table([config(version="v1")], [config(version="v2")])
    versions.retire(versions.find("train", "v1"))
    assert versions.remove_unused() == {1}
    with pytest.raises(DatasetChanged, match=r"version 'v1' was retired. Start a new run, or host the previous data"):
        versions.of_loader(["train"], "train-v1")
    with pytest.raises(UnknownDataset, match=r"The version was retired: publish it again"):
        versions.find("train", "v1")
    with pytest.raises(UnknownDataset, match=r"The version was retired: publish it again"):
        versions.find("train", fingerprint="train-v1")
    with pytest.raises(DatasetChanged, match="the data, the version or the collate function changed"):
        versions.of_loader(["train"], "other")


def test_the_sources_of_a_mixture_are_of_one_revision() -> None:
    """One worker computes a batch, so sources that were published separately cannot be mixed."""
    first = [config("train", "v1"), config("test", "v1")]
    versions = table(first, [config("train", "v2")])
    with pytest.raises(InvalidSpec, match="they were not published together"):
        versions.of_loader(NAMES, None)
    running = describe([info(each) for each in first]).fingerprint
    assert [version.info.version for version in versions.of_loader(NAMES, running)] == ["v1", "v1"]
    second = [config("train", "v3"), config("test", "v3")]
    add(versions, 3, second)
    assert [version.info.version for version in versions.of_loader(NAMES, None)] == ["v3", "v3"]


# -- publication


def test_a_publication_distinguishes_new_restored_and_unchanged_versions() -> None:
    """Datasets that are not in the configuration stay as they are."""
    versions = table([config("train", "v1"), config("test", "v1"), config("extra", "v1")], [config("test", "v2")])
    plan = versions.plan([config("train", "v2"), config("test", "v1")])
    assert plan.added == [config("train", "v2")]
    assert [str(version) for version in plan.restored] == ["version 'v1' of dataset 'test'"]
    assert plan.unchanged == []
    assert [str(version) for version in versions.plan([config("extra", "v1")]).unchanged] == [
        "version 'v1' of dataset 'extra'"
    ]


def test_the_text_of_a_version_is_not_reused() -> None:
    """Also not that of a previous version whose processes run."""
    versions = table([config(version="v1")], [config(version="v2")])
    with pytest.raises(ConfigError, match="version 'v1' was published with another configuration"):
        versions.plan([config(version="v1", path="/other")])


def test_the_error_at_the_limit_names_versions_whose_retirement_helps() -> None:
    """A revision runs as long as it has the newest version of a dataset."""
    versions = table([config("train", "v1"), config("test", "v1")], *([config(version=f"v{n}")] for n in (2, 3, 4)))
    with pytest.raises(ConfigError, match=r"4 revisions run.* Retire version 'v2' of dataset 'train', or wait"):
        versions.plan([config(version="v5")])
    versions = table(*([config(f"data{number}")] for number in range(MAX_REVISIONS)))
    with pytest.raises(ConfigError, match="set another version for several datasets at once"):
        versions.plan([config("data0", "v2")])


def test_a_running_mixture_is_found_although_the_newest_sources_cannot_be_mixed() -> None:
    """The newest version of a source may have another collate function or no length."""
    first = [config("train", "v1"), config("test", "v1")]
    versions = table(first)
    second = config("train", "v2")
    versions.add(2, {"train": replace(info(second), collate="module:stack")}, [second], 0)
    running = describe([info(each) for each in first]).fingerprint
    assert [version.info.version for version in versions.of_loader(NAMES, running)] == ["v1", "v1"]
    with pytest.raises(InvalidSpec, match="the sources of a mixture must have the same collate"):
        versions.of_loader(NAMES, "other")


def test_retired_versions_are_forgotten_at_some_number() -> None:
    """Publications without end do not fill the memory."""
    versions = VersionTable()
    for number in range(1, 2 * MAX_RETIRED):
        add(versions, number, [config(version=str(number))])
        for version in versions.idle(1, 0):
            versions.retire(version)
        versions.remove_unused()
    assert len(versions._retired) == MAX_RETIRED
    assert len(list(versions)) == 1


class Publications(RuleBasedStateMachine):
    """Publications, uses and retirements in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.versions = VersionTable()
        self.number = 1
        self.fingerprints: set[tuple[str, str]] = set()
        self._add([config(name, "0") for name in NAMES])

    def _add(self, configs: Sequence[DatasetConfig]) -> None:
        add(self.versions, self.number, configs, self.now)
        self.fingerprints |= {(each.name, info(each).fingerprint) for each in configs}
        self.number += 1

    @rule(texts=st.dictionaries(st.sampled_from(NAMES), st.sampled_from("0123456"), min_size=1))
    def publish(self, texts: dict[str, str]) -> None:
        """Afterwards, the published versions are the newest ones, unless too many revisions run."""
        running = self.versions.revisions
        configs = [config(name, text) for name, text in texts.items()]
        try:
            plan = self.versions.plan(configs)
        except ConfigError:
            assert len(running) == MAX_REVISIONS
            return
        assert len(plan.added) + len(plan.restored) + len(plan.unchanged) == len(configs)
        if plan.added:
            self._add(plan.added)
        for version in plan.restored:
            self.versions.restore(version, self.now)
            assert version.revision in running, "its processes run"
        for each in configs:
            assert self.versions.find(each.name).config == each
        again = self.versions.plan(configs)
        assert not again.added
        assert not again.restored

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    @rule(name=st.sampled_from(NAMES), place=st.integers(0, 3))
    def use(self, name: str, place: int) -> None:
        """A loader uses a version, which then does not retire for the next seconds."""
        available = self.versions.available(name)
        version = available[place % len(available)]
        version.last_used = self.now
        assert version not in self.versions.idle(self.now + 1, 2)

    @rule()
    def retire_idle(self) -> None:
        """Versions retire after 2 s without use; processes end only with all versions of their revision."""
        for version in self.versions.idle(self.now, 2):
            assert not self.versions.is_newest(version)
            assert self.now - version.last_used >= 2
            self.versions.retire(version)
        before = list(self.versions)
        removed = self.versions.remove_unused()
        assert all(version.is_retired for version in before if version.revision in removed)

    @precondition(lambda self: any(not self.versions.is_newest(version) for version in self.versions))
    @rule()
    def retire_by_command(self) -> None:
        """An operator retires a version that is not the newest one."""
        version = next(version for version in self.versions if not self.versions.is_newest(version))
        self.versions.retire(version)
        self.versions.remove_unused()

    @invariant()
    def the_newest_version_is_available(self) -> None:
        """Each dataset has exactly one newest version, and it is not retired."""
        for name in NAMES:
            newest = [version for version in self.versions.available(name) if self.versions.is_newest(version)]
            assert newest == self.versions.available(name)[:1]
            with pytest.raises(InvalidSpec, match="publish another version first"):
                self.versions.retire(newest[0])

    @invariant()
    def a_fingerprint_selects_this_version_or_none(self) -> None:
        """No request gets the data of another version."""
        for name, fingerprint in self.fingerprints:
            with suppress(DatasetChanged):
                (found,) = self.versions.of_loader([name], fingerprint)
                assert found.info.fingerprint == fingerprint
                assert not found.is_retired

    @invariant()
    def the_number_of_revisions_is_limited(self) -> None:
        """So many processes run at most."""
        assert len(self.versions.revisions) <= MAX_REVISIONS


TestPublications = Publications.TestCase
