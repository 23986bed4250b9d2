"""Implementation of ``--reload``: a parent process that restarts the server after code or configuration changes."""

from __future__ import annotations

import logging
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
    """Return the folders that contain the code of datasets and their functions, without importing this code.

    Includes all folders of a package; for a single module, the folder that contains the module.
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
    """watchfiles filter that selects Python files and the configuration file."""

    def __init__(self, config: Path | None) -> None:
        super().__init__()
        self._config = config

    def __call__(self, change: Change, path: str) -> bool:
        """Return True if a change requires a restart of the server."""
        return (path.endswith(".py") or Path(path) == self._config) and super().__call__(change, path)


class Reloader:
    """Parent process that runs the server as a child process, and restarts the child when files change.

    Args:
        arguments: Command-line arguments of the server.
        configs: Datasets that the server hosts.
        config: Path of the configuration file, if any.
    """

    def __init__(self, arguments: Sequence[str], configs: Sequence[DatasetConfig], config: Path | None) -> None:
        self._command = [sys.executable, "-c", PROGRAM, *arguments]
        self._configs = configs
        self._config = None if config is None else config.resolve()
        self._stopping = threading.Event()
        self._child: subprocess.Popen[bytes]

    def run(self) -> int:
        """Run the server and restart it after file changes, until SIGINT or SIGTERM; return the server's exit code."""
        logging.getLogger("watchfiles").setLevel(logging.WARNING)
        logger.info("the server restarts when the code of a dataset or the configuration changes (Ctrl-C stops it)")
        self._child = self._start()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        while True:
            changed = self._await_change()
            if changed:
                logger.info("%s changed: restarting", ", ".join(changed))
                self._child.terminate()
            code = self._child.wait()
            if self._stopping.is_set():
                return code
            self._child = self._start()
            if self._stopping.is_set():  # the signal was sent to the previous child
                self._child.terminate()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command)  # noqa: S603 - it is this program

    def _await_change(self) -> list[str]:
        """Wait for changes and return the changed files; an empty list when the server is stopping."""
        folders = folders_of(self._configs)
        if self._config is not None:
            folders.add(self._config.parent)
        # not recursive: subfolders may contain data in a very large number of folders
        changes = watch(
            *folders, recursive=False, watch_filter=_Interesting(self._config), stop_event=self._stopping,
            raise_interrupt=False, ignore_permission_denied=True,
        )  # fmt: skip
        return sorted({path for _, path in next(changes, ())})

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping.set()
        self._child.send_signal(number)
