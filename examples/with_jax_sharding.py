"""Training with JAX on several devices: each batch is distributed over the devices.

    teleloader-server --demo                  # in one terminal, or on another machine
    python examples/with_jax_sharding.py      # in another: four simulated devices on a CPU

Difference from a torch loader: ``output="jax"`` and ``sharding=``, in place of a conversion of each batch with
``jax.make_array_from_process_local_data``, which the loader calls. With several processes, each loads its part of the
global batch: pass ``rank=jax.process_index(), world_size=jax.process_count()``.
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")  # before the import of jax

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from teleloader import DataLoader, RemoteDataset


def train(url: str, epochs: int) -> None:
    """Train a linear classifier of handwritten digits, with data parallelism."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    loader = DataLoader(
        RemoteDataset(url, "digits-train"), batch_size=64, shuffle=True, drop_last=True, seed=0, output="jax",
        sharding=NamedSharding(mesh, PartitionSpec("data")), rank=jax.process_index(), world_size=jax.process_count(),
    )  # fmt: skip

    def loss_of(weights: jax.Array, images: jax.Array, labels: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(images.reshape(len(images), -1) @ weights)
        return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()

    step = jax.jit(jax.value_and_grad(loss_of))
    weights = jax.device_put(jnp.zeros((64, 10)), NamedSharding(mesh, PartitionSpec()))
    for epoch in range(epochs):
        losses = []
        for images, labels in loader:
            loss, slopes = step(weights, images, labels)
            weights -= 0.5 * slopes
            losses.append(loss)
        shapes = {shard.data.shape for shard in images.addressable_shards}
        print(f"epoch {epoch}: loss {jnp.stack(losses).mean():.3f}, on {len(images.devices())} devices {shapes}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs (default: %(default)s)")
    options = parser.parse_args()
    train(options.url, options.epochs)
