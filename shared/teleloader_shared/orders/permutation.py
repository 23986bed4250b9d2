"""A shuffle that is evaluated only where it is asked.

`Permutation(N, key)` is one of the orders of `range(N)`, chosen by `key`. Asking for a batch of positions costs time in
the batch and nothing in `N`: no list of `N` indices is ever made, so an epoch of 2**62 samples starts as fast as one
of ten, and any worker on any machine can answer for any position on its own.

How it is computed (all of it is part of the resumable state: a change here changes the order of runs under way):

    stream = SHAKE-128("teleloader permutation 1" | key, 16 bytes | N, 8 bytes), read as little-endian 64-bit words

Up to `SORTED_UP_TO` positions, the first N words of the stream are sorted, and the order in which they come is the
permutation (Black & Rogaway's prefix cipher). Above, it is a Feistel network on the pairs (high, low) with
position = high * b + low, where b = 2**k, k = bit_length(N - 1) // 2, and a = ceil(N / b) is the number of highs:

    round 2i:      high = (high + scale(mix(low  * M[2i]   + A[2i]),   a)) mod a
    round 2i + 1:  low  = (low  + scale(mix(high * M[2i+1] + A[2i+1]), b)) mod b

    M[j] = word 2j of the stream with bit 0 set, A[j] = word 2j + 1, all arithmetic modulo 2**64
    mix(t) = (t ^ (t >> 32)) * 0xBF58476D1CE4E5B9       (half a splitmix64 finaliser, M[j] being the other half)
    scale(h, a) = ((h >> w) * a) >> (64 - w)            (top bits -> [0, a) without a division; w = bit_length(a))
    scale(h, b) = h >> (64 - k)                         (the same for a power of two)

The network permutes a * b >= N numbers; a result >= N is put through it again until it is < N (cycle walking). Since
a * b - N < b, that happens less than once in sqrt(N / 2) evaluations.

Why a * b numbers and not the next power of two: there, almost half of the results may have to walk, and a batch waits
for its longest walk. Measured for batches of 256 at N = 2**19 + 1: 9.1 passes through the network against 1.4, 178 us
against 43. It also rids the network of a flaw: with XOR on two halves it can only give even permutations when N is a
power of two >= 16, whereas turning an even number of lows round by one is an odd one.

Why the small lengths are sorted: a network mixes few bits slowly. Even with ideal round functions, the distribution of
8 rounds over the orders of 8 positions (computed exactly) is told from the uniform one after some 1,300 keys, and about
28 rounds are needed to withstand 10**8. Sorting random words has no such limit, and up to this length building the
table (8 KiB) costs about as much as one batch through the network.

Why 8 rounds: the next number above the smallest that passes. For lengths from 257 to 10**5, with consecutive keys and
with random ones, tests of fixed points, cycles, ascents, serial correlation (of neighbours, and of positions b apart),
displacement, batch means, marginals and parity reject 2 and 4 rounds at every length (positions b apart stay
correlated), and 6 rounds at 272 and 512, within 5,000 keys or fewer. They reject 8 rounds nowhere, with 60,000 keys at
257 and 512, 30,000 at 1025 and 1056, and 150 at 10**5. `tests/shared/test_permutation.py` repeats them on a smaller
scale, and shows that they can fail.

Limits: at most 2**128 of the N! orders can occur. The shuffle is meant to pass for random, not to keep a secret:
nothing here is meant to withstand an adversary.

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
    """A pseudo-random order of `range(length)`, the same for the same `key` on every machine and for ever.

    Args:
        length: How many positions there are, 0 to 2**62.
        key: Which order, 0 to 2**128 - 1. Keys need not look random: 0, 1, 2 ... give unrelated orders, and so does
            the same key with another length.

    An instance never changes after it was made: threads may share it.
    """

    __slots__ = ("_key", "_length", "_order")

    def __init__(self, length: int, key: int) -> None:
        if not 0 <= length <= MAX_LENGTH:
            raise ValueError(f"length must be in [0, 2**62], was {length}")
        if not 0 <= key < 2**KEY_BITS:
            raise ValueError(f"key must be in [0, 2**{KEY_BITS}), was {key}")
        self._length = length
        self._key = key
        self._order: _Sorted | _Feistel = (_Sorted if length <= SORTED_UP_TO else _Feistel)(length, key)

    @property
    def length(self) -> int:
        """Number of positions."""
        return self._length

    @property
    def key(self) -> int:
        """Number that selects the order."""
        return self._key

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the elements at these positions, in a new array of the same shape.

        Raises:
            ValueError: A position is negative, or not below `length`.
            TypeError: `positions` is not an int64 array. (Converting would round floats without a word.)
        """
        if positions.dtype != np.int64:
            raise TypeError(f"positions must be an int64 array, was {positions.dtype}")
        flat = positions.reshape(-1)
        # As unsigned numbers the negative ones are the largest of all, so that one pass looks for both mistakes.
        if flat.size and int(flat.view(np.uint64).max()) >= self._length:
            wrong = int(flat.min()) if flat.min() < 0 else int(flat.max())
            raise ValueError(f"positions must be in [0, {self._length}), one was {wrong}")
        return self._order.take(flat).reshape(positions.shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self._length}, key={self._key:#x})"


def _key_stream(length: int, key: int, words: int) -> NDArray[np.uint64]:
    """The first random words that belong to this key and this length."""
    message = b"teleloader permutation 1" + key.to_bytes(16, "little") + length.to_bytes(8, "little")
    return np.frombuffer(hashlib.shake_128(message).digest(8 * words), dtype="<u8").astype(np.uint64)


class _Sorted:
    """The whole order in a table, for lengths that are too small to be mixed by a network."""

    __slots__ = ("_table",)

    def __init__(self, length: int, key: int) -> None:
        # Stable, so that even two equal words (one key in 2**45) would be put in the same order everywhere.
        self._table = np.argsort(_key_stream(length, key, length), kind="stable").astype(np.int64)

    def take(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._table[positions]


class _Feistel:
    """The network of the module's docstring.

    Its constants are kept as 0-d uint64 arrays: a ufunc takes them in half the time that it needs to convert a scalar
    (0.4 against 0.7 us, on a path of seventy ufunc calls), and array arithmetic wraps silently where that of scalars
    warns.
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
        # It ends: each walk follows a cycle of the network that comes back to its start, which is < length.
        while (walkers := (values >= self._length).nonzero()[0]).size:
            values[walkers] = self._permute(values[walkers])
        return values.view(np.int64)

    def _permute(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One evaluation of the network on numbers below a * b."""
        # A batch is small, so what this costs is the number of ufunc calls and not what they do: each works in place,
        # on scratch that lives for this call only (threads share the instance).
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
            # high mod a, for high < 2a: where a is too much to take away, the difference wraps and is the larger.
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
    """Let the upper half of each number decide over the lower, then both over the top bits; in place."""
    np.right_shift(hashed, _MIX_SHIFT, scratch)
    np.bitwise_xor(hashed, scratch, hashed)
    np.multiply(hashed, _MIX_FACTOR, hashed)
