"""Server of a peer: ``python -m benchmarks.peers NAME ARGUMENT...``, started by the peer's contender."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks.peers import flight, tf_data

SERVERS: dict[str, Callable[..., None]] = {"flight": flight.serve, "tf_data": tf_data.serve}

if __name__ == "__main__":
    SERVERS[sys.argv[1]](*sys.argv[2:])
