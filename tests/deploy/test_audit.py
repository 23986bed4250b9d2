""".ci/audit.py: a failed lookup of advisories is not a pass."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from tests.conftest import ROOT

GOOD = {"name": "click", "version": "8.1.0", "vulns": []}
BAD = {"name": "h11", "version": "0.14.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["0.16.0"]}]}
UNKNOWN = {"name": "numpy", "skip_reason": "Dependency not found on PyPI and could not be audited: numpy (1.26.0)"}


@pytest.mark.parametrize(
    ("dependencies", "code", "words"),
    [
        ([GOOD], 0, "1 packages were looked up"),
        ([GOOD, BAD], 1, "h11 0.14.0 (PYSEC-1, fixed in 0.16.0)"),
        ([BAD, UNKNOWN], 1, "known vulnerabilities"),
        ([GOOD, UNKNOWN], 75, "NOT AUDITED, advisories unavailable for: numpy"),
        ([], 75, "NOT AUDITED"),
    ],
)
def test_only_what_was_looked_up_passes(dependencies: list[dict[str, Any]], code: int, words: str) -> None:
    """A package without any audit result does not count as a package without vulnerabilities."""
    audit = runpy.run_path(str(ROOT / ".ci" / "audit.py"))
    found, sentence = audit["verdict"](dependencies)
    assert found == code
    assert words in sentence
