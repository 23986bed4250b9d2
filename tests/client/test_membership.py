"""Servers that join and leave, derived from listings of a directory."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from teleloader.fleet.membership import Membership
from teleloader_shared.directory import MAX_SERVERS, Entry, Listing, listing
from tests.conftest import examples

GRACE_S = 3.0
A, B, C = (Entry(f"http://{name}") for name in "abc")


def complete(*entries: Entry) -> Listing:
    """Return a complete listing."""
    return Listing(entries, is_complete=True)


def partial(*entries: Entry) -> Listing:
    """Return an incomplete listing."""
    return Listing(entries, is_complete=False, problems=("no response",))


def known(*entries: Entry) -> Membership:
    """Return a membership of these servers."""
    membership = Membership(GRACE_S)
    membership.observe(complete(*entries), 0.0)
    return membership


def urls(*entries: Entry) -> tuple[str, ...]:
    """Return the URLs of servers."""
    return tuple(entry.url for entry in entries)


def test_listed_servers_join_at_once() -> None:
    """Each listed server joins at once, also if the listing is incomplete."""
    membership = Membership(GRACE_S)
    membership.observe(complete(A), 0.0)
    assert membership.urls == urls(A)
    membership.observe(partial(B), 0.5)
    assert membership.urls == urls(A, B)


def test_listed_servers_replace_absent_ones_if_too_many_are_known() -> None:
    """A part of the directory that is invalid for long must not exclude new servers."""
    old = [Entry(f"http://old:{port}") for port in range(1, MAX_SERVERS + 1)]
    membership = known(*old)
    membership.observe(partial(*old[2:]), 1.0)
    membership.observe(partial(*old[3:]), 2.0)
    membership.observe(partial(A, B, *old[4:]), 3.0)
    assert membership.urls == urls(*old[2:], A, B)
    membership.observe(partial(*old, A, B, C), 4.0)
    assert len(membership.urls) == MAX_SERVERS


def test_listings_without_information_change_nothing() -> None:
    """Empty, unreadable and too long listings remove no server, however long they last."""
    membership = known(A, B)
    endless = [f"http://x:{port}" for port in range(1, 10_001)]
    listings = [listing(entries) for entries in ([], None, "http://c", ["garbage"], endless)]
    for now in range(1000):
        for each in listings:
            membership.observe(each, float(now))
            assert membership.urls == urls(A, B)


def test_a_server_leaves_after_the_grace_time_without_a_listing() -> None:
    """A server leaves if all complete listings of the grace time lack it, and not after a single one."""
    membership = known(A, B)
    for listed, now in [
        (complete(B), 100.0),
        (complete(B), 100.0 + 0.9 * GRACE_S),
        (partial(B), 100.0 + 1.5 * GRACE_S),
    ]:
        membership.observe(listed, now)
        assert membership.urls == urls(A, B)
    membership.observe(complete(B), 100.0 + 1.6 * GRACE_S)
    assert membership.urls == urls(B)
    membership.observe(complete(A, B), 200.0)
    assert membership.urls == urls(B, A)


def test_a_server_leaves_at_once_without_a_grace_time() -> None:
    """Without a grace time, one complete listing removes a server, and an incomplete listing does not."""
    membership = Membership(0.0)
    membership.observe(complete(A, B), 0.0)
    membership.observe(partial(B), 1.0)
    assert membership.urls == urls(A, B)
    membership.observe(complete(B), 1.0)
    assert membership.urls == urls(B)


def test_directories_that_list_a_part_keep_all_servers() -> None:
    """All servers stay known if each listing contains a different part of them, as DNS servers do."""
    membership = known(A, B, C)
    for number in range(100):
        membership.observe(complete((A, B, C)[number % 3]), 0.5 * number)
        assert membership.urls == urls(A, B, C)


def test_a_failed_server_leaves_at_once_if_it_is_not_listed() -> None:
    """A failed server leaves if the last listing lacks it, and is retried if the listing contains it."""
    membership = known(A, B)
    membership.failed(A.url)
    assert membership.urls == urls(A, B)
    membership.observe(complete(B), 1.0)
    membership.failed(A.url)
    assert membership.urls == urls(B)
    membership.failed(A.url)
    membership.observe(complete(C), 2.0)
    membership.failed(B.url)
    assert membership.urls == urls(C)


def test_a_failed_server_leaves_if_the_readable_part_of_a_listing_does_not_contain_it() -> None:
    """A failed server leaves if an incomplete listing lacks it, for example while one of two registries is down."""
    membership = known(A, B)
    membership.observe(partial(A), 1.0)
    membership.observe(partial(), 2.0)
    membership.failed(A.url)
    assert membership.urls == urls(A, B)
    membership.failed(B.url)
    assert membership.urls == urls(A)


def test_a_client_always_knows_a_server() -> None:
    """The last known server stays known when it fails."""
    membership = known(A)
    membership.observe(complete(B), 1.0)
    for entry in (A, B):
        membership.failed(entry.url)
    membership.observe(complete(), 100.0)
    assert membership.urls == urls(B)


def test_the_number_of_known_servers_is_limited() -> None:
    """A directory that lists other servers each time cannot exceed the limit of known servers."""
    membership = Membership(GRACE_S)
    for number in range(10):
        entries = (Entry(f"http://{number}.example:{port}") for port in range(1, MAX_SERVERS + 1))
        membership.observe(complete(*entries), number * GRACE_S / 8)
        assert len(membership.urls) <= MAX_SERVERS


class Listings(RuleBasedStateMachine):
    """Arbitrary sequences of listings and failures."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership(GRACE_S)
        self.now = 0.0
        self.listed: set[str] = set()
        """Servers that the last listing with servers contained."""
        self.last_listed: dict[str, float] = {}

    @property
    def known(self) -> set[str]:
        """URLs of the known servers."""
        return set(self.membership.urls)

    @rule(
        names=st.sets(st.sampled_from("abcde")),
        is_complete=st.booleans(),
        seconds=st.sampled_from([0.1, 0.5, GRACE_S]),
    )
    def look(self, names: set[str], is_complete: bool, seconds: float) -> None:
        """Read the directory."""
        self.now += seconds
        found, before = {f"http://{name}" for name in names}, self.known
        self.membership.observe(Listing(tuple(map(Entry, sorted(found))), is_complete), self.now)
        assert found <= self.known <= found | before
        left = before - self.known
        if not found or not is_complete:
            assert not left
        for url in left:
            assert self.now - self.last_listed[url] >= GRACE_S
        self.last_listed |= dict.fromkeys(found, self.now)
        self.listed = found or self.listed

    @rule(name=st.sampled_from("abcde"))
    def fail(self, name: str) -> None:
        """Report the failure of a server."""
        before = self.known
        self.membership.failed(f"http://{name}")
        assert before - self.known <= {f"http://{name}"} - self.listed

    @invariant()
    def is_never_empty_again(self) -> None:
        """A client that knew a server always knows a server."""
        assert self.known or not self.last_listed


TestListings = Listings.TestCase
TestListings.settings = settings(max_examples=examples(60), stateful_step_count=40)
