"""Position of a loader (epoch and batch), and the ``state_dict`` that saves it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import UnionType
from typing import Any, Final, NamedTuple

from teleloader_shared import algorithms, user_state
from teleloader_shared.errors import StateMismatch
from teleloader_shared.text import short

STATE_VERSION: Final = 2


Substituted = tuple[int | str | None, int | str | None]
"""Index of a failed sample, and of the sample in its place; see `codec.Substitution`."""


_MAX_SHOWN: Final = 200
"""Maximum length of a saved text that error messages show unabridged."""
_OF_LENGTHS: Final = ("balance", "packing")
"""Values of orders that depend on lengths; states of other orders do not contain them."""


class Position(NamedTuple):
    """Position of a loader: epoch, batch, and the states that the next ``iter()`` resumes from."""

    epoch: int = 0
    batch: int = 0
    random: dict[str, Any] | None = None
    """With a client-side sampler: states of the random generators when the iterator of this epoch was created,
    `draws_base_seed` (True if the base seed was drawn from them first) and `drawn` (True if the first index list was
    drawn). None for other orders, and before the epoch is started."""
    base_seed: int | None = None
    """Base seed of the workers; None if the epoch was not started before."""
    shard_states: tuple[str | None, ...] | None = None
    """State of each shard of an iterable-style dataset, None for a shard without a state; None without any states."""
    sampler: dict[str, Any] | None = None
    """State of a client-side sampler (see `sampling.SamplerStates`); None if it is not stateful."""
    errors: tuple[Substituted, ...] = ()
    """Samples in the earlier batches of the epoch that were skipped or replaced; (None, None) for those of
    `failed_batches`."""
    failed_batches: tuple[int, ...] = ()
    """Numbers of the earlier batches of the epoch in whose place ``next()`` raised an exception."""

    def check(self) -> None:
        """Check that the states of the user's dataset and sampler are serializable.

        Raises:
            StateMismatch: If a state cannot be encoded; the message names the value.
        """
        texts = [*(self.shard_states or ()), self.sampler and self.sampler["text"]]
        for text in filter(None, texts):
            user_state.check(text)


def save(
    position: Position,
    identity: Mapping[str, Any],
    global_batch_size: int | None,
    generators: Mapping[str, Any],
    unit: str = "samples",
    used: Collection[str] = (),
) -> dict[str, Any]:
    """Return the ``state_dict`` of a loader, as JSON values.

    Args:
        position: Position of the loader.
        identity: Values that must be equal in the loader that resumes from the state.
        global_batch_size: In seeded order, the samples per batch of all ranks together: the position is saved in
            samples, so that it is valid for another number of ranks. None saves it in batches.
        generators: Current states of the random generators from which later epochs are drawn.
        unit: What `global_batch_size` counts: ``samples``, ``sequences`` or ``batches``.
        used: Names of the `algorithms` that the loader uses.
    """
    state = {"version": STATE_VERSION, "epoch": position.epoch, **identity}
    if identity.get("shuffle_buffer_size") is None:  # states of other loaders have no such entry
        state.pop("shuffle_buffer_size", None)
    if versions := algorithms.current(used):
        state["algorithms"] = versions
    if position.base_seed is not None:
        state["base_seed"] = position.base_seed
    if generators:
        state["generators"] = dict(generators)
    if position.errors:
        state["errors"] = [list(pair) for pair in position.errors]
    if position.failed_batches:
        state["failed_batches"] = list(position.failed_batches)
    if global_batch_size is not None:
        return {**state, unit: position.batch * global_batch_size}
    if position.shard_states is not None:
        state["shard_states"] = list(position.shard_states)
    if position.sampler is not None:
        state["sampler"] = position.sampler
    return {**state, "batch": position.batch, "random": position.random}


def load(
    state: object,
    identity: Mapping[str, Any],
    global_batch_size: int | None,
    unit: str = "samples",
    used: Collection[str] = (),
) -> tuple[Position, Mapping[str, Any]]:
    """Validate a ``state_dict``; return its position and the random generator states for later epochs.

    Raises:
        StateMismatch: If the state is invalid, its `identity` values differ, its position is not at the start of a
            global batch of this loader, or this release computes another version of one of the algorithms `used`.
    """
    if not isinstance(state, dict) or "epoch" not in state:
        raise StateMismatch(f"invalid state {short(state)}: expected a result of state_dict()")
    absent = {name: None for name in _OF_LENGTHS if name not in identity}
    for name, value in {"version": STATE_VERSION, **identity, **absent}.items():
        if state.get(name) != value:
            saved = state.get(name)
            shown = repr(saved) if isinstance(saved, str) and len(saved) <= _MAX_SHOWN else short(saved)
            version = " (publish that version of the dataset again)" if name == "dataset" else ""
            raise StateMismatch(
                f"the state was saved with {name} = {shown}, but this loader has {value!r}: resume "
                f"with the arguments and the data of the loader that saved the state{version}, or start a new run"
            )
    algorithms.check_state(state.get("algorithms", {}), used)
    epoch, batch = _epoch_and_batch(state, global_batch_size, unit)
    shard_states = _optional(state, "shard_states", list | tuple)
    position = Position(
        epoch,
        batch,
        _optional(state, "random", dict),
        _optional(state, "base_seed", int),
        None if shard_states is None else tuple(shard_states),
        _sampler(state),
        _errors(state),
        _failed_batches(state),
    )
    return position, _optional(state, "generators", dict) or {}


def _epoch_and_batch(state: Mapping[str, Any], global_batch_size: int | None, unit: str) -> tuple[int, int]:
    unit = "batch" if global_batch_size is None else unit
    epoch, count = state["epoch"], state.get(unit)
    if not isinstance(epoch, int) or not isinstance(count, int) or epoch < 0 or count < 0:
        raise StateMismatch(
            f"invalid state with epoch = {short(epoch)} and {unit} = {short(count)}: expected a result of "
            "state_dict(), with non-negative integers"
        )
    batch, rest = divmod(count, global_batch_size or 1)
    if rest and unit == "batches":
        raise StateMismatch(
            f"the state was saved after {count} batches of all ranks, which is not a multiple of this loader's "
            f"world_size = {global_batch_size}: choose a world_size that divides {count}"
        )
    if rest:
        raise StateMismatch(
            f"the state was saved after {count} {unit}, which is not a multiple of this loader's batch_size * "
            f"world_size = {global_batch_size}: choose batch_size and world_size whose product divides {count}"
        )
    return epoch, batch


def _errors(state: Mapping[str, Any]) -> tuple[Substituted, ...]:
    pairs: list[Any] = _optional(state, "errors", list) or []
    errors: list[Substituted] = []
    for pair in pairs:
        match pair:
            case [int() | str() | None as sample, int() | str() | None as replacement]:
                errors.append((sample, replacement))
            case _:
                raise StateMismatch(
                    f"invalid state with errors = {short(pairs)}: expected a result of state_dict(), with pairs of "
                    "indices"
                )
    return tuple(errors)


def _failed_batches(state: Mapping[str, Any]) -> tuple[int, ...]:
    numbers: list[Any] = _optional(state, "failed_batches", list) or []
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise StateMismatch(
            f"invalid state with failed_batches = {short(numbers)}: expected a result of state_dict(), with batch "
            "numbers"
        )
    return tuple(numbers)


def _sampler(state: Mapping[str, Any]) -> dict[str, Any] | None:
    found: dict[str, Any] | None = _optional(state, "sampler", dict)
    match found:
        case None:
            return None
        case {"text": str(), "next": int(), "draws": [*draws]} if all(isinstance(number, int) for number in draws):
            return found
    raise StateMismatch(f"invalid sampler state {short(found)}: expected a result of state_dict()")


def _optional(state: Mapping[str, Any], name: str, kind: type | UnionType) -> Any:
    value = state.get(name)
    if value is not None and not isinstance(value, kind):
        raise StateMismatch(f"invalid state with {name} = {short(value)}: expected a result of state_dict()")
    return value
