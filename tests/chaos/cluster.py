"""The processes of a run: servers behind fault proxies, and consumers."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import psutil

from teleloader import DataLoader, RemoteDataset
from teleloader_server.workers.lendable import MIN_LENT_BYTES
from tests.chaos.consumer import Orders
from tests.chaos.roles import ROLES
from tests.chaos.schedule import SERVERS
from tests.conftest import ROOT, ServerProcess
from tests.faults.proxy import FaultProxy, Line

WORKERS: Final = 2
MEMORY_BUDGET: Final = 16 * 2**20
SHUTDOWN_GRACE: Final = 2.0
START_TRIES: Final = 5
TARGET: Final = "tests.chaos.dataset"
FIRST_BATCH_SIZE: Final = 8
WORKER_DESCRIPTORS: Final = 4
"""Descriptors that a server may hold per worker."""
SLOT: Final = "/memfd:teleloader (deleted)"
"""Name of a slot of shared memory among the descriptors and mappings of a process."""
MAX_SLOTS: Final = int(1.5 * MEMORY_BUDGET) // MIN_LENT_BYTES
"""Slots with a descriptor that a server without clients may keep, as buffered batches or for reuse."""
_COUNTED: Final = ("Pss_Anon:", "Pss_Shmem:")
MARK: Final = "TELELOADER_TESTS_CHAOS"
"""Environment variable of all processes of a run, which identifies those that outlive it."""

CONFIG: Final = f"""
[server]
num_workers = {WORKERS}
memory_budget = {MEMORY_BUDGET}
shutdown_grace = {SHUTDOWN_GRACE}
[datasets.plain]
factory = "{TARGET}:plain"
collate = "{TARGET}:collate"
[datasets.augmented]
factory = "{TARGET}:augmented"
collate = "{TARGET}:collate"
"""


class Host:
    """One port and one proxy, with the servers that run there one after another.

    Args:
        config: The servers' configuration file.
        seed: Of the proxy.
    """

    def __init__(self, config: Path, seed: int) -> None:
        self._config = config
        self._port = _quiet_port()
        self._proxy_seed = seed
        self._trouble: list[dict[str, Any]] = []
        self.lock = threading.RLock()
        """Held while the server is stopped or suspended, until it runs again."""
        self.starts = 0
        self.server = self._start()
        self._load_an_epoch()
        self.baseline = sum(memory_of(self.processes()).values())
        """Memory of the server and its workers in bytes after one epoch without faults."""
        self.descriptors = self._descriptors()
        self.proxy = FaultProxy(self.url, seed=seed)

    @property
    def url(self) -> str:
        """URL of the server itself, without the proxy."""
        return f"http://127.0.0.1:{self._port}"

    def processes(self) -> list[psutil.Process]:
        """Return the server, the fork server and the workers."""
        with suppress(psutil.NoSuchProcess):
            server = psutil.Process(self.server.pid)
            return [server, *server.children(recursive=True)]
        return []

    def forkserver(self) -> psutil.Process | None:
        """Return the process that forks the workers, or None."""
        with suppress(psutil.NoSuchProcess):
            return next(iter(psutil.Process(self.server.pid).children()), None)
        return None

    def workers(self) -> list[psutil.Process]:
        """Return the current worker processes."""
        forkserver = self.forkserver()
        with suppress(psutil.NoSuchProcess):
            return [] if forkserver is None else forkserver.children()
        return []

    def end(self, how: signal.Signals) -> None:
        """End the server."""
        self.server.end(how)

    def restart(self) -> None:
        """Start another server on the same port."""
        self.server = self._start()
        self.descriptors = self._descriptors()

    @property
    def connections(self) -> int:
        """Return the number of the server's open connections."""
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.server.pid).net_connections("tcp")
            return sum(connection.status != psutil.CONN_LISTEN for connection in found)
        return 0

    @property
    def lent(self) -> int:
        """Return the bytes of shared memory that count as lent to clients."""
        found: int = self.server.stats()["server"]["memory_lent"]
        return found

    @property
    def more_descriptors(self) -> int:
        """Return the number of open descriptors in excess of those at the start and those of the workers."""
        return max(0, self._descriptors() - self.descriptors - WORKERS * WORKER_DESCRIPTORS)

    @contextmanager
    def trouble(self, **changes: Any) -> Iterator[None]:
        """Change the line to the proxy's clients for a while; concurrent changes are combined."""
        self._trouble.append(changes)
        self._set_line()
        try:
            yield
        finally:
            self._trouble.remove(changes)
            self._set_line()

    def _load_an_epoch(self) -> None:
        for _ in DataLoader(RemoteDataset(self.url, "plain"), FIRST_BATCH_SIZE, output="numpy"):
            pass

    def _set_line(self) -> None:
        self.proxy.line = Line(**{name: value for changes in self._trouble for name, value in changes.items()})

    def _descriptors(self) -> int:
        slots = others = 0
        for entry in Path("/proc").glob(f"{self.server.pid}/fd/*"):
            with suppress(FileNotFoundError):  # closed meanwhile
                is_slot = os.readlink(entry) == SLOT
                slots += is_slot
                others += not is_slot
        return others + max(0, slots - MAX_SLOTS)

    def _start(self) -> ServerProcess:
        self.starts += 1
        for tries_left in reversed(range(START_TRIES)):
            try:
                return ServerProcess("--config", str(self._config), "--port", str(self._port))
            except AssertionError:
                # another process may use the port for a moment
                if not tries_left:
                    raise
                time.sleep(0.5)
        raise AssertionError


class Trainer:
    """One consumer, with the processes that run it one after another."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.name = ROLES[orders.role].name
        self.lock = threading.RLock()
        """Held from a kill until a new process runs."""
        self._errors = Path(orders.history).with_suffix(".stderr")
        self._counting = threading.Lock()
        self._counted_to = self._batches = 0
        self.process = self._start()

    def kill_and_resume(self) -> bool:
        """Send SIGKILL and start a process that resumes; return False if the process had already exited."""
        with self.lock:
            if self.process.poll() is not None:
                return False
            self.process.kill()
            self.process.wait()
            self.process = self._start()
            return True

    def tell_to_end(self) -> None:
        """Request the end of the consumer after its current epoch."""
        Path(self.orders.stop).touch()

    def where_it_hangs(self) -> str:
        """Return the stacks of the process's threads."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        return self.errors

    @property
    def errors(self) -> str:
        """Return the end of the process's stderr."""
        return self._errors.read_text()[-4000:]

    @property
    def lines(self) -> list[str]:
        """Return the history so far."""
        history = Path(self.orders.history)
        return history.read_text().splitlines() if history.exists() else []

    def batches(self) -> int:
        """Return the number of batches received so far, after reading new lines of the history."""
        history = Path(self.orders.history)
        with self._counting:
            if history.exists():
                with history.open("rb") as file:
                    file.seek(self._counted_to)
                    new = file.read()
                self._counted_to += len(new)
                self._batches += new.count(b"batch ")
            return self._batches

    def _start(self) -> subprocess.Popen[bytes]:
        with self._errors.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.consumer", json.dumps(asdict(self.orders))],
                cwd=ROOT, stderr=errors, stdin=subprocess.DEVNULL,
            )  # fmt: skip


class Cluster:
    """Two servers behind proxies and four consumers, used as a context manager.

    Args:
        folder: For configuration, histories and states.
        seed: Of everything that is drawn.
        epochs: How many each consumer loads; None until it is told to end.
        reconnect_timeout: Of the consumers.
        stall_timeout: Of the consumers.
    """

    def __init__(
        self, folder: Path, seed: int, epochs: int | None, reconnect_timeout: float, stall_timeout: float
    ) -> None:
        self._folder = folder
        self._seed = seed
        self._epochs = epochs
        self._timeouts = (reconnect_timeout, stall_timeout)
        self._stack = ExitStack()

    def __enter__(self) -> Cluster:
        config = self._folder / "loader.toml"
        config.write_text(CONFIG)
        with ExitStack() as stack:
            self.hosts = [self._host(stack, config, number) for number in range(SERVERS)]
            self.trainers = [self._trainer(stack, number) for number in range(len(ROLES))]
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _host(self, stack: ExitStack, config: Path, number: int) -> Host:
        host = Host(config, self._seed * SERVERS + number)
        stack.callback(_end_host, host)
        stack.enter_context(host.proxy)
        return host

    def _trainer(self, stack: ExitStack, number: int) -> Trainer:
        trainer = Trainer(
            Orders(
                role=number,
                urls=[host.proxy.url for host in self.hosts],
                seed=self._seed,
                epochs=self._epochs,
                history=str(self._folder / f"consumer{number}.history"),
                state=str(self._folder / f"consumer{number}.state"),
                stop=str(self._folder / f"consumer{number}.stop"),
                reconnect_timeout=self._timeouts[0],
                stall_timeout=self._timeouts[1],
            )
        )
        stack.callback(_end_trainer, trainer)
        return trainer


def memory_of(processes: list[psutil.Process]) -> dict[int, int]:
    """Return the memory of each process in bytes: its share of anonymous and shared memory (PSS).

    Mapped files do not count: they can be dropped, and their share depends on the other processes of the machine.
    """
    found = {}
    for process in processes:
        with suppress(psutil.Error, OSError):
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            found[process.pid] = 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(_COUNTED))
    return found


def _end_host(host: Host) -> None:
    with suppress(ProcessLookupError):
        os.kill(host.server.pid, signal.SIGCONT)
    host.server.end(signal.SIGKILL)


def _end_trainer(trainer: Trainer) -> None:
    if trainer.process.poll() is None:
        trainer.process.kill()
    trainer.process.wait()


def _quiet_port() -> int:
    """Return a free port outside of the ephemeral range, which no connection uses while the server is down."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(max(1024, first - 12000), first)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
