"""Reports of training loops that send no requests."""

from __future__ import annotations

import math
import threading
from typing import Any, cast

import pytest

from teleloader.fetch.progress import Consumer, ProgressReporter, Target
from teleloader.stats import Measures
from teleloader.transport.interface import BatchServer
from teleloader_shared.messages import ConsumerReport


class Recorder:
    """Server that records reports.

    Args:
        fails: Whether each report raises an error.
    """

    def __init__(self, *, fails: bool = False) -> None:
        self.reports: list[tuple[str, int | None, bool]] = []
        self._fails = fails

    def report_progress(self, key: str, epoch: int, consumer: str, report: ConsumerReport, timeout: float) -> None:
        """Record the consumer, its position, and whether the epoch is finished."""
        self.reports.append((consumer, report.position, report.finished))
        if self._fails:
            raise OSError("no network")


class Owner:
    """Object whose consumer is followed."""


@pytest.fixture
def reporter() -> ProgressReporter:
    """Return a reporter whose checks the test runs itself."""
    made = ProgressReporter()
    made._thread = threading.main_thread()
    return made


def consumer(server: Recorder, measures: Measures, name: str = "host:1/rank0/loader0#0") -> Consumer:
    """Return a consumer that this server knows."""
    target: Target = (cast("BatchServer", server), "key")
    return Consumer(name, 0, measures, lambda: [target])


def test_a_loop_is_reported_only_while_it_sends_no_requests(reporter: ProgressReporter) -> None:
    """A report is sent if the loop made progress, and no request had a report since the last check."""
    server, measures, owner = Recorder(), Measures(0), Owner()
    reporter.follow(owner, consumer(server, measures))
    reporter._report()
    for number in range(3):
        measures.step(number)
        measures.report()  # with a request
        reporter._report()
    reporter._report()
    assert server.reports == [], "the requests have reported the progress"
    measures.step(3)
    reporter._report()
    reporter._report()
    reporter._report()
    assert [position for _, position, _ in server.reports] == [4]


@pytest.mark.parametrize("starts_next", [False, True])
def test_the_end_is_reported_unless_the_next_epoch_starts(reporter: ProgressReporter, starts_next: bool) -> None:
    """The reports of the next epoch make that of the finished one unnecessary."""
    server, measures, owner = Recorder(), Measures(0), Owner()
    reporter.follow(owner, consumer(server, measures))
    measures.step(7)
    measures.finish()
    reporter.unfollow(owner)
    reporter._report()
    assert server.reports == [], "the next epoch may still start"
    following: Any = Owner()
    if starts_next:
        reporter.follow(following, consumer(server, Measures(1), "host:1/rank0/loader0#1"))
    reporter.flush()
    assert server.reports == ([] if starts_next else [("host:1/rank0/loader0#0", 8, True)])
    assert not reporter._take(math.inf)


def test_an_aborted_epoch_is_not_reported(reporter: ProgressReporter) -> None:
    """Neither is one whose owner was deleted."""
    server, measures, owner = Recorder(), Measures(0), Owner()
    reporter.follow(owner, consumer(server, measures))
    measures.step(7)
    reporter.unfollow(owner)
    reporter.follow(owner, consumer(server, measures))
    del owner
    reporter._report()
    reporter.flush()
    assert server.reports == []


def test_errors_do_not_end_the_reports(reporter: ProgressReporter) -> None:
    """All servers receive a report, even if one of them fails in an unexpected way."""
    bad, good, measures, owner = Recorder(fails=True), Recorder(), Measures(0), Owner()
    targets = [(cast("BatchServer", server), "key") for server in (bad, good)]
    reporter.follow(owner, Consumer("a#0", 0, measures, lambda: targets))
    measures.step(0)
    measures.finish()
    reporter.unfollow(owner)
    reporter.flush()
    assert bad.reports == good.reports == [("a#0", 1, True)]
