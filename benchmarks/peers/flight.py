"""Apache Arrow Flight.

Each worker is a Flight server that streams record batches; a record batch has the bytes of a batch in one column,
collated directly into Arrow's memory, and their shapes as metadata. The client reads from the servers in turn.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.measuring import Indices
from benchmarks.processes import ROOT, end
from benchmarks.workloads import WORKLOADS, Arrays, Workload


class Flight:
    """Apache Arrow Flight."""

    name = "Flight"
    beside = None
    requires = ("pyarrow",)
    workloads = tuple(WORKLOADS)

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """Start servers, and request their streams."""
        from pyarrow import flight

        producers = self._workload.num_workers
        with ExitStack() as stack:
            readers = []
            for number in range(producers):
                arguments = ["flight", self._workload.name, str(number), str(producers)]
                command = [sys.executable, "-m", "benchmarks.peers", *arguments]
                server = subprocess.Popen(
                    command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
                )
                stack.callback(end, server)
                port = server.stdout.readline() if server.stdout else ""
                client = stack.enter_context(flight.connect(f"grpc://127.0.0.1:{int(port)}"))
                readers.append(client.do_get(flight.Ticket(b"")))
                stack.callback(readers[-1].cancel)
            yield (_arrays(reader.read_chunk()) for reader in itertools.cycle(readers))

    def indices(self, count: int) -> Indices:
        """Return the workload's own order."""
        return list(islice(self._workload.batches(), count))

    def server_cpu(self) -> None:
        """Return None: the servers also compute."""


def _arrays(chunk: Any) -> Arrays:
    data, found, start = chunk.data.column(0).to_numpy(), [], 0
    for shape, dtype in json.loads(chunk.app_metadata.to_pybytes()):
        stop = start + int(np.prod(shape)) * np.dtype(dtype).itemsize
        found.append(data[start:stop].view(dtype).reshape(shape))
        start = stop
    return found


def serve(name: str, number: str, producers: str) -> None:
    """Stream every batch of a workload that one of the producers computes; print the port."""
    import pyarrow as pa
    from pyarrow import flight

    workload = WORKLOADS[name]
    schema = pa.schema([("data", pa.uint8())])

    def batches() -> Iterator[Any]:
        dataset = workload.dataset()
        for indices in islice(workload.batches(), int(number), None, int(producers)):
            columns = workload.columns(dataset, indices)
            layout = [((len(column), *column[0].shape), column[0].dtype) for column in columns]
            sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in layout]
            buffer = pa.allocate_buffer(sum(sizes))
            data, start = np.frombuffer(buffer, np.uint8), 0
            for column, (shape, dtype), size in zip(columns, layout, sizes, strict=True):
                place = data[start : start + size].view(dtype).reshape(shape)
                if isinstance(column, np.ndarray) or len(shape) == 1:
                    place[:] = column
                else:
                    np.stack(column, out=place)
                start += size
            array = pa.Array.from_buffers(pa.uint8(), len(buffer), [None, buffer])
            metadata = json.dumps([(shape, dtype.str) for shape, dtype in layout]).encode()
            yield pa.RecordBatch.from_arrays([array], schema=schema), metadata

    class Server(flight.FlightServerBase):  # type: ignore[misc]
        def do_get(self, context: Any, ticket: Any) -> Any:
            return flight.GeneratorStream(schema, batches())

    server = Server("grpc://127.0.0.1:0")
    print(server.port, flush=True)
    server.serve()
