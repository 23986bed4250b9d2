"""Fixtures and helpers shared by all tests: real servers, and checks of the machine."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from tests.launcher import LaunchedProcess, can_launch, launch

ROOT = Path(__file__).resolve().parent.parent

_Result = TypeVar("_Result")

OUTCOMES = ("passed", "failed", "error", "skipped")

# Background jobs of a shell ignore SIGINT, and processes that tests start would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)


# HYPOTHESIS_PROFILE=nightly: ten times as many examples, drawn anew each time.
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "gate")
if importlib.util.find_spec("hypothesis"):  # make gpu does without
    from hypothesis import settings

    settings.register_profile("gate", derandomize=True, deadline=None)
    settings.register_profile("nightly", deadline=None)
    settings.load_profile(PROFILE)


def examples(count: int) -> int:
    """Return hypothesis's number of examples in this profile, for `count` in the gate."""
    return 10 * count if PROFILE == "nightly" else count


def need(module: str) -> None:
    """Skip a test whose module is not installed; in CI, where everything must be installed, fail it."""
    if importlib.util.find_spec(module) is None:
        if os.environ.get("CI"):
            pytest.fail(f"{module} must be installed in CI")
        pytest.skip(f"needs {module}")


def eventually(condition: Callable[[], _Result], timeout: float = 30) -> _Result:
    """Poll a condition until it returns a true value, and return this value; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{condition} did not become true within {timeout:g} s"
        time.sleep(0.01)
    return result


def label(value: object) -> str:
    """Return a parameter's label in test names: the same in every process, so that several can share the tests."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))[:60]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the result to the file that the environment variable TEST_REPORT names, for ``.ci/steps.py``."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (path := os.environ.get("TEST_REPORT")) and reporter and not hasattr(session.config, "workerinput"):
        names = {kind: [report.nodeid for report in reporter.stats.get(kind, ())] for kind in OUTCOMES}
        result = {
            "status": int(exitstatus),
            "passed": len(names["passed"]),
            "failed": sorted({*names["failed"], *names["error"]}),
            "skipped": len(names["skipped"]),
        }
        Path(path).write_text(json.dumps(result))


class ServerProcess:
    """A separate ``teleloader-server`` process on a free port."""

    def __init__(
        self,
        *arguments: str,
        folder: Path = ROOT,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        program = "from teleloader_server.cli import main; main()"
        everything = os.environ if environment is None else environment
        ours, theirs = os.pipe()
        if not prefix and python == sys.executable and can_launch(program, everything):
            self.process: LaunchedProcess | subprocess.Popen[bytes] = launch(
                program, arguments, folder, everything, 1, theirs
            )
        else:
            command = [*prefix, python, "-c", program, *arguments]
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stderr=theirs)
        os.close(theirs)
        self._stderr = os.fdopen(ours, errors="replace")
        self.log: list[str] = []
        self._logged = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        ready = self.await_line(r"is ready at (\S+)")
        self.url = ready[1]

    @property
    def pid(self) -> int:
        """PID of the server's main process."""
        return self.process.pid

    def await_line(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the log that matches; return it."""

        def find() -> re.Match[str] | None:
            return next((found for line in self.log if (found := re.search(pattern, line))), None)

        with self._logged:
            self._logged.wait_for(lambda: find() or self.process.poll() is not None, 110)
            found = find()
        assert found, f"no line of the server's log matches {pattern!r}:\n{''.join(self.log)}"
        return found

    def stats(self) -> dict[str, Any]:
        """Return the current /stats."""
        answer: dict[str, Any] = httpx.get(f"{self.url}/stats").raise_for_status().json()
        return answer

    def worker_pids(self) -> list[int]:
        """Return the PIDs of the pool's workers."""
        return [worker["pid"] for worker in self.stats()["workers"]]

    def kill(self) -> None:
        """Send SIGKILL."""
        self.end(signal.SIGKILL)

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End the server and wait for it; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        code = self.process.wait(60)
        self._reader.join()
        self._stderr.close()
        return code

    def _read(self) -> None:
        for line in self._stderr:
            with self._logged:
                self.log.append(line)
                self._logged.notify_all()
        with self._logged:
            self._logged.notify_all()


@pytest.fixture
def free_port() -> int:
    """Return a free port, for servers that use the same port one after another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


StartServer = Callable[..., ServerProcess]


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start servers with command-line arguments; they are ended with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, port: int = 0) -> ServerProcess:
            server = ServerProcess("--port", str(port), *arguments)
            stack.callback(server.end)
            return server

        yield start
