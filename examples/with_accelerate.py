"""Training with Hugging Face accelerate, in one or several processes.

    teleloader-server --demo                                            # in one terminal
    python examples/with_accelerate.py                                  # in another
    torchrun --nproc-per-node 2 examples/with_accelerate.py             # or with two ranks
    accelerate launch --num_processes 2 examples/with_accelerate.py     # or with two accelerators

As with torch's DataLoader, ``prepare`` divides the batches among the processes and copies them to the device, and
``accumulate`` and ``gather_for_metrics`` know the end of the epoch. Differences from the torch version: the two lines
that create the loaders, and ``register_for_checkpointing``, which adds the loader's position to ``save_state``, so that
``load_state`` resumes in the middle of an epoch. For torchrun without accelerators, set ACCELERATE_USE_CPU=true. Two
processes repeat 123 of the 1,541 samples, because accelerate fills the last batch of each process.
"""

import argparse
import gc
import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from teleloader import DataLoader, RemoteDataset


def train(accelerator: Accelerator, url: str, epochs: int) -> None:
    """Train a classifier of handwritten digits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train_loader = DataLoader(RemoteDataset(url, "digits-train"), batch_size=64, shuffle=True, seed=0)
    test_loader = DataLoader(RemoteDataset(url, "digits-test"), batch_size=64)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    accelerator.register_for_checkpointing(train_loader)

    for epoch in range(epochs):
        samples = torch.zeros((), device=accelerator.device)
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
            samples += len(labels)
        total: Any = accelerator.reduce(samples)
        accelerator.print(f"epoch {epoch}: {int(total)} samples on all ranks")

    with torch.no_grad():
        right, tested = torch.zeros((), device=accelerator.device), 0
        for images, labels in test_loader:
            guesses, truth = accelerator.gather_for_metrics((model(images).argmax(1), labels))
            right += (guesses == truth).sum()
            tested += len(truth)
    accelerator.print(f"test accuracy {int(right) / tested:.3f} on {tested} images")

    if accelerator.num_processes == 1:
        with tempfile.TemporaryDirectory() as folder:
            batches = iter(train_loader)
            next(batches)
            accelerator.save_state(folder)
            expected = next(batches)
            accelerator.load_state(folder)
            same = all(torch.equal(*pair) for pair in zip(next(iter(train_loader)), expected, strict=True))
            accelerator.print(f"load_state continues with the batch after save_state: {same}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs (default: %(default)s)")
    options = parser.parse_args()
    processes = Accelerator()
    train(processes, options.url, options.epochs)
    gc.collect()  # With any loader: DDP's reference cycles would keep gloo's threads alive, which can abort the exit.
    processes.end_training()
