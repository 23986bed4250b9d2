"""Lengths of a dataset's samples: validation, digest, and padding of batches."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.balance import MAX_TOKENS
from teleloader_shared.text import short

_CHUNK: Final = 2**20
"""Lengths that are converted to 64 bits at a time, so that a memory-mapped file is not copied."""


class Lengths:
    """Lengths of all samples of a dataset, such as numbers of tokens, or costs. Equal if the digests are equal.

    Args:
        given: 1-D array or sequence of positive integers; or the path of a .npy file, which is memory-mapped.
        count: Number of samples.

    Raises:
        ValueError: If the lengths are invalid, or the file cannot be read.

    Example:
        >>> Lengths([3, 1, 4], 3).longest
        4
    """

    def __init__(self, given: Any, count: int) -> None:
        values = _array_in(os.fspath(given)) if isinstance(given, str | os.PathLike) else np.asarray(given)
        if values.ndim != 1 or (values.dtype.kind not in "iu" and len(values)):
            raise ValueError(
                f"lengths must be a 1-D array of integers, got shape {values.shape} and dtype {values.dtype}"
            )
        if len(values) != count:
            raise ValueError(f"lengths must have one number per sample: got {len(values)} for {count} samples")
        self.values = values
        """The lengths, of any integer type."""
        self.longest = 0
        """Length of the longest sample; 0 without samples."""
        self.longest_sample = 0
        """Index of the longest sample, the first one of several."""
        self.total = 0
        """Sum of all lengths."""
        hasher = hashlib.blake2b(f"teleloader lengths {count}".encode(), digest_size=16)
        for start in range(0, count, _CHUNK):
            chunk = values[start : start + _CHUNK]
            if (wrong := (chunk < 1) | (chunk > MAX_TOKENS)).any():
                place = int(np.argmax(wrong))
                raise ValueError(
                    f"lengths must be in [1, 2**40], got {chunk[place]} for sample {start + place}: use 1 for an empty "
                    "sample"
                )
            if (longest := int(chunk.max())) > self.longest:
                self.longest, self.longest_sample = longest, start + int(chunk.argmax())
            self.total += int(chunk.sum(dtype=np.int64))
            hasher.update(chunk.astype("<i8").tobytes())
        self.digest = hasher.hexdigest()
        """Digest of the lengths as 32 hexadecimal digits; independent of the integer type."""

    def __len__(self) -> int:
        return len(self.values)

    def of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lengths of samples, int64 of the shape of `indices`."""
        found: NDArray[np.int64] = self.values[indices].astype(np.int64)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lengths) and other.digest == self.digest

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Lengths({short(self.values[:4].tolist())}, {len(self)}, digest={self.digest!r})"


def padding_fraction(lengths: int, padded: int) -> float | None:
    """Return the fraction of padding in batches; None without batches.

    Args:
        lengths: Sum of the lengths of all samples.
        padded: Sum of (samples x longest sample) over all batches.
    """
    return 1 - lengths / padded if padded else None


def padding_of(batches: Iterable[NDArray[np.int64]], lengths: Lengths) -> float | None:
    """Return the fraction of padding in batches of sample indices; None without batches."""
    found = [lengths.of(batch) for batch in batches]
    tokens = sum(int(each.sum()) for each in found)
    return padding_fraction(tokens, sum(len(each) * int(each.max(initial=0)) for each in found))


def _array_in(path: str) -> NDArray[Any]:
    try:
        found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise ValueError(f"cannot read lengths from {path!r}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"cannot read lengths from {path!r}: expected a .npy file of integers ({error})") from None
    if not isinstance(found, np.ndarray):
        raise ValueError(f"cannot read lengths from {path!r}: expected a .npy file, got a .npz file")
    return found
