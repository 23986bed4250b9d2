""".ci/run and .ci/nightly: steps side by side, failed tests that run again, and the records that are committed."""

from __future__ import annotations

import datetime
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

RESULT = """
import json, os, sys
from pathlib import Path
first = not Path("ran").exists()
Path("ran").touch()
failed = ["tests/test_a.py::test_rare"] if first or {always} else []
report = {{"status": len(failed), "passed": 7, "failed": failed, "skipped": 2}}
Path(os.environ["TEST_REPORT"]).write_text(json.dumps(report))
sys.exit(len(failed))
"""
"""Test run in which one test fails, the first time or always."""


@pytest.fixture
def ci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Import a module of .ci, in an empty working directory."""
    monkeypatch.syspath_prepend(ROOT / ".ci")
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".ci").mkdir()
    return importlib.import_module


def step_with_tests(ci: Any, *, always: bool) -> Any:
    """Return a step whose test fails once, or always."""
    Path("fake.py").write_text(RESULT.format(always=always))
    command = f"{sys.executable} fake.py"
    return ci("steps").Step("tests", command, pytest=command)


def test_independent_steps_run_side_by_side(ci: Any) -> None:
    """Two steps that wait for each other both finish."""
    steps = ci("steps")
    wait = "touch {}; until [ -e {} ]; do sleep 0.01; done"
    run = steps.Steps([steps.Step("a", wait.format("x", "y")), steps.Step("b", wait.format("y", "x"))], 2, 60)
    run.run()
    assert not run.failed


def test_a_step_waits_for_the_steps_before_it(ci: Any) -> None:
    """A step waits for its predecessors even if a lane is free."""
    steps = ci("steps")
    run = steps.Steps([steps.Step("a", "sleep 0.2; touch x"), steps.Step("b", "[ -e x ]", after=("a",))], 2, 60)
    run.run()
    assert not run.failed


def test_a_failed_step_shows_its_log_and_fails_what_comes_after(ci: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Steps that depend on a failed one do not start, and count as failed."""
    steps = ci("steps")
    run = steps.Steps([steps.Step("a", "echo the reason; exit 3"), steps.Step("b", "true", after=("a",))], 2, 60)
    run.run()
    assert run.failed == ["a", "b"]
    assert "\nthe reason\n" in capfd.readouterr().out


def test_a_step_that_exceeds_its_time_limit_fails(ci: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """The output contains the time limit."""
    steps = ci("steps")
    run = steps.Steps([steps.Step("a", "sleep 60", limit_s=1)], 1, 60)
    run.run()
    assert run.failed == ["a"]
    assert "time limit" in capfd.readouterr().out


def test_a_tolerated_exit_status_is_no_failure_and_no_pass(ci: Any) -> None:
    """The table contains the meaning of a tolerated exit status."""
    steps = ci("steps")
    run = steps.Steps([steps.Step("audit", "exit 75", tolerated=(75, "NOT AUDITED"))], 1, 60)
    run.run()
    assert not run.failed
    assert "NOT AUDITED" in run.table()


def test_a_few_failed_tests_run_again(ci: Any) -> None:
    """A test that passes when it is repeated is flaky, and counts as passed in the totals."""
    run = ci("steps").Steps([step_with_tests(ci, always=False)], 2, 60)
    run.run()
    assert not run.failed
    assert run.flaky == ["tests/test_a.py::test_rare"]
    assert run.table().endswith("\n8 passed, 0 failed, 2 skipped")


def test_a_test_that_fails_twice_fails_the_run(ci: Any) -> None:
    """A test that also fails when it is repeated fails the run and is not flaky."""
    run = ci("steps").Steps([step_with_tests(ci, always=True)], 2, 60)
    run.run()
    assert run.failed == ["tests"]
    assert run.flaky == []
    assert run.table().endswith("\n7 passed, 1 failed, 2 skipped")


@pytest.mark.parametrize(
    "tests",
    [
        None,
        {"status": 2, "failed": ["a.py::b"]},
        {"status": 1, "failed": []},
        {"status": 1, "failed": ["a.py"]},
        {"status": 1, "failed": [f"a.py::{i}" for i in range(4)]},
    ],
    ids=["no report", "interrupted", "none named", "not collected", "too many"],
)
def test_other_failures_do_not_run_again(ci: Any, tests: Any) -> None:
    """Aborted tests, collection errors and more than three failures are not repeated."""
    assert not ci("steps").may_run_again(tests)


def test_a_test_that_is_flaky_twice_in_ten_recorded_runs_is_named(ci: Any) -> None:
    """A test is listed if it was flaky in two of the last ten recorded runs."""
    records = ci("records")
    for flaky in (["a"], ["b"], *[[f"c{i}"] for i in range(7)]):
        runs = records.recorded(flaky)
        records.write(records.FLAKY, runs)
    assert records.repeated(records.recorded(["a"])) == ["a"]
    records.write(records.FLAKY, records.recorded(["d"]))
    assert records.repeated(records.recorded(["a"])) == []


def test_the_age_of_the_last_nightly_run_is_stated(ci: Any) -> None:
    """The text has the age and outcome of the last nightly run, or states that there is none."""
    records = ci("records")
    assert "No nightly run" in records.last_nightly()
    now = datetime.datetime(2030, 1, 5, tzinfo=datetime.UTC)
    step = {"date": "2030-01-02T00:00:00+00:00", "commit": "abc", "failed": False}
    later = {"date": "2030-01-04T00:00:00+00:00", "commit": "def", "failed": True}
    assert (
        records.age({"fuzz": step}, now) == "The last nightly run, 3 days ago (2030-01-02T00:00:00+00:00, abc), passed."
    )
    assert "3 days ago (2030-01-02T00:00:00+00:00, abc, def), FAILED (chaos)." in records.age(
        {"fuzz": step, "chaos": later}, now
    )


def test_a_step_that_runs_apart_replaces_its_own_record(ci: Any) -> None:
    """Records of other steps stay; records of steps that no longer exist are dropped."""
    records = ci("records")
    for outcomes in ({"fuzz": {"failed": True}, "chaos": {"failed": False}, "old": {}}, {"fuzz": {"failed": False}}):
        records.write(records.NIGHTLY, records.recorded_steps(outcomes, ["chaos", "fuzz"]))
    found = json.loads(records.NIGHTLY.read_text())
    assert {name: step["failed"] for name, step in found.items()} == {"fuzz": False, "chaos": False}
    assert set(found["fuzz"]) == {"date", "commit", "failed"}


def test_named_steps_run_with_those_that_they_come_after(ci: Any) -> None:
    """Selected steps run with their predecessors, and without other steps."""
    checks, steps = ci("checks"), ci("steps")
    every = [
        steps.Step("a", ""),
        steps.Step("b", "", after=("a",)),
        steps.Step("c", "", after=("b",)),
        steps.Step("d", ""),
    ]
    assert [step.name for step in checks.chosen(every, ["c"])] == ["a", "b", "c"]
    assert checks.chosen(every, []) == every
    with pytest.raises(SystemExit, match="unknown step 'e': expected a, b, c, d"):
        checks.chosen(every, ["e"])


@pytest.mark.parametrize("which", ["gate", "nightly"])
def test_steps_come_after_steps_that_exist(ci: Any, which: str) -> None:
    """Predecessors are existing steps, and names of steps and of log files are unique."""
    steps = list(getattr(ci("checks"), which)())
    names = [step.name for step in steps]
    assert len(set(names)) == len({step.log for step in steps}) == len(names)
    for position, step in enumerate(steps):
        assert set(step.after) <= set(names[:position])


def test_pytest_writes_the_report_that_steps_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the exit status, the counts and the names of failed tests; failed setups count."""
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n"
        "@pytest.fixture\ndef bad(): assert 0\ndef test_c(bad): pass\n@pytest.mark.skip\ndef test_d(): pass\n"
    )
    report = tmp_path / "report.json"
    monkeypatch.setenv("TEST_REPORT", str(report))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-n", "1",
               "--rootdir", str(tmp_path), str(tmp_path)]  # fmt: skip
    subprocess.run(command, cwd=ROOT, capture_output=True)
    assert json.loads(report.read_text()) == {
        "status": 1, "passed": 1, "failed": ["test_it.py::test_b", "test_it.py::test_c"], "skipped": 1
    }  # fmt: skip
