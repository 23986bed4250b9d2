"""Decisions which samples of a batch are retried, skipped or replaced; without a dataset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import numpy as np

from teleloader_server.loading.tasks import Indices, Task
from teleloader_shared.codec import Substituted, Substitution
from teleloader_shared.orders.replacement import replacement

MAX_REPLACEMENTS: Final = 16
"""Number of replacements that may fail at one position before the exception is raised."""
_MAX_MESSAGE: Final = 500


class Substitutes:
    """Indices of a batch, in which failed samples are skipped or replaced.

    Args:
        task: Task of the batch, with the substitutions of an earlier computation.
        indices: Indices of the batch.
    """

    def __init__(self, task: Task, indices: Indices) -> None:
        self._task = task
        self._listed = indices
        self._attempts: Counter[int] = Counter()
        """Number of failed fetches of the current sample, by position."""
        self._replacements: Counter[int] = Counter()
        self._unexplained = 0
        """Number of failures of the batch for which no sample is to blame."""
        self._found: dict[int, Substitution] = {}
        if task.substituted is not None:
            self._found = {each.position: each for each in task.substituted.substitutions}
        self.indices: Indices
        """Indices to fetch: those of the batch, without skipped ones and with replacements."""
        self._update()

    def failed(self, errors: Mapping[int, Exception], raised: Exception) -> None:
        """Record the samples that failed, by position in `indices`, and decide what to fetch next.

        Args:
            errors: Exceptions of the failed samples.
            raised: Exception of the whole batch.

        Raises:
            Exception: `raised`, if no sample is left, too many replacements failed, or retries did not help although
                each sample can be fetched alone.
        """
        self._unexplained += not errors
        if self._unexplained > self._task.spec.error_retries:
            raise raised
        for place, error in errors.items():
            position = self._positions[place]
            self._attempts[position] += 1
            if self._attempts[position] > self._task.spec.error_retries:
                self._attempts[position] = 0
                self._found[position] = self._substitution(position, error, raised)
        self._update()
        if not self._positions:
            raise raised

    def _substitution(self, position: int, error: Exception, raised: Exception) -> Substitution:
        task, index = self._task, self._listed[position]
        other = None
        if task.spec.on_error == "replace":
            attempt = self._replacements[position]
            if attempt == MAX_REPLACEMENTS or not task.length:
                raise raised
            self._replacements[position] += 1
            _, epoch, batch = task.batch_id
            other = replacement(task.spec.seed, epoch, task.spec.rank, batch, position, attempt, task.length)
        known = int(index) if isinstance(index, int | np.integer) and -(2**63) <= index < 2**63 else None
        return Substitution(position, known, other, f"{type(error).__name__}: {error}"[:_MAX_MESSAGE])

    def _update(self) -> None:
        found, positions, indices = self._found, [], []
        for position, index in enumerate(self._listed):
            other = index if position not in found else found[position].replacement
            if other is not None or position not in found:
                positions.append(position)
                indices.append(other)
        self._positions = positions
        self.indices = np.array(indices, np.int64) if isinstance(self._listed, np.ndarray) else indices

    def remaining(self, padding: int) -> int:
        """Return how many of the last `padding` samples of the batch were not skipped."""
        return sum(position >= len(self._listed) - padding for position in self._positions)

    def record(self) -> Substituted | None:
        """Return the substitutions; None if there are none."""
        if not self._found:
            return None
        return Substituted(len(self._listed), [self._found[position] for position in sorted(self._found)])
