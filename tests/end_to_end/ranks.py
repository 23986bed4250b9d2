"""Processes of a torch.distributed job that call functions at the request of a test."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

import psutil

TIMEOUT = 60
"""Maximum duration of a call, in seconds; a test that waits longer fails."""


class Raised(NamedTuple):
    """Exception that a function raised on a rank."""

    type: str
    text: str


class Ranks:
    """Processes of a gloo job on this machine.

    Args:
        count: Number of ranks.
    """

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self.processes = []
        port_of_store, to_ranks = context.Pipe(duplex=False)
        ports = [context.Pipe(duplex=False) for _ in range(count)]
        for rank in range(count):
            ours, theirs = context.Pipe()
            arguments = (rank, count, theirs, to_ranks if rank == 0 else None, ports[rank][0])
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)
        assert port_of_store.poll(TIMEOUT), "rank 0 did not start"
        port = port_of_store.recv()
        for _, end in ports:
            end.send(port)
        self.each(_do_nothing)

    def start(self, rank: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Call a function on a rank, without waiting for the result."""
        self._connections[rank].send((function, arguments, options))

    def result(self, rank: int) -> Any:
        """Return the result of the last call on a rank, or `Raised`."""
        assert self._connections[rank].poll(TIMEOUT), f"rank {rank} did not return"
        return self._connections[rank].recv()

    def each(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Call a function on all ranks; return the results in the order of the ranks, none of which is `Raised`."""
        results = self.outcomes(function, *arguments, **options)
        assert not any(isinstance(result, Raised) for result in results), results
        return results

    def outcomes(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Call a function on all ranks; return the results or `Raised`, in the order of the ranks."""
        ranks = range(len(self._connections))
        for rank in ranks:
            self.start(rank, function, *arguments, **options)
        return [self.result(rank) for rank in ranks]

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self.processes[rank].join()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()  # the ranks exit
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                psutil.Process(process.pid).kill()
                process.join()


def _do_nothing() -> None:
    """Return as soon as the rank has joined the job."""


def _serve(rank: int, count: int, connection: Connection, to_test: Connection | None, port: Connection) -> None:
    import torch.distributed as dist

    store = None
    if to_test is not None:
        store = dist.TCPStore("127.0.0.1", 0, count, is_master=True, wait_for_workers=False)
        to_test.send(store.port)
    number = port.recv()
    if store is None:
        store = dist.TCPStore("127.0.0.1", number, count, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    while True:
        try:
            function, arguments, options = connection.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)  # without waiting for ranks that a test has killed
        try:
            result = function(*arguments, **options)
        except Exception as error:  # noqa: BLE001 - returned to the test
            result = Raised(type(error).__qualname__, str(error))
        with contextlib.suppress(BrokenPipeError):  # the test has ended
            connection.send(result)
