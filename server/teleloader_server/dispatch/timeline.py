"""Timeline of the last batches: when each was computed, sent, received and consumed.

Nothing is measured for the timeline alone: workers report the times of their stages for the statistics, the event loop
reads the clock for each response. An entry is made for each group of small batches and each response, not for each
batch. The last 512 computed batches take about 0.3 MB, 512 responses of up to 256 batches 1 MB, and the reports of 64
clients with 512 entries of each kind 13 MB; clients report only while the timeline is requested.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from teleloader_server.loading.tasks import GroupReport, Task
from teleloader_shared.codec import BatchId
from teleloader_shared.inspection import BatchTimes, ClientTimes, SendTimes

MAX_BATCHES: Final = 512
"""Number of computed batches, and of responses, that are kept."""
MAX_SHOWN_NUMBERS: Final = 256
"""Maximum number of batch numbers of one response."""
MAX_CLIENTS: Final = 64
"""Maximum number of consumers whose reports are kept: the last ones that sent a report."""
REQUESTED_S: Final = 10.0
"""Seconds after a request for the timeline for which clients report their part."""


class _Group(NamedTuple):
    """Batches that a worker reported together."""

    number: int
    pool: str | None
    worker: int
    dataset: str
    ids: Sequence[BatchId]
    assigned: Sequence[float]
    completed: Sequence[float]
    stages: Sequence[Sequence[float]]
    samples: Sequence[int]
    failed: bool
    ready: float


class _Sent(NamedTuple):
    loader: str
    epoch: int
    numbers: Sequence[int]
    consumer: str
    token: str
    began: float
    ended: float
    nbytes: int


class Timeline:
    """Bounded record of the last batches of a server."""

    def __init__(self) -> None:
        self.computed = 0
        """Number of computed batches since the server started."""
        self.sent = 0
        """Number of responses since the server started."""
        self._groups: deque[_Group] = deque()
        self._kept = 0
        """Number of batches in `_groups`."""
        self._sent: deque[_Sent] = deque(maxlen=MAX_BATCHES)
        self._clients: OrderedDict[tuple[str, str, int, str], ClientTimes] = OrderedDict()
        self._requested_until = 0.0
        self._reporting: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Consumers that were requested to report, with the time of their last response, in the order of these times.

        There are at most `MAX_CLIENTS`, so that reports of thousands of clients do not delay batches. A consumer
        without a response for `REQUESTED_S` is replaced by another one: each epoch has a consumer of its own.
        """

    # -- recording, for each batch

    def add_computed(
        self, now: float, pool: str | None, worker: int, tasks: Sequence[Task], report: GroupReport
    ) -> None:
        """Add the batches that a worker reported together.

        Args:
            now: Current time.
            pool: Key of the loader that the worker is private to; None for the shared pool.
            worker: Worker ID.
            tasks: Tasks of the batches.
            report: Report of the worker.
        """
        count = len(tasks)
        self._groups.append(
            _Group(
                self.computed, pool, worker, tasks[0].spec.dataset, [task.batch_id for task in tasks],
                [task.assigned for task in tasks], report.ended, report.stages, report.samples, report.failed, now,
            )
        )  # fmt: skip
        self.computed += count
        self._kept += count
        while self._kept - len(self._groups[0].ids) >= MAX_BATCHES:
            self._kept -= len(self._groups.popleft().ids)

    def add_sent(
        self, epoch: tuple[str, int], numbers: Sequence[int], consumer: tuple[str, str], began: float, ended: float,
        nbytes: int,
    ) -> None:  # fmt: skip
        """Add a response.

        Args:
            epoch: Key of the loader, and epoch.
            numbers: Numbers of the batches in the response.
            consumer: Name of the consumer, and of its token.
            began: Time at which the response was started.
            ended: Time at which it was written.
            nbytes: Its size in bytes.
        """
        self.sent += 1
        self._sent.append(_Sent(*epoch, numbers[:MAX_SHOWN_NUMBERS], *consumer, began, ended, nbytes))

    # -- clients

    def request_clients(self, now: float) -> None:
        """Make clients report their part of the timeline for the next `REQUESTED_S` seconds."""
        if now > self._requested_until:
            self._reporting.clear()
        self._requested_until = now + REQUESTED_S

    def wants_client(self, token: str, consumer: str) -> bool:
        """Return True if a consumer should report its part."""
        if not self._requested_until or (now := clock()) > self._requested_until:
            return False
        key, reporting = (token, consumer), self._reporting
        if key not in reporting and len(reporting) >= MAX_CLIENTS:
            oldest = next(iter(reporting))
            if now - reporting[oldest] < REQUESTED_S:
                return False
            del reporting[oldest]
        reporting[key] = now
        reporting.move_to_end(key)
        return True

    def add_client(self, times: ClientTimes) -> None:
        """Add a report of a client to its previous ones; keep the last `MAX_BATCHES` entries of each kind."""
        key = times.token, times.loader, times.epoch, times.consumer
        before = self._clients.pop(key, None)
        if before is not None:
            times = ClientTimes(
                times.consumer, times.token, times.run, times.host, times.pid, times.loader, times.epoch, times.offset,
                times.uncertainty, [*before.received, *times.received][-MAX_BATCHES:],
                [*before.waits, *times.waits][-MAX_BATCHES:], [*before.steps, *times.steps][-MAX_BATCHES:],
            )  # fmt: skip
        self._clients[key] = times
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)

    # -- reading

    def batches(self, since: int = 0) -> list[BatchTimes]:
        """Return the last computed batches, oldest first, from number `since` on."""
        found = [times for group in self._groups for times in _expanded(group) if times.number >= since]
        return found[-MAX_BATCHES:]

    def of_worker(self, pool: str | None, worker: int, count: int) -> list[BatchTimes]:
        """Return the last `count` batches of a worker, newest first."""
        groups = (group for group in reversed(self._groups) if (group.pool, group.worker) == (pool, worker))
        return list(islice((times for group in groups for times in reversed(_expanded(group))), count))

    def responses(self, since: int = 0) -> list[SendTimes]:
        """Return the last responses, oldest first, from number `since` on."""
        first = self.sent - len(self._sent)
        return [
            SendTimes(number, sent.loader, sent.epoch, list(sent.numbers), *sent[3:])
            for number, sent in enumerate(self._sent, first)
            if number >= since
        ]

    def clients(self) -> Iterable[ClientTimes]:
        """Return the reports of clients."""
        return self._clients.values()


def _expanded(group: _Group) -> list[BatchTimes]:
    last = len(group.ids) - 1
    return [
        BatchTimes(
            number=group.number + place,
            dataset=group.dataset,
            loader=batch_id.loader,
            epoch=batch_id.epoch,
            batch=batch_id.batch,
            worker=group.worker,
            pool=group.pool,
            assigned_at=group.assigned[place],
            began_at=group.completed[place] - sum(times[place] for times in group.stages),
            stages=[times[place] for times in group.stages],
            ready_at=group.ready,
            group=group.number,
            samples=group.samples[place],
            failed=group.failed and place == last,
        )
        for place, batch_id in enumerate(group.ids)
    ]


def clock() -> float:
    """Return the time of the timeline: the monotonic clock, which all processes of a machine share."""
    return time.monotonic()
