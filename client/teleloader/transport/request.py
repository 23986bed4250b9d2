"""Request for batches of an epoch."""

from __future__ import annotations

from typing import NamedTuple

from teleloader_shared.ranges import BatchRanges


class BatchRequest(NamedTuple):
    """Request for batches of an epoch."""

    batches: BatchRanges
    ahead: int = 0
    """Number of batches after these that the server computes in advance."""
    listed: bytes | None = None
    """Encoded sample indices of the batches; None if the server computes the indices."""
    is_background: bool = False
    """True for the lowest priority: the training loop has not started the epoch."""
