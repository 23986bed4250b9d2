"""Range of batches that one request is for."""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """Request for the batches [start, stop)."""

    start: int
    stop: int
    ahead: int
    """Batches to prefetch after `stop`."""
    listed: bytes | None = None
    """Frames with the indices of the batches, for a client-side sampler."""
