"""Lightning's Trainer and Fabric with `teleloader.torch.DataLoader`, compared with torch's loader."""

from __future__ import annotations

import pytest

from teleloader_server import serve
from tests.examples.running import RANKS, need_framework, run_example

LIGHTNINGS_OWN = (
    "ignore:`isinstance(treespec:FutureWarning", "ignore:The '::UserWarning", "ignore:You requested to overfit::",
    "ignore:You are overriding::", "ignore:Using `DistributedSampler`::",
)  # fmt: skip
"""Warnings of Lightning on a deprecated function of torch, and its advice."""


@pytest.mark.parametrize("processes", [1, 2])
def test_lightning_treats_the_loader_as_torchs(processes: int) -> None:
    """Fabric, its checkpoints, training, validation, prediction, overfitting and hooks, see lightning_rules.py."""
    need_framework("lightning")
    launcher = () if processes == 1 else RANKS
    with serve(range(23), num_workers=1) as url:
        printed = run_example(
            *launcher, "-m", "tests.examples.lightning_rules", url, str(processes), ignore=LIGHTNINGS_OWN,
            OMP_NUM_THREADS="1",
        )  # fmt: skip
    assert printed.count(": passed") == 7 * processes
