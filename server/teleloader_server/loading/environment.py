"""Versions of the libraries that determine the bits of batches."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def environment() -> str:
    """Return the versions of Python, NumPy and torch, such as ``"Python 3.11, numpy 2.1.0, torch 2.13.0"``.

    Other versions may compute other bits for the same batch, for example in random augmentation.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    packages = {name: _version(name) for name in ("numpy", "torch")}
    return ", ".join([f"Python {python}", *(f"{name} {found}" for name, found in packages.items() if found)])


def _version(package: str) -> str | None:
    try:
        return version(package).partition("+")[0]  # builds for other accelerators differ after the plus sign
    except PackageNotFoundError:
        return None
