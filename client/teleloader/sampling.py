"""The order that lives on the client: torch's samplers or the user's own, what they draw, and where they stand."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import numpy as np

from teleloader_shared.codec import Address, to_bytes
from teleloader_shared.errors import EncodeError, StateMismatch, TeleloaderError
from teleloader_shared.tree import Tensor


def make_samplers(
    dataset: Sized, batch_size: int | None, shuffle: bool, drop_last: bool, sampler: Any, generator: Any
) -> tuple[Any, Any]:
    """The sampler and batch sampler (None for ``batch_size=None``) that torch's DataLoader makes of its arguments."""
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

    if sampler is None:
        sampler = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
    return sampler, None if batch_size is None else BatchSampler(sampler, batch_size, drop_last)


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
        iterator = iter(self.sampler)
        while batch := list(islice(iterator, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)


def draw_base_seed(generator: Any) -> int:
    """The int64 that torch's DataLoader draws, from `generator` or torch's global one, when an iteration begins."""
    import torch

    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def is_torchs_own(sampler: object) -> bool:
    """Whether a sampler is one of torch's, which do not look at how training goes on while they are iterated."""
    inner = getattr(sampler, "sampler", None)
    own = type(sampler).__module__.startswith("torch.utils.data.")
    return own and (inner is None or is_torchs_own(inner))


class IndexLists:
    """The indices of the batches of one epoch, drawn from a sampler as they are needed.

    Args:
        sampler: Yields an index list for each batch; for ``batch_size=None`` an index for each sample.
        skip: How many of them were drawn by an earlier process.
    """

    def __init__(self, sampler: Iterable[Any], skip: int) -> None:
        self._iterator = iter(sampler)
        self._skip = skip
        self._next = 0
        """The number of the list that the sampler yields next, or has yielded and that is in `_yielded`."""
        self._yielded: list[tuple[int, Any]] = []
        """The last list, with its number. A signal handler that raises after the sampler yielded it does not lose it."""
        self._interruption: BaseException | None = None
        """What the sampler raised instead of a list, though nothing is wrong with it: Ctrl-C, for example."""
        self.frames: dict[int, bytes] = {}
        """Lists that were drawn and not sent, by batch number; whoever sends them replaces this by an empty one."""
        self.exhausted = False
        """Whether no more lists can be drawn."""
        self.error: Exception | None = None
        """Why not, if it is an error in the place of the next list."""

    @property
    def drawn(self) -> int:
        """The number of the batch whose list will be drawn next."""
        return max(self._skip, self._next)

    def draw(self, stop: int, encode: Callable[[int, Any], bytes]) -> None:
        """Draw the lists up to that of batch `stop`.

        Args:
            stop: The first batch whose list is not drawn.
            encode: Makes the frame of a batch number and what the sampler yielded for it.
        """
        while not self.exhausted and self.drawn < stop:
            k = self._next
            try:
                if not self._yield(k):
                    self.exhausted = True
                    self.error = None if self._interruption is None else _interrupted(k, self._interruption)
                    return
                if k >= self._skip:
                    self.frames[k] = encode(k, self._yielded[0][1])
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
        "iterator cannot know the order from there on. Pass loader.state_dict() to loader.load_state_dict() and call iter(loader), "
        "which continues with that batch"
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
    """The generators that samplers draw from, as they are at one moment: of Python, NumPy and torch, and their own.

    Args:
        generator: The loader's torch.Generator, if any.
        samplers: Those whose own generators count besides.
    """

    def __init__(self, generator: Any, *samplers: Any) -> None:
        found = [generator, *(getattr(sampler, "generator", None) for sampler in samplers)]
        self._own = list({id(own): own for own in found if hasattr(own, "get_state")}.values())

    def save(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        version, words, gauss = random.getstate()
        name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        torch = sys.modules.get("torch")
        return {
            "python": [version, _pack(np.array(words, np.uint32)), gauss],
            "numpy": [name, _pack(np.asarray(keys, np.uint32)), position, has_gauss, cached],
            "torch": None if torch is None else _pack(torch.get_rng_state().numpy()),
            "own": self.save_own(),
        }

    def save_own(self) -> list[str]:
        """The loader's and the samplers' own generators."""
        return [_pack(own.get_state().numpy()) for own in self._own]

    def restore_own(self, states: list[str]) -> None:
        """Set them.

        Raises:
            StateMismatch: When there are not as many.
        """
        if len(states) != len(self._own):
            raise StateMismatch(
                f"the state was saved with {len(states)} generators of its own, and this loader has {len(self._own)}: "
                "resume with the loader's old arguments"
            )
        for own, saved in zip(self._own, states, strict=True):
            own.set_state(sys.modules["torch"].from_numpy(_unpack(saved, np.uint8)))

    @contextmanager
    def as_saved(self, state: dict[str, Any]) -> Iterator[None]:
        """Draw as when the state was saved; afterwards the generators of the process are as they were before.

        The loader's and the samplers' own generators stay where they have come to: they belong to the loader.

        Raises:
            StateMismatch: When it is the state of other generators.
        """
        before = RandomState(None).save()
        self.restore_own(state["own"])
        self._restore(state)
        try:
            yield
        finally:
            RandomState(None)._restore(before)

    def _restore(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(_unpack(words, np.uint32).tolist()), gauss))
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, _unpack(keys, np.uint32), position, has_gauss, cached))
        torch = sys.modules.get("torch")
        if torch is not None and state["torch"] is not None:
            torch.set_rng_state(torch.from_numpy(_unpack(state["torch"], np.uint8)))


def _pack(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _unpack(text: str, dtype: Any) -> Any:
    return np.frombuffer(bytearray(base64.b64decode(text)), dtype)
