"""Where a loader stands, and the ``state_dict`` that says it: what must agree when it is loaded, and what moves."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any, Final, NamedTuple

from teleloader_shared import user_state
from teleloader_shared.errors import StateMismatch
from teleloader_shared.text import short

STATE_VERSION: Final = 2


class Position(NamedTuple):
    """Where the next ``iter()`` begins."""

    epoch: int = 0
    batch: int = 0
    random: dict[str, Any] | None = None
    """For a client-side sampler: the random generators when the iterator of this epoch began, `draws_base_seed` (True
    if the base seed was drawn from them first) and `drawn` (True if the first index list was drawn)."""
    base_seed: int | None = None
    """The base seed of an epoch that was begun before."""
    shard_states: tuple[str | None, ...] | None = None
    """Where the shards of an iterable-style dataset stand, as far as they can say so."""
    sampler: dict[str, Any] | None = None
    """For a client-side sampler that keeps a state: where it stands, see `sampling.SamplerStates`."""

    def check(self) -> None:
        """Raise if a state of the user's objects could not be kept.

        Raises:
            StateMismatch: With a message that names the value.
        """
        texts = [*(self.shard_states or ()), self.sampler and self.sampler["text"]]
        for text in filter(None, texts):
            user_state.check(text)


def save(
    position: Position, identity: Mapping[str, Any], global_batch_size: int | None, generators: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of a loader at `position`.

    Args:
        position: Where it stands.
        identity: What a loader that goes on must have in common with it.
        global_batch_size: With a plan: samples in a batch of all ranks together. A place in a plan is counted in
            samples, so that it means the same for another number of ranks.
        generators: The random generators that later epochs are drawn from, as they are now.
    """
    state = {"version": STATE_VERSION, "epoch": position.epoch, **identity}
    if position.base_seed is not None:
        state["base_seed"] = position.base_seed
    if generators:
        state["generators"] = dict(generators)
    if global_batch_size is not None:
        return {**state, "samples": position.batch * global_batch_size}
    if position.shard_states is not None:
        state["shard_states"] = list(position.shard_states)
    if position.sampler is not None:
        state["sampler"] = position.sampler
    return {**state, "batch": position.batch, "random": position.random}


def load(
    state: object, identity: Mapping[str, Any], global_batch_size: int | None
) -> tuple[Position, Mapping[str, Any]]:
    """Return the position that `state` was saved at, and the random generators of later epochs.

    Raises:
        StateMismatch: When it is the state of something else, or stands within a global batch of this loader.
    """
    if not isinstance(state, dict) or "epoch" not in state:
        raise StateMismatch(f"a state is what state_dict() of a loader returned, was {short(state)}")
    for name, value in {"version": STATE_VERSION, **identity}.items():
        if state.get(name) != value:
            raise StateMismatch(
                f"the state was saved with {name} = {short(state.get(name))}, and this loader has {value!r}: "
                "resume with the loader's old arguments and data, or begin a new run"
            )
    place = "batch" if global_batch_size is None else "samples"
    epoch, at = state["epoch"], state.get(place)
    if not isinstance(epoch, int) or not isinstance(at, int) or epoch < 0 or at < 0:
        raise StateMismatch(f"a state's epoch and {place} must be numbers from 0, were {short(epoch)} and {short(at)}")
    batch, rest = divmod(at, global_batch_size or 1)
    if rest:
        raise StateMismatch(
            f"the state stands after {at} samples, which is no multiple of this loader's batch_size * "
            f"world_size = {global_batch_size}: choose them so that they divide it"
        )
    shard_states = _optional(state, "shard_states", list | tuple)
    position = Position(
        epoch,
        batch,
        _optional(state, "random", dict),
        _optional(state, "base_seed", int),
        None if shard_states is None else tuple(shard_states),
        _sampler(state),
    )
    return position, _optional(state, "generators", dict) or {}


def _sampler(state: Mapping[str, Any]) -> dict[str, Any] | None:
    found: dict[str, Any] | None = _optional(state, "sampler", dict)
    match found:
        case None:
            return None
        case {"text": str(), "next": int(), "draws": [*draws]} if all(isinstance(number, int) for number in draws):
            return found
    raise StateMismatch(f"invalid sampler state {short(found)}: pass what state_dict() returned")


def _optional(state: Mapping[str, Any], name: str, kind: type | UnionType) -> Any:
    value = state.get(name)
    if value is not None and not isinstance(value, kind):
        raise StateMismatch(f"a state's {name} is nothing that state_dict() of a loader returns, was {short(value)}")
    return value
