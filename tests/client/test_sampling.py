"""Client-side sampling: indices are drawn lazily, sent as plain numbers, and drawn again after a resume."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from teleloader.sampling import (
    PROCESS_GENERATORS,
    Batches,
    IndexLists,
    RandomState,
    draw_base_seed,
    index_frame,
    is_torchs_own,
    make_samplers,
)
from teleloader_shared import codec
from teleloader_shared.codec import BatchId
from teleloader_shared.errors import StateMismatch
from tests.client.fake_server import IndexMemory
from tests.conftest import need


class Watched:
    """Sampler that counts how many indices were drawn, and may raise."""

    def __init__(self, length: int, *, fails_at: int | None = None) -> None:
        self._length = length
        self._fails_at = fails_at
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        for k in range(self._length):
            self.drawn += 1
            if k == self._fails_at:
                raise ValueError(f"no index {k}")
            yield 10 * k


# --- Drawing ------------------------------------------------------------------------------------------------------


def test_an_order_is_drawn_as_far_as_it_is_needed() -> None:
    """Indices are drawn only when they are needed, since a sampler may be infinite or depend on the training."""
    sampler = Watched(10**9)
    lists = IndexLists(sampler, 0)
    assert (sampler.drawn, lists.drawn) == (0, 0)
    assert drawn(lists, 2) == [(0, 0), (1, 10)]
    assert (sampler.drawn, lists.drawn) == (2, 2)
    assert drawn(lists, 2) == []
    assert drawn(lists, 3) == [(2, 20)]
    assert not lists.exhausted


def drawn(lists: IndexLists, stop: int) -> list[tuple[int, Any]]:
    """Draw up to batch `stop`; return the index lists to send."""
    lists.draw(stop, lambda _k, indices: indices)
    frames, lists.frames = lists.frames, {}
    return list(frames.items())


def test_the_end_shows_when_it_is_come_to() -> None:
    """The end of a sampler without a length is noticed when it is reached."""
    lists = IndexLists(Watched(2), 0)
    assert drawn(lists, 2) == [(0, 0), (1, 10)]
    assert (lists.drawn, lists.exhausted) == (2, False)
    assert drawn(lists, 5) == []
    assert (lists.drawn, lists.exhausted, lists.error) == (2, True, None)


class Restarting:
    """Sampler that is its own iterator and restarts in ``__iter__``, as Lightning's sampler of predictions."""

    def __iter__(self) -> Iterator[int]:
        self._left = iter([10, 20])
        return self

    def __next__(self) -> int:
        return next(self._left)


def test_iter_is_called_once() -> None:
    """A sampler that restarts in ``__iter__`` yields each list once."""
    assert drawn(IndexLists(Restarting(), 0), 5) == [(0, 10), (1, 20)]


def test_a_resumed_order_is_drawn_from_the_beginning_and_not_given() -> None:
    """Index lists of batches before the resume are drawn and skipped when the first new list is needed, not before."""
    sampler = Watched(5)
    lists = IndexLists(sampler, 3)
    assert (lists.drawn, sampler.drawn) == (3, 0)
    assert drawn(lists, 3) == []
    assert sampler.drawn == 0
    assert drawn(lists, 10) == [(3, 30), (4, 40)]


def test_a_resumed_order_may_be_at_its_end() -> None:
    """A resume at the end of the order, or beyond it if the sampler has become shorter, yields nothing."""
    for skip in (5, 6):
        lists = IndexLists(Watched(5), skip)
        assert drawn(lists, 10) == []
        assert lists.exhausted


def test_an_exception_of_the_sampler_stands_at_its_place() -> None:
    """Earlier lists are sent; the exception is stored for the loop, and ends the order."""
    lists = IndexLists(Watched(5, fails_at=2), 0)
    assert drawn(lists, 5) == [(0, 0), (1, 10)]
    assert (lists.drawn, lists.exhausted) == (2, True)
    assert isinstance(lists.error, ValueError)
    assert str(lists.error) == "no index 2"
    assert drawn(lists, 9) == []
    assert isinstance(lists.error, ValueError), "it is not lost"


def test_an_exception_among_what_is_skipped_is_not_lost() -> None:
    """An exception while skipping is raised at the first new batch."""
    lists = IndexLists(Watched(5, fails_at=1), 3)
    assert drawn(lists, 5) == []
    assert (lists.drawn, lists.exhausted, str(lists.error)) == (3, True, "no index 1")


def test_a_list_that_cannot_be_sent_ends_the_order_there() -> None:
    """An index list that cannot be encoded ends the order like an exception of the sampler; earlier lists are sent."""

    def encode(k: int, _indices: Any) -> bytes:
        if k == 2:
            raise TypeError("cannot be sent")
        return b""

    lists = IndexLists(Watched(5), 0)
    lists.draw(4, encode)
    assert (list(lists.frames), lists.drawn, lists.exhausted, str(lists.error)) == ([0, 1], 2, True, "cannot be sent")


def test_an_interrupted_sampler_cannot_go_on() -> None:
    """After an interruption the sampler's generator is exhausted: an error states this and how to continue."""

    class Interrupted:
        """Sampler that raises KeyboardInterrupt at its third step."""

        def __iter__(self) -> Iterator[int]:
            yield from (0, 10)
            raise KeyboardInterrupt

    lists = IndexLists(Interrupted(), 0)
    with pytest.raises(KeyboardInterrupt):
        drawn(lists, 5)
    assert (list(lists.frames), lists.drawn, lists.exhausted) == ([0, 1], 2, False)
    assert drawn(lists, 5) == [(0, 0), (1, 10)]
    assert (lists.drawn, lists.exhausted) == (2, True)
    assert str(lists.error).startswith("KeyboardInterrupt interrupted the sampler at batch 2")


# --- Sending ------------------------------------------------------------------------------------------------------


BATCH_ID = BatchId("key", 3, 7)


def sent(indices: Any) -> Any:
    """Return the indices that a server decodes from an index frame."""
    frame = codec.read(IndexMemory(np.frombuffer(index_frame(BATCH_ID, indices), np.uint8)))
    assert frame.batch_id == BATCH_ID
    return frame.content


@pytest.mark.parametrize(
    ("indices", "plain"),
    [
        (5, 5),
        ([1, 2], [1, 2]),
        (np.int64(5), 5),
        (np.uint8(5), 5),
        ([np.int32(1), 2], [1, 2]),
        ([(np.int64(1), "left"), (2, None)], [(1, "left"), (2, None)]),
        ([[np.int64(1)], []], [[1], []]),
        ("name", "name"),
        (["a", "b"], ["a", "b"]),
        ([True, 1.5, b"x", None], [True, 1.5, b"x", None]),
        ([True, False], [True, False]),
        ([], []),
        ((1, 2), (1, 2)),
        ([2**63, -1], [2**63, -1]),
        ([10**30], [10**30]),
        ({"row": 1}, {"row": 1}),
        ([slice(2, 5)], [slice(2, 5)]),
    ],
    ids=repr,
)
def test_whole_numbers_arrive_as_pythons(indices: Any, plain: Any) -> None:
    """Integers, also in nested lists and tuples, arrive as Python's int; other indices arrive unchanged."""
    got = sent(indices)
    assert got == plain
    assert types(got) == types(plain)


def types(value: Any) -> Any:
    """Return the types of a nested value."""
    return type(value), [types(item) for item in value] if isinstance(value, list | tuple) else None


def test_whole_numbers_of_torch_arrive_as_pythons() -> None:
    """An index ``tensor(3)`` of torch becomes ``3`` on the server, which may not have torch."""
    need("torch")
    import torch

    assert sent([torch.tensor(3), (torch.tensor(4, dtype=torch.uint8),)]) == [3, (4,)]
    assert [type(index) for index in sent(list(torch.arange(3)))] == [int] * 3
    assert sent(torch.tensor(True)) is True
    assert sent(torch.tensor([1, 2])) == [1, 2]


def test_an_array_of_indices_stays_an_array() -> None:
    """With ``batch_size=None``, arrays of a sampler index the dataset as arrays."""
    got = sent(np.arange(3))
    assert isinstance(got, np.ndarray)
    assert got.tolist() == [0, 1, 2]


@pytest.mark.parametrize("indices", [object(), [1, object()], lambda: 0], ids=["object", "in a list", "function"])
def test_what_cannot_be_sent_is_a_type_error(indices: Any) -> None:
    """The error names the sampler as the cause, and the position in the list."""
    with pytest.raises(TypeError, match=r"^the sampler yielded an invalid index list: cannot encode indices"):
        index_frame(BATCH_ID, indices)


def test_a_list_of_whole_numbers_travels_as_one_array() -> None:
    """The index list of a batch of 4,096 samples has 33 KB."""
    assert len(index_frame(BATCH_ID, list(range(4096)))) < 8 * 4096 + 512
    assert len(index_frame(BATCH_ID, [np.int32(index) for index in range(4096)])) < 8 * 4096 + 512


# --- torch's samplers ---------------------------------------------------------------------------------------------


def test_samplers_are_those_that_torch_makes() -> None:
    """The same arguments create the same samplers as in torch."""
    need("torch")
    from torch.utils.data import DataLoader

    for arguments in (
        {"batch_size": 3},
        {"batch_size": 3, "shuffle": True, "drop_last": True},
        {"batch_size": None},
        {"batch_size": None, "shuffle": True},
        {"batch_size": 2, "sampler": [3, 1]},
    ):
        torchs = DataLoader(range(10), **arguments)  # type: ignore[arg-type, unused-ignore]
        none = {"sampler": None, "batch_sampler": None, "generator": None}
        full = {"shuffle": False, "drop_last": False, **none, **arguments}
        sampler, batch_sampler = make_samplers(range(10), **full, as_torch=True)  # type: ignore[arg-type]
        assert type(sampler) is type(torchs.sampler)
        assert type(batch_sampler) is (type(None) if full["batch_size"] is None else type(torchs.batch_sampler))
        if batch_sampler is not None:
            assert (batch_sampler.batch_size, batch_sampler.drop_last) == (full["batch_size"], full["drop_last"])
            assert batch_sampler.sampler is sampler


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 5, 10, 11])
def test_without_torch_a_sampler_is_batched_as_torch_does_it(batch_size: int, drop_last: bool) -> None:
    """Batches of a sampler equal torch's, have the right length, are drawn lazily, and can be iterated again."""
    need("torch")
    from torch.utils.data import BatchSampler

    for length in (0, 1, 9, 10):
        sampler = list(range(length))
        batches = Batches(sampler, batch_size, drop_last)
        torchs = BatchSampler(sampler, batch_size, drop_last)
        for _ in range(2):
            assert list(batches) == list(torchs)
        assert len(batches) == len(torchs)


def test_a_sampler_is_batched_as_far_as_it_is_needed() -> None:
    """A sampler may be infinite; without a length, len() raises TypeError as in torch."""
    sampler = Watched(10**9)
    batches = Batches(sampler, 3, drop_last=False)
    assert next(iter(batches)) == [0, 10, 20]
    assert sampler.drawn == 3
    with pytest.raises(TypeError, match=r"object of type 'Watched' has no len\(\)"):
        len(batches)


def test_the_base_seed_is_the_number_that_torch_draws() -> None:
    """The base seed and the generator's state afterwards equal torch's, for the global and the loader's generator."""
    need("torch")
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(3)
    expected = iter(DataLoader(range(1)))._base_seed
    after = torch.rand(())
    torch.manual_seed(3)
    assert draw_base_seed(None) == expected
    assert torch.rand(()) == after
    generator = torch.Generator().manual_seed(3)
    assert draw_base_seed(generator) == expected
    assert torch.rand((), generator=generator) == after


def test_torchs_own_samplers_are_known() -> None:
    """Samplers of torch do not depend on the training, unless they wrap one that does."""
    need("torch")
    from torch.utils.data import (
        BatchSampler,
        RandomSampler,
        Sampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )
    from torch.utils.data.distributed import DistributedSampler

    class Mine(Sampler[int]):  # type: ignore[misc, unused-ignore]
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    class Changed(RandomSampler):  # type: ignore[misc, unused-ignore]
        """Sampler that may depend on the training."""

    numbers = range(10)
    torchs: list[Any] = [
        RandomSampler(numbers),
        SequentialSampler(numbers),
        SubsetRandomSampler([1, 2]),
        WeightedRandomSampler([1.0, 2.0], 2),
        DistributedSampler(numbers, 2, 0),  # type: ignore[arg-type, unused-ignore]
    ]
    others: list[Any] = [Mine(), Changed(numbers), [1, 2], iter([1]), None]
    assert [is_torchs_own(sampler) for sampler in torchs] == [True] * len(torchs)
    assert [is_torchs_own(BatchSampler(sampler, 2, False)) for sampler in torchs] == [True] * len(torchs)
    assert [is_torchs_own(sampler) for sampler in others] == [False] * len(others)
    assert not is_torchs_own(BatchSampler(Mine(), 2, False))
    assert not is_torchs_own(BatchSampler([1, 2], 2, False))  # type: ignore[arg-type, unused-ignore]


# --- States of generators -----------------------------------------------------------------------------------------


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as loaded from a checkpoint."""
    plain: dict[str, Any] = json.loads(json.dumps(state))
    return plain


def draw(generator: Any = None) -> list[float]:
    """Return a number of each generator."""
    import torch

    numbers = [random.random(), random.gauss(0, 1), float(np.random.random()), float(np.random.normal())]
    own = [] if generator is None else [float(torch.rand((), generator=generator))]
    return [*numbers, float(torch.rand(())), *own]


@pytest.fixture
def generators() -> Iterator[Any]:
    """Yield a loader's own generator; restore the generators of the process afterwards."""
    need("torch")
    import torch

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield torch.Generator().manual_seed(5)
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def test_what_is_drawn_from_a_saved_state_is_the_same_again(generators: Any) -> None:
    """States restore Python's, NumPy's, torch's and the loader's generators, including the second normal number."""
    random.gauss(0, 1)
    np.random.normal()
    every = RandomState(generators, process=PROCESS_GENERATORS)
    state = through_json(every.save())
    first = draw(generators)
    assert draw(generators) != first
    with every.as_saved(state):
        assert draw(generators) == first
    every.restore(state)
    assert draw(generators) == first


@pytest.mark.parametrize("fails", [False, True])
def test_the_process_draws_on_where_it_was(generators: Any, fails: bool) -> None:
    """Resuming an order does not change the training loop's generators, even after an error."""
    np.random.normal()
    every = RandomState(None, process=PROCESS_GENERATORS)
    state = through_json(every.save())
    draw()
    here = every.save()
    with suppress(ZeroDivisionError), every.as_saved(state):
        draw()
        assert 1 / (not fails)
    assert every.save() == here


def test_a_loaders_own_generator_stays_where_it_has_come_to(generators: Any) -> None:
    """Restoring a saved state does not rewind a loader's own generator for the next epoch."""
    state = through_json(RandomState(generators).save())
    draw(generators)
    after_one = draw(generators)[-1]
    with RandomState(generators).as_saved(state):
        draw(generators)
    assert draw(generators)[-1] == after_one


def test_samplers_bring_generators_of_their_own(generators: Any) -> None:
    """The generator of a sampler is saved once, even if several samplers share it."""
    import torch
    from torch.utils.data import RandomSampler

    other = torch.Generator().manual_seed(8)
    samplers = [RandomSampler(range(9), generator=own) for own in (generators, other, None)]
    state = through_json(RandomState(generators, *samplers, None, [1, 2]).save())
    assert len(state["own"]) == 2
    expected = [list(sampler) for sampler in samplers[:2]]
    assert [list(sampler) for sampler in samplers[:2]] != expected
    with RandomState(generators, *samplers).as_saved(state):
        assert [list(sampler) for sampler in samplers[:2]] == expected


def test_only_the_named_global_generators_are_saved_and_restored(generators: Any) -> None:
    """Without names, only the loader's own generators are restored; a state of another number is rejected."""
    own = RandomState(generators)
    state = through_json(own.save())
    assert list(state) == ["own"]
    assert RandomState(None).save() == {}
    assert list(RandomState(None, process=["torch"]).save()) == ["torch"]
    expected = draw(generators)[-1]
    every = RandomState(None, process=PROCESS_GENERATORS)
    here = every.save()
    own.restore(state)
    assert every.save() == here
    assert draw(generators)[-1] == expected
    with pytest.raises(StateMismatch, match="saved with 2 random generators, but this loader has 1: resume with"):
        own.restore({"own": state["own"] * 2})


@pytest.mark.parametrize(
    "damaged",
    [{"python": [3, "AA==", None]}, {"python": 5}, {"numpy": ["MT19937", "", 0, 0, 0.0]}, {"torch": "AA=="},
     {"torch": 1}, {"torch": "%"}],
    ids=str,
)  # fmt: skip
def test_a_damaged_state_of_a_generator_is_refused(generators: Any, damaged: dict[str, Any]) -> None:
    """The error for any damaged value is a StateMismatch that states what to pass."""
    every = RandomState(None, process=PROCESS_GENERATORS)
    with pytest.raises(StateMismatch, match="cannot restore the random generators: "):
        every.restore({**every.save(), **damaged})


def test_a_state_of_other_generators_is_refused(generators: Any) -> None:
    """The error has the numbers of saved and current generators; no generator changes."""
    state = through_json(RandomState(generators).save())
    every = RandomState(None, process=PROCESS_GENERATORS)
    here = every.save()
    with (
        pytest.raises(StateMismatch, match="saved with 1 random generator, but this loader has 0: resume with"),
        every.as_saved(state),
    ):
        pytest.fail("nothing may be drawn")
    assert every.save() == here


def test_without_torch_there_are_two_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch, states contain Python's and NumPy's generators, and can be used with torch."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        every = RandomState(None, process=PROCESS_GENERATORS)
        state = through_json(every.save())
        first = random.random(), float(np.random.random())
    assert state["torch"] is None
    with every.as_saved(state):
        assert (random.random(), float(np.random.random())) == first
