"""Scheduling of batches: assignment to workers, caching of frames, and delivery to waiting requests.

The package imports only `workers` and the layers below it. `dispatcher`, `store`, `records` and `quotas` make decisions
without I/O, and `engine` executes them. Start reading in `service`, which implements all endpoints without HTTP.
"""
