"""Commands as a user runs them: in a pipe, or in a terminal of a given size."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tests.conftest import ROOT
from tests.launcher import can_launch, launch

TOOLS = "from teleloader.cli import main; main()"
SERVER = "from teleloader_server.cli import main; main()"

ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|.)")


class Done(NamedTuple):
    """Result of a finished command."""

    code: int
    out: str
    err: str


def piped(program: str, *arguments: str, **environment: str) -> Done:
    """Run a command whose output goes to files."""
    everything = {**os.environ, **environment}
    if not can_launch(program, everything):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, env=everything, check=False,
        )  # fmt: skip
        return Done(done.returncode, done.stdout, done.stderr)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = launch(program, arguments, ROOT, everything, out.fileno(), err.fileno()).wait()
        out.seek(0)
        err.seek(0)
        return Done(code, out.read(), err.read())


class Terminal:
    """Command that runs in a terminal."""

    def __init__(self, columns: int, rows: int, program: str, *arguments: str, **variables: str) -> None:
        self.master, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            # a test run in the background ignores SIGINT, and its children would inherit this
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
            environment.pop(name, None)
        environment.update(variables)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True, preexec_fn=take_terminal, env=environment,
        )  # fmt: skip
        os.close(theirs)
        self.raw = ""
        """Complete output, including escape sequences."""
        self._written = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def text(self) -> str:
        """Output without escape sequences."""
        return ESCAPE.sub("", self.raw).replace("\r", "")

    def await_text(self, pattern: str) -> re.Match[str]:
        """Wait until the output contains a text."""
        with self._written:
            self._written.wait_for(lambda: re.search(pattern, self.text) or not self._reader.is_alive(), 60)
            found = re.search(pattern, self.text)
        assert found, f"{pattern!r} was not written:\n{self.text}"
        return found

    def press(self, keys: str) -> None:
        """Send the characters of keys."""
        os.write(self.master, keys.encode())

    def press_ctrl_c(self) -> None:
        """Send Ctrl-C, for which the terminal sends SIGINT to all of its foreground processes."""
        self.press("\x03")

    def wait(self) -> int:
        """Wait until the command ends; return its exit code."""
        code = self.process.wait(60)
        self._reader.join()
        return code

    def close(self) -> None:
        """Kill the command if it is still running."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()
        os.close(self.master)

    def _read(self) -> None:
        pieces = b""
        while True:
            try:
                piece = os.read(self.master, 65536)
            except OSError:  # the last process that had the terminal has ended
                piece = b""
            pieces += piece
            with self._written:
                self.raw = pieces.decode(errors="replace")
                self._written.notify_all()
            if not piece:
                break


@contextmanager
def terminal(program: str, *arguments: str, columns: int = 120, rows: int = 45, **variables: str) -> Iterator[Terminal]:
    """Run a command in a terminal, with additional environment variables."""
    running = Terminal(columns, rows, program, *arguments, **variables)
    try:
        yield running
    finally:
        running.close()
