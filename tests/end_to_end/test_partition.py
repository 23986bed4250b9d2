"""Partition of a network: half of the servers, in another network namespace, cannot be reached for a while."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader.dataset import DEFAULT_STALL_TIMEOUT
from tests.conftest import ServerProcess, eventually

TARGET = "tests.end_to_end.hosted:unhurried"


def ip(*arguments: str) -> None:
    """Run the program ``ip``."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Namespace:
    """Network namespace that a pair of virtual interfaces connects with that of the test."""

    def __init__(self, number: int) -> None:
        self.name = f"teleloader-{os.getpid()}-{number}"
        self.address = f"10.213.{number}.2"
        self._interface = f"tl{os.getpid()}-{number}"
        ip("netns", "add", self.name)
        ip("link", "add", self._interface, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("address", "add", f"10.213.{number}.1/24", "dev", self._interface)
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.name, "link", "set", "eth0", "up")
        self.connect()

    def connect(self) -> None:
        """Transmit packets."""
        ip("link", "set", self._interface, "up")

    def disconnect(self) -> None:
        """Drop all packets."""
        ip("link", "set", self._interface, "down")

    def start_server(self) -> ServerProcess:
        """Start a server in the namespace."""
        arguments = (TARGET, "--num-workers", "1", "--host", self.address, "--port", "0", "--insecure")
        return ServerProcess(*arguments, prefix=["ip", "netns", "exec", self.name])

    def remove(self) -> None:
        """Remove the namespace and its interfaces."""
        ip("netns", "delete", self.name)


@pytest.fixture
def namespaces() -> Iterator[list[Namespace]]:
    """Create two network namespaces; skip the test if this process must not."""
    with ExitStack() as stack:
        found = []
        for number in range(2):
            try:
                found.append(Namespace(number))
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"cannot create network namespaces: {error}")
            stack.callback(found[-1].remove)
        yield found


def sent(server: ServerProcess) -> int:
    """Return how many batches a server has sent."""
    count: int = server.stats()["datasets"][0]["batches_sent"]
    return count


def test_half_of_the_servers_are_unreachable_for_a_while(namespaces: list[Namespace]) -> None:
    """The other half serves the epoch in its order; after the partition, the client uses all servers again."""
    with ExitStack() as stack:
        servers = []
        for namespace in (*namespaces, *namespaces):
            servers.append(namespace.start_server())
            stack.callback(servers[-1].end)
        unreachable = servers[1::2]

        def loader(urls: Any) -> Any:
            return DataLoader(RemoteDataset(urls, "unhurried"), batch_size=2, shuffle=True, seed=3)

        expected = [batch.tolist() for batch in loader(servers[0].url)]
        several = loader(lambda: [server.url for server in servers])
        received, gaps, arrived = [], [], time.monotonic()
        for number, batch in enumerate(several):
            gaps.append(time.monotonic() - arrived)
            received.append(batch.tolist())
            if number == 50:
                eventually(lambda: all(map(sent, unreachable)))
                namespaces[1].disconnect()
            arrived = time.monotonic()
        assert received == expected
        assert max(gaps) < DEFAULT_STALL_TIMEOUT / 2, "requests were not repeated before their timeout"
        namespaces[1].connect()
        before = list(map(sent, unreachable))

        def are_used_again() -> bool:
            for _ in several:
                pass
            return all(now > then for now, then in zip(map(sent, unreachable), before, strict=True))

        eventually(are_used_again)
