"""What the kernel says of processes: their memory, and how they fare."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple


class Memory(NamedTuple):
    """Bytes of a process."""

    rss: int
    """Resident, shared pages included."""
    pss: int
    """Resident, each shared page divided by the number of processes that share it."""


NO_MEMORY: Final = Memory(0, 0)


def memory(pids: Iterable[int | None]) -> dict[int | None, Memory]:
    """The memory of each process; None is this one, and one that is gone has none.

    Reads every mapping of the processes, which takes milliseconds: not for the event loop.
    """
    import psutil  # here, so that `serve` can be imported without the server's extra, to say that it is missing

    found = {}
    for pid in pids:
        try:
            info = psutil.Process(pid).memory_full_info()
            found[pid] = Memory(info.rss, info.pss)
        except psutil.Error:
            found[pid] = NO_MEMORY
    return found


def resident_bytes(pid: int) -> int:
    """Resident memory, shared pages included; 0 for a process that is gone. Cheap."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped the process (SIGSTOP, SIGTSTP); not so one that a debugger holds."""
    try:
        # the name of the program, in parentheses, may hold anything
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def cpu_seconds(pid: int | None) -> float:
    """Processor time that a process has used; None is this one, and one that is gone has used none."""
    if pid is None:
        return time.process_time()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class CpuUse:
    """How many processors some processes use lately; what one used that has ended is not counted.

    Not for the event loop more often than every few seconds: each process is a file to be read.
    """

    def __init__(self) -> None:
        # all but this process begin later
        self._looks: deque[tuple[float, dict[int | None, float]]] = deque(
            [(time.monotonic(), {None: cpu_seconds(None)})], maxlen=2
        )

    def look(self, pids: Iterable[int | None]) -> None:
        """Note their times."""
        self._looks.append((time.monotonic(), {pid: cpu_seconds(pid) for pid in pids}))

    def rate(self, pids: Iterable[int | None]) -> float:
        """How many they have used since the last look but one."""
        then, before = self._looks[0]
        used = sum(max(0.0, cpu_seconds(pid) - before.get(pid, 0.0)) for pid in pids)
        return used / max(1e-3, time.monotonic() - then)


def shortage(error: OSError) -> str:
    """Describe what the machine lacks where a system call fails with `error`, and how to provide it."""
    match error.errno:
        case errno.EMFILE:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            return (
                f"process {os.getpid()} has no file descriptor left: RLIMIT_NOFILE is {soft:,} of at most {hard:,}; "
                "raise it (ulimit -n)"
            )
        case errno.ENFILE:
            return "the machine has no file descriptor left: raise fs.file-max (sysctl)"
        case errno.ENOMEM:
            return "the machine has not enough memory: give it more, or start fewer workers"
        case errno.EAGAIN:
            return "no further process is allowed: raise RLIMIT_NPROC (ulimit -u), or the pids limit of the container"
    return error.strerror or str(error)


def oom_kills() -> int:
    """How many processes the kernel has ended on this machine because memory ran out, in containers too."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))
