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
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.processes import ROOT, end
from benchmarks.workloads import WORKLOADS, Workload

START_TIMEOUT: Final = 30.0
_SIZE: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 64


@contextmanager
def floor(workload: Workload) -> Iterator[Iterator[NDArray[Any]]]:
    """The batches, as one array that is written over and over."""
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


def _receive(connection: socket.socket, workload: Workload) -> Iterator[NDArray[Any]]:
    size = bytearray(_SIZE.size)
    buffer = np.empty(workload.batch_bytes, np.uint8)
    batch = buffer.view(workload.dtype).reshape(workload.batch_shape)
    while True:
        _fill(connection, memoryview(size))
        (nbytes,) = _SIZE.unpack(size)
        _fill(connection, buffer.data[:nbytes])
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
    storage = np.empty(workload.batch_bytes + 2 * _ALIGNMENT, np.uint8)
    start = _ALIGNMENT - storage.ctypes.data % _ALIGNMENT
    message = storage[start - _SIZE.size :][: _SIZE.size + workload.batch_bytes]
    _SIZE.pack_into(message.data, 0, workload.batch_bytes)
    batch = message[_SIZE.size :].view(workload.dtype).reshape(workload.batch_shape)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for k in itertools.count():
            np.stack(workload.samples(dataset, k), out=batch)
            connection.sendall(message.data)


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
