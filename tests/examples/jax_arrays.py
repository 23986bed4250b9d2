"""Rules for batches of JAX arrays: ``python -m tests.examples.jax_arrays RULE URL`` (see test_frameworks.py)."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from teleloader import DataLoader, RemoteDataset


def first_types(url: str) -> dict[str, str]:
    """Return the dtype of each array in a first batch."""
    batch = next(iter(DataLoader(RemoteDataset(url, "types"), batch_size=4, output="jax")))
    assert batch["str"] == ["0", "1", "2", "3"]
    for name in ("bool", "uint8", "int64", "float64", "bfloat16", "float8_e4m3fn"):
        values = np.asarray(batch[name]).astype(np.float64)
        assert (values == np.array([[0], [1], [1 if name == "bool" else 2], [1 if name == "bool" else 3]])).all(), name
    return {name: str(leaf.dtype) for name, leaf in batch.items() if isinstance(leaf, jax.Array)}


def expected_types() -> dict[str, str]:
    """Return the dtypes to which JAX converts the same arrays in this process."""
    import ml_dtypes

    names = ("bool", "uint8", "int32", "int64", "uint64", "float16", "float32", "float64", "complex128")
    arrays: dict[str, Any] = {name: np.zeros(3, name) for name in names}
    arrays |= {name: np.zeros(3, getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn")}
    arrays |= {"int": np.zeros(3, np.int64), "float": np.zeros(3, np.float64)}  # as default_collate has them
    return {name: str(jnp.array(array).dtype) for name, array in arrays.items()}


def types_are_those_that_jax_gives_them(url: str) -> None:
    """Check that 64-bit types become 32-bit ones, and that bfloat16 and float8 are kept."""
    types = first_types(url)
    assert types == expected_types()
    assert (types["int64"], types["int"], types["float64"], types["uint64"]) == ("int32", "int32", "float32", "uint32")
    assert (types["bfloat16"], types["float8_e4m3fn"]) == ("bfloat16", "float8_e4m3fn")


def types_are_wide_with_jax_enable_x64(url: str) -> None:
    """Check that 64-bit types are kept with jax_enable_x64."""
    jax.config.update("jax_enable_x64", True)
    types = first_types(url)
    assert types == expected_types()
    assert (types["int64"], types["int"], types["float64"]) == ("int64", "int64", "float64")


def the_context_manager_of_x64_holds_for_batches(url: str) -> None:
    """Check that batches are 64-bit arrays where JAX's own arrays are."""
    with jax.enable_x64(True):
        assert first_types(url) == expected_types()


def an_array_that_is_kept_does_not_change(url: str) -> None:
    """Check that a kept array does not change when its receive buffer is reused."""
    loader = DataLoader(RemoteDataset(url, "large"), batch_size=1, output="jax")
    kept = [batch for _ in range(3) for batch in loader]
    assert len(kept) == 120
    for number, batch in enumerate(kept):
        assert (np.asarray(batch) == number % 40).all(), number


def a_sampler_gives_batches(url: str) -> None:
    """Check that a batch sampler works without torch's BatchSampler."""
    loader = DataLoader(RemoteDataset(url, "types"), batch_size=4, sampler=list(range(7)), output="jax")
    assert len(loader) == 2
    assert [batch["int"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6]]


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
