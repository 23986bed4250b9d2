"""A training loop for tests that observe the server in the meantime."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from teleloader import DataLoader, RemoteDataset


@contextmanager
def training(dataset: RemoteDataset, step: float, **options: Any) -> Iterator[None]:
    """Run a training loop in a thread, for epoch after epoch, with `step` seconds per batch."""
    over = threading.Event()

    def train() -> None:
        loader = DataLoader(dataset, output="numpy", **options)
        while not over.is_set():
            for _ in loader:
                if over.wait(step):
                    break

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
