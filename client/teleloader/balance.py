"""`LengthBalance`: batches of samples of similar length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from teleloader_shared.balance import BalanceSpec
from teleloader_shared.errors import InvalidSpec
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.orders.plan import check_limit
from teleloader_shared.text import short

DEFAULT_STEPS: Final = 64
"""Steps of all ranks per window."""
DEFAULT_WINDOW: Final = 8192
"""Samples per window with `max_tokens`, rounded up to a multiple of the group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBalance:
    """Batches of samples of similar length, as the `balance` argument of a `DataLoader`.

    The epoch's order is cut into windows, and the samples of each window are sorted by length and divided into
    batches. Larger windows have less padding, and smaller ones are closer to a random order. The dataset states the
    lengths in its attribute or method `sample_lengths`: a 1-D array of positive integers, or the path of a .npy file.

    Raises:
        InvalidSpec: If a value is out of range.

    Example:
        >>> loader = DataLoader(
        ...     dataset, batch_size=32, shuffle=True, seed=7, balance=LengthBalance()
        ... )  # doctest: +SKIP
        >>> loader = DataLoader(
        ...     dataset, shuffle=True, seed=7, balance=LengthBalance(max_tokens=16_384)
        ... )  # doctest: +SKIP
    """

    window: int | None = None
    """Samples that are sorted together, over all ranks; None (the default) is 64 steps of all ranks, and with
    `max_tokens` 8192 samples."""
    max_tokens: int | None = None
    """Maximum of (samples x longest sample) of a batch, in the unit of the lengths; None (the default) for batches of
    `batch_size` samples."""
    group: int | None = None
    """With `max_tokens`, number of successive batches of similar length; None (the default) is `world_size`. To resume
    on another number of ranks with equal costs in each step, use a multiple of all of them."""

    def __post_init__(self) -> None:
        """Validate the values."""
        if self.group is not None and self.max_tokens is None:
            raise InvalidSpec(
                f"group requires max_tokens, got group={self.group!r}: with batch_size, the steps of all ranks are the "
                "groups. Remove group"
            )
        for name in ("window", "max_tokens", "group"):
            value: Any = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InvalidSpec(f"{name} must be a positive integer or None, got {short(value)}")

    def spec(self, info: DatasetInfo, batch_size: int, world_size: int) -> BalanceSpec:
        """Return the parameters for servers.

        Args:
            info: Description of the dataset.
            batch_size: Samples per batch and rank, if `max_tokens` is None.
            world_size: Number of ranks.

        Raises:
            InvalidSpec: If the dataset states no lengths, the window is not a multiple of the group, or the longest
                sample exceeds `max_tokens`.
        """
        if info.lengths is None:
            raise InvalidSpec(
                f"balance requires the lengths of the samples, and dataset {info.name!r} states none: define its "
                "attribute sample_lengths, a 1-D integer array or the path of a .npy file"
            )
        if self.max_tokens is None:
            group = batch_size * world_size
            return BalanceSpec(info.lengths, DEFAULT_STEPS * group if self.window is None else self.window, group)
        group = world_size if self.group is None else self.group
        window = -(-DEFAULT_WINDOW // group) * group if self.window is None else self.window
        limited = BalanceSpec(info.lengths, window, group, self.max_tokens)
        check_limit(limited, info.length or 0, info.longest or 0, info.longest_sample or 0)
        return limited
