"""Print which tests failed, if these may run again: when all tests ran, and no more than a few failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

MOST = 3
CACHE = Path(".pytest_cache/v")
RAN = 1
"""How pytest ends when all tests ran and some failed."""

if not (CACHE / "teleloader/exitstatus").exists() or not (CACHE / "cache/lastfailed").exists():
    sys.exit("the tests did not run to their end")
if (status := json.loads((CACHE / "teleloader/exitstatus").read_text())) != RAN:
    sys.exit(f"the tests did not run to their end: pytest's exit status was {status}")
failed = json.loads((CACHE / "cache/lastfailed").read_text())
if any("::" not in name for name in failed):
    sys.exit("tests could not be collected")
if len(failed) > MOST:
    sys.exit(f"{len(failed)} tests failed, which is no chance any more")
print(*failed, sep="\n")
