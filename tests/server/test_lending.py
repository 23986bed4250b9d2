"""Loans of shared-memory slots: their limits, and the reuse of slots."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.dispatch.lending import Lender
from teleloader_server.dispatch.quotas import Quota
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.limits import ClientLimits, Limits
from teleloader_server.permissions import ANYONE
from teleloader_server.web.app import create_app
from teleloader_server.workers.arena import Arena, Mapping
from teleloader_server.workers.factory import ConfiguredPools
from teleloader_server.workers.lendable import (
    DISCARD,
    MIN_LENT_BYTES,
    NOBODY,
    SEALS,
    LendableFrame,
    LendableSlot,
    is_lendable,
    is_supported,
)
from teleloader_server.workers.procfs import Capability
from teleloader_shared.handoff import Offer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="requires memfd")

SIZE = 2 * MIN_LENT_BYTES


class Slots:
    """Arena of a worker with the mappings of the server."""

    def __init__(self) -> None:
        self.arena = Arena(2**30, self._announce, self.mappings_removed)
        self.mappings: dict[int, Mapping] = {}
        self.removed: list[int] = []

    def _announce(self, number: int, fd: int, size: int) -> None:
        self.mappings[number] = Mapping(os.dup(fd), size)

    def mappings_removed(self, number: int) -> None:
        """Forget a slot."""
        del self.mappings[number]
        self.removed.append(number)

    def frame(self, owner: int = NOBODY) -> tuple[int, LendableFrame]:
        """Compute a frame for an owner; return the slot's number, and the frame."""
        slot = self.arena.take(SIZE, owner)
        slot.memory[:] = owner
        frame = self.mappings[slot.number].lease(SIZE, lambda: None)
        assert isinstance(frame, LendableFrame)
        return slot.number, frame

    def release(self, number: int) -> None:
        """Release a slot, as the server does when its lease is freed."""
        self.arena.give_back(number, self.mappings[number].owner)


@pytest.fixture
def slots() -> Slots:
    """Return an empty arena."""
    return Slots()


@pytest.fixture
def kept() -> Iterator[list[int]]:
    """Return a list of descriptors, which are closed after the test."""
    descriptors: list[int] = []
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def quota(name: str = "alice") -> Quota:
    """Return the quota of a principal."""
    return Quota(name, 2**30, 10)


def nothing(_descriptor: int) -> None:
    """Send no descriptor."""


def test_the_system_supports_shared_memory() -> None:
    """The tests run on a system that can lend slots."""
    assert is_supported()


def test_small_slots_and_slices_are_not_lent(slots: Slots) -> None:
    """Only a frame that is alone in a large slot can be lent."""
    small = slots.arena.take(MIN_LENT_BYTES // 2)
    assert not is_lendable(slots.mappings[small.number].lease(1000, lambda: None))
    _, frame = slots.frame()
    assert is_lendable(frame)
    assert not is_lendable(frame[:100])
    assert not is_lendable(np.asarray(frame).view(np.ndarray))


def test_a_slot_is_reused_for_its_owner_only(slots: Slots) -> None:
    """A slot that was lent gets no batches of others, and not those of nobody."""
    lender, alice = Lender(ClientLimits()), quota()
    number, frame = slots.frame()
    loan = lender.lend(frame, alice, "train", nothing)
    assert loan is not None
    lender.end(loan)
    del loan, frame
    slots.release(number)
    owner = alice.owners["train"]
    assert slots.frame(owner + 1)[0] != number
    assert slots.frame()[0] != number
    assert slots.frame(owner)[0] == number


@pytest.mark.parametrize("second", ["another principal", "another dataset", "after a revocation"])
def test_a_slot_with_two_borrowers_is_discarded(slots: Slots, second: str) -> None:
    """A slot that was lent to two principals, or for two datasets, is returned to the system."""
    lender, alice = Lender(ClientLimits()), quota()
    number, frame = slots.frame()
    loans = [lender.lend(frame, alice, "train", nothing)]
    if second == "after a revocation":
        alice.owners.clear()
    borrower = quota("bob") if second == "another principal" else alice
    loans.append(lender.lend(frame, borrower, "test" if second == "another dataset" else "train", nothing))
    for loan in loans:
        assert loan is not None
        lender.end(loan)
    assert slots.mappings[number].owner == DISCARD
    loans.clear()
    del frame, loan
    slots.release(number)
    assert slots.removed == [number]


def test_a_slot_that_is_still_open_is_discarded_and_counted(slots: Slots, kept: list[int]) -> None:
    """A loan counts until no process has the slot open."""
    lender, alice = Lender(ClientLimits()), quota()

    async def run() -> None:
        number, frame = slots.frame()
        loan = lender.lend(frame, alice, "train", lambda descriptor: kept.append(os.dup(descriptor)))
        assert loan is not None
        lender.end(loan)
        assert slots.mappings[number].owner == DISCARD
        assert (alice.lent_slots, alice.lent_bytes) == (1, SIZE)
        await asyncio.sleep(0.6)
        assert alice.lent_slots == 1
        os.close(kept.pop())
        async with asyncio.timeout(10):
            while alice.lent_slots:
                await asyncio.sleep(0.05)
        assert alice.has_nothing

    asyncio.run(run())


def test_loans_are_limited(slots: Slots) -> None:
    """A principal cannot borrow more slots or bytes than its limits; others can."""
    for limits in (ClientLimits(max_lent_slots=2), ClientLimits(max_lent_bytes=2 * SIZE)):
        lender, alice = Lender(limits), quota()
        loans = [lender.lend(slots.frame()[1], alice, "train", nothing) for _ in range(3)]
        assert [loan is not None for loan in loans] == [True, True, False]
        assert lender.lend(slots.frame()[1], quota("bob"), "train", nothing) is not None
        assert loans[0] is not None
        lender.end(loans[0])
        assert lender.lend(slots.frame()[1], alice, "train", nothing) is not None


def test_a_loan_that_cannot_be_sent_does_not_count(slots: Slots) -> None:
    """If the channel is full or closed, the frame is sent."""
    lender, alice = Lender(ClientLimits()), quota()

    def full(_descriptor: int) -> None:
        raise BlockingIOError

    number, frame = slots.frame()
    gc.collect()
    before = LendableSlot.open_files, len(os.listdir("/proc/self/fd"))
    assert lender.lend(frame, alice, "train", full) is None
    assert alice.has_nothing
    assert slots.mappings[number].owner == NOBODY
    assert (LendableSlot.open_files, len(os.listdir("/proc/self/fd"))) == before


def test_descriptors_of_slots_are_limited(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots beyond a part of the limit on open files have no descriptor, and are not lent."""
    monkeypatch.setattr("teleloader_server.workers.lendable._FILES_SHARE", 0)
    slot = slots.arena.take(SIZE)
    assert not is_lendable(slots.mappings[slot.number].lease(SIZE, lambda: None))


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root, to change the owner of memory")
def test_memory_of_another_user_is_lent_only_with_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CAP_LEASE, the kernel does not report who holds the memory, and frames are sent."""
    for held, is_lent in ((frozenset(Capability), True), (frozenset(Capability) - {Capability.LEASE}, False)):
        monkeypatch.setattr("teleloader_server.workers.lendable.capabilities", lambda held=held: held)
        fd = os.memfd_create("teleloader-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        os.fchown(fd, 54321, 54321)
        slot = LendableSlot.of(fd, SIZE)
        os.close(fd)
        assert (slot is not None) == is_lent
        assert slot is None or not slot.is_held()


def test_a_change_of_tokens_ends_the_reuse_of_lent_slots() -> None:
    """After a token was revoked, no slot that was lent before is written again, and clients need a new key."""
    limits = Limits(num_workers=1)
    service = LoaderService(ConfiguredPools([], limits), limits)
    authenticator = Authenticator()
    create_app(service, authenticator)
    service.lender.socket_name = f"teleloader-{'0' * 32}"
    offer = Offer.parse(service.lender.offer("alice") or "")
    assert offer is not None
    assert service.lender.account(offer.identifier) is not None
    mine = service.quotas.of(ANYONE)
    mine.owners["train"] = 7
    authenticator.on_change()
    assert not mine.owners
    assert service.lender.account(offer.identifier) is None
