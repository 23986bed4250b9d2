"""JSON requests of a client to its servers, and the credentials for them.

May import `tensors`, `errors` and shared records. Start reading in `control`.
"""
