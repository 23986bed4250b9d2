"""Servers on other ports of a machine, which a client learns from the first server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_shared.directory import port_of
from tests.client.fake_server import INFO, Request, fake_server
from tests.conftest import eventually

RIGHT = [[k, k, k] for k in range(8)]


class Machine:
    """Two fake servers, and the requests for batches that each has received."""

    def __init__(self, stack: ExitStack) -> None:
        self.info: dict[str, Any] = dict(INFO)
        self.requests: list[list[Request]] = [[], []]
        self.urls = [stack.enter_context(fake_server(self._recording(number), self.info)) for number in range(2)]
        self.ports = [port_of(url) for url in self.urls]

    def _recording(self, number: int) -> Any:
        def respond(request: Request) -> bytes:
            self.requests[number].append(request)
            return request.right()

        return respond

    def load(self, source: Any) -> list[str]:
        """Load an epoch, and return the URLs that the client knows."""
        dataset = RemoteDataset(source, trust_directory=True)
        assert [batch[0].tolist() for batch in DataLoader(dataset, output="numpy")] == RIGHT
        return [server.url for server in dataset.servers.known]


@pytest.fixture
def machine() -> Iterator[Machine]:
    """Start the servers."""
    with ExitStack() as stack:
        yield Machine(stack)


def test_the_other_servers_of_a_machine_are_used(machine: Machine) -> None:
    """Each URL leads to all servers of its machine; the user's URLs come first, and no server is known twice."""
    machine.info["ports"] = machine.ports
    first, second = machine.urls
    assert machine.load(first) == [first, second]
    eventually(lambda: machine.load(first) and all(machine.requests))  # the first may be faster than the other joins
    assert machine.load(second) == [second, first]
    assert machine.load([first, second + "/"]) == [first, second]


@pytest.mark.parametrize("ports", [None, [], [1, 2], [0, "own"], ["own", 70_000]])
def test_other_ports_are_not_derived_from_a_mapped_port(machine: Machine, ports: list[Any] | None) -> None:
    """Other ports are used only if the list of ports is valid and contains the port of the URL."""
    own = machine.ports[0]
    machine.info["ports"] = ports and [own if port == "own" else port for port in ports]
    assert machine.load(machine.urls[0]) == [machine.urls[0]]
    assert machine.requests[1] == []


def test_a_directory_lists_all_servers_itself(machine: Machine) -> None:
    """A client of a directory does not use other servers of a machine that the directory does not list."""
    machine.info["ports"] = machine.ports
    assert machine.load(lambda: [machine.urls[0]]) == [machine.urls[0]]
    assert machine.requests[1] == []
