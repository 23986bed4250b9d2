"""Description of the machine and the software versions, printed with each result."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.processes import ROOT

PACKAGES: Final = ("numpy", "torch", "uvicorn", "uvloop", "teleloader")


def announce(facts: Mapping[str, str], heading: str = "") -> Console:
    """Return a console, after printing the name of the benchmark and the machine."""
    console = Console()
    if not console.is_terminal:
        console.width = 200  # do not truncate cells
    console.print(heading + ", ".join(f"{name} {fact}" for name, fact in facts.items()), highlight=False)
    return console


def describe() -> dict[str, str]:
    """Return properties of the machine by name, in printing order."""
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{len(os.sched_getaffinity(0))} x {_cpu_model()}",
        "kernel": platform.release(),
        "tcp_congestion_control": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "python": platform.python_version(),
    }
    facts |= {package: _version(package) for package in PACKAGES}
    facts["revision"] = _revision()
    return facts


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _revision() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
