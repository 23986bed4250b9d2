"""One worker's shard of an iterable-style dataset: samples come in one order, so batches are found by counting."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from teleloader_server.loading.protocols import is_stateful
from teleloader_shared import shard_state
from teleloader_shared.errors import StateMismatch
from teleloader_shared.spec import MAX_STATES

Outcome = list[Any] | Exception
"""Samples of a batch, or the exception that the dataset raised in its place."""


class Shard:
    """A pass through the worker's replica of the dataset, which can be moved to any of its batches.

    The batches are those of torch's iterable-style fetcher: each worker batches by itself, an incomplete batch at the
    end is given unless `drop_last`, and an exception takes the place of the batch in which it was raised.

    Args:
        dataset: The replica.
        batch_size: Samples in a batch; None for single ones.
        drop_last: Whether an incomplete last batch is left out.
        prepare: Called each time before the dataset is iterated from a saved state or from its beginning.
        passed: Called with the number and the outcome of each batch that is iterated on the way to another one.
        saved: What `state` returned in earlier processes. A batch is reached from the last of these states before it.
        max_state: Characters that a state may have.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        drop_last: bool,
        *,
        prepare: Callable[[], object] = lambda: None,
        passed: Callable[[int, Outcome], object] = lambda number, outcome: None,
        saved: Sequence[str] = (),
        max_state: int = MAX_STATES,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._prepare = prepare
        self._passed = passed
        self._saved = saved
        self._max_state = max_state
        self._first_state: Any = None
        """State of the dataset after the first ``iter()``, before any sample."""
        self._iterator: Iterator[Any] | None = None
        self._keepers: dict[str, Any] = {}
        """The dataset and the iterator, as far as they keep a state."""
        self._was_loaded = False
        """Whether the dataset was given a saved state, so that iterating it does not begin at its beginning."""
        self._source: dict[str, Any] = {}
        """The saved state from which the dataset is iterated; empty for its beginning."""
        self.next = 0
        """Number of the batch that comes next without iterating anew."""
        self.samples = 0
        """Samples taken since the beginning."""
        self._ended = False
        self._is_new = True

    def fetch(self, number: int) -> list[Any] | None:
        """Return the samples of the shard's batch `number`; None when it has fewer batches.

        A number that is not the next one is found by iterating, from a saved state or the beginning if it lies behind.

        Raises:
            Exception: What the dataset raises; the next batch is another try.
        """
        if self._is_new or number < self.next:
            self._move_before(number)
        while self.next < number and not self._ended:
            passed = self.next
            try:
                outcome: Outcome | None = self._take()
            except Exception as error:  # noqa: BLE001 - it was reported in its own place
                outcome = error
            if outcome is not None:
                self._passed(passed, outcome)
        return self._take()

    def end(self) -> None:
        """Give no more samples."""
        self.close()
        self._ended = True
        self._is_new = False

    def close(self) -> None:
        """Release the dataset's iterator, so that ``finally`` blocks of generators run now.

        The next batch is found by iterating again.
        """
        self._iterator = None
        self._keepers = {}
        self._is_new = True

    def _move_before(self, number: int) -> None:
        self.end()  # a damaged state is reported once, and the next iterator may need what this one holds
        states: list[dict[str, Any]] = [shard_state.unpack(text) for text in self._saved]
        before = [state for state in states if state["next"] <= number]
        self._source = max(before, key=lambda state: state["next"], default={})
        if not self._source and self._was_loaded and self._first_state is None:
            raise StateMismatch(
                f"batch {number} of the shard is before the state that the dataset was resumed from, and its "
                "state_dict() of the beginning is unknown: request batches from the saved state on"
            )
        self._ended = self._source.get("ended", False)
        self.next = self._source.get("next", 0)
        self.samples = self._source.get("samples", 0)

    def _take(self) -> list[Any] | None:
        if self._ended:
            return None
        self.next += 1
        if self._iterator is None:
            self._ended = True  # a dataset whose iteration cannot begin has no further batches
            self._iterator = self._begin()
            self._ended = False
        wanted = self._batch_size or 1
        taken: list[Any] = []
        while len(taken) < wanted:
            try:
                taken.append(next(self._iterator))
            except StopIteration:
                self._ended = True
                return None if not taken or self._drop_last else taken
            self.samples += 1
        return taken

    def _begin(self) -> Iterator[Any]:
        self._prepare()
        if "dataset" in self._source:
            self._dataset.load_state_dict(copy.deepcopy(self._source["dataset"]))
            self._was_loaded = True
        elif self._first_state is not None:
            self._dataset.load_state_dict(copy.deepcopy(self._first_state))
        iterator: Any = iter(self._dataset)
        if "iterator" in self._source:
            iterator.load_state_dict(copy.deepcopy(self._source["iterator"]))
        self._keepers = {"dataset": self._dataset} if is_stateful(self._dataset) else {}
        if iterator is not self._dataset and is_stateful(iterator):
            self._keepers["iterator"] = iterator
        if not self._source and self._first_state is None and "dataset" in self._keepers:
            # only now: many datasets have a state no sooner than their iteration has begun, some not even here
            with suppress(Exception):
                self._first_state = copy.deepcopy(self._dataset.state_dict())
        return iterator  # type: ignore[no-any-return]

    def state(self) -> str | None:
        """Return where the shard stands, for datasets that can continue there (torchdata's ``Stateful``).

        As in torchdata the dataset may keep its state, or its iterator, or both. None where neither does, or before
        the iteration has begun.
        """
        if self._iterator is None:
            states = {name: state for name, state in self._source.items() if name in ("dataset", "iterator")}
        else:
            states = {name: keeper.state_dict() for name, keeper in self._keepers.items()}
        if not states:
            return None
        place = {"next": self.next, "samples": self.samples, "ended": self._ended}
        return shard_state.pack({**place, **states}, self._max_state)
