"""Execution of the examples as separate processes, in which every warning is an error."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

RANKS = (
    "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
)  # fmt: skip
"""Arguments of the interpreter that run a script or module in two processes."""


def need_framework(module: str) -> None:
    """Skip a test whose framework is not installed; fail it with TELELOADER_TEST_FRAMEWORKS=1."""
    if importlib.util.find_spec(module) is None:
        if os.environ.get("TELELOADER_TEST_FRAMEWORKS") == "1":
            pytest.fail(f"{module} must be installed where TELELOADER_TEST_FRAMEWORKS=1 is set")
        pytest.skip(f"needs {module}")


def run_example(*arguments: str, ignore: tuple[str, ...] = (), **environment: str) -> str:
    """Run Python with `arguments` in the checkout's folder; return its standard output.

    Args:
        arguments: Arguments of the interpreter, starting with the script's path.
        ignore: Warnings of other packages to ignore, in the format of PYTHONWARNINGS.
        environment: Additional environment variables.
    """
    strict = {**os.environ, "PYTHONWARNINGS": ",".join(("error", *ignore)), **environment}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=strict, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr  # exceptions in finalizers and threads
    return done.stdout


def figure(name: str, printed: str) -> float:
    """Return the last number that was printed after `name`."""
    found: list[str] = re.findall(rf"{name} (-?[\d.]+\d)", printed)
    assert found, printed
    return float(found[-1])
