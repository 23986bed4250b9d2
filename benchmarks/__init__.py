"""Measures teleloader against the limits: plain sockets, and torch's DataLoader on the same machine."""
