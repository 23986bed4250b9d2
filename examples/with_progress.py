"""Progress of a training in the terminal: steps, data wait, throughput and remaining time, with rich or with tqdm.

    teleloader-server --demo                        # in one terminal, or on another machine
    python examples/with_progress.py                # in another; --bar tqdm uses tqdm instead of rich

A high data wait means that data loading is the bottleneck: `teleloader stats` then shows the cause.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from teleloader import DataLoader, RemoteDataset


def steps_with_rich(loader: DataLoader[Any], epochs: int) -> Iterator[Any]:
    """Yield the batches of all epochs, and show a progress bar of rich on stdout."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("wait {task.fields[wait_pct]:.0f} %, {task.fields[mb_s]:.1f} MB/s, ETA"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=epochs * len(loader), **loader.stats().postfix())
        for _ in range(epochs):
            for batch in loader:
                yield batch
                progress.update(task, advance=1, **loader.stats().postfix())


def steps_with_tqdm(loader: DataLoader[Any], epochs: int) -> Iterator[Any]:
    """Yield the batches of all epochs, and show a progress bar of tqdm on stderr, which includes the remaining time."""
    from tqdm import tqdm

    with tqdm(total=epochs * len(loader), desc="training") as bar:
        for _ in range(epochs):
            for batch in loader:
                yield batch
                bar.set_postfix(loader.stats().postfix(), refresh=False)
                bar.update()


def train(url: str, epochs: int, bar: str) -> None:
    """Train a classifier of handwritten digits; print the loss, and the data wait of the last epoch."""
    torch.manual_seed(0)
    loader = DataLoader(RemoteDataset(url, "digits-train"), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    steps = steps_with_rich(loader, epochs) if bar == "rich" else steps_with_tqdm(loader, epochs)
    losses = []
    for images, labels in steps:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    stats = loader.stats()
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    print(f"last epoch: {stats.steps} steps in {stats.elapsed:.2f} s, data wait {stats.waited_share:.0%} of the time")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs (default: %(default)s)")
    parser.add_argument("--bar", choices=["rich", "tqdm"], default="rich", help="library (default: %(default)s)")
    options = parser.parse_args()
    train(options.url, options.epochs, options.bar)
