"""Information from the kernel."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from teleloader_server.workers.procfs import (
    NO_MEMORY,
    CpuUse,
    CpuWait,
    cpu_ticks,
    is_stopped,
    memory,
    oom_kills,
    resident_bytes,
)

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


def busy(seconds: float) -> None:
    """Compute until this thread has used that much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def compute() -> None:
    """Compute until killed."""
    busy(1000)


def test_the_time_without_a_cpu_is_measured_apart_from_sleep() -> None:
    """The calling thread waits for a CPU that others use; computing, waiting and sleeping add up to the time."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        with ExitStack() as others:
            for _ in range(3):
                others.enter_context(child(compute))
            cpu_wait = CpuWait()
            before, began = cpu_wait.seconds(), time.monotonic()
            busy(0.2)
            waited, took = cpu_wait.seconds() - before, time.monotonic() - began
            assert waited > 0.2
            assert waited + 0.2 == pytest.approx(took, rel=0.1)
            before, began = cpu_wait.seconds(), time.monotonic()
            time.sleep(1)
            waited, took = cpu_wait.seconds() - before, time.monotonic() - began
            assert 1 <= took - waited < 1.1
    finally:
        os.sched_setaffinity(0, cpus)


def test_a_kernel_that_does_not_measure_it_reports_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time without a CPU is then 0, and the machine's idle CPUs are unknown."""

    def refuse(*arguments: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", refuse)
    assert CpuWait().seconds() == 0.0
    monkeypatch.setattr(Path, "read_text", refuse)
    assert cpu_ticks({0}) == (0, 0)
    assert CpuUse().idle_fraction() == 1.0


QUOTA = Path("/sys/fs/cgroup/cpu/teleloader_test")


@pytest.mark.skipif(not os.access(QUOTA.parent, os.W_OK), reason="needs a writable cgroup (v1)")
def test_throttled_time_is_time_without_a_cpu() -> None:
    """A quota of a fifth of a CPU: four fifths of the time pass without one."""
    QUOTA.mkdir()
    try:
        (QUOTA / "cpu.cfs_quota_us").write_text("20000")
        (QUOTA / "cgroup.procs").write_text(str(os.getpid()))
        cpu_wait = CpuWait()
        before, began = cpu_wait.seconds(), time.monotonic()
        busy(0.3)
        waited, took = cpu_wait.seconds() - before, time.monotonic() - began
        throttled = dict(line.split() for line in (QUOTA / "cpu.stat").read_text().splitlines())["throttled_time"]
    finally:
        (QUOTA.parent / "cgroup.procs").write_text(str(os.getpid()))
        QUOTA.rmdir()
    assert int(throttled) > 0
    assert waited >= 0.9 * int(throttled) / 1e9
    assert waited + 0.3 == pytest.approx(took, rel=0.1)


def test_full_cpus_are_not_idle() -> None:
    """Only the CPUs in the affinity mask count."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        use = CpuUse()
        busy(0.5)
        assert use.idle_fraction() < 0.2
    finally:
        os.sched_setaffinity(0, cpus)


def test_the_kernels_count_is_a_number() -> None:
    """The kernel's count of OOM kills is never negative and never decreases."""
    before = oom_kills()
    assert 0 <= before <= oom_kills()
