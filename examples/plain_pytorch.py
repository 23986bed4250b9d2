"""A PyTorch training loop; only the construction of the loaders differs from a script for torch.

    teleloader-server --demo                 # in one terminal, or on another machine
    python examples/plain_pytorch.py         # in another; --url is the URL of the server

All arguments of torch's DataLoader are accepted. If the server runs on another machine, this one needs torch and the
client (``pip install 'teleloader[torch]'``), but not the dataset or its files.
"""

import argparse

import torch
from torch import nn

from teleloader import DataLoader, RemoteDataset


def train(url: str, epochs: int) -> float:
    """Train a classifier of handwritten digits and return its test accuracy."""
    torch.manual_seed(0)

    # before: train_loader = torch.utils.data.DataLoader(train_set, batch_size=64, shuffle=True)
    #         test_loader = torch.utils.data.DataLoader(test_set, batch_size=256)
    train_loader = DataLoader(RemoteDataset(url, "digits-train"), batch_size=64, shuffle=True)
    test_loader = DataLoader(RemoteDataset(url, "digits-test"), batch_size=256)

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        samples, total = 0, 0.0
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            samples += len(labels)
            total += loss.item() * len(labels)
        print(f"epoch {epoch}: {samples} samples, loss {total / samples:.3f}")

    right = tested = 0
    with torch.no_grad():
        for images, labels in test_loader:
            right += int((model(images).argmax(1) == labels).sum())
            tested += len(labels)
    print(f"test accuracy {right / tested:.3f} on {tested} images")
    return right / tested


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs (default: %(default)s)")
    options = parser.parse_args()
    train(options.url, options.epochs)
