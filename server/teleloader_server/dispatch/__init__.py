"""Which worker computes which batch next, which batches are kept, and which requests wait for them.

May import `workers` and what lies below it. `dispatcher`, `store`, `records` and `quotas` decide without I/O, `engine`
carries out what they decide. Start reading in `service`: everything that the endpoints offer, without HTTP.
"""
