"""Encoder and decoder of frames: one batch or failure as bytes (docs/protocol.md, "Frame format").

Encoding takes two steps, so that a worker can collate directly into shared memory: `FrameWriter` computes the frame's
size before it copies any element, and `FrameWriter.write` fills a buffer of that size. Decoding creates views of the
`Memory` that holds the frame; an array is copied only if a view of it would keep much more memory alive. Small frames
of a response usually differ only in their arrays, so `read_all` parses one header, compares the others with it as rows
of one array, and creates the arrays of many frames in one step.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final, NamedTuple, Protocol

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from teleloader_shared import dtypes
from teleloader_shared.errors import (
    PUBLIC_MODULE,
    BatchTooLarge,
    CorruptFrame,
    DecodeError,
    EncodeError,
    ProtocolError,
    TeleloaderError,
)
from teleloader_shared.spec import MAX_BATCH_SIZE, Compression
from teleloader_shared.text import short
from teleloader_shared.tree import ArrayLeaf, Leaf, flatten, is_columnar, layout, unflatten, unflatten_columns

MAGIC: Final = b"TLF1"
ALIGNMENT: Final = 64
DEFAULT_MAX_BATCH_BYTES: Final = 2**30

# array32 of n, fixstr "TLF1", uint64 frame size, bool has checksum, uint64 checksum, uint32 header size
_PROLOGUE: Final = struct.Struct(">BIB4sBQBBQBI")
PROLOGUE_SIZE: Final = _PROLOGUE.size
_BIN32_START: Final = struct.Struct(">BI")
_ARRAY32, _FIXSTR4, _UINT64, _UINT32, _TRUE, _FALSE, _BIN8, _BIN32 = 0xDD, 0xA4, 0xCF, 0xCE, 0xC3, 0xC2, 0xC4, 0xC6
_VALUES_BEFORE_SEGMENTS: Final = 6
_BIN8_HEAD: Final = 2
_BIN32_HEAD: Final = 5

HEADER_SHARE: Final = 32
"""The maximum size of a frame's header is ``max_batch_bytes / HEADER_SHARE``, but at least `MIN_HEADER_LIMIT`: decoding
a header allocates up to `HEADER_COST` times its size in Python objects, and temporarily twice that."""
MIN_HEADER_LIMIT: Final = 2**20
HEADER_COST: Final = 80
MAX_TEXT: Final = 64 * 1024
"""Maximum length of a failure's message, and of its traceback, in characters."""
MAX_INDICES: Final = 1000
"""Maximum number of indices in a failure."""
MAX_KEY: Final = 500
"""Maximum length of a string index in a `Substitution`, in characters."""

_VIEW_SHARE: Final = 64
"""An array smaller than 1/64 of its frame is copied: labels that a user keeps must not keep the images of their batch
in memory."""
_SMALL_FRAME: Final = 64 * 1024
"""Arrays of frames up to this size, in bytes, are never copied: the copy would cost more than the memory it frees."""
_LARGE_FRAME: Final = 2**20
"""Minimum size in bytes of frames whose checksums are computed while they are written and while they arrive, in pieces
that the CPU's cache still contains. It contains smaller frames completely.
"""
_PIECE_BYTES: Final = 256 * 1024
"""Size of these pieces in bytes, rounded to rows of an array."""
_RUN_BYTES: Final = 256 * 1024
"""Maximum total size of the small frames that are decoded together, and share the memory that an array keeps alive."""
_COMPARED_BYTES: Final = 2**21
"""Maximum total size of the frames whose headers are compared at once."""
_DIGEST: Final = slice(21, 29)
"""Position of the checksum in the prologue."""
_BATCH_KEYS: Final = {"loader", "epoch", "batch", "padding", "tree"}
"""Header fields of a batch without a shard state and compression."""
_FIXMAP, _MAX_FIXINT = 0x80, 0x7F


class Memory(Protocol):
    """Interface of a buffer that holds frames and creates the arrays or tensors of their batches.

    The decoder determines which bytes belong to an array. The memory determines the type of the array (NumPy array or
    torch tensor) and where copies are allocated. An array keeps the memory that it views alive.
    """

    @property
    def data(self) -> NDArray[np.uint8]:
        """Bytes of this memory as a 1-D contiguous array."""

    def allocate(self, nbytes: int) -> Memory:
        """Allocate `nbytes` bytes of additional memory, for copied or decompressed arrays."""

    def frame(self, start: int, nbytes: int) -> Memory:
        """Return memory whose `data` is exactly the `nbytes` bytes at offset `start`: one frame, or several small ones.

        The result may be this memory, if these bytes fill it, or a copy.
        """

    def leaf(self, offset: int, dtype_name: str, shape: tuple[int, ...], kind: str) -> Any:
        """Return the C-contiguous array or tensor at byte offset `offset`.

        Args:
            offset: Offset of the first byte in `data`, a multiple of the item size.
            dtype_name: One of `dtypes.NAMES`.
            shape: Size of each dimension; the array lies within `data`.
            kind: ``tensor``, ``ndarray`` or ``scalar``.

        Raises:
            ValueError, OverflowError, RuntimeError: If NumPy or torch cannot create an array of that shape.
        """

    def leaves(self, offsets: range, dtype_name: str, shape: tuple[int, ...], kind: str) -> list[Any]:
        """Return the arrays or tensors at several byte offsets; all have the same type and shape, see `leaf`.

        An in-place change of one tensor must not change the version counters of the others, or autograd would reject
        the tensors of other batches that a model saved for its backward pass.
        """


class Bits:
    """Buffer for frames; returns their arrays as NumPy views of the elements' raw bits (uint16 for bfloat16).

    Args:
        data: Bytes of the memory as a 1-D contiguous array.
    """

    __slots__ = ("data",)

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data = data

    def allocate(self, nbytes: int) -> Memory:
        """Allocate `nbytes` bytes of pageable memory."""
        return type(self)(np.empty(nbytes, np.uint8))

    def frame(self, start: int, nbytes: int) -> Memory:
        """Return this memory if the bytes fill it, else a copy, so that arrays do not keep the rest of it alive."""
        if nbytes == len(self.data):
            return self
        memory = self.allocate(nbytes)
        memory.data[:] = self.data[start : start + nbytes]
        return memory

    def leaf(self, offset: int, dtype_name: str, shape: tuple[int, ...], kind: str) -> Any:
        """Return an array that views this memory, with the NumPy type that stores the bits of `dtype_name`."""
        return np.ndarray(shape, dtypes.storage(dtype_name), self.data, offset)

    def leaves(self, offsets: range, dtype_name: str, shape: tuple[int, ...], kind: str) -> list[Any]:
        """Return the array at each offset."""
        return [self.leaf(offset, dtype_name, shape, kind) for offset in offsets]


class BatchId(NamedTuple):
    """Identifier of a batch: loader, epoch and batch number."""

    loader: str
    """Key of the loader (`LoaderSpec.key`)."""
    epoch: int
    batch: int

    def __str__(self) -> str:
        return f"batch {self.batch} of epoch {self.epoch} of loader {self.loader[:8]}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Exception that the server sends in place of a batch, usually raised by user code."""

    type: str
    """Qualified name of the exception's type; without a module for builtin types."""
    message: str
    traceback: str
    indices: list[int]
    """First 1,000 sample indices of the batch; indices that do not fit into 64 bits are omitted."""
    worker: int
    """ID of the worker that failed; -1 for the server's own process."""
    sample: int | None = None
    """Index of the sample whose loading failed; None if it is unknown, or the failure is not of a single sample."""


class Substitution(NamedTuple):
    """Sample that failed, and was skipped or replaced."""

    position: int
    """Position of the sample in the index list of the batch."""
    sample: int | str | None
    """Index of the sample; None if it is neither an integer nor a string of at most `MAX_KEY` characters."""
    replacement: int | str | None
    """Index of the sample in its place; None if the sample was skipped."""
    error: str
    """Type and message of the exception."""


class Substituted(NamedTuple):
    """Samples of a batch that were skipped or replaced."""

    samples: int
    """Length of the index list of the batch."""
    substitutions: Sequence[Substitution]
    """In the order of the positions; not empty."""

    @classmethod
    def read(cls, fields: object) -> Substituted:
        """Validate the header field of a frame, or the field of a message.

        Raises:
            ProtocolError: If the field is invalid.
        """
        match fields:
            case [int(samples), [_, *_] as items] if 0 < samples <= MAX_BATCH_SIZE:
                found = [_read_substitution(item) for item in items]
                positions = [-1, *(each.position for each in found), samples]
                if all(earlier < later for earlier, later in pairwise(positions)):
                    return cls(samples, found)
        raise ProtocolError(
            "invalid frame: expected [samples, [substitution, ...]] with ascending positions in [0, samples), got "
            f"{short(fields)}"
        )


@dataclass(frozen=True, slots=True)
class End:
    """End of an iterable-style dataset's shard, sent in place of a batch."""

    samples: int
    """Samples that the shard yielded in total, including those of an incomplete batch that ``drop_last`` dropped."""
    replica: bool
    """True if the dataset never called ``get_worker_info()``, so that each shard yields the whole dataset."""


class Frame(NamedTuple):
    """Decoded frame: a batch, a failure or the end of a shard."""

    batch_id: BatchId
    content: Any
    """The batch, a `Failure` or an `End`."""
    padding: int
    """Number of samples at the end of the batch that repeat earlier ones (`Plan.padding`)."""
    nbytes: int
    """Size of the encoded frame in bytes."""
    shard_state: str | None = None
    """State of the shard after the batch (`user_state.pack`); None if the dataset is not stateful."""
    memory: int = 0
    """Upper bound of the memory that the frame takes, in bytes: receive buffer, decompressed arrays and objects."""
    substituted: Substituted | None = None
    """Skipped and replaced samples; None if there are none."""
    raw: NDArray[np.uint8] | None = None
    """Encoded frame; None unless it is kept to be sent to another process."""


class FrameWriter:
    """Encoder of one frame: computes the layout at construction, and writes the frame into a buffer.

    Args:
        batch_id: Identifier of the batch.
        content: The batch, a `Failure` or an `End`.
        padding: Number of samples at the end of the batch that repeat earlier ones (`Plan.padding`).
        shard_state: State of the shard after the batch (`user_state.pack`); None if the dataset is not stateful.
        substituted: Skipped and replaced samples; None if there are none.
        name: Name of the content in error messages.
        checksum: Whether the frame carries a checksum.
        compression: Compression of the arrays; None for no compression. The constructor compresses, not `write`.
        max_bytes: Maximum size of the frame, in bytes.

    Raises:
        EncodeError: If the batch holds a value that the format cannot represent.
        BatchTooLarge: If the frame would exceed `max_bytes`, or its header or one of its arrays exceeds a limit.
        TeleloaderError: If the package for `compression` is not installed.
    """

    def __init__(
        self,
        batch_id: BatchId,
        content: object,
        *,
        padding: int = 0,
        shard_state: str | None = None,
        substituted: Substituted | None = None,
        name: str = "batch",
        checksum: bool = True,
        compression: Compression | None = None,
        max_bytes: int = DEFAULT_MAX_BATCH_BYTES,
    ) -> None:
        self._checksum = checksum
        self._number: bytes = msgpack.packb(batch_id.batch)
        leaves: list[Leaf] = []
        # compressed arrays vary in size, and the states of shards in length
        is_regular = compression is None and shard_state is None and substituted is None
        tree = layout(content, leaves) if is_regular else None
        key = (batch_id.loader, batch_id.epoch, len(self._number), padding, max_bytes, tree)
        found = None if tree is None else _layouts.get(key)
        if found is None:
            header, leaves = _header(batch_id, content, padding, shard_state, substituted, name, compression, max_bytes)
            found = _lay_out(batch_id, header, leaves, max_bytes)
            if tree is not None and len(header) <= _MAX_KEPT_HEADER:
                if len(_layouts) >= _MAX_KEPT_LAYOUTS:
                    _layouts.clear()
                _layouts[key] = found
        self._layout = found
        self._leaves = leaves
        self.nbytes = found.nbytes
        """Size of the frame in bytes, a multiple of 64."""

    def write(self, buffer: NDArray[np.uint8]) -> None:
        """Write the frame to the first `nbytes` bytes of `buffer` (uint8, contiguous, aligned to 64 bytes)."""
        raw = buffer.data
        before, after, segments, last_pad, nbytes = self._layout
        header = before + self._number + after
        raw[PROLOGUE_SIZE : PROLOGUE_SIZE + len(header)] = header
        content = _WrittenContent(raw) if self._checksum and nbytes >= _LARGE_FRAME else None
        for leaf, (start, head, dtype) in zip(self._leaves, segments, strict=True):
            raw[start - len(head) : start] = head
            out = np.ndarray(leaf.shape, dtype, raw, start)
            if content is None or out.nbytes <= _PIECE_BYTES:
                leaf.write(out)
            else:
                content.write(leaf, out, start)
        raw[nbytes - len(last_pad) : nbytes] = last_pad
        values = _VALUES_BEFORE_SEGMENTS + 2 * len(segments) + 1
        if content is not None:
            digest = content.digest(nbytes)
        else:
            digest = xxhash.xxh3_64_intdigest(raw[PROLOGUE_SIZE:nbytes]) if self._checksum else 0
        flag = _TRUE if self._checksum else _FALSE
        _PROLOGUE.pack_into(
            raw, 0, _ARRAY32, values, _FIXSTR4, MAGIC, _UINT64, nbytes, flag, _UINT64, digest, _UINT32, len(header)
        )


class _WrittenContent:
    """Checksum of a large frame, computed while its arrays are written.

    Args:
        raw: Buffer of the frame.
    """

    def __init__(self, raw: memoryview) -> None:
        self._raw = raw
        self._content = xxhash.xxh3_64()
        self._hashed = PROLOGUE_SIZE

    def write(self, leaf: Leaf, out: NDArray[Any], start: int) -> None:
        """Write an array to `out`, which begins at offset `start`, and hash the frame up to its end."""
        row = out.nbytes // len(out)
        step = max(1, _PIECE_BYTES // row)
        for first in range(0, len(out), step):
            rows = out[first : first + step]
            leaf.write(rows, first)
            self._hash(start + first * row + rows.nbytes)

    def digest(self, nbytes: int) -> int:
        """Return the checksum of the complete frame of `nbytes` bytes."""
        self._hash(nbytes)
        digest: int = self._content.intdigest()
        return digest

    def _hash(self, end: int) -> None:
        self._content.update(self._raw[self._hashed : end])
        self._hashed = end


class _Segment(NamedTuple):
    """Position of an array in a frame."""

    start: int
    head: bytes
    """Bytes directly before the array: padding, and the head of a msgpack bin32 value."""
    dtype: np.dtype[np.generic]


class _Layout(NamedTuple):
    """Bytes of a frame that do not depend on the batch number and the elements of its arrays.

    Consecutive batches usually have equal layouts. Describing and encoding the tree of each would take a third of the
    time that a worker needs for the frame of a small batch.
    """

    before: bytes
    """Header before the batch number."""
    after: bytes
    """Header after the batch number."""
    segments: list[_Segment]
    last_pad: bytes
    nbytes: int
    """Size of the frame."""


_MAX_KEPT_LAYOUTS: Final = 256
_MAX_KEPT_HEADER: Final = 4096
_layouts: Final[dict[Hashable, _Layout]] = {}
"""Layouts of recent frames, by everything that they depend on; cleared when it is full."""


def _header(
    batch_id: BatchId,
    content: object,
    padding: int,
    shard_state: str | None,
    substituted: Substituted | None,
    name: str,
    compression: Compression | None,
    max_bytes: int,
) -> tuple[bytes, list[Leaf]]:
    """Return the header of a frame, and the arrays of the frame."""
    header: dict[str, Any] = {"loader": batch_id.loader, "epoch": batch_id.epoch, "batch": batch_id.batch}
    leaves: list[Leaf] = []
    if shard_state is not None:
        header["shard_state"] = shard_state
    if isinstance(content, Failure):
        header["failure"] = _failure_fields(content)
    elif isinstance(content, End):
        header["end"] = {name: getattr(content, name) for name in End.__slots__}
    else:
        header["padding"] = padding
        if substituted is not None:
            header["substituted"] = substituted
        header["tree"], leaves = flatten(content, name)
    size = sum(map(_size, leaves))
    if size > max_bytes:
        raise BatchTooLarge(_too_large(batch_id, size, max_bytes))
    if compression is not None and leaves:
        header["compression"] = compression
        leaves = [_compressed(leaf, compression) for leaf in leaves]
    try:
        packed: bytes = msgpack.packb(header, use_bin_type=True)
    except UnicodeEncodeError as error:
        raise EncodeError(f"cannot encode {batch_id}: a string is not valid Unicode: {error}") from None
    _check_header(batch_id, len(packed), max_bytes)
    return packed, leaves


def _lay_out(batch_id: BatchId, header: bytes, leaves: list[Leaf], max_bytes: int) -> _Layout:
    segments = []
    end = PROLOGUE_SIZE + len(header)
    for leaf in leaves:
        size = _size(leaf)
        if size >= 2**32:
            raise BatchTooLarge(f"{batch_id} has an array of {size:,} bytes, over 4 GiB: use a smaller batch_size")
        start = _aligned(end + _BIN8_HEAD + _BIN32_HEAD)
        head = _pad(start - _BIN32_HEAD - end) + _BIN32_START.pack(_BIN32, size)
        segments.append(_Segment(start, head, dtypes.storage(leaf.dtype_name)))
        end = start + size
    nbytes = _aligned(end + _BIN8_HEAD)
    if nbytes > max_bytes:
        raise BatchTooLarge(_too_large(batch_id, nbytes, max_bytes))
    # the header begins with the encoding of this map, except that it has more entries
    until_number = len(msgpack.packb({"loader": batch_id.loader, "epoch": batch_id.epoch, "batch": batch_id.batch}))
    number_size = len(msgpack.packb(batch_id.batch))
    return _Layout(header[: until_number - number_size], header[until_number:], segments, _pad(nbytes - end), nbytes)


def _size(leaf: Leaf) -> int:
    return int(dtypes.storage(leaf.dtype_name).itemsize * prod(leaf.shape))


def to_bytes(batch_id: BatchId, content: object, **options: Any) -> bytes:
    """Return a frame as bytes, at the cost of another copy; `options` are passed to `FrameWriter`."""
    writer = FrameWriter(batch_id, content, **options)
    buffer = np.empty(writer.nbytes, np.uint8)
    writer.write(buffer)
    return buffer.tobytes()


def frame_size(prologue: bytes | memoryview) -> int:
    """Return the size of a frame in bytes, from the first `PROLOGUE_SIZE` bytes of the frame.

    Raises:
        ProtocolError: If the bytes are not the beginning of a frame.
    """
    return _read_prologue(prologue, 0)[0]


class Envelope(NamedTuple):
    """Partially decoded frame: the prologue is parsed, but not the header and the arrays."""

    size: int
    """Size of the frame in bytes."""
    values: int
    """Number of elements of the frame, which is a msgpack array."""
    header: memoryview
    """Encoded header, a msgpack map."""

    def packed_array_start(self, nbytes: int) -> int:
        """Return the offset of the array in a frame that contains exactly one array.

        Args:
            nbytes: Size of the array in bytes.

        Raises:
            ProtocolError: If the frame does not hold exactly one array of that size.
        """
        start = _aligned(PROLOGUE_SIZE + len(self.header) + _BIN8_HEAD + _BIN32_HEAD)
        if self.values != _VALUES_BEFORE_SEGMENTS + 3 or self.size != _aligned(start + nbytes + _BIN8_HEAD):
            raise ProtocolError(f"invalid frame of {self.size:,} bytes: expected one array of {nbytes:,} bytes")
        return start


def open_frame(raw: memoryview, start: int, max_header: int, *, verify: bool = True) -> Envelope:
    """Check the sizes and the checksum of a frame, without parsing the header.

    Args:
        raw: Buffer that contains the frame.
        start: Offset of the frame in `raw`.
        max_header: Maximum size of the header in bytes.
        verify: Whether to verify the checksum.

    Raises:
        CorruptFrame: If the checksum does not match.
        ProtocolError: If the bytes are not a complete frame, or its header has more than `max_header` bytes.
    """
    size, values, checksum, header_size = _read_prologue(raw, start)
    available = len(raw) - start
    if size > available:
        raise ProtocolError(f"invalid frame: truncated: expected {size:,} bytes, got {available:,}")
    if header_size > max_header:
        raise ProtocolError(
            f"invalid frame: the header has {header_size:,} bytes, more than {max_header:,}: convert numbers to arrays"
        )
    begin = start + PROLOGUE_SIZE
    if verify and checksum is not None and xxhash.xxh3_64_intdigest(raw[begin : start + size]) != checksum:
        raise CorruptFrame("corrupted frame: the content does not match the checksum")
    return Envelope(size, values, raw[begin : begin + header_size])


class ArrivingFrame:
    """Verifier of a large frame at the start of a response, while the frame arrives: it is in the CPU's cache then.

    Args:
        raw: Buffer for the response.
    """

    def __init__(self, raw: memoryview) -> None:
        self._raw = raw
        self._content = xxhash.xxh3_64()
        self._hashed = 0
        self._size = 0
        self._checksum: int | None = None

    def advance(self, filled: int) -> None:
        """Hash the bytes that arrived since the last call; `filled` is the number of all bytes that arrived."""
        if not self._hashed and filled >= PROLOGUE_SIZE:
            self._hashed = PROLOGUE_SIZE
            with suppress(ProtocolError):  # the decoder raises it
                size, _, self._checksum, _ = _read_prologue(self._raw, 0)
                if self._checksum is not None and _LARGE_FRAME <= size <= len(self._raw):
                    self._size = size
        end = min(filled, self._size)
        if end > self._hashed:
            self._content.update(self._raw[self._hashed : end])
            self._hashed = end

    @property
    def verified(self) -> int:
        """Size of the frame in bytes if the frame is complete and its checksum matches; else 0."""
        is_complete = 0 < self._size == self._hashed
        return self._size if is_complete and self._content.intdigest() == self._checksum else 0


def read_all(memory: Memory, max_bytes: int = DEFAULT_MAX_BATCH_BYTES, *, verified: int = 0) -> Iterator[Frame]:
    """Decode the consecutive frames in `memory`.

    Args:
        memory: Exactly the bytes of the frames.
        max_bytes: Maximum total size of the decompressed arrays of a frame, in bytes.
        verified: Size of the frames at the start of `memory` whose checksums need not be verified.

    Raises:
        CorruptFrame: If a checksum does not match.
        ProtocolError: If the bytes violate the format.
        TeleloaderError: If the package for decompression is not installed.
    """
    start, end = 0, len(memory.data)
    raw, max_header = memory.data.data, _header_limit(max_bytes)
    layout: _ReadLayout | None = None
    is_regular = True
    while start < end:
        if layout is not None:
            for frame in layout.read(memory, start):
                start += frame.nbytes
                yield frame
            if start == end:
                return
        envelope = open_frame(raw, start, max_header, verify=start >= verified)
        frame = _decode(memory.frame(start, envelope.size), envelope, max_bytes)
        yield frame
        # where layouts alternate, the attempts would cost more than they save
        is_regular = is_regular and (layout is None or layout.is_used)
        if is_regular and envelope.size <= min(_SMALL_FRAME, (end - start) // 3):
            layout = _read_layout(frame, envelope, memory.data[start : start + envelope.size])
            is_regular = layout is not None
        else:
            layout = None
        start += envelope.size


def read(memory: Memory, max_bytes: int = DEFAULT_MAX_BATCH_BYTES, *, generate_classes: bool = True) -> Frame:
    """Decode the single frame that fills `memory`; errors and other arguments are those of `read_all`.

    Args:
        memory: Exactly the bytes of the frame.
        max_bytes: Maximum total size of the decompressed arrays, in bytes.
        generate_classes: Whether classes of namedtuples and dataclasses that this process lacks are generated; if
            not, the frame becomes a failure.
    """
    envelope = open_frame(memory.data.data, 0, _header_limit(max_bytes))
    if envelope.size != len(memory.data):
        raise ProtocolError(f"invalid frame: expected {envelope.size:,} bytes, got {len(memory.data):,}")
    return _decode(memory, envelope, max_bytes, generate_classes=generate_classes)


def _decode(memory: Memory, envelope: Envelope, max_bytes: int, *, generate_classes: bool = True) -> Frame:
    """Decode the frame that fills `memory`."""
    size, values, packed = envelope
    header_size = len(packed)
    try:
        header = msgpack.unpackb(packed, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"invalid frame: the header is not msgpack: {type(error).__name__}") from None
    batch_id = _read_batch_id(header)
    segments = _Segments(memory, PROLOGUE_SIZE + header_size, header.get("compression"), max_bytes)
    padding = 0
    if "failure" in header:
        content: Any = _read_failure(header["failure"])
    elif "end" in header:
        content = _read_end(header["end"])
    elif "tree" in header:
        try:
            content = unflatten(header["tree"], segments.take, generate_classes=generate_classes)
        except DecodeError as error:  # of this batch alone: the next one may be valid
            failure = Failure(f"{PUBLIC_MODULE}.{DecodeError.__name__}", str(error), "", [], -1)
            return Frame(batch_id, failure, 0, size, None, size + HEADER_COST * header_size)
        padding = header.get("padding", 0)
        if type(padding) is not int or padding < 0:
            raise ProtocolError(f"invalid frame: padding must be a non-negative integer, got {short(padding)}")
    else:
        raise ProtocolError(f"invalid frame: expected a tree, failure or end in the header, got {short(list(header))}")
    segments.finish(values)
    shard_state = header.get("shard_state")
    if shard_state is not None and not isinstance(shard_state, str):
        raise ProtocolError(f"invalid frame: shard_state must be a string, got {short(shard_state)}")
    substituted = Substituted.read(header["substituted"]) if "substituted" in header else None
    memory_cost = size + HEADER_COST * header_size + segments.unpacked
    return Frame(batch_id, content, padding, size, shard_state, memory_cost, substituted)


class _Array(NamedTuple):
    """Position and type of an array in a frame; the fields are those of `Memory.leaf`."""

    offset: int
    dtype_name: str
    shape: tuple[int, ...]
    kind: str


@dataclass(slots=True)
class _ReadLayout:
    """Decoder of frames that differ from a valid frame only in batch number, checksum and elements of arrays."""

    frame: Frame
    """The valid frame."""
    tree: Any
    arrays: list[_Array]
    constant: list[tuple[slice, NDArray[np.uint8]]]
    """Bytes that are equal in all frames, by position: those that the decoder checks are among them."""
    number: slice
    """Position of the batch number, a big-endian unsigned integer."""
    has_checksum: bool
    is_used: bool = False
    """True if frames with this layout have been decoded."""

    def read(self, memory: Memory, start: int) -> Iterator[Frame]:
        """Decode the frames at offset `start` that have this layout, up to the first frame with an invalid checksum.

        Other frames are left to the general decoder, which raises the error of an invalid one.
        """
        size = self.frame.nbytes
        count = min(_COMPARED_BYTES, len(memory.data) - start) // size
        rows = memory.data[start : start + count * size].reshape(count, size)
        equal = np.ones(count, np.bool_)
        if self.frame.batch_id.batch <= _MAX_FIXINT:  # no type byte that could be compared, or a negative number
            equal = rows[:, self.number.start] <= _MAX_FIXINT
        for where, expected in self.constant:
            equal &= (rows[:, where] == expected).all(axis=1)
        count = count if equal.all() else int(equal.argmin())
        numbers = iter(_integers(rows[:count, self.number]))
        checksums = _integers(rows[:count, _DIGEST]) if self.has_checksum else None
        limit = max(1, _RUN_BYTES // size)
        for first in range(0, count, limit):
            length = min(limit, count - first)
            if checksums is not None:
                length = _valid(memory.data.data, start, size, checksums[first : first + length])
            if length:
                self.is_used = True
                yield from self._run(memory.frame(start, length * size), length, numbers)
            if length < limit:
                return
            start += length * size

    def _run(self, memory: Memory, count: int, numbers: Iterator[int]) -> Iterator[Frame]:
        """Return the `count` frames that fill `memory`."""
        (loader, epoch, _), _, padding, size, _, cost, *_ = self.frame
        columns = [
            memory.leaves(range(offset, offset + count * size, size), dtype_name, shape, kind)
            for offset, dtype_name, shape, kind in self.arrays
        ]
        for content in unflatten_columns(self.tree, columns, count):
            yield Frame(BatchId(loader, epoch, next(numbers)), content, padding, size, None, cost)


def _read_layout(frame: Frame, envelope: Envelope, data: NDArray[np.uint8]) -> _ReadLayout | None:
    """Return the layout of a valid frame with the bytes `data`; None if frames like it cannot be decoded together."""
    header: dict[str, Any] = msgpack.unpackb(envelope.header)
    # the batch number has a known position only in a header with these first fields and without duplicates
    first = msgpack.packb({name: header[name] for name in ("loader", "epoch", "batch")})
    if (
        header.keys() != _BATCH_KEYS
        or envelope.header[0] != _FIXMAP + len(header)
        or envelope.header[1 : len(first)] != first[1:]
        or not is_columnar(header["tree"])
    ):
        return None
    number_end = PROLOGUE_SIZE + len(first)
    # without the type byte, which integers above 127 have
    number = slice(number_end - max(1, len(msgpack.packb(header["batch"])) - 1), number_end)
    has_checksum = data[_DIGEST.start - 2] == _TRUE
    variable = [_DIGEST, number] if has_checksum else [number]
    arrays: list[_Array] = []
    end = PROLOGUE_SIZE + len(envelope.header)

    def place(dtype_name: str, shape: tuple[int, ...], kind: str) -> None:
        nonlocal end
        start = _aligned(end + _BIN8_HEAD + _BIN32_HEAD)
        arrays.append(_Array(start, dtype_name, shape, kind))
        end = start + dtypes.storage(dtype_name).itemsize * prod(shape)
        variable.append(slice(start, end))

    unflatten(header["tree"], place)
    constant = [slice(a.stop, b.start) for a, b in pairwise([slice(0), *variable, slice(len(data), None)])]
    return _ReadLayout(
        frame, header["tree"], arrays, [(where, data[where].copy()) for where in constant], number, has_checksum
    )


def _valid(raw: memoryview, start: int, size: int, checksums: list[int]) -> int:
    """Return the number of frames before the first one with an invalid checksum."""
    for i, checksum in enumerate(checksums):
        begin = start + i * size
        if xxhash.xxh3_64_intdigest(raw[begin + PROLOGUE_SIZE : begin + size]) != checksum:
            return i
    return len(checksums)


def _integers(rows: NDArray[np.uint8]) -> list[int]:
    """Return the big-endian unsigned integer of each row."""
    integers: list[int] = rows.copy().view(f">u{rows.shape[1]}").ravel().tolist()
    return integers


def _read_batch_id(header: Any) -> BatchId:
    # a mapping pattern would take 2 us per batch
    if type(header) is dict:
        loader, epoch, batch = header.get("loader"), header.get("epoch"), header.get("batch")
        if type(loader) is str and type(epoch) is int and type(batch) is int:
            return BatchId(loader, epoch, batch)
    raise ProtocolError(f"invalid frame: expected loader, epoch and batch in the header, got {short(header)}")


class _Segments:
    """Reader of the arrays of a frame, one after another, starting at byte offset `end` of the memory."""

    def __init__(self, memory: Memory, end: int, compression: object, max_bytes: int) -> None:
        self._memory = memory
        self._buffer = memory.data
        self._end = end
        self._compression = compression
        self._max_bytes = max_bytes
        self._taken = self._taken_bytes = 0

    @property
    def unpacked(self) -> int:
        """Total size of the decompressed arrays in bytes; 0 if the arrays are not compressed."""
        return 0 if self._compression is None else self._taken_bytes

    def take(self, dtype_name: str, shape: tuple[int, ...], kind: str) -> Any:
        """Return the next array; check that its size matches the type and shape that the tree declares."""
        dtype = dtypes.storage(dtype_name)
        nbytes = dtype.itemsize * prod(shape)
        self._taken += 1
        self._taken_bytes += nbytes
        if self._taken_bytes > self._max_bytes:
            raise ProtocolError(
                f"the arrays of the batch have at least {self._taken_bytes:,} bytes, and the limit is "
                f"{self._max_bytes:,}: increase max_batch_bytes"
            )
        start = _aligned(self._end + _BIN8_HEAD + _BIN32_HEAD)
        if start > len(self._buffer):
            raise ProtocolError("invalid frame: truncated: arrays of the tree are missing")
        marker, size = _BIN32_START.unpack_from(self._buffer.data, start - _BIN32_HEAD)
        self._end = start + size
        if marker != _BIN32 or self._end > len(self._buffer):
            raise ProtocolError("invalid frame: an array of the tree is missing")
        if self._compression is None and size != nbytes:
            raise ProtocolError(f"invalid frame: array {dtype_name}{shape} must have {nbytes:,} bytes, got {size:,}")
        memory, offset = self._memory, start
        if self._compression is not None:
            memory, offset = _decompress(self._buffer[start : self._end], self._compression, nbytes, memory.allocate), 0
        elif len(self._buffer) > max(_SMALL_FRAME, _VIEW_SHARE * nbytes):
            memory, offset = memory.allocate(nbytes), 0
            memory.data[:] = self._buffer[start : self._end]
        try:
            return memory.leaf(offset, dtype_name, shape, kind)
        except TeleloaderError:
            raise  # some subclasses are ValueErrors
        except (ValueError, OverflowError, RuntimeError) as error:
            raise ProtocolError(f"invalid frame: cannot create array {dtype_name}{shape}: {error}") from None

    def finish(self, values: int) -> None:
        """Check that the frame ends after the last array, and that the prologue's value count matches the arrays."""
        if _aligned(self._end + _BIN8_HEAD) != len(self._buffer):
            raise ProtocolError("invalid frame: unexpected data after the last array")
        if values != _VALUES_BEFORE_SEGMENTS + 2 * self._taken + 1:
            raise ProtocolError(f"invalid frame: a value count of {values} does not match {self._taken} arrays")


def _read_prologue(raw: bytes | memoryview, start: int) -> tuple[int, int, int | None, int]:
    """Return the frame's size, number of values, checksum (None if absent) and header size."""
    if len(raw) - start < PROLOGUE_SIZE:
        raise ProtocolError(f"invalid frame: expected a prologue of {PROLOGUE_SIZE} bytes, got {len(raw) - start}")
    (
        array, values, string, magic, size_type, size, flag, digest_type, digest, header_type, header_size
    ) = _PROLOGUE.unpack_from(raw, start)  # fmt: skip
    if (array, string, magic) != (_ARRAY32, _FIXSTR4, MAGIC):
        raise ProtocolError(f"invalid frame or unsupported protocol version: got {raw[start : start + 10].hex()}")
    if (size_type, digest_type, header_type) != (_UINT64, _UINT64, _UINT32) or flag not in (_TRUE, _FALSE):
        raise ProtocolError("invalid frame: expected the types uint64, bool, uint64 and uint32 in the prologue")
    if values < _VALUES_BEFORE_SEGMENTS:
        raise ProtocolError(f"invalid frame: expected at least {_VALUES_BEFORE_SEGMENTS} values, got {values}")
    if size % ALIGNMENT:
        raise ProtocolError(f"invalid frame: the size must be a multiple of {ALIGNMENT} bytes, got {size:,}")
    if PROLOGUE_SIZE + header_size > size:
        raise ProtocolError(f"invalid frame: the header has {header_size:,} bytes, but the frame has only {size:,}")
    if flag == _FALSE and digest:
        raise ProtocolError("invalid frame: the checksum must be 0 if the checksum flag is false")
    return size, values, digest if flag == _TRUE else None, header_size


def _failure_fields(failure: Failure) -> dict[str, Any]:
    """Return the header fields of a failure, truncated and escaped so that msgpack can encode them."""
    return {
        "type": _text(failure.type),
        "message": _text(failure.message),
        "traceback": _text(failure.traceback),
        "indices": [index for index in failure.indices[:MAX_INDICES] if -(2**63) <= index < 2**64],
        "worker": failure.worker,
        **({} if failure.sample is None else {"sample": failure.sample}),
    }


def _text(text: str) -> str:
    """Truncate a text and escape lone surrogates, which UTF-8 cannot encode."""
    return text[:MAX_TEXT].encode("utf-8", "backslashreplace").decode()[:MAX_TEXT]


def _read_failure(fields: object) -> Failure:
    match fields:
        case {
            "type": str(type_name),
            "message": str(message),
            "traceback": str(traceback),
            "indices": list(indices),
            "worker": int(worker),
            **others,
        }:
            kept = [i for i in indices[:MAX_INDICES] if isinstance(i, int)]
            sample = others.get("sample")
            # the end of a traceback names the line that failed
            return Failure(
                type_name[:MAX_TEXT], message[:MAX_TEXT], traceback[-MAX_TEXT:], kept, worker,
                sample if isinstance(sample, int) else None,
            )  # fmt: skip
    raise ProtocolError(f"invalid failure {short(fields)}: expected the fields {', '.join(Failure.__slots__)}")


def _read_substitution(fields: object) -> Substitution:
    match fields:
        case [int(position), int() | str() | None as sample, int() | str() | None as replaced, str(error)]:
            if all(len(key) <= MAX_KEY for key in (sample, replaced) if isinstance(key, str)):
                return Substitution(position, sample, replaced, error[:MAX_TEXT])
    raise ProtocolError(f"invalid frame: expected [position, sample, replacement, error], got {short(fields)}")


def _read_end(fields: object) -> End:
    match fields:
        case {"samples": int(samples), "replica": bool(replica)}:
            return End(samples, replica)
    raise ProtocolError(f"invalid end {short(fields)}: expected the fields {', '.join(End.__slots__)}")


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _pad(size: int) -> bytes:
    """Return a msgpack bin8 value of zeros with `size` bytes, at most `ALIGNMENT` + 1."""
    return bytes((_BIN8, size - _BIN8_HEAD)) + bytes(size - _BIN8_HEAD)


def _header_limit(max_bytes: int) -> int:
    return max(MIN_HEADER_LIMIT, max_bytes // HEADER_SHARE)


def _check_header(batch_id: BatchId, size: int, max_bytes: int) -> None:
    limit = _header_limit(max_bytes)
    if size > limit:
        raise BatchTooLarge(
            f"{batch_id} has {size:,} bytes outside of arrays, and the limit is {limit:,}: convert strings and numbers "
            "to arrays, use a smaller batch_size, or increase --max-batch-bytes of the server and max_batch_bytes of "
            "the client"
        )


def _too_large(batch_id: BatchId, size: int, limit: int) -> str:
    return (
        f"{batch_id} has {size:,} bytes, and the limit is {limit:,}: use a smaller batch_size, or increase "
        "--max-batch-bytes of the server and max_batch_bytes of the client"
    )


def _compressed(leaf: Leaf, compression: Compression) -> ArrayLeaf:
    bits = np.empty(leaf.shape, dtypes.storage(leaf.dtype_name))
    leaf.write(bits)
    raw = bits.reshape(-1).view(np.uint8)
    if compression == "zstd":
        packed = _library("zstandard").ZstdCompressor(level=1).compress(raw)
    else:
        packed = _library("lz4.block").compress(raw, store_size=False)
    return ArrayLeaf("uint8", "ndarray", np.frombuffer(packed, np.uint8))


def _decompress(
    segment: NDArray[np.uint8], compression: object, size: int, allocate: Callable[[int], Memory]
) -> Memory:
    """Decompress an array of `size` bytes; even for an invalid segment, stop after that many bytes."""
    if size == 0:
        return allocate(0)
    if compression == "zstd":
        memory = allocate(size)
        library = _library("zstandard")
        try:
            reader = library.ZstdDecompressor().stream_reader(segment)
            filled = reader.readinto(memory.data.data)
            if reader.read(1):
                raise ProtocolError(f"invalid frame: an array decompresses to more than {size:,} bytes")
        except library.ZstdError as error:
            raise ProtocolError(f"invalid frame: an array is not valid zstd: {error}") from None
    elif compression == "lz4":
        library = _library("lz4.block")
        try:
            unpacked = library.decompress(segment, uncompressed_size=size, return_bytearray=True)
        except (library.LZ4BlockError, ValueError, OverflowError, MemoryError) as error:
            raise ProtocolError(f"invalid frame: an array is not valid lz4: {error}") from None
        filled = len(unpacked)
        memory = allocate(filled)
        memory.data[:] = np.frombuffer(unpacked, np.uint8)
    else:
        raise ProtocolError(f"unknown compression {short(compression)}: expected 'zstd' or 'lz4'")
    if filled != size:
        raise ProtocolError(f"invalid frame: an array must decompress to {size:,} bytes, got {filled:,}")
    return memory


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise TeleloaderError(
            f"compression requires {name.split('.')[0]}, which is not installed: run pip install "
            "'teleloader[compression]' on server and client"
        ) from None
