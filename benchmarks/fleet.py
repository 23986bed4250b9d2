"""Simulation of 10^4 training processes and 10^3 servers in virtual time: ``python -m benchmarks.fleet``.

The schedulers are those of the client; see `fleet_simulation` for what is simulated. The command prints tables and
writes the plots of docs/fleet.md, which needs matplotlib: pip install --group bench.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Final

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from benchmarks import machine
from benchmarks.fleet_simulation import Job, Loader, Model, Server, Simulation, chosen
from teleloader.fleet.servers import MAX_USED_SERVERS
from teleloader_shared.rendezvous import Assignment

BATCH_SECONDS: Final = 0.8
"""Median seconds per batch of a worker of a server of medium speed."""
SPEEDS: Final = (0.7, 1.0, 1.4)
"""Speeds of the servers, as factors."""
WORKERS: Final = (2, 4, 8)
MODEL: Final = Model(
    round_trip=0.005,
    round_trip_sigma=0.5,
    compute_sigma=0.4,
    stall_interval=300,
    stall=1.0,
    stall_sigma=1.0,
    rate_sigma=0.1,
    frame_bytes=4 * 10**6,
)
STEPS: Final = (0.7, 2.8)
"""Shortest and longest training step, in seconds; the logarithm is distributed uniformly."""
GROUP: Final = 8
"""Training processes that share an epoch, in jobs of the last two kinds."""
DATA_PARALLEL: Final = "data parallel"
MODEL_PARALLEL: Final = "model parallel"
EXPERIMENTS: Final = "experiments"
KINDS: Final = (DATA_PARALLEL, MODEL_PARALLEL, EXPERIMENTS)
EPOCH: Final = 10**6
"""Batches of an epoch, more than are loaded."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A fleet, its jobs, and the changes of its servers."""

    servers: int = 1000
    jobs: int = 159
    """Number of jobs; a third of each kind."""
    ranks: int = 64
    """Training processes of a job, a multiple of `GROUP`."""
    seconds: float = 60.0
    start_seconds: float = 15.0
    """Seconds in which the jobs start, except the late ones."""
    late_jobs: int = 15
    """Number of these jobs that start in the 5 s after the join."""
    join_at: float = 30.0
    joining: int = 50
    """Servers that join at this time."""
    loss_at: float = 45.0
    lost: int = 20
    """Servers of a rack whose power fails at this time."""
    model: Model = MODEL
    seed: int = 0

    def build(self) -> Fleet:
        """Return the fleet at the time 0."""
        rng = random.Random(self.seed)
        servers = [self._server(rng, number) for number in range(self.servers + self.joining)]
        simulation = Simulation(servers[: self.servers], self.model, self.seed)
        fleet = Fleet(self, simulation)
        for number in range(self.jobs):
            is_late = number >= self.jobs - self.late_jobs
            at = self.join_at + rng.uniform(0, 5) if is_late else rng.uniform(0, self.start_seconds)
            self._add_job(fleet, rng, number, at)
        if self.joining:
            simulation.join(self.join_at, *servers[self.servers :])
        if self.lost:
            simulation.power_off(self.loss_at, *servers[: self.lost])
        return fleet

    def _server(self, rng: random.Random, number: int) -> Server:
        rack, place = divmod(number, 20)
        seconds = BATCH_SECONDS / rng.choice(SPEEDS)
        return Server(f"http://rack{rack}-{place}:8000", rng.choice(WORKERS), seconds)

    def _add_job(self, fleet: Fleet, rng: random.Random, number: int, at: float) -> None:
        """Add a job; its processes start within a second, and the experiments of a sweep within `start_seconds`."""
        kind = KINDS[number % len(KINDS)]
        step = STEPS[0] * (STEPS[1] / STEPS[0]) ** rng.random()
        sharing = 1 if kind == DATA_PARALLEL else GROUP
        loaders = [Loader(f"{number}/{rank}", kind, EPOCH, rank) for rank in range(self.ranks // sharing)]
        fleet.loaders += loaders
        position = rng.randrange(EPOCH // 2)  # the jobs resume
        # an experiment has a process for each loader; in other jobs, consecutive processes share a loader
        is_sweep = kind == EXPERIMENTS
        readers = [loaders] * GROUP if is_sweep else [[loader for loader in loaders for _ in range(sharing)]]
        for processes in readers:
            job = Job(fleet.simulation, step * (rng.uniform(0.95, 1.05) if is_sweep else 1), len(processes))
            begin = at + (rng.uniform(0, self.start_seconds) if is_sweep else 0)
            for loader in processes:
                fleet.simulation.consume(begin + rng.random(), loader, job, position)


@dataclass
class Fleet:
    """Simulated fleet with its loaders."""

    scenario: Scenario
    simulation: Simulation
    loaders: list[Loader] = field(default_factory=list)
    loads: dict[Server, tuple[float, float]] = field(default_factory=dict)
    """Fraction of the busy workers, and requests/s, of each server in the half of the time before the loss."""

    def run(self, progress: Callable[[float], object] | None = None) -> Fleet:
        """Run the scenario."""
        simulation, end = self.simulation, self.scenario.loss_at
        begin = end / 2
        before: dict[Server, tuple[float, int]] = {}

        def remember() -> None:
            for server in simulation.servers:
                server.measure(begin)
            before.update({server: (server.busy_seconds, server.requests) for server in simulation.servers})

        def measure() -> None:
            for server, (busy, requests) in before.items():
                server.measure(end)
                load = (server.busy_seconds - busy) / server.num_workers / (end - begin)
                self.loads[server] = load, (server.requests - requests) / (end - begin)

        simulation.later(begin, remember)
        simulation.later(end, measure)
        simulation.run(self.scenario.seconds, progress)
        return self

    def work(self, kind: str) -> float:
        """Return the number of computed batches of a kind of jobs, divided by the number of distinct ones."""
        loaders = [loader for loader in self.loaders if loader.kind == kind]
        return sum(each.computed.total() for each in loaders) / max(1, sum(len(each.computed) for each in loaders))

    def work_between(self, begin: float, end: float) -> float:
        """Return the number of batches computed in some seconds, divided by the number of those computed first."""
        seconds = range(int(begin), int(end))
        computed, repeated = (
            sum(counts[second] for second in seconds)
            for counts in (self.simulation.computed_at, self.simulation.repeated_at)
        )
        return computed / max(1, computed - repeated)

    @property
    def hedges(self) -> float:
        """Fraction of the batches that were requested from a second server."""
        return sum(consumer.scheduler.hedges for consumer in self.simulation.consumers) / self.delivered

    @property
    def delivered(self) -> int:
        """Number of batches that training loops have received."""
        return len(self.simulation.waits) + len(self.simulation.first_waits)

    @property
    def data_wait(self) -> float:
        """Fraction of the time of the jobs in which at least one of their processes waits, after their first batch."""
        return sum(seconds for _, seconds in self.simulation.job_waits) / self.simulation.job_seconds

    @property
    def waiting_by_second(self) -> list[float]:
        """Waits that began in each second, as a fraction of the time of all jobs."""
        seconds = [0.0] * int(self.scenario.seconds)
        for began, wait in self.simulation.job_waits:
            seconds[int(began)] += wait
        jobs = len({id(consumer.job) for consumer in self.simulation.consumers})
        return [wait / jobs for wait in seconds]


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile of the values, which are sorted."""
    return values[min(len(values) - 1, int(fraction * len(values)))]


# -- movement of batches


def moved(number: int, change: str, blocks: int = 640, loaders: int = 8) -> float:
    """Return the fraction of a loader's blocks that another server computes after a change.

    Args:
        number: Number of servers of the loader.
        change: ``joins``: one more server. ``leaves``: one less. ``is replaced``: another one in its place.
        blocks: Number of blocks to compare.
        loaders: Number of loaders to average over.
    """
    names = [f"http://server-{place}:8000" for place in range(number)]
    after = {"joins": [*names, "new"], "leaves": names[1:], "is replaced": [*names[1:], "new"]}[change]
    differ = 0
    for loader in range(loaders):
        one, other = (Assignment(str(loader), 0, dict.fromkeys(each, 1.0)) for each in (names, after))
        differ += sum(one.owner(block) != other.owner(block) for block in range(blocks))
    return differ / blocks / loaders


def servers_used(servers: int, ranks: int) -> list[int]:
    """Return the number of servers that a job uses, by its number of loaders."""
    names = tuple(f"http://server-{place}:8000" for place in range(servers))
    used: set[str] = set()
    counts = []
    for rank in range(ranks):
        used.update(chosen(names, f"job/{rank}"))
        counts.append(len(used))
    return counts


# -- hedging of fast training loops


LOOP_STEPS: Final = (0.05, 0.2, 0.8)
"""Training steps for which hedging is compared, in seconds."""


def fast_loops(step: float, *, hedging: bool) -> Simulation:
    """Run 64 training processes on 16 servers of 4 workers, which are 60 % busy, for 30 s.

    Args:
        step: Seconds of a training step.
        hedging: Whether overdue requests are sent to a second server.
    """
    servers = [Server(f"http://server-{place}:8000", 4, 0.6 * step) for place in range(16)]
    simulation = Simulation(servers, replace(MODEL, stall_interval=30, frame_bytes=10**6, hedging=hedging))
    for number in range(16):
        job = Job(simulation, step, 4)
        for rank in range(4):
            simulation.consume(number / 8, Loader(f"{number}/{rank}", "", EPOCH, rank), job, 1000 * number)
    simulation.run(30)
    return simulation


def _loops(step_done: Callable[[], object]) -> Table:
    table = Table(title="hedging by the step of the training loop; a server stalls every 30 s", title_justify="left")
    table.add_column("step, s")
    table.add_column("hedging")
    for heading in ("time spent waiting", "wait in a step, s: p99", "p99.9", "maximum", "work factor"):
        table.add_column(heading, justify="right")
    for step in LOOP_STEPS:
        for hedging in (True, False):
            simulation = fast_loops(step, hedging=hedging)
            waits = sorted(seconds for _, seconds in simulation.job_waits)
            computed, repeated = simulation.computed_at.total(), simulation.repeated_at.total()
            table.add_row(
                f"{step:g}",
                "yes" if hedging else "no",
                f"{sum(waits) / simulation.job_seconds:.2%}",
                *(f"{quantile(waits, part):.2f}" for part in (0.99, 0.999, 1)),
                f"{computed / (computed - repeated):.3f}",
            )
            step_done()
    return table


# -- tables


JOB_SIZES: Final = (8, 16, 64, 128)
"""Numbers of loaders of a job for which the servers are counted."""


def _facts(console: Console, fleet: Fleet) -> None:
    simulation, scenario = fleet.simulation, fleet.scenario
    loads = [load for load, _ in fleet.loads.values()]
    by_size = {
        size: [load for server, (load, _) in fleet.loads.items() if server.num_workers == size] for size in WORKERS
    }
    requests = sorted(rate for _, rate in fleet.loads.values())
    used = servers_used(scenario.servers, max(JOB_SIZES))
    buffered = sorted(consumer.most_buffered for consumer in simulation.consumers)
    table = Table(title="load of the servers, with hedging", title_justify="left")
    table.add_column("measurement")
    table.add_column("value", justify="right")
    for name, value in (
        ("training processes", f"{len(simulation.consumers):,}"),
        ("loaders", f"{len(fleet.loaders):,}"),
        ("servers, without those that join", f"{scenario.servers:,}"),
        (
            f"servers of a job with {', '.join(map(str, JOB_SIZES))} loaders",
            ", ".join(f"{used[size - 1]:,}" for size in JOB_SIZES),
        ),
        ("batches delivered", f"{fleet.delivered:,}"),
        ("busy workers, mean", f"{fmean(loads):.1%}"),
        ("busy workers, standard deviation over servers", f"{pstdev(loads):.1%}"),
        *(
            (
                f"busy workers, least and most loaded server with {size} workers",
                f"{min(of_size):.1%}, {max(of_size):.1%}",
            )
            for size, of_size in by_size.items()
        ),
        ("requests/s of a server, median and maximum", f"{quantile(requests, 0.5):.1f}, {requests[-1]:.1f}"),
        ("prefetched batches of a process, median and maximum", f"{quantile(buffered, 0.5)}, {buffered[-1]}"),
    ):
        table.add_row(name, value)
    console.print(table)


def _name(fraction: float) -> str:
    """Return the usual name of a quantile."""
    return "maximum" if fraction == 1 else f"p{100 * fraction:g}"


def _comparison(console: Console, fleets: dict[str, Fleet]) -> None:
    table = Table(title="waits and computed batches", title_justify="left")
    table.add_column("measurement")
    for name in fleets:
        table.add_column(name, justify="right")

    def row(name: str, figure: Callable[[Fleet], str | float]) -> None:
        figures = map(figure, fleets.values())
        table.add_row(name, *(each if isinstance(each, str) else f"{each:.3f}" for each in figures))

    def first(fleet: Fleet) -> str:
        waits = sorted(fleet.simulation.first_waits)
        return ", ".join(f"{quantile(waits, part):.2f}" for part in (0.5, 0.99, 1))

    def wait(of_jobs: bool, fraction: float, fleet: Fleet) -> str:
        waits = fleet.simulation.job_waits if of_jobs else fleet.simulation.waits
        return f"{quantile(sorted(seconds for _, seconds in waits), fraction):.2f}"

    def waiting(fleet: Fleet) -> str:
        steps = fleet.simulation.job_waits
        return f"{sum(seconds > 0.001 for _, seconds in steps) / len(steps):.2%}"

    scenario = next(iter(fleets.values())).scenario
    row("first batch of a process, s: median, p99, maximum", first)
    for part in (0.99, 0.999, 0.9999, 1.0):
        row(
            f"wait of a process for a batch, s: {'maximum' if part == 1 else f'p{100 * part:g}'}",
            partial(wait, False, part),
        )
    row("steps of a job in which a process waits", waiting)
    row("time of the jobs in which a process waits", lambda fleet: f"{fleet.data_wait:.2%}")
    row(
        "the same in the worst second from the join on",
        lambda fleet: f"{max(fleet.waiting_by_second[int(scenario.join_at) :]):.2%}",
    )
    for part in (0.99, 0.999, 1.0):
        row(f"wait of a job in a step, s: {_name(part)}", partial(wait, True, part))
    row("hedged batches", lambda fleet: f"{fleet.hedges:.2%}")
    changes = scenario.join_at, scenario.loss_at
    for name, begin, end in (
        ("before the join", 0, changes[0]),
        ("from the join to the power failure", *changes),
        ("after the power failure", changes[1], scenario.seconds),
    ):
        row(f"work factor {name}", partial(Fleet.work_between, begin=begin, end=end))
    for kind in KINDS:
        row(f"work factor of {kind} jobs", partial(Fleet.work, kind=kind))
    console.print(table)


def _movement(console: Console) -> dict[str, list[float]]:
    numbers = (2, 4, 8, 16, MAX_USED_SERVERS)
    shares = {change: [moved(number, change) for number in numbers] for change in ("joins", "leaves", "is replaced")}
    table = Table(
        title="fraction of a loader's blocks that another server computes after a change", title_justify="left"
    )
    table.add_column("servers of the loader")
    for number in numbers:
        table.add_column(str(number), justify="right")
    for change, row in shares.items():
        table.add_row(f"a server {change}", *(f"{share:.2f}" for share in row))
    console.print(table)
    return shares


# -- the command


def _completed(progress: Progress, bar: TaskID, now: float) -> None:
    progress.update(bar, completed=now)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__.partition(":")[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the fleet: check that everything runs")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write the plots to a folder, such as docs")
    options = parser.parse_args(arguments)
    scenario = Scenario(servers=100, jobs=15, late_jobs=3, joining=5, lost=2) if options.quick else Scenario()
    if options.plots is not None:
        from benchmarks import fleet_plots  # before the simulation: matplotlib may be missing
    console = machine.announce(machine.describe())
    fleets: dict[str, Fleet] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for name, hedging in (("with hedging", True), ("without hedging", False)):
            bar = progress.add_task(name, total=scenario.seconds)
            simulated = replace(scenario, model=replace(scenario.model, hedging=hedging)).build()
            fleets[name] = simulated.run(partial(_completed, progress, bar))
        bar = progress.add_task("fast training loops", total=2 * len(LOOP_STEPS))
        loops = _loops(partial(progress.advance, bar))
    _facts(console, fleets["with hedging"])
    _comparison(console, fleets)
    console.print(loops)
    shares = _movement(console)
    if options.plots is not None:
        fleet_plots.draw(fleets, shares, servers_used(scenario.servers, 512), options.plots)
        console.print(f"the plots are in {options.plots}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
