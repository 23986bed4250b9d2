"""The contract's rules on batches: collation, conversion, and every supported type."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from teleloader import DataLoader, DecodeError, RemoteDataset, TeleloaderError, register
from teleloader_server import serve
from teleloader_shared import registry
from tests.conftest import ROOT
from tests.end_to_end.contract import Made, Numbers, assert_same, both, ours, torch, torch_is_there, torchs

__all__ = ["torch_is_there"]

Point = namedtuple("Point", ["x", "y"])


class Row(NamedTuple):
    """Typed namedtuple."""

    name: str
    values: Any


@dataclasses.dataclass
class Record:
    """Dataclass, which torch's default_collate rejects."""

    name: str
    score: Any


SAMPLES: dict[str, Any] = {
    "int": lambda i: i,
    "large int": lambda i: 2**62 + i,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 2 == 0,
    "complex array": lambda i: np.array([i + 1j], np.complex64),
    "str": lambda i: f"s{i}",
    "bytes": lambda i: bytes([i]),
    "numpy scalars": lambda i: (np.float16(i), np.int8(i), np.uint8(i), np.bool_(i % 2), np.float32(i), np.int64(i)),
    "arrays": lambda i: (np.full((2, 3), i, np.uint8), np.full(2, i, np.float64), np.array(i, np.int16)),
    "empty array": lambda i: np.zeros((0, 3), np.float32),
    "tensors": lambda i: (torch.full((2,), i), torch.tensor(float(i)), torch.zeros(0), torch.tensor([i > 2])),
    "half tensors": lambda i: {"half": torch.full((2,), i).half(), "bfloat16": torch.full((2,), i / 7).bfloat16()},
    "small floats": lambda i: torch.full((2,), float(i)).to(torch.float8_e4m3fn),
    "complex tensors": lambda i: torch.full((2,), i + 1j),
    "tensor that needs a gradient": lambda i: torch.full((2,), float(i)).detach(),
    "non-contiguous": lambda i: (np.arange(12).reshape(3, 4).T + i, torch.arange(12).reshape(3, 4).T[::2] + i),
    "negative strides and other byte order": lambda i: np.arange(i, i + 3)[::-1].copy(),
    "tuple of number and string": lambda i: (i, f"s{i}"),
    "list": lambda i: [i, float(i), f"s{i}"],
    "dict": lambda i: {"z": i, "a": f"s{i}", "image": np.full((2, 2), i, np.uint8)},
    "OrderedDict": lambda i: OrderedDict([("z", i), ("a", float(i))]),
    "defaultdict": lambda i: defaultdict(list, {"a": i}),
    "Counter": lambda i: Counter({"a": i, "b": 2 * i}),
    "dict with other keys": lambda i: {1: i, (2, "x"): float(i), None: i},
    "namedtuple": lambda i: Point(i, np.full(2, i)),
    "typed namedtuple": lambda i: Row(f"r{i}", torch.full((1,), i)),
    "nested": lambda i: {"a": [i, (i, {"b": Point(i, [f"{i}"])})], "c": ({"d": float(i)},)},
    "empty containers": lambda i: {"list": [], "tuple": (), "dict": {}, "i": i},
    "mixed numbers": lambda i: i if i % 2 == 0 else float(i),
    "mixed arrays": lambda i: np.full(2, i, np.int32 if i % 2 else np.int64),
}


@pytest.mark.parametrize("batch_size", [3, None])
@pytest.mark.parametrize("kind", SAMPLES)
def test_default_collate_and_convert_are_torchs(kind: str, batch_size: int | None) -> None:
    """A38: containers, dtypes and values of each kind of sample, collated, and converted (A36) one by one."""
    both(Made(SAMPLES[kind], 7), batch_size=batch_size, epochs=1)


REFUSED: dict[str, Any] = {
    "None": lambda i: None,
    "object": lambda i: object(),
    "complex": lambda i: 1j,
    "datetime64": lambda i: np.datetime64("2020-01-01"),
    "array of str": lambda i: np.array(["a"]),
    "array of objects": lambda i: np.array([None]),
    "dataclass": lambda i: Record("a", 1),
    "set": lambda i: {1},
    "ragged arrays": lambda i: np.zeros(i + 1),
    "ragged tensors": lambda i: torch.zeros(i + 1),
    "ragged lists": lambda i: [0] * (i + 1),
    "missing key": lambda i: {"a": 1} if i == 0 else {"b": 1},
    "number and string": lambda i: 1 if i == 0 else "a",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_default_collate_refuses(kind: str) -> None:
    """A38: the exception and its last line are those of torch in a worker, with the path in the sample."""
    outcomes = []
    dataset = Made(REFUSED[kind], 2)
    with pytest.raises(Exception, match="Caught") as theirs:
        list(torchs(dataset, batch_size=2, num_workers=1))
    with ours(dataset, batch_size=2, num_workers=1) as loader, pytest.raises(Exception, match="Caught") as mine:
        list(loader)
    for raised in (theirs, mine):
        text = str(raised.value).partition("\n\nThe error occurred ")[0].rstrip()
        lines = [line for line in text.splitlines() if not line.startswith("The value is sample")]
        outcomes.append((type(raised.value), lines[0], lines[-1]))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kind", ["int", "float", "bool", "numpy scalars", "arrays", "mixed numbers", "dict"])
def test_dtypes_without_torch_on_the_server(kind: str) -> None:
    """A38: a server without torch uses the same dtypes: float is float64, int is int64."""
    program = f"""
import sys
sys.modules["torch"] = None
import numpy as np
from teleloader_server import default_collate
samples = [(lambda i: {_SOURCES[kind]})(i) for i in range(3)]
def show(batch):
    if isinstance(batch, dict):
        return {{key: show(item) for key, item in batch.items()}}
    if isinstance(batch, (list, tuple)):
        return [show(item) for item in batch]
    return (str(batch.dtype), batch.tolist()) if hasattr(batch, "dtype") else batch
print(show(default_collate(samples)))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    def show(batch: Any) -> Any:
        if isinstance(batch, dict):
            return {key: show(item) for key, item in batch.items()}
        if isinstance(batch, list | tuple):
            return [show(item) for item in batch]
        return (str(batch.dtype).removeprefix("torch."), batch.tolist()) if hasattr(batch, "dtype") else batch

    samples = [SAMPLES[kind](i) for i in range(3)]
    assert done.stdout.strip() == str(show(torch.utils.data.default_collate(samples)))


_SOURCES = {
    "int": "i",
    "float": "i / 3",
    "bool": "i % 2 == 0",
    "numpy scalars": (
        "(np.float16(i), np.int8(i), np.uint8(i), np.bool_(i % 2), np.float32(i), np.int64(i))"
    ),
    "arrays": "(np.full((2, 3), i, np.uint8), np.full(2, i, np.float64), np.array(i, np.int16))",
    "mixed numbers": "i if i % 2 == 0 else float(i)",
    "dict": '{"z": i, "a": f"s{i}", "image": np.full((2, 2), i, np.uint8)}',
}  # fmt: skip
"""Source code of the samples with the same names."""


# -- results of collate functions

RESULTS: dict[str, Any] = {
    "None": None,
    "numbers": [1, -1, 2**63, 2**80, 0.5, float("inf"), True, 1 + 2j],
    "text": ["", "ä€😀", b"", b"\x00\xff"],
    "tuple, not list": ((1, 2), [1, 2], ((),), []),
    "mappings": {"a": OrderedDict(z=1, a=2), "b": defaultdict(None, {1: 2}), (1, "x"): None, 2.5: {None: 1}},
    "sets": ({1, 2}, frozenset({"a"}), range(3), deque([1, 2], maxlen=3)),
    "records": [Point(1, "a"), Row("r", [1]), Record("a", (1, None))],
    "arrays": [
        np.float32(1), np.array(1, np.int8), np.zeros((0, 3)), np.array([[True]]), np.zeros(3, np.float16),
        np.arange(12).reshape(3, 4).T, np.arange(5)[::-2], np.arange(3, dtype=">i4").astype("<i4"),
    ],
    "deep": [[[[[[[[[[{"a": [1]}]]]]]]]]]],
}  # fmt: skip


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", RESULTS)
def test_results_of_any_nesting_travel(name: str, num_workers: int) -> None:
    """A29: the result of a collate function arrives with its types: tuples, lists, namedtuples, None, bytes ..."""
    both(Numbers(2), num_workers=num_workers, collate_fn=lambda _: RESULTS[name], epochs=1)


def test_tensors_of_a_collate_function() -> None:
    """A29: 0-d, empty, bool, half, bfloat16, complex and non-contiguous tensors, and one tensor twice."""

    def collate(samples: list[int]) -> Any:
        base = torch.arange(12.0).reshape(3, 4)
        return {
            "0-d": torch.tensor(samples[0]), "empty": torch.zeros(0, 2), "bool": torch.tensor([True]),
            "half": base.half(), "bfloat16": base.bfloat16(), "complex": base.to(torch.complex64), "T": base.T,
            "step": base[:, ::2], "expanded": base[:1].expand(5, 4), "twice": (base, base), "int8": base.to(torch.int8),
            "uint16": base.to(torch.uint16), "conj": torch.tensor([1 + 2j]).conj(), "parameter": base.requires_grad_(),
        }  # fmt: skip

    with ours(Numbers(1), num_workers=1, collate_fn=collate) as loader:
        (batch,) = loader
    expected = {key: _detached(value) for key, value in collate([0]).items()}
    assert_same(batch, expected)


def _detached(value: Any) -> Any:
    return tuple(map(_detached, value)) if isinstance(value, tuple) else value.detach().resolve_conj()


def test_arrays_arrive_writable() -> None:
    """A29: read-only arrays are writable on arrival, and batches never share memory with each other."""

    def sample(i: int) -> Any:
        array = np.full(3, i)
        array.flags.writeable = False
        return array

    with ours(Made(sample, 3), num_workers=1, collate_fn=lambda samples: samples[0]) as loader:
        batches = list(loader)
    for i, batch in enumerate(batches):
        assert batch.flags.writeable
        assert batch.tolist() == [i] * 3
        batch += 10
    assert [batch.tolist() for batch in batches] == [[10] * 3, [11] * 3, [12] * 3]


def test_large_arrays() -> None:
    """A29: a batch of many megabytes arrives bit for bit."""
    rng = np.random.default_rng(0)
    big = rng.integers(0, 255, (3, 4 * 2**20), np.uint8)
    with ours(Made(lambda i: big[i], 3), batch_size=2, num_workers=2) as loader:
        assert_same(list(loader), [torch.from_numpy(big[:2].copy()), torch.from_numpy(big[2:].copy())])


# -- custom datasets and collating


class Faces(Numbers):
    """Dataset as in torch's tutorial on data loading: an image and landmarks, transformed, in a dict."""

    def __init__(self, transform: Any = None) -> None:
        super().__init__(9)
        self.transform = transform

    def __getitem__(self, index: Any) -> Any:
        if torch.is_tensor(index):
            index = index.tolist()
        landmarks = np.arange(index, index + 6, dtype=float).reshape(-1, 2)
        sample = {"image": np.full((4, 5, 3), index, np.uint8), "landmarks": landmarks}
        return self.transform(sample) if self.transform else sample


def _to_tensor(sample: dict[str, Any]) -> dict[str, Any]:
    image = sample["image"].transpose((2, 0, 1))
    return {"image": torch.from_numpy(image), "landmarks": torch.from_numpy(sample["landmarks"])}


@pytest.mark.parametrize("transform", [None, _to_tensor])
def test_the_datasets_of_tutorials(transform: Any) -> None:
    """A27: a dict of image and landmarks is collated per key, in the order of its keys."""
    first, _ = both(Faces(transform), batch_size=4, shuffle=True)
    assert [list(batch) for batch in first] == [["image", "landmarks"]] * 3


def test_padding_in_a_collate_function() -> None:
    """A37: with pad_sequence a batch has the length of its longest sample; shapes vary between batches."""
    from torch.nn.utils.rnn import pad_sequence

    def collate(samples: list[Any]) -> Any:
        return pad_sequence(samples, batch_first=True), torch.tensor([len(sample) for sample in samples])

    dataset = Made(lambda i: torch.arange(1 + i * 37 % 11), 12)
    first, _ = both(dataset, batch_size=3, shuffle=True, collate_fn=collate, num_workers=2)
    assert len({padded.shape for padded, _ in first}) > 1
    for padded, lengths in first:
        assert padded.shape[1] == lengths.max()


def test_packed_sequences_and_other_objects_of_torch() -> None:
    """A29: a PackedSequence is a namedtuple, and arrives as one."""
    from torch.nn.utils.rnn import PackedSequence, pack_sequence

    def collate(samples: list[Any]) -> Any:
        return pack_sequence(samples, enforce_sorted=False)

    dataset = Made(lambda i: torch.arange(1.0 + i), 4)
    expected = list(torchs(dataset, batch_size=2, collate_fn=collate))
    with ours(dataset, batch_size=2, collate_fn=collate) as loader:
        got = list(loader)
    assert all(type(batch) is PackedSequence for batch in got)
    assert_same([tuple(batch) for batch in got], [tuple(batch) for batch in expected])


# -- page-locked memory


def test_pinning_without_an_accelerator() -> None:
    """A31: pinning raises torch's warning and returns ordinary tensors; strings and bytes are unchanged."""
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    dataset = Made(lambda i: {"a": torch.tensor(i), "b": f"s{i}", "c": b"x"}, 4)
    texts, batches = [], []
    with serve(dataset) as url:
        for make, data in ((torchs, dataset), (DataLoader, RemoteDataset(url))):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                batches.append(list(make(data, batch_size=2, pin_memory=True, num_workers=1)))
            texts.append([str(warning.message) for warning in caught if "pin_memory" in str(warning.message)])
    assert texts[0] == texts[1]
    assert_same(batches[1], batches[0])


def test_pinning_needs_torch() -> None:
    """A31: for outputs other than torch's, the error names the extra to install."""
    with serve(Numbers()) as url, pytest.raises(TeleloaderError, match=r"teleloader\[torch\]"):
        DataLoader(RemoteDataset(url), pin_memory=True, output="numpy")


def test_pinned_batches_of_any_size() -> None:
    """A31, A37: with an accelerator, tensors of varying sizes arrive in reused page-locked buffers."""
    if not torch.accelerator.is_available():
        pytest.skip("requires an accelerator")
    dataset = Made(lambda i: {"a": torch.full((1000 * (i % 7 + 1),), i), "b": f"s{i}"}, 40)
    with ours(dataset, pin_memory=True, num_workers=2) as loader:
        for i, batch in enumerate(loader):
            assert batch["a"].is_pinned()
            assert batch["a"].shape == (1, 1000 * (i % 7 + 1))
            assert bool((batch["a"].to("cuda", non_blocking=True) == i).all())
            assert batch["b"] == [f"s{i}"]


def test_cuda_tensors_are_refused_by_workers() -> None:
    """A32: the error for CUDA tensors states to return CPU tensors and to use ``pin_memory``."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    dataset = Made(lambda i: torch.zeros(2, device="cuda"), 1)
    with ours(dataset, serve_with={"num_workers": 0}) as loader, pytest.raises(TypeError, match="pin_memory"):
        list(loader)


class Pinnable:
    """Batch of a user-defined class."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def pin_memory(self) -> Pinnable:
        """Return the batch: the method that torch requires."""
        return self


class Box:
    """Class that is registered on one side only, or on both."""

    def __init__(self, corners: Any) -> None:
        self.corners = corners


REGISTERED: dict[str, Any] = {
    "path": lambda i: Path(f"/data/{i}.jpg"),
    "date": lambda i: {"at": datetime(2024, 1, 1 + i, tzinfo=UTC), "of": {date(2024, 1, 1): i}},
    "strings": lambda i: np.array([f"s{i}", "x"]),
    "dates": lambda i: np.arange("2024-01-01", "2024-01-04", dtype="M8[D]") + i,
}


@pytest.mark.parametrize("kind", REGISTERED)
def test_registered_types_arrive_from_workers(kind: str) -> None:
    """As torch's workers return them, in lists that a collate function returns."""
    for got, expected in zip(
        *both(Made(REGISTERED[kind], 4), batch_size=2, collate_fn=list, num_workers=1), strict=True
    ):
        assert [type(one) for one in got] == [type(one) for one in expected]
        assert repr(got) == repr(expected)


def test_a_type_that_only_the_server_registered_is_an_error_of_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the training process has registered the type, it receives the instances."""
    for name in ("_by_type", "_by_name"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    register(Box, "tests.Box", lambda box: box.corners, Box)
    with ours(Made(lambda i: Box(np.arange(i)), 4), batch_size=2, collate_fn=list, num_workers=1) as loader:
        assert [len(box.corners) for batch in loader for box in batch] == [0, 1, 2, 3]
        conversion = registry._by_name.pop("tests.Box")
        batches = iter(loader)
        for _ in range(2):
            with pytest.raises(DecodeError, match=r"cannot restore a value of type 'tests.Box'.* before iterating"):
                next(batches)
        registry._by_name["tests.Box"] = conversion
        assert [len(box.corners) for batch in loader for box in batch] == [0, 1, 2, 3]


def test_objects_of_ones_own_class_are_refused_with_their_name() -> None:
    """A29: the error for an object of a user-defined class has its class and path."""

    def collate(samples: list[int]) -> dict[str, Pinnable]:
        return {"batch": Pinnable(samples)}

    place = r"batch\['batch'\]: unsupported type .*Pinnable"
    with ours(Numbers(1), num_workers=1, collate_fn=collate) as loader, pytest.raises(TypeError, match=place):
        list(loader)


class Unsendable:
    """User-defined object that cannot be encoded."""


@pytest.mark.parametrize(
    ("batch_size", "place"),
    [
        (2, r"The value is sample\['meta'\]\[2\]"),
        (None, r"sample\['meta'\]\[2\]: unsupported type .*Unsendable"),
    ],
)
def test_what_cannot_travel_is_named_with_its_place_in_the_sample(batch_size: int | None, place: str) -> None:
    """A29: the error for an arbitrary object has its path in the sample, collated or not."""
    with (
        serve(Made(lambda i: {"meta": [i, "name", Unsendable()]}), num_workers=1) as url,
        pytest.raises(TypeError, match=place),
    ):
        list(DataLoader(RemoteDataset(url), batch_size))
