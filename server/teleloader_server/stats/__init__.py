"""Statistics for ``/stats`` and Prometheus metrics, computed on request from the counters of `dispatch`.

The package imports only `dispatch` and the layers below it. Start reading in `collector`. `bottleneck` diagnoses the
bottleneck of each consumer, and `prometheus` exposes the statistics as metrics.
"""
