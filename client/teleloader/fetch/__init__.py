"""Fetching of the batches of one epoch: scheduling of requests over servers, and delivery in order.

May import `transport`, `api` and the layers below them. `scheduler` selects the next requests without I/O; a `fetcher`
per server sends them; `reorder` buffers received batches; `iteration` is the iterator of the training loop.
"""
