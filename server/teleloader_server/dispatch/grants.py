"""Authorizations of open requests; an authorization ends when its token expires, is revoked or loses a scope."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from teleloader_server.permissions import Caller
from teleloader_shared.errors import AccessDenied, ServerUnavailable

CHECKED_TOGETHER: Final = 64
"""Number of grants that are rechecked per iteration of the event loop after tokens have changed or expired:
after a change of keys, the signature of each JWT is verified again, in about 0.1 ms."""


@dataclass(frozen=True, slots=True, eq=False)
class _Grant:
    """Authorization of one open request."""

    caller: Caller
    need: str
    datasets: Sequence[str | None]
    end: Callable[[AccessDenied | ServerUnavailable], object]


class Grants:
    """Authorizations of all open requests of a server, rechecked when tokens change."""

    def __init__(self) -> None:
        self._grants: set[_Grant] = set()
        self.tokens_changed = asyncio.Event()

    @contextmanager
    def hold(
        self,
        caller: Caller,
        need: str,
        datasets: Sequence[str | None],
        end: Callable[[AccessDenied | ServerUnavailable], object],
    ) -> Iterator[None]:
        """Context manager that calls `end` if, before its exit, the token expires, is revoked or loses the scope.

        Args:
            caller: Caller of the request.
            need: Required scope.
            datasets: Datasets in use; None for a request without a dataset.
            end: Callback, called with the error; it must end the request.
        """
        release = self.add(caller, need, datasets, end)
        try:
            yield
        finally:
            release()

    def add(
        self,
        caller: Caller,
        need: str,
        datasets: Sequence[str | None],
        end: Callable[[AccessDenied | ServerUnavailable], object],
    ) -> Callable[[], object]:
        """Add an authorization, and return the function that removes it; arguments as of `hold`."""
        grant = _Grant(caller, need, datasets, end)
        self._grants.add(grant)
        return partial(self._grants.discard, grant)

    async def run(self) -> None:
        """End the requests that are no longer authorized after each change or expiry of tokens; run until cancelled."""
        while True:
            await self.tokens_changed.wait()
            self.tokens_changed.clear()
            for number, grant in enumerate(list(self._grants)):
                try:
                    for dataset in grant.datasets:
                        grant.caller.authorize(grant.need, dataset)
                except (AccessDenied, ServerUnavailable) as error:  # the latter: no keys to verify a JWT
                    grant.end(error)
                if number % CHECKED_TOGETHER == 0:
                    await asyncio.sleep(0)
