"""Callbacks for forked child processes; no-op on systems without ``fork``."""

from __future__ import annotations

import os
from collections.abc import Callable


def after_fork_in_child(callback: Callable[[], object]) -> None:
    """Register `callback` to run in each child that this process forks; no-op on systems without ``fork``."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=callback)
