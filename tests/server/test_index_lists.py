"""Index lists: the server checks their form without work per index, and the worker their range."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from teleloader_server.loading import index_lists
from teleloader_server.loading.index_lists import Rules
from teleloader_server.web import index_bodies
from teleloader_shared import codec
from teleloader_shared.codec import BatchId
from teleloader_shared.errors import InvalidSpec
from teleloader_shared.tree import Tensor

KEY = "0" * 32
INTEGERS = Rules("integers", single=False, max_lists=8)
ONE_INTEGER = INTEGERS._replace(single=True)
ANY = INTEGERS._replace(kind="any")


def listed(indices: Any, k: int = 0, **options: Any) -> bytes:
    """Return the frame of an index list."""
    return codec.to_bytes(BatchId(KEY, 3, k), indices, **options)


def packed(*indices: int, dtype: str = "int64") -> Any:
    """Return integers as a client packs them."""
    return np.array(indices, dtype).view(Tensor)


async def split(body: bytes, rules: Rules = INTEGERS, size: int = 1 << 16) -> tuple[BatchId, dict[int, bytes]]:
    """Return the frames of a body that arrives in pieces of some size."""

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    return await index_bodies.split(pieces(), rules)


@pytest.mark.parametrize("size", [1, 7, 100, 1 << 16])
async def test_a_body_is_split_wherever_its_pieces_end(size: int) -> None:
    """The frames are those that were sent, by batch, whatever the sizes of the pieces that arrive."""
    frames = {k: listed(packed(*range(10 * k)), k) for k in range(5, 9)}
    first, found = await split(b"".join(frames.values()), size=size)
    assert (first, found) == (BatchId(KEY, 3, 5), frames)
    assert [index_lists.read(frame, single=False) for frame in found.values()] == [
        list(range(10 * k)) for k in range(5, 9)
    ]


@pytest.mark.parametrize(
    ("indices", "rules", "read"),
    [
        (packed(3, -1, 10**15), INTEGERS, [3, -1, 10**15]),
        (packed(7, 200, dtype="uint8"), INTEGERS, [7, 200]),
        (packed(2**64 - 1, dtype="uint64"), INTEGERS, [2**64 - 1]),
        (np.array([1, 2]), INTEGERS, [1, 2]),
        ([5, 2**63], INTEGERS, [5, 2**63]),
        ([], INTEGERS, []),
        (12, ONE_INTEGER, [12]),
        (["a", (1, 2), -1, 10**30], ANY, ["a", (1, 2), -1, 10**30]),
        (("a", "b"), ANY, ["a", "b"]),
        (range(3), ANY, [0, 1, 2]),
        ("name", ANY._replace(single=True), ["name"]),
    ],
    ids=str,
)
async def test_lists_of_the_documented_form_are_read(indices: Any, rules: Rules, read: list[Any]) -> None:
    """Valid lists are packed or plain integers, or one integer; any values if the dataset allows it."""
    _, found = await split(listed(indices), rules)
    assert index_lists.read(found[0], single=rules.single) == read


@dataclasses.dataclass
class Record:
    """Node for which a reader would create a class."""

    a: int = 0


@pytest.mark.parametrize(
    "indices",
    [
        ["../../../../etc/hostname"], [1, "2"], [1.0], [True], [None], [[1]], [(1, 2)], [10**30], {"a": 1}, (1, 2),
        "12", range(10), Record(), [Record()], packed(1).reshape(1, 1), np.ones(3), [b"a"],
        np.zeros(2, bool).view(Tensor), 12, [1] * 20_000,
    ],
    ids=lambda value: f"{value!r:.30}",
)  # fmt: skip
async def test_integers_are_all_that_is_taken_by_default(indices: Any) -> None:
    """Any other index is refused before it reaches a worker, with the setting that would allow it."""
    with pytest.raises(InvalidSpec, match=r'invalid index list: .*(indices = "any"|Encode the indices)'):
        await split(listed(indices))


@pytest.mark.parametrize("indices", [[1], "1", 1.5, packed(1), True])
async def test_one_integer_is_all_that_a_single_sample_takes(indices: Any) -> None:
    """With ``batch_size=None`` a list is rejected, since it would be the dataset's index."""
    with pytest.raises(InvalidSpec, match="expected one 64-bit integer"):
        await split(listed(indices), ONE_INTEGER)


@pytest.mark.parametrize("rules", [INTEGERS, ANY])
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "empty body"),
        (listed(packed(1))[:-1], "truncated"),
        (listed(packed(1)) + b"x", "truncated"),
        (b"\xc0" * 1000, "invalid frame"),
        (listed(packed(1))[:-1] + b"x", "does not match the checksum"),
        (listed(packed(1), compression="lz4"), "index lists must not be compressed"),
        (listed(np.zeros(2**20, np.int64).view(Tensor), compression="zstd"), "index lists must not be compressed"),
        (listed(np.zeros(2**22, np.int64).view(Tensor)), "exceeds the limit of 16,777,216 bytes"),
        (listed([b"x" * 2**19]), "the header has 524,"),
        (listed(packed(1)) * 2, "expected batch 1 or later"),
        (
            b"".join(listed(packed(1), k) for k in range(9)),
            r"too many index lists: the limit is 8 \(max_batches_per_request\)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bodies_that_are_not_index_lists_are_refused(rules: Rules, body: bytes, said: str) -> None:
    """Such bodies are rejected whatever the dataset allows; nothing is decompressed."""
    with pytest.raises(InvalidSpec, match=said):
        await split(body, rules)


@pytest.mark.parametrize(
    "indices",
    [range(2**40), np.zeros(2**20 + 1, np.int8).view(Tensor), np.empty((2**40, 0)).view(Tensor),
     np.empty((2**19, 3, 0)).view(Tensor), np.zeros(2**20 + 1, np.int8)],
    ids=lambda value: str(getattr(value, "shape", value)),
)  # fmt: skip
def test_a_worker_takes_no_more_than_2_to_the_20_indices(indices: Any) -> None:
    """Indices are counted before they are created, as few bytes can represent very many."""
    with pytest.raises(InvalidSpec, match="and the limit is 1,048,576"):
        index_lists.read(listed(indices), single=False)


def test_the_range_is_that_of_the_dataset() -> None:
    """[0, length), and no end for a dataset without a length; the error names index, dataset and setting."""
    index_lists.check_range([0, 5, 9], 10, "train")
    index_lists.check_range([], 10, "train")
    index_lists.check_range([0, 2**62], None, "train")
    for wrong, length in ((-1, 10), (10, 10), (0, 0), (-1, None), (2**63, None), (2**64 - 1, 10)):
        with pytest.raises(IndexError, match=rf"index {wrong} is out of range: dataset 'train'.*indices = \"any\""):
            index_lists.check_range([wrong], length, "train")


@pytest.mark.parametrize(
    ("indices", "first"),
    [(packed(*range(100)), [0, 1, 2]), ([4, 5, 6, 7], [4, 5, 6]), (7, [7]), ([], []), ([1, "a", 3, 4], [1, "a", 3]),
     (True, None), (Record(), None), (np.ones(3), None), (packed(1).reshape(1, 1), None), ([0] * 20_000, None)],
    ids=lambda value: f"{value!r:.20}",
)  # fmt: skip
def test_the_first_indices_are_read_without_the_others(indices: Any, first: list[Any] | None) -> None:
    """Messages contain the first indices, without work for the rest of a list in the event loop."""
    assert index_lists.first_indices(listed(indices), 3) == first
