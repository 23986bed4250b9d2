"""OpenTelemetry spans for the server side of a request: queue, fetch, collate, encode and send.

Workers create no spans: the stage times that they report for each batch suffice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from teleloader_server.loading.stages import STAGES
from teleloader_shared import tracing

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span


class Made(NamedTuple):
    """Completion time, worker and stage times of a computed batch, for the spans of the batch."""

    when: int
    """Time at which the batch was reported, from ``time.time_ns()``: up to 5 ms after the end of its computation."""
    worker: int
    stages: Sequence[float]
    """Time of each stage in seconds."""


class RequestTrace:
    """OpenTelemetry spans of one request.

    Args:
        within: Context of the client's span.
        span: Server span of the request; it ends when the stream of the request's batches is closed.
    """

    def __init__(self, within: Context, span: Span) -> None:
        from opentelemetry import trace

        self._within = within
        self._span = span
        self._inside = trace.set_span_in_context(span)
        self._began = time.time_ns()

    @classmethod
    def begin(cls, traceparent: str) -> RequestTrace | None:
        """Start the server span of a request from its ``traceparent`` header.

        Returns:
            The trace, or None if tracing is off, or the request is not traced or not sampled.
        """
        if not tracing.is_on() or not traceparent:
            return None
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        within = TraceContextTextMapPropagator().extract({tracing.TRACE_HEADER: traceparent})
        span = tracing.tracer().start_span("teleloader response", within, SpanKind.SERVER)
        return cls(within, span) if span.is_recording() else None

    def made(self, k: int, made: Made | None) -> None:
        """Record spans of batch k: its time in the queue, and each stage.

        Stages of a prefetched or shared batch may have started before the request. Does nothing if `made` is None, as
        for failures that the server created itself.
        """
        if made is None:
            return
        attributes = {"teleloader.batch": k, "teleloader.worker": made.worker}
        make = tracing.tracer().start_span
        began = made.when - round(1e9 * sum(made.stages))
        if began > self._began:
            make("teleloader queue", self._inside, start_time=self._began, attributes=attributes).end(began)
        for stage, seconds in zip(STAGES, made.stages, strict=True):
            ended = began + round(1e9 * seconds)
            make(f"teleloader {stage.name}", self._inside, start_time=began, attributes=attributes).end(ended)
            began = ended

    def end(self) -> None:
        """End the server span, when the stream of the request's batches is closed."""
        self._span.end()

    @contextmanager
    def sending(self, nbytes: int) -> Iterator[None]:
        """Context manager that records a span for sending frames."""
        with tracing.tracer().start_as_current_span(
            "teleloader send", self._within, attributes={"teleloader.bytes": nbytes}
        ):
            yield
