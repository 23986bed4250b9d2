"""Run named shell commands side by side, each with a log of its own, and end with one table."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

LOGS: Final = Path("build/ci")
MOST_RERUNS: Final = 3
"""More failures than these are no accident of a busy machine."""
TESTS_FAILED: Final = 1
"""pytest's exit status when all tests ran and some failed."""
LOG_LINES: Final = 300


@dataclasses.dataclass(frozen=True)
class Step:
    """A shell command.

    Args:
        name: Name of the step, and of its log.
        command: Run by bash in the root of the checkout.
        after: Names of the steps that must have passed before.
        environment: Variables besides those of this process.
        pytest: Command that runs failed tests again; their names are appended. Empty for a step without tests.
        limit_s: Time limit.
        tolerated: Exit status that is neither a failure nor a pass, and what it means.
    """

    name: str
    command: str
    after: tuple[str, ...] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pytest: str = ""
    limit_s: int = 1800
    tolerated: tuple[int, str] | None = None

    @property
    def log(self) -> Path:
        """File with the output."""
        return LOGS / f"{self.name.replace(' ', '-')}.log"

    @property
    def report(self) -> Path:
        """File that pytest writes its result to, see ``tests/conftest.py``."""
        return self.log.with_suffix(".json")


@dataclasses.dataclass
class Result:
    """Outcome of a step: "passed", "failed", "skipped" (a step before it failed) or that of a tolerated exit status."""

    outcome: str
    seconds: float = 0.0
    tests: dict[str, Any] | None = None

    @property
    def failed(self) -> bool:
        """Return True if the step failed or could not start."""
        return self.outcome in ("failed", "skipped")


class Steps:
    """Runs steps, as many at a time as there are lanes.

    Args:
        steps: In the order in which they start; a step waits for those named in its ``after``.
        lanes: Steps that run at a time.
        limit_s: Time limit of all together.
    """

    def __init__(self, steps: Sequence[Step], lanes: int, limit_s: float) -> None:
        self.results: dict[str, Result] = {}
        self.flaky: list[str] = []
        """Tests that failed, and passed when they ran again."""
        self._waiting = list(steps)
        self._lanes = lanes
        self._end = time.monotonic() + limit_s
        self._running: dict[int, tuple[Step, subprocess.Popen[bytes], float]] = {}
        self._again: list[Step] = []

    @property
    def failed(self) -> list[str]:
        """Names of the steps that failed."""
        return [name for name, result in self.results.items() if result.failed]

    def run(self) -> None:
        """Run all steps, then the few tests that failed, with nothing beside them."""
        LOGS.mkdir(parents=True, exist_ok=True)
        for step in self._waiting:
            step.log.unlink(missing_ok=True)
        while self._waiting or self._running:
            self._start_what_can()
            if self._running:
                self._await_one()
        for step in self._again:
            self._rerun(step)

    def table(self) -> str:
        """Return a line for each step, and the sums of pytest's results."""
        lines = [f"{'step':24}{'result':14}{'seconds':>8}  tests"]
        for name, result in self.results.items():
            tests = summary(result.tests) if result.tests else ""
            lines.append(f"{name:24}{result.outcome:14}{result.seconds:8.0f}  {tests}")
        return "\n".join([*lines, "", summary(self.totals())])

    def record(self) -> dict[str, dict[str, Any]]:
        """Return the outcome of each step, for a record that is committed."""
        return {name: {"failed": result.failed, **dataclasses.asdict(result)} for name, result in self.results.items()}

    def totals(self) -> dict[str, Any]:
        """Return the sums of pytest's results, with all names of tests that failed."""
        reports = [result.tests for result in self.results.values() if result.tests]
        return {
            "passed": sum(report["passed"] for report in reports),
            "failed": [name for report in reports for name in report["failed"]],
            "skipped": sum(report["skipped"] for report in reports),
        }

    def _start_what_can(self) -> None:
        for step in list(self._waiting):
            if any(self.results[name].failed for name in step.after if name in self.results):
                self.results[step.name] = Result("skipped")
                self._waiting.remove(step)
                say(f"{step.name} is skipped: a step before it failed")
            elif len(self._running) < self._lanes and all(name in self.results for name in step.after):
                self._waiting.remove(step)
                self._start(step)

    def _start(self, step: Step) -> None:
        step.report.unlink(missing_ok=True)
        limit = max(1, min(step.limit_s, self._end - time.monotonic()))
        with step.log.open("ab") as log:
            process = subprocess.Popen(
                ["timeout", "--kill-after=30", str(limit), "bash", "-euo", "pipefail", "-c", step.command],
                env={**os.environ, **step.environment, "TEST_REPORT": str(step.report.absolute())},
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._running[process.pid] = step, process, time.monotonic()
        say(f"{step.name} starts")

    def _await_one(self) -> None:
        pid, status = os.wait()
        step, process, started = self._running.pop(pid)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        tests = json.loads(step.report.read_text()) if step.report.exists() else None
        tolerated = step.tolerated is not None and code == step.tolerated[0]
        outcome = step.tolerated[1] if step.tolerated and tolerated else "failed" if code else "passed"
        result = Result(outcome, time.monotonic() - started, tests)
        self.results[step.name] = result
        say(f"{step.name} {outcome} after {result.seconds:.0f} s" + (" (time limit)" if code == 124 else ""))
        if outcome == "failed":
            if step.pytest and may_run_again(tests):
                self._again.append(step)
            print(tail(step.log), flush=True)

    def _rerun(self, step: Step) -> None:
        first = self.results[step.name]
        assert first.tests is not None
        names = first.tests["failed"]
        say(f"{step.name}: runs again, with nothing beside: {', '.join(names)}")
        self._start(dataclasses.replace(step, command=f"{step.pytest} {shlex.join(names)}", pytest=""))
        self._await_one()
        again = self.results[step.name]
        if again.outcome == "passed":
            self.flaky += names
            first.tests = {**first.tests, "passed": first.tests["passed"] + len(names), "failed": []}
        self.results[step.name] = Result(again.outcome, first.seconds + again.seconds, first.tests)


def may_run_again(tests: Mapping[str, Any] | None) -> bool:
    """Return True if all tests ran and no more than a few of them failed."""
    if tests is None or tests["status"] != TESTS_FAILED or not 0 < len(tests["failed"]) <= MOST_RERUNS:
        return False
    return all("::" in name for name in tests["failed"])  # else a file could not be collected


def summary(tests: Mapping[str, Any]) -> str:
    """Return a line such as "12 passed, 0 failed, 1 skipped"."""
    return f"{tests['passed']} passed, {len(tests['failed'])} failed, {tests['skipped']} skipped"


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    lines = log.read_text(errors="replace").splitlines()
    left_out = [f"... {len(lines) - LOG_LINES} lines before, in {log}"] if len(lines) > LOG_LINES else []
    return "\n".join([f"---- {log}", *left_out, *lines[-LOG_LINES:], "----"])


def say(text: str) -> None:
    """Print a line with the time."""
    print(time.strftime("%H:%M:%S"), text, flush=True)
