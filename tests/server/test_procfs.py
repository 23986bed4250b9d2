"""Information from the kernel."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from teleloader_server.workers.procfs import NO_MEMORY, is_stopped, memory, oom_kills, resident_bytes

PTRACE_TRACEME = 0


@contextmanager
def child(run: Callable[[], object]) -> Iterator[int]:
    """Run a function in a child process, which then waits until it is killed."""
    pid = os.fork()
    if pid == 0:
        run()
        while True:
            signal.pause()
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def stop() -> None:
    """Stop the calling process."""
    os.kill(os.getpid(), signal.SIGSTOP)


def be_traced() -> None:
    """Stop like a process under a debugger."""
    ctypes.CDLL(None).ptrace(PTRACE_TRACEME, 0, 0, 0)
    stop()


def await_state(pid: int, state: str) -> None:
    """Wait until psutil reports this state."""
    while psutil.Process(pid).status() != state:
        time.sleep(0.005)


def test_a_stopped_process_is_detected() -> None:
    """A process is stopped from SIGSTOP to SIGCONT; one that has exited is not stopped."""
    with child(stop) as pid:
        await_state(pid, psutil.STATUS_STOPPED)
        assert is_stopped(pid)
        os.kill(pid, signal.SIGCONT)
        await_state(pid, psutil.STATUS_SLEEPING)
        assert not is_stopped(pid)
    assert not is_stopped(pid)


def test_what_a_debugger_holds_is_not_stopped() -> None:
    """A process that a debugger stopped does not count as stopped, because it must not be killed."""
    with child(be_traced) as pid:
        await_state(pid, psutil.STATUS_TRACING_STOP)
        assert not is_stopped(pid)


def test_resident_memory_is_that_of_psutil() -> None:
    """The resident memory equals psutil's, and is 0 for a process that has exited."""
    with child(lambda: None) as pid:
        await_state(pid, psutil.STATUS_SLEEPING)
        assert resident_bytes(pid) == psutil.Process(pid).memory_info().rss > 2**20
    assert resident_bytes(pid) == 0
    assert memory([pid]) == {pid: NO_MEMORY}


def test_the_kernels_count_is_a_number() -> None:
    """The kernel's count of OOM kills is never negative and never decreases."""
    before = oom_kills()
    assert 0 <= before <= oom_kills()
