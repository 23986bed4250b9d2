"""One worker's shard of an iterable-style dataset: samples come in one order, so batches are found by counting."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from teleloader_shared import user_state
from teleloader_shared.errors import StateMismatch
from teleloader_shared.protocols import is_stateful
from teleloader_shared.spec import MAX_STATES

Outcome = list[Any] | Exception
"""Samples of a batch, or the exception that the dataset raised in its place."""


class RandomNumbers:
    """The generators that a dataset draws from; this one leaves them alone."""

    def begin(self, saved: Any) -> None:
        """Prepare for iterating the dataset from the beginning of its epoch, or from a saved state.

        Args:
            saved: What `state` returned at the beginning of the epoch in an earlier process, if it is known.
        """

    def restore(self, saved: Any) -> None:
        """Continue where a state was saved, after the dataset was iterated: `saved` is what `state` returned then."""

    def passed(self) -> None:
        """Continue after batches that were iterated on the way to another one."""

    def state(self) -> Any:
        """Return the state of the generators; None where a new process has the same."""


class Shard:
    """A pass through the worker's replica of the dataset, which can be moved to any of its batches.

    The batches are those of torch's iterable-style fetcher: each worker batches by itself, an incomplete batch at the
    end is given unless `drop_last`, and an exception takes the place of the batch in which it was raised.

    Args:
        dataset: The replica.
        batch_size: Samples in a batch; None for single ones.
        drop_last: Whether an incomplete last batch is left out.
        epoch: The epoch of this pass.
        random_numbers: The generators that the dataset draws from.
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
        epoch: int = 0,
        random_numbers: RandomNumbers | None = None,
        passed: Callable[[int, Outcome], object] = lambda number, outcome: None,
        saved: Sequence[str] = (),
        max_state: int = MAX_STATES,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._epoch = epoch
        self._random_numbers = random_numbers or RandomNumbers()
        self._passed = passed
        self._saved = saved
        self._max_state = max_state
        self._first: dict[str, Any] = {}
        """The state of the pass's beginning, where it did not begin at a saved place."""
        self._iterator: Iterator[Any] | None = None
        self._keepers: dict[str, Any] = {}
        """The dataset and the iterator, as far as they keep a state."""
        self._was_loaded = False
        """Whether the dataset was given a saved state, so that iterating it does not begin at its beginning."""
        self._source: dict[str, Any] = {}
        """The state from which the dataset is iterated; empty for its beginning."""
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
        moves = self._is_new or number < self.next
        if moves:
            self._move_before(number)
        passes = moves and self.next < number
        while self.next < number and not self._ended:
            passed = self.next
            try:
                outcome: Outcome | None = self._take()
            except Exception as error:  # noqa: BLE001 - it was reported in its own place
                outcome = error
            if outcome is not None:
                self._passed(passed, outcome)
        if passes:
            self._random_numbers.passed()
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
        states = [state for text in self._saved for state in self._in_this_epoch(user_state.unpack(text))]
        before = [state for state in (*states, self._first) if state and state["next"] <= number]
        self._source = max(before, key=lambda state: state["next"], default={})
        if not self._source and self._was_loaded:
            raise StateMismatch(
                f"batch {number} of the shard is before the state that the dataset was resumed from, and its "
                "state_dict() of the beginning is unknown: request batches from the saved state on"
            )
        self._ended = self._source.get("ended", False)
        self.next = self._source.get("next", 0)
        self.samples = self._source.get("samples", 0)
        if self._ended:  # where workers stay, the next epoch continues from here
            self._load_dataset()
            self._restore_random_numbers()

    def _in_this_epoch(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the states of this epoch that a saved one holds; that of an earlier epoch is this one's beginning."""
        if state["epoch"] == self._epoch:
            return [state, state["begins"]] if "begins" in state else [state]
        return [{**_BEGINNING, **{name: state[name] for name in ("dataset", "generators") if name in state}}]

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
        source = self._source
        is_beginning = source.get("next", 0) == 0
        self._random_numbers.begin(source.get("generators") if is_beginning else None)
        drawn = self._random_numbers.state()
        self._load_dataset()
        iterator: Any = iter(self._dataset)
        if "iterator" in source:
            iterator.load_state_dict(copy.deepcopy(source["iterator"]))
        if not is_beginning:
            self._restore_random_numbers()  # now: what iter() drew was drawn before the state was saved
        self._keepers = {"dataset": self._dataset} if is_stateful(self._dataset) else {}
        if iterator is not self._dataset and is_stateful(iterator):
            self._keepers["iterator"] = iterator
        if is_beginning and not self._first:
            self._first = {**_BEGINNING, **_generators(drawn)}
            # only now: many datasets have a state no sooner than their iteration has begun, some not even here
            with suppress(Exception):
                self._first.update(copy.deepcopy(self._states()))
        return iterator  # type: ignore[no-any-return]

    def _load_dataset(self) -> None:
        if "dataset" in self._source:
            self._dataset.load_state_dict(copy.deepcopy(self._source["dataset"]))
            self._was_loaded = True

    def _restore_random_numbers(self) -> None:
        self._random_numbers.restore(self._source.get("generators"))

    def _states(self) -> dict[str, Any]:
        return {name: keeper.state_dict() for name, keeper in self._keepers.items()}

    def state(self, *, with_beginning: bool = False) -> str | None:
        """Return where the shard stands, as far as it can continue there; None if iterating again leads there.

        A dataset that can continue (torchdata's ``Stateful``) keeps its state, or its iterator does, or both. Of other
        datasets only the end has a state. It belongs to the next epoch, too, where workers stay.

        Args:
            with_beginning: Whether to include the state of the pass's beginning, for all datasets.
        """
        if self._iterator is None:
            states = {name: state for name, state in self._source.items() if name in ("dataset", "iterator")}
        else:
            states = self._states()
        beginning = self._first if with_beginning else {}
        drawn = _generators(self._random_numbers.state()) if states or self._ended else {}
        if states or (self._ended and drawn):
            state = {"next": self.next, "samples": self.samples, "ended": self._ended, **drawn, **states}
        elif "generators" in beginning:
            state, beginning = beginning, {}
        else:
            return None
        return self._pack({"epoch": self._epoch, **state}, beginning)

    def _pack(self, state: dict[str, Any], beginning: dict[str, Any]) -> str:
        if beginning:
            text = user_state.pack({**state, "begins": beginning}, self._max_state)
            with suppress(StateMismatch):  # both are too long, or the state of the beginning cannot be kept
                user_state.check(text)
                return text
        return user_state.pack(state, self._max_state)


_BEGINNING: Final[dict[str, Any]] = {"next": 0, "samples": 0, "ended": False}


def _generators(state: Any) -> dict[str, Any]:
    return {} if state is None else {"generators": state}
