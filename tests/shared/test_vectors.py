"""Other libraries read the test vectors, and the examples of docs/protocol.md, as documented.

These tests read the vectors by Python's msgpack package and by Node's ``@msgpack/msgpack``, without teleloader's code.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
import zstandard

from teleloader_shared.codec import End, Failure, read
from teleloader_shared.messages import DatasetInfo, Registration
from teleloader_shared.orders.permutation import Permutation
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.stats import (
    ConsumerStats,
    DatasetStats,
    Diagnosis,
    ErrorCount,
    Latency,
    ServerStats,
    SlowBatch,
    Stats,
    WorkerStats,
)
from tests.shared.trees import KeptMemory, assert_same
from tests.shared.vectors.generate import HERE, tagged, vectors, write

NAMES = sorted(path.stem for path in HERE.glob("*.tlf"))
PROTOCOL = (HERE.parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")


def expected(name: str) -> dict[str, Any]:
    """Return the expected content of a vector."""
    record: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    return record


def lacking(reason: str) -> None:
    """Skip a test for a missing program; in CI, fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, and in CI it must be there")
    pytest.skip(reason)


def strict(value: Any) -> Any:
    """Return JSON in a form in which true differs from 1."""
    if isinstance(value, dict):
        return {name: strict(item) for name, item in value.items()}
    if isinstance(value, list):
        return [strict(item) for item in value]
    return {"$bool": value} if isinstance(value, bool) else value


# --- The files ----------------------------------------------------------------------------------------------------


def test_there_is_a_vector_for_each_description() -> None:
    """Each frame has its description, and both come from the generator."""
    assert NAMES == sorted(vectors()) == sorted(path.stem for path in HERE.glob("*.json") if "package" not in path.stem)


@pytest.mark.parametrize("name", NAMES)
def test_the_generator_makes_the_vectors_byte_for_byte(name: str, tmp_path: Path) -> None:
    """The format has not changed since the vectors were written; another zstd may only compress differently."""
    write(tmp_path)
    record, made = expected(name), json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    if record.get("made_with") == made.get("made_with"):
        assert (tmp_path / f"{name}.tlf").read_bytes() == (HERE / f"{name}.tlf").read_bytes()
        assert (tmp_path / f"{name}.json").read_bytes() == (HERE / f"{name}.json").read_bytes()
    else:
        assert made["header"] == record["header"]
        assert [array["values"] for array in made["arrays"]] == [array["values"] for array in record["arrays"]]


@pytest.mark.parametrize("name", NAMES)
def test_the_codec_reads_each_vector(name: str) -> None:
    """The codec reads the vectors of earlier versions as the same batches."""
    _, batch_id, batch, how = vectors()[name]
    found = read(KeptMemory(np.fromfile(HERE / f"{name}.tlf", np.uint8)))
    assert (found.batch_id, found.padding) == (batch_id, how.get("padding", 0))
    assert_same(found.content, batch)


# --- Python's msgpack ---------------------------------------------------------------------------------------------


def array_nodes(node: Any) -> list[list[Any]]:
    """Yield the array nodes of a tree in order."""
    if isinstance(node, list):
        return [found for item in node for found in array_nodes(item)]
    if not isinstance(node, dict):
        return []
    ((kind, content),) = node.items()
    return [content] if kind == "array" else array_nodes(content[3] if kind in ("namedtuple", "dataclass") else content)


def elements(segment: bytes, dtype: str, shape: list[int]) -> Any:
    """Return the elements as nested lists."""
    if dtype == "bfloat16":
        array = (np.frombuffer(segment, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        array = np.frombuffer(segment, np.dtype(dtype).newbyteorder("<"))
    return tagged(array.reshape(shape).tolist())


def read_plainly(frame: bytes) -> dict[str, Any]:
    """Read a frame by msgpack.Unpacker, value by value, each at its documented offset."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(frame)
    count = unpacker.read_array_header()
    values, ends = [], []
    for _ in range(count):
        values.append(unpacker.unpack())
        ends.append(unpacker.tell())
    magic, size, has_checksum, checksum, header_size, header = values[:6]
    assert ends[:5] == [10, 19, 20, 29, 34]
    assert ends[5] == 34 + header_size
    assert ends[-1] == len(frame) == size
    assert size % 64 == 0
    if has_checksum:
        assert checksum == xxhash.xxh3_64_intdigest(frame[34:])
    else:
        assert checksum == 0
    assert all(filler == bytes(len(filler)) and len(filler) < 64 for filler in values[6::2])
    arrays = []
    end = ends[5]
    nodes = array_nodes(header.get("tree"))
    for (dtype, shape, kind), segment, after in zip(nodes, values[7::2], ends[7::2], strict=True):
        start = math.ceil((end + 7) / 64) * 64
        assert frame[start - 5 : start] == b"\xc6" + struct.pack(">I", len(segment))
        end = start + len(segment)
        assert end == after
        array = {"dtype": dtype, "shape": shape, "kind": kind, "offset": start, "segment": segment.hex()}
        unpacked = segment
        if header.get("compression") == "zstd":
            unpacked = zstandard.ZstdDecompressor().decompress(segment) if math.prod(shape) else b""
        arrays.append({**array, "values": elements(unpacked, dtype, shape)})
    assert math.ceil((end + 2) / 64) * 64 == size
    return {
        "magic": magic,
        "count": count,
        "size": size,
        "checksum": f"{checksum:016x}" if has_checksum else None,
        "header_size": header_size,
        "header": tagged(header),
        "arrays": arrays,
    }


@pytest.mark.parametrize("name", NAMES)
def test_pythons_msgpack_reads_each_vector(name: str) -> None:
    """msgpack.Unpacker finds header and arrays at the offsets that the protocol states."""
    record = expected(name)
    for note in ("about", "made_with"):
        record.pop(note, None)
    assert strict(read_plainly((HERE / f"{name}.tlf").read_bytes())) == strict(record)


# --- Node's msgpack -----------------------------------------------------------------------------------------------


def run(command: list[str], folder: Path) -> str:
    """Return the output of a program; if it does not work, call `lacking`."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90, check=True)
    except subprocess.CalledProcessError as error:
        lacking(f"{' '.join(command[:2])} failed: {error.stderr[-300:]}")
    except subprocess.TimeoutExpired:
        lacking(f"{' '.join(command[:2])} did not end in 90 s")
    return done.stdout


@pytest.fixture(scope="module")
def node_reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which read_frame.mjs runs, with the one package that it requires."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            lacking(f"{program} is not installed")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", "read_frame.mjs"):
        shutil.copy(HERE / name, folder)
    run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"], folder)
    return folder


def test_nodes_msgpack_reads_each_vector(node_reader: Path) -> None:
    """@msgpack/msgpack finds the same values at the same offsets, in a language that shares no code with Python."""
    files = [str(HERE / f"{name}.tlf") for name in NAMES]
    done = subprocess.run(
        ["node", "read_frame.mjs", *files], cwd=node_reader, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for name, found in zip(NAMES, json.loads(done.stdout), strict=True):
        record = {**expected(name), "pads_are_zero": True}
        for note in ("about", "made_with"):
            record.pop(note, None)
        for array in record["arrays"] if "compression" in record["header"] else ():
            del array["values"]  # Node's own zstd is younger than the oldest Node that this must run on
        assert strict(found) == strict(record), name


# --- The documentation's examples ---------------------------------------------------------------------------------


def test_the_frame_in_the_documentation_is_the_vector() -> None:
    """Each line of the dump in docs/protocol.md is a line of plain.tlf, and none is left out."""
    frame = (HERE / "plain.tlf").read_bytes()
    lines = [f"{at:04x}  {frame[at : at + 16].hex(' ')}" for at in range(0, len(frame), 16)]
    assert re.findall(r"^([0-9a-f]{4}  (?:[0-9a-f]{2} ?){16})(?<! )", PROTOCOL, re.MULTILINE) == lines


def test_the_key_in_the_documentation_is_computed_as_it_says() -> None:
    """BLAKE2b of 16 bytes over the canonical JSON; the spec class agrees."""
    (canonical,) = re.findall(r'^({"batch_size":.*})$', PROTOCOL, re.MULTILINE)
    digest = hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()
    assert f"`{digest}`" in PROTOCOL
    assert LoaderSpec.from_json(json.loads(canonical)).key == digest
    assert LoaderSpec.from_json(json.loads(canonical)).canonical() == canonical.encode()


def test_the_order_in_the_documentation_is_computed_as_it_says() -> None:
    """The permutation's key is BLAKE2b over seed and epoch, and the batches in the example are the plan's."""
    message = struct.pack("<2Q", 1, 0)
    key = int.from_bytes(hashlib.blake2b(message, digest_size=8, person=b"order").digest(), "little")
    assert f"`{key:#018x}`" in PROTOCOL
    order = Permutation(10, key)(np.arange(10)).tolist()
    assert f"`{order}`" in PROTOCOL
    for rank in (0, 1):
        plan = Plan(LoaderSpec(dataset="d", batch_size=3, shuffle=True, seed=1, rank=rank, world_size=2), 10, 0)
        batches = [batch.tolist() for batch in plan]
        assert f"rank {rank}: `{batches}`" in PROTOCOL


def test_the_documentation_names_every_error_and_field() -> None:
    """Each field of specs, registrations, failures, ends and statistics appears in docs/protocol.md."""
    stats = (Stats, ServerStats, DatasetStats, Latency, SlowBatch, ErrorCount, WorkerStats, ConsumerStats, Diagnosis)
    for record in (LoaderSpec, DatasetInfo, Registration, Failure, End, *stats):
        for name in record.__dataclass_fields__:
            assert f"`{name}`" in PROTOCOL, name
