"""The trace that `teleloader trace` builds from recorded timelines."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader.cli.stats import Source
from teleloader.cli.trace import Recording, build, record
from teleloader.timings import Offset
from teleloader_shared.errors import ServerUnavailable, TeleloaderError
from teleloader_shared.inspection import BatchTimes, ClientTimes, Received, SendTimes, Step, Timeline, Waited
from tests.client.trace_rules import problems

AT = st.floats(0, 1000, allow_nan=False)
SHORT = st.floats(0, 5, allow_nan=False)
STAGES = ["fetch", "collate", "encode"]


@st.composite
def batch_times(draw: st.DrawFn, number: int) -> BatchTimes:
    """Return any computation: overlapping others, with times in any order, as clocks and reports allow."""
    return BatchTimes(
        number, "data", "key", draw(st.integers(0, 1)), draw(st.integers(0, 9)), draw(st.integers(0, 2)),
        draw(st.sampled_from([None, "pool"])), draw(AT), draw(AT), draw(st.lists(SHORT, min_size=3, max_size=3)),
        draw(AT), draw(st.integers(0, number)), 4, draw(st.booleans()),
    )  # fmt: skip


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Return any recording of a server with clients."""
    count = draw(st.integers(0, 12))
    recording = Recording("http://a", "host", 1, STAGES, Offset(draw(AT), draw(SHORT)))
    recording.computed = {number: draw(batch_times(number)) for number in range(count)}
    for number in range(draw(st.integers(0, 8))):
        began = draw(AT)
        numbers = draw(st.lists(st.integers(0, 9), max_size=4))
        consumer = draw(st.sampled_from(["a#0", "b#0"]))
        recording.sent[number] = SendTimes(number, "key", 0, numbers, consumer, "t", began, began + draw(SHORT), 64)
    for consumer in draw(st.sets(st.sampled_from(["a#0", "a#1", "b#0"]))):
        received, waits = [], []
        for _ in range(draw(st.integers(0, 6))):
            first = draw(AT)
            last = first + draw(SHORT)
            received.append(Received(draw(st.integers(0, 9)), draw(st.integers(1, 3)), first, last, last + draw(SHORT)))
            began = draw(AT)
            waits.append(Waited(draw(st.integers(0, 9)), began, began + draw(SHORT)))
        steps = [Step(batch, draw(AT)) for batch in range(draw(st.integers(0, 9)))]
        key = ("t", consumer, "key", 0)
        recording.clients[key] = ClientTimes(
            consumer, "t", "train.py", "host", 2, "key", 0, 0.5, 0.1, received, waits, steps
        )
    return recording


@settings(deadline=None)
@given(st.lists(recordings(), min_size=1, max_size=2))
def test_any_trace_follows_the_format(found: list[Recording]) -> None:
    """Each event has its keys, durations are not negative, slices of a track nest, and flows have both ends."""
    trace = build(found)
    assert problems(json.loads(json.dumps(trace))) == []
    assert all(event["ts"] >= 0 for event in trace["traceEvents"])


def batch(number: int, began: float, group: int = 0) -> BatchTimes:
    """Return a batch whose stages take 30, 20 and 10 ms."""
    return BatchTimes(
        number, "data", "key", 0, number, 0, None, 1.0, began, [0.03, 0.02, 0.01], 1.5, group, 4, failed=False
    )


def spans(trace: dict[str, Any], name: str) -> list[tuple[float, float]]:
    """Return start and duration of the slices with a name, in milliseconds."""
    found = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"] == name]
    return [(event["ts"] / 1000, event["dur"] / 1000) for event in found]


def test_a_group_contains_its_batches() -> None:
    """The batches that a worker reported together are inside of one slice, and each contains its stages."""
    recording = Recording("http://a", "host", 1, STAGES, Offset(0.0, 0.0))
    recording.computed = {0: batch(0, 1.1), 1: batch(1, 1.16)}
    trace = build([recording])
    assert spans(trace, "group of 2 batches") == [(100.0, 120.0)]
    assert spans(trace, "batch 0") == [(100.0, 60.0)]
    assert spans(trace, "batch 1") == [(160.0, 60.0)]
    assert spans(trace, "collate") == [(130.0, 20.0), (190.0, 20.0)]


def test_a_flow_links_all_parts_of_a_batch() -> None:
    """From the worker to the response, to the client and to the training loop."""
    recording = Recording("http://a", "host", 1, STAGES, Offset(0.0, 0.0))
    recording.computed = {0: batch(0, 1.1)}
    recording.sent = {0: SendTimes(0, "key", 0, [0], "c#0", "t", 1.6, 1.7, 64)}
    times = ClientTimes(
        "c#0", "t", None, "host", 2, "key", 0, 0.0, 0.001, [Received(0, 1, 1.75, 1.8, 1.9)], [Waited(0, 1.0, 2.0)],
        [Step(0, 2.0)],
    )  # fmt: skip
    recording.clients = {("t", "c#0", "key", 0): times}
    trace = build([recording])
    assert problems(trace) == []
    flow = [event for event in trace["traceEvents"] if event["ph"] in "stf"]
    assert [event["ph"] for event in flow] == ["s", "t", "t", "f"]
    assert [event["ts"] for event in flow] == sorted(event["ts"] for event in flow)
    assert len({event["id"] for event in flow}) == 1
    assert trace["otherData"]["clients"][0]["clock_uncertainty_s"] == 0.001


def test_servers_are_on_one_clock() -> None:
    """The times of a second server are converted to the clock of the first one; the uncertainties are added."""
    first = Recording("http://a", "one", 1, STAGES, Offset(100.0, 0.001))
    second = Recording("http://b", "two", 1, STAGES, Offset(600.0, 0.002))
    first.computed, second.computed = {0: batch(0, 1.1)}, {0: batch(1, 501.2)}
    second.computed[0] = batch(1, 501.2)
    trace = build([first, second])
    (one,), (other,) = spans(trace, "batch 0"), spans(trace, "batch 1")
    assert other[0] - one[0] == 100.0
    described = trace["otherData"]["servers"][1]
    assert (described["clock_offset_s"], described["clock_uncertainty_s"]) == (-500.0, 0.003)


class Answering:
    """Server with a timeline of the responses in a list, of which the last one is repeated."""

    def __init__(self, *responses: dict[str, Any] | TeleloaderError) -> None:
        self.url = "http://a"
        self._left = [*responses]

    def inspect(self, path: str, most: int) -> dict[str, Any]:
        """Return the next response, or raise the next error."""
        del path, most
        found = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        if isinstance(found, TeleloaderError):
            raise found
        return found


def timeline(pid: int, *numbers: int) -> dict[str, Any]:
    """Return the response of a server process that has computed some batches."""
    computed = [asdict(batch(number, 1.0 + number)) for number in numbers]
    found = Timeline(1.0, 1.0, "host", pid, STAGES, [], [], [], len(numbers), 0)
    return {**asdict(found), "computed": computed}


def test_a_restart_of_a_server_does_not_end_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The batches of the process before remain, although those of the next process have the same numbers."""
    monkeypatch.setattr("teleloader.cli.trace.POLL_S", 0)
    monkeypatch.setattr("teleloader.cli.trace.CLIENT_S", 0)
    down = ServerUnavailable("no response from http://a")
    server = Answering(
        timeline(1), timeline(1, 0, 1), down, down, timeline(2), down, timeline(2), timeline(2), timeline(2, 0)
    )
    source = SimpleNamespace(servers=[server], read=list)
    record(cast(Source, source), 5.0, 3, str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert problems(trace) == []
    processes = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert processes == {"server http://a (host, pid 1)", "server http://a (host, pid 2)"}
    assert len(spans(trace, "batch 0")) == 2
    assert len(spans(trace, "batch 1")) == 1
    assert len(trace["otherData"]["servers"]) == 2
    assert capsys.readouterr().err.count("no response from http://a") == 1
