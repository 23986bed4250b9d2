"""Registry of servers: announcements, verification, heartbeats, withdrawal."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from teleloader.api.control import MAX_JSON_BYTES
from teleloader_server.fleet.registry import (
    LOST_S,
    MAX_GAP_S,
    MAX_PENDING,
    MAX_PENDING_PER_TOKEN,
    MAX_SERVERS_PER_TOKEN,
    MAX_STARTUP_S,
    STARTUP_DELAY_S,
    TTL_S,
    Registry,
    instance_of,
)
from teleloader_shared.directory import MAX_SERVERS, MAX_URL, Entry
from teleloader_shared.server_summary import MAX_LOADERS, MAX_TEXT, ServerSummary, summary_of
from tests.conftest import examples

A, B = Entry("http://a", "1"), Entry("http://b", "2")
LATER = TTL_S
"""A time at which the registry lists servers."""
STEP_S = 0.5
"""Interval of the calls of clients."""


def wait(registry: Registry, since: float, until: float, *entries: Entry) -> None:
    """Let clients call the registry, and these servers send heartbeats."""
    for step in range(1, int((until - since) / STEP_S) + 1):
        registry.servers(since + step * STEP_S)
        for entry in entries:
            registry.announce(entry, "token", since + step * STEP_S)


def running() -> Registry:
    """Return a registry that has published a list."""
    registry = Registry(0.0)
    wait(registry, 0.0, LATER)
    return registry


def listing(*entries: Entry, now: float = LATER) -> Registry:
    """Return a registry that lists these servers."""
    registry = Registry(0.0)
    wait(registry, 0.0, now)
    for entry in entries:
        assert registry.announce(entry, "token", now) == "verify"
        registry.verified(entry, now)
    return registry


def test_a_server_is_listed_when_it_is_verified() -> None:
    """A server is listed after its verification, and a second announcement meanwhile starts no second one."""
    registry = running()
    assert registry.announce(A, "token", LATER) == "verify"
    assert registry.announce(A, "token", LATER) == "pending"
    assert registry.servers(LATER) == ()
    registry.verified(A, LATER)
    assert registry.servers(LATER) == (A,)
    assert registry.announce(A, "token", LATER) == "listed"


def test_a_refuted_announcement_is_dropped() -> None:
    """A refuted announcement is dropped, and a later announcement is verified again."""
    registry = running()
    registry.announce(A, "token", LATER)
    registry.refuted(A)
    registry.verified(A, LATER)
    assert registry.servers(LATER) == ()
    assert registry.announce(A, "token", LATER) == "verify"


def test_no_server_is_listed_after_the_start() -> None:
    """A new registry lists no server until no further server has joined for a while, but it delays no later ones."""
    registry = listing(A, now=0.5)
    assert registry.servers(STARTUP_DELAY_S) == ()
    assert registry.servers(0.49 + STARTUP_DELAY_S) == ()
    assert registry.servers(0.5 + STARTUP_DELAY_S) == (A,)
    registry.announce(B, "token", TTL_S)
    registry.verified(B, TTL_S)
    assert registry.servers(TTL_S) == (A, B)


def test_no_server_is_listed_while_servers_are_refused() -> None:
    """The list is incomplete while servers are refused for lack of room, but it is published after a limit."""
    registry, now = listing(A, now=0.0), 0.0
    others = [Entry(f"http://a:{number}", "1") for number in range(MAX_PENDING_PER_TOKEN + 1)]
    while now < MAX_STARTUP_S:
        assert registry.servers(now) == ()
        registry.announce(A, "token", now)
        assert [registry.announce(other, "token", now) for other in others][-1] == "full"
        now += STEP_S
    assert registry.servers(now) == (A,)


def test_no_server_is_listed_while_the_first_announcements_are_verified() -> None:
    """A new registry lists no part of the fleet, but a URL without a response delays the list only for `TTL_S`."""
    registry = listing(A, now=0.5)
    registry.announce(B, "token", 0.5)
    assert registry.servers(0.5 + STARTUP_DELAY_S) == ()
    registry.refuted(B)
    assert registry.servers(0.5 + STARTUP_DELAY_S) == (A,)
    registry = listing(A, now=0.5)
    wait(registry, 0.5, 2.5, A)
    registry.announce(B, "token", 2.5)
    assert registry.servers(2.5) == ()
    assert registry.servers(TTL_S) == (A,)


def test_a_server_without_heartbeats_is_dropped() -> None:
    """A server without heartbeats is dropped, and the other servers stay listed."""
    registry = listing(A, B)
    wait(registry, LATER, LATER + TTL_S, B)
    assert registry.servers(LATER + TTL_S) == (A, B)
    assert registry.servers(LATER + 1.1 * TTL_S) == (B,)


@pytest.mark.parametrize("gap", [1.1 * MAX_GAP_S, 1.1 * TTL_S, 1000.0])
def test_a_pause_of_the_registry_hides_no_part_of_the_servers(gap: float) -> None:
    """After a pause, for example of the virtual machine, the list is empty until all servers have joined again."""
    registry = listing(A, B)
    wait(registry, LATER, 2 * LATER, A, B)
    now = 2 * LATER + gap
    for entry, delay in ((A, 0.0), (B, 0.6)):
        assert registry.servers(now + delay) == ()
        if registry.announce(entry, "token", now + delay) == "verify":
            registry.verified(entry, now + delay)
        assert registry.servers(now + delay) == ()
    wait(registry, now, now + 1.5, A, B)
    assert set(registry.servers(now + 0.6 + STARTUP_DELAY_S)) == {A, B}


def test_a_restarted_server_replaces_its_former_process_when_it_is_verified() -> None:
    """The former process of a restarted server stays listed until then, and cannot withdraw the new one."""
    registry, restarted = listing(A), A._replace(instance="3")
    assert registry.announce(restarted, "token", LATER) == "verify"
    assert registry.servers(LATER) == (A,)
    registry.verified(restarted, LATER)
    assert registry.servers(LATER) == (restarted,)
    assert not registry.withdraw(A.instance, "token")
    assert registry.servers(LATER) == (restarted,)


def test_a_late_verification_does_not_list_another_process() -> None:
    """A verification that ends after the withdrawal does not list the restarted server."""
    registry, restarted = running(), A._replace(instance="3")
    registry.announce(A, "token", LATER)
    assert registry.withdraw(A.instance, "token")
    registry.announce(restarted, "token", LATER)
    registry.verified(A, LATER)
    registry.refuted(A)
    assert registry.servers(LATER) == ()
    registry.verified(restarted, LATER)
    assert registry.servers(LATER) == (restarted,)


def test_only_the_same_token_withdraws() -> None:
    """A server is withdrawn only with the token of its last announcement, and its process may change the token."""
    registry = listing(A)
    assert not registry.withdraw(A.instance, "other")
    assert registry.servers(LATER) == (A,)
    assert registry.announce(A, "other", LATER) == "listed"
    assert not registry.withdraw(A.instance, "token")
    assert registry.withdraw(A.instance, "other")


def test_a_false_announcement_does_not_delay_the_server() -> None:
    """A refuted announcement of a URL by another process does not affect the server at this URL."""
    registry, false = running(), A._replace(instance="3")
    assert registry.announce(false, "other", LATER) == "verify"
    assert registry.announce(A, "token", LATER) == "verify"
    registry.verified(A, LATER)
    registry.refuted(false)
    assert registry.servers(LATER) == (A,)


def test_the_name_of_an_instance_does_not_reveal_its_key() -> None:
    """The public name of an instance does not contain its key, which proves that an announcement is genuine."""
    assert instance_of("key") == instance_of("key") != instance_of("other key")
    assert "key" not in instance_of("key")
    assert len(instance_of("key")) == 32


def test_a_withdrawn_server_is_not_listed() -> None:
    """A withdrawn server is not listed, and may announce itself again."""
    registry = listing(A, B)
    assert registry.withdraw(A.instance, "token")
    assert registry.servers(LATER) == (B,)
    assert not registry.withdraw(A.instance, "token")
    assert registry.announce(A, "token", LATER) == "verify"


def test_servers_and_verifications_are_limited() -> None:
    """At the limits, new announcements are refused, and heartbeats of listed servers are accepted."""
    registry = running()
    entries = [Entry(f"http://a:{port}", "1") for port in range(1, MAX_SERVERS + 2)]
    for number, entry in enumerate(entries[:MAX_PENDING]):
        assert registry.announce(entry, f"token {number // MAX_PENDING_PER_TOKEN}", LATER) == "verify"
    for token in ("token 0", "another token"):
        assert registry.announce(entries[MAX_PENDING], token, LATER) == "full"
    for entry in entries[:MAX_PENDING]:
        registry.verified(entry, LATER)
    for number, entry in enumerate(entries[MAX_PENDING:MAX_SERVERS]):
        assert registry.announce(entry, f"token {number % 5}", LATER) == "verify"
        registry.verified(entry, LATER)
    assert len(registry.servers(LATER)) == MAX_SERVERS
    assert registry.announce(entries[-1], "token", LATER) == "full"
    assert registry.announce(entries[0], "token", LATER) == "listed"
    assert registry.announce(entries[0]._replace(instance="2"), "token", LATER) == "verify"


def test_one_token_does_not_fill_the_list() -> None:
    """A token at its limit can renew and restart its servers, and a change of the token does not evade the limit."""
    registry = running()
    entries = [Entry(f"http://a:{port}", "1") for port in range(1, MAX_SERVERS_PER_TOKEN + 2)]
    *mine, further = entries
    for entry in mine[:-1]:
        registry.announce(entry, "token", LATER)
        registry.verified(entry, LATER)
    assert registry.announce(mine[-1], "token", LATER) == "verify"
    assert registry.announce(mine[-1], "token", LATER) == "pending"
    assert registry.announce(further, "token", LATER) == "full", "servers that are being verified count"
    registry.verified(mine[-1], LATER)
    assert registry.announce(mine[0], "token", LATER) == "listed"
    restarted = mine[0]._replace(instance="2")
    assert registry.announce(restarted, "token", LATER) == "verify"
    registry.verified(restarted, LATER)
    assert registry.announce(further, "other", LATER) == "verify"
    registry.verified(further, LATER)
    assert registry.announce(further, "token", LATER) == "full"
    registry.withdraw("1", "token")
    assert registry.announce(further, "token", LATER) == "listed"


def test_the_longest_list_is_not_too_long_for_clients() -> None:
    """Clients accept the longest list of a registry; a rejected list would hide all servers."""
    longest = Entry(MAX_URL * "x", instance_of("key"))._asdict()
    assert len(json.dumps({"servers": MAX_SERVERS * [longest]})) < MAX_JSON_BYTES


entries = st.builds(Entry, st.sampled_from(["http://a", "http://b", "http://c"]), st.sampled_from("12"))
owners = st.sampled_from(["x", "y"])


class Announcements(RuleBasedStateMachine):
    """Any sequence of events."""

    def __init__(self) -> None:
        super().__init__()
        self.registry = Registry(0.0)
        self.now = 0.0
        self.paused_until = 0.0
        self.heartbeats: dict[Entry, float] = {}
        self.verified_entries: set[Entry] = set()

    @rule(entry=entries, owner=owners)
    def announce(self, entry: Entry, owner: str) -> None:
        """A server announces itself."""
        outcome = self.registry.announce(entry, owner, self.now)
        self.heartbeats[entry] = self.now
        if outcome == "listed":
            assert entry in self.registry.servers(self.now) or self.now - self.paused_until < MAX_STARTUP_S

    @rule(entry=entries)
    def verify(self, entry: Entry) -> None:
        """A verification succeeds, possibly after a withdrawal or another announcement."""
        self.registry.verified(entry, self.now)
        self.verified_entries.add(entry)
        self.heartbeats[entry] = self.now

    @rule(entry=entries)
    def refute(self, entry: Entry) -> None:
        """A verification fails."""
        self.registry.refuted(entry)

    @rule(entry=entries, owner=owners)
    def withdraw(self, entry: Entry, owner: str) -> None:
        """A server stops: all that it announced with this token ends, and nothing else."""
        before = set(self.registry.servers(self.now))
        was_withdrawn = self.registry.withdraw(entry.instance, owner)
        gone = before - set(self.registry.servers(self.now))
        assert was_withdrawn or not gone
        assert {other.instance for other in gone} <= {entry.instance}
        assert not self.registry.withdraw(entry.instance, owner)

    @rule(seconds=st.sampled_from([0.1, 1.0, TTL_S, 2 * TTL_S]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        if seconds > MAX_GAP_S:
            self.paused_until = self.now

    @invariant()
    def lists_verified_servers_with_heartbeats(self) -> None:
        """One process for each URL."""
        listed = self.registry.servers(self.now)
        assert len({entry.url for entry in listed}) == len(listed)
        for entry in listed:
            assert entry in self.verified_entries
            assert self.now - self.heartbeats[entry] <= TTL_S
            assert self.now - self.paused_until >= STARTUP_DELAY_S


TestAnnouncements = Announcements.TestCase
TestAnnouncements.settings = settings(max_examples=examples(60), stateful_step_count=40)


# -- figures of the servers

SUMMARY = ServerSummary("1", 5.0, 2, 10.0, 100.0, 0.5, None, "workers", 0.9, "Add workers.", ["k"])


def test_heartbeats_have_the_latest_figures() -> None:
    """A server of another release, or with invalid figures, is listed without them."""
    registry = listing(A, B)
    registry.announce(A, "token", LATER, SUMMARY)
    registry.announce(B, "token", LATER)
    assert [(found.entry, found.summary, found.lost_for) for found in registry.statuses(LATER)] == [
        (A, SUMMARY, None), (B, None, None),
    ]  # fmt: skip


def test_a_server_whose_heartbeats_end_is_remembered_for_a_while() -> None:
    """A server that withdraws is not; one that returns is listed again."""
    registry = listing(A, B)
    registry.withdraw("2", "token")
    gone = LATER + TTL_S + 1
    wait(registry, LATER, gone)
    assert [(found.entry, found.summary, found.lost_for) for found in registry.statuses(gone)] == [(A, None, TTL_S + 1)]
    registry.announce(A, "token", gone)
    registry.verified(A, gone)
    assert [found.lost_for for found in registry.statuses(gone)] == [None]
    wait(registry, gone, gone + TTL_S + LOST_S)
    assert registry.statuses(gone + TTL_S + LOST_S) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"busy": "1"},
        {"workers": True},
        {"uptime": float("inf")},
        {"advice": "x" * (MAX_TEXT + 1)},
        {"loaders": ["k"] * (MAX_LOADERS + 1)},
        {"loaders": [1]},
    ],
)
def test_invalid_figures_are_ignored(wrong: dict[str, object]) -> None:
    """Types, sizes and numbers of untrusted figures are checked, because a page shows them."""
    valid = dataclasses.asdict(SUMMARY)
    assert summary_of(valid | {"later": 1}) == SUMMARY
    assert summary_of(valid | wrong) is None
    assert summary_of({}) is None
    assert summary_of(None) is None
