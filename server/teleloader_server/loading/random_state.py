"""Global random generators (`random`, NumPy's legacy generator, torch): seeding, saving and restoring."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from teleloader_server.loading.shards import RandomNumbers
from teleloader_shared.errors import StateMismatch
from teleloader_shared.text import short

RandomState = tuple[Any, Any, Any]
"""States of `random`, NumPy's legacy generator and torch; None for torch if it is not imported."""

_WORDS: Final = 624
"""State size of a Mersenne Twister in words. NumPy does not check the position and would read beyond the state."""


def seed_all(seed: int, *, torch_too: bool = True) -> None:
    """Seed `random`, NumPy's legacy generator and, if `torch_too` and torch is imported, torch's CPU generator."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch = sys.modules.get("torch")
    if torch is not None and torch_too:
        # not torch.manual_seed, which also seeds all accelerators and takes 80 us per batch
        torch.default_generator.manual_seed(seed)


def seed_worker(base_seed: int, worker: int) -> None:
    """Seed all generators as torch seeds its workers: with `base_seed` + `worker`, NumPy's with a derived seed."""
    seed_all((base_seed + worker) % 2**63)  # an int64, as in torch
    if sys.modules.get("torch") is not None:
        from torch.utils.data._utils.worker import _generate_state

        np.random.seed(_generate_state(base_seed, worker))


def random_state() -> RandomState:
    """Return the states of all global random generators."""
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state()


def set_random_state(state: RandomState) -> None:
    """Restore the states of all global random generators.

    Raises:
        StateMismatch: If the state, which a client may have sent, is invalid.
    """
    try:
        python, legacy, torch_state = state
        range(_WORDS + 1).index(legacy[2])
        random.setstate(python)
        np.random.set_state(legacy)
        torch = sys.modules.get("torch")
        if torch_state is not None and torch is not None:
            torch.set_rng_state(torch_state)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, OverflowError) as error:
        raise StateMismatch(
            f"invalid random state of a shard: {short(error)}. Resume from an undamaged checkpoint"
        ) from None


def _are_equal(one: RandomState, other: RandomState) -> bool:
    (python, legacy, tensor), (other_python, other_legacy, other_tensor) = one, other
    if python != other_python or legacy[2:] != other_legacy[2:] or not np.array_equal(legacy[1], other_legacy[1]):
        return False
    if tensor is None or other_tensor is None:
        return tensor is other_tensor
    return bool(tensor.equal(other_tensor))


class OwnRandomState:
    """Context manager with a separate random state, for loading in a process that uses the global generators itself.

    Each ``with`` block continues with the state at the end of the previous block, and restores the outer state at its
    end.
    """

    def __init__(self) -> None:
        self._inside: RandomState | None = None

    def __enter__(self) -> None:
        self._outside = random_state()
        if self._inside is not None:
            set_random_state(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = random_state()
        set_random_state(self._outside)


class WorkerRandomNumbers(RandomNumbers):
    """Random generators of a worker process that iterates an iterable-style dataset.

    Args:
        prepare: Callback, called before the dataset is iterated, with the random state that was saved at the start of
            the epoch, or None.
        initial: Random state with which each worker with this ID starts; None if the workers start with different
            states.
    """

    def __init__(self, prepare: Callable[[Any], object], initial: Any) -> None:
        self._prepare = prepare
        self._initial = initial
        self._suspended: RandomState | None = None
        """Generator states at the last call of `suspend`; None after `resume`."""

    def begin(self, saved: Any) -> None:
        """Prepare the generators before the dataset is iterated, by calling `prepare` with `saved`."""
        self._prepare(saved)

    def restore(self, saved: Any) -> None:
        """Restore generator states returned by `state`; do nothing if `saved` is None."""
        if saved is not None:
            set_random_state(saved)

    def resume(self) -> None:
        """Restore the generator states saved by `suspend`, if any."""
        if self._suspended is not None:
            set_random_state(self._suspended)
            self._suspended = None

    def suspend(self) -> None:
        """Save the generator states until `resume`."""
        self._suspended = random_state()

    def state(self) -> Any:
        """Return the states of all generators, or None if they equal the initial state of each worker with this ID."""
        now = self._suspended or random_state()
        return None if self._initial is not None and _are_equal(now, self._initial) else now


class CallersRandomNumbers(WorkerRandomNumbers):
    """Random generators of a training process that loads without workers; the loader saves and restores their state."""

    _before: Any = None

    def begin(self, saved: Any) -> None:
        """Save the generator states, and prepare the generators before the dataset is iterated."""
        self._before = random_state()
        super().begin(saved)

    def restore(self, saved: Any) -> None:
        """Restore the generator states saved by `begin`, if any; ignore `saved`."""
        if self._before is not None:
            set_random_state(self._before)

    def passed(self) -> None:
        """Restore the generator states saved by `begin`, after batches or samples were read again."""
        set_random_state(self._before)

    def resume(self) -> None:
        """Do nothing: the collate function uses the same generators as the dataset, as in torch."""

    def suspend(self) -> None:
        """Do nothing: the collate function uses the same generators as the dataset, as in torch."""

    def state(self) -> Any:
        """Return None, because the loader itself saves the state of the training process."""
