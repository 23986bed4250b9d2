"""Loading of batches: fetch samples, collate them, and encode the batch as a frame.

The package runs in workers, and imports only `config` and shared modules: no processes, no web server, no asyncio.
Start reading in `pipeline`, which runs the `stages`. `datasets` constructs the configured datasets, `passes` and
`shards` iterate iterable-style datasets.
"""
