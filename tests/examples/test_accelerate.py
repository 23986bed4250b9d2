"""Loaders prepared by accelerate, compared with torch's loader in one and in two processes."""

from __future__ import annotations

import pytest

from teleloader_server import serve
from tests.end_to_end.contract import ShardedRange, torch_is_there
from tests.examples.running import RANKS, need_framework, run_example

__all__ = ["torch_is_there"]


@pytest.mark.parametrize("processes", [1, 2])
def test_prepared_loaders_act_as_torchs(processes: int) -> None:
    """Batches, optimizer steps, gathered metrics and resumed epochs, see accelerate_rules.py."""
    need_framework("accelerate")
    launcher = () if processes == 1 else RANKS
    datasets = {"stream": ShardedRange(0, 10), **{str(length): range(length) for length in (3, 16, 23)}}
    with serve(datasets, num_workers=1) as url:
        printed = run_example(
            *launcher, "-m", "tests.examples.accelerate_rules", url, ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1"
        )
    assert printed.count(f": passed on {processes} processes") == 7 * processes
