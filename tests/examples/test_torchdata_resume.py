"""Resuming with torchdata's own samplers, whose states are torchdata's ``Stateful``."""

from __future__ import annotations

from typing import Any

import pytest

from tests.end_to_end.contract import Numbers, torch, torch_is_there
from tests.end_to_end.test_resumed_runs import assert_resumes
from tests.examples.running import need_framework

__all__ = ["torch_is_there"]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", ["RandomSampler", "RandomSampler, replacement", "StatefulDistributedSampler"])
def test_torchdatas_samplers_resume(name: str, num_workers: int) -> None:
    """From a state of any position, all remaining batches are those of the uninterrupted run."""
    need_framework("torchdata")
    from torchdata.stateful_dataloader import sampler

    def fresh() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3)
        made = {
            "RandomSampler": lambda: sampler.RandomSampler(Numbers(), generator=generator),
            "RandomSampler, replacement": lambda: sampler.RandomSampler(Numbers(), True, 70, generator),
            "StatefulDistributedSampler": lambda: sampler.StatefulDistributedSampler(Numbers(), 2, 1, seed=4),
        }[name]()
        return {"batch_size": 20 if "replacement" in name else 3, "sampler": made, "num_workers": num_workers}

    assert_resumes(Numbers(), fresh)
