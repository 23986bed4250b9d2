"""Types of loaders and batches, checked by mypy (``make lint``) and pyright (nightly), not run."""

from __future__ import annotations

from typing import Any, assert_type

import torch

from teleloader import DataLoader, RemoteDataset

Pair = tuple[torch.Tensor, torch.Tensor]


def train(loader: DataLoader[Pair]) -> None:
    """A function that declares its batches accepts a loader, and iterates over such batches."""
    for batch in loader:
        assert_type(batch, Pair)
    assert_type(next(iter(loader)), Pair)


async def train_asynchronously(loader: DataLoader[Pair]) -> None:
    """``async for`` yields batches of the same type."""
    async for batch in loader:
        assert_type(batch, Pair)


def to_numbers(batch: Any) -> dict[str, int]:
    """A transform."""
    return {"samples": len(batch)}


class Numbers(DataLoader[int]):
    """Loader whose batches are integers."""


def check(remote: RemoteDataset, sampler: list[list[int]]) -> None:
    """Loaders of all kinds of arguments have batches of any type, unless the type is declared or known."""
    plain = DataLoader(remote, 4, shuffle=True)
    assert_type(plain, DataLoader[Any])
    train(plain)
    train(DataLoader(remote, batch_sampler=sampler, collate_fn="my_package.data:pad", output="numpy"))
    declared: DataLoader[Pair] = DataLoader(remote, 4)
    assert_type(declared, DataLoader[Pair])
    assert_type(DataLoader[int](remote), DataLoader[int])
    for number in Numbers(remote):
        assert_type(number, int)
    transformed = DataLoader(remote, device_transform=to_numbers)
    assert_type(transformed, DataLoader[dict[str, int]])
    train(transformed)  # type: ignore[arg-type] # its batches are not pairs


def unparameterized(loader: DataLoader) -> DataLoader[object]:
    """The class without a type of batches is that of any batches; loaders are covariant in the type."""
    pairs: DataLoader[Pair] = loader
    return pairs
