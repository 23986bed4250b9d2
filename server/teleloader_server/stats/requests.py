"""Counters of HTTP requests, for Prometheus."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

from teleloader_shared.histogram import BLOCK, Histogram
from teleloader_shared.messages import DATASETS_PATH, LOADERS_PATH


def handler_of(path: str) -> str:
    """Return the label of a route, given its path with parameters in braces; there are four labels."""
    if path.startswith(LOADERS_PATH):
        return "batches" if "/batches" in path else "loaders"
    return "datasets" if path.startswith(DATASETS_PATH) else "other"


class HttpCounters:
    """Counters of the HTTP requests of a server."""

    def __init__(self) -> None:
        self._durations: Final[defaultdict[str, Histogram]] = defaultdict(Histogram)
        self._responses: Final[Counter[tuple[str, int]]] = Counter()
        self._pending: Final[dict[tuple[str, int], list[float]]] = {}
        """Durations of requests that are not in the histograms yet, by path of the route and status code."""
        self.refusals: Final[Counter[str]] = Counter()
        """Number of error responses, by the code of the problem."""
        self.closed: Final[Counter[str]] = Counter()
        """Number of connections that the server closed because of a limit, by reason."""

    def responded(self, path: str, status: int, seconds: float) -> None:
        """Count a response.

        Args:
            path: Path of the route, with parameters in braces; "" if no route matched.
            status: Status code; 0 if the client disconnected before the response.
            seconds: Duration of the request.
        """
        times = self._pending.get((path, status))
        if times is None:  # routes and status codes are few
            times = self._pending[path, status] = []
        times.append(seconds)
        if len(times) >= BLOCK:
            self._flush()

    def durations(self) -> dict[str, Histogram]:
        """Return the time in seconds from a request's headers to the end of its response, by handler."""
        self._flush()
        return self._durations

    def responses(self) -> Counter[tuple[str, int]]:
        """Return the number of responses, by handler and status code."""
        self._flush()
        return self._responses

    def _flush(self) -> None:
        for (path, status), times in self._pending.items():
            handler = handler_of(path)
            self._durations[handler].add(times)
            if status:
                self._responses[handler, status] += len(times)
            times.clear()
