"""Command ``teleloader trace``: records the timelines of servers and clients as one trace for Perfetto.

The format is the JSON of Chrome's trace viewer, which Perfetto reads. All times are on the clock of the first server.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

import click

from teleloader.cli.showing import progress_bar
from teleloader.cli.stats import Source, record_of
from teleloader.timings import ClockEstimate, Offset
from teleloader.transport.interface import BatchServer
from teleloader_shared.errors import TeleloaderError
from teleloader_shared.inspection import BatchTimes, ClientTimes, SendTimes, Timeline
from teleloader_shared.messages import TIMELINE_PATH
from teleloader_shared.text import printable
from teleloader_shared.units import counted
from teleloader_shared.version import VERSION

POLL_S: Final = 0.25
"""Seconds between two requests: the server keeps the last 512 batches."""
CLIENT_S: Final = 2.0
"""Seconds to wait at the end for the reports of clients, which they send once a second."""
MAX_S: Final = 600.0
"""Maximum seconds to wait for the number of batches."""
MAX_TIMELINE_BYTES: Final = 64 * 2**20
"""Maximum size of a server's response in bytes."""

RESOLUTION_NS: Final = 125
"""Resolution of times: an eighth of a microsecond, the unit of the format.

Sums of the start and the duration of a slice are exact with it, so that slices which end at the same time do so for
readers that compare the sums.
"""

BatchKey = tuple[str, int, int]
"""Key of the loader, epoch and batch."""
_FIRST_CLIENT: Final = 1000
"""Process number of the first client; servers have lower ones."""
_QUEUES: Final = 1
_FIRST_WORKER: Final = 100
_FIRST_RESPONSE: Final = 100_000


@dataclass(slots=True)
class Recording:
    """Timeline of one server, from the start of the recording on."""

    url: str
    host: str
    pid: int
    stages: Sequence[str]
    clock: Offset
    """Clock of the server minus clock of this process."""
    computed: dict[int, BatchTimes] = field(default_factory=dict)
    sent: dict[int, SendTimes] = field(default_factory=dict)
    clients: dict[tuple[str, str, str, int], ClientTimes] = field(default_factory=dict)
    """Reports of clients, by token, consumer, loader and epoch."""

    def add(self, found: Timeline, start: float) -> None:
        """Add a response of the server, without the times before `start` by the server's clock."""
        self.computed |= {each.number: each for each in found.computed}
        self.sent |= {each.number: each for each in found.sent}
        for times in found.clients:
            key = times.token, times.consumer, times.loader, times.epoch
            before = self.clients.get(key)
            clock = min((each for each in (before, times) if each is not None), key=lambda each: each.uncertainty)
            merged = [
                _merged([] if before is None else getattr(before, name), getattr(times, name), start)
                for name in ("received", "waits", "steps")
            ]
            self.clients[key] = ClientTimes(
                times.consumer, times.token, times.run, times.host, times.pid, times.loader, times.epoch,
                clock.offset, clock.uncertainty, *merged,
            )  # fmt: skip


def _merged(before: list[Any], later: list[Any], start: float) -> list[Any]:
    known = set(before)
    new = [each for each in later if each not in known and _end_of(each) >= start]
    return [*before, *new]


def _end_of(each: Any) -> float:
    return float(getattr(each, "decoded_at", None) or getattr(each, "ended_at", None) or each.at)


# -- recording


def record(source: Source, seconds: float, batches: int | None, file: str) -> None:
    """Record the timelines of servers, and write the trace.

    Args:
        source: Servers.
        seconds: Duration in seconds, unless `batches` is given.
        batches: Number of batches after which the recording ends; None to record for `seconds`.
        file: Path of the file; ``-`` for stdout.

    Raises:
        TeleloaderError: If no server responds.
    """
    source.read()  # finds servers that run under the same supervisor
    recorder = _Recorder(source.servers)
    duration = seconds if batches is None else MAX_S
    with progress_bar() as bar:
        task = bar.add_task("recording", total=seconds if batches is None else batches)
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < duration and recorder.batches < (batches or sys.maxsize):
            recorder.read()
            bar.update(task, completed=elapsed if batches is None else recorder.batches)
            time.sleep(POLL_S)
        recorder.read()
        time.sleep(CLIENT_S)
        recorder.read_clients()
    trace = build(recorder.recordings)
    text = json.dumps(trace, separators=(",", ":"))
    if file == "-":
        print(text)
    else:
        with open(file, "w", encoding="utf-8") as output:  # noqa: PTH123 - Path.write_text has no other advantage
            output.write(text)
    clients = sum(len(each.clients) for each in recorder.recordings)
    events = counted(len(trace["traceEvents"]), "event")
    done = f"{counted(recorder.batches, 'batch', 'batches')}, {counted(clients, 'consumer')}, {events}"
    where = "" if file == "-" else f" in {file}. Open it at https://ui.perfetto.dev"
    click.echo(f"teleloader: recorded {done}{where}", err=True)
    if not clients:
        click.echo("teleloader: no client reported its times: record while a training loop requests batches", err=True)


@dataclass(slots=True)
class _Source:
    """Server process whose timeline is recorded."""

    server: BatchServer
    clock: ClockEstimate
    recording: Recording
    start: float
    """Start of the recording by the server's clock."""
    computed: int
    """Number of the next computed batch."""
    sent: int
    """Number of the next response."""
    fails: bool = False
    """True if the last request failed."""


class _Recorder:
    """Reader of the timelines of several servers."""

    def __init__(self, servers: Sequence[BatchServer]) -> None:
        self._sources: list[_Source] = []
        self._ended: list[Recording] = []
        """Recordings of server processes that were restarted."""
        errors = []
        for server in servers:
            try:
                self._sources.append(_source(server))
            except TeleloaderError as error:
                errors.append(error)
                click.echo(f"teleloader: {printable(str(error))}", err=True)
        if not self._sources:
            raise errors[0]

    @property
    def recordings(self) -> list[Recording]:
        return [*self._ended, *(source.recording for source in self._sources)]

    @property
    def batches(self) -> int:
        return sum(len(recording.computed) for recording in self.recordings)

    def read(self) -> None:
        """Read the batches and responses since the last call, and the reports of clients."""
        for place, source in enumerate(self._sources):
            try:
                found = _timeline(source.server, source.clock, source.computed, source.sent)
                if found.pid == source.recording.pid:
                    source.computed, source.sent = found.computed_total, found.sent_total
                    source.recording.clock = source.clock.offset or source.recording.clock
                    source.recording.add(found, source.start)
                else:  # a new process counts from 0, and may be on a machine with another clock
                    self._sources[place] = _source(source.server)
                    self._ended.append(source.recording)
                source.fails = False
            except TeleloaderError as error:
                _report(source, error)

    def read_clients(self) -> None:
        """Read the reports of clients alone."""
        for source in self._sources:
            try:
                source.recording.add(_timeline(source.server, source.clock, 2**62, 2**62), source.start)
            except TeleloaderError as error:
                _report(source, error)


def _source(server: BatchServer) -> _Source:
    """Start the recording of a server."""
    clock = ClockEstimate()
    found = _timeline(server, clock, 2**62, 2**62)
    recording = Recording(server.url, found.host, found.pid, found.stages, clock.offset or Offset(0.0, 0.0))
    return _Source(server, clock, recording, found.now, found.computed_total, found.sent_total)


def _report(source: _Source, error: TeleloaderError) -> None:
    """Print the first of successive errors: the other servers are still recorded."""
    if not source.fails:
        click.echo(
            f"teleloader: {printable(str(error))}. The recording continues without {source.server.url}", err=True
        )
    source.fails = True


def _timeline(server: BatchServer, clock: ClockEstimate, computed: int, sent: int) -> Timeline:
    query = urlencode({"clients": "true", "computed": computed, "sent": sent})
    began = time.perf_counter()
    response = server.inspect(f"{TIMELINE_PATH}?{query}", MAX_TIMELINE_BYTES)
    ended = time.perf_counter()
    found = record_of(Timeline, response, server.url)
    clock.add(began, found.now, found.now, ended)
    return found


# -- the trace


class _Span(NamedTuple):
    """Slice of a track, to which flow arrows can be attached."""

    pid: int
    tid: int
    start: int
    end: int


class _Track:
    """Tracks of one subject: slices that overlap are placed on further tracks, because slices of one must nest."""

    def __init__(self, events: _Events, pid: int, first_tid: int, name: str) -> None:
        self._events, self._pid, self._tid, self._name = events, pid, first_tid, name
        self._ends: list[int] = []

    def place(self, start: int, end: int) -> int:
        """Return the ID of a track that is free from `start` to `end`; must be called in order of `start`."""
        for lane, until in enumerate(self._ends):
            if until <= start:
                self._ends[lane] = end
                return self._tid + lane
        lane = len(self._ends)
        self._ends.append(end)
        self._events.name_thread(self._pid, self._tid + lane, self._name if lane == 0 else f"{self._name} ({lane + 1})")
        return self._tid + lane


class _Events:
    """Events of a trace; times in nanoseconds since its start."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self._flows = 0
        self._asyncs = 0

    def _add(self, phase: str, name: str, at: int, pid: int, tid: int, **more: Any) -> None:
        self.all.append({"ph": phase, "name": name, "ts": at / 1000, "pid": pid, "tid": tid, **more})

    def name_process(self, pid: int, name: str) -> None:
        self._add("M", "process_name", 0, pid, 0, args={"name": name})

    def name_thread(self, pid: int, tid: int, name: str) -> None:
        self._add("M", "thread_name", 0, pid, tid, args={"name": name})

    def span(self, name: str, span: _Span, **args: Any) -> _Span:
        duration = (span.end - span.start) / 1000
        self._add("X", name, span.start, span.pid, span.tid, dur=duration, cat="teleloader", args=args)
        return span

    def overlapping(self, name: str, pid: int, start: int, end: int, **args: Any) -> None:
        """Add a slice that may overlap others, as a pair of asynchronous events."""
        if end < start:
            return
        self._asyncs += 1
        self._add("b", name, start, pid, _QUEUES, cat="queue", id=self._asyncs, args=args)
        self._add("e", name, end, pid, _QUEUES, cat="queue", id=self._asyncs)

    def flow(self, spans: Sequence[_Span]) -> None:
        """Add arrows from each slice to the next one, without slices that end before the previous arrow.

        Perfetto reads events in the order of their times, and drops those of a flow that precede its start.
        """
        points: list[tuple[int, _Span]] = []
        at = 0
        for span in spans:
            at = max(at, (span.start + span.end) // 2)
            if at <= span.end:
                points.append((at, span))
            else:
                at = points[-1][0]
        if len(points) < 2:
            return
        self._flows += 1
        for place, (at, span) in enumerate(points):
            phase = "s" if place == 0 else "f" if place == len(points) - 1 else "t"
            bound = {"bp": "e"} if phase != "s" else {}
            self._add(phase, "batch", at, span.pid, span.tid, cat="batch", id=self._flows, **bound)


def build(recordings: Sequence[Recording]) -> dict[str, Any]:
    """Return the trace of recorded timelines as JSON; times on the clock of the first server.

    Args:
        recordings: Timelines of at least one server.
    """
    events, first = _Events(), recordings[0].clock
    shifts = [first.seconds - recording.clock.seconds for recording in recordings]
    begin = min(
        (at + shift for recording, shift in zip(recordings, shifts, strict=True) for at in _starts(recording)),
        default=0.0,
    )
    computed: dict[BatchKey, _Span] = {}
    sent: dict[tuple[BatchKey, str], list[_Span]] = {}
    for number, (recording, shift) in enumerate(zip(recordings, shifts, strict=True), 1):
        _add_server(events, number, recording, shift - begin, computed, sent)
    clients = _Clients(events)
    for recording, shift in zip(recordings, shifts, strict=True):
        for times in recording.clients.values():
            clients.add(recording.url, times, shift - begin)
    clients.finish()
    for key, steps in clients.steps.items():
        batch, _ = key
        spans = [computed[batch]] if batch in computed else []
        spans += sent.get(key, [])[:1] + clients.received.get(key, [])[:1] + steps[:1]
        events.flow(spans)
    return {
        "traceEvents": events.all,
        "displayTimeUnit": "ms",
        "otherData": {
            "teleloader": VERSION,
            "clock": f"monotonic clock of {recordings[0].url}",
            "servers": [
                {
                    "url": recording.url,
                    "clock_offset_s": shift,
                    "clock_uncertainty_s": 0.0
                    if recording is recordings[0]
                    else recording.clock.uncertainty + first.uncertainty,
                }
                for recording, shift in zip(recordings, shifts, strict=True)
            ],
            "clients": [
                {
                    "consumer": times.consumer,
                    "server": recording.url,
                    "clock_offset_s": times.offset,
                    "clock_uncertainty_s": times.uncertainty,
                }
                for recording in recordings
                for times in recording.clients.values()
            ],
        },
    }


def _starts(recording: Recording) -> Iterator[float]:
    yield from (each.assigned_at for each in recording.computed.values())
    yield from (each.began_at for each in recording.computed.values())
    yield from (each.began_at for each in recording.sent.values())
    for times in recording.clients.values():
        yield from (each.first_byte_at for each in times.received)
        yield from (each.began_at for each in times.waits)
        yield from (each.at for each in times.steps)


def _ns(at: float, shift: float) -> int:
    return max(0, RESOLUTION_NS * round(1e9 * (at + shift) / RESOLUTION_NS))


def _add_server(
    events: _Events,
    pid: int,
    recording: Recording,
    shift: float,
    computed: dict[BatchKey, _Span],
    sent: dict[tuple[BatchKey, str], list[_Span]],
) -> None:
    """Add the tracks of a server, and the slices of its batches and responses to `computed` and `sent`."""
    events.name_process(pid, f"server {recording.url} ({recording.host}, pid {recording.pid})")
    events.name_thread(pid, _QUEUES, "queues")
    ready: dict[BatchKey, float] = {}
    workers: dict[tuple[str | None, int], _Track] = {}
    groups: dict[int, list[BatchTimes]] = {}
    for times in sorted(recording.computed.values(), key=lambda each: each.number):
        groups.setdefault(times.group, []).append(times)
    for group in sorted(groups.values(), key=lambda each: each[0].began_at):
        first = group[0]
        place = first.pool, first.worker
        if place not in workers:
            own = "" if first.pool is None else f" of {first.pool[:8]}"
            workers[place] = _Track(events, pid, _FIRST_WORKER * (1 + len(workers)), f"worker {first.worker}{own}")
        edges: list[list[int]] = []
        for times in group:  # one after the other, whatever the rounding of their times
            earliest = edges[-1][-1] if edges else 0
            edges.append([max(earliest, at) for at in _edges(times, shift)])
        tid = workers[place].place(edges[0][0], max(each[-1] for each in edges))
        if len(group) > 1:
            whole = _Span(pid, tid, edges[0][0], max(each[-1] for each in edges))
            events.span(f"group of {len(group)} batches", whole, first=first.batch)
        for times, marks in zip(group, edges, strict=True):
            key = times.loader, times.epoch, times.batch
            about = {"dataset": times.dataset, "loader": times.loader, "epoch": times.epoch, "batch": times.batch}
            name = f"batch {times.batch}{' failed' if times.failed else ''}"
            span = events.span(name, _Span(pid, tid, marks[0], marks[-1]), samples=times.samples, **about)
            computed[key], ready[key] = span, times.ready_at
            for stage, start, end in zip(recording.stages, marks, marks[1:], strict=False):
                events.span(stage, _Span(pid, tid, start, end), batch=times.batch)
            events.overlapping("queue", pid, _ns(times.assigned_at, shift), marks[0], **about)
            events.overlapping("result", pid, marks[-1], _ns(times.ready_at, shift), **about)
    _add_responses(events, pid, recording, shift, ready, sent)


def _add_responses(
    events: _Events,
    pid: int,
    recording: Recording,
    shift: float,
    ready: dict[BatchKey, float],
    sent: dict[tuple[BatchKey, str], list[_Span]],
) -> None:
    responses: dict[str, _Track] = {}
    for response in sorted(recording.sent.values(), key=lambda each: each.began_at):
        track = responses.get(response.consumer)
        if track is None:
            tid = _FIRST_RESPONSE + _FIRST_WORKER * len(responses)
            track = responses[response.consumer] = _Track(events, pid, tid, f"send to {response.consumer}")
        start, end = _ns(response.began_at, shift), _ns(response.ended_at, shift)
        span = _Span(pid, track.place(start, end), start, end)
        events.span("send", span, batches=response.batches, nbytes=response.nbytes, consumer=response.consumer)
        for batch in response.batches:
            key = response.loader, response.epoch, batch
            sent.setdefault((key, response.consumer), []).append(span)
            if key in ready:
                events.overlapping("until sent", pid, _ns(ready[key], shift), start, batch=batch)


def _edges(times: BatchTimes, shift: float) -> list[int]:
    """Return the start of each stage and the end of the last one, in nanoseconds."""
    found, at = [_ns(times.began_at, shift)], times.began_at
    for seconds in times.stages:
        at += seconds
        found.append(max(found[-1], _ns(at, shift)))
    return found


class _Clients:
    """Tracks of client processes."""

    def __init__(self, events: _Events) -> None:
        self.received: dict[tuple[BatchKey, str], list[_Span]] = {}
        self.steps: dict[tuple[BatchKey, str], list[_Span]] = {}
        self._events = events
        self._pids: dict[tuple[str, int], int] = {}
        self._tracks: dict[tuple[int, str], _Track] = {}
        self._loops: dict[tuple[int, str], list[tuple[str, int, int, BatchKey]]] = {}
        """Waits and steps of each training loop: name, start, end, batch."""

    def add(self, url: str, times: ClientTimes, shift: float) -> None:
        """Add the report of a client to one server."""
        process = times.host, times.pid
        if process not in self._pids:
            self._pids[process] = _FIRST_CLIENT + len(self._pids)
            run = "" if times.run is None else f"{times.run} "
            self._events.name_process(self._pids[process], f"client {run}({times.host}, pid {times.pid})")
        pid = self._pids[process]
        for response in sorted(times.received, key=lambda each: each.first_byte_at):
            edges = [_ns(at, shift) for at in (response.first_byte_at, response.last_byte_at, response.decoded_at)]
            tid = self._track(pid, f"receive from {url}").place(edges[0], edges[2])
            batches = range(response.first, response.first + response.batches)
            received = self._events.span("receive", _Span(pid, tid, edges[0], edges[1]), batches=list(batches))
            self._events.span("decode", _Span(pid, tid, edges[1], edges[2]), batches=list(batches))
            for batch in batches:
                self.received.setdefault(((times.loader, times.epoch, batch), times.consumer), []).append(received)
        loop = self._loops.setdefault((pid, times.consumer), [])
        if loop:  # another server has received the same waits and steps
            return
        waits = {wait.batch: wait for wait in times.waits}
        steps = sorted(times.steps, key=lambda each: each.at)
        for step, following in zip_longest(steps, steps[1:]):
            key = times.loader, times.epoch, step.batch
            at = _ns(step.at, shift)
            wait = waits.get(step.batch)
            loop.append(("wait", min(at, _ns(wait.began_at, shift)) if wait else at, at, key))
            if following is not None:
                later = waits.get(following.batch)
                end = _ns(later.began_at if later else following.at, shift)
                loop.append(("step", at, max(at, end), key))
            else:
                loop.append(("step", at, at, key))

    def _track(self, pid: int, name: str) -> _Track:
        if (pid, name) not in self._tracks:
            self._tracks[pid, name] = _Track(self._events, pid, _FIRST_WORKER * (1 + len(self._tracks)), name)
        return self._tracks[pid, name]

    def finish(self) -> None:
        """Add the tracks of the training loops: all iterations of a loop are on one track."""
        by_loop: dict[tuple[int, str], list[tuple[str, int, int, BatchKey, str]]] = {}
        for (pid, consumer), entries in self._loops.items():
            name = f"training loop {consumer.rpartition('#')[0] or consumer}"
            by_loop.setdefault((pid, name), []).extend((*entry, consumer) for entry in entries)
        for (pid, name), parts in by_loop.items():
            track = self._track(pid, name)
            for what, start, end, key, consumer in sorted(parts, key=lambda each: each[1:3]):
                tid = track.place(start, end)
                span = self._events.span(what, _Span(pid, tid, start, end), epoch=key[1], batch=key[2])
                if what == "step":
                    self.steps.setdefault((key, consumer), []).append(span)
