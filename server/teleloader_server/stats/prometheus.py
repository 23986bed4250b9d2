"""The records as Prometheus metrics. Nothing is counted for it: each scrape reads what ``/stats`` reads.

The number of series is bounded: by the datasets, the shared workers, the stages, and twenty types of errors for each
dataset. Consumers are no label, because they come and go; their diagnoses are counted instead. Nor
are workers of a session's own, which come and go with it: what they make is counted with their dataset.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Final, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from teleloader_server.dispatch.counters import DatasetCounters
from teleloader_shared.stats import Bottleneck, ServerStats, Stats

_GAUGES: Final = {
    "uptime": ("uptime_seconds", "Time since the server's start."),
    "cpus": ("processors", "Processors that the server may use."),
    "cpu": ("processors_busy", "Processors that server and workers use."),
    "memory_budget": ("memory_budget_bytes", "What encoded batches may take together."),
    "memory_used": ("memory_used_bytes", "What encoded batches take, ready or being written."),
    "memory_mapped": ("memory_mapped_bytes", "Shared memory mapped for large batches, used or free."),
    "memory_sending": ("memory_sending_bytes", "What answers take that are being sent."),
    "pss": ("memory_resident_bytes", "Memory of server and workers, shared pages counted once."),
    "event_loop_lag": ("event_loop_lag_seconds", "Recent mean time for which the event loop was late."),
    "connections": ("connections", "Open connections."),
    "draining": ("draining", "Whether the server is stopping: 1 or 0."),
}
"""By field of `ServerStats`."""
_OF_DATASETS: Final = {
    "computed": ("batches_computed", "Batches that workers finished, failures included."),
    "sent": ("batches_sent", "Batches that were sent to consumers."),
    "failed": ("batches_failed", "Batches in whose place an exception was sent."),
    "retried": ("batches_retried", "Times that a batch was begun again because its worker died."),
    "samples": ("samples_computed", "Samples in the batches that workers finished."),
    "nbytes": ("sent_bytes", "Bytes of the batches that were sent."),
    "waiting": ("waiting_seconds", "Time for which consumers waited for batches that were not ready."),
}
"""By attribute of `DatasetCounters`."""
_STATES: Final = ("starting", "idle", "busy")


def exposed(stats: Stats, counts: Mapping[str, DatasetCounters]) -> CollectorRegistry:
    """A registry of what is told now.

    Args:
        stats: The records.
        counts: What was counted of each dataset.
    """
    registry = CollectorRegistry()
    registry.register(_Now(stats, counts))
    return registry


class _Now(Collector):
    def __init__(self, stats: Stats, counts: Mapping[str, DatasetCounters]) -> None:
        self._stats = stats
        self._counts = {dataset.dataset: counts[dataset.dataset] for dataset in stats.datasets}
        self._datasets = stats.datasets

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        yield from _of_server(self._stats.server)
        yield from self._of_workers()
        yield from self._of_datasets()
        yield from self._of_consumers()

    def _of_workers(self) -> Iterator[Metric]:
        shared = [worker for worker in self._stats.workers if worker.loader is None]
        states = Counter(worker.state for worker in self._stats.workers)
        yield _gauge("workers", "Workers, those of sessions included.", "state", {s: states[s] for s in _STATES})
        number = {worker.worker: str(worker.worker) for worker in shared}
        for name, text, values in (
            ("worker_busy_seconds", "Time that a shared worker spent on finished batches.", [w.busy for w in shared]),
            ("worker_batches", "Batches that a shared worker finished.", [w.batches for w in shared]),
            ("worker_restarts", "How often a shared worker died.", [w.restarts for w in shared]),
            (
                "worker_recycles",
                "How often a shared worker was replaced because it was worn.",
                [w.recycled for w in shared],
            ),
        ):
            yield _counter(name, text, "worker", dict(zip(number.values(), values, strict=True)))
        yield _gauge(
            "worker_resident_bytes", "Memory of a shared worker, shared pages divided by those who share them.",
            "worker", {number[worker.worker]: worker.pss for worker in shared},
        )  # fmt: skip

    def _of_datasets(self) -> Iterator[Metric]:
        for attribute, (name, text) in _OF_DATASETS.items():
            values = {dataset: getattr(tally, attribute) for dataset, tally in self._counts.items()}
            yield _counter(name, text, "dataset", values)
        errors = CounterMetricFamily(
            "teleloader_errors", "Exceptions that stand for batches, by their type.", labels=["dataset", "type"]
        )
        stages = HistogramMetricFamily(
            "teleloader_stage_seconds", "Time that batches took in a worker, by stage.", labels=["dataset", "stage"]
        )
        for dataset in self._datasets:
            for error in dataset.errors:
                errors.add_metric([dataset.dataset, error.type], error.count)
            for stage, histogram in self._counts[dataset.dataset].stages.items():
                buckets, total = histogram.buckets()
                stages.add_metric([dataset.dataset, stage], [(_bound(bound), count) for bound, count in buckets], total)
        yield errors
        yield stages

    def _of_consumers(self) -> Iterator[Metric]:
        held = GaugeMetricFamily(
            "teleloader_consumers", "Consumers, by what holds them back.", labels=["dataset", "bottleneck"]
        )
        found = Counter((consumer.dataset, consumer.diagnosis.bottleneck) for consumer in self._stats.consumers)
        for dataset in self._counts:
            for bottleneck in get_args(Bottleneck):
                held.add_metric([dataset, bottleneck], found[dataset, bottleneck])
        yield held


def _bound(seconds: float) -> str:
    return "+Inf" if math.isinf(seconds) else f"{seconds:.6g}"


def _of_server(server: ServerStats) -> Iterator[Metric]:
    yield InfoMetricFamily("teleloader_build", "The server's version.", {"version": server.version})
    for field in fields(server):
        if field.name in _GAUGES:
            name, text = _GAUGES[field.name]
            yield GaugeMetricFamily(f"teleloader_{name}", text, getattr(server, field.name))


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(CounterMetricFamily(f"teleloader_{name}", text, labels=[label]), values)


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _filled(GaugeMetricFamily(f"teleloader_{name}", text, labels=[label]), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for labelled, value in values.items():
        family.add_metric([labelled], value)
    return family
