"""Half a minute of faults of every kind: nothing lost, nothing doubled, nothing hung, nothing left."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.chaos.run import run
from tests.chaos.schedule import Kind, plan
from tests.conftest import ROOT

SEED = 9
SECONDS = 15.0


@pytest.mark.timeout(300)
def test_consumers_are_given_what_they_should_whatever_breaks() -> None:
    """Each consumer's history is exactly what it should be, bit for bit, also of those that are killed."""
    outcome = run(SEED, SECONDS, None)
    assert not outcome.problems, "\n".join([*outcome.problems, *outcome.logs])
    # a machine under load may not have a server back in time to be broken again
    assert set(outcome.injected | outcome.missed) == set(Kind)
    assert outcome.injected.total() > 2 * outcome.missed.total()
    for verdict in outcome.verdicts.values():
        assert verdict.epochs
        assert verdict.resumed
        assert not verdict.violations


def test_the_plan_of_a_seed_can_be_read_beforehand() -> None:
    """--plan-only says what will happen, and starts nothing."""
    command = [sys.executable, "-m", "tests.chaos", "--seed", "3", "--minutes", "0.5", "--plan-only"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.splitlines() == [str(fault) for fault in plan(3, 30)]
