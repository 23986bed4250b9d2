"""The order that lives on the client: torch's samplers or the user's own, what they draw, and where they stand."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from itertools import islice
from reprlib import repr as short
from typing import Any, Final

import numpy as np

from teleloader_shared import user_state
from teleloader_shared.codec import Address, to_bytes
from teleloader_shared.errors import EncodeError, StateMismatch, TeleloaderError
from teleloader_shared.protocols import is_stateful
from teleloader_shared.tree import Tensor


def make_samplers(
    dataset: Sized,
    batch_size: int | None,
    shuffle: bool,
    drop_last: bool,
    sampler: Any,
    batch_sampler: Any,
    generator: Any,
    *,
    as_torch: bool,
) -> tuple[Any, Any]:
    """Return `sampler` and `batch_sampler` of a loader: the given ones, or new ones as torch's DataLoader creates them.

    Args:
        dataset: A map-style dataset.
        batch_size: As of the loader, like the following arguments.
        shuffle: As of the loader.
        drop_last: As of the loader.
        sampler: As of the loader.
        batch_sampler: As of the loader.
        generator: As of the loader.
        as_torch: Whether to make samplers of torch; else only a given sampler is batched.
    """
    batches: Any = Batches
    if as_torch:
        from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

        batches = BatchSampler
        if sampler is None:
            sampler = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
    if sampler is not None and batch_sampler is None and batch_size is not None:
        batch_sampler = batches(sampler, batch_size, drop_last)
    return sampler, batch_sampler


def torchs_collate(*, batched: bool) -> Any:
    """What torch's DataLoader shows as its collate function when it was given none."""
    from torch.utils.data import default_collate, default_convert

    return default_collate if batched else default_convert


class Batches:
    """What torch's BatchSampler makes of a sampler, for clients that do not use torch.

    Args:
        sampler: Gives the indices.
        batch_size: How many make a batch.
        drop_last: Whether an incomplete last batch is left out.
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        yield from batched(iter(self.sampler), self.batch_size, drop_last=self.drop_last)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)


def batched(indices: Iterator[Any], size: int, *, drop_last: bool) -> Iterator[list[Any]]:
    """Yield lists of `size` indices; the last one may be shorter, unless `drop_last`."""
    while batch := list(islice(indices, size)):
        if len(batch) == size or not drop_last:
            yield batch


def draw_base_seed(generator: Any) -> int:
    """The int64 that torch's DataLoader draws, from `generator` or torch's global one, when an iteration begins."""
    import torch

    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def is_torchs_own(sampler: object) -> bool:
    """Whether a sampler is one of torch's, which do not look at how training goes on while they are iterated."""
    inner = getattr(sampler, "sampler", None)
    own = type(sampler).__module__.startswith("torch.utils.data.")
    return own and (inner is None or is_torchs_own(inner))


class _Draws:
    """Index lists of a sampler, whose own state and that of its iterator can be saved (torchdata's ``Stateful``).

    torch's BatchSampler hides the iterator of the sampler that it batches, so that one is batched here instead.

    Args:
        sampler: As of `IndexLists`.
        states: What `states` returned: the sampler continues there.

    Raises:
        StateMismatch: If the sampler cannot load a state that another one saved.
    """

    def __init__(self, sampler: Any, states: Mapping[str, Any]) -> None:
        self._states = states
        self._keepers: dict[str, Any] = {}
        source = _source(sampler)
        self._keep("sampler", source)
        # as torch does it: a sampler that is batched is iterated no sooner than its first list is requested
        self.iterator = self._begin(source) if source is sampler else self._batches(source, sampler)

    def _begin(self, source: Any) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(source)
        if iterator is not source:
            self._keep("iterator", iterator)
        return iterator

    def _batches(self, source: Any, batching: Any) -> Iterator[list[Any]]:
        yield from batched(self._begin(source), batching.batch_size, drop_last=batching.drop_last)

    def _keep(self, name: str, keeper: Any) -> None:
        if is_stateful(keeper):
            self._keepers[name] = keeper
        if name in self._states:
            if name not in self._keepers:
                raise StateMismatch(
                    f"the state was saved with a sampler that keeps a state, and {type(keeper).__name__} has no "
                    "state_dict() and load_state_dict(): resume with the loader's old arguments"
                )
            keeper.load_state_dict(self._states[name])

    def states(self) -> dict[str, Any]:
        """Return the states of the sampler and of its iterator, as far as they keep one."""
        return {name: keeper.state_dict() for name, keeper in self._keepers.items()}


def _source(sampler: Any) -> Any:
    """Return what torch's BatchSampler or `Batches` batch, but not what classes derived from them do."""
    torch = sys.modules.get("torch")
    batches = type(sampler) is Batches or (torch is not None and type(sampler) is torch.utils.data.BatchSampler)
    return sampler.sampler if batches else sampler


class SamplerStates:
    """The states of a sampler before lists that the training loop may stop at, and at the end of the epoch.

    A sampler draws ahead of the training loop, so its current state is not that of the loop's position. Each state is
    a dictionary of JSON values: `text` (see `user_state`), `next` (the number of the list that is drawn next) and
    `draws` (empty in mid-epoch; at the end of an epoch what `end_epoch` repeats, one number for each iteration).
    """

    def __init__(self) -> None:
        self._states: dict[int, dict[str, Any]] = {}
        self.exhausted = False
        """Whether the sampler came to its end."""

    def put(self, number: int, state: dict[str, Any] | None) -> None:
        """Note the state before list `number`; None for a sampler that keeps none."""
        if state is not None:
            self._states[number] = state

    def release(self, number: int) -> None:
        """Forget the states before lists below `number`, except those that `end` needs."""
        for k in sorted(self._states)[:-2]:
            if k < number:
                del self._states[k]

    def before(self, number: int) -> dict[str, Any] | None:
        """Return the last state that is known before list `number`, or before an earlier one."""
        return self._states.get(max((k for k in self._states if k <= number), default=-1))

    def end(self) -> dict[str, Any] | None:
        """Return the state at the end of this epoch, in which the sampler may not have come to its own end.

        It is the state before the last list, and how many draws follow. The state of that moment itself would not do: a
        sampler that counts what it has yielded takes it for the place where the next epoch begins.
        """
        last = sorted(self._states)[-2:]
        if not last:
            return None
        state, draws = self._states[last[0]], len(last) - 1 + self.exhausted
        return {**state, "draws": [*state["draws"], draws]} if draws else state


def sampler_state(states: Mapping[str, Any], number: int) -> dict[str, Any] | None:
    """Return an entry of `SamplerStates` before list `number`; None if there are no states."""
    return {"text": user_state.pack(states, None, "a sampler"), "next": number, "draws": []} if states else None


def initial_state(sampler: Iterable[Any]) -> dict[str, Any] | None:
    """Return the state of a sampler that no loader has iterated."""
    source = _source(sampler)
    return sampler_state({"sampler": source.state_dict()} if is_stateful(source) else {}, 0)


def end_epoch(sampler: Iterable[Any], state: Mapping[str, Any]) -> None:
    """Bring a sampler to where an epoch left it in another process."""
    states = user_state.unpack(state["text"])
    for draws in state["draws"]:
        iterator = _Draws(sampler, states).iterator
        for _ in range(draws):
            next(iterator, None)
        states = {}


class ShownSamplers:
    """The samplers that a loader made for a user to see, while the order is the plan's.

    The user can change them: ``loader.batch_sampler.batch_size = 8``. From then on they decide the order, as in torch.

    Args:
        samplers: The samplers; None for one that there is not.
    """

    def __init__(self, *samplers: Any) -> None:
        self._made = [(sampler, dict(vars(sampler))) for sampler in samplers if sampler is not None]

    @property
    def change(self) -> str | None:
        """The first attribute that was set since, as ``BatchSampler.batch_size``; None if there is none."""
        for sampler, before in self._made:
            for name, value in vars(sampler).items():
                was = before.get(name)
                if value is not was and not (isinstance(value, int) and value == was):
                    return f"{type(sampler).__name__}.{name}"
        return None


class IndexLists:
    """The indices of the batches of one epoch, drawn from a sampler as they are needed.

    Args:
        sampler: Yields an index list for each batch; for ``batch_size=None`` an index for each sample.
        skip: How many of them were drawn by an earlier process.
        state: The sampler's state at the position of the loader, an entry of `SamplerStates`.
    """

    def __init__(self, sampler: Iterable[Any], skip: int, state: dict[str, Any] | None = None) -> None:
        saved = None if state is None or state["draws"] else state
        self._draws = _Draws(sampler, {} if saved is None else user_state.unpack(saved["text"]))
        self._iterator = self._draws.iterator
        self._skip = skip
        self._next = 0 if saved is None else saved["next"]
        """The number of the list that the sampler yields next, or has yielded and that is in `_yielded`."""
        self.states = SamplerStates()
        self.states.put(self._next, state)
        self._yielded: list[tuple[int, Any]] = []
        """The last list, with its number: kept, because a signal handler may raise before the list is encoded."""
        self._interruption: BaseException | None = None
        """What the sampler raised instead of a list, though nothing is wrong with it: Ctrl-C, for example."""
        self.frames: dict[int, Any] = {}
        """Lists that were drawn and not sent, by batch number; whoever sends them replaces this by an empty one."""
        self.exhausted = False
        """Whether no more lists can be drawn."""
        self.error: Exception | None = None
        """Why not, if it is an error in the place of the next list."""

    @property
    def drawn(self) -> int:
        """The number of the batch whose list will be drawn next."""
        return max(self._skip, self._next)

    def draw(self, stop: int, encode: Callable[[int, Any], Any]) -> None:
        """Draw the lists up to that of batch `stop`.

        Args:
            stop: The first batch whose list is not drawn.
            encode: Makes the frame of a batch number and what the sampler yielded for it.
        """
        while not self.exhausted and self.drawn < stop:
            k = self._next
            try:
                if not self._yield(k):
                    self.error = None if self._interruption is None else _interrupted(k, self._interruption)
                    self.states.exhausted = self.error is None
                    self.exhausted = True
                    return
                if k >= self._skip:
                    self.frames[k] = encode(k, self._yielded[0][1])
                self.states.put(k + 1, sampler_state(self._draws.states(), k + 1))
            except Exception as error:  # noqa: BLE001 - raised in the training loop, when it comes to that batch
                self.error, self.exhausted = error, True
                return
            self._next = k + 1

    def _yield(self, k: int) -> bool:
        """Let the sampler yield list k into `_yielded`, unless it is there; return False at the sampler's end."""
        if self._yielded and self._yielded[0][0] == k:
            return True
        self._yielded.clear()
        try:
            # zip() and extend() run in C: between the sampler's return and the list no signal handler is called
            self._yielded.extend(zip((k,), self._iterator, strict=False))
        except Exception:
            raise
        except BaseException as error:
            self._interruption = error  # a generator is over now, and would seem to have come to its end
            raise
        if self._yielded:
            self._interruption = None
        return bool(self._yielded)


def _interrupted(k: int, error: BaseException) -> TeleloaderError:
    return TeleloaderError(
        f"{type(error).__name__} interrupted the sampler while it drew the indices of batch {k}, and ended it: this "
        "iterator cannot know the order from there on. Pass loader.state_dict() to loader.load_state_dict() and call "
        "iter(loader), which continues with that batch"
    )


def index_frame(address: Address, indices: Any) -> bytes:
    """The frame that tells a server what a batch holds.

    A list of whole numbers goes packed as an array, in a tenth of the time.

    Raises:
        TypeError: When the sampler gave something that cannot travel.
    """
    plain = indices
    if type(indices) is not list or set(map(type, indices)) != {int}:
        plain = _plain(indices)
    if type(plain) is list and set(map(type, plain)) == {int}:
        with suppress(OverflowError):
            plain = np.array(plain, np.int64).view(Tensor)
    try:
        return to_bytes(address, plain)
    except EncodeError as error:
        raise TypeError(f"the sampler gave something that cannot be sent as the index list: {error}") from None


def _plain(indices: Any) -> Any:
    """Whole numbers of NumPy and torch as Python's: a dataset is indexed with those."""
    kind = type(indices)
    if kind is int:
        return indices
    if kind is list or kind is tuple:
        return kind(_plain(index) for index in indices)
    if isinstance(indices, np.integer):
        return int(indices)
    torch = sys.modules.get("torch")
    if (
        torch is not None
        and isinstance(indices, torch.Tensor)
        and indices.ndim == 0
        and not indices.is_floating_point()
    ):
        return indices.item()
    return indices


class RandomState:
    """The random generators that the order and the base seeds of a loader's epochs are drawn from.

    Args:
        generator: The loader's torch.Generator, or None.
        samplers: Samplers whose own generators count, too: each torch.Generator, NumPy generator and random.Random that
            is an attribute of theirs.
        process: Libraries whose global generators count: names of `PROCESS_GENERATORS`.
    """

    def __init__(self, generator: Any, *samplers: Any, process: Iterable[str] = ()) -> None:
        found = [generator, *(value for sampler in samplers for value in getattr(sampler, "__dict__", {}).values())]
        self._own = list({id(own): own for own in found if _is_generator(own)}.values())
        self._process = tuple(process)

    def save(self) -> dict[str, Any]:
        """Return the states of all generators as JSON values; an empty dictionary if there are none."""
        saved = {library: PROCESS_GENERATORS[library].save() for library in self._process}
        return {**saved, "own": [_save_own(own) for own in self._own]} if self._own else saved

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set all generators to a saved state.

        Raises:
            StateMismatch: If the state holds other generators, or values that `save` does not return. Generators before
                the damaged one are set.
        """
        states = state.get("own", [])
        if len(states) != len(self._own):
            raise StateMismatch(
                f"the state was saved with {len(states)} generators of its own, and this loader has {len(self._own)}: "
                "resume with the loader's old arguments"
            )
        try:
            for own, saved in zip(self._own, states, strict=True):
                _restore_own(own, saved)
            for library in self._process:
                if state.get(library) is not None:
                    PROCESS_GENERATORS[library].restore(state[library])
        except (TypeError, ValueError, RuntimeError, LookupError, OverflowError) as error:
            raise StateMismatch(
                f"cannot restore the random generators of a state: {short(str(error))}. Pass what state_dict() returned"
            ) from None

    @contextmanager
    def as_saved(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Draw from the generators as they were at `state`; afterwards the global ones are as they were before.

        The loader's and the samplers' own generators keep the state that they were drawn to.

        Raises:
            StateMismatch: If it is the state of other generators.
        """
        process = RandomState(None, process=self._process)
        before = process.save()
        try:
            self.restore(state)
            yield
        finally:
            process.restore(before)


def _is_generator(value: object) -> bool:
    torch = sys.modules.get("torch")
    kinds = (random.Random, np.random.Generator, np.random.RandomState)
    return isinstance(value, kinds) or (torch is not None and isinstance(value, torch.Generator))


def _save_own(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return _Python.save(generator)
    if isinstance(generator, np.random.RandomState):
        return _NumPy.save(generator)
    if isinstance(generator, np.random.Generator):
        return _listed(generator.bit_generator.state)
    return _pack(generator.get_state().numpy())


def _restore_own(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        _Python.restore(state, generator)
    elif isinstance(generator, np.random.RandomState):
        _NumPy.restore(state, generator)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(sys.modules["torch"].from_numpy(_unpack(state, np.uint8)))


def _listed(state: Any) -> Any:
    """Return the state of a NumPy bit generator with lists for arrays, which its setter takes, too."""
    if isinstance(state, dict):
        return {name: _listed(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


class _Python:
    """A random.Random; by default the global one of the module ``random``."""

    @staticmethod
    def save(generator: Any = random) -> list[Any]:
        version, words, gauss = generator.getstate()
        return [version, _pack(np.array(words, np.uint32)), gauss]

    @staticmethod
    def restore(state: list[Any], generator: Any = random) -> None:
        version, words, gauss = state
        generator.setstate((version, tuple(_unpack(words, np.uint32).tolist()), gauss))


class _NumPy:
    """A numpy.random.RandomState; by default NumPy's global one."""

    @staticmethod
    def save(generator: Any = np.random) -> list[Any]:
        name, keys, position, has_gauss, cached = generator.get_state(legacy=True)
        return [name, _pack(np.asarray(keys, np.uint32)), position, has_gauss, cached]

    @staticmethod
    def restore(state: list[Any], generator: Any = np.random) -> None:
        name, keys, position, has_gauss, cached = state
        generator.set_state((name, _unpack(keys, np.uint32), position, has_gauss, cached))


class _Torch:
    """Torch's global generator of the CPU, where torch is loaded."""

    @staticmethod
    def save() -> str | None:
        torch = sys.modules.get("torch")
        return None if torch is None else _pack(torch.get_rng_state().numpy())

    @staticmethod
    def restore(state: str) -> None:
        torch = sys.modules.get("torch")
        if torch is not None:
            torch.set_rng_state(torch.from_numpy(_unpack(state, np.uint8)))


PROCESS_GENERATORS: Final[dict[str, Any]] = {"python": _Python, "numpy": _NumPy, "torch": _Torch}
"""Global generators of the process, by library."""


def _pack(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _unpack(text: str, dtype: Any) -> Any:
    return np.frombuffer(bytearray(base64.b64decode(text)), dtype)
