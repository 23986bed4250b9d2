"""Client-side samplers (torch's or the user's): index lists, saved states and random generators."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import islice
from reprlib import repr as short
from typing import Any, Final

import numpy as np

from teleloader_shared import user_state
from teleloader_shared.codec import BatchId, to_bytes
from teleloader_shared.errors import EncodeError, StateMismatch, TeleloaderError
from teleloader_shared.protocols import is_stateful
from teleloader_shared.tree import Tensor
from teleloader_shared.units import counted


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
    """Return the `sampler` and `batch_sampler` of a loader; create the defaults that torch's DataLoader would create.

    Args:
        dataset: A map-style dataset.
        batch_size: The loader's `batch_size` argument.
        shuffle: The loader's `shuffle` argument.
        drop_last: The loader's `drop_last` argument.
        sampler: The loader's `sampler` argument.
        batch_sampler: The loader's `batch_sampler` argument.
        generator: The loader's `generator` argument.
        as_torch: True to create torch's samplers; False to create only a batch sampler for a given sampler.
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
    """Return the function that torch's DataLoader uses if `collate_fn` is None."""
    from torch.utils.data import default_collate, default_convert

    return default_collate if batched else default_convert


class Batches:
    """Replacement for torch's BatchSampler, for NumPy and JAX output without importing torch.

    Args:
        sampler: Iterable of sample indices.
        batch_size: Number of indices in a batch.
        drop_last: Whether to omit an incomplete last batch.
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
    """Yield lists of `size` indices; the last list may be shorter, unless `drop_last` is set."""
    while batch := list(islice(indices, size)):
        if len(batch) == size or not drop_last:
            yield batch


def draw_base_seed(generator: Any) -> int:
    """Draw the int64 base seed of an iteration as torch's DataLoader does.

    Args:
        generator: A torch.Generator; None draws from torch's global one.
    """
    import torch

    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def is_torchs_own(sampler: object) -> bool:
    """Return True if a sampler and its inner sampler are torch's own, so that their order cannot depend on training."""
    inner = getattr(sampler, "sampler", None)
    own = type(sampler).__module__.startswith("torch.utils.data.")
    return own and (inner is None or is_torchs_own(inner))


class _Draws:
    """Iteration over a sampler, with the states of sampler and iterator (torchdata's ``Stateful`` protocol).

    torch's BatchSampler hides the iterator of the sampler that it batches, so its batching is reimplemented here.

    Args:
        sampler: Yields an index list for each batch; with ``batch_size=None`` an index for each sample.
        states: Earlier result of the method `states` to resume from; empty to start from the beginning.

    Raises:
        StateMismatch: If `states` has a state for a sampler or iterator without ``state_dict`` or ``load_state_dict``.
    """

    def __init__(self, sampler: Any, states: Mapping[str, Any]) -> None:
        self._states = states
        self._stateful: dict[str, Any] = {}
        source = batched_sampler(sampler)
        self._add_stateful("sampler", source)
        # as in torch, ``iter()`` of a batched sampler is not called before the first list is requested
        self.iterator = self._begin(source) if source is sampler else self._batches(source, sampler)

    def _begin(self, source: Any) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(source)
        if iterator is not source:
            self._add_stateful("iterator", iterator)
        return iterator

    def _batches(self, source: Any, batching: Any) -> Iterator[list[Any]]:
        yield from batched(self._begin(source), batching.batch_size, drop_last=batching.drop_last)

    def _add_stateful(self, name: str, stateful: Any) -> None:
        if is_stateful(stateful):
            self._stateful[name] = stateful
        if name in self._states:
            if name not in self._stateful:
                raise StateMismatch(
                    f"cannot restore the sampler: the saved state requires state_dict() and load_state_dict(), which "
                    f"{type(stateful).__name__} lacks. Resume with the arguments of the loader that saved the state"
                )
            stateful.load_state_dict(self._states[name])

    def states(self) -> dict[str, Any]:
        """Return the states of the sampler and its iterator, each only if it is stateful."""
        return {name: stateful.state_dict() for name, stateful in self._stateful.items()}


def batched_sampler(sampler: Any) -> Any:
    """Return the inner sampler of torch's BatchSampler or of `Batches`; return any other sampler unchanged."""
    torch = sys.modules.get("torch")
    batches = type(sampler) is Batches or (torch is not None and type(sampler) is torch.utils.data.BatchSampler)
    return sampler.sampler if batches else sampler


class SamplerStates:
    """Saved sampler states at the positions where the training loop may stop, and at the end of the epoch.

    Index lists are drawn before the training loop requests their batches, so the sampler's current state is ahead of
    the training loop. Each state is a dictionary of JSON values: `text` (see `user_state`), `next` (number of the next
    list) and `draws` (numbers of lists that `end_epoch` draws again, one number for each iteration over the sampler;
    empty in mid-epoch).
    """

    def __init__(self) -> None:
        self._states: dict[int, dict[str, Any]] = {}
        self.exhausted = False
        """True if the sampler has yielded its last list."""

    def put(self, number: int, state: dict[str, Any] | None) -> None:
        """Store the sampler's state before index list `number`; a state of None is ignored."""
        if state is not None:
            self._states[number] = state

    def release(self, number: int) -> None:
        """Discard the states for index lists before `number`, except the states that `end` needs."""
        for k in sorted(self._states)[:-2]:
            if k < number:
                del self._states[k]

    def before(self, number: int) -> dict[str, Any] | None:
        """Return the latest state at or before index list `number`, or None if no such state is stored."""
        return self._states.get(max((k for k in self._states if k <= number), default=-1))

    def end(self) -> dict[str, Any] | None:
        """Return the sampler's state at the end of this epoch, or None if no states are stored.

        The sampler need not have been iterated to its end: the result is the state before the last list, and the number
        of lists to draw from that state. The state after the last list would be wrong: a sampler that counts its
        indices would start the next epoch at that count.
        """
        last = sorted(self._states)[-2:]
        if not last:
            return None
        state, draws = self._states[last[0]], len(last) - 1 + self.exhausted
        return {**state, "draws": [*state["draws"], draws]} if draws else state


def sampler_state(states: Mapping[str, Any], number: int) -> dict[str, Any] | None:
    """Return an entry of `SamplerStates` with the states before index list `number`, or None if `states` is empty."""
    return {"text": user_state.pack(states, None, "a sampler"), "next": number, "draws": []} if states else None


def initial_state(sampler: Iterable[Any]) -> dict[str, Any] | None:
    """Return the state of a sampler before its first iteration, or None if the sampler is not stateful."""
    source = batched_sampler(sampler)
    return sampler_state({"sampler": source.state_dict()} if is_stateful(source) else {}, 0)


def end_epoch(sampler: Iterable[Any], state: Mapping[str, Any]) -> None:
    """Advance a sampler to its saved end-of-epoch state, for an epoch that another process iterated."""
    states = user_state.unpack(state["text"])
    for draws in state["draws"]:
        iterator = _Draws(sampler, states).iterator
        for _ in range(draws):
            next(iterator, None)
        states = {}


class ShownSamplers:
    """Detector of user changes to the samplers that a loader in seeded order exposes.

    For compatibility with torch, such a loader has the attributes `sampler` and `batch_sampler`. If the user changes an
    attribute of a sampler (``loader.batch_sampler.batch_size = 8``), the samplers determine the order from then on.
    With `seed` or several ranks, the next iteration raises `ValueError` instead.

    Args:
        samplers: Samplers to watch; None is ignored.
    """

    def __init__(self, *samplers: Any) -> None:
        self._original = [(sampler, dict(vars(sampler))) for sampler in samplers if sampler is not None]

    @property
    def change(self) -> str | None:
        """Name of the first changed attribute, such as ``BatchSampler.batch_size``; None if nothing changed."""
        for sampler, before in self._original:
            for name, value in vars(sampler).items():
                was = before.get(name)
                is_same = value is was or (isinstance(value, int) and value == was)
                if not is_same and name != "epoch":  # set_epoch() changes no argument
                    return f"{type(sampler).__name__}.{name}"
        return None


class IndexLists:
    """Index lists for the batches of one epoch, drawn from a client-side sampler on demand.

    Args:
        sampler: Yields an index list for each batch; with ``batch_size=None`` an index for each sample.
        skip: Number of lists to skip, because they belong to batches before the resumed position.
        state: State of the sampler at the loader's position, an entry of `SamplerStates`; None if it is not stateful.
    """

    def __init__(self, sampler: Iterable[Any], skip: int, state: dict[str, Any] | None = None) -> None:
        saved = None if state is None or state["draws"] else state
        self._draws = _Draws(sampler, {} if saved is None else user_state.unpack(saved["text"]))
        self._iterator = self._draws.iterator
        self._skip = skip
        self._next = 0 if saved is None else saved["next"]
        """Number of the list in `_yielded`, or of the next list that the sampler yields."""
        self.states = SamplerStates()
        self.states.put(self._next, state)
        self._yielded: list[tuple[int, Any]] = []
        """Last list, with its number; kept in case a signal handler raises before the list is encoded."""
        self._interruption: BaseException | None = None
        """Exception that interrupted the sampler, such as KeyboardInterrupt."""
        self.frames: dict[int, Any] = {}
        """Encoded lists that were not sent yet, by batch number; the sender assigns an empty dictionary."""
        self.exhausted = False
        """True if no more lists can be drawn."""
        self.error: Exception | None = None
        """Exception to raise in place of the next batch; None if the sampler did not fail."""

    @property
    def drawn(self) -> int:
        """Number of the next batch whose index list will be drawn; all earlier lists were drawn or skipped."""
        return max(self._skip, self._next)

    def draw(self, stop: int, encode: Callable[[int, Any], Any]) -> None:
        """Draw and encode the index lists of all batches before batch `stop`.

        An exception of the sampler is stored in `error`; an interruption such as KeyboardInterrupt is raised.

        Args:
            stop: First batch whose list is not drawn.
            encode: Encodes the indices of a batch as a frame, given the batch number.
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
            except Exception as error:  # noqa: BLE001 - raised in the training loop, in place of that batch
                self.error, self.exhausted = error, True
                return
            self._next = k + 1

    def _yield(self, k: int) -> bool:
        """Ensure that `_yielded` holds list k of the sampler; return False at the sampler's end."""
        if self._yielded and self._yielded[0][0] == k:
            return True
        self._yielded.clear()
        try:
            # zip(), map() and extend() run in C, so no signal handler runs between the sampler's return and the append.
            # map() calls next() only: zip() would call iter(), which restarts the samplers of Lightning's predictions
            self._yielded.extend(zip((k,), map(next, (self._iterator,)), strict=False))
        except Exception:
            raise
        except BaseException as error:
            self._interruption = error  # it exhausts a generator, which must not look like the end of the epoch
            raise
        if self._yielded:
            self._interruption = None
        return bool(self._yielded)


def _interrupted(k: int, error: BaseException) -> TeleloaderError:
    return TeleloaderError(
        f"{type(error).__name__} interrupted the sampler at batch {k}, so the order of further batches is unknown. To "
        "continue with that batch, pass loader.state_dict() to loader.load_state_dict(), then call iter(loader)"
    )


def index_frame(batch_id: BatchId, indices: Any) -> bytes:
    """Encode the sample indices of a batch as a frame, for sending to a server.

    A list of integers is encoded as an array, because this takes a tenth of the time.

    Args:
        batch_id: Identifier of the batch.
        indices: Value that the sampler yielded.

    Raises:
        TypeError: If the value cannot be encoded.
    """
    plain = indices
    if type(indices) is not list or set(map(type, indices)) != {int}:
        plain = _plain(indices)
    if type(plain) is list and set(map(type, plain)) == {int}:
        with suppress(OverflowError):
            plain = np.array(plain, np.int64).view(Tensor)
    try:
        return to_bytes(batch_id, plain, name="indices")
    except EncodeError as error:
        raise TypeError(f"the sampler yielded an invalid index list: {error}") from None


def _plain(indices: Any) -> Any:
    """Convert NumPy integers and 0-d integer tensors in `indices` to Python integers, as datasets expect."""
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


def nested_samplers(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers that it batches or divides, from the outermost; empty for None."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is outer for outer in found):
        found.append(sampler)
        sampler = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))
    return found


class RandomState:
    """Random generators that determine a loader's sample orders and base seeds; saves and restores their states.

    Args:
        generator: The loader's torch.Generator, or None.
        samplers: Samplers whose generators are included: each attribute that is a torch.Generator, a NumPy generator or
            a random.Random.
        process: Libraries whose global generators are included, as keys of `PROCESS_GENERATORS`.
    """

    def __init__(self, generator: Any, *samplers: Any, process: Iterable[str] = ()) -> None:
        found = [generator, *(value for sampler in samplers for value in getattr(sampler, "__dict__", {}).values())]
        self._own = list({id(own): own for own in found if _is_generator(own)}.values())
        self._process = tuple(process)

    def save(self) -> dict[str, Any]:
        """Return the states of all generators as JSON values; empty without generators."""
        saved = {library: _save(PROCESS_GENERATORS[library]()) for library in self._process}
        return {**saved, "own": [_save(own) for own in self._own]} if self._own else saved

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set all random generators to a saved state.

        Raises:
            StateMismatch: If the state has another number of generators, or is invalid. In the latter case, some
                generators may already be set.
        """
        states = state.get("own", [])
        if len(states) != len(self._own):
            raise StateMismatch(
                f"the state was saved with {counted(len(states), 'random generator')}, but this loader has "
                f"{len(self._own)}: resume with the arguments of the loader that saved the state"
            )
        try:
            for own, saved in zip(self._own, states, strict=True):
                _restore(own, saved)
            for library in self._process:
                if state.get(library) is not None:
                    _restore(PROCESS_GENERATORS[library](), state[library])
        except (TypeError, ValueError, RuntimeError, LookupError, OverflowError) as error:
            raise StateMismatch(
                f"cannot restore the random generators: {short(str(error))}. Pass an unchanged result of state_dict()"
            ) from None

    def as_saved(self, state: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Context manager that sets all random generators to `state`, and restores the global generators at exit.

        The generators of the loader and of its samplers are not restored.

        Raises:
            StateMismatch: If the state does not fit the generators.
        """
        return self._with(state, RandomState(None, process=self._process))

    def forecasting(self, state: Mapping[str, Any] | None) -> AbstractContextManager[None]:
        """Context manager that sets all random generators to `state`, unless it is None, and restores them at exit."""
        return nullcontext() if state is None else self._with(state, self)

    @contextmanager
    def _with(self, state: Mapping[str, Any], restored: RandomState) -> Iterator[None]:
        """Context manager that sets all random generators to `state`, and restores those of `restored` at exit."""
        before = restored.save()
        try:
            self.restore(state)
            yield
        finally:
            restored.restore(before)


def _is_generator(value: object) -> bool:
    torch = sys.modules.get("torch")
    kinds = (random.Random, np.random.Generator, np.random.RandomState)
    return isinstance(value, kinds) or (torch is not None and isinstance(value, torch.Generator))


def _save(generator: Any) -> Any:
    if generator is None:
        return None
    if generator is random or isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return [version, _pack(np.array(words, np.uint32)), gauss]
    if generator is np.random or isinstance(generator, np.random.RandomState):
        name, keys, position, has_gauss, cached = generator.get_state(legacy=True)
        return [name, _pack(np.asarray(keys, np.uint32)), position, has_gauss, cached]
    if isinstance(generator, np.random.Generator):
        return _listed(generator.bit_generator.state)
    return _pack(generator.get_state().numpy())


def _restore(generator: Any, state: Any) -> None:
    if generator is random or isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(_unpack(words, np.uint32).tolist()), gauss))
    elif generator is np.random or isinstance(generator, np.random.RandomState):
        name, keys, position, has_gauss, cached = state
        generator.set_state((name, _unpack(keys, np.uint32), position, has_gauss, cached))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif generator is not None:
        generator.set_state(sys.modules["torch"].from_numpy(_unpack(state, np.uint8)))


def _listed(state: Any) -> Any:
    """Return the state of a NumPy bit generator with lists in place of arrays; NumPy accepts both."""
    if isinstance(state, dict):
        return {name: _listed(value) for name, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray | np.generic) else state


PROCESS_GENERATORS: Final[dict[str, Callable[[], Any]]] = {
    "python": lambda: random,
    "numpy": lambda: np.random,
    "torch": lambda: getattr(sys.modules.get("torch"), "default_generator", None),
}
"""Functions that return the global random generator of a library, or None if the library is not loaded."""


def _pack(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _unpack(text: str, dtype: Any) -> Any:
    return np.frombuffer(bytearray(base64.b64decode(text)), dtype)
