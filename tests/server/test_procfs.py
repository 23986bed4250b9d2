"""Information from the kernel."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from teleloader_server.workers.procfs import (
    NO_MEMORY,
    Capability,
    CpuQuota,
    CpuUse,
    CpuWait,
    capabilities,
    cpu_ticks,
    is_stopped,
    memory,
    oom_kills,
    open_process,
    pressure,
    resident_bytes,
    send_signal,
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
    assert CpuUse().idle_fraction() is None
    assert CpuWait().times() is None
    assert pressure("cpu") is None
    assert CpuQuota().cpus is None


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


def test_a_thread_that_computes_uses_a_cpu() -> None:
    """The CPU time of the thread is that of `time.thread_time`."""
    thread = CpuWait()
    before = thread.times()
    busy(0.2)
    after = thread.times()
    assert before is not None
    assert after is not None
    assert after[0] - before[0] == pytest.approx(0.2, abs=0.05)


CGROUP_2 = {"app/cpu.max": "150000 100000", "app/cpu.stat": "nr_periods 40\nnr_throttled 10", "cpu.stat": ""}
CGROUP_1 = {
    "cpu/app/cpu.cfs_quota_us": "50000", "cpu/app/cpu.cfs_period_us": "100000", "cpu/app/cpu.stat": "nr_periods 40\n"
    "nr_throttled 10\nthrottled_time 5", "cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
    "cpu/cpu.stat": "nr_periods 0\nnr_throttled 0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "groups", "cpus"),
    [
        (CGROUP_2, "0::/app/inner", 1.5),
        (CGROUP_1, "5:cpu,cpuacct:/app\n4:memory:/app\n0::/", 0.5),
        ({"cpu.max": "max 100000", "cpu.stat": "nr_periods 40\nnr_throttled 10"}, "0::/", None),
    ],
    ids=["cgroup v2", "cgroup v1", "no quota"],
)
def test_the_quota_of_the_control_group_is_read(
    tmp_path: Path, files: dict[str, str], groups: str, cpus: float | None
) -> None:
    """The groups that contain the process's own one limit it, too; without a quota, none is reported."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    listed = tmp_path / "groups"
    listed.write_text(groups)
    quota = CpuQuota(tmp_path, listed)
    assert quota.cpus == cpus
    assert quota.periods() == (10, 40)


def test_pressure_is_a_fraction_of_the_last_seconds(tmp_path: Path) -> None:
    """A kernel without PSI reports none."""
    (tmp_path / "io").write_text("some avg10=55.50 avg60=60.92 avg300=57.20 total=14\nfull avg10=0.00 total=0\n")
    assert pressure("io", tmp_path) == pytest.approx(0.555)
    assert pressure("cpu", tmp_path) is None


def test_full_cpus_are_not_idle() -> None:
    """Only the CPUs in the affinity mask count."""
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cpus)})
    try:
        use = CpuUse()
        busy(0.5)
        idle = use.idle_fraction()
        assert idle is not None
        assert idle < 0.2
    finally:
        os.sched_setaffinity(0, cpus)


def test_the_kernels_count_is_a_number() -> None:
    """The kernel's count of OOM kills is never negative and never decreases."""
    before = oom_kills()
    assert 0 <= before <= oom_kills()


def test_a_signal_is_sent_only_to_a_process_of_the_user() -> None:
    """A PID that another process reported may be that of any process."""
    mine = os.geteuid()
    with child(lambda: None) as pid:
        with pytest.raises(ProcessLookupError, match=f"process {pid} does not belong to user {mine + 1}"):
            open_process(pid, mine + 1)
        send_signal(pid, signal.SIGKILL, mine + 1)
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        send_signal(pid, signal.SIGSTOP, mine)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        send_signal(pid, signal.SIGCONT, None)
        os.waitid(os.P_PID, pid, os.WCONTINUED | os.WNOWAIT)


def test_a_process_that_has_exited_receives_no_signal() -> None:
    """Its PID may belong to another process later."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    send_signal(pid, signal.SIGKILL, None)
    with pytest.raises(ProcessLookupError):
        open_process(pid, None)


def test_capabilities_are_those_of_this_process() -> None:
    """A process that is not root has none of them, unless it was granted some."""
    code = "from teleloader_server.workers.procfs import capabilities; print(len(capabilities()))"
    if os.geteuid() != 0:
        assert len(capabilities()) == 0
        return
    command = ["setpriv", "--bounding-set=-lease", "--inh-caps=-all", sys.executable, "-c", code]
    assert len(capabilities()) == len(Capability)
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{len(Capability) - 1}\n"
