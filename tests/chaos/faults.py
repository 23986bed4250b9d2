"""Injection of each kind of fault into a cluster."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from signal import SIGKILL, SIGTERM
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import psutil

from teleloader_shared.messages import LOADERS_PATH, batches_path
from teleloader_shared.spec import LoaderSpec
from tests.chaos.cluster import Cluster, Host
from tests.chaos.dataset import LENGTH
from tests.chaos.schedule import Fault, Kind
from tests.faults import proxy

SLOW_LATENCY: Final = 0.15
NARROW: Final = 512 * 1024
"""Bandwidth of a slow connection, in bytes per second."""
GREEDY_BATCH: Final = 256
"""Samples per batch of the greedy consumer, about a megabyte."""
GREEDY_CONNECTIONS: Final = 4


def inject(cluster: Cluster, fault: Fault) -> bool:
    """Inject a fault and wait until it is over; return False if its target was unavailable."""
    if fault.kind is Kind.CONSUMER_KILL:
        return cluster.trainers[fault.target].kill_and_resume()
    return _INJECTORS[fault.kind](cluster.hosts[fault.target], fault)


def _kill_worker(host: Host, fault: Fault) -> bool:
    workers = host.workers()
    return bool(workers) and _kill([random.Random(fault.seed).choice(workers)])


def _kill_workers(host: Host, fault: Fault) -> bool:
    return _kill(host.workers())


def _kill_forkserver(host: Host, fault: Fault) -> bool:
    forkserver = host.forkserver()
    return forkserver is not None and _kill([forkserver])


def _kill(processes: list[psutil.Process]) -> bool:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return bool(processes)


def _stop_worker(host: Host, fault: Fault) -> bool:
    workers = host.workers()
    return bool(workers) and _stop(random.Random(fault.seed).choice(workers), fault.seconds)


def _stop_server(host: Host, fault: Fault) -> bool:
    with host.lock, suppress(psutil.NoSuchProcess):
        return _stop(psutil.Process(host.server.pid), fault.seconds)
    return False


def _stop(process: psutil.Process, seconds: float) -> bool:
    try:
        process.suspend()
        time.sleep(seconds)
        process.resume()
    except psutil.NoSuchProcess:
        pass  # the server did not wait for so long
    return True


def _kill_server(host: Host, fault: Fault) -> bool:
    with host.lock:
        host.end(SIGKILL)
        time.sleep(fault.seconds)
        host.restart()
    return True


def _drain_server(host: Host, fault: Fault) -> bool:
    with host.lock:
        host.end(SIGTERM)
        time.sleep(fault.seconds)
        host.restart()
    return True


def _damage_answer(host: Host, fault: Fault) -> bool:
    damage: dict[Kind, proxy.Fault] = {
        Kind.RESET: proxy.Reset(),
        Kind.CUT: proxy.Cut(),
        Kind.CORRUPT: proxy.Flip(bit=fault.seed % 8),
        Kind.DUPLICATE: proxy.Repeat(),
    }
    host.proxy.arm(damage[fault.kind])
    return True


def _trouble_line(host: Host, fault: Fault) -> bool:
    changes: dict[Kind, dict[str, Any]] = {
        Kind.LATENCY: {"latency": SLOW_LATENCY},
        Kind.BANDWIDTH: {"bandwidth": NARROW},
        Kind.STALL: {"silent": True},
    }
    with host.trouble(**changes[fault.kind]):
        time.sleep(fault.seconds)
    return True


def _drop_connections(host: Host, fault: Fault) -> bool:
    rng = random.Random(fault.seed)
    over = time.monotonic() + fault.seconds
    while time.monotonic() < over:
        host.proxy.drop_all(reset=rng.random() < 0.5)
        time.sleep(0.1)
    return True


def _fill_memory(host: Host, fault: Fault) -> bool:
    """Request far more batches than are read."""
    # a separate seed: no consumer shares these batches
    spec = LoaderSpec(dataset="plain", batch_size=GREEDY_BATCH, seed=fault.seed, shuffle=True)
    sockets = []
    try:
        key = httpx.post(host.url + LOADERS_PATH, json=spec.to_json(), timeout=2).raise_for_status().json()["key"]
        for _ in range(GREEDY_CONNECTIONS):
            greedy = socket.socket()
            greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            greedy.settimeout(2)
            sockets.append(greedy)
            greedy.connect(_address(host))
            stop = LENGTH // GREEDY_BATCH
            path = f"{batches_path(key, fault.seed + len(sockets))}?ranges=0:{stop}&ahead=4096"
            greedy.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        time.sleep(fault.seconds)
    except (OSError, httpx.HTTPError):
        return False
    finally:
        for greedy in sockets:
            greedy.close()
    return True


def _send_garbage(host: Host, fault: Fault) -> bool:
    rng = random.Random(fault.seed)
    junk = rng.randbytes(2000)
    attempts = [
        junk,
        b"\x16\x03\x01" + junk,
        b"GET " + b"/" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000,
        b"POST /v1/loaders HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2000\r\n\r\n" + junk,
        b"POST /v1/loaders HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n{",
        b"GET /v1/loaders/%00/epochs/-1/batches/x HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"GET /v1/data",
    ]
    sockets = []
    with suppress(OSError):
        for attempt in attempts:
            sockets.append(socket.create_connection(_address(host), timeout=2))
            with suppress(OSError):  # the server rejects the request while it is being sent, as expected
                sockets[-1].sendall(attempt)
    for connection in sockets:
        connection.close()
    return bool(sockets)


def _address(host: Host) -> tuple[str, int]:
    parts = urlsplit(host.url)
    return str(parts.hostname), int(parts.port or 0)


_INJECTORS: Final[dict[Kind, Callable[[Host, Fault], bool]]] = {
    Kind.WORKER_KILL: _kill_worker,
    Kind.WORKER_STOP: _stop_worker,
    Kind.WORKERS_KILL: _kill_workers,
    Kind.FORKSERVER_KILL: _kill_forkserver,
    Kind.SERVER_KILL: _kill_server,
    Kind.SERVER_DRAIN: _drain_server,
    Kind.SERVER_STOP: _stop_server,
    Kind.RESET: _damage_answer,
    Kind.CUT: _damage_answer,
    Kind.CORRUPT: _damage_answer,
    Kind.DUPLICATE: _damage_answer,
    Kind.LATENCY: _trouble_line,
    Kind.BANDWIDTH: _trouble_line,
    Kind.STALL: _trouble_line,
    Kind.STORM: _drop_connections,
    Kind.MEMORY: _fill_memory,
    Kind.GARBAGE: _send_garbage,
}
