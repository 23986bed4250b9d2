"""Moderation of responses, like the interrupt moderation of network cards: under load, responses carry more batches.

A response costs more than a small batch. If many requests wait, and each gets its response as soon as one batch is
ready, the event loop spends most of its time on responses, and the aggregate throughput falls as clients are added.
"""

from __future__ import annotations

import math
from typing import Final

LINGER: Final = 0.005
"""Minimum seconds for which a response waits for further small batches."""
MAX_LINGER: Final = 0.5
"""Maximum seconds for which a response waits for further small batches."""
RESPONSE_SECONDS: Final = 150e-6
"""Event loop time of a response, besides that of its batches."""
RESPONSE_SHARE: Final = 1 / 8
"""Fraction of the event loop's time that responses may take."""


def linger_for(open_requests: int, batch_rate: float) -> tuple[int | None, float]:
    """Return the number of further batches for which a response waits, and the maximum seconds.

    If each open request gets a response every ``open_requests * RESPONSE_SECONDS / RESPONSE_SHARE`` seconds, responses
    take `RESPONSE_SHARE` of the event loop. The workers compute ``batch_rate * RESPONSE_SECONDS / RESPONSE_SHARE``
    batches for each of them in this time; a response that has as many does not wait longer. If this is at most one
    batch, a response per batch is cheap enough.

    Args:
        open_requests: Number of requests without a response.
        batch_rate: Batches/s that the workers can compute; 0 if unknown.

    Returns:
        The number of batches, None for all batches of the request, and the seconds.
    """
    enough = math.ceil(batch_rate * RESPONSE_SECONDS / RESPONSE_SHARE)
    seconds = min(MAX_LINGER, open_requests * RESPONSE_SECONDS / RESPONSE_SHARE)
    if enough <= 1 or seconds <= LINGER:
        return None, LINGER
    return enough - 1, seconds
