"""Scheduling of batches: their workers and order, the batches kept in memory, and the waiting requests.

May import `workers` and what lies below it. `dispatcher`, `store`, `records` and `quotas` decide without I/O, `engine`
carries out what they decide. Start reading in `service`: everything that the endpoints offer, without HTTP.
"""
