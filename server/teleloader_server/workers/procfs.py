"""Memory, CPU time and state of processes, read from the kernel (procfs)."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections import deque
from collections.abc import Container, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple


class Memory(NamedTuple):
    """Resident memory of a process in bytes."""

    rss: int
    """Resident set size, including all shared pages."""
    pss: int
    """Proportional set size: each shared page is divided by the number of processes that share it."""


NO_MEMORY: Final = Memory(0, 0)


def memory(pids: Iterable[int | None]) -> dict[int | None, Memory]:
    """Measure the resident memory of processes by PID (None for this process); exited processes have `NO_MEMORY`.

    The call takes milliseconds, because the kernel examines all memory mappings of the processes: do not call it in the
    event loop.
    """
    import psutil  # here, because `serve` must be importable without the extra `server`, to report that it is missing

    found = {}
    for pid in pids:
        try:
            info = psutil.Process(pid).memory_full_info()
            found[pid] = Memory(info.rss, info.pss)
        except psutil.Error:
            found[pid] = NO_MEMORY
    return found


def resident_bytes(pid: int) -> int:
    """Return the resident set size of a process in bytes, or 0 if the process has exited. Cheaper than `memory`."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def anonymous_bytes() -> int:
    """Return the resident memory of this process in bytes, without shared memory and files."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def is_stopped(pid: int) -> bool:
    """Return True if a process is stopped by a signal (SIGSTOP, SIGTSTP); False if it is traced or has exited."""
    try:
        # the program's name, in parentheses, may contain spaces and parentheses
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def cpu_seconds(pid: int | None) -> float:
    """Return the CPU time of a process (None for this process) in seconds, or 0 if the process has exited."""
    if pid is None:
        return time.process_time()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class CpuWait:
    """Total time for which the thread that created this object was ready to run and had no CPU.

    Includes the time for which a quota throttled the thread, with cgroup v1 and v2: a throttled thread is runnable.
    """

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # the kernel does not measure it
            self._file = -1

    def __del__(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)

    def seconds(self) -> float:
        """Return the time since the thread started; always 0 if the kernel does not measure it."""
        return 0.0 if self._file < 0 else int(os.pread(self._file, 64, 0).split()[1]) / 1e9


def cpu_ticks(cpus: Container[int]) -> tuple[int, int]:
    """Return the idle time and the total time of CPUs since boot, in clock ticks; (0, 0) if they are not available."""
    idle = total = 0
    with suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text().splitlines():
            name, *fields = line.split()
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in cpus:
                ticks = [int(field) for field in fields[:8]]  # the others, of guests, are parts of these
                idle += ticks[3] + ticks[4]  # idle, and idle while a disk is awaited
                total += sum(ticks)
    return idle, total


class CpuUse:
    """Recent CPU usage of a group of processes, excluding exited processes, and of the machine.

    `sample` and `rate` read one file per process: call them in the event loop only every few seconds.
    """

    def __init__(self) -> None:
        self._cpus = os.sched_getaffinity(0)
        self._samples: deque[tuple[float, dict[int | None, float], tuple[int, int]]] = deque(maxlen=2)
        self._last: dict[int | None, float] = {}
        self._own = self._others = 0.0
        self.sample([None])  # all other processes start later

    def sample(self, pids: Iterable[int | None]) -> None:
        """Record the current CPU times of processes."""
        self.totals(pids)
        self._samples.append((time.monotonic(), self._last, cpu_ticks(self._cpus)))

    def totals(self, pids: Iterable[int | None]) -> tuple[float, float]:
        """Return the total CPU seconds of this process, and of all other processes since they started.

        The totals never decrease. They do not contain the time of an exited process after its last sample.
        """
        now = {pid: cpu_seconds(pid) for pid in pids}
        for pid, seconds in now.items():
            spent = max(0.0, seconds - self._last.get(pid, 0.0))
            if pid is None:
                self._own += spent
            else:
                self._others += spent
        self._last = now
        return self._own, self._others

    def rate(self, pids: Iterable[int | None]) -> float:
        """Return the mean number of CPUs used by processes since the second-to-last sample."""
        then, before, _ = self._samples[0]
        used = sum(max(0.0, cpu_seconds(pid) - before.get(pid, 0.0)) for pid in pids)
        return used / max(1e-3, time.monotonic() - then)

    def idle_fraction(self) -> float:
        """Return the idle fraction of the CPUs in the affinity mask since the second-to-last sample; 1.0 if unknown."""
        _, _, (idle_before, total_before) = self._samples[0]
        idle, total = cpu_ticks(self._cpus)
        return (idle - idle_before) / (total - total_before) if total > total_before else 1.0


def shortage(error: OSError) -> str:
    """Describe the exhausted resource behind a failed system call, and how to increase its limit."""
    match error.errno:
        case errno.EMFILE:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"process {os.getpid()} is out of file descriptors: RLIMIT_NOFILE is {soft:,}, with a hard limit of "
                f"{hard:,}. Increase the limit (ulimit -n)"
            )
        case errno.ENFILE:
            return "the machine is out of file descriptors. Increase fs.file-max (sysctl)"
        case errno.ENOMEM:
            return "the machine is out of memory. Add memory, or start fewer workers"
        case errno.EAGAIN:
            return "too many processes. Increase RLIMIT_NPROC (ulimit -u), or the pids limit of the container"
    return error.strerror or str(error)


def oom_kills() -> int:
    """Return the number of processes killed by the kernel's OOM killer since boot, including those in containers.

    Returns 0 if the kernel does not report the number.
    """
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))
