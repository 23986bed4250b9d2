"""Demand for workers, as servers report it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from teleloader_server.stats.demand import MIN_KNOWN_S, MIN_STEP_S
from teleloader_shared.stats import WINDOW

BUSY = 4
"""Processes that use a CPU beside the workers."""
CPU_S = SLEEP_S = 0.02
"""Seconds per batch for which a worker computes, and for which it is blocked."""
STEP_S = 0.04
"""Seconds of a training step: one worker would keep up."""


class Mixed:
    """Dataset whose samples take CPU time, and time for which the worker is blocked."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        end = time.thread_time() + CPU_S
        while time.thread_time() < end:
            pass
        time.sleep(SLEEP_S)
        return index


def train(url: str, loader: DataLoader, seconds: float, step: Callable[[], object]) -> dict[str, Any]:
    """Train for some seconds; return the server's statistics of its last second."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in loader:
            step()
            if time.monotonic() >= end:
                found: dict[str, Any] = httpx.get(f"{url}/stats", timeout=30).json()
                return found
    raise AssertionError("no batch in time")


def busy(stats: dict[str, Any]) -> float:
    """Return the number of workers that have a task."""
    return float(sum(worker["busy_fraction"] for worker in stats["workers"]))


def test_demand_does_not_grow_when_the_cpus_are_full() -> None:
    """Batches take longer, because workers wait for a CPU; demand counts the time that they compute or are blocked."""
    with serve(Mixed(), num_workers=2) as url, ExitStack() as others:
        loader = DataLoader(RemoteDataset(url), 1, seed=0)
        before = train(url, loader, MIN_KNOWN_S + 4, lambda: time.sleep(STEP_S))
        cpus = [min(os.sched_getaffinity(0))]
        for worker in before["workers"]:
            psutil.Process(worker["pid"]).cpu_affinity(cpus)
        for _ in range(BUSY):
            other = others.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            others.callback(other.kill)
            psutil.Process(other.pid).cpu_affinity(cpus)
        after = train(url, loader, WINDOW + 4, lambda: time.sleep(STEP_S))
    was, now = before["server"], after["server"]
    assert was["demand_unmeasured"] == now["demand_unmeasured"] == 0.0
    assert 0.5 <= was["demand"] <= 1.2
    assert now["demand"] <= 1.15 * was["demand"]
    assert now["saturated"]
    seconds = [busy(stats) / stats["server"]["batches_per_second"] for stats in (before, after)]
    assert seconds[1] > 1.5 * seconds[0], "the other processes did not slow down the workers"


def test_the_demand_of_an_empty_loop_is_its_present_load() -> None:
    """It takes all batches that workers compute, and would take more."""
    with serve(Mixed(), num_workers=2) as url:
        loader = DataLoader(RemoteDataset(url), 1, seed=0)
        found = train(url, loader, MIN_KNOWN_S + 4, lambda: None)["server"]
        mine = loader.stats()
    if (mine.elapsed - mine.waited) / mine.steps >= MIN_STEP_S:
        pytest.skip("other programs use the CPUs: the training loop is not empty, but waits for a CPU")
    assert found["demand"] == found["demand_unmeasured"] == pytest.approx(found["load"], rel=0.15)
    assert 0 < found["load"] <= 2.0
