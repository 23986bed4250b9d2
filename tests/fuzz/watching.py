"""Repeated executions, with their outcomes, durations and peak memory."""

from __future__ import annotations

import faulthandler
import resource
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

CPU_LIMIT: Final = 2.0
"""Seconds of processor time that one execution may take, memory being traced, which makes it several times slower.
Wall-clock time would measure the neighbours."""
MEMORY_LIMIT: Final = 64 * 2**20
"""Maximum peak memory of one execution in bytes, including the batch that it reads."""
HANG: Final = 120.0
"""Seconds after which the process exits with its stack trace, since code that hangs cannot be counted."""
BETWEEN_ALARMS: Final = 256


@dataclass(frozen=True, slots=True)
class Finding:
    """An execution that broke a rule."""

    rule: str
    """Name of the rule, and the place that broke it; findings with the same rule and place count as one."""
    execution: int
    data: bytes
    details: str


@dataclass(slots=True)
class Watch:
    """Runner that executes a target and counts outcomes.

    Args:
        target: Reads one input; returns the kind of the result, or raises.
        refusals: Expected errors. Any other error is a finding.
        most_memory: Maximum memory of one execution in bytes.
        most_cpu: Maximum CPU seconds of one execution.
    """

    target: Callable[[bytes], str]
    refusals: tuple[type[Exception], ...]
    most_memory: int = MEMORY_LIMIT
    most_cpu: float = CPU_LIMIT
    executions: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)
    slowest: float = 0.0
    largest: int = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Trace memory inside the block."""
        tracemalloc.start()
        try:
            yield
        finally:
            tracemalloc.stop()
            faulthandler.cancel_dump_traceback_later()

    def execute(self, number: int, data: bytes) -> None:
        """Run the target on `data`, the input with the given number."""
        if self.executions % BETWEEN_ALARMS == 0:
            faulthandler.dump_traceback_later(HANG, exit=True)
        self.executions += 1
        resident = _most_resident()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        began = time.thread_time()
        try:
            outcome = self.target(data)
        except self.refusals as refusal:
            outcome = _place(refusal)
        except Exception as error:  # noqa: BLE001 - this is what is looked for
            outcome = _place(error)
            self._found(f"raised {outcome}", number, data, "".join(traceback.format_exception(error)))
        spent = time.thread_time() - began
        # allocations of C libraries are visible only in the process's size
        taken = max(tracemalloc.get_traced_memory()[1] - before, _most_resident() - resident)
        self.outcomes[outcome] += 1
        self._weigh(number, data, outcome, spent, taken)

    def _weigh(self, number: int, data: bytes, outcome: str, spent: float, taken: int) -> None:
        self.slowest = max(self.slowest, spent)
        self.largest = max(self.largest, taken)
        if spent > self.most_cpu:
            self._found(f"slow, then {outcome}", number, data, f"{spent:.2f} s of processor time")
        if taken > self.most_memory:
            self._found(f"large, then {outcome}", number, data, f"{taken / 2**20:,.1f} MiB")

    def _found(self, rule: str, number: int, data: bytes, details: str) -> None:
        self.findings.setdefault(rule, Finding(rule, number, data, details))


def _most_resident() -> int:
    """Return the process's peak resident memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _place(error: BaseException) -> str:
    """Return an error's type and where it was raised, to distinguish outcomes whose texts vary."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = "?" if at is None else f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}"
    return f"{type(error).__name__} at {where}"
