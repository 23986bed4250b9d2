"""Dataset whose code attacks its server: each sample is the result of an attack, as text."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from teleloader_server.workers import channel as channel_module
from teleloader_server.workers.messages import Started, encode

REFUSED: Final = "refused: "
MAX_CHILDREN: Final = 200
"""Number of processes at which the fork bomb stops by itself."""
MEMORY: Final = 640 * 2**20
"""Size of the allocation in bytes."""
_PTRACE_SEIZE: Final = 0x4206
_PTRACE_INTERRUPT: Final = 0x4207
_PTRACE_DETACH: Final = 17
_WALL: Final = 0x4000_0000


def server_pid() -> int:
    """Return the PID of the server: the parent of the fork server, which is the parent of the worker."""
    status = Path(f"/proc/{os.getppid()}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))


def _server_option(name: str) -> str:
    arguments = Path(f"/proc/{server_pid()}/cmdline").read_text().split("\0")
    return arguments[arguments.index(name) + 1]


def token_file() -> str:
    """Read the token file of the server."""
    return Path(_server_option("--tokens")).read_text()


def tls_key() -> str:
    """Read the TLS key of the server."""
    return Path(_server_option("--ssl-keyfile")).read_text()


def own_environment() -> str:
    """Return the environment of the worker, at its start and now."""
    return f"{dict(os.environ)} {Path('/proc/self/environ').read_text()}"


def forkserver_environment() -> str:
    """Return the environment of the fork server."""
    return Path(f"/proc/{os.getppid()}/environ").read_text()


def server_environment() -> str:
    """Return the environment of the server."""
    return Path(f"/proc/{server_pid()}/environ").read_text()


def server_memory() -> str:
    """Read the beginning of the server's first memory mapping."""
    pid = server_pid()
    start = int(Path(f"/proc/{pid}/maps").read_text().partition("-")[0], 16)
    with Path(f"/proc/{pid}/mem").open("rb") as memory:
        memory.seek(start)
        return memory.read(4).hex()


def ptrace() -> str:
    """Attach to the server as a debugger, and detach again."""
    library, pid = ctypes.CDLL(None, use_errno=True), server_pid()
    if library.ptrace(_PTRACE_SEIZE, pid, None, None) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    library.ptrace(_PTRACE_INTERRUPT, pid, None, None)
    os.waitpid(pid, _WALL)
    library.ptrace(_PTRACE_DETACH, pid, None, None)
    return "attached"


def own_descriptors() -> str:
    """Return the targets of the worker's descriptors as JSON."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the descriptor of the directory listing
            found[entry.name] = str(entry.readlink())
    return json.dumps(found)


def forkserver_descriptors() -> str:
    """Return the targets of the fork server's descriptors as JSON."""
    folder = Path(f"/proc/{os.getppid()}/fd")
    return json.dumps({entry.name: str(entry.readlink()) for entry in folder.iterdir()})


def server_descriptors() -> str:
    """Return the targets of the server's descriptors as JSON."""
    folder = Path(f"/proc/{server_pid()}/fd")
    return json.dumps({entry.name: str(entry.readlink()) for entry in folder.iterdir()})


def setuid_program() -> str:
    """Execute a set-user-ID program of root; return its effective user ID."""
    program = [os.environ["INTRUDER_SETUID_ID"], "-u"]
    return subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip()


def fork_bomb() -> str:
    """Fork processes until the system refuses; return their number."""
    children = []
    try:
        for _ in range(MAX_CHILDREN):
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            children.append(pid)
        return f"{len(children)} processes"
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def much_memory() -> str:
    """Allocate and write `MEMORY` bytes."""
    return f"{np.ones(MEMORY, np.uint8).nbytes} bytes"


def network() -> str:
    """Connect to a listening socket outside of the worker's network namespace."""
    with socket.create_connection(("127.0.0.1", int(os.environ["INTRUDER_PORT"])), timeout=10):
        return "connected"


def loopback() -> str:
    """Connect to a listening socket of this process, over the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=10):
        return "connected"


def signal_server() -> str:
    """Send a signal to the server; signal 0 only checks the permission."""
    os.kill(server_pid(), 0)
    return "sent"


def file_in_current_folder() -> str:
    """Read a file by its relative path."""
    return Path("closed-secret").read_text()


def identity() -> str:
    """Return the lines of ``/proc/self/status`` about processes, users, groups and privileges as JSON."""
    wanted = ("Pid", "PPid", "NSsid", "Uid", "Gid", "Groups", "CapEff", "CapPrm", "CapAmb", "NoNewPrivs")
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    return json.dumps({name: value.split() for name, _, value in lines if name in wanted})


ATTACKS: Final[Mapping[str, Callable[[], str]]] = {
    attack.__name__: attack
    for attack in (
        token_file, tls_key, own_environment, forkserver_environment, server_environment, server_memory, ptrace,
        own_descriptors, forkserver_descriptors, server_descriptors, setuid_program, fork_bomb, much_memory, network,
        loopback, signal_server, identity, file_in_current_folder,
    )
}  # fmt: skip


class Intruder:
    """Map-style dataset whose sample i is the result of the attack i of `ATTACKS`."""

    def __len__(self) -> int:
        return len(ATTACKS)

    def __getitem__(self, index: int) -> str:
        """Return the result of an attack, or the reason why the system refused it."""
        attack = list(ATTACKS.values())[index]
        try:
            return attack()
        except (OSError, MemoryError) as error:
            return f"{REFUSED}{type(error).__name__} {getattr(error, 'strerror', '')}"


class Impostor:
    """Dataset whose worker reports the PID of another process as its own, and then hangs."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        """Make the server kill the worker, which it knows by its PID."""
        (channel,) = channel_module._open_channels
        channel.send(encode(Started(int(os.environ["INTRUDER_VICTIM"]))))
        time.sleep(600)
        return index


def run_attack(dataset: Any, attack: Callable[[], str]) -> str:
    """Let the dataset's code run an attack; return the result."""
    return str(dataset[list(ATTACKS.values()).index(attack)])
