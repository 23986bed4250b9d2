"""Memory, CPU time and state of processes, read from the kernel (procfs)."""

from __future__ import annotations

import enum
import errno
import os
import resource
import signal
import time
from collections import deque
from collections.abc import Container, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, Literal, NamedTuple


class Capability(enum.IntEnum):
    """Linux capabilities that the server uses; the value is the capability's bit."""

    KILL = 5
    SETGID = 6
    SETUID = 7
    LEASE = 28


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
        except psutil.AccessDenied:  # a process of another user, without CAP_SYS_PTRACE
            rss = resident_bytes(pid or os.getpid())
            found[pid] = Memory(rss, rss)
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


@cache
def capabilities() -> frozenset[Capability]:
    """Return the effective capabilities of this process; empty on systems other than Linux."""
    try:
        effective = int(_status("self", "CapEff"), 16)
    except OSError:
        return frozenset()
    return frozenset(one for one in Capability if effective >> one & 1)


def open_process(pid: int, uid: int | None) -> int:
    """Return a pidfd of a process, checking that the process belongs to a user.

    A worker that runs as another user reports its own PID. The server must not send a signal to another user's process
    if the PID is false.

    Args:
        pid: Process ID.
        uid: ID of the user; None accepts any process.

    Raises:
        ProcessLookupError: If the process has exited, or belongs to another user.
        OSError: If no descriptor is free.
    """
    end = os.pidfd_open(pid)
    try:
        # after pidfd_open: if the PID is reused between both calls, the pidfd is that of a process that has exited
        if uid is not None and int(_status(str(pid), "Uid").split()[0]) != uid:
            raise ProcessLookupError(errno.ESRCH, f"process {pid} does not belong to user {uid}")
    except FileNotFoundError:
        os.close(end)
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has exited") from None
    except OSError:
        os.close(end)
        raise
    return end


def send_signal(pid: int, number: int, uid: int | None) -> None:
    """Send a signal to a process, unless the process has exited.

    Args:
        pid: Process ID.
        number: Number of the signal.
        uid: ID of the process's user, as for `open_process`. With an ID, no signal is sent if this process has no free
            descriptor.
    """
    if uid is None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)  # without a descriptor: a worker is also killed because descriptors are exhausted
        return
    with suppress(OSError):
        end = open_process(pid, uid)
        try:
            signal.pidfd_send_signal(end, number)
        finally:
            os.close(end)


def _status(pid: str, name: str) -> str:
    """Return a line of ``/proc/PID/status`` without its name."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:"))


def is_stopped(pid: int) -> bool:
    """Return True if a process is stopped by a signal (SIGSTOP, SIGTSTP); False if it is traced or has exited."""
    try:
        # the program's name, in parentheses, may contain spaces and parentheses
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def catches(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal; False if it ignores the signal, or the signal would end it.

    Args:
        pid: Process ID.
        number: Number of the signal.
    """
    try:
        caught = int(_status(str(pid), "SigCgt"), 16)
    except OSError:
        return False
    return bool(caught >> (number - 1) & 1)


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

    def times(self) -> tuple[float, float] | None:
        """Return CPU time and waiting time of the thread in seconds; None if the kernel does not measure them."""
        if self._file < 0:
            return None
        used, waited = os.pread(self._file, 64, 0).split()[:2]
        return int(used) / 1e9, int(waited) / 1e9


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

    def last(self, pid: int | None) -> float:
        """Return the CPU seconds of a process at the last sample; 0 if it was not part of the sample."""
        return self._last.get(pid, 0.0)

    def rate(self, pids: Iterable[int | None]) -> float:
        """Return the mean number of CPUs used by processes since the second-to-last sample."""
        then, before, _ = self._samples[0]
        used = sum(max(0.0, cpu_seconds(pid) - before.get(pid, 0.0)) for pid in pids)
        return used / max(1e-3, time.monotonic() - then)

    def idle_fraction(self) -> float | None:
        """Return the idle fraction of the CPUs in the affinity mask, as `rate`; None if unknown."""
        _, _, (idle_before, total_before) = self._samples[0]
        idle, total = cpu_ticks(self._cpus)
        return (idle - idle_before) / (total - total_before) if total > total_before else None


class CpuQuota:
    """CPU quota of the control groups of this process (cgroup v1 and v2), and how often the kernel enforced it.

    Args:
        root: Directory at which control groups are mounted.
        groups: File that lists the control groups of the process.
    """

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> None:
        self._folders = _limited_folders(root, groups)
        """Directories of the control groups that limit the process: its own one, and those that contain it."""

    @property
    def cpus(self) -> float | None:
        """Smallest quota of the control groups in CPUs; None if there is none."""
        return min((found for folder in self._folders if (found := _quota_of(folder)) is not None), default=None)

    def periods(self) -> tuple[int, int]:
        """Return the numbers of throttled periods and of all periods of the group that was throttled most."""
        return max((_periods_of(folder) for folder in self._folders), default=(0, 0))


def _limited_folders(root: Path, groups: Path) -> list[Path]:
    found = []
    with suppress(OSError):
        for line in groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            names = controllers.split(",")
            if controllers and "cpu" not in names:
                continue
            mounts = [root / "cpu", root / "cpu,cpuacct"] if controllers else [root, root / "unified"]
            for mount in mounts:
                folder = mount / path.lstrip("/")
                found += [each for each in (folder, *folder.parents) if each == mount or mount in each.parents]
    return [folder for folder in found if (folder / "cpu.stat").is_file()]


def _quota_of(folder: Path) -> float | None:
    """Return the quota of a control group in CPUs; None if it has none."""
    with suppress(OSError, ValueError):  # no such file in the other version, or "max"
        quota, period = (folder / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota_us = int((folder / "cpu.cfs_quota_us").read_text())
        return quota_us / int((folder / "cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    return None


def _periods_of(folder: Path) -> tuple[int, int]:
    """Return the numbers of throttled periods and of all periods of a control group."""
    try:
        counts = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0, 0
    return int(counts.get("nr_throttled", 0)), int(counts.get("nr_periods", 0))


def pressure(resource_name: Literal["cpu", "io"], folder: Path = Path("/proc/pressure")) -> float | None:
    """Return the fraction of the last 10 s for which a process waited for a resource (PSI); None if not measured."""
    with suppress(OSError, ValueError, IndexError):
        # some avg10=55.74 avg60=60.92 avg300=57.20 total=14235039903
        name, value = (folder / resource_name).read_text().split()[1].split("=")
        return float(value) / 100 if name == "avg10" else None
    return None


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
