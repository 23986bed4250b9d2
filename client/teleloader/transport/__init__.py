"""Connections on which ranges of batches are requested and received without a copy.

May import `api` and `tensors`. Start reading in `base`; `http` is the transport over HTTP/1.1.
"""
