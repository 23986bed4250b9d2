"""Worker pools: worker processes with their fork server, or a thread of the server process.

Imports `loading` and the layers below it. `pool` is the interface that the dispatcher uses; `factory` selects the pool
of each loader. Entry points: `pool`, then `processes` (in the server) and `worker` (in the worker process).
"""
