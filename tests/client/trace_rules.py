"""Rules of the trace format that Perfetto and Chrome's trace viewer read."""

from __future__ import annotations

from typing import Any

REQUIRED = ("ph", "ts", "pid", "tid", "name")


def problems(trace: dict[str, Any]) -> list[str]:
    """Return the violations: missing keys, negative durations, slices that cross, and flows or pairs without an end."""
    events = trace["traceEvents"]
    found = [f"event {event} lacks a key" for event in events if any(name not in event for name in REQUIRED)]
    return found or [*crossing(events), *unpaired(events), *backward(events)]


def backward(events: list[dict[str, Any]]) -> list[str]:
    """Return the flows and asynchronous slices with an event before the previous one, which Perfetto drops."""
    times: dict[tuple[str, int], list[float]] = {}
    for event in events:
        if event["ph"] in "stfbe":
            times.setdefault((event["cat"], event["id"]), []).append(event["ts"])
    return [f"{key} has the times {each}" for key, each in times.items() if each != sorted(each)]


def crossing(events: list[dict[str, Any]]) -> list[str]:
    """Return the slices of one track that have a negative duration, or overlap without one containing the other."""
    found = []
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]  # not rounded: some readers of the format compare the sums
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], end))
    for track, spans in tracks.items():
        found += [f"track {track}: {start} to {end}" for start, end in spans if end < start]
        ends: list[float] = []
        for start, end in sorted(spans, key=lambda each: (each[0], -each[1])):
            while ends and ends[-1] <= start:
                ends.pop()
            if ends and end > ends[-1]:
                found.append(f"track {track}: the slice at {start} us ends after the one that contains it")
            ends.append(end)
    return found


def unpaired(events: list[dict[str, Any]]) -> list[str]:
    """Return the flows without a start or an end, and asynchronous slices that do not begin and then end."""
    phases: dict[tuple[str, int], list[str]] = {}
    for event in events:
        if event["ph"] in "stfbe":
            phases.setdefault((event["cat"], event["id"]), []).append(event["ph"])
    return [
        f"{key} has the phases {each}"
        for key, each in phases.items()
        if (each[0], each[-1]) not in (("s", "f"), ("b", "e")) or set(each[1:-1]) - {"t"}
    ]
