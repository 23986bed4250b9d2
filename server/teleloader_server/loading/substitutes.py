"""Samples of a batch that are skipped or replaced because the dataset raised an exception; without a dataset."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from teleloader_server.loading.failures import message_of, type_of
from teleloader_server.loading.tasks import Indices, Task, key_of
from teleloader_shared.codec import Substituted, Substitution
from teleloader_shared.orders.replacement import replacement

MAX_REPLACEMENTS: Final = 16
"""Number of replacements that may fail at one position before the exception is raised."""
MAX_MESSAGE: Final = 500
"""Maximum length of the text of an exception in characters."""
MAX_MESSAGES: Final = 16
"""Number of substitutions of a batch with the message of the exception; further ones have only its type."""


class Substitutes:
    """Indices of a batch, in which failed samples are skipped or replaced.

    Args:
        task: Task of the batch, with the substitutions of an earlier computation.
        listed: Indices of the batch.
    """

    def __init__(self, task: Task, listed: Indices) -> None:
        self._task = task
        self.listed: Final = listed
        self._replacements: defaultdict[int, list[int]] = defaultdict(list)
        """Replacements so far, by position: dataset indices, or places in `listed` if they are of the same batch."""
        self._found: dict[int, Substitution] = {}
        if task.substituted is not None:
            self._found = {each.position: each for each in task.substituted.substitutions}
        self._skipped = sum(each.replacement is None for each in self._found.values())

    def substitute(self, position: int, error: Exception) -> bool:
        """Skip or replace the sample at a position.

        Args:
            position: Position in `listed`.
            error: First exception of the sample at this position.

        Returns:
            False if this is impossible: the batch has no sample left, `MAX_REPLACEMENTS` failed, or the order has no
            candidates for a replacement.
        """
        replaced = None
        if self._task.spec.on_error == "replace":
            replaced = self._replacement(position, error)
            if replaced is None:
                return False
        self._found[position] = Substitution(position, key_of(self.listed[position]), replaced, _text(error))
        self._skipped += replaced is None
        return self._skipped < len(self.listed)

    def _replacement(self, position: int, error: Exception) -> int | str | None:
        """Return the index of the next replacement: of the dataset in seeded order, of the same batch in other orders.

        Replacements in a mixture are samples of the same source, so that the counts of the sources do not change.

        Replacements of a client-side sampler are samples of its batch, because the sampler may exclude others, such as
        those of a validation split. Replacements in length-balanced batches are samples of the same batch, too, whose
        lengths are similar. Positions that failed are no candidates.
        """
        task, tried = self._task, self._replacements[position]
        mixture = task.spec.mixture
        candidates: Sequence[int] = range(task.length)
        if task.spec.order == "client" or task.spec.balance is not None:
            failed = {position, *self._found, *tried}
            candidates = [place for place in range(len(self.listed)) if place not in failed]
        elif mixture is not None:
            candidates = mixture.range_of(self.listed[position])
        if len(tried) == MAX_REPLACEMENTS or not candidates:
            return None
        _, epoch, batch = task.batch_id
        place = replacement(task.spec.seed, epoch, task.spec.rank, batch, position, len(tried), len(candidates))
        found = candidates[place]
        tried.append(found)
        if task.spec.balance is not None:
            return int(self.listed[found])
        if task.spec.order != "client":
            return found
        key = key_of(self.listed[found])
        if key is None:
            error.add_note('on_error="replace" requires indices that are integers or strings: use on_error="skip"')
        return key

    def coordinate(self, position: int) -> int:
        """Return the last coordinate of the random seed at a position: 0 for the listed sample, > 0 for a replacement.

        A function of the record alone, so that a batch that is computed again has the same random numbers.
        """
        found = self._found.get(position)
        if found is None or found.replacement is None:
            return 0
        if self._task.spec.order != "client" and isinstance(found.replacement, int):
            return found.replacement + 1
        places = (place for place, index in enumerate(self.listed) if key_of(index) == found.replacement)
        return next(places, -1) + 1

    def skips(self, position: int) -> bool:
        """Return True if the sample at a position is skipped."""
        return position in self._found and self._found[position].replacement is None

    def __getitem__(self, position: int) -> Any:
        """Index to fetch for a position that is not skipped."""
        return self.listed[position] if position not in self._found else self._found[position].replacement

    def items(self) -> Iterator[tuple[int, Any]]:
        """Return position and index of each sample to fetch: without skipped ones, and with replacements."""
        for position in range(len(self.listed)):
            if not self.skips(position):
                yield position, self[position]

    @property
    def indices(self) -> Indices:
        """Indices of `items`, of the type of the batch's indices."""
        return self._typed([index for _, index in self.items()])

    def alone(self, position: int) -> Indices:
        """Return the index to fetch for a position, as the only one of a batch."""
        return self._typed([self[position]])

    def _typed(self, indices: list[Any]) -> Indices:
        return np.array(indices, np.int64) if isinstance(self.listed, np.ndarray) else indices

    def remaining(self, padding: int) -> int:
        """Return how many of the last `padding` samples of the batch were not skipped."""
        return sum(position >= len(self.listed) - padding for position, _ in self.items())

    def record(self) -> Substituted | None:
        """Return the substitutions; None if there are none."""
        found = [self._found[position] for position in sorted(self._found)]
        # the header of a frame is small: many long messages would make the batch fail
        rest = [each._replace(error=each.error.partition(":")[0]) for each in found[MAX_MESSAGES:]]
        return Substituted(len(self.listed), found[:MAX_MESSAGES] + rest) if found else None


def _text(error: Exception) -> str:
    text = f"{type_of(error)}: {message_of(error)}"[:MAX_MESSAGE]
    return text.encode("utf-8", "backslashreplace").decode()[:MAX_MESSAGE]
