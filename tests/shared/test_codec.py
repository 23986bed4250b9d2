"""A frame transfers a batch bit for bit, has the documented layout, and is read as written or rejected."""

from __future__ import annotations

import contextlib
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import lz4.block
import ml_dtypes
import msgpack
import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from teleloader.tensors.memory import MarkedMemory
from teleloader_shared import codec, dtypes, tree
from teleloader_shared.codec import (
    ALIGNMENT,
    PROLOGUE_SIZE,
    ArrivingFrame,
    BatchId,
    Bits,
    End,
    Failure,
    Frame,
    FrameWriter,
    frame_size,
    read,
    read_all,
    to_bytes,
)
from teleloader_shared.errors import BatchTooLarge, CorruptFrame, EncodeError, ProtocolError, TeleloaderError
from teleloader_shared.memory import NumpyMemory, TorchMemory
from teleloader_shared.spec import Compression
from teleloader_shared.tree import MAX_DEPTH, MAX_DIMENSIONS, Tensor
from tests.conftest import examples, need
from tests.shared.trees import KeptMemory, Point, arrays, assert_same, keep, trees

fixed = settings(max_examples=examples(100))

BATCH_ID = BatchId("0123456789abcdef0123456789abcdef", 3, 14)
FAILURE = Failure("ValueError", "no such image", "Traceback ...", [4, 2**40], -1)
END = End(samples=2**40, replica=False)

options = st.fixed_dictionaries(
    {"checksum": st.booleans(), "compression": st.sampled_from([None, None, "zstd", "lz4"])}
)
FORMS = [(True, None), (False, None), (True, "zstd"), (False, "lz4")]


def encoded(content: object, **how: Any) -> NDArray[np.uint8]:
    """Return the frame of a batch or failure, aligned to 64 bytes, in memory with previous content."""
    writer = FrameWriter(BATCH_ID, content, **how)
    memory = np.full(writer.nbytes + 2 * ALIGNMENT, 0xA5, np.uint8)
    buffer = memory[-memory.ctypes.data % ALIGNMENT :]
    writer.write(buffer)
    assert (buffer[writer.nbytes :] == 0xA5).all(), "a frame must end where it says"
    return buffer[: writer.nbytes]


def decoded(frame: NDArray[np.uint8] | bytes | bytearray, **how: Any) -> Any:
    """Return the batch, or the failure, of a frame."""
    return read(KeptMemory(np.frombuffer(frame, np.uint8)), **how).content


def forged(
    header: object,
    segments: Sequence[bytes] = (),
    *,
    arrays: int | None = None,
    checksum: bool = False,
    digest: int = 0,
) -> bytearray:
    """Return a frame as the documentation describes it, built from unchecked parts without the codec."""
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    out = bytearray(PROLOGUE_SIZE) + packed
    for segment in segments:
        pad(out, 5)
        out += struct.pack(">BI", 0xC6, len(segment)) + segment
    pad(out, 0)
    count = 7 + 2 * (len(segments) if arrays is None else arrays)
    digest = xxhash.xxh3_64_intdigest(out[PROLOGUE_SIZE:]) if checksum else digest
    out[:PROLOGUE_SIZE] = b"\xdd%s\xa4TLF1\xcf%s%s\xcf%s\xce%s" % (
        count.to_bytes(4), len(out).to_bytes(8), b"\xc3" if checksum else b"\xc2", digest.to_bytes(8),
        len(packed).to_bytes(4),
    )  # fmt: skip
    return out


def pad(out: bytearray, keep_free: int) -> None:
    """Return a bin8 that is followed, `keep_free` bytes later, by a multiple of 64."""
    size = -(len(out) + 2 + keep_free) % ALIGNMENT
    out += bytes((0xC4, size)) + bytes(size)


def header_of(tree: object, **more: object) -> dict[str, object]:
    """Return a header with the required fields."""
    return {"loader": "k", "epoch": 0, "batch": 0, "padding": 0, "tree": tree, **more}


@contextlib.contextmanager
def memory_within(limit: int) -> Iterator[None]:
    """Check that allocations inside never exceed `limit` bytes."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak:,} bytes"


# --- Layouts are encoded once ---------------------------------------------------------------------------------------

few_arrays = st.builds(
    lambda dtype, shape, kind: np.ones(shape, dtype).view(kind),
    st.sampled_from(["f4", "i8", ">i8", "?"]),
    st.sampled_from([(), (2,), (0, 3)]),
    st.sampled_from([Tensor, np.ndarray]),
)
few_values = st.sampled_from([0, False, 0.0, -0.0, 1, True, 1.0, None, "a", np.float32(1)])
similar_batches = st.recursive(
    few_arrays | few_values,
    lambda items: (
        st.lists(items, max_size=2)
        | st.lists(items, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", 1, True]), items, max_size=2)
    ),
    max_leaves=3,
)
"""Batches that often have the same tree, or trees that compare equal and differ in their encoding."""

similar_ids = st.builds(
    BatchId, st.sampled_from(["a", "b"]), st.integers(0, 1), st.sampled_from([0, 1, 127, 128, 255, 256, 2**16, 2**62])
)


@settings(fixed, max_examples=examples(300))
@given(st.lists(st.tuples(similar_ids, similar_batches, st.integers(0, 1)), min_size=2, max_size=8))
def test_a_frame_does_not_depend_on_the_frames_before(sequence: list[tuple[BatchId, Any, int]]) -> None:
    """A writer that has encoded other batches writes the same bytes as a new one."""
    codec._layouts.clear()
    after_others = [to_bytes(batch_id, batch, padding=padding) for batch_id, batch, padding in sequence]
    for frame, (batch_id, batch, padding) in zip(after_others, sequence, strict=True):
        codec._layouts.clear()
        assert to_bytes(batch_id, batch, padding=padding) == frame


def test_the_header_of_similar_batches_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree of the second batch is not described again, if only its number and elements differ."""
    described = []

    def flatten(content: object, name: str) -> Any:
        described.append(content)
        return tree.flatten(content, name)

    monkeypatch.setattr(codec, "flatten", flatten)
    codec._layouts.clear()
    for number in range(100):
        content = {"image": np.full((2, 3), number), "label": [np.full(2, number)]}
        assert_same(decoded(to_bytes(BatchId("k", 0, number), content)), content)
    assert len(described) == 1


def test_kept_layouts_are_bounded() -> None:
    """Batches of ever new shapes, and headers of any size, do not fill the memory."""
    for count in range(1000):
        to_bytes(BATCH_ID, np.zeros(count))
    assert len(codec._layouts) <= 256
    codec._layouts.clear()
    to_bytes(BATCH_ID, {"a" * 2**20: np.zeros(1)})
    assert not codec._layouts


@pytest.mark.parametrize("limit", ["below", "above"])
def test_a_kept_layout_does_not_bypass_the_size_limit(limit: str) -> None:
    """A batch of a known layout is rejected if another limit applies."""
    writer = FrameWriter(BATCH_ID, np.zeros(1000))
    max_bytes = writer.nbytes if limit == "above" else writer.nbytes - 1
    with contextlib.nullcontext() if limit == "above" else pytest.raises(BatchTooLarge):
        FrameWriter(BATCH_ID, np.zeros(1000), max_bytes=max_bytes)


# --- A batch arrives as it was ------------------------------------------------------------------------------------


@settings(fixed, max_examples=examples(300))
@given(trees, options, st.integers(0, 10))
def test_any_batch_arrives_as_it_was(batch: Any, how: dict[str, Any], padding: int) -> None:
    """Containers, types and every bit survive, with and without checksum and compression, and so does the batch ID."""
    frame = encoded(batch, padding=padding, **how)
    found = read(KeptMemory(frame))
    assert_same(found.content, batch)
    assert (found.batch_id, found.padding, found.nbytes) == (BATCH_ID, padding, len(frame))


@pytest.mark.parametrize("name", dtypes.NAMES)
@pytest.mark.parametrize(("checksum", "compression"), FORMS)
def test_every_bit_pattern_of_every_type_arrives(name: str, checksum: bool, compression: Compression | None) -> None:
    """NaN payloads and signs of zeros are preserved, in every dtype and byte order: values are never converted."""
    storage = dtypes.storage(name)
    raw = np.random.default_rng(0).bytes(40 * storage.itemsize) + b"\xff" * storage.itemsize
    bits = np.frombuffer(raw, np.uint8) & 1 if name == "bool" else np.frombuffer(raw, np.uint8)
    array = keep(bits.view(storage), name, "ndarray")
    batch = [array, array.astype(array.dtype.newbyteorder(">")), array[::-2]]
    assert_same(decoded(encoded(batch, checksum=checksum, compression=compression)), batch)


def test_tensors_arrive_as_they_were() -> None:
    """Tensors of every dtype and memory layout, lazily conjugated or negated, keep their dtype and bits."""
    need("torch")
    import torch

    values = torch.arange(24, dtype=torch.float64).reshape(2, 3, 4) - 7.5
    names = [name for name in dtypes.NAMES if hasattr(torch, name)]
    assert set(names) == set(dtypes.NAMES)
    tensors = [values.to(getattr(torch, name)) for name in names]
    tensors += [tensor.transpose(0, 2) for tensor in tensors]
    tensors += [tensor[:, ::2] for tensor in tensors[: len(names)]]
    tensors += [tensor.reshape(-1)[3] for tensor in tensors[: len(names)]]
    tensors += [tensor[:0] for tensor in tensors[: len(names)]]
    # -7.5 + 2j and its like
    complex_values = torch.complex(values, values + 2)
    tensors += [complex_values.conj(), complex_values.conj().imag, values[0].expand(5, 3, 4)]
    tensors += [values.clone().requires_grad_(), values.to(torch.float8_e5m2).expand(2, 2, 3, 4)]

    def bits(tensor: Any) -> bytes:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return bytes(plain.reshape(-1).view(torch.uint8).numpy().tobytes())

    class DescribedMemory(Bits):
        """Memory whose leaves are their descriptions."""

        def leaf(self, offset: int, dtype_name: str, shape: tuple[int, ...], kind: str) -> Any:
            """Return the type, the shape and the bytes."""
            assert kind == "tensor"
            return dtype_name, shape, super().leaf(offset, dtype_name, shape, kind).tobytes()

    for compression in (None, "zstd"):
        found = read(DescribedMemory(encoded(tensors, compression=compression))).content
        expected = [(str(t.dtype).removeprefix("torch."), tuple(t.shape), bits(t)) for t in tensors]
        assert found == expected


def test_a_failure_arrives_in_the_place_of_a_batch() -> None:
    """Type, message, traceback, indices and worker of an exception travel under the batch's ID."""
    found = read(KeptMemory(encoded(FAILURE)))
    assert found == Frame(BATCH_ID, FAILURE, 0, found.nbytes, memory=found.memory)
    assert read(KeptMemory(encoded(FAILURE, compression="zstd", padding=3))).content == FAILURE


@pytest.mark.parametrize("end", [END, End(0, replica=True)])
def test_an_end_arrives_in_the_place_of_a_batch(end: End) -> None:
    """The shard's sample count and replica flag arrive under the ID of the first missing batch."""
    found = read(KeptMemory(encoded(end)))
    assert found == Frame(BATCH_ID, end, 0, found.nbytes, memory=found.memory)
    assert read(KeptMemory(encoded(end, compression="lz4", padding=3))).content == end


@pytest.mark.parametrize("content", [[np.arange(3)], END, FAILURE], ids=["batch", "end", "failure"])
@pytest.mark.parametrize("state", [None, "", '{"next": 3, "state": {"file": "é\\u0000"}}', "x" * 2**14])
def test_where_a_shard_stands_travels_with_what_it_gave(content: Any, state: str | None) -> None:
    """A batch arrives with its shard's state, an opaque text."""
    found = read(KeptMemory(encoded(content, shard_state=state)))
    assert found.shard_state == state
    if isinstance(content, list):
        assert_same(found.content, content)
    else:
        assert found.content == content


def test_arrays_are_read_where_they_lie() -> None:
    """Uncompressed arrays are views of the frame, starting at a multiple of 64 in memory; no byte is copied."""
    frame = encoded({"a": np.arange(5, dtype=np.int16), "b": (np.zeros((3, 3)), np.float32(1))})
    found = decoded(frame)
    for array in (found["a"], found["b"][0]):
        assert np.shares_memory(array, frame)
        assert array.ctypes.data % ALIGNMENT == 0


def test_an_array_is_written_where_it_is_sent_from() -> None:
    """A value that is not collated yet is asked once to write itself into the frame."""
    written: list[NDArray[Any]] = []

    @dataclass
    class Promise:
        dtype_name: str = "bfloat16"
        shape: tuple[int, ...] = (3,)
        kind: str = "tensor"

        def write(self, out: NDArray[Any]) -> None:
            written.append(out)
            out[...] = [1, 2, 3]

    writer = FrameWriter(BATCH_ID, [Promise()])
    assert written == []
    buffer = np.empty(writer.nbytes, np.uint8)
    writer.write(buffer)
    assert len(written) == 1
    assert np.shares_memory(written[0], buffer)
    assert written[0].dtype == np.dtype("<u2")
    assert decoded(buffer)[0].view(np.uint16).tolist() == [1, 2, 3]


# --- The bytes ----------------------------------------------------------------------------------------------------


@settings(fixed, max_examples=examples(150))
@given(trees | st.just(FAILURE) | st.just(END), options)
def test_any_msgpack_library_reads_a_frame(content: Any, how: dict[str, Any]) -> None:
    """A frame is one msgpack array with the documented layout: sizes, header, then alternating pads and arrays."""
    frame = encoded(content, **how)
    reader = msgpack.Unpacker(use_list=True, max_buffer_size=0)
    reader.feed(frame.tobytes())
    count = reader.read_array_header()
    magic, size, has_checksum, checksum, header_size = (reader.unpack() for _ in range(5))
    assert (magic, size, has_checksum) == ("TLF1", len(frame), how["checksum"])
    assert reader.tell() == PROLOGUE_SIZE == 34
    assert checksum == (xxhash.xxh3_64_intdigest(frame[34:].tobytes()) if has_checksum else 0)
    header = reader.unpack()
    assert reader.tell() == 34 + header_size
    assert (header["loader"], header["epoch"], header["batch"]) == (BATCH_ID.loader, 3, 14)
    assert (count - 7) % 2 == 0
    for _ in range((count - 7) // 2):
        filler = reader.unpack()
        assert filler == bytes(len(filler))
        segment = reader.unpack()
        assert (reader.tell() - len(segment)) % ALIGNMENT == 0
    filler = reader.unpack()
    assert filler == bytes(len(filler))
    assert len(filler) < ALIGNMENT
    assert reader.tell() == len(frame)
    assert len(frame) % ALIGNMENT == 0


@fixed
@given(st.lists(arrays(), max_size=4), st.text(max_size=100), st.booleans())
def test_a_frame_can_be_made_from_the_documentation(batch: list[Any], text: str, checksum: bool) -> None:
    """The few lines of `forged` make the same bytes as the codec."""
    tree = [
        *({"array": [a.dtype.name, list(a.shape), "tensor" if isinstance(a, Tensor) else "ndarray"]} for a in batch)
    ]
    header = {"loader": BATCH_ID.loader, "epoch": 3, "batch": 14, "padding": 2, "tree": [text, *tree]}
    segments = [array.astype(array.dtype.newbyteorder("<")).tobytes() for array in batch]
    assert forged(header, segments, checksum=checksum) == to_bytes(
        BATCH_ID, [text, *batch], padding=2, checksum=checksum
    )


def test_equal_batches_have_equal_bytes() -> None:
    """A frame depends neither on the buffer's previous content nor on the memory layout of arrays."""
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    frames = {to_bytes(BATCH_ID, [a]) for a in (array, np.asfortranarray(array), array.astype(">i4"))}
    assert len(frames) == 1
    assert encoded([array]).tobytes() in frames


def test_frames_stand_one_after_another() -> None:
    """Each frame starts at the declared end of the previous one; batches do not share memory."""
    parts = [encoded([1]), encoded({"a": np.arange(100.0)}), encoded([np.arange(50)]), encoded(FAILURE), encoded(END)]
    body = np.concatenate(parts)
    found = list(read_all(KeptMemory(body)))
    assert_same([frame.content for frame in found], [decoded(frame) for frame in parts])
    assert [frame.nbytes for frame in found] == [len(frame) for frame in parts]
    assert not np.shares_memory(found[1].content["a"], body)
    assert not np.shares_memory(found[2].content[0], body)
    alone = next(read_all(KeptMemory(parts[1])))
    assert np.shares_memory(alone.content["a"], parts[1]), "a frame that fills its memory is not copied"
    assert list(read_all(KeptMemory(body[:0]))) == []
    assert [frame_size(frame[:34].tobytes()) for frame in parts] == [len(frame) for frame in parts]


def test_a_body_that_ends_within_a_frame_is_refused() -> None:
    """Any truncation of the last frame is detected; the frames before it are valid."""
    first, second = encoded([1]), encoded({"a": np.zeros(100)})
    body = np.concatenate([first, second])
    for end in range(len(first) + 1, len(body)):
        frames = read_all(KeptMemory(body[:end]))
        assert next(frames).nbytes == len(first)
        with pytest.raises(ProtocolError):
            next(frames)


# --- Frames that are decoded together -----------------------------------------------------------------------------


def numbered(batch: int, content: object, **how: Any) -> bytes:
    """Return the frame of a batch number."""
    return to_bytes(BATCH_ID._replace(batch=batch), content, **how)


def one_by_one(body: NDArray[np.uint8]) -> Iterator[Frame]:
    """Decode each frame as if it were the only one."""
    while len(body):
        size = frame_size(body[:PROLOGUE_SIZE].tobytes())
        yield read(KeptMemory(body[:size]))
        body = body[size:]


def collected(read_frames: Callable[[], Iterator[Frame]]) -> tuple[list[Frame], type[Exception] | None]:
    """Return all frames up to an invalid one, and the type of its error."""
    found: list[Frame] = []
    try:
        for frame in read_frames():
            found.append(frame)  # noqa: PERF402 - an exception would discard those of a list
    except ProtocolError as error:
        return found, type(error)
    return found, None


def assert_as_one_by_one(body: NDArray[np.uint8]) -> type[Exception] | None:
    """Assert that frames in one body have the same content and errors as each alone; return the error's type."""
    found, error = collected(lambda: read_all(KeptMemory(body)))
    expected, expected_error = collected(lambda: one_by_one(body))
    assert_same([tuple(frame) for frame in found], [tuple(frame) for frame in expected])
    assert error is expected_error
    return error


layouts = st.sampled_from(
    [
        np.arange(5, dtype=np.float32),
        np.arange(5, dtype=np.int32),
        [np.arange(6.0).reshape(2, 3), np.int64(7)],
        {"x": (np.arange(3), {}), "y": [np.array(5), None, "text"], "z": np.zeros((0, 3))},
        ["only text", 1.5, (), []],
        {np.float32(1): np.arange(2)},
        {1: np.arange(2)},
        Point(np.arange(3), 1),
        {4, 5},
        2**70,
        FAILURE,
        END,
    ]
)
bodies = st.lists(
    st.tuples(
        layouts, st.sampled_from([0, 125, 254, 65_533, 2**32 - 3, 2**63]), st.integers(1, 9),
        st.fixed_dictionaries(
            {"checksum": st.booleans()},
            optional={"padding": st.just(1), "shard_state": st.just("s"), "compression": st.just("lz4")},
        ),
    ),
    min_size=1, max_size=4,
).map(lambda runs: bytearray(
    b"".join(numbered(start + k, content, **how) for content, start, count, how in runs for k in range(count))
))  # fmt: skip


@fixed
@given(bodies)
def test_frames_decoded_together_are_those_decoded_alone(body: bytearray) -> None:
    """Any mix of equal and different layouts gives the same batches, IDs, paddings and sizes."""
    assert assert_as_one_by_one(np.frombuffer(body, np.uint8)) is None


@settings(fixed, max_examples=examples(300))
@given(bodies, st.data())
def test_invalid_frames_among_equal_ones_are_found(body: bytearray, data: st.DataObject) -> None:
    """Changed, missing and additional bytes raise the same error, after the same valid frames, as frame by frame."""
    at = data.draw(st.integers(0, len(body) - 1))
    match data.draw(st.sampled_from(["set", "set", "set", "cut", "delete", "insert"])):
        case "set":
            body[at] = data.draw(st.integers(0, 255))
        case "cut":
            del body[at:]
        case "delete":
            del body[at : at + data.draw(st.sampled_from([1, ALIGNMENT]))]
        case "insert":
            body[at:at] = bytes(data.draw(st.sampled_from([1, ALIGNMENT])))
    assert_as_one_by_one(np.frombuffer(body, np.uint8))


@pytest.mark.parametrize("start", [0, 126, 300])
def test_every_damaged_byte_among_equal_frames_is_found(start: int) -> None:
    """No byte of several equal frames with checksums can change unnoticed; the frames before it are still returned."""
    frames = [numbered(start + k, SMALL["batch"]) for k in range(5)]
    body = np.frombuffer(bytearray(b"".join(frames)), np.uint8)
    for at in range(len(body)):
        for change in (0x01, 0x80, 0xFF):
            body[at] ^= change
            assert assert_as_one_by_one(body) is not None, at
            body[at] ^= change


def test_headers_that_only_look_equal_are_decoded_alone() -> None:
    """Header fields that are repeated, reordered, negative or encoded differently give the same values as alone."""
    tree = {"array": ["uint8", [2], "ndarray"]}
    fields = list(header_of(tree).items())
    orders = [fields, fields[::-1], [fields[2], *fields], [*fields, fields[2]], [*fields, ("more", 1)]]
    orders.append([*fields[:3], *fields[2:]])

    def packed(pairs: list[tuple[str, object]], batch: int) -> bytes:
        form = msgpack.packb(batch) if batch != 9 else b"\xd1\x00\x09"
        values = [form if name == "batch" else msgpack.packb(value) for name, value in pairs]
        return bytes((0x80 + len(pairs),)) + b"".join(
            msgpack.packb(name) + value for (name, _), value in zip(pairs, values, strict=True)
        )

    for pairs in orders:
        for numbers in (range(5), [5] * 5, [-3, -2, -1, 0], [-300, 9, 9], [9, -300, 9, 9], [127, 128, 129, 127]):
            frames = [forged(packed(pairs, k), [bytes((k % 256, 1))], checksum=True) for k in numbers]
            assert assert_as_one_by_one(np.frombuffer(b"".join(frames), np.uint8)) is None
    # a second batch number, which is valid
    twice = [*fields[:3], ("batch", 0), *fields[3:]]
    frames = [
        forged(packed(twice, 0).replace(b"\xa5batch\x00", b"\xa5batch" + bytes((k,)), 1), [b"ab"]) for k in range(5)
    ]
    assert assert_as_one_by_one(np.frombuffer(b"".join(frames), np.uint8)) is None
    # the batch number within the name of the loader
    names = [b"\xa5batch" + bytes((k,)) for k in range(5)]
    frames = [forged(header_of(tree, loader=name.decode("latin-1")), [b"ab"]) for name in names]
    assert assert_as_one_by_one(np.frombuffer(b"".join(frames), np.uint8)) is None


def test_the_headers_of_equal_frames_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames with equal headers are decoded together, if their numbers have the same width."""
    parsed = []
    unpackb = msgpack.unpackb

    def counted(packed: Any, **how: Any) -> Any:
        parsed.append(packed)
        return unpackb(packed, **how)

    monkeypatch.setattr(msgpack, "unpackb", counted)
    body = b"".join(numbered(k, [np.full(1000, k), {"label": np.int64(k)}]) for k in range(240))
    frames = list(read_all(KeptMemory(np.frombuffer(body, np.uint8))))
    assert [frame.content[1]["label"] for frame in frames] == list(range(240))
    assert len(parsed) == 4


def test_a_small_batch_keeps_little_memory_alive() -> None:
    """Batches decoded together share at most 256 KiB, and larger batches share no memory."""
    for size, limit in ((1000, 2**18), (60_000, 2**18), (70_000, 71_000)):
        frames = [numbered(k, np.full(size, k % 256, np.uint8)) for k in range(2**21 // size)]
        found = [frame.content for frame in read_all(KeptMemory(np.frombuffer(b"".join(frames), np.uint8)))]
        for k, array in enumerate(found):
            assert (array == k % 256).all()
            owner = array
            while owner.base is not None:
                owner = owner.base
            assert owner.nbytes <= limit


@pytest.mark.parametrize("memory", [NumpyMemory, TorchMemory, MarkedMemory])
def test_leaves_created_together_are_those_created_alone(memory: type[Bits]) -> None:
    """Type, dtype, shape and bits of every leaf are the same; so is the memory that a tensor's storage covers."""
    need("torch")
    import torch

    rng = np.random.default_rng(0)
    shapes = [(), (1,), (5,), (2, 3), (0, 3), (1,) * MAX_DIMENSIONS]

    def leaf(name: str, kind: str, shape: tuple[int, ...]) -> Any:
        storage = dtypes.storage(name)
        raw = rng.integers(0, 2, prod(shape) * storage.itemsize, np.uint8)
        return keep(raw.view(storage).reshape(shape), name, kind)

    kinds = [(kind, shape) for kind in ("tensor", "ndarray") for shape in shapes] + [("scalar", ())]
    batches = [[leaf(name, *how) for name in dtypes.NAMES for how in kinds] for _ in range(4)]
    bodies = [np.frombuffer(bytearray(numbered(k, batch)), np.uint8) for k, batch in enumerate(batches)]
    together = [frame.content for frame in read_all(memory(np.concatenate(bodies)))]
    for body, batch in zip(bodies, together, strict=True):
        for got, expected in zip(batch, read(memory(body)).content, strict=True):
            if isinstance(expected, torch.Tensor):
                assert (type(got), got.dtype, got.shape) == (torch.Tensor, expected.dtype, expected.shape)
                assert got.untyped_storage().tolist() == expected.untyped_storage().tolist()
                assert got.storage_offset() == 0
                assert got._base is expected._base is None or expected.dtype not in (torch.float32, torch.bool)
            else:
                assert_same(got, expected)
                assert got.flags.writeable == expected.flags.writeable


def test_batches_decoded_together_may_be_changed_in_place() -> None:
    """An in-place change of a batch changes no other, and autograd accepts the others, which a model has saved."""
    need("torch")
    import torch

    body = b"".join(numbered(k, [np.full(4, k, np.float32).view(Tensor)]) for k in range(5))
    batches = [frame.content[0] for frame in read_all(TorchMemory(np.frombuffer(bytearray(body), np.uint8)))]
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * batches[2]).sum()
    for k in (0, 1, 3, 4):
        batches[k].add_(10)
        batches[k].mul_(weight)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == batches[2].tolist() == [2.0] * 4


# --- Damage -------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "batch": {"x": np.arange(3, dtype=np.int16), "label": ("a", None), "t": np.float32(2)},
    "no arrays": ["text", 1.5],
    "failure": FAILURE,
    "end": END,
}


@pytest.mark.parametrize("content", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_every_flipped_bit_is_found(content: Any, compression: Compression | None) -> None:
    """No bit of a frame with a checksum can change unnoticed, neither in its content nor in its first 34 bytes."""
    frame = encoded(content, compression=compression)
    decoded(frame)
    unnoticed = []
    for bit in range(8 * len(frame)):
        frame[bit // 8] ^= 1 << bit % 8
        try:
            decoded(frame)
        except CorruptFrame:
            pass
        except ProtocolError:
            assert bit // 8 < PROLOGUE_SIZE, "what the checksum covers is checked first"
        else:
            unnoticed.append(divmod(bit, 8))
        frame[bit // 8] ^= 1 << bit % 8
    assert unnoticed == []


@pytest.mark.parametrize("content", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize(("checksum", "compression"), FORMS)
def test_a_frame_that_is_cut_off_or_goes_on_is_refused(
    content: Any, checksum: bool, compression: Compression | None
) -> None:
    """A frame has exactly the size that it states."""
    frame = encoded(content, checksum=checksum, compression=compression)
    for end in range(len(frame)):
        with pytest.raises(ProtocolError):
            decoded(frame[:end])
    for more in (1, ALIGNMENT):
        with pytest.raises(ProtocolError, match=f"expected {len(frame)} bytes, got {len(frame) + more}"):
            decoded(np.concatenate([frame, np.zeros(more, np.uint8)]))


def test_damage_differs_from_a_breach_of_the_format() -> None:
    """Damaged content raises CorruptFrame, which a repeated request fixes; it is a subclass of ProtocolError."""
    frame = encoded([1])
    frame[-1] ^= 1
    with pytest.raises(CorruptFrame, match="does not match the checksum"):
        decoded(frame)
    assert issubclass(CorruptFrame, ProtocolError)


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, b"\xdc"), (5, b"\xa3"), (6, b"TLF2"), (10, b"\xd3"), (19, b"\xc0"), (20, b"\xce"), (29, b"\xd2")],
)
def test_the_first_bytes_have_fixed_types(offset: int, value: bytes) -> None:
    """Each value of the prologue has the width and type that the format states; another version is refused."""
    frame = forged(header_of(1))
    decoded(frame)
    frame[offset : offset + len(value)] = value
    with pytest.raises(ProtocolError):
        frame_size(bytes(frame[:34]))
    with pytest.raises(ProtocolError):
        decoded(frame)


def test_a_frame_without_checksum_states_zero() -> None:
    """A digest without the flag is a flipped flag: it is refused, not ignored."""
    assert decoded(forged(header_of(1))) == 1
    with pytest.raises(ProtocolError):
        decoded(forged(header_of(1), digest=1))


@pytest.mark.parametrize("count", [-3, -1, 1, 2**30])
def test_a_frame_has_as_many_values_as_its_tree_has_arrays(count: int) -> None:
    """The count at the beginning is 7 and 2 for each array; arrays that no tree declares are refused."""
    tree = {"array": ["uint8", [2], "ndarray"]}
    assert decoded(forged(header_of(tree), [b"ab"])).tolist() == [97, 98]
    with pytest.raises(ProtocolError):
        decoded(forged(header_of(tree), [b"ab"], arrays=1 + count))
    with pytest.raises(ProtocolError):
        decoded(forged(header_of(0), [b"ab"]))
    failure = {name: getattr(FAILURE, name) for name in Failure.__slots__}
    for instead in ({"failure": failure}, {"end": {"samples": 1, "replica": True}}):
        with pytest.raises(ProtocolError):
            decoded(forged({"loader": "k", "epoch": 0, "batch": 0, **instead}, [b"ab"]))


# --- Invalid headers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\xc0\xc0",
        b"\x81\xa1\xff\x00",
        b"\x80",
        b"\x81",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 5000 + b"\xc0",
        b"\x81\x01\x02",
        b"\x81\x90\x02",
        b"\x81\x80\x02",
        None,
        [],
        {"loader": "k", "epoch": 0},
        {"loader": b"k", "epoch": 0, "batch": 0, "tree": 1},
        {"loader": "k", "epoch": "0", "batch": 0, "tree": 1},
        {"loader": "k", "epoch": 0, "batch": 1.0, "tree": 1},
        {"loader": "k", "epoch": 0, "batch": None, "tree": 1},
        {"loader": "k", "epoch": 0, "batch": 0},
        {"loader": "k", "epoch": 0, "batch": 0, "padding": 0},
        header_of(1, padding="1"),
        header_of(1, padding=-1),
        header_of(1, failure=None),
        header_of(1, failure={"type": "ValueError"}),
        header_of(1, failure={**dict.fromkeys(Failure.__slots__, "x"), "indices": []}),
        header_of(1, end=None),
        header_of(1, end=[3, True]),
        header_of(1, end={"samples": 3}),
        header_of(1, end={"replica": True}),
        header_of(1, end={"samples": "3", "replica": True}),
        header_of(1, end={"samples": 3.0, "replica": True}),
        header_of(1, end={"samples": None, "replica": True}),
        header_of(1, end={"samples": 3, "replica": 1}),
        header_of(1, end={"samples": 3, "replica": None}),
        header_of(1, shard_state=5),
        header_of(1, shard_state=b"{}"),
        header_of(1, shard_state={"next": 1}),
    ],
    ids=lambda header: repr(header)[:50],
)
@pytest.mark.parametrize("checksum", [True, False])
def test_a_header_that_is_none_is_refused(header: object, checksum: bool) -> None:
    """A header that is not a map with batch ID and content raises ProtocolError, even with a valid checksum."""
    with pytest.raises(ProtocolError):
        decoded(forged(header, checksum=checksum))


def test_what_a_later_version_adds_to_a_header_is_ignored() -> None:
    """Unknown entries of headers and ends are ignored."""
    assert decoded(forged(header_of(1, hint={"more": [1, 2]}))) == 1
    header = {"loader": "k", "epoch": 0, "batch": 0, "end": {"samples": 3, "replica": True, "more": 1}}
    assert decoded(forged(header)) == End(3, replica=True)


@pytest.mark.parametrize(
    ("name", "shape", "segment"),
    [
        ("float128", [1], bytes(16)),
        ("object", [1], bytes(8)),
        ("<f4", [1], bytes(4)),
        ("O", [1], bytes(8)),
        ("", [0], b""),
        ("uint8", [3], b"ab"),
        ("uint8", [1], b"ab"),
        ("uint8", [], b""),
        ("int32", [1], b"abc"),
        ("uint8", [0], b"a"),
        ("uint8", [2**62, 4], b""),
        ("uint8", [2**64 - 1], b""),
        ("uint8", [2**64 - 1, 0], b""),
        ("uint8", [2**62, 2**62, 0], b""),
        ("float64", [2**63] * 64, b""),
        ("float64", [2**63] * 300, b""),
        ("uint8", [1] * 65, b"a"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_an_array_that_cannot_be_is_refused(name: str, shape: list[int], segment: bytes) -> None:
    """Type and shape must fit the bytes that came, and be possible at all."""
    with pytest.raises(ProtocolError):
        decoded(forged(header_of({"array": [name, shape, "ndarray"]}), [segment]))


def test_arrays_that_are_not_there_are_refused() -> None:
    """A tree may declare no more arrays than the frame has."""
    node = {"array": ["uint8", [1], "ndarray"]}
    with pytest.raises(ProtocolError):
        decoded(forged(header_of([node, node]), [b"a"], arrays=2))
    with pytest.raises(ProtocolError):
        decoded(forged(header_of([node] * 100), [], arrays=100))


def test_a_segment_that_is_no_bin32_is_refused() -> None:
    """Each array must follow a bin32 prefix with a size within the frame."""
    frame = forged(header_of({"array": ["uint8", [1], "ndarray"]}), [b"a"])
    at = frame.index(b"\xc6\x00\x00\x00\x01a")
    for damage in (b"\xc5", b"\xc6\x00\x00\x00\x02", b"\xc6\xff\xff\xff\xff", b"\xc6\x00\x00\x00\x00"):
        bad = frame[:at] + damage + frame[at + len(damage) :]
        with pytest.raises(ProtocolError):
            decoded(bad)


def test_deep_batches_pass_through_msgpack() -> None:
    """128 nested dicts are within msgpack's own limit; deeper ones are rejected on both sides."""
    batch: Any = np.zeros(1)
    node: Any = 0
    for _ in range(MAX_DEPTH):
        batch = {"k": batch}
        node = {"dict": [["k", node]]}
    assert_same(decoded(encoded(batch)), batch)
    with pytest.raises(EncodeError, match="more than 128 nesting levels"):
        encoded([batch])
    with pytest.raises(ProtocolError, match="more than 128 nesting levels"):
        decoded(forged(header_of([node])))


hostile_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=3)
    | st.sampled_from(["uint8", "float8_e5m2", "ndarray", "scalar", "zstd", "lz4"]),
    lambda nodes: (
        st.lists(nodes, max_size=4)
        | st.builds(lambda name, shape, kind: {"array": [name, shape, kind]},
                    st.sampled_from(["bool", "uint8", "bfloat16"]), st.lists(st.integers(0, 3), max_size=2),
                    st.sampled_from(["ndarray", "tensor", "scalar"]))
        | st.dictionaries(st.sampled_from(["tuple", "dict", "namedtuple", "int", "complex"]), nodes, max_size=2)
    ),
    max_leaves=10,
)  # fmt: skip


BOTTOMLESS: list[Any] = []
for _ in range(1000):
    BOTTOMLESS = [BOTTOMLESS]


@pytest.mark.parametrize("kind", ["tuple", "dict", "namedtuple", "complex", "int", "array", "other"])
def test_what_is_refused_can_be_shown(kind: str) -> None:
    """An error about something that is nested deeper than Python can print is the same error."""
    for content in (BOTTOMLESS, [BOTTOMLESS], ["float32", BOTTOMLESS, "ndarray"], [["k", 1, BOTTOMLESS]]):
        with pytest.raises(ProtocolError):
            decoded(forged(header_of({kind: content})))
    with pytest.raises(ProtocolError):
        decoded(forged(header_of(1, padding=BOTTOMLESS)))


@settings(fixed, max_examples=examples(300))
@given(
    st.fixed_dictionaries(
        {"loader": st.just("k"), "epoch": st.just(0) | hostile_values, "batch": st.just(0)},
        optional=dict.fromkeys(("tree", "padding", "compression", "failure"), hostile_values),
    ),
    st.lists(st.binary(max_size=12), max_size=4),
)
def test_whatever_a_header_says_is_read_or_refused(header: dict[str, Any], segments: list[bytes]) -> None:
    """Headers of any content with any arrays make a batch or a ProtocolError, and no other error."""
    with contextlib.suppress(ProtocolError):
        decoded(forged(header, segments))


SEEDS = [
    bytes(forged(header_of({"tuple": [{"array": ["float32", [2, 1], "ndarray"]}, {"int": "5"}]}), [bytes(8)])),
    to_bytes(BATCH_ID, {"a": np.arange(9), "b": [Point(1, 2), np.float16(2), 2**70, 1j]}, checksum=False),
    to_bytes(BATCH_ID, {"x": np.zeros(50), (1, None): ["text", b"bytes"]}, checksum=False, compression="zstd"),
    to_bytes(BATCH_ID, [np.zeros(50), np.ones((2, 3), ml_dtypes.bfloat16)], checksum=False, compression="lz4"),
    to_bytes(BATCH_ID, FAILURE, checksum=False),
]


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """Return a frame without checksum after random damage, with corrected size and shape to pass the first checks."""
    frame = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame) - 1) | st.integers(PROLOGUE_SIZE, min(len(frame), 250) - 1))
        match draw(st.sampled_from(["set", "set", "set", "insert", "delete", "copy"])):
            case "set":
                frame[at] = draw(st.integers(0, 255) | st.sampled_from(b"\x80\x90\xa0\xc1\xc4\xc6\xc7\xcb\xcf\xdd\xdf"))
            case "insert":
                frame[at:at] = draw(st.binary(min_size=1, max_size=9))
            case "delete":
                del frame[at : at + draw(st.integers(1, 9))]
            case "copy":
                start = draw(st.integers(0, len(frame) - 1))
                frame[at : at + 8] = frame[start : start + 8]
        frame = frame or bytearray(1)
    if draw(st.booleans()):
        frame += bytes(max(0, PROLOGUE_SIZE - len(frame)))
        frame += bytes(-len(frame) % ALIGNMENT)
        frame[10:19] = b"\xcf" + len(frame).to_bytes(8)
    return bytes(frame)


@settings(fixed, max_examples=examples(600))
@given(mutations())
def test_an_altered_frame_without_checksum_is_read_or_refused(frame: bytes) -> None:
    """Without a checksum, damage may pass for a batch; it never is any other error, nor takes more than the limit."""
    limit = 2**20
    with memory_within(limit + 2**20), contextlib.suppress(ProtocolError):
        decoded(frame, max_bytes=limit)


# --- Limits -------------------------------------------------------------------------------------------------------

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": lambda raw: zstandard.ZstdCompressor().compress(raw),
    "lz4": lambda raw: bytes(lz4.block.compress(raw, store_size=False)),
}


def bomb(compression: str, declared: int, packed: bytes) -> bytearray:
    """Return a frame with one array that declares `declared` bytes."""
    return forged(header_of({"array": ["uint8", [declared], "ndarray"]}, compression=compression), [packed])


@pytest.mark.parametrize("compression", PACKERS)
def test_an_array_that_unpacks_to_more_than_declared_is_refused(compression: str) -> None:
    """Declared small and really huge: refused, with no more memory than was declared."""
    frame = bomb(compression, 1000, PACKERS[compression](bytes(10**8)))
    with memory_within(len(frame) + 10**6), pytest.raises(ProtocolError):
        decoded(frame)
    with pytest.raises(ProtocolError):
        decoded(bomb(compression, 1000, PACKERS[compression](bytes(1001))))
    assert decoded(bomb(compression, 1000, PACKERS[compression](bytes(1000)))).nbytes == 1000


@pytest.mark.parametrize("compression", PACKERS)
def test_an_array_that_unpacks_to_less_than_declared_is_refused(compression: str) -> None:
    """The error contains the unpacked size."""
    with pytest.raises(ProtocolError, match=r"must decompress to 1,001 bytes, got 1,000"):
        decoded(bomb(compression, 1001, PACKERS[compression](bytes(1000))))


@pytest.mark.parametrize("compression", [*PACKERS, None])
@pytest.mark.parametrize("declared", [2**20 + 1, 2**40, 2**62])
def test_arrays_may_not_declare_more_than_the_limit(compression: str | None, declared: int) -> None:
    """One or several arrays with too large a declared size are rejected before allocation; the error has the limit."""
    with memory_within(10**6), pytest.raises(ProtocolError, match="the limit is 1,048,576: increase max_batch_bytes"):
        decoded(bomb(compression or "", declared, b"\x00" * 20), max_bytes=2**20)
    node = {"array": ["uint8", [2**18], "ndarray"]}
    header = header_of([node] * 5, **({"compression": compression} if compression else {}))
    segment = PACKERS[compression](bytes(2**18)) if compression else bytes(2**18)
    with memory_within(2**21), pytest.raises(ProtocolError, match="the limit is 1,048,576: increase max_batch_bytes"):
        decoded(forged(header, [segment] * 5), max_bytes=2**20)
    assert len(decoded(forged({**header, "tree": [node] * 4}, [segment] * 4), max_bytes=2**20)) == 4


def test_a_library_that_counts_to_2_gib_is_no_way_round_the_limit() -> None:
    """An lz4 array of more than 2 GiB raises ProtocolError even if the limit allows it, as lz4 cannot unpack it."""
    with memory_within(2**20), pytest.raises(ProtocolError):
        decoded(bomb("lz4", 3 * 2**30, PACKERS["lz4"](b"abc")), max_bytes=2**33)


@pytest.mark.parametrize("compression", PACKERS)
@pytest.mark.parametrize("packed", [b"", b"\x00", b"\xff" * 100, b"not compressed"])
def test_what_is_not_compressed_is_refused(compression: str, packed: bytes) -> None:
    """Bytes that the library cannot unpack are a ProtocolError."""
    with pytest.raises(ProtocolError):
        decoded(bomb(compression, 1000, packed))


@settings(fixed, max_examples=examples(200))
@given(st.sampled_from(["zstd", "lz4"]), st.binary(max_size=300), st.data())
def test_damaged_compression_is_read_or_refused(compression: str, raw: bytes, data: st.DataObject) -> None:
    """Any change of compressed bytes makes an array of the declared size or a ProtocolError."""
    packed = bytearray(PACKERS[compression](raw + b"a" * 200))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert len(decoded(bomb(compression, len(raw) + 200, bytes(packed)))) == len(raw) + 200


@pytest.mark.parametrize("compression", ["gzip", "", 1, ["zstd"], {"zstd": 1}, True, b"zstd", BOTTOMLESS])
def test_an_unknown_compression_is_refused(compression: object) -> None:
    """The error names it."""
    frame = forged(header_of({"array": ["uint8", [4], "ndarray"]}, compression=compression), [bytes(4)])
    with pytest.raises(ProtocolError, match="unknown compression"):
        decoded(frame)


@pytest.mark.parametrize(("compression", "package"), [("zstd", "zstandard"), ("lz4", "lz4.block")])
def test_a_missing_library_is_named(compression: Compression, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a compression library is missing, both sides' errors state what to install."""
    frame = encoded([np.zeros(9)], compression=compression)
    monkeypatch.setitem(sys.modules, package, None)
    for use in (lambda: encoded([np.zeros(9)], compression=compression), lambda: decoded(frame)):
        with pytest.raises(TeleloaderError, match=r"pip install 'teleloader\[compression\]'"):
            use()


def test_nested_claims_take_no_memory() -> None:
    """A header of nested lists with huge declared lengths is rejected with bounded memory."""
    claims = b"\xdd" + (250_000).to_bytes(4)
    header = msgpack.packb(header_of(0))[:-1] + claims * 900 + bytes(250_000)
    with memory_within(128 * 2**20), pytest.raises(ProtocolError):
        decoded(forged(header))


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_a_batch_that_is_too_large_is_refused_before_it_is_made(compression: Compression | None) -> None:
    """The error has the size, the limit and what to do."""
    huge = np.broadcast_to(np.float64(0), (10**6, 10**6))
    with (
        memory_within(2**20),
        pytest.raises(BatchTooLarge, match="has 8,000,000,000,000 bytes, and the limit is") as caught,
    ):
        FrameWriter(BATCH_ID, [huge], compression=compression)
    assert "use a smaller batch_size, or increase --max-batch-bytes of the server" in str(caught.value)
    assert str(caught.value).startswith("batch 14 of epoch 3 of loader 01234567 ")


def test_the_limit_counts_the_whole_frame() -> None:
    """A frame may be exactly as large as the limit, header and pads included."""
    for content in (["text" * 100], [np.zeros(100)], FAILURE):
        size = len(encoded(content))
        assert len(encoded(content, max_bytes=size)) == size
        with pytest.raises(BatchTooLarge, match=f"has {size:,} bytes, and the limit is {size - 1:,}"):
            encoded(content, max_bytes=size - 1)


def test_an_array_of_4_gib_cannot_travel() -> None:
    """The limit of bin32, 4 GiB, is checked before an array is allocated, and the error states it."""
    with pytest.raises(BatchTooLarge, match="4 GiB"):
        FrameWriter(BATCH_ID, [np.broadcast_to(np.uint8(0), (2**32,))], max_bytes=2**40)


# --- Unsupported values -------------------------------------------------------------------------------------------


def test_what_cannot_travel_is_refused_with_its_path() -> None:
    """The error of the writer has the path of the value within the batch."""
    with pytest.raises(EncodeError, match=r"^cannot encode batch\['meta'\]\[2\]: unsupported type object"):
        encoded({"meta": [1, 2, object()]})
    with pytest.raises(
        EncodeError, match=r"^cannot encode batch\[0\]\['names'\]: unsupported dtype object of an array"
    ):
        encoded([{"names": np.array([None])}])


@pytest.mark.parametrize("batch", ["\ud800", ["\udcff"], {"\ud800": 1}, Point("ok", "\udfff")])
def test_a_string_that_is_no_unicode_is_refused(batch: object) -> None:
    """Lone surrogates, such as from os.fsdecode, have no UTF-8 encoding: the error names their batch."""
    with pytest.raises(EncodeError, match=r"^cannot encode batch 14 of epoch 3 .*: a string is not valid Unicode"):
        encoded(batch)


@pytest.mark.parametrize("index", [2**64, -(2**63) - 1, 10**30])
def test_a_failure_can_always_be_written(index: int) -> None:
    """Indices of more than 64 bits are omitted, and texts truncated and escaped: nothing could replace a failure."""
    failure = Failure("Error\ud800", "\udfff" * 10**6, "\U0001f600" * 10**6, [1, index, 2**64 - 1, -(2**63)] * 1000, 3)
    content = decoded(to_bytes(BATCH_ID, failure))
    assert isinstance(content, Failure)
    assert content.type == "Error\\ud800"
    assert content.indices == [1, 2**64 - 1, -(2**63)] * 250
    assert content.message.startswith("\\udfff")


# --- Frames that arrive in pieces -----------------------------------------------------------------------------------

LARGE = to_bytes(BATCH_ID, np.arange(2**20 + 5).astype(np.uint8))


def verified_on_arrival(body: bytes, ends: list[int]) -> int:
    """Return the size that is verified after the bytes up to each of `ends`, and then all others, have arrived."""
    buffer = bytearray(len(body))
    arriving = ArrivingFrame(memoryview(buffer))
    filled = 0
    for end in [*sorted(ends), len(body)]:
        buffer[filled:end] = body[filled:end]
        arriving.advance(end)
        filled = end
    return arriving.verified


pieces = st.lists(st.integers(0, len(LARGE)) | st.integers(0, 100), max_size=5)


@given(ends=pieces, rest=st.integers(0, 100))
def test_a_large_frame_is_verified_in_any_pieces(ends: list[int], rest: int) -> None:
    """The first frame of a response is verified, in whatever pieces it arrives and whatever follows it."""
    assert verified_on_arrival(LARGE + bytes(rest), ends) == len(LARGE)


@given(ends=pieces, at=st.integers(0, len(LARGE) - 1) | st.integers(0, 200), change=st.integers(1, 255))
def test_a_damaged_large_frame_is_not_verified(ends: list[int], at: int, change: int) -> None:
    """A damaged frame is left to the decoder, which reports it."""
    damaged = bytearray(LARGE)
    damaged[at] ^= change
    verified = verified_on_arrival(bytes(damaged), ends)
    with pytest.raises((ProtocolError, CorruptFrame)):
        list(read_all(KeptMemory(np.frombuffer(damaged, np.uint8)), verified=verified))


@pytest.mark.parametrize("body", [
    to_bytes(BATCH_ID, np.zeros(100, np.uint8)), LARGE[:-64], LARGE[:40], bytes(2**20),
    to_bytes(BATCH_ID, np.zeros(2**20, np.uint8), checksum=False),
], ids=["small", "truncated", "beginning", "no frame", "no checksum"])  # fmt: skip
def test_other_responses_are_not_verified_on_arrival(body: bytes) -> None:
    """The decoder verifies small frames, and reports responses that are incomplete or invalid."""
    assert verified_on_arrival(body, []) == 0
