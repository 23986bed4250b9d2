"""States that releases saved continue with the same batches, bit for bit, or are refused with the reason.

If a test of this file fails after a change of the code, the change alters the batches of existing training runs. Either
undo the alteration, or raise the version of the algorithm in ``teleloader_shared/algorithms.py`` and record the states
of the next release with ``python -m tests.compatibility``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("torch")

from teleloader import StateMismatch
from teleloader_shared.algorithms import ALGORITHMS
from tests.compatibility.cases import CASES, algorithms_of, digest, hosted, loader_of

STATES: Final = Path(__file__).parent / "states"
RECORDED: Final = sorted(STATES.glob("*/*.json"))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Run a server with all datasets."""
    with hosted() as found:
        yield found


def versions_of(names: Any) -> dict[str, int]:
    """Return the versions of algorithms in this release."""
    return {name: len(ALGORITHMS[name]) for name in names}


@pytest.mark.parametrize("file", RECORDED, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_a_saved_state_continues_bit_for_bit_or_is_refused(url: str, file: Path) -> None:
    """The batches after a state of any release equal those of that release, unless an algorithm has a later version."""
    record = json.loads(file.read_text())
    loader = loader_of(file.stem, url)
    if record["algorithms"] != versions_of(record["algorithms"]):
        with pytest.raises(StateMismatch, match=r"changed in release .*: batches would be different"):
            loader.load_state_dict(record["state"])
        return
    loader.load_state_dict(record["state"])
    assert digest(loader) == record["digest"], (
        f"the batches changed, but not the version of one of {', '.join(record['algorithms'])}: undo the change, or "
        "raise the version in teleloader_shared/algorithms.py"
    )


@pytest.mark.parametrize("case", CASES)
def test_each_case_is_recorded_with_the_versions_of_this_release(url: str, case: str) -> None:
    """A raised version requires that the states are recorded again, so that later changes are noticed too."""
    expected = versions_of(algorithms_of(loader_of(case, url)))
    records = [json.loads(file.read_text()) for file in RECORDED if file.stem == case]
    assert any(record["algorithms"] == expected for record in records), "run python -m tests.compatibility"


def test_each_algorithm_is_recorded() -> None:
    """No algorithm can change unnoticed."""
    recorded = {name for file in RECORDED for name in json.loads(file.read_text())["algorithms"]}
    assert recorded == set(ALGORITHMS)
