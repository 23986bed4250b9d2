"""State of an epoch that a client sends when it registers a session again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from teleloader.fetch.shards import DeliveredShards
from teleloader.transport.request import BatchRequest
from teleloader_shared import codec, delivered
from teleloader_shared.codec import BatchId, End, Failure, Frame, to_bytes
from teleloader_shared.errors import StateMismatch
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.spec import MAX_STATES, LoaderSpec

STREAM: dict[str, Any] = {"session": "mine", "batch_size": 2}


class Stating:
    """Dataset of twenty numbers, one of which cannot be encoded, with a position as its state."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        for i in range(20):
            self.position = i + 1
            yield i if i != 5 else object()

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state."""


@pytest.mark.skipif(sys.platform != "linux", reason="the server requires Linux")
@pytest.mark.parametrize("options", [{}, {"checksum": False}, {"compression": "zstd"}], ids=str)
def test_clients_and_workers_keep_the_same_record(options: dict[str, Any]) -> None:
    """Client and worker record the same batches, without failures and the end, in single and combined responses."""
    from tests.server.bench import Bench

    bench = Bench(Stating())
    raw: list[tuple[Frame, Any]] = []
    for k in range(11):
        frame = bench.frame(k, 3, **STREAM, **options)
        raw.append((frame, bench.places[-1][: frame.nbytes].copy()))
    contents = [frame.content for frame, _ in raw]
    assert isinstance(contents[2], Failure)
    assert isinstance(contents[10], End)

    shards = DeliveredShards(LoaderSpec(dataset="data", **STREAM, **options), 3)
    shards.add([raw[0][0]], raw[0][1])
    shards.add([frame for frame, _ in raw[1:]], np.concatenate([data for _, data in raw[1:]]))
    assert bench.loading.passes.reached is not None
    assert shards.spec.delivered is not None
    reached = bench.loading.passes.reached
    assert delivered.unpack(shards.spec.delivered, 0) == (3, reached.shard._replace(state=reached.end))


def test_shards_of_which_batches_were_requested_are_marked() -> None:
    """A shard with pending requests is marked with its last state, since a server may have fetched its samples."""
    spec = LoaderSpec(dataset="data", session="s", num_workers=3)
    shards = DeliveredShards(spec, 3, ["a", "b", None])
    shards.request(BatchRequest(BatchRanges(range(4, 5)), 1))
    assert json.loads(shards.spec.delivered or "") == [3, None, [1, 1, 0, "b"], [1, 1, 0, None]]
    raw = np.frombuffer(to_bytes(BatchId(spec.key, 3, 7), [1, 2], shard_state="c"), np.uint8)
    shards.request(BatchRequest(BatchRanges(range(6, 9)), 0))
    shards.add([codec.read(codec.Bits(raw))], raw)
    found = json.loads(shards.spec.delivered or "")
    assert [found[1], found[3]] == [[2, 2, 0, "a"], [1, 1, 0, None]]
    assert (found[2][:2], found[2][3]) == ([2, 3], "c")


def test_an_empty_shard_is_not_in_doubt_after_its_end() -> None:
    """An ended shard is not marked as requested: a server could not restore it, and its data is complete."""
    spec = LoaderSpec(dataset="data", session="s", num_workers=2)
    shards = DeliveredShards(spec, 0)
    shards.request(BatchRequest(BatchRanges(range(0, 2))))
    raw = np.frombuffer(to_bytes(BatchId(spec.key, 0, 1), End(0, replica=False)), np.uint8)
    shards.add([codec.read(codec.Bits(raw))], raw)
    shards.request(BatchRequest(BatchRanges(range(2, 4))))
    assert json.loads(shards.spec.delivered or "") == [0, [0, 0, 0, None], None]


def received(spec: LoaderSpec, state: str) -> DeliveredShards:
    """Return the record after a batch of the second of two shards."""
    raw = np.frombuffer(to_bytes(BatchId(spec.key, 0, 1), [1, 2], shard_state=state), np.uint8)
    shards = DeliveredShards(spec, 0)
    shards.add([codec.read(codec.Bits(raw))], raw)
    return shards


@pytest.mark.parametrize(
    ("length", "resumed", "is_kept"), [(1000, None, True), (400_000, "x" * 390_000, False), (MAX_STATES, None, False)]
)
def test_states_are_left_out_where_a_registration_has_no_room(length: int, resumed: str | None, is_kept: bool) -> None:
    """States that exceed the limit of a registration are omitted, and replays are verified by the digest alone."""
    shard_states = None if resumed is None else [None, resumed]
    spec = LoaderSpec(dataset="d", session="s", num_workers=2, shard_states=shard_states)
    text = received(spec, "y" * length).spec.delivered
    assert text is not None
    assert delivered.unpack(text, 0) == (0, None)
    _, shard = delivered.unpack(text, 1)
    assert shard is not None
    assert (shard.first, shard.next) == (0, 1)
    assert shard.state == ("y" * length if is_kept else None)


@pytest.mark.parametrize(
    "text", ["", "{}", "[0]", "7", "[" * 100_000, "[0,5]", "[0,[1,2,3]]", '[0,["1",2,3,null]]', "[0,[1,2,3,4]]"]
)
def test_a_damaged_record_is_an_error(text: str) -> None:
    """A damaged record raises StateMismatch, because it comes from a file."""
    with pytest.raises(StateMismatch, match="invalid record of delivered batches"):
        delivered.unpack(text, 0)
