"""Ask pip-audit for known vulnerabilities of pinned packages: `audit.py REQUIREMENTS...`.

The exit code is 0 when each was looked up and has none, 1 when one has some, and 75 when the advisories could not be
asked: that is no pass. (pip-audit itself takes a package index that has no advisories for one that knows of none.)
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

NOT_AUDITED = 75
"""EX_TEMPFAIL of sysexits.h."""


def verdict(dependencies: Iterable[Mapping[str, Any]]) -> tuple[int, str]:
    """The exit code and a sentence, from what pip-audit found out."""
    found = list(dependencies)
    bad = [
        f"{one['name']} {one['version']} ({vulnerability['id']}, fixed in {', '.join(vulnerability['fix_versions'])})"
        for one in found
        for vulnerability in one.get("vulns", ())
    ]
    if bad:
        return 1, f"known vulnerabilities: {'; '.join(bad)}"
    skipped = [one["name"] for one in found if "skip_reason" in one]
    if skipped or not found:
        return NOT_AUDITED, f"NOT AUDITED, advisories unavailable for: {', '.join(skipped) or 'all'}"
    return 0, f"{len(found)} packages were looked up, and none has a known vulnerability"


def audited(requirements: str) -> tuple[int, str]:
    """The verdict on a file of pinned requirements."""
    command = [
        sys.executable, "-m", "pip_audit", "--requirement", requirements, "--no-deps", "--disable-pip",
        "--progress-spinner", "off", "--format", "json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        return verdict(json.loads(done.stdout)["dependencies"])
    except (ValueError, KeyError):
        return NOT_AUDITED, f"NOT AUDITED, pip-audit failed: {done.stderr.strip().splitlines()[-1:]}"


def main() -> int:
    """Audit each file; the worst exit code."""
    codes = []
    for requirements in sys.argv[1:]:
        code, sentence = audited(requirements)
        print(f"{requirements}: {sentence}")
        codes.append(code)
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
