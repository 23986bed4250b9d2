"""A consumer's record of its batches, and a checker that compares it with the expected batches.

A history is a text file to which a consumer appends lines:

- ``begin EPOCH K`` - a process starts, or resumes from a saved state, at batch K;
- ``batch EPOCH K CRC WAIT`` - the process's K-th batch of the epoch arrived, after WAIT seconds;
- ``saved EPOCH K`` - a state was saved whose next batch is K;
- ``end EPOCH`` - the iterator ended;
- ``left FDS THREADS`` - at the process's end, descriptors and threads that the loader did not release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

MAX_TOLD: Final = 10
"""Maximum number of described violations; all are counted."""


@dataclass
class Verdict:
    """Result of the check of a history."""

    batches: int = 0
    epochs: int = 0
    """Complete epochs."""
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    """Batches with unexpected bytes."""
    misplaced: int = 0
    """Unexpected ends, beginnings and batches of an epoch."""
    resumed: int = 0
    repeated: int = 0
    """Batches that arrived again after a resume from a state saved before them, which is correct."""
    left: int = 0
    """Increase of a process's descriptors and threads from start to end."""
    worst_wait: float = 0.0
    told: list[str] = field(default_factory=list)

    @property
    def violations(self) -> int:
        """Return the number of violations."""
        return self.lost + self.doubled + self.wrong + self.misplaced + self.left

    def tell(self, what: str) -> None:
        """Describe a violation."""
        if len(self.told) < MAX_TOLD:
            self.told.append(what)


class Checker:
    """Checker of a history.

    Args:
        expected: The CRCs of an epoch's batches, in order.
    """

    def __init__(self, expected: Callable[[int], Sequence[int]]) -> None:
        self.verdict = Verdict()
        self._expected = expected
        self._epoch = 0
        self._enter(0)
        self._place = 0
        """Number of the next expected batch."""
        self._saved = (0, 0)
        self._begun = False

    def read(self, line: str) -> None:
        """Check the next line."""
        match line.split():
            case ["begin", epoch, k]:
                self._begin(int(epoch), int(k))
            case ["batch", epoch, k, crc, wait]:
                self._batch(int(epoch), int(k), int(crc), float(wait))
            case ["saved", epoch, k]:
                self._saved = (int(epoch), int(k))
            case ["end", epoch]:
                self._end(int(epoch))
            case ["left", descriptors, threads]:
                self.verdict.left += max(0, int(descriptors)) + max(0, int(threads))
                if int(descriptors) > 0 or int(threads) > 0:
                    self.verdict.tell(f"a consumer left {descriptors} descriptors and {threads} threads")
            case _:
                raise ValueError(f"no line of a history: {line!r}")

    def finish(self) -> Verdict:
        """Check the end of the history, after its last line."""
        if self._place:
            self._misplaced(f"the history ends at batch {self._place} of epoch {self._epoch}")
        return self.verdict

    def _enter(self, epoch: int) -> None:
        self._epoch, self._place = epoch, 0
        self._crcs = self._expected(epoch)
        self._where = {crc: k for k, crc in enumerate(self._crcs)}

    def _begin(self, epoch: int, k: int) -> None:
        reached = (self._epoch, self._place)
        if self._begun:
            self.verdict.resumed += 1
        self._begun = True
        if epoch == self._epoch + 1 and k == 0 and self._place == len(self._crcs):
            self._end(self._epoch)  # the process ended before it recorded the end of the epoch
        elif not self._saved <= (epoch, k) <= reached:
            self._misplaced(f"begins at {(epoch, k)}: {self._saved} was saved, and {reached} reached")
            self._enter(epoch)
        elif epoch != self._epoch:
            self.verdict.epochs -= 1  # it ends once more, for its state was saved before its end
            self._enter(epoch)
        self.verdict.repeated += max(0, self._place - k)
        self._place = k

    def _batch(self, epoch: int, k: int, crc: int, wait: float) -> None:
        verdict, place = self.verdict, self._place
        verdict.batches += 1
        verdict.worst_wait = max(verdict.worst_wait, wait)
        here = f"at batch {k} of epoch {epoch}"
        if epoch != self._epoch:
            self._misplaced(f"{here}: epoch {self._epoch} is not over")
            return
        if place < len(self._crcs) and self._crcs[place] == crc:
            self._place += 1
            return
        found = self._where.get(crc)
        if found is None:
            verdict.wrong += 1
            verdict.tell(f"{here} came bytes that no batch of the epoch has")
            self._place = min(place + 1, len(self._crcs))
        elif found < place:
            verdict.doubled += 1
            verdict.tell(f"{here} came batch {found} again")
        else:
            verdict.lost += found - place
            verdict.tell(f"{here} came batch {found}: {found - place} are missing")
            self._place = found + 1

    def _end(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._misplaced(f"epoch {epoch} ends, and epoch {self._epoch} is not over")
            return
        missing = len(self._crcs) - self._place
        if missing:
            self.verdict.lost += missing
            self.verdict.tell(f"epoch {epoch} ends and {missing} batches are missing")
        self.verdict.epochs += 1
        self._enter(epoch + 1)

    def _misplaced(self, what: str) -> None:
        self.verdict.misplaced += 1
        self.verdict.tell(what)


def check(lines: Iterable[str], expected: Callable[[int], Sequence[int]]) -> Verdict:
    """Compare a whole history with the expected batches."""
    checker = Checker(expected)
    for line in lines:
        checker.read(line)
    return checker.finish()
