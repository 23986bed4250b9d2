"""How the examples are run: as a person runs them, each in a process of its own, where every warning is an error."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def need_framework(module: str) -> None:
    """Skip a test whose framework is not installed; with TELELOADER_TEST_FRAMEWORKS=1 it fails instead."""
    if importlib.util.find_spec(module) is None:
        if os.environ.get("TELELOADER_TEST_FRAMEWORKS") == "1":
            pytest.fail(f"{module} must be installed where TELELOADER_TEST_FRAMEWORKS=1 is set")
        pytest.skip(f"needs {module}")


def run_example(*arguments: str, ignore: tuple[str, ...] = (), **environment: str) -> str:
    """What Python prints on its standard output when it is run with `arguments` in the checkout's folder.

    Args:
        arguments: Of the interpreter, the script's path first.
        ignore: Warnings of others than us that may be given, as PYTHONWARNINGS has them.
        environment: Set besides.
    """
    strict = {**os.environ, "PYTHONWARNINGS": ",".join(("error", *ignore)), **environment}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=strict, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr  # what a finalizer or a thread could not raise
    return done.stdout


def figure(name: str, printed: str) -> float:
    """The last number that was printed after `name`."""
    found: list[str] = re.findall(rf"{name} (-?[\d.]+\d)", printed)
    assert found, printed
    return float(found[-1])
