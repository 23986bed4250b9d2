"""Truth table of the diagnosis: its situations, and how their results are judged."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import get_args

import pytest

from benchmarks.situations import SITUATIONS, Result, followed
from teleloader_shared.stats import Bottleneck

BY_NAME = {situation.name: situation for situation in SITUATIONS}


def result(name: str, bottleneck: str, confidence: float, advice: str, idle: float = 0.9) -> Result:
    """Return the result of a situation."""
    return Result(BY_NAME[name], bottleneck, confidence, advice, {}, idle)


def test_thresholds_are_judged_on_as_many_situations_as_they_were_set_on() -> None:
    """Each situation has a name of its own, and expects an existing bottleneck."""
    groups = Counter(situation.group for situation in SITUATIONS)
    assert min(groups.values()) >= 12
    assert len(BY_NAME) == len(SITUATIONS)
    assert {situation.expected for situation in SITUATIONS} <= set(get_args(Bottleneck))


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (result("io", "io", 0.9, "4 workers would keep up (--num-workers 4)."), "right"),
        (result("io", "io", 0.9, "Use a faster disk."), "wrong"),
        (result("io", "workers", 0.7, "4 workers would keep up (--num-workers 4)."), "wrong"),
        (result("io", "workers", 0.6, "4 workers would keep up (--num-workers 4)."), "unsure"),
        (result("io", "unknown", 0.0, ""), "unknown"),
        (result("few workers", "machine", 0.9, "", idle=0.02), "right"),
        (result("few workers", "machine", 0.9, "", idle=0.5), "wrong"),
        (result("io", "machine", 0.9, "", idle=0.02), "wrong"),
    ],
)
def test_a_result_is_right_if_bottleneck_and_advice_are(found: Result, verdict: str) -> None:
    """A wrong bottleneck is wrong if it is certain; a full machine is the truth where workers need a CPU."""
    assert found.verdict == verdict


def test_the_settings_of_an_advice_are_set() -> None:
    """An advice without a setting cannot be followed."""
    io = BY_NAME["io"]
    more = followed(io, "5 workers instead of 3 would keep up (--num-workers 5), or speed up the samples.")
    assert more == dataclasses.replace(io, workers=5)
    earlier = followed(io, "prefetch more (num_workers=1 and prefetch_factor=8 of the DataLoader)")
    assert earlier is not None
    assert earlier.trainings[0].loader == {"num_workers": 1, "prefetch_factor": 8}
    assert followed(io, "Use a faster network.") is None
