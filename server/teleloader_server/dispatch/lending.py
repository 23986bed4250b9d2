"""Loans of shared-memory slots to client processes on the same machine, with limits per principal."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Final, NamedTuple

from teleloader_server.dispatch.quotas import Quota
from teleloader_server.limits import ClientLimits
from teleloader_server.workers.lendable import LendableFrame, LendableSlot
from teleloader_server.workers.pool import Lease
from teleloader_shared.handoff import Offer
from teleloader_shared.secret import Secret

POLL_S: Final = 0.25
"""Interval in seconds at which the server checks whether a slot that a client kept was released."""

_owners = count(1)


class Loan(NamedTuple):
    """Slot that is lent to one client; it ends when the client gives it back, or disconnects."""

    frame: Lease
    """The frame, which is not overwritten as long as this object exists."""
    slot: LendableSlot
    quota: Quota
    began: float
    """Time of the loan (``time.monotonic()``)."""


class Account(NamedTuple):
    """Identity of a principal on the Unix socket."""

    principal: str
    """Name of the principal."""
    offer: Offer
    """Offer that the principal's registrations contain."""


class Lender:
    """Registry of all loans of a server, and of the keys with which clients open channels.

    A loan that has ended counts until no process has a descriptor or a mapping of the slot. The slot of a client that
    kept one is discarded and not reused.

    Args:
        limits: Limits of clients.
    """

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        self.socket_name: str | None = None
        """Name of the abstract Unix socket on which the server lends slots; None if it lends none."""
        self._accounts: dict[bytes, Account] = {}
        """Account by its public identifier."""
        self._offers: dict[str, Offer] = {}
        """Offer by name of the principal."""
        self._held: list[tuple[LendableSlot, list[Quota]]] = []
        """Slots without loans that a process still has open, and the principals to which they were lent."""
        self._borrowers: dict[LendableSlot, set[Quota]] = {}
        """Principals to which a slot was lent since it was last known to be closed by all clients."""

    def offer(self, principal: str) -> str | None:
        """Return the part of a registration with which clients of a principal open channels; None without a socket."""
        if self.socket_name is None:
            return None
        if principal not in self._offers:
            offer = Offer(self.socket_name, secrets.token_bytes(16), Secret(secrets.token_hex(32)))
            self._offers[principal] = offer
            self._accounts[offer.identifier] = Account(principal, offer)
        return self._offers[principal].format()

    def account(self, identifier: bytes) -> Account | None:
        """Return the account with an identifier, or None if it is unknown."""
        return self._accounts.get(identifier)

    def forget_accounts(self) -> None:
        """Forget all keys, because tokens may have been revoked; clients get new ones when they register."""
        self._accounts.clear()
        self._offers.clear()

    def lend(self, frame: Lease, quota: Quota, dataset: str, send: Callable[[int], object]) -> Loan | None:
        """Lend the slot of a frame.

        Args:
            frame: The frame.
            quota: Quota of the borrower.
            dataset: Dataset of the frame (`LoaderSpec.content`).
            send: Function that sends a descriptor to the borrower; the caller closes the descriptor afterwards.

        Returns:
            The loan; None if the frame has no slot that can be lent, a limit is exceeded, or `send` fails.
        """
        slot = frame.slot if isinstance(frame, LendableFrame) else None
        if (
            slot is None
            or quota.lent_slots >= self.limits.max_lent_slots
            or quota.lent_bytes + slot.size > self.limits.max_lent_bytes
        ):
            return None
        with suppress(OSError):
            descriptor = slot.open()
            try:
                send(descriptor)
            finally:
                os.close(descriptor)
            slot.assign(quota.owners.get(dataset) or quota.owners.setdefault(dataset, next(_owners)))
            slot.loans += 1
            self._borrowers.setdefault(slot, set()).add(quota)
            _charge(slot, quota, 1)
            return Loan(frame, slot, quota, time.monotonic())
        return None

    def end(self, loan: Loan) -> None:
        """End a loan. The slot is free once the caller has also deleted the loan."""
        slot = loan.slot
        slot.loans -= 1
        _charge(slot, loan.quota, -1)
        if slot.loans:
            return
        borrowers = list(self._borrowers.pop(slot))
        if slot.is_held():
            slot.discard()
            for quota in borrowers:
                _charge(slot, quota, 1)
            self._held.append((slot, borrowers))
            if len(self._held) == 1:
                asyncio.get_running_loop().call_later(POLL_S, self._check_held)

    def _check_held(self) -> None:
        held = []
        for slot, borrowers in self._held:
            if slot.loans or slot.is_held():
                held.append((slot, borrowers))
                continue
            for quota in borrowers:
                _charge(slot, quota, -1)
        self._held = held
        if held:
            asyncio.get_running_loop().call_later(POLL_S, self._check_held)


def _charge(slot: LendableSlot, quota: Quota, sign: int) -> None:
    quota.lent_slots += sign
    quota.lent_bytes += sign * slot.size
