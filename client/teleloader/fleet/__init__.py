"""Servers that join and leave while training runs.

Start reading in `servers`, which keeps the servers of a dataset equal to those that a `directory` lists. `membership`
decides which servers a client knows, and `trust` which of them it may use: both are pure. Imports `transport` and
`errors`.
"""
