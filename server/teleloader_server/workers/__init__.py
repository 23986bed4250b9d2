"""Places where loading runs: worker processes, their fork server, or the server's own process.

May import `loading` and what lies below it. `pool` is the seam that the dispatcher knows; `factory` decides which pool
serves which loader. Start reading in `pool`, then `processes` (the server's side) and `worker` (the worker's side).
"""
