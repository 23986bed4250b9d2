"""Prometheus metrics of the loaders in a training process; requires ``pip install 'teleloader[metrics]'``.

Example:
    >>> from prometheus_client import REGISTRY, start_http_server  # doctest: +SKIP
    >>> from teleloader.metrics import LoaderCollector  # doctest: +SKIP
    >>> REGISTRY.register(LoaderCollector())  # doctest: +SKIP
    >>> start_http_server(9100)  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from teleloader.loader import live_loaders

_LABELS: Final = ("run", "dataset", "rank", "loader")
_COUNTERS: Final = {
    "elapsed": ("elapsed_seconds", "Time that the training loop spent in iterations over epochs."),
    "waited": ("data_wait_seconds", "Time for which the training loop waited for data."),
    "steps": ("steps", "Batches that the training loop received, including errors raised in their place."),
    "batches": ("batches_received", "Batches received from servers; a batch that was received twice counts twice."),
    "bytes_received": ("received_bytes", "Bytes received from servers."),
    "decode": ("decode_seconds", "Time to check and decode batches, in background threads."),
    "copy": ("copy_seconds", "Duration of the copies to the device."),
    "late_copies": ("late_copies", "Batches whose copy to the device started only while the training loop waited."),
    "reconnects": ("reconnects", "Connections that were reopened."),
    "hedges": ("hedges", "Batches that were also requested from a second server, because the first one was slow."),
    "errors": ("substituted_samples", "Samples that were skipped or replaced because of an exception."),
}
"""Metric names and descriptions by field of `Totals`."""


class LoaderCollector(Collector):
    """Prometheus collector of all `DataLoader` objects in this process.

    Counters are totals over all epochs of a loader. The metrics of a loader end with it. Metrics are computed when they
    are scraped, and cost nothing in the training loop.

    Each metric has the labels ``run`` (argument `name` of `DataLoader`), ``dataset``, ``rank``, and ``loader``, the
    number of the loader in its process.
    """

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all loaders."""
        found = []
        for number, loader in live_loaders():
            labels = [loader._run_name or "", loader._spec.dataset, str(loader._rank), str(number)]
            found.append((labels, loader._measures))
        totals = [(labels, measures.totals()) for labels, measures in found]
        for field, (name, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"teleloader_loader_{name}", text, labels=_LABELS)
            for labels, total in totals:
                counter.add_metric(labels, getattr(total, field))
            yield counter
        epoch = GaugeMetricFamily("teleloader_loader_epoch", "Number of the current epoch, from 0.", labels=_LABELS)
        position = GaugeMetricFamily(
            "teleloader_loader_position", "Number of the next batch of the current epoch, from 0.", labels=_LABELS
        )
        for labels, measures in found:
            if measures.epoch is not None:
                epoch.add_metric(labels, measures.epoch)
                position.add_metric(labels, measures.position)
        yield epoch
        yield position
