"""Tracing of requests in the client: a span for each request, with spans for receiving and decoding.

The request carries the context of its span, so that the server's spans are its children.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from teleloader.transport.range import Range
from teleloader_shared import tracing

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span


class IterationTrace:
    """Spans of one iteration, as children of the span that was current at its ``iter()``.

    Args:
        key: Key of the loader.
        epoch: Number of the epoch.
    """

    def __init__(self, key: str, epoch: int) -> None:
        from opentelemetry import context

        self._within: Context = context.get_current()
        self._attributes: dict[str, str | int] = {"teleloader.loader": key, "teleloader.epoch": epoch}

    def start(self, wanted: Range) -> RequestTrace:
        """Start the span of a request."""
        from opentelemetry.trace import SpanKind

        attributes = self._attributes | {"teleloader.start": wanted.start, "teleloader.stop": wanted.stop}
        return RequestTrace(
            tracing.tracer().start_span("teleloader request", self._within, SpanKind.CLIENT, attributes=attributes)
        )


class RequestTrace:
    """Span of one request."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def headers(self) -> dict[str, str]:
        """Headers that carry the context of the span."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, trace.set_span_in_context(self._span))
        return headers

    def arrived(self, first_byte: int, last_byte: int, frames: int, nbytes: int) -> None:
        """End the span after the response was received and decoded.

        Args:
            first_byte: Arrival of the first byte, as ``time.time_ns()``.
            last_byte: Arrival of the last byte.
            frames: Batches in the response.
            nbytes: Size of the response in bytes.
        """
        from opentelemetry import trace

        within = trace.set_span_in_context(self._span)
        self._span.set_attributes({"teleloader.batches": frames, "teleloader.bytes": nbytes})
        make = tracing.tracer().start_span
        make("teleloader receive", within, start_time=first_byte).end(last_byte)
        make("teleloader decode", within, start_time=last_byte).end()
        self._span.end()

    def broke(self, error: Exception) -> None:
        """End the span with an error, unless it has ended."""
        from opentelemetry.trace import Status, StatusCode

        if self._span.is_recording():
            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
            self._span.end(time.time_ns())
