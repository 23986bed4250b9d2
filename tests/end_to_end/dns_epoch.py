"""Program that iterates an epoch on the servers of a DNS name; run it in new mount and network namespaces.

The name has two IP addresses at first. In the middle of the epoch a third one is added, and the first server stops
while the DNS server still lists it. Prints as JSON: True if the order is that of one server, the batches computed by
each server, and the exit code of the server that stopped.
"""

from __future__ import annotations

import json
import signal
import sys
import time

from teleloader import DataLoader, RemoteDataset
from tests.client.dns_namespace import Responder, start_loopback, use_own_dns_server
from tests.conftest import ServerProcess, eventually
from tests.end_to_end.test_several_servers import computed

PORT = "8000"


def started(address: str) -> ServerProcess:
    """Start a server at an IP address, as a pod."""
    return ServerProcess("data=tests.end_to_end.hosted:many", "--num-workers", "1", "--host", address, "--port", PORT)


def main() -> None:
    """Print the result."""
    start_loopback()
    use_own_dns_server()
    responder = Responder()
    responder.addresses = ["127.0.0.2", "127.0.0.3"]
    responder.start()
    servers = [started(address) for address in responder.addresses]
    try:
        loader = DataLoader(RemoteDataset(f"dns+http://loaders.test:{PORT}", "data"), 20, shuffle=True, seed=5,
                            output="numpy")  # fmt: skip
        batches = iter(loader)
        received = [next(batches).tolist() for _ in range(200)]
        counts = [eventually(lambda server=server: computed(server)) for server in servers]  # type: ignore[misc]
        servers.append(started("127.0.0.4"))
        responder.addresses.append("127.0.0.4")
        servers[0].process.send_signal(signal.SIGTERM)
        for batch in batches:
            received.append(batch.tolist())
            time.sleep(0.002)
        counts[1:] = map(computed, servers[1:])
        same = received == [indices.tolist() for indices in loader.plan(0)]
        json.dump([same, counts, servers[0].process.wait(30)], sys.stdout)
    finally:
        for server in servers:
            server.end(signal.SIGKILL)


if __name__ == "__main__":
    main()
