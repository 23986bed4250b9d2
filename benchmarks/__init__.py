"""Benchmarks of teleloader against plain sockets and torch's DataLoader on the same machine."""
