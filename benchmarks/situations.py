"""Situations with a known bottleneck, built for real, and what the diagnosis reports: a truth table.

    python -m benchmarks.situations                      # all of them
    python -m benchmarks.situations io "slow link"       # some of them
    python -m benchmarks.situations --group judging      # those that did not set the thresholds
    python -m benchmarks.situations --follow io          # also follow the advice

Each situation runs a server, a training process that is a process of its own, and what disturbs them. The diagnosis is
read from ``/stats`` after `SETTLE_S` seconds of training: the one that most of `READINGS` readings have. It is *right*
if bottleneck and text are those of the table. ``unknown`` is neither right nor wrong. Any other bottleneck with a
confidence of at least `SURE` is wrong; below it, it is *unsure*.

The thresholds in `teleloader_server.stats.bottleneck` were set on the group ``thresholds``, and are judged on the group
``judging``. In situations that need CPUs, which the table marks with ``+``, ``machine`` is the truth if there are none:
with any text while other programs use them, and with the text of the table if the situation itself uses all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.processes import ROOT, SERVER, START_TIMEOUT, LoaderServer, certified, end, running
from teleloader import DataLoader, RemoteDataset
from teleloader.api.credentials import CA_VARIABLE, Credentials
from teleloader.cli.stats import TIMEOUT, read_all, total
from teleloader.transport.interface import BatchServer
from teleloader.transport.selection import server_at
from teleloader_shared.stats import ConsumerStats
from tests.faults.proxy import FaultProxy, Line

SETTLE_S: Final = 13.0
"""Seconds of training before the first reading: longer than the window of recent measurements."""
READINGS: Final = 5
READING_EVERY: Final = 1.0
SURE: Final = 0.7
"""Confidence from which a wrong bottleneck counts as wrong."""
FULL: Final = 0.1
"""Idle fraction of the CPUs below which the machine counts as busy."""
LENGTH: Final = 100_000
"""Samples of each dataset."""
CGROUPS: Final = Path("/sys/fs/cgroup/cpu")

# -- datasets


class Samples:
    """Dataset whose samples take CPU time and are blocked.

    Args:
        cpu: CPU time per sample in seconds.
        blocked: Time per sample for which the worker sleeps, in seconds.
        nbytes: Size of a sample in bytes.
        every: Number of samples of which one takes `slow` seconds longer.
        slow: Additional time of these samples, for which the worker sleeps.
        cold: Seconds after the first sample for which each sample takes 0.5 s longer.
    """

    def __init__(
        self, cpu: float = 0.0, blocked: float = 0.0, nbytes: int = 64, every: int = 0, slow: float = 0.0,
        cold: float = 0.0,
    ) -> None:  # fmt: skip
        self._cpu, self._blocked, self._every, self._slow, self._cold = cpu, blocked, every, slow, cold
        self._content = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        self._began: float | None = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> NDArray[np.uint8]:
        now = time.monotonic()
        self._began = self._began or now
        end = time.thread_time() + self._cpu
        while time.thread_time() < end:
            pass
        extra = self._slow if self._every and index % self._every == 0 else 0.0
        cold = 0.5 if now - self._began < self._cold else 0.0
        if self._blocked + extra + cold:
            time.sleep(self._blocked + extra + cold)
        return self._content


def computing() -> Samples:
    """Return samples that take 40 ms of CPU time."""
    return Samples(cpu=0.04)


def light() -> Samples:
    """Return samples that take 10 ms of CPU time."""
    return Samples(cpu=0.01)


def blocked() -> Samples:
    """Return samples that sleep for 80 ms."""
    return Samples(blocked=0.08)


def fast() -> Samples:
    """Return samples of 64 KiB that take no time."""
    return Samples(nbytes=2**16)


def tiny() -> Samples:
    """Return samples of 64 bytes that take no time."""
    return Samples()


def large() -> Samples:
    """Return samples of 4 MiB that take no time."""
    return Samples(nbytes=2**22)


class Nested:
    """Dataset whose samples have 1,000 arrays of 4 numbers."""

    def __init__(self) -> None:
        self._sample = {f"field {number}": np.arange(4) for number in range(1000)}

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, NDArray[np.int64]]:
        return self._sample


def straggling() -> Samples:
    """Return samples that sleep for 2 ms, and one of 64 that sleeps for 0.7 s longer."""
    return Samples(blocked=0.002, every=64, slow=0.7)


def uneven() -> Samples:
    """Return samples that sleep for 1 ms, and one of 4 that sleeps for 25 ms longer."""
    return Samples(blocked=0.001, every=4, slow=0.025)


def bulky() -> Samples:
    """Return samples of 600 KiB that sleep for 20 ms."""
    return Samples(blocked=0.02, nbytes=600 * 2**10)


def cold() -> Samples:
    """Return samples that take long for the first 6 s."""
    return Samples(blocked=0.001, cold=6.0)


def slow_server() -> Samples:
    """Return samples that sleep for 300 ms."""
    return Samples(blocked=0.3)


# -- situations


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training process."""

    step: float = 0.0
    """Seconds per step, for which it sleeps."""
    loader: dict[str, Any] = field(default_factory=dict)
    """Arguments of the `DataLoader`."""
    hogs: int = 0
    """Threads that hold the GIL."""
    epochs: int = 1_000_000
    pause_after: float = 1e9
    """Seconds after which it stops requesting batches."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Situation with a known bottleneck."""

    name: str
    group: Literal["thresholds", "judging"]
    expected: str
    text: str = ""
    """Part of the recommendation."""
    dataset: str
    workers: int = 2
    server: tuple[str, ...] = ()
    """Options of the server."""
    trainings: Sequence[Training] = (Training(),)
    """Training processes; the diagnosis is that of the first one."""
    disturbance: Callable[[LoaderServer], Any] | None = None
    """Context manager that changes the server's environment."""
    line: Line | None = None
    """Link between server and training process; None for a direct connection."""
    server_quota: float | None = None
    """CPU quota of the server; None for no quota."""
    client_quota: float | None = None
    """CPU quota of the training process; None for no quota."""
    others: tuple[str, ...] = ()
    """Datasets of further servers of the same fleet."""
    tls: bool = False
    """Whether the server uses TLS."""
    needs_cpu: bool = False
    """True if the machine is the truth while its CPUs are busy."""
    settle: float = SETTLE_S


@contextmanager
def hogs(server: LoaderServer) -> Iterator[None]:
    """Run programs that use all CPUs."""
    with ExitStack() as stack:
        for _ in range(3 * (os.cpu_count() or 1)):
            hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(hog.wait)
            stack.callback(hog.kill)
        yield


@contextmanager
def losing(server: LoaderServer) -> Iterator[None]:
    """Drop 4 % of the packets from the server."""
    rule = ["-i", "lo", "-p", "tcp", "--sport", str(server.port), "-m", "statistic", "--mode", "random"]
    rule += ["--probability", "0.04", "-j", "DROP"]
    subprocess.run(["iptables", "-A", "INPUT", *rule], check=True)
    try:
        yield
    finally:
        subprocess.run(["iptables", "-D", "INPUT", *rule], check=True)


@contextmanager
def quota(cpus: float | None) -> Iterator[tuple[str, ...]]:
    """Yield the beginning of a command that runs with a CPU quota; None for no quota."""
    if cpus is None:
        yield ()
        return
    folder = CGROUPS / f"teleloader_{os.getpid()}_{time.monotonic_ns()}"
    folder.mkdir()
    try:
        (folder / "cpu.cfs_quota_us").write_text(str(int(100_000 * cpus)))
        yield "sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$0" "$@"'
    finally:
        for member in (folder / "cgroup.procs").read_text().split():
            (CGROUPS / "cgroup.procs").write_text(member)
        folder.rmdir()


SAMPLER: Final[dict[str, Any]] = {"sampler": "own", "num_workers": 1, "prefetch_factor": 1}
"""Arguments of a loader with the smallest prefetch window, which does not grow with a sampler of the user."""

UNLENT: Final = ("--limit", "max_lent_slots=0")
"""Options of a server that sends batches to this machine as to another one."""

SITUATIONS: Final = (
    Situation(
        name="few workers", group="thresholds", expected="workers", text="would keep up (--num-workers", needs_cpu=True,
        dataset="computing", workers=1, trainings=[Training(step=0.025)],
    ),
    Situation(
        name="io", group="thresholds", expected="io", text="would keep up (--num-workers", dataset="blocked",
        trainings=[Training(step=0.02)],
    ),
    Situation(
        name="workers use all CPUs", group="thresholds", expected="machine", text="add another server",
        dataset="computing", workers=6, trainings=[Training(step=0.004)], needs_cpu=True,
    ),
    Situation(
        name="other programs", group="judging", expected="machine", text="other programs use", dataset="light",
        workers=1, trainings=[Training(step=0.012)], disturbance=hogs,
    ),
    Situation(
        name="CPU quota of the server", group="thresholds", expected="machine", text="increase the quota",
        dataset="light", workers=2, trainings=[Training(step=0.01)], server_quota=0.3, needs_cpu=True,
    ),
    Situation(
        name="straggler", group="judging", expected="io", text="Speed up this sample", dataset="straggling", workers=3,
        trainings=[Training(step=0.01, loader={"shuffle": True})],
    ),
    Situation(
        name="uneven batches", group="thresholds", expected="prefetch", text="prefetch more", dataset="uneven",
        trainings=[Training(step=0.004, loader=SAMPLER)],
    ),
    Situation(
        name="tiny batches", group="judging", expected="server", text="larger batches", dataset="tiny", needs_cpu=True,
    ),
    Situation(
        name="many consumers", group="thresholds", expected="server", text="larger batches", dataset="tiny",
        trainings=[Training(loader={"seed": number}) for number in range(6)], needs_cpu=True,
    ),
    Situation(
        name="GIL", group="thresholds", expected="client", text="hold the GIL", dataset="fast",
        trainings=[Training(hogs=1, loader={"batch_size": 8})], needs_cpu=True,
    ),
    Situation(
        name="CPU quota of the client", group="judging", expected="client", dataset="fast", client_quota=0.1,
        trainings=[Training(loader={"batch_size": 8})],
    ),
    Situation(
        name="empty loop", group="judging", expected="io", text="consumes each batch at once", dataset="blocked",
    ),
    Situation(
        name="slow link", group="thresholds", expected="network", text="Send fewer bytes", dataset="fast",
        trainings=[Training(step=0.01, loader={"batch_size": 4})], line=Line(bandwidth=4e6),
    ),
    Situation(
        name="slow link, compressed", group="judging", expected="network", text="smaller dtypes", dataset="fast",
        trainings=[Training(step=0.01, loader={"batch_size": 4, "compression": "lz4"})], line=Line(bandwidth=6e6),
    ),
    Situation(
        name="long link", group="thresholds", expected="network", text="take long to arrive", dataset="fast",
        trainings=[Training(step=0.002, loader=SAMPLER)], line=Line(latency=0.1),
    ),
    Situation(
        name="long link, large batches", group="judging", expected="network", text="take long to arrive",
        dataset="large", trainings=[Training(step=0.01, loader=SAMPLER)], line=Line(latency=0.3),
    ),
    Situation(
        name="lossy link", group="judging", expected="network", text="are retransmitted", dataset="fast",
        server=UNLENT, trainings=[Training(step=0.002, loader={"batch_size": 16})], disturbance=losing,
    ),
    Situation(
        name="same host", group="judging", expected="training", dataset="fast",
        trainings=[Training(step=0.002, loader={"batch_size": 16})],
    ),
    Situation(
        name="decoding", group="judging", expected="client", text="to receive and decode", dataset="Nested",
        server=UNLENT, trainings=[Training(loader={"batch_size": None})], needs_cpu=True,
    ),
    Situation(
        name="TLS", group="judging", expected="client", dataset="large", server=UNLENT, tls=True, needs_cpu=True,
    ),
    Situation(
        name="checksum", group="judging", expected="client", text="checksum=False", dataset="large",
        server=UNLENT, needs_cpu=True,
    ),
    Situation(
        name="memory budget", group="judging", expected="memory", text="double it (--memory-budget 4MiB)",
        dataset="bulky", workers=8, server=("--memory-budget", "2MiB"), trainings=[Training(step=0.004)],
    ),
    Situation(
        name="cold start over", group="judging", expected="training", dataset="cold", settle=20.0,
        trainings=[Training(step=0.03)],
    ),
    Situation(
        name="two servers, one slow", group="judging", expected="io", dataset="slow_server", others=("fast",),
        trainings=[Training(step=0.02)],
    ),
    Situation(
        name="shared, fast one", group="judging", expected="io", dataset="blocked",
        trainings=[Training(step=0.01, loader={"seed": 1}), Training(step=0.2, loader={"seed": 1})],
    ),
    Situation(
        name="shared, slow one", group="thresholds", expected="training", dataset="blocked",
        trainings=[Training(step=0.2, loader={"seed": 1}), Training(step=0.05, loader={"seed": 1})],
    ),
    Situation(
        name="compression", group="judging", expected="workers", text="'encode'", dataset="large", workers=1,
        trainings=[Training(step=0.003, loader={"compression": "zstd"})], needs_cpu=True,
    ),
    Situation(
        name="training", group="thresholds", expected="training", text="1 worker would suffice", dataset="light",
        trainings=[Training(step=0.05)], needs_cpu=True,
    ),
    Situation(
        name="idle", group="thresholds", expected="idle", dataset="fast", settle=25.0,
        trainings=[Training(step=0.01, pause_after=6.0)],
    ),
    Situation(
        name="finished", group="judging", expected="finished", dataset="fast", settle=12.0,
        trainings=[Training(step=0.001, epochs=1, loader={"batch_size": 1000})],
    ),
)  # fmt: skip


# -- training process


class InOrder:
    """Sampler of a user."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))

    def __len__(self) -> int:
        return LENGTH


def train(urls: list[str], training: Training) -> None:
    """Train until killed."""
    for _ in range(training.hogs):
        threading.Thread(target=_hog, daemon=True).start()
    options = {"batch_size": 1, "seed": 0, **training.loader}
    if "shuffle" in options or "sampler" in options:
        options.pop("seed")
    if "sampler" in options:
        options["sampler"] = InOrder()
    loader = DataLoader(RemoteDataset(urls if len(urls) > 1 else urls[0]), **options)
    began = time.monotonic()
    for _ in range(training.epochs):
        for _ in loader:
            if training.step:
                time.sleep(training.step)
            if time.monotonic() - began > training.pause_after:
                time.sleep(1e6)
    time.sleep(1e6)


def _hog() -> None:
    while True:
        pass


# -- measurement


@dataclass(frozen=True)
class Result:
    """Diagnosis of a situation."""

    situation: Situation
    bottleneck: str
    confidence: float
    advice: str
    evidence: dict[str, str]
    idle: float
    """Idle fraction of the machine's CPUs before the situation."""
    idle_within: float = 1.0
    """Idle fraction of the machine's CPUs during the readings."""
    batch_rate: float = 0.0
    """Batches/s that the training process receives."""
    data_wait: float = 0.0
    """Fraction of time for which its training loop waits for data."""

    @property
    def verdict(self) -> str:
        """``right``, ``unknown``, ``unsure`` or ``wrong``."""
        is_machine = self.situation.needs_cpu and self.bottleneck == "machine"
        is_found = self.bottleneck == self.situation.expected or (is_machine and self.idle_within < FULL)
        if (is_machine and self.idle < FULL) or (is_found and self.situation.text in self.advice):
            return "right"
        if self.bottleneck == "unknown":
            return "unknown"
        return "wrong" if self.confidence >= SURE or self.bottleneck == self.situation.expected else "unsure"


@contextmanager
def serving(situation: Situation) -> Iterator[LoaderServer]:
    """Run the first server of a situation."""
    with quota(situation.server_quota) as prefix, TemporaryDirectory() as folder:
        hosted = [f"data=benchmarks.situations:{situation.dataset}"]
        options, ca = certified(Path(folder)) if situation.tls else ((), None)
        server = LoaderServer(
            hosted, situation.workers, (*situation.server, *options), command=(*prefix, str(SERVER)), ca=ca
        )
        server.start()
        try:
            server.await_ready()
            yield server
        finally:
            end(server.process)


def measure(situation: Situation) -> Result:
    """Build a situation, and return its diagnosis."""
    idle = idle_fraction()
    with ExitStack() as stack:
        server = stack.enter_context(serving(situation))
        others = [running([f"data=benchmarks.situations:{other}"], 2) for other in situation.others]
        urls = [server.url, *(stack.enter_context(other).url for other in others)]
        if situation.line is not None:
            proxy = stack.enter_context(FaultProxy(server.url))
            proxy.line = situation.line
            urls = [proxy.url]
        if situation.disturbance is not None:
            stack.enter_context(situation.disturbance(server))
        names = []
        trusted = {} if server.ca is None else {CA_VARIABLE: server.ca}
        for training in situation.trainings:
            prefix = stack.enter_context(quota(situation.client_quota))
            command = [*prefix, sys.executable, "-m", "benchmarks.situations", "--train", _plain(urls, training)]
            process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **trusted})
            stack.callback(end, process)
            names.append(f":{process.pid}/")
        credentials = Credentials(ca=server.ca)
        asked = [server_at(url, TIMEOUT, credentials) for url in (urls if situation.others else [server.url])]
        deadline = time.monotonic() + START_TIMEOUT
        while not _is_training(asked, names[0]) and time.monotonic() < deadline:
            time.sleep(0.5)
        time.sleep(situation.settle)
        readings = []
        idle_within = idle_fraction(READINGS * READING_EVERY, lambda: readings.append(_consumer(asked, names[0])))
    found = [reading for reading in readings if reading is not None]
    if not found:
        return Result(situation, "unknown", 0.0, "The consumer is not listed.", {}, idle)
    bottleneck, _ = Counter(reading.diagnosis.bottleneck for reading in found).most_common(1)[0]
    same = [reading for reading in found if reading.diagnosis.bottleneck == bottleneck]
    last = same[-1].diagnosis
    return Result(
        situation, bottleneck, statistics.median(reading.diagnosis.confidence for reading in same), last.advice,
        {each.name: each.value for each in last.evidence}, idle, idle_within,
        statistics.median(reading.batches_per_second for reading in found),
        statistics.median(reading.data_wait_fraction or 0.0 for reading in found),
    )  # fmt: skip


def _plain(urls: list[str], training: Training) -> str:
    return json.dumps({"urls": urls, **vars(training)})


def _consumer(servers: list[BatchServer], name: str) -> ConsumerStats | None:
    """Return the statistics of a training process, as ``teleloader stats`` shows them."""
    found = total(read_all(servers, 1000))
    return next((consumer for consumer in found.consumers if name in consumer.consumer), None)


def _is_training(servers: list[BatchServer], name: str) -> bool:
    """Return True if a training process has received its first batches."""
    found = _consumer(servers, name)
    return found is not None and found.data_wait_fraction is not None


def followed(situation: Situation, advice: str) -> Situation | None:
    """Return a situation with the settings that an advice names; None if it names none that can be set here."""
    first = situation.trainings[0]
    loader: dict[str, Any] = {}
    if (prefetch := re.search(r"prefetch_factor=(\d+)", advice)) is not None:
        loader = {"num_workers": 1, "prefetch_factor": int(prefetch[1])}
    elif 'compression="zstd"' in advice:
        loader = {"compression": "zstd"}
    elif "larger batches" in advice:
        loader = {"batch_size": 64 * first.loader.get("batch_size", 1)}
    if loader:
        changed = replace(first, loader={**first.loader, **loader})
        return replace(situation, trainings=[changed, *situation.trainings[1:]])
    if (budget := re.search(r"--memory-budget (\w+)", advice)) is not None:
        return replace(situation, server=("--memory-budget", budget[1]))
    if (workers := re.search(r"--num-workers (\d+)", advice)) is not None:
        return replace(situation, workers=int(workers[1]))
    return None


def follow(result: Result) -> None:
    """Follow the advice of a result, and print what it changes.

    The advice is good if samples/s rise by 20 %, or if half of the data wait disappears.
    """
    changed = followed(result.situation, result.advice)
    if changed is None:
        return
    after = measure(changed)
    sizes = [each.trainings[0].loader.get("batch_size", 1) for each in (result.situation, changed)]
    rates = [each.batch_rate * size for each, size in zip((result, after), sizes, strict=True)]
    is_good = rates[1] >= 1.2 * rates[0] or after.data_wait <= 0.5 * result.data_wait
    print(
        f"{'good' if is_good else 'bad':8} advice for {result.situation.name}: {rates[0]:,.1f} -> {rates[1]:,.1f} "
        f"samples/s, data wait {result.data_wait:.0%} -> {after.data_wait:.0%}",
        flush=True,
    )


def idle_fraction(duration: float = 1.0, every: Callable[[], object] = lambda: None) -> float:
    """Return the idle fraction of the machine's CPUs during some seconds; call `every` after each second."""
    from teleloader_server.workers.procfs import cpu_ticks

    cpus = os.sched_getaffinity(0)
    idle, total = cpu_ticks(cpus)
    for _ in range(round(duration / READING_EVERY)):
        time.sleep(READING_EVERY)
        every()
    idle_now, total_now = cpu_ticks(cpus)
    return (idle_now - idle) / max(1, total_now - total)


def show(result: Result) -> None:
    """Print one line of the table, and the reasons of a result that is not right."""
    situation = result.situation
    mark = "+" if situation.needs_cpu else " "
    print(
        f"{result.verdict:8} {situation.name:28} {situation.group:10} expected {situation.expected + mark:11} "
        f"found {result.bottleneck:9} {result.confidence:.2f}  idle before {result.idle:.0%}",
        flush=True,
    )
    if result.verdict != "right":
        print(f"         {result.advice}\n         {result.evidence}", flush=True)


def main() -> int:
    """Run the command line; return 1 if a diagnosis is wrong."""
    parser = argparse.ArgumentParser(description="Truth table of the diagnosis.")
    parser.add_argument("names", nargs="*", help="situations to build; all by default")
    parser.add_argument("--group", choices=["thresholds", "judging"], help="situations of one group only")
    parser.add_argument("--follow", action="store_true", help="also follow each advice, and measure again")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        plain = json.loads(options.train)
        train(plain.pop("urls"), Training(**plain))
        return 0
    wanted = [
        situation
        for situation in SITUATIONS
        if options.group in (None, situation.group) and (not options.names or situation.name in options.names)
    ]
    results = []
    for situation in wanted:
        results.append(measure(situation))
        show(results[-1])
        if options.follow:
            follow(results[-1])
    counts = Counter(result.verdict for result in results)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("right", "unknown", "unsure", "wrong")))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
