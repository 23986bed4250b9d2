"""Transports: connections on which ranges of batches are requested and received without a copy.

May import `api` and `tensors`. Start reading in `interface`. To add a transport, implement `BatchServer` and
`Connection` in a module like `http`, make `selection.server_at` return the `BatchServer` for the transport's URLs, and
permit the scheme of these URLs in `api.control`.
"""
