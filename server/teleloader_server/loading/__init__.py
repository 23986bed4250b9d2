"""From indices to bytes: fetch samples, collate them, encode the batch as a frame.

Runs in workers. May import only `config` and shared records: no processes, no web server, no asyncio.
Start reading in `pipeline`, which runs the `stages`; `datasets` builds the configured datasets, `passes` and `shards`
iterate those of iterable style.
"""
