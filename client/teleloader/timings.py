"""Times of the batches of one iteration in the client, for the timeline of servers (``GET /v1/timeline``).

Nothing is recorded until a server requests the times with the header `TIMELINE_HEADER` of a response.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

MAX_ENTRIES: Final = 512
"""Maximum number of entries of each kind between two reports."""
WANTED_S: Final = 5.0
"""Seconds after the last request of a server for which times are recorded."""
ROUNDING_S: Final = 1e-6
"""Time in the network, in seconds below 0, that is a rounding error."""
MAX_EXCHANGES: Final = 8
"""Number of the last exchanges with a server from which its clock is estimated."""


class Offset(NamedTuple):
    """Difference of two clocks."""

    seconds: float
    """Clock of the server minus clock of this process."""
    uncertainty: float
    """Maximum error of `seconds`."""


class ClockEstimate:
    """Offset of a server's clock, estimated as by NTP from the times of requests and responses.

    The server's clock was read between the request and the response, so that an exchange limits the offset to an
    interval: the time in the network, of which the exchange does not know how it divides. Of the last exchanges, the
    one with the shortest time in the network counts.
    """

    def __init__(self) -> None:
        self._exchanges: deque[Offset] = deque(maxlen=MAX_EXCHANGES)

    def add(self, sent: float, received_there: float, sent_there: float, received: float) -> None:
        """Add an exchange; ignore it if its times contradict each other.

        Args:
            sent: Time at which this process sent the request.
            received_there: Time at which the server received it, by the server's clock.
            sent_there: Time at which the server sent the response, by the server's clock.
            received: Time at which this process received the response.
        """
        network = (received - sent) - (sent_there - received_there)
        if network > -ROUNDING_S and sent_there >= received_there:
            offset = ((received_there - sent) + (sent_there - received)) / 2
            self._exchanges.append(Offset(offset, max(0.0, network / 2)))

    @property
    def offset(self) -> Offset | None:
        """Best estimate; None before the first exchange."""
        return min(self._exchanges, key=lambda each: each.uncertainty, default=None)


@dataclass(frozen=True, slots=True)
class Taken:
    """Times that were recorded since the last report, by ``time.perf_counter()``."""

    received: list[tuple[str, int, int, float, float, float]]
    """URL of the server, number of the first batch, number of batches, and times of the first byte, the last byte, and
    the end of decoding, of each response."""
    waits: list[tuple[int, float, float]]
    """Number of the batch, start and end of each wait of the training loop."""
    steps: list[tuple[int, float]]
    """Number and time of each delivery to the training loop."""

    def for_server(self, url: str) -> dict[str, Any]:
        """Return the times as JSON, with the responses of one server."""
        received = [entry[1:] for entry in self.received if entry[0] == url]
        return {"received": received, "waits": self.waits, "steps": self.steps}


class Timings:
    """Recorder of the times of one iteration; deques, because several threads record and one thread takes."""

    def __init__(self) -> None:
        self.is_on = False
        """True while a server requests the times."""
        self._until = 0.0
        self._received: deque[tuple[str, int, int, float, float, float]] = deque(maxlen=MAX_ENTRIES)
        self._waits: deque[tuple[int, float, float]] = deque(maxlen=MAX_ENTRIES)
        self._steps: deque[tuple[int, float]] = deque(maxlen=MAX_ENTRIES)

    def request(self) -> None:
        """Record times for the next `WANTED_S` seconds."""
        self._until = time.monotonic() + WANTED_S
        self.is_on = True

    def received(self, server: str, first: int, batches: int, times: tuple[float, float, float]) -> None:
        """Record a response; `times` are those of the first byte, the last byte, and the end of decoding."""
        self._received.append((server, first, batches, *times))

    def waited(self, batch: int, began: float, ended: float) -> None:
        """Record a wait of the training loop for a batch."""
        self._waits.append((batch, began, ended))

    def stepped(self, batch: int) -> None:
        """Record the delivery of a batch to the training loop."""
        self._steps.append((batch, time.perf_counter()))

    def take(self) -> Taken:
        """Remove and return the recorded times; end the recording if no server has requested it recently."""
        if time.monotonic() > self._until:
            self.is_on = False
        return Taken(*(_drained(entries) for entries in (self._received, self._waits, self._steps)))


def _drained(entries: deque[Any]) -> list[Any]:
    found = []
    try:
        while True:
            found.append(entries.popleft())
    except IndexError:
        return found
