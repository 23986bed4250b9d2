"""Range of consecutive batches in one request."""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """Range of consecutive batches, [start, stop), in one request."""

    start: int
    stop: int
    ahead: int
    """Number of batches after `stop` that the server computes in advance."""
    listed: bytes | None = None
    """Encoded sample indices of the batches; None if the server computes the indices."""
