"""Memory, processor time and state of processes, as the kernel reports them."""

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
    """Return the memory of each process; None is this process, and one that has ended has none.

    This reads every mapping of the processes, which takes milliseconds: do not call it in the event loop.
    """
    import psutil  # here: `serve` must be importable without the extra `server`, to report that it is missing

    found = {}
    for pid in pids:
        try:
            info = psutil.Process(pid).memory_full_info()
            found[pid] = Memory(info.rss, info.pss)
        except psutil.Error:
            found[pid] = NO_MEMORY
    return found


def resident_bytes(pid: int) -> int:
    """Return the bytes of resident memory, shared pages included; 0 for a process that has ended. Cheap."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def is_stopped(pid: int) -> bool:
    """Return True if a signal (SIGSTOP, SIGTSTP) has stopped the process, False if a debugger holds it."""
    try:
        # the name of the program, in parentheses, may contain anything
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def cpu_seconds(pid: int | None) -> float:
    """Return the processor time of a process; None is this process, and one that has ended has used none."""
    if pid is None:
        return time.process_time()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class CpuUse:
    """Recent processor use of some processes. The use of processes that have ended is not counted.

    Call it in the event loop only every few seconds: it reads one file per process.
    """

    def __init__(self) -> None:
        # all others start later
        self._looks: deque[tuple[float, dict[int | None, float]]] = deque(
            [(time.monotonic(), {None: cpu_seconds(None)})], maxlen=2
        )

    def look(self, pids: Iterable[int | None]) -> None:
        """Record their processor times."""
        self._looks.append((time.monotonic(), {pid: cpu_seconds(pid) for pid in pids}))

    def rate(self, pids: Iterable[int | None]) -> float:
        """Return the number of processors in use since the `look` before the last."""
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
    """Return the number of processes that the kernel has killed for lack of memory, in containers too."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))
