"""OpenTelemetry tracing, active only if the process has loaded the OpenTelemetry SDK.

Run the training process and the server under ``opentelemetry-instrument``, or set a tracer provider before the first
iteration.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from teleloader_shared.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

TRACE_HEADER: Final = "traceparent"
"""Propagates the trace context from client to server (W3C Trace Context)."""


def is_on() -> bool:
    """Return True if the OpenTelemetry SDK is loaded in this process."""
    return "opentelemetry.sdk.trace" in sys.modules


def tracer() -> Tracer:
    """Return teleloader's OpenTelemetry tracer; requires `is_on()`."""
    from opentelemetry import trace

    return trace.get_tracer("teleloader", VERSION)
