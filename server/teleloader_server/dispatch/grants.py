"""Permissions that open requests were given, which end when their tokens do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from teleloader_server.permissions import Caller
from teleloader_shared.errors import AccessDenied

CHECKED_TOGETHER: Final = 256
"""Grants that are checked in one turn of the event loop after tokens have changed."""


@dataclass(frozen=True, slots=True, eq=False)
class _Grant:
    """A permission that is in use."""

    caller: Caller
    need: str
    dataset: str | None
    end: Callable[[AccessDenied], object]


class Grants:
    """The permissions of a server that are in use."""

    def __init__(self) -> None:
        self._grants: set[_Grant] = set()
        self._tokens_changed = asyncio.Event()

    @contextmanager
    def hold(
        self, caller: Caller, need: str, dataset: str | None, end: Callable[[AccessDenied], object]
    ) -> Iterator[None]:
        """Call `end` if, during the context, the caller's token is revoked, expires, or loses its scope.

        Args:
            caller: The client.
            need: The required scope.
            dataset: The dataset in use; None if there is none.
            end: Called with the reason.
        """
        grant = _Grant(caller, need, dataset, end)
        self._grants.add(grant)
        try:
            yield
        finally:
            self._grants.discard(grant)

    def tokens_changed(self) -> None:
        """Have `run` check all grants again."""
        self._tokens_changed.set()

    async def run(self) -> None:
        """End the uses that are not permitted any more, after each change of tokens, until cancelled."""
        while True:
            await self._tokens_changed.wait()
            self._tokens_changed.clear()
            for number, grant in enumerate(list(self._grants)):
                try:
                    grant.caller.authorize(grant.need, grant.dataset)
                except AccessDenied as error:
                    grant.end(error)
                if number % CHECKED_TOGETHER == 0:
                    await asyncio.sleep(0)
