"""``python -m tests.fuzz``: runs hostile inputs and prints the outcome. Exits with status 1 if a rule is broken."""

from __future__ import annotations

import argparse
import importlib.util
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Final

from tests.fuzz import endpoints, frames, states
from tests.fuzz.watching import Finding, Watch

PARTS: Final = ("frames", "states", "endpoints")
SHOWN: Final = 400
"""Printed bytes of an input; the command that reproduces it is printed too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = _parse(arguments)
    findings = 0
    for part in PARTS if options.part == "all" else (options.part,):
        if part == "endpoints":
            findings += endpoints.fuzz(options.executions, options.seed, options.seconds)
        elif part == "frames" and not options.unguided and importlib.util.find_spec("atheris") is not None:
            findings += _guided(options.executions, options.seed)
        else:
            module = frames if part == "frames" else states
            watch = Watch(module.read, module.REFUSALS)
            began = time.perf_counter()
            run(watch, module.mutate, options.seed, range(options.first, options.first + options.executions))
            how = f"own mutations; slowest {watch.slowest:.3f} s of CPU, largest {watch.largest / 2**20:.1f} MiB"
            _report(part, how, watch, time.perf_counter() - began, f"--seed {options.seed} --unguided")
            findings += len(watch.findings)
    return 1 if findings else 0


def run(watch: Watch, mutate: Callable[[Random], bytes], seed: int, numbers: range) -> None:
    """Run the executions with these numbers, each a function of seed and number, so that one can be repeated alone."""
    with watch.on():
        for number in numbers:
            watch.execute(number, mutate(Random(f"{seed}/{number}")))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("part", nargs="?", choices=(*PARTS, "all"), default="all", help="(default: all)")
    parser.add_argument(
        "--executions", type=int, default=20_000, metavar="N", help="executions of each part (default: 20000)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the inputs")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first execution")
    parser.add_argument("--seconds", type=int, default=120, help="time limit of schemathesis in seconds (default: 120)")
    parser.add_argument("--unguided", action="store_true", help="do not use atheris even if it is installed")
    return parser.parse_args(arguments)


def _guided(executions: int, seed: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result")
        began = time.perf_counter()
        command = [sys.executable, "-m", "tests.fuzz.guided", str(executions), str(seed), str(result)]
        code = subprocess.run(command, check=False).returncode
        if not result.exists():
            print(f"frames: atheris ended with exit status {code} before its executions were done")
            return 1
        watch = Watch(frames.read, frames.REFUSALS)
        watch.executions, watch.outcomes, watch.findings = pickle.loads(result.read_bytes())
        _report("frames", "guided by coverage, with atheris", watch, time.perf_counter() - began, None)
    return len(watch.findings)


def _report(part: str, how: str, watch: Watch, seconds: float, replay: str | None) -> None:
    print(
        f"{part}: {watch.executions:,} executions ({how}) in {seconds:.1f} s, {watch.executions / seconds:,.0f} a "
        f"second; {len(watch.outcomes)} distinct outcomes"
    )
    for outcome, count in watch.outcomes.most_common():
        print(f"  {count:>9,}  {outcome}")
    print(f"  {len(watch.findings)} findings")
    for finding in watch.findings.values():
        _print_finding(part, finding, replay)


def _print_finding(part: str, finding: Finding, replay: str | None) -> None:
    print(f"\n  {finding.rule}\n  {finding.details.rstrip()}\n  input, {len(finding.data):,} bytes:")
    if replay is None:
        print(f"    {finding.data.hex()}")
        return
    print(f"    {finding.data[:SHOWN]!r}\n  again: python -m tests.fuzz {part} {replay} --first {finding.execution} "
          "--executions 1")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
