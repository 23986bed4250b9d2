"""Fetching of the batches of one epoch: scheduling of requests over servers, and delivery in order.

May import `transport`, `api` and the layers below them. Start reading in `iteration`, the iterator of the training
loop. `scheduler` selects the next requests without I/O, from the batches that `assignment` divides among servers; a
`fetcher` per server sends them; `reorder` buffers received batches.
"""
