"""Training with JAX: with ``output="jax"``, batches contain JAX arrays on the default device.

    teleloader-server --demo             # in one terminal, or on another machine
    python examples/with_jax.py          # in another

Neither client nor server needs torch. As everywhere in JAX, int64 and float64 become 32-bit types unless
``jax_enable_x64`` is set. With ``drop_last=True`` all batches have the same shape, so the step is compiled once.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from teleloader import DataLoader, RemoteDataset

Parameters = list[tuple[Any, Any]]


def layers(key: Any, *sizes: int) -> Parameters:
    """Return initial weights and biases of a multilayer perceptron."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(key, (inputs, outputs)) * (2 / inputs) ** 0.5, jnp.zeros(outputs))
        for key, inputs, outputs in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def scores(parameters: Parameters, images: Any) -> Any:
    """Return the logits of each image."""
    *hidden, (weights, bias) = parameters
    values = (images.reshape(len(images), -1) - 0.3) / 0.4
    for hidden_weights, hidden_bias in hidden:
        values = jax.nn.relu(values @ hidden_weights + hidden_bias)
    return values @ weights + bias


def loss_of(parameters: Parameters, images: Any, labels: Any) -> Any:
    """Return the cross entropy of a batch."""
    return -jnp.take_along_axis(jax.nn.log_softmax(scores(parameters, images)), labels[:, None], axis=1).mean()


@jax.jit
def step(parameters: Parameters, images: Any, labels: Any) -> tuple[Parameters, Any]:
    """Return updated parameters and the loss before the update."""
    loss, slopes = jax.value_and_grad(loss_of)(parameters, images, labels)
    return jax.tree.map(lambda value, slope: value - 0.2 * slope, parameters, slopes), loss


def train(url: str, epochs: int) -> None:
    """Train a classifier of handwritten digits."""
    train_loader = DataLoader(
        RemoteDataset(url, "digits-train"), batch_size=64, shuffle=True, drop_last=True, seed=0, output="jax"
    )
    test_loader = DataLoader(RemoteDataset(url, "digits-test"), batch_size=64, output="jax")

    parameters = layers(jax.random.key(0), 64, 128, 10)
    for epoch in range(epochs):
        losses = []
        for images, labels in train_loader:
            parameters, loss = step(parameters, images, labels)
            losses.append(loss)
        print(f"epoch {epoch}: {len(losses)} batches, loss {jnp.stack(losses).mean():.3f}")
    right = [scores(parameters, images).argmax(1) == labels for images, labels in test_loader]
    told = jnp.concatenate(right)
    print(f"test accuracy {told.mean():.3f} on {told.size} images")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs (default: %(default)s)")
    options = parser.parse_args()
    train(options.url, options.epochs)
