"""Random augmentation: a recomputed batch is equal, whichever worker computes it.

With TELELOADER_TEST_FRAMEWORKS=1, albumentations must be installed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from tests.conftest import StartServer
from tests.examples.running import need_framework

MODULE = "tests.end_to_end.augmenting"


@pytest.mark.parametrize("seeding", ["batch", "sample"])
@pytest.mark.parametrize("dataset", ["Noisy", "Images"])
def test_batches_do_not_depend_on_the_workers(
    tmp_path: Path, start_server: StartServer, dataset: str, seeding: str
) -> None:
    """Servers with one forked worker, and with two that build the dataset themselves, compute the same batches."""
    if dataset == "Images":
        need_framework("albumentations")
    epochs = []
    for start_method, workers in (("fork", "1"), ("spawn", "2")):
        config = tmp_path / f"{start_method}.toml"
        config.write_text(
            f'[datasets.it]\nfactory = "{MODULE}:{dataset}"\nseeding = "{seeding}"\nstart_method = "{start_method}"\n'
        )
        server = start_server("--config", str(config), "--num-workers", workers)
        loader = DataLoader(RemoteDataset(server.url), 4, output="numpy", shuffle=True, seed=2)
        epochs.append([[np.array(batch) for batch in loader] for _ in range(2)])
    (first, second), again = epochs
    for one, other in zip([*first, *second], [*again[0], *again[1]], strict=True):
        np.testing.assert_array_equal(one, other)
    assert len({batch.tobytes() for batch in [*first, *second]}) == 20, "each batch has its own random numbers"
