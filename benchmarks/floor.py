"""The floor: the same work with plain sockets, the minimum for any loader that sends batches.

A process runs the dataset, collates into one buffer that it reuses, and sends size and content with `sendall`; the
consumer calls `recv_into` with one buffer. Several producers alternate, each on its own connection. There is no
shuffling, no second client and no error handling.
"""

from __future__ import annotations

import itertools
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import numpy as np

from benchmarks.processes import ROOT, START_TIMEOUT, end
from benchmarks.workloads import WORKLOADS, Workload

_SIZE: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 64


@contextmanager
def floor(workload: Workload, producers: int) -> Iterator[Iterator[memoryview]]:
    """Yield the bytes of the batches in one buffer that is reused."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.settimeout(START_TIMEOUT)
        connections = []
        for number in range(producers):
            places = (listening.getsockname()[1], number, producers)
            command = [sys.executable, "-m", "benchmarks.floor", workload.name, *map(str, places)]
            stack.callback(end, subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL))
            connections.append(stack.enter_context(listening.accept()[0]))
            connections[-1].settimeout(None)
        yield _receive(connections, workload)


def _receive(connections: list[socket.socket], workload: Workload) -> Iterator[memoryview]:
    size = bytearray(_SIZE.size)
    buffer = np.empty(workload.max_bytes, np.uint8)
    for connection in itertools.cycle(connections):
        _fill(connection, memoryview(size))
        (nbytes,) = _SIZE.unpack(size)
        batch = buffer.data[:nbytes]
        _fill(connection, batch)
        yield batch


def _fill(connection: socket.socket, view: memoryview) -> None:
    filled = 0
    while filled < len(view):
        got = connection.recv_into(view[filled:])
        if not got:
            raise EOFError("the floor's producer ended")
        filled += got


def produce(workload: Workload, port: int, number: int, producers: int) -> None:
    """Send batches `number`, `number + producers`, ... until the consumer disconnects."""
    dataset = workload.dataset()
    storage = np.empty(workload.max_bytes + 2 * _ALIGNMENT, np.uint8)
    start = _ALIGNMENT - storage.ctypes.data % _ALIGNMENT
    message = storage[start - _SIZE.size :][: _SIZE.size + workload.max_bytes]
    samples = workload.order()
    batches = iter(lambda: list(itertools.islice(samples, workload.batch_size)), [])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for indices in itertools.islice(batches, number, None, producers):
            nbytes = workload.fill(dataset, indices, message[_SIZE.size :])
            _SIZE.pack_into(message.data, 0, nbytes)
            connection.sendall(message[: _SIZE.size + nbytes].data)


def main() -> None:
    """Run a producer process: ``python -m benchmarks.floor WORKLOAD PORT NUMBER PRODUCERS``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too, but the consumer ends it
    name, *places = sys.argv[1:]
    try:
        produce(WORKLOADS[name], *map(int, places))
    except (BrokenPipeError, ConnectionResetError):
        return  # the consumer disconnected


if __name__ == "__main__":
    main()
