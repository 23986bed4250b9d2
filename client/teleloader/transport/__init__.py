"""Transports: connections on which ranges of batches are requested and received without a copy.

May import `api` and `tensors`. Start reading in `interface`. To add a transport, implement `BatchServer` and
`Connection` in a module like `http`, make `selection.server_at` return it for its URLs, and permit their scheme in
`api.control`.
"""
