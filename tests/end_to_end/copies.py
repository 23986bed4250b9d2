"""Script that sends a loader to child processes: ``python -m tests.end_to_end.copies METHOD URL TOKEN``.

METHOD is a start method of multiprocessing, ``joblib``, or ``torch`` for the spawned workers of torch's DataLoader.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from typing import Any

from teleloader import DataLoader, RemoteDataset


def load(loader: DataLoader) -> list[Any]:
    """Return the first epoch of a loader as JSON values."""
    return [[column.tolist() for column in batch] for batch in loader]


def put(loader: DataLoader, queue: Any) -> None:
    """Send the first epoch of a loader, or the error in its place, to the parent process."""
    try:
        queue.put(load(loader))
    except Exception as error:  # noqa: BLE001 - the parent waits for it
        queue.put(repr(error))


def loaded(method: str, loader: DataLoader) -> list[Any]:
    """Return the first epoch that a child process loads."""
    if method == "joblib":
        import joblib

        first, second = joblib.Parallel(n_jobs=2)([joblib.delayed(load)(loader)] * 2)
        assert first == second
        return list(first)
    if method == "torch":
        from torch.utils.data import DataLoader as TorchLoader

        return load(TorchLoader(loader.dataset, 4, num_workers=2, multiprocessing_context="spawn"))
    context: Any = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=put, args=(loader, queue))
    child.start()
    found: list[Any] = queue.get()
    child.join()
    return found


if __name__ == "__main__":
    method, url, *token = sys.argv[1:]
    output: Any = "torch" if method == "torch" else "numpy"
    dataset = RemoteDataset(url, "numbers", token=token[0] if token else None)
    print(json.dumps(loaded(method, DataLoader(dataset, 4, output=output))))
