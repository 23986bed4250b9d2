"""A JAX loop: ``output="jax"`` makes each batch a tree of JAX arrays, on the default device.

    teleloader-server --demo             # in one terminal, or on another machine
    python examples/with_jax.py          # in another

torch is not needed, neither here nor on the server. As everywhere in JAX, int64 and float64 become 32 bits wide unless
``jax_enable_x64`` is set. ``drop_last=True`` gives all batches one shape, so that the step is compiled once.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from teleloader import DataLoader, RemoteDataset

Parameters = list[tuple[Any, Any]]


def layers(key: Any, *sizes: int) -> Parameters:
    """The weights and biases of a multilayer perceptron."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(key, (inputs, outputs)) * (2 / inputs) ** 0.5, jnp.zeros(outputs))
        for key, inputs, outputs in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def scores(parameters: Parameters, images: Any) -> Any:
    """How likely each digit is, as logits."""
    *hidden, (weights, bias) = parameters
    values = (images.reshape(len(images), -1) - 0.3) / 0.4
    for hidden_weights, hidden_bias in hidden:
        values = jax.nn.relu(values @ hidden_weights + hidden_bias)
    return values @ weights + bias


def loss_of(parameters: Parameters, images: Any, labels: Any) -> Any:
    """The cross entropy of a batch."""
    return -jnp.take_along_axis(jax.nn.log_softmax(scores(parameters, images)), labels[:, None], axis=1).mean()


@jax.jit
def step(parameters: Parameters, images: Any, labels: Any) -> tuple[Parameters, Any]:
    """Learn from one batch; the new parameters, and the loss before."""
    loss, slopes = jax.value_and_grad(loss_of)(parameters, images, labels)
    return jax.tree.map(lambda value, slope: value - 0.2 * slope, parameters, slopes), loss


def train(url: str, epochs: int) -> None:
    """Learn to tell handwritten digits apart."""
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
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the loader server (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="(default: %(default)s)")
    options = parser.parse_args()
    train(options.url, options.epochs)
