"""Plain values that a malicious peer chooses: they give a value or an error, run no code, and import nothing."""

from __future__ import annotations

import copy
import enum
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_shared import codec, registry
from teleloader_shared.codec import BatchId, Failure
from teleloader_shared.errors import EncodeError, ProtocolError
from teleloader_shared.memory import NumpyMemory, TorchMemory
from teleloader_shared.plain_values import TypeEntry
from teleloader_shared.registry import MAX_REASON
from tests.fuzz.trap import TOUCHED, Trap
from tests.fuzz.watching import Watch

MEMORIES: Final = (NumpyMemory, TorchMemory) if find_spec("torch") is not None else (NumpyMemory,)
BATCH_ID: Final = BatchId("loader", 0, 0)


class Flags(enum.Flag):
    """Flag with named and unnamed combinations."""

    ONE = 1
    TWO = 2


class _Carrier:
    """Class whose plain value is any value."""


def frame(name: str, plain: object) -> bytes:
    """Return the frame of a peer that sends any plain value for a registered name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._by_type, _Carrier, TypeEntry(name, lambda _: plain, lambda _: None))
        registry._found.clear()
        encoded = codec.to_bytes(BATCH_ID, _Carrier())
    registry._found.clear()
    return encoded


# --- Valid plain values of all ready-made conversions -------------------------------------------------------------


def _torch() -> Iterator[Any]:
    import torch

    dense = torch.eye(2)
    yield from (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_bsc((1, 1)))
    yield torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    yield torch.nested.nested_tensor_from_jagged(torch.ones(3), torch.tensor([0, 1, 3]), torch.tensor([1, 1]))


def _pillow() -> Iterator[Any]:
    from PIL import Image, PngImagePlugin, TiffImagePlugin

    image = Image.new("P", (2, 3))
    image.putpalette(bytes(range(6)))
    image.info["dpi"] = (TiffImagePlugin.IFDRational(1, 2),)
    yield from (image, Image.new("1", (9, 1)), TiffImagePlugin.IFDRational(1, 2), PngImagePlugin.iTXt("a", "b", "c"))


def _pandas() -> Iterator[Any]:
    pandas = import_module("pandas")
    yield from (pandas.Timestamp("2024-01-01", tz="Europe/Berlin"), pandas.Timestamp("2024-01-01"), pandas.NaT)


def _transformers() -> Iterator[Any]:
    tokenizers, transformers = import_module("tokenizers"), import_module("transformers")
    encoding = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).encode("a")
    yield from (transformers.BatchEncoding({"a": [1]}, [encoding]), transformers.BatchFeature({"a": [1]}), encoding)


def _tensordict() -> Iterator[Any]:
    import torch

    tensordict = import_module("tensordict")
    made = tensordict.TensorDict({"a": torch.ones(2), "b": ["x", "y"], "c": "z"}, [2], names=["n"], device="cpu")
    yield from (made, made.get("b"), made.get("c"), tensordict.TensorDict({}, []))


def _graphs() -> Iterator[Any]:
    import torch

    geometric = import_module("torch_geometric.data")
    graph = geometric.Data(x=torch.ones(2, 1), edge_index=torch.tensor([[0], [1]]))
    yield from (graph, geometric.Batch.from_data_list([graph, graph]))


def _monai() -> Iterator[Any]:
    import torch

    yield import_module("monai.data").MetaTensor(torch.ones(1, 2), meta={"filename": "x"})


def _torchvision() -> Iterator[Any]:
    import torch

    yield import_module("torchvision.tv_tensors").BoundingBoxes(torch.ones(1, 4), format="XYWH", canvas_size=(2, 2))


LIBRARIES: Final[dict[str, Callable[[], Iterator[Any]]]] = {
    "torch": _torch, "PIL.Image": _pillow, "pandas": _pandas, "transformers": _transformers, "tensordict": _tensordict,
    "torch_geometric.data": _graphs, "monai.data": _monai, "torchvision.tv_tensors": _torchvision,
}  # fmt: skip


@cache
def samples(library: str) -> list[tuple[str, Any]]:
    """Return the name and a plain value of each ready-made conversion of a library."""
    if library == "standard library and NumPy":
        values = iter((
            datetime(2024, 1, 2, tzinfo=ZoneInfo("Europe/Berlin")), datetime(2024, 1, 2, tzinfo=UTC), time(1, fold=1),
            date(2024, 1, 2), timedelta(1, 2, 3), Decimal("1.5"), Fraction(1, 3), UUID(int=5), Path("/a"), Flags.ONE,
            Flags.ONE | Flags.TWO, np.array(["a", "b"]), np.datetime64("2024-01-01"),
            np.array([(1, b"x")], [("a", "<i4"), ("b", "S2", (2,))]),
        ))  # fmt: skip
    else:
        pytest.importorskip(library)
        values = LIBRARIES[library]()
    return [(entry.name, entry.to_plain(value)) for value in values if (entry := _entry(value)) is not None]


def _entry(value: Any) -> TypeEntry | None:
    from teleloader_shared.tree import _leaf

    leaf = _leaf(value, "value")
    assert isinstance(leaf, TypeEntry), f"no conversion of {type(value)}"
    return leaf


# --- Hostile plain values -----------------------------------------------------------------------------------------


@cache
def hostile() -> list[Any]:
    """Return values to try in place of any part of a plain value."""
    return [
        Trap(1), [Trap(1)], {"a": Trap(1)}, {"_meta": Trap(1), "keys": Trap(2)}, (Trap(1), "<i4"),
        None, True, 0, -1, 2, 2**31, 2**63, 2**300, 0.5, float("nan"), 1j, "", "x", "ONE", "cuda", "/etc/passwd",
        "dateutil//etc/passwd", "a.b/c", "O", "T", "1e999999999", "x" * 100_000, b"", b"x" * 100_000,
        [], {}, [[]], [2**40, 2**40], [0, 2**40], [1] * 100, (), set(), range(2**60), slice(1),
        np.zeros(3, np.uint8), np.zeros((2, 0), np.uint8), np.arange(4.0), np.float64(1), np.datetime64("NaT"),
        np.array(["a"]), Decimal(1), datetime(1, 1, 1), Flags.ONE, Path("x"), Fraction(1, 3),
    ]  # fmt: skip


def mutants(plain: Any) -> Iterator[Any]:
    """Return copies of a plain value in which one part is replaced by a hostile one, removed or repeated."""
    yield from hostile()
    if isinstance(plain, list | tuple):
        for i, item in enumerate(plain):
            for changed in mutants(item):
                yield type(plain)([*plain[:i], changed, *plain[i + 1 :]])
            yield type(plain)([*plain[:i], *plain[i + 1 :]])
            yield type(plain)([*plain[:i], item, item, *plain[i + 1 :]])
    if type(plain) is dict:
        for name in plain:
            for changed in mutants(plain[name]):
                yield {**plain, name: changed}
        yield {**plain, **dict.fromkeys(("__class__", "data", "_mapping", "_parent", "to", "keys"), Trap(1))}


def encoded(name: str, plain: Any) -> bytes | None:
    """Return the frame with a plain value, or None if no frame can hold it."""
    try:
        return frame(name, plain)
    except EncodeError:
        return None


def receive(data: bytes) -> str:
    """Decode a frame as clients with different outputs do; raise if that runs code, imports, or has a long error."""
    modules = set(sys.modules)
    outcome = ""
    for memory in MEMORIES:
        TOUCHED.clear()
        content = codec.read(memory(np.frombuffer(bytearray(data), np.uint8))).content
        if TOUCHED:
            raise RuntimeError(f"a method of an imported dataclass ran: {TOUCHED}")
        if isinstance(content, Failure) and len(content.message) > MAX_REASON + 200:
            raise RuntimeError(f"the error has {len(content.message)} characters")
        outcome = "failure" if isinstance(content, Failure) else "value"
    added = {name for name in set(sys.modules) - modules if not name.startswith(_OWN_IMPORTS)}
    if added:
        raise RuntimeError(f"modules were imported: {added}")
    return outcome


_OWN_IMPORTS: Final = ("tzdata", "PIL.", "torch.", "torch_geometric.", "importlib")
"""Packages that read the data of time zones, and libraries that import modules of their own on first use."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", ["standard library and NumPy", *LIBRARIES])
def test_a_forged_plain_value_is_a_value_or_an_error(library: str) -> None:
    """With any part replaced: no other exception, no method of a dataclass, no import, no unbounded memory or time."""
    watch = Watch(receive, (ProtocolError,))
    for name, plain in samples(library):
        data = encoded(name, plain)
        assert data is not None
        assert receive(data) == "value"
        with watch.on():
            for number, mutant in enumerate(mutants(plain)):
                data = encoded(name, mutant)
                if data is not None:
                    watch.execute(number, data)
    assert not watch.findings, "\n".join(f"{found.rule}\n{found.details}" for found in watch.findings.values())
    assert watch.outcomes["failure"] > len(hostile())


@pytest.mark.filterwarnings("ignore")
@given(st.data())
def test_any_parts_of_plain_values_can_be_combined(data: st.DataObject) -> None:
    """Property test: several parts replaced, by hostile values or by parts of other plain values."""
    every = samples("standard library and NumPy")
    name, plain = data.draw(st.sampled_from(every))
    parts = st.sampled_from(hostile()) | st.sampled_from([part for _, other in every for part in _parts(other)])
    changed = [copy.copy(plain)] if isinstance(plain, list) else [plain]
    for _ in range(data.draw(st.integers(1, 3))):
        holder = changed[0] if isinstance(changed[0], list) and changed[0] else changed
        holder[data.draw(st.integers(0, len(holder) - 1))] = data.draw(parts)
    made = encoded(name, changed[0])
    if made is not None:
        with suppress(ProtocolError):
            receive(made)


def _parts(plain: Any) -> list[Any]:
    return plain if isinstance(plain, list) else [plain]
