"""Training with Lightning Fabric, in one or several processes.

    teleloader-server --demo                                            # in one terminal
    python examples/with_fabric.py                                      # in another
    python examples/with_fabric.py --devices 2                          # or with two processes

Difference from the torch version: the two lines that create the loaders. ``setup_dataloaders`` requires an instance of
torch's DataLoader, so the loader is imported from ``teleloader.torch``. With ``seed=``, the loader divides each epoch
among the processes; the test loader gets a DistributedSampler from Fabric.
"""

import argparse
from typing import Any

import lightning
import torch
from torch import nn

from teleloader import RemoteDataset
from teleloader.torch import DataLoader


def train(fabric: lightning.Fabric, url: str, epochs: int) -> None:
    """Train a classifier of handwritten digits."""
    fabric.seed_everything(0, verbose=False)
    train_loader = DataLoader(RemoteDataset(url, "digits-train"), batch_size=64, shuffle=True, seed=0)
    test_loader = DataLoader(RemoteDataset(url, "digits-test"), batch_size=64)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=3e-3))

    for _ in range(epochs):
        for images, labels in train_loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()

    with torch.no_grad():
        right = [model(images).argmax(1) == labels for images, labels in test_loader]
    accuracy: Any = fabric.all_reduce(torch.cat(right).float().mean())
    fabric.print(f"{epochs} epochs of {len(train_loader)} batches on each process, test accuracy {float(accuracy):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=1, help="number of processes (default: %(default)s)")
    options = parser.parse_args()
    processes = lightning.Fabric(accelerator="cpu", devices=options.devices)
    processes.launch()
    train(processes, options.url, options.epochs)
