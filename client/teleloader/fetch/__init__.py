"""Receiving the batches of one epoch: what to request next, from which server, and in which order to deliver it.

May import `transport`, `api` and what lies below them. `scheduler` decides without I/O; a `fetcher` per server carries
its requests out; `reorder` holds what arrived; `iteration` is the iterator that the training loop sees.
"""
