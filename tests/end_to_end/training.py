"""A training loop for whoever looks at the server meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from teleloader import DataLoader, RemoteDataset


@contextmanager
def training(dataset: RemoteDataset, step: float, **options: Any) -> Iterator[None]:
    """A training loop in a thread, which begins epoch after epoch and needs `step` seconds for each batch."""
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
