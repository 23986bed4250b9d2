"""Prometheus metrics, computed from the statistics of ``/stats`` at each scrape.

The number of series is bounded by the datasets, the shared workers, the stages, twenty types of errors per dataset, the
tokens since the start, and the codes of error responses.
Consumers and private workers have no label, because they are short-lived: consumers are counted by diagnosis, and
batches of private workers count for their dataset.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Final, NamedTuple, get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from teleloader_server.dispatch.counters import DatasetCounters
from teleloader_server.stats.requests import HttpCounters
from teleloader_shared.histogram import Histogram
from teleloader_shared.stats import Bottleneck, ServerStats, Stats

_GAUGES: Final = {
    "cpus": ("processors", "CPUs available to the server."),
    "memory_budget": ("memory_budget_bytes", "Memory budget of computed batches."),
    "memory_used": ("memory_used_bytes", "Memory of computed batches, and estimated memory of batches in progress."),
    "memory_mapped": ("memory_mapped_bytes", "Shared memory mapped for large batches, both used and free."),
    "memory_sending": ("memory_sending_bytes", "Memory of responses in transit."),
    "memory_lent": ("memory_lent_bytes", "Shared memory lent to clients on the same machine."),
    "pss": ("memory_pss_bytes", "Proportional set size of the server and its workers: shared pages count once."),
    "connections": ("connections", "Open connections."),
    "draining": ("draining", "Equal to 1 while the server is shutting down, else 0."),
    "load": ("load", "Recent mean number of workers that compute or are blocked, without those that have no CPU."),
    "demand": ("demand", "Workers that the training loops would keep busy if they never waited for data."),
    "demand_unmeasured": ("demand_unmeasured", "Part of the demand of training loops whose step time is unknown."),
    "saturated": ("saturated", "Equal to 1 if the CPUs that the server may use are full, else 0."),
}
"""Metric names and descriptions by field of `ServerStats`."""
_OF_DATASETS: Final = {
    "computed": ("batches_computed", "Computed batches, including failed batches."),
    "sent": ("batches_sent", "Batches sent to consumers."),
    "failed": ("batches_failed", "Batches replaced by an exception."),
    "retried": ("batches_retried", "Batches recomputed because their worker exited."),
    "samples": ("samples_computed", "Samples in computed batches."),
    "substituted": ("samples_substituted", "Samples skipped or replaced because of an exception."),
    "slow_samples": ("samples_slow", "Samples that took unusually long."),
    "early": ("batches_early", "Batches started before others because they contain slow samples."),
    "backups": ("batches_backed_up", "Batches computed by a second worker because the first one took unusually long."),
    "cache_hits": ("cache_hits", "Samples read from a CachedDataset."),
    "cache_misses": ("cache_misses", "Samples computed because a CachedDataset did not contain them."),
    "cache_saved": ("cache_saved_seconds", "Worker time saved by reading samples from a CachedDataset."),
    "tokens": ("tokens", "Sum of the lengths of the samples in computed batches."),
    "tokens_padded": ("tokens_padded", "Sum of (samples x longest sample), or size of packed sequences."),
    "nbytes": ("sent_bytes", "Bytes of sent batches."),
    "reconnects": ("client_reconnects", "Reconnects that clients report, each to all its servers: use max, not sum."),
    "hedges": ("client_hedges", "Hedged batches that clients report, each to all its servers: use max, not sum."),
    "waiting": ("waiting_seconds", "Time during which consumers waited for batches that were not ready."),
}
"""Metric names and descriptions by attribute of `DatasetCounters`."""
_OF_WORKERS: Final = {
    "busy": ("worker_busy_seconds", "Time that a shared worker spent on computed batches."),
    "batches": ("worker_batches", "Batches that a shared worker computed."),
    "restarts": ("worker_restarts", "Unexpected exits of a shared worker."),
    "recycled": ("worker_recycles", "Planned replacements of a shared worker."),
}
"""Metric names and descriptions by field of `WorkerStats`."""
_OF_TOKENS: Final = {
    "batches_sent": ("token_batches_sent", "Batches sent to clients with a token."),
    "bytes_sent": ("token_sent_bytes", "Bytes of batches sent to clients with a token."),
    "worker_seconds": ("token_worker_seconds", "Time of workers for batches that were started for a token."),
    "cpu_seconds": ("token_worker_cpu_seconds", "CPU time of workers for batches that were started for a token."),
}
"""Metric names and descriptions by field of `TokenStats`."""
_STATES: Final = ("starting", "idle", "busy")


class Sources(NamedTuple):
    """Values of metrics that are not part of ``/stats``."""

    datasets: Mapping[str, DatasetCounters]
    """Counters by dataset name."""
    http: HttpCounters
    lag: Histogram
    """Delays of the event loop's timer, in seconds."""
    cpu_seconds: Mapping[str, float]
    """Total CPU time by process."""
    token_expiry: Mapping[str, float]
    """Expiry by name of the token, in seconds since 1970; only of tokens that expire."""
    certificate_expiry: float | None
    """Expiry of the TLS certificate in use, in seconds since 1970; None without TLS."""


def exposed(stats: Stats, sources: Sources) -> CollectorRegistry:
    """Create a Prometheus registry that contains the current metrics.

    Args:
        stats: Statistics of ``/stats``.
        sources: Values that are not part of the statistics.
    """
    registry = CollectorRegistry()
    registry.register(_Now(stats, sources))
    ProcessCollector(registry=registry)
    return registry


class _Now(Collector):
    def __init__(self, stats: Stats, sources: Sources) -> None:
        self._stats = stats
        self._sources = sources
        self._counts = {dataset.dataset: sources.datasets[dataset.dataset] for dataset in stats.datasets}

    def collect(self) -> Iterator[Metric]:
        """Yield all Prometheus metrics of the server."""
        yield from _of_server(self._stats.server)
        yield from self._of_workers()
        yield from self._of_datasets()
        yield from self._of_consumers()
        yield from self._of_tokens()
        yield from self._of_process()
        yield from _of_requests(self._sources.http)
        yield from _of_access(self._sources)

    def _of_workers(self) -> Iterator[Metric]:
        shared = {str(worker.worker): worker for worker in self._stats.workers if worker.loader is None}
        states = Counter(worker.state for worker in self._stats.workers)
        by_state = {state: states[state] for state in _STATES}
        yield _gauge("workers", "Worker processes, including private workers, by state.", "state", by_state)
        for field, (name, text) in _OF_WORKERS.items():
            yield _counter(name, text, "worker", {number: getattr(found, field) for number, found in shared.items()})
        memory = {number: found.pss for number, found in shared.items()}
        yield _gauge("worker_pss_bytes", "Proportional set size of a shared worker.", "worker", memory)

    def _of_datasets(self) -> Iterator[Metric]:
        for attribute, (name, text) in _OF_DATASETS.items():
            values = {dataset: getattr(tally, attribute) for dataset, tally in self._counts.items()}
            yield _counter(name, text, "dataset", values)
        errors = CounterMetricFamily(
            "teleloader_errors", "Batches replaced by an exception, by exception type.", labels=["dataset", "type"]
        )
        stages = HistogramMetricFamily(
            "teleloader_stage_seconds", "Computing time per batch, by stage.", labels=["dataset", "stage"]
        )
        for dataset in self._stats.datasets:
            for error in dataset.errors:
                errors.add_metric([dataset.dataset, error.type], error.count)
            for stage, histogram in self._counts[dataset.dataset].stages.items():
                _add(stages, [dataset.dataset, stage], histogram)
        yield errors
        yield stages
        versions = {found.dataset: len(found.versions) for found in self._stats.datasets if found.versions}
        if versions:
            yield _gauge("dataset_versions", "Versions of a dataset that loaders can use.", "dataset", versions)

    def _of_consumers(self) -> Iterator[Metric]:
        held = GaugeMetricFamily(
            "teleloader_consumers",
            "Consumers by bottleneck, without those that have finished their epoch.",
            labels=["dataset", "bottleneck"],
        )
        active = [consumer for consumer in self._stats.consumers if not consumer.finished]
        found = Counter((consumer.dataset, consumer.diagnosis.bottleneck) for consumer in active)
        for dataset in self._counts:
            for bottleneck in get_args(Bottleneck):
                held.add_metric([dataset, bottleneck], found[dataset, bottleneck])
        yield held

    def _of_tokens(self) -> Iterator[Metric]:
        for field, (name, text) in _OF_TOKENS.items():
            yield _counter(name, text, "token", {used.token: getattr(used, field) for used in self._stats.tokens})

    def _of_process(self) -> Iterator[Metric]:
        text = "CPU time of the server process, and of its workers with their fork server."
        yield _counter("cpu_seconds", text, "process", self._sources.cpu_seconds)
        lag = HistogramMetricFamily("teleloader_event_loop_lag_seconds", "Delay of the event loop's timers.")
        _add(lag, [], self._sources.lag)
        yield lag


def _of_requests(http: HttpCounters) -> Iterator[Metric]:
    durations = HistogramMetricFamily(
        "teleloader_http_request_duration_seconds",
        "Time from the headers of a request to the end of its response. Requests for batches wait for the batches.",
        labels=["handler"],
    )
    for handler, histogram in http.durations().items():
        _add(durations, [handler], histogram)
    yield durations
    responses = CounterMetricFamily(
        "teleloader_http_responses", "HTTP responses by status code.", labels=["handler", "code"]
    )
    for (handler, status), count in http.responses().items():
        responses.add_metric([handler, str(status)], count)
    yield responses
    yield _counter("refusals", "Error responses by the code in their body.", "reason", http.refusals)
    yield _counter("connections_closed", "Connections closed because of a limit.", "reason", http.closed)


def _of_access(sources: Sources) -> Iterator[Metric]:
    text = "Expiry of a token, in seconds since 1970. Tokens that never expire are omitted."
    yield _gauge("token_expiry_timestamp_seconds", text, "token", sources.token_expiry)
    text = "Expiry of the TLS certificate in use, in seconds since 1970; omitted without TLS."
    yield GaugeMetricFamily("teleloader_certificate_expiry_timestamp_seconds", text, sources.certificate_expiry)


def _add(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    buckets, total = histogram.buckets()
    family.add_metric(labels, [(_bound(bound), count) for bound, count in buckets], total)


def _bound(seconds: float) -> str:
    return "+Inf" if math.isinf(seconds) else f"{seconds:.6g}"


def _of_server(server: ServerStats) -> Iterator[Metric]:
    yield InfoMetricFamily("teleloader_build", "Version of the server.", {"version": server.version})
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
