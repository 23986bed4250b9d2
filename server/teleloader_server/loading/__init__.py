"""From indices to bytes: fetch samples, collate them, encode the batch as a frame.

Runs in workers. May import only `config` and shared records: no processes, no web server, no asyncio.
Start reading in `pipeline`; `datasets` builds what a configuration names, `shards` iterates iterable-style datasets.
"""
