"""Recent use of the machine's CPUs and of the server's main thread, from samples that `StatsCollector` takes."""

from __future__ import annotations

from collections import deque

from teleloader_server.dispatch.rates import RateWindow, as_share
from teleloader_server.stats.evidence import Machine, MainProcess
from teleloader_server.workers.procfs import CpuQuota, CpuWait, pressure


class MachineUse:
    """Recent use of the CPUs that the server may use."""

    def __init__(self) -> None:
        self._quota = CpuQuota()
        self._periods: deque[tuple[int, int]] = deque([self._quota.periods()], maxlen=2)

    def sample(self) -> None:
        """Record the number of throttled periods; the period of `current` begins at the second-to-last sample."""
        self._periods.append(self._quota.periods())

    def current(self, cpus: int, own: float, idle: float | None) -> Machine:
        """Return the recent use.

        Args:
            cpus: Number of CPUs that the server may use.
            own: Number of CPUs that its processes used.
            idle: Idle fraction of the CPUs; None if unknown.
        """
        quota = self._quota.cpus
        throttled = None
        if quota is not None:
            (throttled_now, now), (throttled_before, before) = self._quota.periods(), self._periods[0]
            throttled = as_share((throttled_now - throttled_before) / (now - before)) if now > before else 0.0
        return Machine(cpus, own, idle, quota, throttled, pressure("cpu"), pressure("io"))


class MainThread:
    """Recent CPU time of the thread that creates this object: that of the event loop.

    Args:
        now: Current time in seconds.
    """

    def __init__(self, now: float) -> None:
        self._thread = CpuWait()
        times = self._thread.times()
        self._window = None if times is None else RateWindow(now, *times)

    def mark(self, now: float) -> float | None:
        """Sample the totals; called about once per second, in the same thread.

        Returns:
            The fraction of the time since the latest sample for which the thread computed; None if unknown.
        """
        times = self._thread.times()
        if self._window is None or times is None:
            return None
        cpu = self._window.latest(now, *times)[0]
        self._window.mark(now, *times)
        return as_share(cpu)

    def current(self, now: float, lag: float) -> MainProcess:
        """Return the recent use.

        Args:
            now: Current time in seconds.
            lag: Mean lag of the event loop in seconds.
        """
        times = self._thread.times()
        if self._window is None or times is None or not self._window.span(now):
            return MainProcess(lag)
        cpu, cpu_wait = self._window.rates(now, *times)
        return MainProcess(lag, as_share(cpu), as_share(cpu_wait))
