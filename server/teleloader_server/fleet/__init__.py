"""Fleets of servers: the registry that lists them, and the number of servers that their consumers need.

Start reading in `registry` (servers that have announced themselves) and `scaler`. Decisions only: endpoints belong to
`web`. Imports nothing of the server.
"""
