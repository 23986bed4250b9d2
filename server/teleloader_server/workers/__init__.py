"""Worker pools: worker processes with their fork server, or a thread of the server process.

The package imports only `loading` and the layers below it. `pool` is the interface that the dispatcher uses; `factory`
selects the pool of each loader. Start reading in `pool`, then in `processes` (server) and `worker` (worker process).
"""
