"""Data-parallel training with Ray Train, on two workers.

    teleloader-server --demo                 # in one terminal
    python examples/with_ray_train.py        # in another

Difference from the torch version: the line that creates the loader, and no ``prepare_data_loader``, which would replace
the loader by torch's. The loader reads rank and world size from torch.distributed, which Ray Train initializes, and
divides each epoch. To copy batches to the worker's device, pass ``device=ray.train.torch.get_device()``.
"""

import argparse
import tempfile
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from teleloader import DataLoader, RemoteDataset


def train(config: dict[str, Any]) -> None:
    """Train a classifier of handwritten digits, in each worker."""
    loader = DataLoader(RemoteDataset(config["url"], "digits-train"), batch_size=32, shuffle=True, seed=0)
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(config["epochs"]):
        samples, total = 0, 0.0
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples += len(labels)
            total += float(loss.detach()) * len(labels)
        ray.train.report({"samples": samples, "loss": total / samples})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="number of epochs (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = TorchTrainer(
            train, train_loop_config=vars(options), scaling_config=ray.train.ScalingConfig(num_workers=2),
            run_config=ray.train.RunConfig(storage_path=folder),
        ).fit()  # fmt: skip
    print(f"{result.metrics['samples']} samples on each worker, loss {result.metrics['loss']:.3f}")
