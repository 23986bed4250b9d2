"""Shard of an iterable-style dataset; seeks to a batch by iterating from a saved state or from the beginning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from teleloader_server.loading.shuffle_buffer import ShuffleBuffer, ShuffleSettings
from teleloader_shared import user_state
from teleloader_shared.errors import StateMismatch
from teleloader_shared.protocols import is_stateful
from teleloader_shared.spec import MAX_STATES

Outcome = list[Any] | Exception
"""Samples of a batch, or the exception that the dataset raised in its place."""


class RandomNumbers:
    """Interface of the random generators that a dataset uses; this base implementation does nothing."""

    def begin(self, saved: Any) -> None:
        """Prepare the generators before the dataset is iterated from the start of the epoch or from a saved state.

        Args:
            saved: Result of `state` at the start of the epoch in an earlier process, or None.
        """

    def restore(self, saved: Any) -> None:
        """Restore a generator state returned by `state`, after the creation of the dataset's iterator."""

    def passed(self) -> None:
        """Restore the generators after batches were skipped, or samples of a shuffle buffer were read again."""

    def resume(self) -> None:
        """Restore the generators as they were at the last call of `suspend`, if any."""

    def suspend(self) -> None:
        """Save the generators, because other code uses them until the next call of `resume`.

        A shuffle buffer reads samples in advance. Random numbers of the collate function therefore come from other
        generators than those of the dataset: otherwise the dataset's random numbers would depend on the batches that
        were collated before, which are not collated again when the buffer is restored.
        """

    def state(self) -> Any:
        """Return the state of the generators; None if the state equals the initial state of a new process."""


class Shard:
    """Shard of an iterable-style dataset: a pass over the worker's replica that can seek to any batch of the shard.

    Batches are formed as in torch: each worker batches its own samples, an incomplete last batch is yielded unless
    `drop_last`, and an exception replaces the batch in which it was raised.

    Args:
        dataset: The worker's replica of the dataset.
        batch_size: Samples per batch; None for single samples.
        drop_last: True to drop an incomplete last batch.
        epoch: The epoch of this pass.
        random_numbers: Random generators that the dataset uses.
        passed: Callback, called with the number and the outcome of each skipped batch.
        shuffle: Size and seed of the shuffle buffer; None to yield the samples in the order of the dataset.
        progress: Callback, called for each sample that is read to fill the shuffle buffer.
        max_replay: Maximum number of batches to skip after the iteration has started again; 0 for no limit.
        saved: Results of `state` in earlier processes. To reach a batch, iteration starts at the last of these states
            that precedes the batch.
        max_state: Maximum length of a state in characters.
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
        shuffle: ShuffleSettings | None = None,
        progress: Callable[[], object] = lambda: None,
        max_replay: int = 0,
        saved: Sequence[str] = (),
        max_state: int = MAX_STATES,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._epoch = epoch
        self._random_numbers = random_numbers or RandomNumbers()
        self._passed = passed
        self._shuffle = shuffle
        self._progress = progress
        self._max_replay = max_replay
        self._buffer: ShuffleBuffer | None = None
        """Shuffle buffer of the open iterator, if any."""
        self._saved = saved
        self._max_state = max_state
        self._first: dict[str, Any] = {}
        """State at the start of the pass; empty if the pass was resumed from a saved state."""
        self._iterator: Iterator[Any] | None = None
        self._keepers: dict[str, Any] = {}
        """Objects with a ``state_dict``: the dataset, its iterator, both or none."""
        self._was_loaded = False
        """True if a saved state was loaded into the dataset: it can no longer be iterated from its start."""
        self._source: dict[str, Any] = {}
        """State from which the dataset is iterated; empty to iterate from the start."""
        self.next = 0
        """Position in the shard of the batch that the open iterator yields next."""
        self.samples = 0
        """Number of samples fetched since the start of the epoch."""
        self.skipped_from = 0
        """First one of the batches that `fetch` skips or has skipped last."""
        self._ended = False
        self._is_new = True

    @property
    def is_stateless(self) -> bool:
        """True if the dataset is being iterated, and neither the dataset nor its iterator has a ``state_dict``."""
        return self._iterator is not None and not self._keepers

    @property
    def has_buffer(self) -> bool:
        """True if the dataset is being iterated through a shuffle buffer."""
        return self._buffer is not None

    def fetch(self, number: int) -> list[Any] | None:
        """Fetch the samples of batch `number` of the shard; return None after the last batch.

        Later batches are reached by skipping, earlier ones by iterating again from a saved state or from the start.

        Raises:
            StateMismatch: If more than `max_replay` batches would have to be skipped; the shard then ends.
            Exception: If the dataset raises an exception; the next call continues after the failed batch.
        """
        moves = self._is_new or number < self.next
        if moves:
            self._move_before(number)
            self._check_replay(number)
        self.skipped_from = self.next
        passes = moves and self.next < number
        while self.next < number and not self._ended:
            passed = self.next
            try:
                outcome: Outcome | None = self._take()
            except Exception as error:  # noqa: BLE001 - it was already reported in place of its batch
                outcome = error
            if outcome is not None:
                self._passed(passed, outcome)
        if passes:
            self._random_numbers.passed()
        return self._take()

    def end(self) -> None:
        """End the shard: further calls of `fetch` return None."""
        self.close()
        self._ended = True
        self._is_new = False

    def close(self) -> None:
        """Close the dataset's iterator, so that ``finally`` blocks of generators run now.

        The next call of `fetch` iterates the dataset again.
        """
        self._iterator = self._buffer = None
        self._keepers = {}
        self._is_new = True
        self._random_numbers.resume()

    def _move_before(self, number: int) -> None:
        self.end()  # a damaged state is reported once, and the next iterator may need resources of this one
        states = [state for text in self._saved for state in self._in_this_epoch(user_state.unpack(text))]
        before = [state for state in (*states, self._first) if state and state["next"] <= number]
        self._source = max(before, key=lambda state: state["next"], default={})
        if self._was_loaded and "dataset" not in self._source:
            raise StateMismatch(
                f"cannot load batch {number} of the shard: the dataset was resumed from a later state, and its initial "
                "state_dict() is unknown. Request batches that follow the saved state"
            )
        self._ended = self._source.get("ended", False)
        self.next = self._source.get("next", 0)
        self.samples = self._source.get("samples", 0)
        if self._ended:  # with persistent workers, the next epoch continues from this state
            self._load_dataset()
            self._restore_random_numbers()

    def _check_replay(self, number: int) -> None:
        batches = 0 if self._ended else number - self.next
        if self._max_replay and batches > self._max_replay:
            self.end()
            raise StateMismatch(
                f"cannot continue at batch {number} of the shard: {batches:,} batches would have to be iterated again, "
                f"and the limit is {self._max_replay:,} (max_replay). Define state_dict() and load_state_dict() "
                "(torchdata's Stateful) in the dataset, or increase --max-replay of the server"
            )

    def _in_this_epoch(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the states of this epoch in a saved state; the state of another epoch is the start of this one."""
        if state["epoch"] == self._epoch:
            return [state, state["begins"]] if "begins" in state else [state]
        return [{**_BEGINNING, **{name: state[name] for name in ("dataset", "generators") if name in state}}]

    def _take(self) -> list[Any] | None:
        if self._ended:
            return None
        if self._shuffle is None:
            return self._take_batch()
        self._random_numbers.resume()
        try:
            return self._take_batch()
        finally:
            self._random_numbers.suspend()

    def _take_batch(self) -> list[Any] | None:
        self.next += 1
        if self._iterator is None:
            self._ended = True  # if iter() raises, the shard has no further batches
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
        is_beginning = source.get("next", 0) == 0 or source.get("block") == 0
        self._random_numbers.begin(source.get("generators") if is_beginning else None)
        drawn = self._random_numbers.state()
        self._load_dataset()
        iterator: Any = iter(self._dataset)
        if "iterator" in source:
            iterator.load_state_dict(copy.deepcopy(source["iterator"]))
        if not is_beginning:
            self._restore_random_numbers()  # after iter(), whose random numbers were drawn before the state was saved
        self._keepers = {"dataset": self._dataset} if _is_stateful(self._dataset) else {}
        if iterator is not self._dataset and _is_stateful(iterator):
            self._keepers["iterator"] = iterator
        if is_beginning and not self._first:
            self._first = {**_BEGINNING, **_generators(drawn)}
            # after iter(), because state_dict() of many datasets fails before; of some it fails even here
            with suppress(Exception):
                self._first.update(copy.deepcopy(self._states()))
        return iterator if self._shuffle is None else self._shuffled(iterator, self._shuffle)

    def _shuffled(self, iterator: Iterator[Any], settings: ShuffleSettings) -> ShuffleBuffer:
        block, drawn = (self._source.get(name, 0) for name in ("block", "drawn"))
        self._buffer = ShuffleBuffer(iterator, settings, self._snapshot, self._progress, block=block, drawn=drawn)
        if drawn:
            self._random_numbers.passed()
        return self._buffer

    def _snapshot(self, block: int) -> dict[str, Any]:
        """Return the state before a block of the shuffle buffer is read; of the first one, that of the beginning."""
        if block == 0:
            return {name: state for name, state in self._first.items() if name not in _BEGINNING}
        # copied, because the dataset may change its state in place
        return copy.deepcopy({**self._states(), **_generators(self._random_numbers.state())})

    def _load_dataset(self) -> None:
        if "dataset" in self._source:
            self._dataset.load_state_dict(copy.deepcopy(self._source["dataset"]))
            self._was_loaded = True

    def _restore_random_numbers(self) -> None:
        self._random_numbers.restore(self._source.get("generators"))

    def _states(self) -> dict[str, Any]:
        return {name: keeper.state_dict() for name, keeper in self._keepers.items()}

    def state(self, *, with_beginning: bool = False) -> str | None:
        """Return the serialized state of the shard; None if only iterating again can reach the position.

        A stateful dataset (torchdata's ``Stateful``), its iterator, or both provide the state. Other datasets have a
        state only at their end; with persistent workers, it also applies to the next epoch.

        Args:
            with_beginning: True to include the state at the start of the pass, for all datasets.
        """
        beginning = self._first if with_beginning else {}
        position = None if self._buffer is None else self._buffer.state
        if position is not None and self._keepers and not self._ended:
            counts = {"next": self.next, "samples": self.samples, "ended": False}
            in_buffer = {"block": position.block, "drawn": position.drawn, **position.source}
            return self._pack({"epoch": self._epoch, **counts, **in_buffer}, beginning)
        if self._iterator is None:
            states = {name: state for name, state in self._source.items() if name in ("dataset", "iterator")}
        else:
            states = self._states()
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
            with suppress(StateMismatch):  # both together are too long, or the state of the start cannot be serialized
                user_state.check(text)
                return text
        return user_state.pack(state, self._max_state)


def state_of_beginning(dataset: Any, epoch: int) -> str | None:
    """Return the serialized state of a dataset that is not being iterated; None if the dataset provides no state."""
    if not _is_stateful(dataset):
        return None
    try:
        state = dataset.state_dict()
    except Exception:  # noqa: BLE001 - state_dict() of many datasets fails before their iteration has started
        return None
    return user_state.pack({"epoch": epoch, **_BEGINNING, "dataset": state})


def _is_stateful(found: Any) -> bool:
    """Return True if the state of a dataset or iterator contains all that is needed to continue exactly.

    The state of a Hugging Face IterableDataset does not contain the samples in the buffer of ``shuffle()``: they would
    be lost. Without a state, the dataset is iterated again up to the position.
    """
    return is_stateful(found) and not _has_shuffle_buffer(getattr(found, "_ex_iterable", None))


def _has_shuffle_buffer(source: Any) -> bool:
    """Return True if a Hugging Face ``ExamplesIterable``, or one of those that it reads, has a shuffle buffer."""
    if type(source).__name__ == "BufferShuffledExamplesIterable":
        return True
    read = [getattr(source, "ex_iterable", None), *getattr(source, "ex_iterables", ())]
    return any(_has_shuffle_buffer(other) for other in read if other is not None)


_BEGINNING: Final[dict[str, Any]] = {"next": 0, "samples": 0, "ended": False}


def _generators(state: Any) -> dict[str, Any]:
    return {} if state is None else {"generators": state}
