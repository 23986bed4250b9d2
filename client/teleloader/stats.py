"""Client-side loader statistics: data wait of the training loop, received batches, bytes and copies.

A step whose batch has already arrived is not timed, so that it has no overhead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from teleloader.tensors.memory import HostBuffers
from teleloader.timings import Timings
from teleloader_shared.histogram import Histogram
from teleloader_shared.messages import ConsumerReport, ReceivingTotals
from teleloader_shared.stats import Latency


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Statistics of one `DataLoader` iteration. Times are in seconds, sizes in bytes."""

    epoch: int | None
    """Epoch number; None before the first epoch."""
    elapsed: float
    """Time from ``iter()`` to the end of the epoch, or until now if the epoch has not ended."""
    steps: int
    """Batches that the training loop received, including errors raised in their place."""
    wait: Latency
    """Data wait per step; 0 if the batch had already arrived."""
    waited: float
    """Total data wait, including a current wait."""
    waited_share: float
    """`waited` as a fraction of `elapsed`."""
    batches: int
    """Received batches; a batch that was received twice counts twice."""
    bytes_received: int
    decode: float
    """Time to check and decode batches, in background threads."""
    pin: float
    """Time to allocate page-locked memory; constant after some batches, because torch reuses the memory."""
    pinned_bytes: int
    """Page-locked memory in use by the batches of all loaders in this process."""
    max_pinned_bytes: int
    """Maximum of `pinned_bytes` (``TELELOADER_MAX_PINNED_BYTES``); 0 if no page-locked memory is used."""
    unpinned: int
    """Allocations of pageable memory because of `max_pinned_bytes` or a limit of the operating system."""
    copy: float
    """Total duration of the completed copies to ``device``, which overlap with training."""
    late_copies: int
    """Batches whose copy to ``device`` started only while the training loop waited for them."""
    reconnects: int
    """Connections that were reopened after they broke or a server closed them."""
    hedges: int
    """Batches that were also requested from a second server, because the first one was slow."""
    errors: int
    """Samples of the epoch that were skipped or replaced (``on_error``), including those before a saved state."""

    def postfix(self) -> dict[str, Any]:
        """Return the figures for a progress bar: ``bar.set_postfix(loader.stats().postfix())`` with tqdm.

        The keys are identifiers, so that they can also be the fields of a task of ``rich.progress``:
        ``progress.update(task, advance=1, **loader.stats().postfix())``.

        Returns:
            ``wait_pct``, the data wait in percent of the time since ``iter()``; and ``mb_s``, the received megabytes
            (10^6 bytes) per second.
        """
        rate = self.bytes_received / self.elapsed if self.elapsed > 0 else 0.0
        return {"wait_pct": 100 * self.waited_share, "mb_s": rate / 1e6}


class Totals(NamedTuple):
    """Totals over all iterations of a loader; fields as in `LoaderStats`."""

    elapsed: float = 0.0
    waited: float = 0.0
    steps: int = 0
    batches: int = 0
    bytes_received: int = 0
    decode: float = 0.0
    copy: float = 0.0
    late_copies: int = 0
    reconnects: int = 0
    hedges: int = 0
    errors: int = 0


LATE_S: Final = 0.003
"""Time in seconds from the delivery of a batch until the training loop continues, from which it continues late.

It usually takes less than 0.3 ms. A thread that computes in Python releases the GIL after 5 ms.
"""


class Arrival(NamedTuple):
    """Times of one response, by ``time.perf_counter()``."""

    first_byte: float
    last_byte: float
    cpu: float
    """CPU time of the receiving thread since its previous response, in seconds."""


class ReceivingCounters:
    """Counters of the receiving threads over all iterations of a loader."""

    def __init__(self) -> None:
        self._busy = 0.0
        self._cpu = 0.0
        self._responses = 0
        self._process = 0.0
        self._wakeups = 0
        self._late = 0
        self._waits: dict[str, tuple[float, float]] = {}
        """Data wait of the training loop until the first byte of a response, and until the last one, by server."""

    def add(self, server: str, arrival: Arrival, now: float, since: float | None) -> None:
        """Count a response.

        Args:
            server: URL of the server.
            arrival: Times of the response.
            now: Current time, when the response has been decoded.
            since: Time since which the training loop waits for the response; None if it does not.
        """
        self._busy += now - arrival.first_byte
        self._cpu += arrival.cpu
        self._responses += 1
        if since is not None:
            pending, reading = self._waits.get(server, (0.0, 0.0))
            pending += max(0.0, arrival.first_byte - since)
            reading += max(0.0, arrival.last_byte - max(arrival.first_byte, since))
            self._waits[server] = pending, reading

    def waited(self, cpu: float, since_delivery: float | None) -> None:
        """Count a wait of the training loop, in its thread.

        Args:
            cpu: CPU time of the process during the wait in seconds.
            since_delivery: Seconds since the batch was delivered; None if the time is unknown.
        """
        self._process += cpu
        if since_delivery is not None:
            self._wakeups += 1
            self._late += since_delivery >= LATE_S

    def totals(self, server: str, waits: float) -> ReceivingTotals | None:
        """Return the totals to report to a server; None before the first response.

        Args:
            server: URL of the server.
            waits: Seconds for which the training loop has been waiting for a response that has not arrived.
        """
        if not self._responses:
            return None
        pending, reading = self._waits.get(server, (0.0, 0.0))
        elsewhere = sum(sum(parts) for url, parts in list(self._waits.items()) if url != server)
        return ReceivingTotals(
            pending + waits, reading, elsewhere, self._busy, self._cpu, self._process, self._wakeups, self._late
        )


class Measures:
    """Collector of client-side measurements during one iteration.

    The receiving threads count batches while they hold the lock of the reorder buffer.

    Args:
        epoch: Epoch number; None before the first epoch.
        buffers: Allocator of the memory that responses are received into; None if there is no such memory.
        before: Measurements of the loader's previous iteration; `report` adds its totals to those of this one.
        is_background: Whether the training loop has not started the epoch.
        first: Number of the first batch of the iteration.
        run: Name of the training run, for servers; None for no name.
    """

    def __init__(
        self,
        epoch: int | None = None,
        buffers: HostBuffers | None = None,
        before: Measures | None = None,
        *,
        is_background: bool = False,
        first: int = 0,
        run: str | None = None,
    ) -> None:
        self.steps = 0
        self.batches = 0
        self.nbytes = 0
        self.decode = 0.0
        self.reconnects = 0
        self.hedges = 0
        self.errors = 0
        self.timings: Final = Timings()
        """Times of single batches, for the timeline of servers."""
        self._epoch = epoch
        self._buffers = buffers
        self._number: int | None = None
        """Number of the last batch that was counted as a step."""
        self._first = first
        self._run = run
        self.finished = False
        """True once the training loop has received the last batch of the epoch."""
        self.reports = 0
        """Number of calls of `report`."""
        self.reported = (0, False)
        """Values of `steps` and `finished` in the last report."""
        self.copy = 0.0
        self.late_copies = 0
        """`copy` and `late_copies` are written by the thread that copies batches to a device."""
        self._receiving: ReceivingCounters = ReceivingCounters() if before is None else before._receiving
        self._attributed: float | None = None
        """Start time of the wait that is included in `_receiving`; None before the first one."""
        self._delivered = 0.0
        """Time at which the batch for which the training loop waited had been decoded."""
        self._before = Totals()
        self._current = before
        """Measurements of the iteration that the training loop is in, to report until `begin` is called."""
        self._began = time.perf_counter()
        if not is_background:
            self.begin()
        self._ended = self._began if epoch is None else None
        self._waits = Histogram()
        self._waited: tuple[float, float | None] = (0.0, None)
        """Total seconds of completed waits, and start time of a current wait; one tuple, because other threads read it
        without a lock."""

    # -- in the training loop's thread

    def begin(self) -> None:
        """Start the measurements, because the training loop starts the epoch."""
        self._began = time.perf_counter()
        if self._current is not None:
            self._before = self._current.totals()
            self._current = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager that adds its duration to the data wait of the training loop."""
        began, used = time.perf_counter(), time.process_time()
        before, _ = self._waited
        self._waited = before, began
        try:
            yield
        finally:
            now = time.perf_counter()
            seconds = now - began
            self._waited = before + seconds, None
            self._waits.observe((seconds,))
            if self.timings.is_on:
                self.timings.waited(self.position, began, now)
            # a copy to a device follows the delivery
            is_known = self._delivered > began and not self.copy
            self._receiving.waited(time.process_time() - used, now - self._delivered if is_known else None)

    def step(self, number: int) -> None:
        """Count a batch that the training loop received; repeated calls for the same batch have no effect."""
        if number != self._number:
            self._number = number
            self.steps += 1
            if self.timings.is_on:
                self.timings.stepped(number)

    @property
    def position(self) -> int:
        """Number of the first batch that the training loop has not received."""
        return self._first if self._number is None else self._number + 1

    def finish(self) -> None:
        """Record that the training loop has received the last batch of the epoch."""
        self.finished = True
        self.end()

    def end(self) -> None:
        """Record the end time of the iteration."""
        if self._ended is None:
            self._ended = time.perf_counter()

    # -- in the receiving threads

    def arrived(self, server: str, arrival: Arrival, now: float, *, is_awaited: bool) -> None:
        """Count a response, and attribute the data wait of the training loop to its parts.

        Args:
            server: URL of the server.
            arrival: Times of the response.
            now: Current time, when the response has been decoded.
            is_awaited: Whether the response contains the next batch of the training loop.
        """
        since = self._waited[1]
        if not is_awaited or since == self._attributed:
            since = None
        if since is not None:
            self._attributed, self._delivered = since, now
        self._receiving.add(server, arrival, now, since)

    # -- in any thread

    def report(self, server: str = "") -> ConsumerReport:
        """Return the report that the client sends with each batch request.

        Args:
            server: URL of the server that receives the report.
        """
        current = self._current
        if current is not None:  # the training loop waits for batches of that iteration, not for these
            return replace(current.report(server), position=self._first, finished=False)
        now, before = self._now, self._before
        since = self._waited[1]
        waits = 0.0 if since is None or since == self._attributed else max(0.0, now - since)
        self.reports += 1
        self.reported = self.steps, self.finished
        return ConsumerReport(
            elapsed=before.elapsed + now - self._began,
            waited=before.waited + self._waited_until(now),
            taken=before.steps + self.steps,
            reconnects=before.reconnects + self.reconnects,
            hedges=before.hedges + self.hedges,
            position=self.position,
            finished=self.finished,
            run=self._run,
            receiving=self._receiving.totals(server, waits),
        )

    def totals(self) -> Totals:
        """Return the totals over this iteration and all previous ones."""
        if self._current is not None:
            return self._current.totals()
        now = self._now
        this = Totals(
            now - self._began, self._waited_until(now), self.steps, self.batches, self.nbytes, self.decode, self.copy,
            self.late_copies, self.reconnects, self.hedges, self.errors,
        )  # fmt: skip
        return Totals._make(before + now for before, now in zip(self._before, this, strict=True))

    @property
    def run(self) -> str | None:
        """Name of the training run; None if it has none."""
        return self._run

    @property
    def epoch(self) -> int | None:
        """Number of the epoch; None before the first one."""
        return self._epoch

    def stats(self) -> LoaderStats:
        """Return the statistics of the iteration for `DataLoader.stats`."""
        now = self._now
        elapsed, waited = now - self._began, self._waited_until(now)
        buffers = self._buffers
        pinned = None if buffers is None else buffers.pinned
        return LoaderStats(
            epoch=self._epoch,
            elapsed=elapsed,
            steps=self.steps,
            wait=self._waits.latency(zeros=max(0, self.steps - self._waits.count)),
            waited=waited,
            waited_share=min(1.0, waited / elapsed) if waited else 0.0,
            batches=self.batches,
            bytes_received=self.nbytes,
            decode=self.decode,
            pin=0.0 if buffers is None else buffers.pin_seconds,
            pinned_bytes=0 if pinned is None else pinned.in_use,
            max_pinned_bytes=0 if pinned is None else pinned.limit,
            unpinned=0 if buffers is None else buffers.unpinned,
            copy=self.copy,
            late_copies=self.late_copies,
            reconnects=self.reconnects,
            hedges=self.hedges,
            errors=self.errors,
        )

    @property
    def _now(self) -> float:
        return time.perf_counter() if self._ended is None else self._ended

    def _waited_until(self, now: float) -> float:
        waited, since = self._waited
        return waited + (0.0 if since is None else max(0.0, now - since))
