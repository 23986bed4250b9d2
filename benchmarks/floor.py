"""Plain sockets: the floor, and producers that compute their batches.

The floor is an upper limit of throughput for loaders that use TCP. A process sends prepared frames with the sizes of a
server's frames, all from one buffer that it reuses, each with one `sendall`. The consumer reads each frame into one
buffer that it reuses. There are no checksums, requests and errors. Both sides use the system's congestion control, as
teleloader does.

Producers that compute also fetch the samples and collate them into their buffer. They show what computing alone costs.
"""

from __future__ import annotations

import itertools
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from benchmarks.processes import ROOT, START_TIMEOUT, end
from benchmarks.workloads import WORKLOADS, Workload, sizes


@contextmanager
def receiving(workload: Workload, producers: int) -> Iterator[Iterator[memoryview]]:
    """Yield batches in one buffer that is reused; `producers` is the number of those that compute, 0 for the floor."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.settimeout(START_TIMEOUT)
        connections = []
        for number in range(max(1, producers)):
            places = (listening.getsockname()[1], number, producers)
            command = [sys.executable, "-m", "benchmarks.floor", workload.name, *map(str, places)]
            stack.callback(end, subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL))
            connections.append(stack.enter_context(listening.accept()[0]))
            connections[-1].settimeout(None)
        yield _receive(connections, sizes(workload)[0])


def _receive(connections: list[socket.socket], sizes: list[int]) -> Iterator[memoryview]:
    buffer = np.empty(max(sizes), np.uint8).data
    for connection, size in zip(itertools.cycle(connections), itertools.cycle(sizes), strict=False):
        filled = 0
        while filled < size:
            got = connection.recv_into(buffer[filled:size])
            if not got:
                raise EOFError("the floor's producer exited")
            filled += got
        yield buffer[:size]


def prepared(workload: Workload) -> Iterator[memoryview]:
    """Return frames of the server's sizes, all in one buffer."""
    frames, _ = sizes(workload)
    buffer = np.ones(max(frames), np.uint8).data
    return itertools.cycle([buffer[:size] for size in frames])


def computed(workload: Workload, number: int, producers: int) -> Iterator[memoryview]:
    """Return batches `number`, `number + producers`, ... in one buffer, each of the server's frame size."""
    dataset = workload.dataset()
    frames, _ = sizes(workload)
    buffer = np.empty(2 * max(frames), np.uint8)
    batches = zip(workload.batches(), itertools.cycle(frames), strict=False)
    for indices, size in itertools.islice(batches, number, None, producers):
        used = 0
        for column in workload.columns(dataset, indices):
            shape, dtype = (len(column), *column[0].shape), column[0].dtype
            place = buffer[used : used + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)
            if isinstance(column, np.ndarray) or not column[0].shape:
                place[:] = column
            else:
                np.stack(column, out=place)
            used += place.nbytes
        yield buffer.data[:size]


def main() -> None:
    """Run a producer process: ``python -m benchmarks.floor WORKLOAD PORT NUMBER PRODUCERS``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches this process too, but the consumer ends it
    workload = WORKLOADS[sys.argv[1]]
    port, number, producers = map(int, sys.argv[2:])
    frames = computed(workload, number, producers) if producers else prepared(workload)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for frame in frames:
                connection.sendall(frame)
        except (BrokenPipeError, ConnectionResetError):
            return  # the consumer disconnected


if __name__ == "__main__":
    main()
