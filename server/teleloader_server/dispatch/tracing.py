"""A batch's life as the server sees it, as parts of the client's request: queue, fetch, collate, encode and send.

Workers know nothing of it: what they report of a batch is enough to tell when each stage began.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from teleloader_server.loading.stages import STAGES
from teleloader_server.loading.tasks import Report
from teleloader_shared import tracing

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span


class Made(NamedTuple):
    """Times and worker of a computed batch."""

    when: int
    """Time at which the batch was ready, from ``time.time_ns()``."""
    worker: int
    report: Report


class RequestTrace:
    """The spans of one request.

    Args:
        within: The client's span.
        span: That of the time until all its batches were ready.
    """

    def __init__(self, within: Context, span: Span) -> None:
        from opentelemetry import trace

        self._within = within
        self._span = span
        self._inside = trace.set_span_in_context(span)
        self._began = time.time_ns()

    @classmethod
    def begin(cls, traceparent: str) -> RequestTrace | None:
        """The trace of a request that came with such a header; None where it is not to be traced."""
        if not tracing.is_on() or not traceparent:
            return None
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        within = TraceContextTextMapPropagator().extract({tracing.TRACE_HEADER: traceparent})
        span = tracing.tracer().start_span("teleloader response", within, SpanKind.SERVER)
        return cls(within, span) if span.is_recording() else None

    def made(self, k: int, made: Made | None) -> None:
        """Record the spans of batch k: queue and computation, perhaps before it was requested.

        It is not known how a failure came to be that the server itself has put there.
        """
        if made is None:
            return
        attributes = {"teleloader.batch": k, "teleloader.worker": made.worker}
        make = tracing.tracer().start_span
        began = made.when - round(1e9 * made.report.seconds)
        if began > self._began:
            make("teleloader queue", self._inside, start_time=self._began, attributes=attributes).end(began)
        for stage, seconds in zip(STAGES, made.report.stages, strict=True):
            ended = began + round(1e9 * seconds)
            make(f"teleloader {stage.name}", self._inside, start_time=began, attributes=attributes).end(ended)
            began = ended

    def end(self) -> None:
        """All batches are ready, or the request is given up."""
        self._span.end()

    @contextmanager
    def sending(self, nbytes: int) -> Iterator[None]:
        """Meanwhile frames are handed to the connection."""
        with tracing.tracer().start_as_current_span(
            "teleloader send", self._within, attributes={"teleloader.bytes": nbytes}
        ):
            yield
