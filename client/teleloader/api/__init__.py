"""Control requests to servers (JSON over HTTP), credentials and retries.

May import `tensors`, `errors` and shared records. Start reading in `control`.
"""
