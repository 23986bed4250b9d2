"""Cost of a response: the server's CPU time for responses with 1 and with 64 batches that are computed already.

The line through both gives the cost of a response and the cost of each batch in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from rich.table import Table

from benchmarks.clients import HOSTED, Consumer
from benchmarks.measuring import Spread
from benchmarks.parts import Job, Outcome, Setting, Step, interleaved
from benchmarks.processes import LoaderServer, cpu_seconds, running

FEW: Final = 1
MANY: Final = 64
CACHED: Final = 1024
"""Number of batches that the server computes before the measurement; fewer than it keeps."""


class Response:
    """Cost of a response."""

    name = "response"
    hosted: Mapping[str, str] = {}

    def prepare(self, setting: Setting) -> Job:
        """Return the job, which starts its own server: other consumers' batches could displace the cached ones."""
        return Job(1 + 2 * setting.rounds, partial(self._run, setting))

    def _run(self, setting: Setting, step: Step) -> Outcome:
        step(f"{self.name}: first batches")
        with running(HOSTED, 1) as server, asyncio.Runner() as runner:
            consumer = Consumer(0)
            runner.run(consumer.open(server.url))
            runner.run(_load(consumer, MANY))

            def take(together: int) -> float:
                return runner.run(_cost(server, consumer, together, setting.quick))

            costs = interleaved((FEW, MANY), setting.rounds, step, lambda count: f"{self.name}: {count} batches", take)
            consumer.close()
        return _outcome(costs)


async def _load(consumer: Consumer, together: int) -> int:
    """Load the first `CACHED` batches; return the number of responses."""
    consumer.restart()
    batches = responses = 0
    while batches < CACHED:
        batches += await consumer.take(min(together, CACHED - batches), ahead=0)
        responses += 1
    return responses


async def _cost(server: LoaderServer, consumer: Consumer, together: int, quick: bool) -> float:
    """Return the server's CPU seconds per response with this number of batches.

    Raises:
        RuntimeError: The server has computed batches again, or has divided them into more responses.
    """
    made, cpu, responses = _computed(server), 0.0, 0
    for _ in range(1 if quick else max(1, together // 4)):  # about as much time for few batches as for many
        before = cpu_seconds(server.process.pid)
        responses += (came := await _load(consumer, together))
        cpu += cpu_seconds(server.process.pid) - before
        if came != CACHED // together or _computed(server) != made:
            raise RuntimeError(f"the server sent {CACHED} cached batches in {came} responses, or computed them again")
    return cpu / responses


def _computed(server: LoaderServer) -> int:
    found: int = server.stats()["datasets"][0]["batches_computed"]
    return found


def _outcome(costs: Mapping[int, Sequence[float]]) -> Outcome:
    few, many = costs[FEW], costs[MANY]
    per_batch = [(b - a) / (MANY - FEW) for a, b in zip(few, many, strict=True)]
    rows = {
        "per response": [a - FEW * each for a, each in zip(few, per_batch, strict=True)],
        "per batch in a response": per_batch,
        f"response with {FEW} batch": few,
        f"response with {MANY} batches": many,
    }
    made = Table(title="response - server CPU for cached batches of 4 KB", title_justify="left", title_style="bold")
    made.add_column("cost")
    made.add_column("us", justify="right")
    for name, seconds in rows.items():
        made.add_row(name, Spread.of([1e6 * each for each in seconds]).text(",.1f"))
    figures = {f"response: us {name}": Spread.of([1e6 * each for each in seconds]) for name, seconds in rows.items()}
    results: list[dict[str, Any]] = [{"cost": name, "seconds": list(seconds)} for name, seconds in rows.items()]
    return Outcome([made], results, figures)
