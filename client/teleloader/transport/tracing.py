"""OpenTelemetry spans for batch requests of the client, with child spans for receiving and decoding.

Each request carries the context of its span, so that the server's spans become its children.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from teleloader.transport.request import BatchRequest
from teleloader_shared import tracing

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span


class IterationTrace:
    """Factory of the request spans of one iteration; their parent is the span that was current at ``iter()``.

    Args:
        key: Key of the loader.
        epoch: Epoch number.
    """

    def __init__(self, key: str, epoch: int) -> None:
        from opentelemetry import context

        self._within: Context = context.get_current()
        self._attributes: dict[str, str | int] = {"teleloader.loader": key, "teleloader.epoch": epoch}

    def start(self, wanted: BatchRequest) -> RequestTrace:
        """Start the span of a batch request."""
        from opentelemetry.trace import SpanKind

        batches = wanted.batches
        attributes = self._attributes | {"teleloader.start": batches.start, "teleloader.stop": batches.stop}
        return RequestTrace(
            tracing.tracer().start_span("teleloader request", self._within, SpanKind.CLIENT, attributes=attributes)
        )


class RequestTrace:
    """OpenTelemetry span of one batch request."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that propagate the span's context to the server."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, trace.set_span_in_context(self._span))
        return headers

    def arrived(self, first_byte: int, last_byte: int, frames: int, nbytes: int) -> None:
        """End the span after a response was received and decoded.

        Args:
            first_byte: Arrival time of the first byte, as ``time.time_ns()``.
            last_byte: Arrival time of the last byte, as ``time.time_ns()``.
            frames: Number of batches in the response.
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
        """End the span, unless it has ended, and record the cause of `error`, such as a ConnectionResetError."""
        from opentelemetry.trace import Status, StatusCode

        if self._span.is_recording():
            self._span.record_exception(error.__cause__ or error)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
            self._span.end(time.time_ns())
