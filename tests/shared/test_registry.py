"""Registered types: instances arrive equal and of the same type, or the batch has an error that states what to do."""

from __future__ import annotations

import enum
import io
import pathlib
import sys
import uuid
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from teleloader_shared import codec, registry
from teleloader_shared.codec import BatchId, Failure
from teleloader_shared.errors import DecodeError, EncodeError
from teleloader_shared.memory import NumpyMemory, TorchMemory
from teleloader_shared.plain_values import TypeEntry
from teleloader_shared.registry import register
from teleloader_shared.tree import flatten, unflatten
from tests.conftest import examples, label, need

BATCH_ID = BatchId("loader", 0, 0)


def received(batch: object, memory: type[NumpyMemory] = TorchMemory) -> Any:
    """Return a batch, or its failure, as a client receives it."""
    raw = np.frombuffer(bytearray(codec.to_bytes(BATCH_ID, batch)), np.uint8)
    return codec.read(memory(raw)).content


def forged(name: str, plain: object) -> Any:
    """Return what a client receives from a server that sends any plain value for a registered name."""
    entry = TypeEntry(name, lambda _: plain, lambda _: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._by_type, Sample, entry)
        registry._found.clear()
        raw = np.frombuffer(bytearray(codec.to_bytes(BATCH_ID, Sample(0))), np.uint8)
    registry._found.clear()
    return codec.read(TorchMemory(raw)).content


class Color(enum.Enum):
    """Enum."""

    RED = "r"
    GREEN = "g"


class Level(enum.IntEnum):
    """Enum that is also an int."""

    LOW = 1


class Name(enum.StrEnum):
    """Enum that is also a str."""

    FIRST = "first"


class Mode(enum.Flag):
    """Enum whose members can be combined."""

    READ = 1
    WRITE = 2
    OPEN = 4


class Hooked(enum.Flag):
    """Flag that runs code of its own when members are combined."""

    ON = 1
    OFF = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        pytest.fail("code of a class that the server selects ran in the client")


class Kept(enum.Flag, boundary=enum.KEEP):
    """Flag that keeps bits without a member."""

    ON = 1


class Sample:
    """Class that users register."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        """Compare the values."""
        return isinstance(other, Sample) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the test's registrations when it ends."""
    for name in ("_by_type", "_by_name"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    yield
    registry._found.clear()


# --- Types that users register ------------------------------------------------------------------------------------


def test_a_registered_type_arrives_as_its_own() -> None:
    """Anywhere in a batch, with arrays and other registered types in its plain value."""
    register(Sample, "tests.Sample", lambda sample: {"value": sample.value}, lambda plain: Sample(plain["value"]))
    batch = {"a": [Sample(1), Sample((Color.RED, Sample(None)))], "b": Sample("x")}
    assert received(batch) == batch
    (arrived,) = received([Sample(np.arange(3))])
    assert arrived.value.tolist() == [0, 1, 2]


def test_registration_precedes_the_conversion_of_dataclasses_and_libraries() -> None:
    """Users may replace a conversion."""
    register(date, "tests.date", lambda day: day.toordinal(), lambda number: date.fromordinal(number + 1))
    assert received(date(1, 1, 1)) == date(1, 1, 2)
    assert received(datetime(1, 1, 1)) == datetime(1, 1, 1), "subclasses are not converted"


def test_a_type_that_the_client_has_not_registered_is_an_error_of_its_batch() -> None:
    """The error states the line to write; later batches are not affected."""
    register(Sample, "tests.Sample", lambda sample: sample.value, Sample)
    frames = codec.to_bytes(BATCH_ID, [Sample(0), np.arange(9)]) + codec.to_bytes(BatchId("loader", 0, 1), "next")
    del registry._by_name["tests.Sample"]
    first, second = codec.read_all(NumpyMemory(np.frombuffer(bytearray(frames), np.uint8)))
    assert isinstance(first.content, Failure)
    assert first.content.type == "teleloader.DecodeError"
    assert "teleloader.register(TYPE, 'tests.Sample', to_plain, from_plain)" in first.content.message
    assert second.content == "next"


def test_errors_of_conversions_name_the_type() -> None:
    """On the server with the path of the value, on the client as the failure of the batch."""
    register(Sample, "tests.Sample", lambda sample: sample.value, lambda plain: Sample(plain["missing"]))
    failure = received(Sample({}))
    assert failure.message == "cannot restore a value of type 'tests.Sample': KeyError: 'missing'"
    register(Sample, "tests.Sample", lambda sample: sample.missing, Sample)
    with pytest.raises(EncodeError, match=r"^cannot encode batch\[1\] of type .*Sample: .*no attribute 'missing'"):
        received([0, Sample(1)])


def test_a_conversion_that_never_ends_is_an_error() -> None:
    """A plain value that contains the type again exceeds the nesting limit."""
    register(Sample, "tests.Sample", lambda sample: sample, lambda plain: plain)
    with pytest.raises(EncodeError, match="nesting levels"):
        received(Sample(0))


def test_invalid_registrations_are_refused() -> None:
    """The error names the type and the argument."""
    for arguments, error, text in (
        ((int, "x", str, int), ValueError, "cannot register int: batches can contain its instances"),
        (("int", "x", str, int), TypeError, "cannot register 'int': expected a class"),
        ((Sample, "", str, int), ValueError, "cannot register Sample: name must have 1 to 256 characters, got ''"),
        ((Sample, "x", None, int), TypeError, "cannot register Sample: to_plain must be callable, got None"),
        ((Sample, "x", str, 3), TypeError, "cannot register Sample: from_plain must be callable, got 3"),
    ):
        with pytest.raises(error, match=text.replace("(", r"\(")):
            register(*arguments)
    register(Sample, "x", str, Sample)
    with pytest.raises(ValueError, match=r"as 'x': the name is registered for .*Sample"):
        register(Color, "x", str, Color)


# --- Standard library ---------------------------------------------------------------------------------------------

STANDARD = [
    datetime(2024, 1, 2, 3, 4, 5, 6),
    datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
    datetime(2024, 1, 1, tzinfo=timezone.utc),  # noqa: UP017 - datetime.UTC is the same object
    datetime(2024, 1, 1, tzinfo=timezone(-timedelta(hours=3, microseconds=1), "X")),
    date(1, 1, 1), time(3, 4, fold=1), timedelta(days=-1, microseconds=3),
    Decimal("-0.00"), Decimal("NaN"), Decimal("1E+999"), Fraction(-1, 3), uuid.UUID(int=3),
    Color.RED, Level.LOW, Name.FIRST, Mode.READ | Mode.OPEN, Mode(0),
    pathlib.Path("/a/b"), pathlib.PureWindowsPath("c:/x"),
]  # fmt: skip


@pytest.mark.parametrize("value", STANDARD, ids=label)
def test_values_of_the_standard_library_arrive_unchanged(value: Any) -> None:
    """As a value and as a key."""
    for arrived in (received([value])[0], *received({value: 1}), *received({value})):
        assert type(arrived) is type(value)
        assert repr(arrived) == repr(value)


@given(st.datetimes(timezones=st.none() | st.timezones()) | st.dates() | st.timedeltas() | st.decimals() | st.uuids())
@settings(max_examples=examples(200), deadline=None)
def test_any_value_of_the_standard_library_arrives_unchanged(value: Any) -> None:
    """Property test."""
    assert repr(received(value)) == repr(value)


def test_an_enum_that_the_client_has_not_imported_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client never imports a module, and never runs code of a class that the server selects."""
    raw = np.frombuffer(bytearray(codec.to_bytes(BATCH_ID, Color.RED)), np.uint8)
    monkeypatch.delitem(sys.modules, __name__)
    assert "enum tests.shared.test_registry.Color is not imported" in codec.read(NumpyMemory(raw)).content.message
    monkeypatch.undo()
    for name, plain, text in (
        ("Sample", ["RED"], "is not imported"),
        ("Color", ["BLUE"], "Color has no member 'BLUE'"),
        ("Hooked", ["ON", "OFF"], "must not override _missing_"),
    ):
        assert text in forged("enum.Enum", [__name__, name, plain]).message


def test_what_would_be_lost_is_an_error() -> None:
    """Subclasses, time zones without a name, and flags with unknown bits."""

    class OwnPath(pathlib.PurePosixPath):
        pass

    class OwnDate(datetime):
        pass

    class Slotted(list[str]):
        __slots__ = ("__hidden",)

        def __init__(self, hidden: str) -> None:
            self.__hidden = hidden

    for value, text in (
        (OwnPath("a"), "the class .*OwnPath would be replaced by pathlib's"),
        (OwnDate(1, 1, 1), "unsupported type .*OwnDate"),
        (datetime(1, 1, 1, tzinfo=ZoneInfo.from_file(io.BytesIO(_zone()))), "time zone None would be replaced"),
        (Kept(8 | 1), "flag 9 has undefined bits"),
        (Decimal("1" * 5000), "5,000 characters, more than 4,300"),
        (np.ma.masked_equal(np.array(["a", "b"]), "a"), "masked arrays are not supported"),
        (Slotted("x"), "attribute '_Slotted__hidden' of the .*Slotted would be lost"),
    ):
        with pytest.raises(EncodeError, match=text):
            received(value)


def _zone() -> bytes:
    found = next(p for p in map(pathlib.Path, ("/usr/share/zoneinfo/UTC", "/usr/share/zoneinfo/Etc/UTC")) if p.exists())
    return found.read_bytes()


def test_a_path_of_another_operating_system_arrives_as_a_pure_path() -> None:
    """A client on Linux receives the paths of a server on Windows."""
    assert forged("pathlib.Path", ["WindowsPath", "c:\\x"]) == pathlib.PureWindowsPath("c:/x")


# --- NumPy --------------------------------------------------------------------------------------------------------

ARRAYS = [
    np.array(["a", "bcd"]), np.array([b"x", b"yz"]), np.array("abc"), np.array(["a"], ">U2"), np.zeros((0, 3), "U5"),
    np.array(["2020-01-01", "NaT"], "M8[D]"), np.array(1, "m8[25s]"), np.array([["a"], ["b"]]).T,
    np.array([(1, [2.0, 3.0])], [("a", "<i4"), ("b", ">f8", (2,))]),
]  # fmt: skip


@pytest.mark.parametrize("array", ARRAYS, ids=label)
def test_arrays_of_strings_dates_and_records_arrive_unchanged(array: np.ndarray[Any, Any]) -> None:
    """With the dtype, including the byte order, and writable."""
    arrived = received(array)
    assert type(arrived) is np.ndarray
    assert arrived.dtype == array.dtype
    assert np.array_equal(arrived, array, equal_nan=array.dtype.kind == "M")
    assert arrived.flags.writeable


@given(
    st_numpy.arrays(
        st_numpy.unicode_string_dtypes() | st_numpy.byte_string_dtypes() | st_numpy.datetime64_dtypes(),
        st_numpy.array_shapes(min_dims=0, min_side=0),
    )
)
@settings(max_examples=examples(200), deadline=None)
def test_any_such_array_arrives_unchanged(array: np.ndarray[Any, Any]) -> None:
    """Property test: same dtype, shape and bytes."""
    arrived = received(array)
    assert (arrived.dtype, arrived.shape, arrived.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_scalars_with_a_unit_arrive_as_scalars() -> None:
    """datetime64 and timedelta64."""
    for scalar in (np.datetime64("2020-01-01T00:00"), np.timedelta64(3, "h")):
        arrived = received([scalar])[0]
        assert type(arrived) is type(scalar)
        assert arrived == scalar
        assert arrived.dtype == scalar.dtype


def test_a_forged_array_reads_no_other_memory() -> None:
    """The size of the dtype must be that of the received bytes, and the dtype may not hold objects."""
    bits = np.zeros((2, 8), np.uint8)
    for description in ("<U4000", "|O", [("a", "|O")], "no dtype", 3):
        assert isinstance(forged("numpy.ndarray", [description, False, bits]), Failure)
    assert isinstance(forged("numpy.ndarray", ["<M8[s]", False, "text"]), Failure)
    assert forged("numpy.ndarray", ["<M8[s]", False, bits]).shape == (2,)


# --- torch --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_arrive_unchanged() -> None:
    """In their layout, whether coalesced or not."""
    need("torch")
    import torch

    dense = torch.tensor([[0.0, 1, 0, 2], [0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 4, 0]])
    blocks = (2, 2)
    tensors = [
        dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr(blocks),
        dense.to_sparse_bsc(blocks), torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,)),
        torch.zeros(3, 4).to_sparse(),
    ]  # fmt: skip
    for tensor in tensors:
        arrived = received([tensor])[0]
        assert (arrived.layout, arrived.dtype, arrived.shape) == (tensor.layout, tensor.dtype, tensor.shape)
        assert torch.equal(arrived.to_dense(), tensor.to_dense())
        assert tensor.layout != torch.sparse_coo or arrived.is_coalesced() == tensor.is_coalesced()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_arrive_unchanged() -> None:
    """In both layouts, and with lengths."""
    need("torch")
    import torch

    parts = [torch.arange(2.0), torch.arange(3.0)]
    values, offsets = torch.arange(10.0).reshape(5, 2), torch.tensor([0, 3, 5])
    for tensor in (
        torch.nested.nested_tensor(parts),
        torch.nested.nested_tensor(parts, layout=torch.jagged),
        torch.nested.nested_tensor_from_jagged(values, offsets),
        torch.nested.nested_tensor_from_jagged(values, offsets, torch.tensor([2, 1])),
    ):
        arrived = received([tensor])[0]
        assert arrived.layout == tensor.layout
        for one, other in zip(arrived.unbind(), tensor.unbind(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_forged_tensor_reads_no_other_memory() -> None:
    """Indices beyond the size are an error: torch would read and write there."""
    need("torch")
    import torch

    values = torch.ones(2)
    for name, plain in (
        ("torch.sparse", ["sparse_coo", [2], False, torch.tensor([[0, 5]]), values]),
        ("torch.sparse", ["sparse_coo", [2], True, torch.tensor([[0, 0]]), values]),
        ("torch.sparse", ["sparse_csr", [1, 2], torch.tensor([0, 9]), torch.tensor([0, 1]), values]),
        ("torch.sparse", ["load", [2], values]),
        ("torch.nested", ["jagged", 1, values, torch.tensor([0, 5]), None]),
        ("torch.nested", ["jagged", 1, values, torch.tensor([0, 2, 1]), None]),
        ("torch.nested", ["jagged", 1, values, torch.tensor([-1, 2]), None]),
        ("torch.nested", ["jagged", 1, values, torch.tensor([0, 2]), torch.tensor([3])]),
        ("torch.nested", ["jagged", 9, values, torch.tensor([0, 2]), None]),
    ):
        assert isinstance(forged(name, plain), Failure), plain


def test_a_subclass_of_tensor_with_attributes_is_an_error() -> None:
    """Its attributes would be lost."""
    need("torch")
    import torch

    class Own(torch.Tensor):  # type: ignore[misc]
        pass

    own = torch.ones(1).as_subclass(Own)
    assert type(received(own)) is torch.Tensor
    own.unit = "m"
    with pytest.raises(EncodeError, match=r"attribute 'unit' of the .*Own would be lost"):
        received(own)


def test_attributes_of_a_tensor_are_an_error() -> None:
    """They would be lost, for each layout."""
    need("torch")
    import torch

    dense = torch.ones(2)
    jagged = torch.nested.nested_tensor([dense, dense], layout=torch.jagged)
    for tensor in (dense, dense.to_sparse(), jagged):
        assert received(tensor).is_sparse == tensor.is_sparse
        tensor.unit = "m"
        with pytest.raises(EncodeError, match=r"(?s)attribute 'unit' .*would be lost.*\nregister\((My|Nested)Tensor,"):
            received([tensor])
    del dense.unit
    assert received(dense).tolist() == [1, 1]


# --- Pillow -------------------------------------------------------------------------------------------------------


def test_images_arrive_unchanged() -> None:
    """In every mode, with palette and info; an image that a file plugin opened becomes a plain image."""
    from PIL import Image

    pixels = Image.fromarray(np.arange(6 * 5 * 3, dtype=np.uint8).reshape(6, 5, 3))
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette(bytes(range(16)), "RGBA")
    for image in (*(pixels.convert(mode) for mode in ("1", "L", "P", "RGBA", "CMYK", "F", "I")), palette):
        image.info["dpi"] = (72, 72)
        arrived = received([image])[0]
        assert (arrived.mode, arrived.size, arrived.info) == (image.mode, image.size, image.info)
        assert arrived.tobytes() == image.tobytes()
        assert arrived.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()
    file = io.BytesIO()
    pixels.save(file, "TIFF", dpi=(300, 300))
    opened = Image.open(file)
    arrived = received(opened)
    assert type(arrived) is Image.Image
    assert arrived.info == opened.info


def test_changed_exif_data_of_an_image_are_an_error() -> None:
    """They would be lost; Exif data that were only read, or stored in `info`, arrive."""
    from PIL import ExifTags, Image, ImageOps

    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.ExposureTime] = 0.5
    exif.get_ifd(ExifTags.IFD.GPSInfo)[ExifTags.GPS.GPSLatitudeRef] = "N"
    file = io.BytesIO()
    Image.new("RGB", (2, 3)).save(file, "JPEG", exif=exif)
    image = Image.open(file)
    for tag in ExifTags.IFD:
        image.getexif().get_ifd(tag)
    assert received(image).getexif()[ExifTags.Base.Orientation] == 6
    turned = ImageOps.exif_transpose(image)
    assert received(turned).getexif().get_ifd(ExifTags.IFD.Exif) == {ExifTags.Base.ExposureTime: 0.5}

    image.getexif().get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.ExposureTime] = 0.25
    with pytest.raises(EncodeError, match=r"changes of image\.getexif\(\) would be lost: set image\.info"):
        received(image)
    new = Image.new("RGB", (2, 2))
    new.getexif()[ExifTags.Base.Orientation] = 6
    with pytest.raises(EncodeError, match=r"changes of image\.getexif\(\) would be lost: set image\.info"):
        received(new)
    new.info["exif"] = new.getexif().tobytes()
    assert received(new).getexif()[ExifTags.Base.Orientation] == 6


def test_a_forged_image_allocates_no_more_than_it_has_pixels() -> None:
    """The size is checked before Pillow allocates the image."""
    pytest.importorskip("PIL.Image")
    bits = np.zeros(4, np.uint8)
    assert "do not match" in forged("PIL.Image.Image", ["RGB", [2**20, 2**20], {}, None, bits]).message
    assert isinstance(forged("PIL.Image.Image", ["RGB", [2, 2], {}, None, bits]), Failure)


# --- Other libraries ----------------------------------------------------------------------------------------------


def test_a_library_that_the_client_has_not_imported_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client never imports it for a received value."""
    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    assert "module pandas is not imported in this process" in forged("pandas.NaT", None).message


def test_a_forged_fraction_takes_no_time() -> None:
    """A text with an exponent would be expanded to its digits."""
    assert "unexpected types: got [str, int]" in forged("fractions.Fraction", ["1e99999999", 1]).message


def test_timestamps_of_pandas_arrive_unchanged() -> None:
    """With nanoseconds, unit and time zone."""
    pandas = pytest.importorskip("pandas")
    for moment in (
        pandas.Timestamp("2024-01-01 00:00:00.123456789"),
        pandas.Timestamp("2024-01-01").as_unit("s"),
        pandas.Timestamp("2024-10-27 02:30:00+01:00").tz_convert("Europe/Berlin"),
        pandas.Timestamp("2024-01-01 00:00:00+05:30"),
        pandas.NaT,
    ):
        arrived = received([moment])[0]
        assert type(arrived) is type(moment)
        assert repr(arrived) == repr(moment)
        assert getattr(arrived, "unit", None) == getattr(moment, "unit", None)


def test_tensordicts_arrive_unchanged() -> None:
    """With nested ones, values that are not tensors, names of dimensions and lock."""
    torch, tensordict = pytest.importorskip("torch"), pytest.importorskip("tensordict")
    inner = tensordict.TensorDict({"b": torch.zeros(2)}, [2])
    sent = tensordict.TensorDict({"a": torch.ones(2, 3), "n": inner, "s": "text"}, [2], names=["x"], lock=True)
    arrived = received(sent)
    assert type(arrived) is type(sent)
    assert (arrived.batch_size, arrived.names, arrived.is_locked) == (sent.batch_size, sent.names, True)
    assert arrived.device is None
    assert received(tensordict.TensorDict({}, [2], device="cpu")).device == torch.device("cpu")
    assert arrived["s"] == "text"
    assert (arrived.exclude("s") == sent.exclude("s")).all()


def test_graphs_of_torch_geometric_arrive_unchanged() -> None:
    """A received batch can be divided into its graphs."""
    torch, data = pytest.importorskip("torch"), pytest.importorskip("torch_geometric.data")
    edges = torch.tensor([[0, 1], [1, 0]])
    graphs = [data.Data(x=torch.full((n, 1), n), edge_index=edges, name=f"graph {n}") for n in (2, 3)]
    arrived = received(data.Batch.from_data_list(graphs))
    assert arrived.num_graphs == 2
    for one, other in zip(arrived.to_data_list(), graphs, strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.edge_index, other.edge_index)
        assert one.name == other.name

    class Own(data.Data):  # type: ignore[misc, name-defined]
        pass

    for own in (Own(x=edges), data.Batch.from_data_list([Own(x=edges)])):
        with pytest.raises(EncodeError, match=r"unsupported type .*Own|only batches of torch_geometric.data.Data"):
            received(own)


def test_metatensors_of_monai_arrive_with_their_metadata() -> None:
    """Metadata and applied operations."""
    torch, monai = pytest.importorskip("torch"), pytest.importorskip("monai.data")
    sent = monai.MetaTensor(torch.ones(1, 3, 3), meta={"filename": "x"}, applied_operations=[{"class": "Flip"}])
    arrived = received(sent)
    assert type(arrived) is type(sent)
    assert arrived.meta["filename"] == "x"
    assert arrived.applied_operations == sent.applied_operations
    assert torch.equal(arrived.affine, sent.affine)
    assert torch.equal(arrived.as_tensor(), sent.as_tensor())


def test_tv_tensors_of_torchvision_arrive_unchanged() -> None:
    """With the format and canvas size of bounding boxes."""
    torch, tv_tensors = pytest.importorskip("torch"), pytest.importorskip("torchvision.tv_tensors")
    boxes = tv_tensors.BoundingBoxes(torch.ones(2, 4), format="XYWH", canvas_size=(9, 8))
    arrived = received([boxes, tv_tensors.Image(torch.ones(3, 2, 2)), tv_tensors.Mask(torch.ones(2, 2))])
    assert [type(one).__name__ for one in arrived] == ["BoundingBoxes", "Image", "Mask"]
    assert (arrived[0].format, arrived[0].canvas_size) == (boxes.format, boxes.canvas_size)


def test_encodings_of_transformers_arrive_unchanged() -> None:
    """Tensors, and what a fast tokenizer computed besides them."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[PAD]": 1}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    sent = fast(["a a", "a"], padding=True, return_tensors="pt")
    arrived = received(sent)
    assert type(arrived) is type(sent)
    assert torch.equal(arrived["input_ids"], sent["input_ids"])
    assert arrived.word_ids(0) == sent.word_ids(0)
    assert arrived.n_sequences == sent.n_sequences
    feature = transformers.BatchFeature({"pixels": torch.ones(1)})
    assert type(received(feature)) is type(feature)
    assert received(feature)["pixels"] == 1


def test_a_tool_keeps_what_it_cannot_restore() -> None:
    """A tool that only shows batches gets the plain value of an unknown type, and can encode the value again."""
    tree = {"registered": ["a.Type", [1, {"dict": [["x", None]]}]]}
    with registry.keeping_unrestored():
        kept = unflatten(tree, lambda *_: None)
        restored = unflatten({"registered": ["datetime.date", "today"]}, lambda *_: None)
    assert kept == registry.Unrestored("a.Type", [1, {"x": None}])
    assert restored == registry.Unrestored("datetime.date", "today")
    assert flatten(kept) == (tree, [])
    with pytest.raises(DecodeError, match=r"has not registered"):
        unflatten(tree, lambda *_: None)
