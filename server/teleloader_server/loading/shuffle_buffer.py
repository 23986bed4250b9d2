"""Shuffle buffer of a shard: shuffles a stream in blocks, so that its state is small and restoring it is bounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from teleloader_shared.orders.permutation import Permutation
from teleloader_shared.orders.seeding import derive


class ShuffleSettings(NamedTuple):
    """Size and seed of a shuffle buffer."""

    size: int
    """Number of samples in the buffer."""
    seed: int
    """Seed of the permutations; another one for each epoch and shard."""


class BufferState(NamedTuple):
    """Position in a shuffled stream."""

    block: int
    """Number of the current block."""
    drawn: int
    """Number of its samples that were yielded."""
    source: dict[str, Any]
    """Result of `snapshot` before the first sample of the block was read."""


class _Failed(NamedTuple):
    error: Exception


class ShuffleBuffer:
    """Iterator that yields the samples of a stream in shuffled order.

    The stream is divided into blocks of `size` samples, and each block is yielded in the order of a seeded permutation.
    Only block 1 is shorter, by a random number of samples: the limits of the blocks differ between seeds, so that a
    sample is not always shuffled with the same others. A stream of at most `size` samples is shuffled as a whole.

    While a block is yielded, the next samples are read, one for each yielded sample. The buffer thus holds `size`
    samples, and the consumer waits for more than one sample only at the start.

    A classical buffer (draw a random sample, and put the next one in its place) shuffles over longer distances. But
    some of its samples have been in the buffer for any length of time, so that it can be restored only by storing the
    samples, or by reading the stream from its start. In blocks, no sample that is older than two blocks is in the
    buffer: the state of the stream at the start of the current block, and less than 2 * `size` samples to read again,
    are sufficient.

    An exception of the stream takes the place of a sample: it is shuffled as the samples are, and raised in turn.

    Args:
        samples: The stream.
        settings: Size of the buffer, and seed.
        snapshot: Returns the state of the stream before its next sample; called with the number of each block before
            the block's first sample is read.
        progress: Callback, called for each sample that is read while the consumer waits for more than one.
        block: Number of the block that the stream starts with.
        drawn: Number of samples of this block that were yielded before, and are skipped.
    """

    def __init__(
        self,
        samples: Iterator[Any],
        settings: ShuffleSettings,
        snapshot: Callable[[int], dict[str, Any]],
        progress: Callable[[], object] = lambda: None,
        *,
        block: int = 0,
        drawn: int = 0,
    ) -> None:
        self._samples = samples
        self._size, self._seed = settings
        self._snapshot = snapshot
        self._progress = progress
        self._number = block - 1
        """Number of the current block."""
        self._drawn = 0
        self._source: dict[str, Any] = {}
        self._current: list[Any] = []
        """Remaining samples of the current block, in reverse order."""
        self._ahead: deque[Any] = deque()
        """Samples of later blocks, as read."""
        self._sources: deque[dict[str, Any]] = deque()
        """Snapshot of each later block of which samples were read."""
        self._unread = 0
        """Number of samples of the last of these blocks that were not read."""
        self._has_ended = False
        if drawn:
            self._restore(drawn)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._fill(self._size)
        while not self._current:
            if not self._ahead:
                raise StopIteration
            self._start_block()
        sample = self._current.pop()
        self._drawn += 1
        if isinstance(sample, _Failed):
            raise sample.error
        return sample

    @property
    def state(self) -> BufferState | None:
        """Position after the last yielded sample; None before the first one."""
        return None if self._drawn == 0 else BufferState(self._number, self._drawn, self._source)

    def _restore(self, drawn: int) -> None:
        """Read as many samples as were read when the `drawn`-th sample of the first block was yielded."""
        self._fill(self._length(self._number + 1))
        if self._sources:
            self._start_block()
        self._drawn = drawn
        del self._current[max(0, len(self._current) - drawn) :]
        self._fill(self._size - 1)

    def _length(self, block: int) -> int:
        """Return the number of samples of a block, unless the stream ends within it."""
        return 1 + derive("shuffle length", self._seed) % self._size if block == 1 else self._size

    def _fill(self, count: int) -> None:
        """Read samples until the buffer has `count` of them, or the stream ends."""
        missing = count - len(self._current) - len(self._ahead)
        while missing > 0 and not self._has_ended:
            self._read()
            missing -= 1
            if missing > 0:
                self._progress()

    def _read(self) -> None:
        if self._unread == 0:
            block = self._number + len(self._sources) + 1
            self._sources.append(self._snapshot(block))
            self._unread = self._length(block)
        try:
            sample = next(self._samples)
        except StopIteration:
            self._has_ended = True
            return
        except Exception as error:  # noqa: BLE001 - raised in its turn
            traceback = error.__traceback__
            # without this frame, which would keep the dataset in memory
            sample = _Failed(error.with_traceback(traceback and traceback.tb_next))
        self._ahead.append(sample)
        self._unread -= 1

    def _start_block(self) -> None:
        self._number += 1
        self._drawn = 0
        self._source = self._sources.popleft()
        length = min(self._length(self._number), len(self._ahead))
        samples = [self._ahead.popleft() for _ in range(length)]
        order = Permutation(length, derive("shuffle block", self._seed, self._number))(np.arange(length))
        self._current = [samples[place] for place in reversed(order.tolist())]
