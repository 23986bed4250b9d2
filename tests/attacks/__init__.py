"""Attacks: by clients on a server, and by a server on clients."""
