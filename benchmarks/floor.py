"""The floor: the same work with plain sockets and nothing else, the least that any loader of this kind must do.

A process runs the dataset, collates into one buffer that it uses again and again, and `sendall`s it with its size
before it; the consumer does `recv_into` one buffer. No order, no second client, no failure is thought of.
"""

from __future__ import annotations

import itertools
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np

from benchmarks.processes import ROOT, end
from benchmarks.workloads import WORKLOADS, Workload

START_TIMEOUT: Final = 30.0
_SIZE: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 64


@contextmanager
def floor(workload: Workload) -> Iterator[Iterator[memoryview]]:
    """The bytes of the batches, in one buffer that is written over and over."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(START_TIMEOUT)
        port = listening.getsockname()[1]
        command = [sys.executable, "-m", "benchmarks.floor", workload.name, str(port)]
        producer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
        try:
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(None)
                yield _receive(connection, workload)
        finally:
            end(producer)


def _receive(connection: socket.socket, workload: Workload) -> Iterator[memoryview]:
    size = bytearray(_SIZE.size)
    buffer = np.empty(workload.max_bytes, np.uint8)
    while True:
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


def produce(workload: Workload, port: int) -> None:
    """Send batches for as long as somebody takes them."""
    dataset = workload.dataset()
    storage = np.empty(workload.max_bytes + 2 * _ALIGNMENT, np.uint8)
    start = _ALIGNMENT - storage.ctypes.data % _ALIGNMENT
    message = storage[start - _SIZE.size :][: _SIZE.size + workload.max_bytes]
    order = workload.order()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            indices = list(itertools.islice(order, workload.batch_size))
            nbytes = workload.fill(dataset, indices, message[_SIZE.size :])
            _SIZE.pack_into(message.data, 0, nbytes)
            connection.sendall(message[: _SIZE.size + nbytes].data)


def main() -> None:
    """Be the producer process: ``python -m benchmarks.floor WORKLOAD PORT``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too; the consumer's end is ours
    name, port = sys.argv[1:]
    try:
        produce(WORKLOADS[name], int(port))
    except (BrokenPipeError, ConnectionResetError):
        return  # the consumer has seen enough


if __name__ == "__main__":
    main()
