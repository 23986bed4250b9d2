"""``python -m tests.chaos``: faults of all kinds against two servers and three consumers, decided by a seed."""

from __future__ import annotations

import argparse
import secrets
import sys
from typing import Final

from rich.console import Console

from tests.chaos import report
from tests.chaos.run import run
from tests.chaos.schedule import plan

DEFAULT_MINUTES: Final = 1.0
PIPED_WIDTH: Final = 120


def main() -> int:
    """Run from the command line; return 1 if the run found a problem."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, help="seed of all random choices (default: a random one)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help=f"duration of fault injection (default: {DEFAULT_MINUTES:g})")
    length.add_argument("--epochs", type=int, help="inject faults until each consumer has loaded this number of epochs")
    parser.add_argument("--plan-only", action="store_true", help="print the schedule of faults, and exit")
    chosen = parser.parse_args()
    seed = secrets.randbelow(10**6) if chosen.seed is None else chosen.seed
    minutes = chosen.minutes or DEFAULT_MINUTES
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    if chosen.plan_only:
        for fault in plan(seed, 60 * minutes):
            console.print(str(fault), highlight=False)
        return 0
    with report.progress(console) as tell:
        outcome = run(seed, None if chosen.epochs else 60 * minutes, chosen.epochs, tell)
    report.show(outcome, console)
    if outcome.failed:
        length_again = f"--epochs {chosen.epochs}" if chosen.epochs else f"--minutes {minutes:g}"
        console.print(f"again: python -m tests.chaos --seed {seed} {length_again}", highlight=False)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main())
