"""Statistics for ``/stats`` and Prometheus metrics, computed on request from the counters of `dispatch`.

Imports `dispatch` and the layers below it. Entry point: `collector`. `bottleneck` diagnoses the bottleneck of each
consumer, and `prometheus` exposes the statistics as metrics.
"""
