"""The client on systems without Linux's features: forks, poll(), signals, socket options."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.conftest import ROOT, StartServer

TARGET = "tests.end_to_end.hosted:"

REMOVE = """
import os, select, signal, sys

def remove(module, *names):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

assert not [name for name in ("selectors", "threading", "teleloader") if name in sys.modules], "these look only once"
remove(os, "fork", "forkpty", "register_at_fork", "posix_spawn", "sched_getaffinity", "memfd_create")
remove(select, "poll", "epoll")
remove(signal, "SIGSTOP", "SIGCONT", "SIGKILL", "SIGCHLD", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "setitimer")
import socket

remove(socket, "AF_UNIX", "SO_REUSEPORT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
"""
"""Program that removes what Windows lacks but `os.sysconf`, which asyncio needs on Unix. None prevents an import."""

LOAD = """
from teleloader import DataLoader, RemoteDataset

url, output = sys.argv[1:]
dataset = RemoteDataset(url, "many", stall_timeout=0.5)
loader = DataLoader(dataset, 1000, output=output, persistent_workers=False)
for _ in range(2):
    seen = [int(index) for batch in loader for index in batch]
    assert seen == list(range(100_000)), "an epoch is not right"
batches = iter(loader)
next(batches)
del batches, loader
assert not any(name.startswith("teleloader_server") for name in sys.modules)
print("loaded")
"""


def loaded(url: str, code: str, output: str = "numpy") -> str:
    """Return the output of a program that loads two epochs of `many`."""
    command = [sys.executable, "-S", "-c", _WITH_PACKAGES + code, url, output]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# site itself imports modules for editable installations
_WITH_PACKAGES = f"import sys; sys.path += {sys.path!r}\n"


def test_the_client_needs_nothing_that_only_linux_has(start_server: StartServer) -> None:
    """The client is imported, and loads two epochs and a part of one, where the system has none of these functions.

    They are those of `os`, `select`, `signal` and `socket` that Windows does not have, and the modules of Unix.
    """
    server = start_server(f"{TARGET}many", "--num-workers", "1")
    assert loaded(server.url, REMOVE + LOAD) == "loaded\n"


KEEPALIVE = """
import socket, sys

socket.TCP_KEEPALIVE = socket.TCP_KEEPIDLE
idle = socket.TCP_KEEPIDLE
for name in ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT"):
    delattr(socket, name)
from teleloader import DataLoader, RemoteDataset
from teleloader.transport import http

batches = iter(DataLoader(RemoteDataset(sys.argv[1], "many"), 1000, output=sys.argv[2]))
next(batches)
for connection in http._open:
    print(connection._socket.getsockopt(socket.IPPROTO_TCP, idle))
"""


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the option of Linux stands for that of macOS")
def test_dead_machines_are_noticed_where_the_option_has_the_name_of_macos(start_server: StartServer) -> None:
    """The client uses TCP_KEEPALIVE, macOS's name of TCP_KEEPIDLE; otherwise detection would take two hours."""
    server = start_server(f"{TARGET}many", "--num-workers", "1")
    assert set(loaded(server.url, KEEPALIVE).split()) == {"5"}
