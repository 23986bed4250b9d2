"""Records of ``/stats`` and metrics, derived from the counters of `dispatch` when they are requested.

May import `dispatch` and what lies below it. Start reading in `collector`; `bottleneck` diagnoses
consumers, `prometheus` exposes the records as metrics.
"""
