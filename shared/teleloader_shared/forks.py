"""Processes that are forked from this one, on systems that have forks."""

from __future__ import annotations

import os
from collections.abc import Callable


def after_fork_in_child(callback: Callable[[], object]) -> None:
    """Have `callback` called in each process that is forked from this one; without effect where none can be."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=callback)
