"""Train a small classifier of handwritten digits on batches of a loader server.

In one terminal:    teleloader-server --demo --num-workers 2
In another:         python examples/train_digits.py

If torch is installed, the model is a torch module and batches contain tensors; otherwise both use NumPy. The exit
status is 0 if the test accuracy is above 95 %.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from teleloader import DataLoader, RemoteDataset, ServerUnavailable

PIXELS, HIDDEN, CLASSES = 64, 128, 10
LEARNING_RATE, MOMENTUM = 0.1, 0.9  # initial learning rate; it decreases linearly to zero
SUFFICIENT = 0.95

Array = Any  # torch.Tensor or numpy.ndarray, as --output selects


class Classifier(Protocol):
    """Interface between model and training loop."""

    def step(self, images: Array, labels: Array, learning_rate: float) -> float:
        """Update the parameters with one batch; return the loss before the update."""
        ...

    def predict(self, images: Array) -> Array:
        """Return the most likely class of each image."""
        ...


class TorchClassifier:
    """A multilayer perceptron with one hidden layer."""

    def __init__(self, seed: int) -> None:
        import torch  # here, because the import takes seconds and NumpyClassifier does not need it

        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(PIXELS, HIDDEN),
            torch.nn.ReLU(),
            torch.nn.Linear(HIDDEN, CLASSES),
        )
        self.loss = torch.nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=MOMENTUM)

    def step(self, images: Array, labels: Array, learning_rate: float) -> float:
        """Update the parameters with one batch; return the loss before the update."""
        loss = self.loss(self.model(centred(images)), labels)
        self.optimizer.param_groups[0]["lr"] = learning_rate
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    def predict(self, images: Array) -> Array:
        """Return the most likely class of each image."""
        return self.model(centred(images)).argmax(1)


class NumpyClassifier:
    """The same perceptron in NumPy, with a hand-written gradient."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)

        def weights(inputs: int, outputs: int) -> NDArray[np.float32]:
            return generator.normal(0, (2 / inputs) ** 0.5, (inputs, outputs)).astype(np.float32)

        def bias(outputs: int) -> NDArray[np.float32]:
            return np.zeros(outputs, np.float32)

        self.parameters = [weights(PIXELS, HIDDEN), bias(HIDDEN), weights(HIDDEN, CLASSES), bias(CLASSES)]
        self.velocities = [np.zeros_like(parameter) for parameter in self.parameters]

    def step(self, images: Array, labels: Array, learning_rate: float) -> float:
        """Update the parameters with one batch; return the loss before the update."""
        inputs, hidden, scores = self._forward(images)
        rows = np.arange(len(labels))
        scores -= scores.max(axis=1, keepdims=True)
        log_probabilities = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        loss = -log_probabilities[rows, labels].mean()

        to_scores = np.exp(log_probabilities)  # gradient of softmax and cross entropy: probability minus label
        to_scores[rows, labels] -= 1
        to_scores /= len(labels)
        to_hidden = (to_scores @ self.parameters[2].T) * (hidden > 0)
        gradients = [inputs.T @ to_hidden, to_hidden.sum(axis=0), hidden.T @ to_scores, to_scores.sum(axis=0)]
        for parameter, velocity, gradient in zip(self.parameters, self.velocities, gradients, strict=True):
            velocity *= MOMENTUM
            velocity += gradient
            parameter -= learning_rate * velocity
        return float(loss)

    def predict(self, images: Array) -> Array:
        """Return the most likely class of each image."""
        return self._forward(images)[-1].argmax(axis=1)

    def _forward(self, images: Array) -> tuple[Array, Array, Array]:
        first, first_bias, second, second_bias = self.parameters
        inputs = centred(images).reshape(len(images), PIXELS)
        hidden = np.maximum(inputs @ first + first_bias, 0)
        return inputs, hidden, hidden @ second + second_bias


def centred(images: Array) -> Array:
    """Return `images` normalized to about zero mean and unit variance."""
    return (images - 0.3) / 0.4


@dataclass(frozen=True)
class Result:
    """Result of a training run."""

    batches: int
    samples: int
    seconds: float
    """Wall time of the training loop, data wait included."""

    right: int
    tested: int

    @property
    def accuracy(self) -> float:
        """Fraction of the test images that were classified correctly."""
        return self.right / self.tested

    def __str__(self) -> str:
        return (
            f"{self.batches:,} batches, {self.samples:,} samples in {self.seconds:.1f} s: "
            f"{self.batches / self.seconds:,.0f} batches/s, {self.samples / self.seconds:,.0f} samples/s\n"
            f"test accuracy {self.accuracy:.1%} ({self.right} of {self.tested} images)"
        )


def train(options: argparse.Namespace, console: Console) -> Result:
    """Train with a progress bar per epoch, then test once."""
    model: Classifier = TorchClassifier(options.seed) if options.output == "torch" else NumpyClassifier(options.seed)
    loader = DataLoader(
        RemoteDataset(options.url, "digits-train"),
        batch_size=options.batch_size,
        shuffle=True,
        seed=options.seed,
        rank=options.rank,
        world_size=options.world_size,
        output=options.output,
    )
    batches, samples = 0, 0
    all_batches = options.epochs * len(loader)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("batches, loss {task.fields[loss]:.3f}"),
    )
    started = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        for epoch in range(1, options.epochs + 1):
            bar = progress.add_task(f"epoch {epoch:2}", total=len(loader), loss=float("nan"))
            for images, labels in loader:
                loss = model.step(images, labels, LEARNING_RATE * (1 - batches / all_batches))
                batches += 1
                samples += len(labels)
                progress.update(bar, advance=1, loss=loss)
    seconds = time.perf_counter() - started
    # every rank tests on all test images
    test_loader = DataLoader(RemoteDataset(options.url, "digits-test"), batch_size=128, output=options.output)
    return Result(batches, samples, seconds, *correct(model, test_loader))


def correct(model: Classifier, loader: Iterable[tuple[Array, Array]]) -> tuple[int, int]:
    """Return the number of correctly classified images and the number of images."""
    right = tested = 0
    for images, labels in loader:
        right += int((model.predict(images) == labels).sum())
        tested += len(labels)
    return right, tested


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    default_output = "torch" if importlib.util.find_spec("torch") else "numpy"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    add("--epochs", type=int, default=10, help="number of epochs (default: %(default)s)")
    add("--batch-size", type=int, default=64, help="samples per batch and rank (default: %(default)s)")
    add("--rank", type=int, default=0, help="rank of this process (default: %(default)s)")
    add("--world-size", type=int, default=1, help="number of ranks (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of order, augmentation and model (default: %(default)s)")
    add(
        "--output",
        choices=("torch", "numpy"),
        default=default_output,
        help="train with torch or NumPy (default: torch if it is installed; here: %(default)s)",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 0 if the test accuracy is sufficient, else 1."""
    console = Console()
    result = train(parsed(arguments), console)
    console.print(str(result), highlight=False)
    if result.accuracy > SUFFICIENT:
        return 0
    console.print(f"test accuracy too low: expected more than {SUFFICIENT:.0%}", style="red")
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerUnavailable as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)  # the exit status that shells report after Ctrl-C
