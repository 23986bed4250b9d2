"""Half a minute with faults of every kind: batches arrive once and in order, and all resources are released."""

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
    """Each consumer receives exactly the expected bytes, including consumers that are killed and resumed."""
    outcome = run(SEED, SECONDS, None)
    assert not outcome.problems, "\n".join([*outcome.problems, *outcome.logs])
    # a machine under load may not have a server back in time to be broken again
    assert set(outcome.injected | outcome.missed) == set(Kind)
    assert outcome.injected.total() > 2 * outcome.missed.total()
    assert outcome.borrowers == {"shared memory"}
    for verdict in outcome.verdicts.values():
        assert verdict.epochs
        assert verdict.resumed
        assert not verdict.violations


def test_the_plan_of_a_seed_can_be_read_beforehand() -> None:
    """--plan-only prints the schedule and starts nothing."""
    command = [sys.executable, "-m", "tests.chaos", "--seed", "3", "--minutes", "0.5", "--plan-only"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.splitlines() == [str(fault) for fault in plan(3, 30)]
