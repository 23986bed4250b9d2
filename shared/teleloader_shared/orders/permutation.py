"""Random-access shuffle: a keyed pseudo-random permutation, computed separately for each position.

`Permutation(N, key)` is one of the permutations of `range(N)`, selected by `key`. The time to evaluate it at a batch of
positions depends on the size of the batch and not on `N`: no list of `N` indices is created, so an epoch of 2**62
samples starts as fast as one of ten, and any worker on any machine can evaluate any position independently.

Algorithm (part of the resumable state: any change here changes the sample order of existing training runs):

    stream = SHAKE-128("teleloader permutation 1" | key, 16 bytes | N, 8 bytes), read as little-endian 64-bit words

Up to `SORTED_UP_TO` positions, the permutation is the argsort of the first N words of the stream (Black & Rogaway's
prefix cipher). Above, it is a Feistel network on the pairs (high, low) with position = high * b + low, where b = 2**k,
k = bit_length(N - 1) // 2, and a = ceil(N / b) is the number of values of high:

    round 2i:      high = (high + scale(mix(low  * M[2i]   + A[2i]),   a)) mod a
    round 2i + 1:  low  = (low  + scale(mix(high * M[2i+1] + A[2i+1]), b)) mod b

    M[j] = word 2j of the stream with bit 0 set, A[j] = word 2j + 1, all arithmetic modulo 2**64
    mix(t) = (t ^ (t >> 32)) * 0xBF58476D1CE4E5B9       (half a splitmix64 finaliser, M[j] being the other half)
    scale(h, a) = ((h >> w) * a) >> (64 - w)            (top bits -> [0, a) without a division; w = bit_length(a))
    scale(h, b) = h >> (64 - k)                         (the same for a power of two)

The network permutes a * b >= N numbers; a result >= N is fed through it again until it is < N (cycle walking). Since
a * b - N < b, that happens less than once in sqrt(N / 2) evaluations.

Why a * b numbers and not the next power of two: with the latter, almost half of the results may need cycle walking, and
a batch takes as long as its longest walk. Measured for batches of 256 at N = 2**19 + 1: 9.1 passes through the network
against 1.4, 178 us against 43. It also avoids a flaw: a Feistel network with XOR on two halves produces only even
permutations when N is a power of two >= 16, whereas modular addition also produces odd ones.

Why small lengths are sorted: a network mixes few bits slowly. Even with ideal round functions, the distribution of 8
rounds over the permutations of 8 positions (computed exactly) is distinguishable from uniform after about 1,300 keys,
and about 28 rounds would be needed to pass with 10**8 keys. Sorting random words has no such limit, and up to this
length, building the table (8 KiB) costs about as much as evaluating the network for one batch.

Why 8 rounds: the next even number above the smallest that passes the tests. For lengths from 257 to 10**5, with
consecutive and with random keys, tests of fixed points, cycles, ascents, serial correlation (of neighbours, and of
positions b apart), displacement, batch means, marginals and parity reject 2 and 4 rounds at every length (positions b
apart stay correlated), and 6 rounds at 272 and 512, within 5,000 keys or fewer. They reject 8 rounds nowhere, with
60,000 keys at 257 and 512, 30,000 at 1025 and 1056, and 150 at 10**5. `tests/shared/test_permutation.py` repeats the
tests on a smaller scale, and shows that they can fail.

Limits: at most 2**128 of the N! permutations can occur. The shuffle is statistically random, not cryptographically
secure.

Sources: Black & Rogaway, "Ciphers with Arbitrary Finite Domains" (CT-RSA 2002), for all three methods: prefix cipher,
cycle walking, Feistel on a * b; Luby & Rackoff, "How to Construct Pseudorandom Permutations from Pseudorandom
Functions" (SIAM J. Comput. 17, 1988), for what the rounds do; Steele, Lea & Flood, "Fast Splittable Pseudorandom
Number Generators" (OOPSLA 2014), for the mixer.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_LENGTH: Final = 2**62
KEY_BITS: Final = 128
ROUNDS: Final = 8
SORTED_UP_TO: Final = 1024

_MIX: Final = 0xBF58476D1CE4E5B9


class Permutation:
    """Pseudo-random permutation of `range(length)`, reproducible from `key` across machines and versions.

    Instances are immutable and can be shared between threads.

    Args:
        length: Number of positions, 0 to 2**62.
        key: Selects the permutation, 0 to 2**128 - 1. Consecutive keys yield unrelated permutations, and so does the
            same key with another length.

    Raises:
        ValueError: If `length` or `key` is out of range.
    """

    __slots__ = ("_key", "_length", "_order")

    def __init__(self, length: int, key: int) -> None:
        if not 0 <= length <= MAX_LENGTH:
            raise ValueError(f"length must be in [0, 2**62], got {length}")
        if not 0 <= key < 2**KEY_BITS:
            raise ValueError(f"key must be in [0, 2**{KEY_BITS}), got {key}")
        self._length = length
        self._key = key
        self._order: _Sorted | _Feistel = (_Sorted if length <= SORTED_UP_TO else _Feistel)(length, key)

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the elements at `positions`, in a new int64 array of the same shape.

        Raises:
            ValueError: If a position is negative, or not below `length`.
            TypeError: If `positions` is not an int64 array: conversion would silently round floats.
        """
        if positions.dtype != np.int64:
            raise TypeError(f"positions must be an int64 array, got {positions.dtype}")
        flat = positions.reshape(-1)
        # Viewed as unsigned, negative numbers are the largest, so that one comparison finds both errors.
        if flat.size and int(flat.view(np.uint64).max()) >= self._length:
            wrong = int(flat.min()) if flat.min() < 0 else int(flat.max())
            raise ValueError(f"positions must be in [0, {self._length}), got {wrong}")
        return self._order.take(flat).reshape(positions.shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self._length}, key={self._key:#x})"


def _key_stream(length: int, key: int, words: int) -> NDArray[np.uint64]:
    """Return the first `words` pseudo-random 64-bit words for this key and length."""
    message = b"teleloader permutation 1" + key.to_bytes(16, "little") + length.to_bytes(8, "little")
    return np.frombuffer(hashlib.shake_128(message).digest(8 * words), dtype="<u8").astype(np.uint64)


class _Sorted:
    """Permutation stored as a table, for lengths too small for a Feistel network."""

    __slots__ = ("_table",)

    def __init__(self, length: int, key: int) -> None:
        # Stable, so that the result is the same everywhere even if two words are equal (one key in 2**45).
        self._table = np.argsort(_key_stream(length, key, length), kind="stable").astype(np.int64)

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._table[positions]


class _Feistel:
    """Feistel network with cycle walking, specified in the module's docstring.

    Constants are 0-d uint64 arrays: a ufunc call takes 0.4 us with them and 0.7 us with a scalar, which it has to
    convert, and an evaluation makes seventy calls. Also, array arithmetic wraps silently, scalar arithmetic warns.
    """

    __slots__ = ("_high_count", "_high_drop", "_high_keep", "_length", "_low_bits", "_low_drop", "_low_mask", "_rounds")

    def __init__(self, length: int, key: int) -> None:
        low_bits = (length - 1).bit_length() // 2
        high_count = -(-length >> low_bits)
        self._length = _constant(length)
        self._low_bits = _constant(low_bits)
        self._low_mask = _constant((1 << low_bits) - 1)
        self._low_drop = _constant(64 - low_bits)
        self._high_count = _constant(high_count)
        self._high_drop = _constant(high_count.bit_length())
        self._high_keep = _constant(64 - high_count.bit_length())
        words = [int(word) for word in _key_stream(length, key, 2 * ROUNDS)]
        keys = [(_constant(words[j] | 1), _constant(words[j + 1])) for j in range(0, len(words), 2)]
        self._rounds = tuple((*keys[i], *keys[i + 1]) for i in range(0, len(keys), 2))

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        values = self._permute(positions.view(np.uint64))
        # Terminates: each walk follows a cycle of the permutation that returns to its start, which is < length.
        while (walkers := (values >= self._length).nonzero()[0]).size:
            values[walkers] = self._permute(values[walkers])
        return values.view(np.int64)

    def _permute(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Evaluate the network once on numbers below a * b."""
        # Batches are small, so the number of ufunc calls dominates the time. Each call works in place, on scratch
        # arrays that are local to this call because threads share the instance.
        multiply, add, shift, minimum = np.multiply, np.add, np.right_shift, np.minimum
        high_count, high_drop, high_keep = self._high_count, self._high_drop, self._high_keep
        low_mask, low_drop = self._low_mask, self._low_drop
        high = shift(numbers, self._low_bits)
        low = np.bitwise_and(numbers, low_mask)
        hashed, scratch = np.empty_like(high), np.empty_like(high)
        for high_multiplier, high_addend, low_multiplier, low_addend in self._rounds:
            multiply(low, high_multiplier, hashed)
            add(hashed, high_addend, hashed)
            _mix(hashed, scratch)
            shift(hashed, high_drop, hashed)
            multiply(hashed, high_count, hashed)
            shift(hashed, high_keep, hashed)
            add(high, hashed, high)
            # high mod a, for high < 2a: if high < a, the difference high - a wraps and is the larger of the two.
            np.subtract(high, high_count, hashed)
            minimum(high, hashed, out=high)

            multiply(high, low_multiplier, hashed)
            add(hashed, low_addend, hashed)
            _mix(hashed, scratch)
            shift(hashed, low_drop, hashed)
            add(low, hashed, low)
            np.bitwise_and(low, low_mask, low)
        np.left_shift(high, self._low_bits, high)
        return np.bitwise_or(high, low, high)


def _constant(value: int) -> NDArray[np.uint64]:
    return np.array(value, dtype=np.uint64)


_MIX_FACTOR: Final = _constant(_MIX)
_MIX_SHIFT: Final = _constant(32)


def _mix(hashed: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    """Mix the upper half of each number into the lower half, then both into the top bits; in place."""
    np.right_shift(hashed, _MIX_SHIFT, scratch)
    np.bitwise_xor(hashed, scratch, hashed)
    np.multiply(hashed, _MIX_FACTOR, hashed)
