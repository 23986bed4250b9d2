"""Whether to trace: OpenTelemetry's spans are made where the process has loaded its SDK, elsewhere nothing is done.

Run trainer and server under ``opentelemetry-instrument``, or set a tracer provider before the first iteration.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from teleloader_shared.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

TRACE_HEADER: Final = "traceparent"
"""Carries a trace from client to server, as W3C Trace Context says."""


def is_on() -> bool:
    """Whether spans go anywhere."""
    return "opentelemetry.sdk.trace" in sys.modules


def tracer() -> Tracer:
    """What makes spans, where it is on."""
    from opentelemetry import trace

    return trace.get_tracer("teleloader", VERSION)
