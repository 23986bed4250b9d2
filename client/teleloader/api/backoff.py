"""Exponential backoff between retries."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

FIRST_DELAY: Final = 0.05
LAST_DELAY: Final = 1.0
"""Maximum random delay in seconds; bounds the time until a client notices that a server is available again."""


class Backoff:
    """Exponential backoff with full jitter, so that the clients of a failed server do not reconnect simultaneously.

    Args:
        timeout: Seconds for which to retry, from the first failure since `reset`.
        sleep: Function that waits the given seconds, or less if it is interrupted.
    """

    def __init__(self, timeout: float, sleep: Callable[[float], object] = time.sleep) -> None:
        self._timeout = timeout
        self._sleep = sleep
        # a separate generator: the user's random numbers must not depend on the network
        self._random = random.Random()  # noqa: S311 - not for secrets
        self.reset()

    def reset(self) -> None:
        """Reset the delay and the timeout after a successful attempt."""
        self._deadline: float | None = None
        self._delay = FIRST_DELAY

    @property
    def first(self) -> bool:
        """True if no attempt has failed since `reset`."""
        return self._deadline is None

    def pause(self, at_least: float = 0.0) -> bool:
        """Wait before the next attempt.

        Args:
            at_least: Wait in seconds that the server requested; a random delay is added, and the sum is limited to the
                rest of `timeout`.

        Returns:
            True after the wait; False, without a wait, if `timeout` has expired.
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
