"""Fork server: a process that constructs the datasets, and forks workers that share its memory.

The fork server opens no network sockets and starts no threads, so that forking it is cheap and safe: N workers share
one copy of the data, and a dead worker is replaced in milliseconds. It is started in one of two ways: as a clean
interpreter that imports the configured datasets (`spawn`), or as a fork of the process that hosts an object (`fork`).

The fork server does not even import the code of a dataset with ``start_method="spawn"``, because the import may start
threads. Each worker constructs such a dataset itself, before its first batch of the dataset. Starting a new interpreter
per worker would not separate the datasets further: one worker computes batches of all datasets of the server.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Final

from teleloader_server.config import ConfigError, DatasetConfig
from teleloader_server.loading import preparations
from teleloader_server.loading.datasets import HostedDataset, cannot_build, open_dataset, open_datasets
from teleloader_server.loading.deferred import DeferredDataset
from teleloader_server.loading.source_files import UNKNOWN, SourceFiles
from teleloader_server.workers import messages, worker
from teleloader_server.workers.channel import Channel, close_inherited
from teleloader_server.workers.confine import forbid_new_privileges
from teleloader_server.workers.health import exit_reason
from teleloader_server.workers.isolation import NO_ISOLATION, Isolation
from teleloader_server.workers.messages import decode, encode
from teleloader_server.workers.procfs import open_process, shortage
from teleloader_shared.messages import DatasetInfo

_WORKER_GRACE_S: Final = 2.0
"""Grace period in seconds for workers to exit when the server stops."""
_FORKSERVER_GRACE_S: Final = 2 * _WORKER_GRACE_S
"""Grace period in seconds for a fork server to exit before it is killed: it may still be constructing datasets."""


class ForkServer:
    """Server-side handle of a fork server process."""

    def __init__(
        self,
        channel: Channel,
        pid: int | None = None,
        wait: Callable[[], int | None] = lambda: None,
        uid: int | None = None,
    ) -> None:
        self.channel = channel
        self.uid = uid
        """User ID of the process and its workers if it differs from the server's, else None."""
        self.pid: int | None = None
        """Process ID; None for a fork server created by `split` until it reports `Built`."""
        self.end = -1
        """pidfd of the process, readable once the process has exited; -1 if it is not open.

        End of file on the channel is not sufficient, because a process that user code forked may keep the channel open.
        """
        self.exit_code: int | None = None
        """Exit code in the format of `subprocess.Popen.returncode`; None until the process is reaped.

        Always None for a fork server created by `split`, because this fork server is not a child of this process.
        """
        self._wait = wait
        self._reaping = threading.Lock()
        if pid is not None:
            self.set_process(pid)

    def set_process(self, pid: int) -> None:
        """Set the process ID of the fork server, and open its pidfd; do nothing if the process is already known.

        Raises:
            ProcessLookupError: If the process has exited, or belongs to another user.
        """
        if self.end == -1:
            self.end = open_process(pid, self.uid)
            self.pid = pid

    @classmethod
    def spawn(cls, configs: Sequence[DatasetConfig], isolation: Isolation = NO_ISOLATION) -> ForkServer:
        """Start a fork server in a new interpreter; the fork server constructs the configured datasets.

        The fork server then sends `Built` or `BuildFailed`.
        """
        channel, theirs = Channel.pair()
        with theirs:
            return cls.spawn_at(channel, theirs, configs, isolation)

    @classmethod
    def spawn_at(
        cls, channel: Channel, theirs: socket.socket, configs: Sequence[DatasetConfig], isolation: Isolation
    ) -> ForkServer:
        """Start a fork server as `spawn`, at a channel whose other end the caller keeps or closes.

        The process inherits the standard streams and its end of the channel, and no other descriptor or memory.
        """
        program = "from teleloader_server.workers.forkserver import main; main()"
        command = [sys.executable, "-c", program, str(theirs.fileno()), str(os.getpid())]
        process = subprocess.Popen(  # noqa: S603
            isolation.command(command), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            env=isolation.environment(os.environ),
        )  # fmt: skip
        channel.send(encode(messages.Build([dataclasses.asdict(config) for config in configs], sys.path)))
        # without a check of the user, which the process changes only now
        forkserver = cls(channel, process.pid, process.wait)
        forkserver.uid = isolation.uid
        return forkserver

    @classmethod
    def fork(cls, hosted: Mapping[str, HostedDataset]) -> ForkServer:
        """Start a fork server by forking this process, with the current state of the datasets."""
        channel, theirs = Channel.pair()

        def run() -> int:
            control = Channel(theirs)
            close_inherited(keep=control)
            _become_child()
            forbid_new_privileges()
            worker.ignore_stop_signals()
            return _serve(control, hosted)

        pid = _fork(theirs, run)
        return cls(channel, pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def split(self) -> ForkServer:
        """Fork this fork server for another pool; the new fork server has the datasets in their initial state."""
        channel, theirs = Channel.pair()
        with theirs:
            self.channel.send(encode(messages.Split()), [theirs.fileno()])
        return ForkServer(channel, uid=self.uid)

    def reap(self) -> None:
        """Stop the fork server and its workers by closing the channel, and wait for the exit of the fork server.

        Kill the fork server if it does not exit within the grace period.
        """
        with self._reaping:
            self.channel.hang_up()
            if self.end == -1:
                return
            if not _has_ended(self.end, _FORKSERVER_GRACE_S):
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.end, signal.SIGKILL)
            if _has_ended(self.end, _WORKER_GRACE_S):  # otherwise the process is in uninterruptible sleep
                with suppress(ChildProcessError):  # already reaped
                    self.exit_code = self._wait()
            end, self.end = self.end, -1
            os.close(end)


def _has_ended(end: int, seconds: float) -> bool:
    ended = select.poll()
    ended.register(end, select.POLLIN)
    return bool(ended.poll(1000 * seconds))


def main() -> None:
    """Run a spawned fork server; the command-line arguments are the channel's file descriptor and the server's PID."""
    control = Channel(socket.socket(fileno=int(sys.argv[1])))
    worker.end_with_parent()
    if os.getppid() != int(sys.argv[2]):
        return  # the server ended before end_with_parent()
    forbid_new_privileges()
    worker.ignore_stop_signals()
    build: messages.Build | None = None
    requests: list[messages.Message] = []
    try:
        # a long message arrives in several pieces, and requests to a previous process at the same channel come first
        while build is None:
            requests += map(decode, control.receive())
            build = next((request for request in requests if isinstance(request, messages.Build)), None)
    except EOFError:
        return
    requests.remove(build)
    sys.path[:] = build.path
    before = set(sys.modules)
    try:
        hosted = _open([DatasetConfig(**config) for config in build.configs])
    except ConfigError as error:
        control.send(encode(messages.BuildFailed(str(error))))
        return
    # afterwards gc.freeze excludes existing objects from garbage collection, so that their pages stay shared
    gc.collect()
    _serve(control, hosted, requests, SourceFiles.imported_after(before))
    # skip the interpreter's shutdown, which would wait for threads that user code started
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _open(configs: Sequence[DatasetConfig]) -> dict[str, HostedDataset | DeferredDataset]:
    """Construct the datasets that workers share, and describe the others.

    Raises:
        ConfigError: If a dataset cannot be constructed.
    """
    # first, because the processes that describe them must not have the threads of other datasets
    deferred = {config.name: _describe(config) for config in configs if config.start_method == "spawn"}
    shared = open_datasets(config for config in configs if config.start_method == "fork")
    return {config.name: deferred.get(config.name) or shared[config.name] for config in configs}


def _describe(config: DatasetConfig) -> DeferredDataset:
    """Construct a dataset in a child process that exits afterwards, and return its description.

    Raises:
        ConfigError: If the dataset cannot be constructed, or if the child process exits.
    """
    # not a pipe: processes that user code starts may keep its other end open
    file = os.memfd_create("teleloader-description", os.MFD_CLOEXEC)

    def run() -> int:
        _become_child()
        worker.configure_forked_children()
        before = set(sys.modules)
        try:
            found: dict[str, Any] = {"info": dataclasses.asdict(open_dataset(config).info)}
            found["code"] = SourceFiles.imported_after(before)
        except Exception as error:  # noqa: BLE001 - whatever user code raises
            found = {"error": str(cannot_build(error, config))}
        os.write(file, json.dumps(found).encode())
        worker.run_finalizers()
        return 0

    with os.fdopen(file, "rb") as description:
        _, status = os.waitpid(fork(run), 0)
        description.seek(0)
        text = description.read()
    if not text:
        raise ConfigError(f"the process that builds dataset {config.name!r} {exit_reason(status)}: see the log above")
    found = json.loads(text)
    if "error" in found:
        raise ConfigError(found["error"])
    return DeferredDataset(DatasetInfo(**found["info"]), config, SourceFiles(*found["code"]))


def _serve(
    control: Channel,
    hosted: Mapping[str, HostedDataset | DeferredDataset],
    requests: Iterable[messages.Message] = (),
    code: SourceFiles = UNKNOWN,
) -> int:
    """Fork workers and further fork servers on request, and report their exits, until the server closes the channel.

    Args:
        control: Channel to the server.
        hosted: Datasets by name.
        requests: Requests that the server has sent already.
        code: Files of the code of the datasets.

    Returns:
        Exit code of this process.
    """
    preparations.share()
    gc.disable()
    gc.freeze()
    infos = [dataclasses.asdict(dataset.info) for dataset in hosted.values()]
    control.send(encode(messages.Built(os.getpid(), infos, code)))
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    _execute(requests, control, selector, hosted, code)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not control:
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                control.send(encode(messages.Exited(key.data, status)))
                continue
            try:
                received = control.receive()
            except EOFError:
                _await_workers(selector, control)
                return 0
            _execute(map(decode, received), control, selector, hosted, code)


def _execute(
    requests: Iterable[messages.Message],
    control: Channel,
    selector: selectors.BaseSelector,
    hosted: Mapping[str, HostedDataset | DeferredDataset],
    code: SourceFiles,
) -> None:
    for request in requests:
        try:
            match request:
                case messages.Split():
                    _fork_child(control, selector, partial(_serve, hosted=hosted, code=code))
                case messages.ForkWorker(worker=number):
                    pid = _fork_child(control, selector, partial(worker.main, hosted=hosted, settings=request))
                    control.send(encode(messages.Forked(number, pid)))
        except OSError as error:  # the machine is out of a resource
            reason = shortage(error)
            print(f"the fork server cannot fork a process: {reason}", file=sys.stderr)
            if isinstance(request, messages.ForkWorker):
                control.send(encode(messages.ForkFailed(request.worker, reason)))


def _watch(pid: int, selector: selectors.BaseSelector) -> None:
    """Register the exit of a child process in the selector; kill the child if that fails."""
    try:
        end = os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    selector.register(end, selectors.EVENT_READ, pid)


def _await_workers(selector: selectors.BaseSelector, control: Channel) -> None:
    """Wait until all workers exit, up to the grace period; the kernel kills remaining ones when this process exits."""
    selector.unregister(control)
    deadline = time.monotonic() + _WORKER_GRACE_S
    while selector.get_map() and (left := deadline - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            selector.unregister(key.fd)
            os.waitpid(key.data, 0)


def _close_watched(selector: selectors.BaseSelector) -> None:
    """Close the inherited pidfds of other workers in a forked process."""
    for key in list(selector.get_map().values()):
        if isinstance(key.fileobj, int):
            os.close(key.fileobj)
    selector.close()


def _fork_child(control: Channel, selector: selectors.BaseSelector, run: Callable[[Channel], int]) -> int:
    """Fork a process for the channel end received from the server, watch its exit in the selector; return its PID."""
    end = socket.socket(fileno=control.take_fd())

    def run_in_child() -> int:
        _become_child()
        _close_watched(selector)
        control.close()
        return run(Channel(end))

    pid = _fork(end, run_in_child)
    _watch(pid, selector)
    return pid


def _fork(end: socket.socket, run: Callable[[], int]) -> int:
    """Fork a process that exits with the result of `run`; close `end`, its channel end, here, and return its PID."""
    with end:
        return fork(run)


def fork(run: Callable[[], int]) -> int:
    """Fork a process that exits with the result of `run`, and return its PID.

    Raises:
        OSError: If a resource of the machine is exhausted.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # the child must not print buffered output again
            stream.flush()
    with warnings.catch_warnings():
        # CPython >= 3.12 warns of threads in the parent, but the child neither runs their code nor takes their locks
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = run()
        except BaseException:  # noqa: BLE001 - the child must not continue the program of its parent
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def _become_child() -> None:
    """Make this process exit when its parent exits, and run the hooks that `multiprocessing` runs after a fork."""
    worker.end_with_parent()
    # a multiprocessing.Queue that the parent has used expects a feeder thread, until its hook resets it in the child
    BaseProcess._after_fork()  # type: ignore[attr-defined]
