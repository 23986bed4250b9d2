"""How long to wait before a server is tried again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

FIRST_DELAY: Final = 0.05
LAST_DELAY: Final = 1.0
"""Also the longest that a client may notice late that its server is back."""


class Backoff:
    """Waits that grow and are drawn at random ("full jitter"): clients that lost a server do not all return at once.

    Args:
        timeout: Seconds after which to give up, counted from the first failure since `reset`.
        sleep: Waits so many seconds, or less when there is a reason to.
    """

    def __init__(self, timeout: float, sleep: Callable[[float], object] = time.sleep) -> None:
        self._timeout = timeout
        self._sleep = sleep
        # a generator of its own: the user's random numbers must not depend on the network
        self._random = random.Random()  # noqa: S311 - nothing secret
        self.reset()

    def reset(self) -> None:
        """Something went well: the next failure is the first one again."""
        self._deadline: float | None = None
        self._delay = FIRST_DELAY

    @property
    def first(self) -> bool:
        """Whether nothing has failed since `reset`: what is wrong is worth telling once."""
        return self._deadline is None

    def pause(self, at_least: float = 0.0) -> bool:
        """Wait before the next attempt.

        Args:
            at_least: Seconds that the server asked the client to wait. The time that is left is not exceeded.

        Returns:
            False if the time is over; then there was no wait.
        """
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._timeout
        left = self._deadline - now
        if left <= 0:
            return False
        self._sleep(min(left, at_least + self._random.uniform(0, self._delay)))
        self._delay = min(2 * self._delay, LAST_DELAY)
        return True
