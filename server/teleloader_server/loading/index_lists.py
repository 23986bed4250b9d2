"""Index lists of batches from client-side samplers, as specified in docs/protocol.md.

`checked_batch_id` runs in the event loop: it validates an index list in constant time, except for C code that processes
more than 100 MB/s. `read` and `check_range` run in a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from teleloader_server.config import IndexKind
from teleloader_shared import codec, dtypes
from teleloader_shared.codec import BatchId, Envelope
from teleloader_shared.errors import DecodeError, InvalidSpec, ProtocolError
from teleloader_shared.spec import MAX_BATCH_SIZE, MAX_EPOCH

MAX_HEADER_BYTES: Final = 512 * 2**10
"""Maximum size in bytes of a frame's header: the event loop splits it into fields, at more than 100 MB/s."""
MAX_PLAIN_BYTES: Final = 16 * 2**10
"""Maximum size in bytes of a msgpack list of integers, which the event loop parses completely."""
MAX_FIELD_BYTES: Final = 256
"""Maximum size in bytes of every other header field."""
MAX_FIELDS: Final = 16
OPT_IN: Final = 'To allow other indices, set indices = "any" for the dataset in the configuration of the server'

_INTEGERS: Final = frozenset(name for name, dtype in dtypes.NUMPY.items() if dtype.kind in "iu")


class Rules(NamedTuple):
    """Index list rules of a loader: permitted indices and limits."""

    kind: IndexKind
    """See `DatasetConfig.indices`."""
    single: bool
    """True if a batch is one sample (``batch_size=None``): the frame then contains an index in place of a list."""
    max_lists: int
    """Maximum number of index lists in one request."""


class _List(NamedTuple):
    """Index list that is not completely validated yet."""

    batch_id: BatchId
    envelope: Envelope
    tree: bytes
    """Indices, encoded as msgpack."""


def read(frame: bytes, *, single: bool) -> list[Any]:
    """Decode the indices of a batch; called in a worker.

    Args:
        frame: Frame with the index list of one batch.
        single: Whether the frame contains one index in place of a list.

    Raises:
        InvalidSpec: If the list has more than 2**20 indices.
        DecodeError: If an index is of a type that this process has not registered.
    """
    content = codec.read(IndexMemory(np.frombuffer(frame, np.uint8))).content
    if isinstance(content, codec.Failure):
        raise DecodeError(content.message)
    if single:
        return [content]
    if len(content) > MAX_BATCH_SIZE:  # the size of a frame does not limit the length of a range
        raise _too_many(len(content))
    return list(content)


def check_range(indices: list[Any], length: int | None, dataset: str) -> None:
    """Check that integer indices are in the valid range for a dataset.

    Args:
        indices: Integer indices.
        length: Length of the dataset; None permits all indices in [0, 2**63).
        dataset: Name of the dataset, for the error message.

    Raises:
        IndexError: If an index is negative, or not less than the length.
    """
    if not indices:
        return
    stop = 2**63 if length is None else length
    wrong = next((index for index in (min(indices), max(indices)) if not 0 <= index < stop), None)
    if wrong is not None:
        of = "no length" if length is None else f"{length:,} samples"
        raise IndexError(
            f"index {wrong} is out of range: dataset {dataset!r} has {of}, so indices must be in [0, {stop}). {OPT_IN}"
        )


def first_indices(frame: bytes, count: int) -> list[Any] | None:
    """Return the first `count` indices of a list; called in the event loop.

    Args:
        frame: Frame with the index list of one batch.
        count: Maximum number of indices to return.

    Returns:
        The indices, those of other types than integers as the frame's header encodes them; None if the frame contains
        no list of at most `MAX_PLAIN_BYTES`, no array of integers and no single integer.
    """
    try:
        listed = _parse(frame)
        match _small(listed.tree, MAX_PLAIN_BYTES):
            case {"array": [str(name), [int(length)], ("tensor" | "ndarray")]} if name in _INTEGERS and length >= 0:
                dtype = dtypes.storage(name)
                start = listed.envelope.packed_array_start(length * dtype.itemsize)
                found: list[int] = np.frombuffer(frame, dtype, min(length, count), start).tolist()
                return found
            case list(items):
                return items[:count]
            case int(index) if type(index) is int:
                return [index]
    except ProtocolError:
        pass  # a list of other values, which the dataset may accept
    return None


class IndexMemory(codec.Bits):
    """Buffer (`codec.Memory`) for the frame of an index list; returns each tensor in it as a list of integers."""

    __slots__ = ()

    def leaf(self, offset: int, dtype_name: str, shape: tuple[int, ...], kind: str) -> Any:
        """Decode an array: a tensor as a list of integers, other arrays unchanged.

        Raises:
            InvalidSpec: If the tensor has more than 2**20 elements.
        """
        bits = super().leaf(offset, dtype_name, shape, kind)
        if kind != "tensor":
            return bits
        # an array with a 0 in its shape has no bytes, but tolist() creates as many empty lists as its other dimensions
        if (count := prod(max(1, size) for size in shape)) > MAX_BATCH_SIZE:
            raise _too_many(count)
        return bits.tolist()


def _too_many(count: int) -> InvalidSpec:
    return InvalidSpec(f"a batch has {count:,} indices, and the limit is {MAX_BATCH_SIZE:,}: use smaller batches")


# -- in the event loop


def checked_batch_id(frame: bytes, rules: Rules) -> BatchId:
    """Validate a frame with an index list, and return the batch ID.

    Raises:
        InvalidSpec: If the frame is not a valid index list.
    """
    try:
        listed = _parse(frame)
        if rules.kind == "integers":
            _check_integers(listed, single=rules.single)
    except ProtocolError as error:
        raise InvalidSpec(f"invalid index list: {error}") from None
    return listed.batch_id


def _parse(frame: bytes) -> _List:
    envelope = codec.open_frame(memoryview(frame), 0, MAX_HEADER_BYTES)
    fields = dict(_fields(envelope.header))
    if "compression" in fields:
        raise ProtocolError("index lists must not be compressed")
    named = [_small(fields[name], MAX_FIELD_BYTES) for name in ("loader", "epoch", "batch") if name in fields]
    match named:
        case [str(loader), int(epoch), int(batch)] if 0 <= epoch < MAX_EPOCH and 0 <= batch < MAX_EPOCH:
            batch_id = BatchId(loader, epoch, batch)
        case _:
            raise ProtocolError(
                "the header must contain loader (a string), epoch and batch (integers in [0, 2**62)), got "
                f"{named!r:.200}"
            )
    if "tree" not in fields:
        raise ProtocolError("missing header field 'tree', which contains the encoded indices")
    return _List(batch_id, envelope, fields["tree"])


def _fields(header: memoryview) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the encoded value of each field of a msgpack map.

    Values are not parsed, because each nested list would become an object.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(header))
    unpacker.feed(header)
    try:
        count = unpacker.read_map_header()
        if count > MAX_FIELDS:
            raise ProtocolError(
                f"the header has {count:,} fields, and the limit is {MAX_FIELDS}: omit additional fields"
            )
        for _ in range(count):
            name = _small(_skipped(unpacker, header), MAX_FIELD_BYTES)
            if not isinstance(name, str):
                raise ProtocolError(f"field names in the header must be strings, got {name!r:.80}")
            yield name, _skipped(unpacker, header)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the header is not msgpack: {type(error).__name__}") from None
    if unpacker.tell() != len(header):
        raise ProtocolError("unexpected data after the map in the header")


def _skipped(unpacker: msgpack.Unpacker, header: memoryview) -> bytes:
    start = unpacker.tell()
    unpacker.skip()
    return bytes(header[start : unpacker.tell()])


def _small(packed: bytes, limit: int) -> object:
    """Parse a msgpack value that is small enough to be parsed in the event loop.

    Raises:
        ProtocolError: If the value is larger than `limit` bytes, or is not msgpack.
    """
    if len(packed) > limit:
        raise ProtocolError(
            f"a header field has {len(packed):,} bytes, and the limit is {limit:,}. Encode the indices as an array"
        )
    try:
        found: object = msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the header is not msgpack: {type(error).__name__}") from None
    return found


def _check_integers(listed: _List, *, single: bool) -> None:
    tree = _small(listed.tree, MAX_PLAIN_BYTES)
    match tree:
        case {"array": [str(name), [int(length)], ("tensor" | "ndarray")], **rest} if not single and not rest:
            if name in _INTEGERS and 0 <= length <= MAX_BATCH_SIZE:
                listed.envelope.packed_array_start(length * dtypes.storage(name).itemsize)
                return
        case list(items) if not single:
            if set(map(type, items)) <= {int}:
                return
        case int() if single and type(tree) is int:
            return
    what = "one 64-bit integer" if single else f"up to {MAX_BATCH_SIZE:,} 64-bit integers"
    raise ProtocolError(f"expected {what} for each batch. {OPT_IN}")
