"""``--reload``: a parent process that starts the server anew when code or configuration changes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Final

from watchfiles import Change, DefaultFilter, watch

from teleloader_server.config import DatasetConfig

PROGRAM: Final = "from teleloader_server.cli import main; main()"

logger = logging.getLogger(__name__)


def folders_of(configs: Iterable[DatasetConfig]) -> set[Path]:
    """The folders of the code of datasets and their functions, found without importing it.

    Of a package these are all that are in it, of a single module the one where it and its neighbours are.
    """
    folders: set[Path] = set()
    for config in configs:
        for target in (config.factory, config.collate, config.worker_init, *config.functions):
            spec = None if target is None else find_spec(target.partition(":")[0].partition(".")[0])
            if spec is not None and spec.submodule_search_locations:
                packages = map(Path, spec.submodule_search_locations)
                folders |= {init.parent.resolve() for package in packages for init in package.rglob("*.py")}
            elif spec is not None and spec.has_location and spec.origin is not None:
                folders.add(Path(spec.origin).parent.resolve())
    return folders


class _Interesting(DefaultFilter):
    """Python's files, and the configuration."""

    def __init__(self, config: Path | None) -> None:
        super().__init__()
        self._config = config

    def __call__(self, change: Change, path: str) -> bool:
        """Whether a change is one to start anew for."""
        return (path.endswith(".py") or Path(path) == self._config) and super().__call__(change, path)


class Reloader:
    """Runs the server as a child process.

    Args:
        arguments: The child's command line.
        configs: The datasets that it hosts.
        config: The configuration file.
    """

    def __init__(self, arguments: Sequence[str], configs: Sequence[DatasetConfig], config: Path | None) -> None:
        self._command = [sys.executable, "-c", PROGRAM, *arguments]
        self._configs = configs
        self._config = None if config is None else config.resolve()
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes]

    def run(self) -> int:
        """Start anew until told to stop; the server's last exit code."""
        logging.getLogger("watchfiles").setLevel(logging.WARNING)
        logger.info("the server is started anew whenever its datasets' code or configuration changes, until Ctrl-C")
        self._child = self._start()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        while True:
            changed = self._await_change()
            if changed:
                logger.info("%s changed: starting anew", ", ".join(changed))
                self._child.terminate()
            code = self._child.wait()
            if self._stopping.is_set():
                return code
            self._child = self._start()
            if self._stopping.is_set():  # whoever said so meanwhile told the one before
                self._child.terminate()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command)  # noqa: S603 - it is this program

    def _await_change(self) -> list[str]:
        """The files that changed; none when it is time to stop."""
        folders = folders_of(self._configs)
        if self._config is not None:
            folders.add(self._config.parent)
        # one by one, not with all that is below: data may be there, in very many folders
        changes = watch(
            *folders, recursive=False, watch_filter=_Interesting(self._config), stop_event=self._stopping,
            raise_interrupt=False, ignore_permission_denied=True,
        )  # fmt: skip
        return sorted({path for _, path in next(changes, ())})

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping.set()
        # Ctrl-C in a terminal reaches the child by itself, and a second one would hurry it
        if number != signal.SIGINT or not os.isatty(0):
            self._child.send_signal(number)
