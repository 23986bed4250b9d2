"""Reports of training loops that send no requests, for the statistics of servers.

Each request for batches has a report of the training loop's progress. A training loop that consumes the last prefetched
batches of an epoch sends no requests, and after the last batch no request follows. A background thread of the process
reports the progress of these loops.
"""

from __future__ import annotations

import math
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

from teleloader.stats import Measures
from teleloader.timings import ClockEstimate
from teleloader.transport.interface import BatchServer
from teleloader_shared import local
from teleloader_shared.forks import after_fork_in_child
from teleloader_shared.messages import ConsumerReport

PERIOD: Final = 1.0
"""Seconds without a request after which progress is reported, and between two reports."""
TIMEOUT: Final = 2.0
"""Seconds to wait for a server's response."""
TIMES_SECONDS: Final = 0.5
"""Seconds to wait for a server that requested times, at the end of an iteration."""
EXIT_SECONDS: Final = 1.0
"""Maximum seconds for which the exit of the process waits for the reports of finished epochs."""

Target = tuple[BatchServer, str]
"""Server, and key of the loader there."""


@dataclass(frozen=True, slots=True, eq=False)
class Consumer:
    """Consumer whose progress is reported."""

    name: str
    epoch: int
    measures: Measures
    targets: Callable[[], Sequence[Target]]
    """Returns the servers that know the consumer."""

    @property
    def loop(self) -> str:
        """Part of the name that all iterations of the training loop have in common."""
        return self.name.rpartition("#")[0]


@dataclass(frozen=True, slots=True)
class _Final:
    """Report of a finished epoch."""

    due: float
    """Time to send the report (``time.monotonic()``)."""
    name: str
    epoch: int
    report: ConsumerReport
    targets: Sequence[Target]

    def send(self, timeout: float) -> None:
        """Send the report."""
        _send(self.targets, self.epoch, self.name, self.report, timeout)


class ProgressReporter:
    """Reporter of all training loops in this process. Its thread runs while there is an open iteration."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all consumers: those of a forked child belong to the parent."""
        self._lock = threading.RLock()
        """Reentrant, because a finalizer in the thread that holds the lock may call `unfollow`."""
        self._followed: WeakKeyDictionary[object, Consumer] = WeakKeyDictionary()
        self._seen: dict[Consumer, int] = {}
        """Number of reports of each consumer at the last check."""
        self._finals: dict[str, _Final] = {}
        """Reports of finished epochs, by training loop: the next epoch of a loop makes the report unnecessary."""
        self._clocks: dict[str, ClockEstimate] = {}
        """Clocks of servers that requested times, by URL."""
        self._thread: threading.Thread | None = None

    def follow(self, owner: object, consumer: Consumer) -> None:
        """Report the progress of a consumer until `unfollow`, or until `owner` is deleted."""
        with self._lock:
            self._finals.pop(consumer.loop, None)
            self._followed[owner] = consumer
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="teleloader-progress", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the process cannot start further threads
                    return
                self._thread = thread

    def unfollow(self, owner: object) -> None:
        """Stop reporting; the end of a finished epoch is reported later."""
        with self._lock:
            consumer = self._followed.pop(owner, None)
            if consumer is None:
                return
            if consumer.measures.finished:
                report, due = consumer.measures.report(), time.monotonic() + PERIOD
                self._finals[consumer.loop] = _Final(due, consumer.name, consumer.epoch, report, consumer.targets())
        # at once, because the session may end with the iteration, and the loader with the session
        if consumer.measures.timings.is_on and not local.is_server_thread():
            self._send_times(consumer, consumer.targets(), TIMES_SECONDS)

    def flush(self) -> None:
        """Report the finished epochs now, because the process exits; stop after `EXIT_SECONDS`."""
        until = time.monotonic() + EXIT_SECONDS
        for final in self._take(math.inf):
            if (left := until - time.monotonic()) > 0:
                final.send(left)

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD)
            with self._lock:
                if not self._followed and not self._finals:
                    self._thread = None
                    return
            self._report()  # a method, whose variables keep no consumer in memory while the thread sleeps

    def _report(self) -> None:
        with self._lock:
            followed, before = list(self._followed.values()), self._seen
            self._seen = {consumer: consumer.measures.reports for consumer in followed}
        for consumer in followed:
            if before.get(consumer) == consumer.measures.reports and _has_progress(consumer):
                _send(consumer.targets(), consumer.epoch, consumer.name, consumer.measures.report(), TIMEOUT)
            if consumer.measures.timings.is_on:
                self._send_times(consumer, consumer.targets(), TIMEOUT)
        for final in self._take(time.monotonic()):
            final.send(TIMEOUT)

    def _send_times(self, consumer: Consumer, targets: Sequence[Target], timeout: float) -> None:
        """Report the times of batches since the last report to servers, and estimate their clocks."""
        taken, run = consumer.measures.timings.take(), consumer.measures.run
        for server, key in targets:
            clock = self._clocks.setdefault(server.url, ClockEstimate())
            with suppress(Exception):  # as in `_send`
                if clock.offset is None:
                    _exchange(server, key, consumer, {}, clock, timeout)
                if clock.offset is not None:
                    about = {"host": platform.node(), "pid": os.getpid(), "run": run}
                    times = {**about, **clock.offset._asdict(), **taken.for_server(server.url)}
                    _exchange(server, key, consumer, times, clock, timeout)

    def _take(self, now: float) -> Iterable[_Final]:
        """Remove and return the reports that are due."""
        with self._lock:
            taken = {loop: final for loop, final in self._finals.items() if final.due <= now}
            for loop in taken:
                del self._finals[loop]
        return taken.values()


def _has_progress(consumer: Consumer) -> bool:
    """Return True if the training loop made progress since its last report."""
    measures = consumer.measures
    return measures.reported != (measures.steps, measures.finished)


def _exchange(
    server: BatchServer, key: str, consumer: Consumer, times: dict[str, Any], clock: ClockEstimate, timeout: float
) -> None:
    """Send times to a server, and add the exchange to the estimate of its clock."""
    sent = time.perf_counter()
    response = server.report_timings(key, consumer.epoch, consumer.name, times, timeout)
    clock.add(sent, float(response["received_at"]), float(response["sent_at"]), time.perf_counter())


def _send(targets: Sequence[Target], epoch: int, consumer: str, report: ConsumerReport, timeout: float) -> None:
    for server, key in targets:
        with suppress(Exception):  # statistics must not disturb the training
            server.report_progress(key, epoch, consumer, report, timeout)


reporter: Final = ProgressReporter()
after_fork_in_child(reporter.reset)
