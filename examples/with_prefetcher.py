"""Training with a prefetcher around the loader, as in timm's scripts.

    teleloader-server --demo                                            # in one terminal
    python examples/with_prefetcher.py                                  # in another

Difference from the torch version: the line that creates the loader. The prefetcher copies and normalizes the next batch
on another CUDA stream while the model trains; on a CPU it only normalizes. It reads ``loader.sampler``,
``loader.dataset`` and ``len(loader)``. The loader's own ``device=`` and ``device_transform=`` do the same without a
prefetcher.
"""

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from teleloader import DataLoader, RemoteDataset


class Prefetcher:
    """Yields the batches of a loader on a device, each copied while the training loop uses the one before it."""

    def __init__(self, loader: DataLoader, device: torch.device, mean: float, std: float) -> None:
        self.loader, self.device, self.mean, self.std = loader, device, mean, std

    def __iter__(self) -> Iterator[Any]:
        cuda = self.device.type == "cuda"
        stream = torch.cuda.Stream() if cuda else None
        ready = None
        for images, labels in self.loader:
            with torch.cuda.stream(stream) if cuda else nullcontext():
                images = images.to(self.device, non_blocking=True).sub(self.mean).div_(self.std)
                labels = labels.to(self.device, non_blocking=True)
            if ready is not None:
                yield ready
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
            ready = images, labels
        if ready is not None:
            yield ready

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def sampler(self) -> Any:
        """Sampler of the loader."""
        return self.loader.sampler

    @property
    def dataset(self) -> Any:
        """Dataset of the loader."""
        return self.loader.dataset


def train(url: str, epochs: int) -> None:
    """Train a classifier of handwritten digits."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(
        RemoteDataset(url, "digits-train"),
        batch_size=64,
        shuffle=True,
        drop_last=True,
        pin_memory=device.type == "cuda",
    )
    batches = Prefetcher(loader, device, mean=0.3, std=0.4)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        right = 0
        for images, labels in batches:
            scores = model(images)
            optimizer.zero_grad()
            nn.functional.cross_entropy(scores, labels).backward()
            optimizer.step()
            right += int((scores.argmax(1) == labels).sum())
    samples = len(batches) * 64
    print(f"{samples} of {len(batches.dataset)} samples by {type(batches.sampler).__name__}, ", end="")
    print(f"training accuracy {right / samples:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs (default: %(default)s)")
    options = parser.parse_args()
    train(options.url, options.epochs)
