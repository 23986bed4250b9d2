"""The hot path takes no more calls and memory per batch than recorded: a change that makes it longer fails here.

`RECORDED` has the counts of CPython 3.11, printed by ``python -m tests.costs``. A count may be up to `TOLERANCE`
higher. If one is lower by more than that, the record must be lowered, so that the gain is kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Final

import pytest

from tests.conftest import ROOT

TOLERANCE: Final = 0.1
SLACK_BYTES: Final = 64
RECORDED: Final[dict[str, tuple[float, float]]] = {
    "collate, 128 rows with labels": (57.0, 13000),
    "collate, 256 rows with labels": (57.0, 25648),
    "collate and encode, 256 rows with labels": (98.0, 1300),
    "decode, equal layouts": (11.5, 2145),
    "decode, different layouts": (58.3, 1050),
    "dispatch, 1 worker": (164.1, 438),
    "dispatch, 512 workers": (155.0, 653),
    "dispatch, 500 consumers": (157.0, 639),
    "dispatch, small batches": (198.1, 485),
}
"""Calls and peak memory in bytes per batch, by case."""


@pytest.fixture(scope="module")
def counted() -> dict[str, tuple[float, float]]:
    """Calls and peak memory in bytes per batch, by case."""
    command = [sys.executable, "-m", "tests.costs"]
    found: dict[str, tuple[float, float]] = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=-1).stdout)
    return found


@pytest.mark.parametrize("case", RECORDED)
def test_a_batch_takes_no_more_calls_than_recorded(case: str, counted: dict[str, tuple[float, float]]) -> None:
    """On other versions of Python, a count may be lower."""
    recorded, calls = RECORDED[case][0], counted[case][0]
    assert calls <= (1 + TOLERANCE) * recorded, "more calls per batch: find the cause, or record it with a reason"
    if sys.version_info[:2] == (3, 11):
        assert calls >= (1 - TOLERANCE) * recorded, "fewer calls per batch: lower the record"


@pytest.mark.parametrize("case", RECORDED)
def test_a_batch_takes_no_more_memory_than_recorded(case: str, counted: dict[str, tuple[float, float]]) -> None:
    """The peak of a whole run counts, so that growth from batch to batch shows, too."""
    assert counted[case][1] <= (1 + TOLERANCE) * RECORDED[case][1] + SLACK_BYTES


def test_dispatching_does_not_depend_on_the_number_of_workers(counted: dict[str, tuple[float, float]]) -> None:
    """Neither does it depend on the number of consumers, except for a few calls of their queue."""
    one, many, consumers = (counted[f"dispatch, {of}"][0] for of in ("1 worker", "512 workers", "500 consumers"))
    assert many == pytest.approx(one, rel=2 * TOLERANCE)
    assert consumers == pytest.approx(many, rel=2 * TOLERANCE)


def test_collating_does_not_depend_on_the_number_of_samples(counted: dict[str, tuple[float, float]]) -> None:
    """No Python function is called for each sample."""
    assert counted["collate, 128 rows with labels"][0] == counted["collate, 256 rows with labels"][0]
