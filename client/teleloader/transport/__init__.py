"""Transports: connections on which ranges of batches are requested and received without a copy.

May import `api` and `tensors`. Start reading in `interface`. A further transport is a module like `http`, with a
`BatchServer` of its own, and a line in `selection`.
"""
