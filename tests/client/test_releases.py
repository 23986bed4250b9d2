"""Data of other releases with this protocol version: unknown fields are ignored, and optional ones may be missing."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from teleloader import ProtocolError
from teleloader.api.responses import error_of, record
from teleloader.cli.stats import record_of
from teleloader.state import Position, load, save
from teleloader_server.loading.environment import environment
from teleloader_shared.codec import BatchId, Bits, End, Failure, read
from teleloader_shared.directory import Entry, listing
from teleloader_shared.errors import UnknownDataset
from teleloader_shared.messages import DatasetInfo, Registration
from teleloader_shared.stats import Stats
from tests.end_to_end.made_up import made_up
from tests.shared.test_codec import forged

NEWER = {"colour": {"of": ["a", "newer", "release"]}}
"""Field that this release does not know."""
INFO = DatasetInfo("train", "map", "Images", 640, "", "f0", "default", None, [], "batch", 2)
REGISTRATION = Registration("k0", 10, 640, "f0", 2, 2**30)
RECORDS: dict[str, Any] = {"dataset": INFO, "registration": REGISTRATION}


def without_optional(kind: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of a record that older servers lack."""
    optional = {field.name for field in dataclasses.fields(kind) if field.default is None}
    return {name: value for name, value in fields.items() if name not in optional}


@pytest.mark.parametrize("sent", RECORDS.values(), ids=RECORDS)
def test_records_of_other_releases_are_read(sent: Any) -> None:
    """A client ignores fields of a newer server, and accepts an older server without the optional fields."""
    kind, fields = type(sent), dataclasses.asdict(sent)
    assert record(kind, {**fields, **NEWER}, "") == sent
    assert record(kind, without_optional(kind, fields), "") == sent
    required = {field.name for field in dataclasses.fields(kind) if field.default is not None}
    for name in required:
        with pytest.raises(ProtocolError):
            record(kind, {other: value for other, value in fields.items() if other != name}, "")


def test_statistics_of_other_releases_are_read() -> None:
    """`teleloader stats` ignores fields of a newer server, and accepts an older server without the optional fields."""
    sent = made_up()
    fields = dataclasses.asdict(sent)
    assert record_of(Stats, {**fields, **NEWER, "server": {**fields["server"], **NEWER}}, "") == sent
    older = {**fields, "server": without_optional(type(sent.server), fields["server"])}
    found = record_of(Stats, older, "")
    assert dataclasses.replace(found, server=sent.server) == sent
    assert found.server.demand is None
    del older["server"]["pid"]
    with pytest.raises(ProtocolError, match="invalid statistics from : expected float, got 'much'"):
        record_of(Stats, {**fields, "server": {**fields["server"], "cpu": "much"}}, "")
    with pytest.raises(ProtocolError, match="missing fields of ServerStats: pid"):
        record_of(Stats, older, "")


def test_lists_of_servers_of_other_releases_are_read() -> None:
    """A client ignores unknown fields of the servers that a registry lists, and accepts entries with the URL only."""
    entry = {"url": "http://a:8000", "instance": "i"}
    assert listing([{**entry, **NEWER}, {"url": "http://b:8000"}]).entries == (
        Entry("http://a:8000", "i"),
        Entry("http://b:8000"),
    )


FRAMES = {
    "batch": ({"tree": [1, 2]}, [1, 2]),
    "failure": (
        {"failure": {"type": "E", "message": "m", "traceback": "t", "indices": [3], "worker": 0, **NEWER}},
        Failure("E", "m", "t", [3], 0),
    ),
    "end": ({"end": {"samples": 5, "replica": True, **NEWER}}, End(5, replica=True)),
}


@pytest.mark.parametrize(("header", "content"), FRAMES.values(), ids=FRAMES)
def test_frames_of_other_releases_are_read(header: dict[str, Any], content: Any) -> None:
    """A client ignores unknown entries in the header of a frame, and in the descriptions of failures and ends."""
    frame = forged({"loader": "k0", "epoch": 3, "batch": 14, **header, **NEWER})
    found = read(Bits(np.frombuffer(frame, np.uint8)))
    assert (found.batch_id, found.content) == (BatchId("k0", 3, 14), content)


def test_unknown_error_codes_are_reported() -> None:
    """A code that this release does not know is an error with the server's message; unknown fields are ignored."""
    problem = b'{"code": "UnknownDataset", "detail": "no dataset", "colour": "red"}'
    assert isinstance(error_of(404, problem, "http://a"), UnknownDataset)
    newer = error_of(409, problem.replace(b"UnknownDataset", b"Newer"), "http://a")
    assert type(newer) is ProtocolError
    assert "no dataset" in str(newer)


@pytest.mark.parametrize("in_samples", [True, False])
def test_states_of_other_releases_are_loaded(in_samples: bool) -> None:
    """Unknown entries of a state are ignored, and all entries except epoch and position may be missing."""
    identity, size = {"seed": 7}, 32 if in_samples else None
    position = Position(2, 5)
    state = save(position, identity, size, {})
    assert load({**state, **NEWER}, identity, size)[0] == position
    unit = "samples" if in_samples else "batch"
    minimal = {name: state[name] for name in ("version", "epoch", unit, *identity)}
    assert load(minimal, identity, size)[0] == position


def test_the_environment_of_a_server_does_not_contain_its_release() -> None:
    """Clients use servers of both releases during an update, and refuse servers with other versions of NumPy."""
    assert re.fullmatch(r"Python 3\.\d+, numpy [^, ]+(, torch [^, ]+)?", environment())
