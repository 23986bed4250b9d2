"""Validation of the times that clients report for the timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from teleloader_server.dispatch.timeline import MAX_BATCHES
from teleloader_server.problems import HttpProblem
from teleloader_shared.inspection import ClientTimes, Received, Step, Waited
from teleloader_shared.messages import RUN_NAME
from teleloader_shared.spec import MAX_EPOCH

MAX_TIMINGS_BYTES: Final = 256 * 1024
"""Maximum size of a report in bytes: 512 entries of each kind have at most 100 KB."""
MAX_HOST: Final = 255
_NAMES: Final = ("host", "pid", "seconds", "uncertainty", "received", "waits", "steps")


def client_times(
    fields: dict[str, Any], consumer: str, token: str, key: str, epoch: int, max_batches: int
) -> ClientTimes | None:
    """Convert the body of a report; return None for an empty one, with which a client only measures the clock.

    Args:
        fields: JSON object of the report, see docs/protocol.md.
        consumer: Name of the consumer.
        token: Name of its token.
        key: Key of the loader.
        epoch: Epoch number.
        max_batches: Maximum number of batches per request, and hence of a response.

    Raises:
        HttpProblem: If the report is invalid.
    """
    if not fields:
        return None
    try:
        host, pid, offset, uncertainty, received, waits, steps = (fields[name] for name in _NAMES)
        run = fields.get("run")
        offset, uncertainty = _seconds(offset), _seconds(uncertainty)
        _check_names(host, run)
        pid = _number(pid)
        responses = []
        for entry in _entries(received):
            first, batches, *times = entry
            first_byte, last_byte, decoded = _ascending(times, offset)
            at = Received(_number(first), _number(batches, max_batches + 1), first_byte, last_byte, decoded)
            responses.append(at)
        waited = [Waited(_number(batch), *_ascending(times, offset)) for batch, *times in _entries(waits)]
        stepped = [Step(_number(batch), _seconds(at) + offset) for batch, at in _entries(steps)]
    except (KeyError, TypeError, ValueError) as error:
        raise HttpProblem(
            422, "InvalidRequest", f"invalid times of batches ({error!s:.100}): see docs/protocol.md, Timeline"
        ) from None
    return ClientTimes(
        consumer, token, run, host, pid, key, epoch, offset, max(0.0, uncertainty), responses, waited, stepped
    )


def _check_names(host: Any, run: Any) -> None:
    if not isinstance(host, str) or len(host) > MAX_HOST or (run is not None and not RUN_NAME.fullmatch(run)):
        raise ValueError("host or run")


def _entries(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_BATCHES:
        raise ValueError(f"expected a list of at most {MAX_BATCHES} entries")
    return value


def _number(value: Any, stop: int = MAX_EPOCH) -> int:
    if type(value) is not int or not 0 <= value < stop:
        raise ValueError(f"expected an integer in [0, {stop}), got {value!r:.50}")
    return value


def _seconds(value: Any) -> float:
    if not isinstance(value, float | int) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"expected a number, got {value!r:.50}")
    return float(value)


def _ascending(times: Sequence[Any], offset: float) -> list[float]:
    found = [_seconds(at) + offset for at in times]
    if found != sorted(found):
        raise ValueError("expected ascending times")
    return found
