"""One worker's share of an iterable-style dataset: samples come one after another, and a place is found by counting."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

from teleloader_shared.spec import MAX_STATE


class Shard:
    """A pass through the worker's replica of the dataset, which can be brought to any of its batches.

    The batches are those of torch's iterable-style fetcher: each worker batches by itself, an incomplete batch at the
    end is given unless `drop_last`, and an exception takes the place of the batch in which it was raised.

    Args:
        dataset: The replica.
        batch_size: Samples in a batch; None for single ones.
        drop_last: Whether an incomplete last batch is left out.
        restart: Called before the dataset is iterated once more from its beginning; not before the first time.
        state: What `state` said in an earlier process, to begin there.
        skipped: Called for each batch that is gone through on the way to another one, which may be a long way.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None,
        drop_last: bool,
        restart: Callable[[], object],
        state: str | None = None,
        skipped: Callable[[], object] = lambda: None,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._restart = restart
        self._skipped = skipped
        self._saved: dict[str, Any] | None = None if state is None else json.loads(state)
        self._first_state: Any = None
        """How a dataset that keeps its state stood at its beginning."""
        self.samples = 0
        """Samples that were taken since the beginning."""
        self._rewind()

    def _rewind(self) -> None:
        """To where the dataset can begin: the saved place, or the beginning."""
        self._iterator: Iterator[Any] | None = None
        self._ended = self._saved is not None and self._saved["ended"]
        self._next: int = 0 if self._saved is None else self._saved["next"]
        self.samples = 0 if self._saved is None else self._saved["samples"]

    def fetch(self, number: int) -> list[Any] | None:
        """The samples of the shard's batch `number`; None when it has fewer batches.

        A number that is not the next one is found by iterating, from the beginning if it lies behind.

        Raises:
            Exception: What the dataset raises; the next batch is another try.
        """
        if number < self._next:
            if self._saved is not None and number < self._saved["next"]:
                self._saved = None
            self._rewind()
            self._restart()
        while self._next < number and not self._ended:
            self._skipped()
            try:
                self._take()
            except Exception:  # noqa: BLE001, S112 - it was told at its own place
                continue
        return self._take()

    def _take(self) -> list[Any] | None:
        if self._ended:
            return None
        self._next += 1
        if self._iterator is None:
            self._ended = True  # where it cannot even begin, there is nothing to try again
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
        if _is_stateful(self._dataset):
            if self._first_state is None:
                self._first_state = copy.deepcopy(self._dataset.state_dict())
            elif self._saved is None:
                self._dataset.load_state_dict(copy.deepcopy(self._first_state))
        if self._saved is None:
            return iter(self._dataset)
        # the two ways of torchdata's Stateful: the iterator keeps the state, or the dataset does
        if self._saved["keeper"] == "dataset":
            self._dataset.load_state_dict(self._saved["state"])
            return iter(self._dataset)
        iterator: Any = iter(self._dataset)
        iterator.load_state_dict(self._saved["state"])
        return iterator  # type: ignore[no-any-return]

    def state(self) -> str | None:
        """Where the shard stands, for datasets that can go on there (torchdata's ``Stateful``), as JSON.

        None for all others, and when JSON cannot hold the state as it is, or it is longer than `MAX_STATE`: then the
        place is found by iterating.
        """
        keeper: Any = self._iterator if _is_stateful(self._iterator) else self._dataset
        if not _is_stateful(keeper):
            return None
        state = keeper.state_dict()
        name = "dataset" if keeper is self._dataset else "iterator"
        try:
            text = json.dumps(
                {"next": self._next, "samples": self.samples, "ended": self._ended, "keeper": name, "state": state}
            )
        except (TypeError, ValueError):
            return None
        return text if len(text) <= MAX_STATE and json.loads(text)["state"] == state else None


def _is_stateful(found: Any) -> bool:
    return hasattr(found, "state_dict") and hasattr(found, "load_state_dict")
