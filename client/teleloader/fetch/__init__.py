"""Requests for the batches of one epoch, their distribution over servers, and delivery in order.

May import `transport`, `api` and the layers below them. `scheduler` selects the next requests without I/O; a `fetcher`
per server sends them; `reorder` stores received batches; `iteration` is the iterator of the training loop.
"""
