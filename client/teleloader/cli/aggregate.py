"""Aggregation of the statistics of several servers. No I/O.

Counts, sizes and rates are added. Means are weighted by the number of their values. Quantiles cannot be computed from
those of parts: their weighted mean is shown, which lies between the lowest and the highest of the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from teleloader_shared.lengths import padding_fraction
from teleloader_shared.stats import (
    ConsumerStats,
    DatasetStats,
    Diagnosis,
    ErrorCount,
    Latency,
    ServerStats,
    Stats,
    TokenStats,
)

UNEXPLAINED: Final = ("unknown", "idle", "finished")
"""Bottlenecks of servers that do not explain the data wait of a training run."""
MAX_SLOWEST: Final = 5
"""Number of the slowest batches of a dataset, as for a single server."""

_Item = TypeVar("_Item")
_Number = TypeVar("_Number", int, float)


def merged(servers: Sequence[Stats]) -> Stats:
    """Return the statistics of all servers together.

    Adds the parts of each consumer, and of each dataset with the same name, kind and length. Workers are listed one
    server after another.

    Args:
        servers: Statistics of at least one server.
    """
    consumers = _grouped(
        (consumer for server in servers for consumer in server.consumers),
        lambda found: (found.consumer, found.token, found.dataset, found.loader, found.epoch),
    )
    datasets = _grouped(
        (dataset for server in servers for dataset in server.datasets),
        lambda found: (found.dataset, found.kind, found.length),
    )
    tokens = (token for server in servers for token in server.tokens)
    omitted = [server.consumers_total - len(server.consumers) for server in servers]
    return Stats(
        server=_of_servers([server.server for server in servers]),
        datasets=[_of_datasets(found) for found in datasets],
        workers=[worker for server in servers for worker in server.workers],
        consumers=sorted(map(_of_consumers, consumers), key=lambda found: found.idle),
        consumers_total=len(consumers) + max(omitted),  # those that are omitted here may be listed by another server
        tokens=[_of_tokens(found) for found in _grouped(tokens, lambda found: (found.token,))],
    )


def _of_tokens(tokens: Sequence[TokenStats]) -> TokenStats:
    return TokenStats(
        tokens[0].token,
        sum(token.batches_sent for token in tokens),
        sum(token.bytes_sent for token in tokens),
        sum(token.worker_seconds for token in tokens),
        sum(token.cpu_seconds for token in tokens),
    )


def _of_servers(servers: Sequence[ServerStats]) -> ServerStats:
    saturated = [server.saturated for server in servers if server.saturated is not None]
    return ServerStats(
        version=_names(server.version for server in servers),
        host=_names(server.host for server in servers),
        pid=servers[0].pid if len(servers) == 1 else 0,
        uptime=min(server.uptime for server in servers),
        cpus=sum({server.host: server.cpus for server in servers}.values()),
        cpu=sum(server.cpu for server in servers),
        num_workers=sum(server.num_workers for server in servers),
        memory_budget=sum(server.memory_budget for server in servers),
        memory_used=sum(server.memory_used for server in servers),
        memory_mapped=sum(server.memory_mapped for server in servers),
        memory_sending=sum(server.memory_sending for server in servers),
        pss=sum(server.pss for server in servers),
        event_loop_lag=max(server.event_loop_lag for server in servers),
        connections=sum(server.connections for server in servers),
        worker_restarts=sum(server.worker_restarts for server in servers),
        batches_per_second=sum(server.batches_per_second for server in servers),
        bytes_per_second=sum(server.bytes_per_second for server in servers),
        draining=all(server.draining for server in servers),
        load=_sum(server.load for server in servers),
        demand=_sum(server.demand for server in servers),
        demand_unmeasured=_sum(server.demand_unmeasured for server in servers),
        saturated=any(saturated) if saturated else None,
        memory_lent=_sum(server.memory_lent for server in servers),
    )


def _of_datasets(parts: Sequence[DatasetStats]) -> DatasetStats:
    slowest = sorted((slow for part in parts for slow in part.slowest), key=lambda slow: slow.seconds, reverse=True)
    errors = _grouped((error for part in parts for error in part.errors), lambda error: error.type)
    stages = dict.fromkeys(stage for part in parts for stage in part.stages)
    return replace(
        parts[0],
        batches_computed=sum(part.batches_computed for part in parts),
        batches_sent=sum(part.batches_sent for part in parts),
        batches_failed=sum(part.batches_failed for part in parts),
        batches_retried=sum(part.batches_retried for part in parts),
        samples_computed=sum(part.samples_computed for part in parts),
        samples_per_second=sum(part.samples_per_second for part in parts),
        stages={
            stage: _of_latencies([part.stages[stage] for part in parts if stage in part.stages]) for stage in stages
        },
        slowest=slowest[:MAX_SLOWEST],
        errors=sorted(map(_of_errors, errors), key=lambda error: error.age),
        samples_substituted=sum(part.samples_substituted for part in parts),
        cache_hits=sum(part.cache_hits for part in parts),
        cache_misses=sum(part.cache_misses for part in parts),
        cache_saved=sum(part.cache_saved for part in parts),
        samples_slow=sum(part.samples_slow for part in parts),
        batches_early=sum(part.batches_early for part in parts),
        batches_backed_up=sum(part.batches_backed_up for part in parts),
        tokens=(tokens := sum(part.tokens for part in parts)),
        tokens_padded=(padded := sum(part.tokens_padded for part in parts)),
        padding_fraction=padding_fraction(tokens, padded),
    )


def _of_latencies(parts: Sequence[Latency]) -> Latency:
    counts = [part.count for part in parts]
    return Latency(
        count=sum(counts),
        mean=_mean([part.mean for part in parts], counts),
        p50=_mean([part.p50 for part in parts], counts),
        p95=_mean([part.p95 for part in parts], counts),
        p99=_mean([part.p99 for part in parts], counts),
        max=max(part.max for part in parts),
    )


def _of_errors(parts: Sequence[ErrorCount]) -> ErrorCount:
    return replace(min(parts, key=lambda part: part.age), count=sum(part.count for part in parts))


def _of_consumers(parts: Sequence[ConsumerStats]) -> ConsumerStats:
    """Return a consumer whose batches several servers send.

    A client reports the batches that the training loop consumed, from all servers, to each server.
    """
    rates = [part.bytes_per_second for part in parts]
    latest = min(parts, key=lambda part: part.idle)
    finished = any(part.finished for part in parts) if latest.finished is not None else None
    reported = [part.batches_per_second for part in parts if part.finished is not None]
    return replace(
        latest,
        position=max(part.position for part in parts),
        batches_sent=sum(part.batches_sent for part in parts),
        bytes_sent=sum(part.bytes_sent for part in parts),
        batches_lent=_sum(part.batches_lent for part in parts),
        batches_per_second=max(reported) if reported else sum(part.batches_per_second for part in parts),
        bytes_per_second=sum(rates),
        waiting=max(part.waiting for part in parts),
        starved_fraction=_mean([part.starved_fraction for part in parts], rates),
        sending_fraction=_mean([part.sending_fraction for part in parts], rates),
        diagnosis=latest.diagnosis if finished else diagnosis_of(parts),
        finished=finished,
    )


def diagnosis_of(parts: Sequence[ConsumerStats]) -> Diagnosis:
    """Return the diagnosis of a training run, given its diagnoses by several servers.

    Each server explains the part of the data wait for its own batches, and is the more certain, the larger this part
    is. Servers that explain nothing count only if none explains anything. Of equally certain servers, the one that
    sends the most bytes counts.
    """
    waits = [part for part in parts if part.diagnosis.bottleneck not in UNEXPLAINED]
    return max(waits or parts, key=lambda part: (part.diagnosis.confidence, part.bytes_per_second)).diagnosis


def _grouped(items: Iterable[_Item], key: Callable[[_Item], object]) -> list[list[_Item]]:
    """Return lists of items with equal keys, in the order of their first items."""
    groups: dict[object, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean; the plain mean if all weights are 0."""
    total = sum(weights)
    if total <= 0:
        return sum(values) / len(values)
    mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / total
    return min(max(values), max(min(values), mean))  # without errors of rounding


def _sum(values: Iterable[_Number | None]) -> _Number | None:
    """Return the sum of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None


def _names(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
