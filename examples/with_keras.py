"""Training with Keras 3, with the torch or the JAX backend.

    teleloader-server --demo                                 # in one terminal
    KERAS_BACKEND=torch python examples/with_keras.py        # in another
    KERAS_BACKEND=jax python examples/with_keras.py          # or with JAX; torch is then not needed

Difference from the torch version: the lines that create the loaders. Keras accepts instances of torch's DataLoader, so
the loader is imported from ``teleloader.torch``. Without torch, a generator yields NumPy batches without end, and
``fit`` needs ``steps_per_epoch``.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import keras

import teleloader
from teleloader import RemoteDataset


def endless(loader: teleloader.DataLoader) -> Iterator[Any]:
    """Yield the batches of all epochs as tuples, which Keras requires."""
    while True:
        yield from map(tuple, loader)


def train(url: str, epochs: int) -> None:
    """Train a classifier of handwritten digits."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Flatten(), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(3e-3), loss=loss, metrics=["accuracy"])
    options: dict[str, Any] = {"batch_size": 64, "drop_last": True}
    quiet: dict[str, Any] = {"verbose": 0}  # its type is inferred from the default "auto"
    train_set, test_set = RemoteDataset(url, "digits-train"), RemoteDataset(url, "digits-test")

    if keras.backend.backend() == "torch":
        from teleloader.torch import DataLoader

        model.fit(DataLoader(train_set, shuffle=True, seed=0, **options), epochs=epochs, shuffle=False, **quiet)
        _, accuracy = model.evaluate(DataLoader(test_set, **options), **quiet)
    else:
        options["output"] = "numpy"
        loader = teleloader.DataLoader(train_set, shuffle=True, seed=0, **options)
        model.fit(endless(loader), steps_per_epoch=len(loader), epochs=epochs, shuffle=False, **quiet)
        loader = teleloader.DataLoader(test_set, **options)
        _, accuracy = model.evaluate(endless(loader), steps=len(loader), **quiet)
    print(f"{keras.backend.backend()}: {int(model.optimizer.iterations)} steps, test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs (default: %(default)s)")
    options = parser.parse_args()
    train(options.url, options.epochs)
