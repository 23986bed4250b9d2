"""Record the saved states of this release: ``python -m tests.compatibility``.

Existing files are kept: states of earlier releases must stay as those releases saved them. To replace the states of a
release that is not published yet, delete its folder first.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch

from teleloader_shared.algorithms import ALGORITHMS
from teleloader_shared.version import VERSION
from tests.compatibility.cases import BEFORE, CASES, algorithms_of, digest, hosted, loader_of
from tests.compatibility.test_saved_states import STATES


def recorded(case: str, url: str) -> dict[str, Any]:
    """Return a saved state of a case, the versions of the algorithms, and the digest of the batches that follow."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # states of samplers contain the global generators
        seed(5)
    loader = loader_of(case, url)
    for number, _ in enumerate(loader, 1):
        if number == BEFORE:
            break
    saved = loader.state_dict()
    resumed = loader_of(case, url)
    resumed.load_state_dict(saved)
    versions = {name: len(ALGORITHMS[name]) for name in sorted(algorithms_of(loader))}
    return {"algorithms": versions, "state": saved, "digest": digest(resumed)}


def main() -> None:
    """Write a file for each case that has none."""
    folder = STATES / VERSION
    folder.mkdir(parents=True, exist_ok=True)
    with hosted() as url:
        for case in CASES:
            file = folder / f"{case}.json"
            if not file.exists():
                file.write_text(json.dumps(recorded(case, url), indent=1) + "\n")
                print(file)


if __name__ == "__main__":
    main()
