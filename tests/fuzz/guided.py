"""Fuzzing of frames with atheris, guided by code coverage: ``python -m tests.fuzz.guided N SEED FILE``.

It runs in a separate process, because libFuzzer never returns; findings are written to FILE as a pickle.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["teleloader_shared", "teleloader"]):
    from teleloader.errors import exception_of  # noqa: F401 - for its instrumentation
    from teleloader_shared import codec  # noqa: F401

from tests.fuzz import frames
from tests.fuzz.mutation import MOST_BYTES
from tests.fuzz.watching import CPU_LIMIT, Watch

LIBRARY_SHARE = 0.3
"""Fraction of mutations by libFuzzer itself."""
SLOWER = 5
"""Factor by which instrumented code may be slower."""


def main(executions: int, seed: int, result: Path) -> None:
    """Run the fuzzer, which exits the process."""
    watch = Watch(frames.read, frames.REFUSALS, most_cpu=SLOWER * CPU_LIMIT)

    def execute(data: bytes) -> None:
        if watch.executions >= executions:
            result.write_bytes(pickle.dumps((watch.executions, watch.outcomes, watch.findings)))
            sys.stdout.flush()
            os._exit(0)
        watch.execute(watch.executions, data)

    corpus = result.with_suffix(".corpus")
    corpus.mkdir()
    for number, frame in enumerate(frames.corpus()):
        (corpus / str(number)).write_bytes(frame)
    options = [f"-seed={seed % 2**32}", f"-max_len={2 * MOST_BYTES}", "-rss_limit_mb=4096", "-verbosity=0"]
    options += [f"-artifact_prefix={corpus}/", f"-report_slow_units={2**20}"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], execute, custom_mutator=_mutate)
    with watch.on():
        atheris.Fuzz()


def _mutate(data: bytes, most: int, seed: int) -> bytes:
    random = Random(seed)
    if random.random() > LIBRARY_SHARE:
        return frames.mutate(random, data)[:most]
    changed: bytes = atheris.Mutate(data, most)
    return frames.repaired(changed)[:most] if random.random() < 0.8 else changed


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
