"""Requests that a transport carries."""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """Batches [start, stop) to ask for, and how many will be wanted after them."""

    start: int
    stop: int
    ahead: int
    listed: bytes | None = None
    """For an order of the client's own: the frames that list what they hold."""
