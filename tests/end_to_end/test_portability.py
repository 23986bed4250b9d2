"""The client on simulated Windows and macOS: without Linux's functions, modules and socket options."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.conftest import ROOT, StartServer, need

TARGET = "tests.end_to_end.hosted:"

REMOVE = """
import fcntl, mmap, os, select, signal, sys

def remove(module, *names):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

PLATFORM = sys.argv.pop(1)
assert not [name for name in ("selectors", "threading", "teleloader") if name in sys.modules], "these look only once"
remove(os, "memfd_create", "sched_getaffinity", "sched_setaffinity", "posix_fadvise", "pidfd_open", "eventfd")
remove(select, "epoll")
import socket

remove(socket, "SO_PEERCRED", "TCP_KEEPIDLE", "TCP_USER_TIMEOUT")
remove(fcntl, "F_ADD_SEALS", "F_GET_SEALS")
if PLATFORM == "win32":
    remove(os, "fork", "forkpty", "posix_spawn", "getuid", "geteuid", "getgid", "getegid", "chown")
    remove(os, "O_NONBLOCK", "O_CLOEXEC", "pread", "preadv", "pwrite", "mkfifo", "setsid", "killpg", "getpgid")
    remove(select, "poll")
    remove(signal, "SIGSTOP", "SIGCONT", "SIGKILL", "SIGCHLD", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM", "setitimer")
    remove(signal, "pthread_sigmask", "pthread_kill", "sigwait")
    remove(socket, "AF_UNIX", "SO_REUSEPORT", "TCP_KEEPINTVL", "TCP_KEEPCNT", "SCM_RIGHTS", "recv_fds", "send_fds")
    for name in ("fcntl", "resource", "termios", "pwd", "grp"):
        sys.modules[name] = None

# whatever else runs in this process stays on Linux
import asyncio, ctypes, http.client, importlib.metadata, json, logging, multiprocessing, pathlib, queue, ssl, subprocess
import tempfile, urllib.request, uuid, zoneinfo
import httpx, numpy
if "torch" in sys.argv:
    import torch.utils.data
if PLATFORM == "win32":
    remove(os, "register_at_fork")
    remove(mmap, "PROT_READ", "PROT_WRITE", "MAP_PRIVATE", "MAP_SHARED", "MAP_ANONYMOUS")
sys.platform = PLATFORM
"""
"""Program that removes what a platform lacks, and reports this platform as its own.

`os.sysconf` remains: asyncio requires it on Unix. None in `sys.modules` prevents an import.
"""

LOAD = """
import io, sys
from contextlib import redirect_stdout
import numpy as np
from teleloader import DataLoader, RemoteDataset, TeleloaderError

url, output = sys.argv[1:]
dataset = RemoteDataset(url, "many", stall_timeout=0.5)
loader = DataLoader(dataset, 1000, output=output, persistent_workers=False)
for _ in range(2):
    seen = [int(index) for batch in loader for index in batch]
    assert seen == list(range(100_000)), "an epoch is not right"
batches = iter(loader)
next(batches)
del batches, loader

def shuffled(**arguments):
    return DataLoader(dataset, 5000, shuffle=True, output=output, **arguments)

expected = np.concatenate([np.asarray(batch) for batch in shuffled(seed=7)]).tolist()
assert expected != sorted(expected) == list(range(100_000)), "the seeded order is not right"
first, resumed = shuffled(seed=7), shuffled(seed=7)
iterator = iter(first)
received = np.concatenate([np.asarray(next(iterator)) for _ in range(3)]).tolist()
resumed.load_state_dict(first.state_dict())
received += np.concatenate([np.asarray(batch) for batch in resumed]).tolist()
assert received == expected, "the resumed epoch is not right"
if output == "torch":
    assert sorted(torch.cat(list(shuffled())).tolist()) == sorted(expected), "torch's order is not right"

by_function = DataLoader(RemoteDataset(lambda: [url], "many"), 50_000, output=output)
assert [len(batch) for batch in by_function] == [50_000] * 2
try:
    RemoteDataset("file:///servers", "many", reconnect_timeout=0)
except TeleloaderError as error:
    assert ("on Windows" in str(error)) == (sys.platform == "win32"), error

from teleloader.cli import main
with redirect_stdout(io.StringIO()) as printed:
    sys.argv = ["teleloader", "stats", url]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, ended.code
assert "many" in printed.getvalue(), printed.getvalue()
assert not any(name.startswith("teleloader_server") for name in sys.modules)
assert "teleloader.transport.handoff" not in sys.modules

def local(num_workers):
    return [len(batch) for batch in DataLoader(list(range(20)), 8, num_workers=num_workers, output=output)]

for num_workers in (0, 1) if sys.platform == "win32" else (1,):
    try:
        local(num_workers)
    except TeleloaderError as error:
        assert "workers require Linux" in str(error), error
    else:
        raise AssertionError("the dataset is loaded")
if sys.platform != "win32":
    assert local(0) == [8, 8, 4]
print("loaded on", sys.platform)
"""


def output_of(code: str, *arguments: str) -> str:
    """Return the output of a program."""
    # -S: site itself imports modules for editable installations
    packages = f"import sys; sys.path += {sys.path!r}\n"
    command = [sys.executable, "-S", "-c", packages + code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    return done.stdout


@pytest.mark.parametrize("output", ["numpy", "torch"])
@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_the_client_needs_nothing_that_only_linux_has(platform: str, output: str, start_server: StartServer) -> None:
    """On a system without these functions, the client loads, shuffles, resumes and prints statistics.

    They are those of `os`, `select`, `signal`, `mmap` and `socket` that the platform does not have, and the modules of
    Unix that Windows does not have.
    """
    need(output)
    server = start_server(f"{TARGET}many", "--num-workers", "1")
    assert output_of(REMOVE + LOAD, platform, server.url, output) == f"loaded on {platform}\n"


COLLECT = """
import shlex
from types import ModuleType

missing = [name for name in sys.modules if sys.modules[name] is None]
for name in missing:
    del sys.modules[name]
sys.platform = "linux"
import concurrent.futures.process, hypothesis, ml_dtypes, numpy.testing, PIL.Image, pytest, trustme

sys.platform = PLATFORM
missing += ["fastapi", "httptools", "prometheus_client", "tomlkit", "torch", "uvicorn", "uvloop", "watchfiles"]
sys.modules.update({**dict.fromkeys(missing), "psutil": ModuleType("psutil")})
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
sys.path.insert(0, "")
plugins = "-p pytest_asyncio.plugin -p pytest_timeout -p no:cacheprovider"
sys.exit(pytest.main(shlex.split(f"--collect-only -qq --capture=no {plugins} {sys.argv[1]}")))
"""
"""Program that collects tests without torch and the libraries of the server; the libraries of the tests are Linux's."""


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_the_tests_of_other_platforms_can_be_collected(platform: str) -> None:
    """No module of the tests in the workflow's job `client` fails when it is imported on the platform."""
    workflow = (ROOT / ".github/workflows/tests.yml").read_text()
    _, job = workflow.split("python -m pytest ")
    collected = output_of(REMOVE + COLLECT, platform, " ".join(job.split()))
    assert "tests/client/test_receiver.py" in collected
    assert "tests/client/test_loader.py" not in collected


KEEPALIVE = """
import socket, sys

socket.TCP_KEEPALIVE = socket.TCP_KEEPIDLE
idle = socket.TCP_KEEPIDLE
for name in ("TCP_KEEPIDLE", "TCP_USER_TIMEOUT"):
    delattr(socket, name)
from teleloader import DataLoader, RemoteDataset
from teleloader.transport import http

batches = iter(DataLoader(RemoteDataset(sys.argv[1], "many"), 1000, output="numpy"))
next(batches)
for connection in http._open:
    print(connection._socket.getsockopt(socket.IPPROTO_TCP, idle))
"""


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the option of Linux stands for that of macOS")
def test_dead_machines_are_noticed_where_the_option_has_the_name_of_macos(start_server: StartServer) -> None:
    """The client uses TCP_KEEPALIVE, macOS's name of TCP_KEEPIDLE; otherwise detection would take two hours."""
    server = start_server(f"{TARGET}many", "--num-workers", "1")
    assert set(output_of(KEEPALIVE, server.url).split()) == {"5"}
