"""Packed sequences: documents are cut and joined to token sequences of a fixed length, without loss of tokens.

The epoch's order of the documents is cut into windows (`windows`). In each window, a document of n tokens is cut into
n // L *pieces* of L tokens, where L is the length of a sequence, and a last piece of the remaining tokens. The pieces
are packed into as few sequences as best-fit decreasing finds: from the longest to the shortest, each piece is added to
the sequence in which it leaves the least room. A document is therefore cut only if it is longer than a sequence, and a
sequence is padded only if no piece of the window fits. The pieces of a sequence are in the order of the epoch, and so
are the sequences of a window without shuffling; with shuffling, they are in a pseudo-random order. All choices are
functions of the lengths, the seed, the epoch and the number of the window.

Algorithm. Pieces of the same length, and sequences with the same room, are interchangeable, so that best fit is a
function of the number of pieces of each length, and proceeds in steps (`best_fit`) instead of piece by piece. Let the
current length be l, and r the least room of any sequence with r >= l. The best fit is a sequence with room r, then the
same sequence with room r - l, because r - l < r, and so on: it takes r // l pieces, and so do all others with room r.
One step therefore assigns up to (number of sequences with room r) * (r // l) pieces. The room that remains, r mod l, is
less than r / 2, so that a group of sequences with the same room is in at most log2(L) steps. Each length adds at most
three groups. The number of steps is O(D log L) for D different lengths in a window, and their number of sequences is
counted without assigning any piece (`PackedOrder.count`).

Source: Ding et al., "Fewer Truncations Improve Language Modeling" (ICML 2024), for best-fit packing; the steps are ours
and yield the same number of sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from teleloader_shared.lengths import Lengths
from teleloader_shared.orders.permutation import Permutation
from teleloader_shared.orders.seeding import derive
from teleloader_shared.orders.windows import Groups, Ints, Windows, first_groups
from teleloader_shared.packing import PackingSpec

Order = Callable[[Ints], Ints]
Step = tuple[int, int, int, int]
"""Piece length, room of the sequences, number of these sequences, and pieces that each of them takes."""


class Pieces(NamedTuple):
    """Pieces of documents in the sequences of a batch, in the order of the tokens; int64 arrays of shape (pieces,)."""

    sequences: Ints
    """Number of the sequence in the batch, ascending."""
    documents: Ints
    """Dataset index of the document."""
    starts: Ints
    """First token of the piece in the document."""
    stops: Ints
    """End of its tokens in the document."""

    @classmethod
    def of(cls, sequences: Iterable[Ints]) -> Pieces:
        """Combine sequences, arrays of shape (pieces, 3) with documents, starts and stops, to a batch."""
        listed = list(sequences)
        numbers = np.repeat(np.arange(len(listed)), np.array([len(each) for each in listed], np.int64))
        return cls(numbers, *np.concatenate([np.empty((0, 3), np.int64), *listed]).T)

    @property
    def distinct(self) -> Ints:
        """Dataset index of each document, once, in the order of first occurrence."""
        _, first = np.unique(self.documents, return_index=True)
        return self.documents[np.sort(first)]


@dataclass(frozen=True, slots=True)
class TokenCoverage:
    """Result of an audit of packed sequences: how often each token of each document occurs."""

    documents: int
    """Documents in the dataset."""
    tokens: int
    """Tokens in the dataset."""
    sequences: int
    """Sequences in all audited batches."""
    visits: int
    """Tokens in all audited batches, without padding."""
    missing_tokens: int
    """Tokens in no batch."""
    repeated_tokens: int
    """Visits to tokens that have been visited before."""
    missing: Ints
    """Dataset indices of documents with missing tokens, ascending."""
    repeated: Ints
    """Dataset indices of documents with repeated tokens, ascending."""
    padding_fraction: float
    """Fraction of padding in the sequences; 0 without sequences."""

    @property
    def exact(self) -> bool:
        """True if each token was visited exactly once."""
        return not self.missing_tokens and not self.repeated_tokens


def audit_tokens(batches: Iterable[Pieces], lengths: Lengths, sequence_length: int) -> TokenCoverage:
    """Find the tokens that are missing or repeated in batches of packed sequences.

    Takes about 100 bytes of memory per piece.

    Args:
        batches: Pieces of each batch (`Plan.pieces`).
        lengths: Lengths of the documents.
        sequence_length: Tokens in a sequence.

    Raises:
        IndexError: If a piece is not a part of a document.
    """
    sequences, found = 0, [np.empty((3, 0), np.int64)]
    for pieces in batches:
        sequences += int(pieces.sequences[-1]) + 1 if len(pieces.sequences) else 0
        found.append(np.stack(pieces[1:]))
    documents, starts, stops = (listed := np.concatenate(found, axis=1))[:, np.lexsort(listed[1::-1])]
    if len(documents) and not 0 <= documents[0] <= documents[-1] < len(lengths):
        raise IndexError(f"documents must be in [0, {len(lengths)}), got {documents[0]} to {documents[-1]}")
    whole = lengths.of(documents)
    if ((starts < 0) | (starts >= stops) | (stops > whole)).any():
        raise IndexError("pieces must be non-empty parts of documents")
    is_first = np.diff(documents, prepend=-1) != 0
    # ends of the tokens that earlier pieces of the document cover: a running maximum that starts again in each document
    base = np.cumsum(is_first) * (int(stops.max(initial=0)) + 1)
    reached = np.maximum.accumulate(base + stops) - base
    before = np.where(is_first, 0, np.concatenate([[0], reached[:-1]]))
    is_last = np.append(is_first[1:], True)[: len(documents)]
    lacking = np.maximum(starts - before, 0) + np.where(is_last, whole - reached, 0)
    twice = np.maximum(np.minimum(stops, before) - starts, 0)
    unseen = np.ones(len(lengths), bool)
    unseen[documents] = False
    visits = int((stops - starts).sum())
    missed = int(lacking.sum()) + int(lengths.of(np.flatnonzero(unseen)).sum())
    unseen[documents[lacking > 0]] = True
    return TokenCoverage(
        documents=len(lengths),
        tokens=lengths.total,
        sequences=sequences,
        visits=visits,
        missing_tokens=missed,
        repeated_tokens=int(twice.sum()),
        missing=np.flatnonzero(unseen),
        repeated=np.unique(documents[twice > 0]),
        padding_fraction=1 - visits / (sequences * sequence_length) if sequences else 0.0,
    )


class PackedOrder:
    """Packing of the windows of an epoch.

    Args:
        packing: Parameters.
        lengths: Lengths of the documents.
        order: Function that returns the dataset indices at positions of the epoch.
        seed: Seed of the epoch; None to keep the sequences of a window in the order of their first pieces.
    """

    def __init__(self, packing: PackingSpec, lengths: Lengths, order: Order, seed: int | None) -> None:
        self._length, self._lengths, self._order, self._seed = packing.sequence_length, lengths, order, seed
        self.windows = Windows(len(lengths), packing.window)

    def count(self, start: int, stop: int) -> Ints:
        """Return the number of sequences in each window from start to stop."""
        size = self.windows.size
        positions = np.arange(start * size, self.windows.bounds(stop - 1)[1], dtype=np.int64)
        whole, rest = np.divmod(self._lengths.of(self._order(positions)), self._length)
        found = np.add.reduceat(whole, np.arange(0, len(whole), size))
        for window in range(stop - start):
            steps = best_fit(_histogram(rest[window * size : (window + 1) * size]), self._length)
            found[window] += sum(sequences for _, room, sequences, _ in steps if room == self._length)
        return found

    def divide(self, window: int) -> list[Ints]:
        """Return the sequences of a window: int64 arrays of shape (pieces, 3) with documents, starts and stops."""
        documents = self._order(np.arange(*self.windows.bounds(window), dtype=np.int64))
        pieces = self._cut(documents)
        sizes = pieces[:, 2] - pieces[:, 1]
        sequences = np.empty(len(pieces), np.int64)
        longest_first = np.argsort(-sizes, kind="stable")
        sequences[longest_first] = _assign(best_fit(_histogram(sizes), self._length), self._length)
        sequences = self._places(window, sequences)[sequences]
        by_sequence = np.argsort(sequences, kind="stable")
        return np.split(pieces[by_sequence], np.flatnonzero(np.diff(sequences[by_sequence])) + 1)

    def _cut(self, documents: Ints) -> Ints:
        """Cut documents into pieces: int64 array of shape (pieces, 3)."""
        lengths = self._lengths.of(documents)
        numbers = -(-lengths // self._length)
        owners = np.repeat(np.arange(len(documents)), numbers)
        starts = (np.arange(len(owners)) - (np.cumsum(numbers) - numbers)[owners]) * self._length
        return np.stack([documents[owners], starts, np.minimum(starts + self._length, lengths[owners])], axis=1)

    def _places(self, window: int, sequences: Ints) -> Ints:
        """Return the place in the window of each sequence, given the sequence of each piece."""
        _, first_pieces = np.unique(sequences, return_index=True)
        places = np.empty_like(first_pieces)
        places[np.argsort(first_pieces)] = np.arange(len(places))
        if self._seed is None:
            return places
        return Permutation(len(places), derive("sequences", self._seed, window))(places)


def best_fit(pieces: Iterable[tuple[int, int]], capacity: int) -> Iterator[Step]:
    """Pack pieces by best-fit decreasing; yield the steps.

    Args:
        pieces: Different lengths of the pieces in [1, capacity], descending, and the number of pieces of each.
        capacity: Length of a sequence. Steps with this room are those of empty sequences, which are opened as needed.
    """
    rooms: list[int] = []
    """Rooms of the sequences that are neither empty nor full, ascending."""
    sequences: dict[int, int] = {}
    """Number of sequences with each of these rooms."""
    for length, number in pieces:
        first = last = bisect_left(rooms, length)
        changed: list[tuple[int, int]] = []
        while number and last < len(rooms):
            room = rooms[last]
            found, per_sequence = sequences[room], room // length
            taken = min(found, number // per_sequence)
            if not taken:
                taken, per_sequence = 1, number  # the last pieces do not fill a sequence
            if taken == found:
                del sequences[room]
                last += 1
            else:
                sequences[room] = found - taken
            number -= taken * per_sequence
            changed.append((room - per_sequence * length, taken))
            yield length, room, taken, per_sequence
        del rooms[first:last]
        most = capacity // length
        for taken, per_sequence in ((number // most, most), (1, number % most)):
            if taken and per_sequence:
                changed.append((capacity - per_sequence * length, taken))
                yield length, capacity, taken, per_sequence
        for room, taken in changed:
            if room in sequences:
                sequences[room] += taken
            elif room:
                sequences[room] = taken
                insort(rooms, room)


def _assign(steps: Iterable[Step], capacity: int) -> Ints:
    """Return the number of the sequence of each piece, from the longest to the shortest piece."""
    found: list[int] = []
    free: defaultdict[int, list[int]] = defaultdict(list)
    """Sequences by their room; the earliest ones are used first."""
    opened = 0
    for length, room, taken, per_sequence in steps:
        if room == capacity:
            used = list(range(opened, opened + taken))
            opened += taken
        else:
            used, free[room] = free[room][:taken], free[room][taken:]
        found += used if per_sequence == 1 else chain.from_iterable(zip(*repeat(used, per_sequence), strict=True))
        free[room - per_sequence * length] += used
    return np.array(found, np.int64)


def _histogram(lengths: Ints) -> Iterator[tuple[int, int]]:
    """Return the different positive lengths, descending, and the number of each."""
    found, numbers = np.unique(lengths[lengths > 0], return_counts=True)
    return zip(found[::-1].tolist(), numbers[::-1].tolist(), strict=True)


def packed_sequences(
    packing: PackingSpec, lengths: Lengths, epoch: int, seed: int | None, starts: Ints | None = None
) -> Groups[NDArray[np.int64]]:
    """Return the sequences of all ranks in an epoch, as arrays of shape (pieces, 3) with documents, starts and stops.

    Args:
        packing: Parameters.
        lengths: Lengths of the documents.
        epoch: Epoch number.
        seed: Seed of the loader; None for the order of the dataset.
        starts: Result of `prepared`; None to prepare the order.
    """
    found = _packed(packing, lengths, epoch, seed)
    return Groups(prepared(packing, lengths, epoch, seed) if starts is None else starts, found.divide)


@lru_cache(maxsize=8)
def prepared(packing: PackingSpec, lengths: Lengths, epoch: int, seed: int | None) -> Ints:
    """Prepare an epoch of packed sequences; the last results are kept.

    Returns:
        Number of the first sequence of each window, and the number of all sequences.
    """
    found = _packed(packing, lengths, epoch, seed)
    starts = first_groups(found.windows, found.count)
    starts.setflags(write=False)
    return starts


def _packed(packing: PackingSpec, lengths: Lengths, epoch: int, seed: int | None) -> PackedOrder:
    if seed is None:
        return PackedOrder(packing, lengths, lambda positions: positions, None)
    order = Permutation(len(lengths), derive("order", seed, epoch))
    return PackedOrder(packing, lengths, order, derive("packing", seed, epoch))
