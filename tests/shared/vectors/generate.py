"""Generator of the test vectors: a frame (``.tlf``) and its expected content (``.json``) for each of several batches.

Run it when the format changes, never to make a test pass: ``python tests/shared/vectors/generate.py``. Values without a
JSON form are tagged: ``{"$int": "18446744073709551615"}``, ``{"$float": "nan"}``, ``{"$bytes": "00ff"}``.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import zstandard

from teleloader_shared.codec import PROLOGUE_SIZE, BatchId, End, Failure, to_bytes
from teleloader_shared.tree import Tensor, flatten

HERE = Path(__file__).parent


# of a module that no reader has; one field has a non-ASCII name
Point = namedtuple("Point", ["x", "größe"], module="shapes.plane")
Box = make_dataclass("Box", ["corner", "filled"])
Box.__module__ = "shapes.solid"


def tensor(values: Any, dtype: str) -> Any:
    """Return an array that arrives as a torch tensor if torch is installed."""
    return np.array(values, dtype).view(Tensor)


def vectors() -> dict[str, tuple[str, BatchId, Any, dict[str, Any]]]:
    """Return description, batch ID, batch or failure, and encoding of each vector by file name."""
    key = "0f1e2d3c4b5a69788796a5b4c3d2e1f0"
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3).view(Tensor)
    return {
        "plain": (
            "A dict of two tensors, as default_collate makes it.",
            BatchId(key, 0, 7),
            {"image": pixels, "label": tensor([3, -1], "int64")},
            {},
        ),
        "nested": (
            "Every kind of node and of value, and arrays of many types, in one tree.",
            BatchId(key, 2**40, 2**33),
            {
                "numbers": [0, -1, 2**63, 2**64 - 1, -(2**63), 2**64, -(2**100), 0.5, -0.0, math.inf, math.nan, 1 - 2j],
                "others": (None, True, False, "", "naïve 🦉", b"\x00\xff", [], (), {}),
                "point": Point(np.float64(0.1), [np.uint64(2**64 - 1), np.int8(-128)]),
                7: OrderedDict([((1, "k"), np.array(1 + 2j, "complex64")), (None, np.array([[True], [False]]))]),
                "half": [np.array([1.5, -2, 65504, np.inf], "float16"), np.array([1, -0.0], ml_dtypes.bfloat16)],
                "empty": np.zeros((2, 0, 3), "float32"),
                "boxes": deque([Box(np.array([1, 2], "uint16"), True), Box(None, range(2**64, 0, -3))], 5),
                "sets": [{"one"}, frozenset([(1, b"two")]), set()],
                "dicts": [Counter(a=2, b=-1), defaultdict(list, {"c": np.array(3, "int8")})],
                "fortran": np.asfortranarray(np.array([[1, 2, 3], [4, 5, 6]], ">i2")),
            },
            {},
        ),
        "failure": (
            "A failure in the place of a batch.",
            BatchId(key, 1, 0),
            Failure(
                type="PIL.UnidentifiedImageError",
                message="cannot identify image file 'a.jpg'",
                traceback="Traceback (most recent call last):\n  ...\nPIL.UnidentifiedImageError: cannot ...\n",
                indices=[5, 3, 2**40],
                worker=1,
            ),
            {},
        ),
        "end": (
            "In the place of a batch: its shard has no more; where it stands goes with it.",
            BatchId(key, 0, 9),
            End(samples=17, replica=False),
            {"shard_state": '{"next": 5}'},
        ),
        "indices": (
            "What a client says that a batch holds, packed: whole numbers as an array of kind tensor.",
            BatchId(key, 3, 12),
            tensor([4, 2**40, 0], "int64"),
            {},
        ),
        "zstd": (
            "Arrays compressed with zstd; one of no elements, whose segment is to be ignored.",
            BatchId(key, 0, 1),
            [np.arange(64, dtype=np.float32) % 4, np.zeros(0, np.int16)],
            {"compression": "zstd"},
        ),
        "no_checksum": (
            "No checksum; the last of the three samples is a repetition that filled the rank's last batch.",
            BatchId(key, 0, 2),
            (np.array([True, False, True]), np.array([0.1, math.pi, 1e300])),
            {"checksum": False, "padding": 1},
        ),
    }


def tagged(value: Any) -> Any:
    """Return a value in JSON form."""
    match value:
        case dict():
            return {name: tagged(item) for name, item in value.items()}
        case list():
            return [tagged(item) for item in value]
        case bytes():
            return {"$bytes": value.hex()}
        case int() if abs(value) >= 2**53:
            return {"$int": str(value)}
        case float() if not math.isfinite(value) or (value == 0 and math.copysign(1, value) < 0):
            return {"$float": str(value)}
        case complex():
            return [tagged(value.real), tagged(value.imag)]
        case _:
            return value


def described(about: str, frame: bytes, batch: Any, how: dict[str, Any]) -> dict[str, Any]:
    """Return the expected content of a frame."""
    header_size = int.from_bytes(frame[30:34])
    leaves = [] if isinstance(batch, Failure) else flatten(batch)[1]
    arrays = []
    end = PROLOGUE_SIZE + header_size
    for leaf in leaves:
        values: Any = leaf.array  # type: ignore[attr-defined]
        if leaf.dtype_name == "bfloat16":
            values = values.view(ml_dtypes.bfloat16).astype(np.float32)
        start = -(-(end + 7) // 64) * 64
        end = start + int.from_bytes(frame[start - 4 : start])
        arrays.append(
            {
                "dtype": leaf.dtype_name,
                "shape": list(leaf.shape),
                "kind": leaf.kind,
                "offset": start,
                "segment": frame[start:end].hex(),
                "values": tagged(values.tolist()),
            }
        )
    return {
        "about": about,
        **({"made_with": f"zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}"} if "compression" in how else {}),
        "magic": "TLF1",
        "count": 7 + 2 * len(arrays),
        "size": len(frame),
        "checksum": f"{int.from_bytes(frame[21:29]):016x}" if how.get("checksum", True) else None,
        "header_size": header_size,
        "header": tagged(msgpack.unpackb(frame[34 : 34 + header_size])),
        "arrays": arrays,
    }


def one_entry_a_line(record: dict[str, Any]) -> str:
    """Return JSON in a form that can be read and compared."""
    entries = []
    for name, value in record.items():
        if name == "arrays" and value:
            items = ",\n    ".join(json.dumps(item, ensure_ascii=False) for item in value)
            entries.append(f'"arrays": [\n    {items}\n  ]')
        else:
            entries.append(f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n  " + ",\n  ".join(entries) + "\n}\n"


def write(folder: Path) -> None:
    """Write every vector to `folder`."""
    for name, (about, batch_id, batch, how) in vectors().items():
        frame = to_bytes(batch_id, batch, **how)
        (folder / f"{name}.tlf").write_bytes(frame)
        (folder / f"{name}.json").write_text(one_entry_a_line(described(about, frame, batch, how)), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
