"""Traces of a batch's life with OpenTelemetry's SDK; without it, nothing of it is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

from teleloader_server.loading.stages import STAGES
from tests.conftest import need

TRACED = """
import json
import numpy as np
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import {sampler}

exporter = InMemorySpanExporter()
provider = TracerProvider(sampler={sampler})
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve

with serve([np.full(1000, number) for number in range(12)], num_workers=1) as url:
    loader = DataLoader(RemoteDataset(url), 2, seed=0, output="numpy")
    with trace.get_tracer("training").start_as_current_span("epoch"):
        assert len(list(loader)) == 6
provider.shutdown()
print(json.dumps([
    {{
        "name": span.name, "trace": span.context.trace_id, "id": span.context.span_id,
        "parent": span.parent and span.parent.span_id, "began": span.start_time, "ended": span.end_time,
        **span.attributes,
    }}
    for span in exporter.get_finished_spans()
]))
"""


def spans(sampler: str) -> list[dict[str, Any]]:
    """Return the spans of six batches, from a separate process, because loading the SDK enables tracing."""
    need("opentelemetry.sdk")
    command = [sys.executable, "-W", "error", "-c", TRACED.format(sampler=sampler)]
    done = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    # FastAPI creates further spans
    return [span for span in found if span["name"] == "epoch" or span["name"].startswith("teleloader ")]


def test_a_batchs_life_is_one_trace() -> None:
    """One trace has the loop's span, the client's request and each stage in the worker."""
    found = spans("ALWAYS_ON")
    by_id = {span["id"]: span for span in found}
    assert len({span["trace"] for span in found}) == 1
    parents = {(span["name"], None if span["parent"] is None else by_id[span["parent"]]["name"]) for span in found} - {
        ("teleloader queue", "teleloader response")
    }  # no queue span if a worker was idle
    assert parents == {
        ("epoch", None),
        ("teleloader request", "epoch"),
        ("teleloader receive", "teleloader request"),
        ("teleloader decode", "teleloader request"),
        ("teleloader response", "teleloader request"),
        ("teleloader send", "teleloader request"),
        *((f"teleloader {stage.name}", "teleloader response") for stage in STAGES),
    }
    counts = Counter(span["name"] for span in found)
    assert counts["teleloader fetch"] == counts["teleloader encode"] == 6
    assert {span["teleloader.batch"] for span in found if span["name"] == "teleloader fetch"} == set(range(6))
    assert sum(span.get("teleloader.batches", 0) for span in found) == 6
    assert all(span["began"] <= span["ended"] for span in found)


def test_what_is_not_sampled_costs_no_spans() -> None:
    """The client's sampling decision is sent with its request."""
    assert spans("ALWAYS_OFF") == []


def test_without_the_sdk_nothing_is_loaded() -> None:
    """Neither side imports OpenTelemetry; FastAPI imports its API if that is installed."""
    program = """
import sys, numpy as np
from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
with serve([np.zeros(3)] * 4, num_workers=1) as url:
    list(DataLoader(RemoteDataset(url), 2, seed=0, output="numpy"))
print("opentelemetry.sdk" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, text=True, stdout=subprocess.PIPE)
    assert done.stdout == "False\n"
