"""Moderation of responses, like the interrupt moderation of network cards: under load, responses carry more batches.

A response costs more than a small batch. If many requests wait, and each gets its response as soon as one batch is
ready, the event loop spends most of its time on responses, and the aggregate throughput falls as clients are added.
"""

from __future__ import annotations

import math
from typing import Final

LINGER: Final = 0.005
"""Maximum seconds for which a response waits for further small batches, per open request."""
MAX_LINGER: Final = 1.0
"""Maximum seconds for which a response waits for further small batches, regardless of the number of open requests."""
RESPONSE_SECONDS: Final = 150e-6
"""Event loop time of a response, besides that of its batches."""
RESPONSE_SHARE: Final = 1 / 8
"""Fraction of the event loop's time that responses may take if the workers keep up with it."""


def linger_for(open_requests: int, batch_rate: float) -> tuple[int | None, float]:
    """Return the number of further batches for which a response waits, and the maximum seconds.

    If each response has as many batches as the workers compute in ``RESPONSE_SECONDS / RESPONSE_SHARE``, responses take
    `RESPONSE_SHARE` of the event loop. If that is at most one batch, a response per batch is cheap enough. The maximum
    wait is proportional to the number of open requests, because so are the intervals between the batches of each, and
    it does not depend on the speed of the machine: the event loop sends at most ``1 / LINGER`` smaller responses/s.

    Args:
        open_requests: Number of requests without a response.
        batch_rate: Batches/s that the workers can compute; 0 if unknown.

    Returns:
        The number of batches, None for all batches of the request, and the seconds.
    """
    enough = math.ceil(batch_rate * RESPONSE_SECONDS / RESPONSE_SHARE)
    if enough <= 1 or open_requests <= 1:
        return None, LINGER
    return enough - 1, min(MAX_LINGER, open_requests * LINGER)
