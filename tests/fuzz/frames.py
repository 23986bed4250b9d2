"""Hostile frames: a reader must return a value or raise ProtocolError, in bounded time and memory, and run no code.

Frames are mutated as bytes, or split (header, arrays, prologue), mutated and reassembled, mostly with a valid checksum,
since a frame with an invalid one is rejected before anything else is read.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

import lz4.block
import msgpack
import numpy as np
import xxhash
import zstandard

from teleloader.errors import exception_of
from teleloader.tensors.memory import pageable_memory
from teleloader.tensors.output import Output, choose_output
from teleloader_shared import codec, dtypes
from teleloader_shared.codec import BatchId, End, Failure, to_bytes
from teleloader_shared.errors import ProtocolError
from teleloader_shared.tree import MAX_DIMENSIONS, Tensor
from tests.fuzz import canary
from tests.fuzz.mutation import MOST_BYTES, mutate_bytes, mutate_tree
from tests.shared.trees import Box, Columns, Frozen, Nothing, Point, numpy_dtype

with suppress(ModuleNotFoundError):  # the first tensor would import it in an execution, and exceed the limit
    import torch  # noqa: F401

MOST_ARRAYS: Final = 16 * 2**20
"""Limit of arrays' memory that readers are given, and that a bomb must not exceed."""
REFUSALS: Final = (ProtocolError,)
RARELY: Final = 0.05
"""Probability of a slow mutation if it is drawn, which leaves time for fast ones."""

_ADDRESS: Final = BatchId("0123456789abcdef0123456789abcdef", 3, 17)
_PROLOGUE: Final = struct.Struct(">BIB4sBQBBQBI")
_OUTPUTS: Final[tuple[Output, Output]] = ("numpy", choose_output(None))


def read(data: bytes) -> str:
    """Read all frames in `data` as a client does, and as a server reads index lists; return their kinds."""
    buffer = np.frombuffer(bytearray(data), np.uint8)
    words = []
    canary.TOUCHED.clear()
    memory = pageable_memory(_OUTPUTS[len(data) // codec.ALIGNMENT % 2], buffer)
    for frame in codec.read_all(memory, MOST_ARRAYS):
        words.append(type(frame.content).__name__)
        if isinstance(frame.content, Failure):
            words.append(type(exception_of(frame.content, frame.batch_id, "http://fuzz")).__name__)
    if canary.TOUCHED:
        raise RuntimeError(f"code of a class that the frame names ran: {canary.TOUCHED[0]}")
    return "+".join(sorted(set(words))) or "nothing"


# -- mutations


@cache
def corpus() -> tuple[bytes, ...]:
    """Return valid frames of every kind."""
    frames = [to_bytes(_ADDRESS, batch, checksum=checksum) for batch in _batches() for checksum in (True, False)]
    frames += [to_bytes(_ADDRESS, batch, compression=how) for batch in _batches()[:6] for how in ("zstd", "lz4")]
    frames += [
        to_bytes(_ADDRESS, Failure("ValueError", "bad", "Traceback\n  ...\n", [1, 2, 3], 0)),
        to_bytes(_ADDRESS, Failure("teleloader.WorkerDied", "dead", "", [], -1)),
        to_bytes(_ADDRESS, Failure("PIL.UnidentifiedImageError", "", "Traceback", [0], 1), checksum=False),
        to_bytes(_ADDRESS, End(500, replica=False)),
        to_bytes(_ADDRESS, End(0, replica=True), shard_state='{"at": 5}'),
        to_bytes(_ADDRESS, [1, 2], padding=1, shard_state="state"),
        to_bytes(_ADDRESS, {}, max_bytes=2**20),
    ]
    frames += [frames[0] + frames[5], b"".join(frames[-4:])]
    frames += [
        b"".join(to_bytes(_ADDRESS._replace(batch=k), _batches()[0], checksum=checksum) for k in range(125, 131))
        for checksum in (True, False)
    ]
    vectors = Path(__file__).parent.parent / "shared" / "vectors"
    return (*frames, *(path.read_bytes() for path in sorted(vectors.glob("*.tlf"))))


def _batches() -> list[Any]:
    every = {name: np.ones((2, 3), numpy_dtype(name)) for name in dtypes.NAMES}
    return [
        {"image": np.arange(96, dtype=np.uint8).reshape(2, 48).view(Tensor), "label": np.arange(2).view(Tensor)},
        np.zeros(3000, np.float32),
        [np.array(5), np.zeros((0, 4), np.int16), np.ones((1,) * MAX_DIMENSIONS, bool), np.float64(2.5)],
        every,
        {name: array.view(Tensor) for name, array in every.items()},
        np.random.default_rng(0).integers(0, 255, 5000, np.uint8),
        None,
        [1, -1, 2**63, -(2**63), 2**300, True, 0.5, float("nan"), 1j, "text", b"bytes", None],
        (1, (2, [3, {4}], frozenset({5, (6, 7)})), deque([8], 3), deque([9]), range(0, 10, 3), slice(None, 5, -1)),
        {"a": OrderedDict(b=1), None: defaultdict(None, {2.5: 3}), (1, "k"): Counter("abca"), 1j: {}},
        [Point(1, np.ones(3)), Nothing(), Columns(1, 2), Box(1, [2]), Frozen.of("n", 5)],
        {Point(1, 2): 0, frozenset({b"k"}): 1, np.float32(0.5): 2},
        list(range(300)),
        {f"key {i}": {"value": i, "text": "x" * i} for i in range(12)},
    ]


def mutate(random: Random, data: bytes | None = None) -> bytes:
    """Return a hostile frame, derived from one of the corpus or from `data`."""
    chosen = random.choice(corpus()) if data is None else data
    if random.random() < 0.35:
        changed = mutate_bytes(random, chosen, corpus())
        return repaired(changed) if random.random() < 0.7 else changed
    parts = Parts.of(random.choice(_single()))
    try:
        if data is not None:
            with suppress(
                ValueError, TypeError, msgpack.UnpackException
            ):  # earlier mutations may have destroyed the frame
                parts = Parts.of(data)
        for _ in range(random.choice((1, 1, 2))):
            random.choice(_CHANGES)(random, parts)
        return parts.assembled(random)[: 4 * MOST_BYTES]
    except RecursionError:
        return chosen


def mutate_list(random: Random, key: str) -> bytes:
    """Return a body with index lists for the first batches of a loader, mostly hostile."""
    several = [to_bytes(BatchId(key, 0, k), [k, k + 1, 63]) for k in range(random.randint(1, 3))]
    if random.random() < 0.8:
        at = random.randrange(len(several))
        several[at] = mutate(random, several[at])
    return b"".join(several)


def repaired(data: bytes) -> bytes:
    """Return `data` with a valid size and checksum, if its prologue has room for them."""
    if len(data) < codec.PROLOGUE_SIZE:
        return data
    data = data + bytes(-len(data) % codec.ALIGNMENT)
    fields = list(_PROLOGUE.unpack_from(data))
    checked = fields[6] != 0xC2
    fields[5], fields[8] = len(data), xxhash.xxh3_64_intdigest(data[codec.PROLOGUE_SIZE :]) if checked else 0
    return _PROLOGUE.pack(*fields) + data[codec.PROLOGUE_SIZE :]


@dataclass(slots=True)
class Parts:
    """Parts of a frame."""

    header: dict[str, Any]
    arrays: list[bytes]
    sizes: list[int | None]
    """Wrong sizes of arrays to declare."""
    raw_header: bytes | None = None
    """Replacement of `header` if it is mutated as bytes."""
    prologue: tuple[int, Any] | None = None
    """Index and value of a wrong field of the prologue."""
    checksum: bool = True

    @classmethod
    def of(cls, frame: bytes) -> Parts:
        """Split a valid frame."""
        match msgpack.unpackb(frame, strict_map_key=False):
            case [_, _, bool(checked), _, _, dict(header), *rest] if all(isinstance(part, bytes) for part in rest):
                pass
            case _:
                raise ValueError("not a frame")
        arrays = list(rest[1::2])
        return cls(header, arrays, [None] * len(arrays), checksum=checked)

    def assembled(self, random: Random) -> bytes:
        """Return the frame, valid except for the mutated parts."""
        header = _packed(self.header) if self.raw_header is None else self.raw_header
        body = bytearray(header)
        for array, size in zip(self.arrays, self.sizes, strict=True):
            _pad(body, 5)
            body += struct.pack(">BI", 0xC6, len(array) if size is None else size) + array
        _pad(body, 0)
        values = 6 + 2 * len(self.arrays) + 1
        digest = xxhash.xxh3_64_intdigest(bytes(body)) if self.checksum else 0
        size = codec.PROLOGUE_SIZE + len(body)
        flag = 0xC3 if self.checksum else 0xC2
        fields = [0xDD, values, 0xA4, codec.MAGIC, 0xCF, size, flag, 0xCF, digest, 0xCE, len(header)]
        if self.prologue is not None:
            number, value = self.prologue
            fields[number] = value
        frame: bytes = _PROLOGUE.pack(*fields) + body
        return frame if random.random() < 0.97 else frame + random.choice(corpus())


def _pad(body: bytearray, after: int) -> None:
    """Return the bin8 of zeros before an array or the end."""
    end = codec.PROLOGUE_SIZE + len(body) + 2 + after
    size = -end % codec.ALIGNMENT
    body += bytes((0xC4, size)) + bytes(size)


def _packed(tree: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(tree, unicode_errors="surrogatepass", datetime=True)
    except (ValueError, OverflowError, TypeError):  # nested deeper than the library likes, or more than 64 bits
        packed = msgpack.packb({**_HEAD, "tree": 0})[:-1] + b"\x91" * 600 + b"\xc0"
    return packed


_HEAD: Final = {"loader": _ADDRESS.loader, "epoch": _ADDRESS.epoch, "batch": _ADDRESS.batch}


@cache
def _single() -> tuple[bytes, ...]:
    """Return the frames of the corpus that are complete on their own."""
    return tuple(frame for frame in corpus() if codec.frame_size(frame[: codec.PROLOGUE_SIZE]) == len(frame))


@cache
def _headers() -> tuple[Any, ...]:
    return tuple(Parts.of(frame).header for frame in _single())


# -- changes


def _change_header(random: Random, parts: Parts) -> None:
    changed = mutate_tree(random, parts.header, _headers(), _hostile_nodes())
    if isinstance(changed, dict):
        parts.header = changed
    else:
        parts.raw_header = _packed(changed)


def _change_tree(random: Random, parts: Parts) -> None:
    parts.header["tree"] = mutate_tree(random, parts.header.get("tree"), _headers(), _hostile_nodes())


def _break_header(random: Random, parts: Parts) -> None:
    parts.raw_header = mutate_bytes(random, _packed(parts.header), corpus())


def _add_arrays(random: Random, parts: Parts) -> None:
    """Add more arrays than the tree declares, or arrays of other sizes."""
    array = random.randbytes(random.choice((0, 1, 8, 63, 64, 4096)))
    at = random.randint(0, len(parts.arrays))
    if parts.arrays and random.random() < 0.7:
        parts.arrays[at % len(parts.arrays)] = array
        return
    parts.arrays.insert(at, array)
    parts.sizes.insert(at, None)


def _lie_of_sizes(random: Random, parts: Parts) -> None:
    if parts.arrays:
        at = random.randrange(len(parts.arrays))
        size = len(parts.arrays[at])
        parts.sizes[at] = random.choice((0, 1, size + 1, max(0, size - 1), size + 64, 2**20, 2**31, 2**32 - 1))


def _compress(random: Random, parts: Parts) -> None:
    """Replace arrays by compressed data: valid, too short, too long, bombs or random bytes."""
    parts.header["compression"] = random.choice(("zstd", "zstd", "lz4", "lz4", *_hostile_nodes()))
    pack = random.choice((_zstd, _lz4))
    parts.arrays = [random.choice(_PACKED)(random, array, pack) for array in parts.arrays]


def _lie_in_prologue(random: Random, parts: Parts) -> None:
    number = random.randrange(11)
    bits = {1: 32, 5: 64, 8: 64, 10: 32}.get(number, 8)
    value: Any = random.choice((0, 1, 6, 7, 64, 2**bits - 1, 2 ** (bits - 1), random.getrandbits(bits)))
    parts.prologue = (number, b"TLF2" if number == 3 else value % 2**bits)


def _storm(random: Random, parts: Parts) -> None:
    """Return many expensive values: new classes, fields, keys with equal hashes, long integers."""
    if random.random() < RARELY:
        parts.header["tree"] = random.choice(_STORMS)(random.choice((10, 300, 2000)))


def _colliding(count: int) -> list[Any]:
    """Return keys with equal hashes, based on the equal hashes of -1 and -2."""
    return [{"tuple": [-1 - (i >> bit & 1) for bit in range(12)]} for i in range(count)]


_STORMS: Final[tuple[Callable[[int], Any], ...]] = (
    lambda count: {"set": _colliding(count)},
    lambda count: {"dict": [[key, 0] for key in _colliding(count)]},
    lambda count: {"set": [{"int": str(i * (2**61 - 1))} for i in range(count)]},
    lambda count: [{"dataclass": ["m", f"C{i}", [], []]} for i in range(count)],
    lambda count: [{"namedtuple": ["m", f"C{i}", [], []]} for i in range(count)],
    lambda count: {"dataclass": ["m", "C", [f"f{i}" for i in range(count)], [0] * count]},
    lambda count: {"namedtuple": ["m", "C", [f"f{i}" for i in range(count)], [0] * count]},
    lambda count: [{"int": "9" * 4300}] * (count // 100),
    lambda count: [{"array": ["uint8", [0], "ndarray"]}] * count,
)
_CHANGES: Final = (
    *(_change_header, _change_tree, _change_tree, _change_tree, _break_header, _add_arrays, _lie_of_sizes),
    *(_compress, _lie_in_prologue, _storm),
)


def _zstd(raw: bytes) -> bytes:
    packed: bytes = zstandard.ZstdCompressor(level=1).compress(raw)
    return packed


def _lz4(raw: bytes) -> bytes:
    packed: bytes = lz4.block.compress(raw, store_size=False)
    return packed


@cache
def _bomb(pack: Any) -> bytes:
    """Return zeros, so many that unpacking them all exceeds a reader's limit."""
    bomb: bytes = pack(bytes(2 * 64 * 2**20))
    return bomb[:MOST_BYTES] if pack is _lz4 else bomb


_PACKED: Final[tuple[Callable[[Random, bytes, Callable[[bytes], bytes]], bytes], ...]] = (
    lambda random, array, pack: pack(array),
    lambda random, array, pack: pack(array + b"more"),
    lambda random, array, pack: pack(array[:-1]),
    lambda random, array, pack: _bomb(pack),
    lambda random, array, pack: mutate_bytes(random, pack(array), corpus()),
    lambda random, array, pack: array,
)


@cache
def _hostile_nodes() -> Sequence[Any]:
    """Return values to try in place of any other value."""
    sizes = (0, 1, -1, 2**20, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1, True, 1.5, "3", None)
    names = ("uint8", "float32", "bfloat16", "float8_e5m2", "complex128", "bool", "object", "O", "V8", "<M8[ns]", "")
    shapes = (
        [],
        [0],
        [1] * 64,
        [1] * 65,
        [0, 2**63],
        [2**32, 2**32],
        [2**62, 4, 0],
        [-1],
        [2**24],
        *([s] for s in sizes),
    )
    return (
        *sizes,
        *(
            "",
            "zstd",
            "lz4",
            "\0",
            "\ud800",
            "x" * 70_000,
            b"",
            b"x" * 70_000,
            float("inf"),
            float("nan"),
            [],
            {},
            [[]],
        ),
        *(msgpack.ExtType(42, b"cos\nsystem\n"), msgpack.Timestamp(2**33), datetime.now(UTC)),
        *({"array": [name, shape, kind]} for name in names for shape in shapes[:4] for kind in ("tensor", "scalar")),
        *({"array": ["uint8", shape, "ndarray"]} for shape in shapes),
        *({"int": digits} for digits in ("", "-", "--1", "1_0", "٣", "9" * 4300, "9" * 4301, "0x1", " 1", 5)),
        *({"range": [0, stop, step]} for stop in sizes for step in (0, 1, 2**64 - 1, {"int": "9" * 4000})),
        *({"slice": [size, None, {"int": "-5"}]} for size in sizes),
        *({"deque": [size, [1, 2, 3]]} for size in sizes),
        *({"complex": pair} for pair in ([1.0], [1.0, 1], [float("nan")] * 2)),
        *({kind: [[1, 2]]} for kind in ("dict", "ordereddict", "defaultdict", "counter", "set", "frozenset", "tuple")),
        *({kind: [[{"tuple": [[1]]}, 2], [{"set": []}, 3], 4]} for kind in ("dict", "counter", "set", "tuple")),
        *({"set": [{"array": ["uint8", [], kind]}]} for kind in ("tensor", "ndarray", "scalar")),
        *_records(),
        {"tuple": [], "dict": []},
        {1: 2},
        {b"tuple": []},
    )


def _records() -> list[Any]:
    """Return namedtuples and dataclasses, of existing and of impossible classes."""
    modules = (canary.__name__, "os", "builtins", "subprocess", "", "a\0b", "x" * 1000)
    names = (*canary.NAMES, "Popen", "int", "type", "class", "__class__", "a.b.c", "", ".", "é", "x" * 1000)
    places = [(canary.__name__, name) for name in names] + [(module, "C") for module in modules]
    fields: tuple[Any, ...] = (*canary.FIELDS, ["__class__", "x"], ["x", "x"], ["class"], ["_0"], ["_x"], [1], ["\0"])
    made = [
        {kind: [module, name, listed, [1] * len(listed)]}
        for kind in ("namedtuple", "dataclass")
        for module, name in places
        for listed in fields
    ]
    return [*made, *({kind: [node]} for node in made[::3] for kind in ("set", "frozenset"))]
