"""Records that are committed: the last nightly run, and tests that failed and passed when they ran again."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

NIGHTLY: Final = Path(".ci/nightly.json")
FLAKY: Final = Path(".ci/flaky.json")
RUNS: Final = 10
"""Recorded runs in which a test may be flaky once."""

Run = Mapping[str, Any]


def this_run() -> dict[str, Any]:
    """Return the time and the commit."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], text=True, capture_output=True).stdout.strip()
    return {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "commit": commit or "unknown"}


def recorded(flaky: Sequence[str]) -> list[Run]:
    """Return the last recorded runs, the oldest first, with this one at the end."""
    before: list[Run] = json.loads(FLAKY.read_text()) if FLAKY.exists() else []
    return [*before, {**this_run(), "flaky": sorted(flaky)}][-RUNS:]


def repeated(runs: Sequence[Run]) -> list[str]:
    """Return the tests that were flaky in more than one of these runs.

    The change that makes such a test reliable deletes it from the file.
    """
    counts = Counter(name for run in runs for name in set(run["flaky"]))
    return sorted(name for name, count in counts.items() if count > 1)


def recorded_steps(outcomes: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return the last outcome of each nightly step, with the time and commit of its run.

    Args:
        outcomes: Outcomes of this run.
        names: Names of all steps.
    """
    before = json.loads(NIGHTLY.read_text()) if NIGHTLY.exists() else {}
    run = this_run()
    now = {name: {**run, **outcome} for name, outcome in outcomes.items()}
    return {name: step for name, step in {**before, **now}.items() if name in names}


def age(nightly: Mapping[str, Any], now: datetime.datetime) -> str:
    """Return a sentence on the recorded nightly steps; the age is that of the oldest one."""
    if not nightly:
        return f"No nightly run is recorded in {NIGHTLY}."
    date = min(step["date"] for step in nightly.values())
    commits = ", ".join(dict.fromkeys(step["commit"] for step in nightly.values()))
    days = (now - datetime.datetime.fromisoformat(date)).days
    failed = [name for name, step in nightly.items() if step["failed"]]
    outcome = f"FAILED ({', '.join(failed)})" if failed else "passed"
    return f"The last nightly run, {days} day{'s' * (days != 1)} ago ({date}, {commits}), {outcome}."


def last_nightly() -> str:
    """Return a sentence on the last nightly run."""
    nightly = json.loads(NIGHTLY.read_text()) if NIGHTLY.exists() else {}
    return age(nightly, datetime.datetime.now(datetime.UTC))


def write(file: Path, value: object) -> None:
    """Write a record."""
    file.write_text(json.dumps(value, indent=2) + "\n")
