"""Plots of `benchmarks.fleet`: SVG files for the light and the dark theme. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl

if TYPE_CHECKING:
    from benchmarks.fleet import Fleet

mpl.use("Agg")
import matplotlib.pyplot as plt

THEMES: Final = {
    "--ground": ("#fefefe", "#15181d"),
    "--ink": ("#1f2328", "#e6edf3"),
    "--line": ("#d1d9e0", "#3d444d"),
    "--first": ("#0b6bcb", "#6cb6ff"),
    "--second": ("#bc4c00", "#f0883e"),
    "--third": ("#1a7f37", "#57ab5a"),
}
"""Colors in the light and in the dark theme; the first one is also that of matplotlib."""
GROUND, INK, LINE, *COLORS = (light for light, _ in THEMES.values())
STYLE: Final = {
    "svg.hashsalt": "teleloader",  # the same figures give the same file
    "figure.facecolor": GROUND,
    "savefig.facecolor": GROUND,
    "axes.facecolor": GROUND,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
LEAST_WAIT: Final = 0.01
"""Shortest wait in the plots, in seconds."""


def draw(fleets: Mapping[str, Fleet], moved: Mapping[str, Sequence[float]], used: Sequence[int], folder: Path) -> None:
    """Write the plots.

    Args:
        fleets: Results with and without hedging, by name.
        moved: Fraction of the blocks that a change moves, for 2, 4, 8, 16 and 32 servers, by the change.
        used: Number of servers that a job uses, by its number of loaders.
        folder: Folder for the files.
    """
    with mpl.rc_context(STYLE):
        save(_waits(fleets), folder / "fleet-waits.svg")
        save(_load(next(iter(fleets.values()))), folder / "fleet-load.svg")
        save(_work(fleets, moved), folder / "fleet-work.svg")
        save(_servers(used, next(iter(fleets.values()))), folder / "fleet-servers.svg")


def save(figure: Any, path: Path) -> None:
    """Write a figure as an SVG file with the colors of both themes."""
    figure.tight_layout()
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    plt.close(figure)
    text = written.getvalue()
    for name, (light, _) in THEMES.items():
        text = text.replace(light, f"var({name})")
    light, dark = ("; ".join(f"{name}: {colors[theme]}" for name, colors in THEMES.items()) for theme in (0, 1))
    style = f"svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n"
    path.write_text(text.replace('<style type="text/css">', f'<style type="text/css">{style}', 1))


def _panels() -> Any:
    return plt.subplots(1, 2, figsize=(9.5, 3.6))


def _mark_changes(axis: Any, fleet: Fleet) -> None:
    scenario = fleet.scenario
    top = axis.get_ylim()[1]
    for at, text in (
        (scenario.join_at, f"{scenario.joining} servers join"),
        (scenario.loss_at, f"{scenario.lost} servers lose power"),
    ):
        axis.axvline(at, color=INK, linewidth=0.8, linestyle=":")
        axis.text(at + 0.4, top, text, rotation=90, va="top", fontsize="x-small")


def _waits(fleets: Mapping[str, Fleet]) -> Any:
    """Draw the distribution of the waits of jobs, and the waits over time."""
    figure, (tail, time) = _panels()
    for color, (name, fleet) in zip(COLORS, fleets.items(), strict=False):
        waits = sorted(seconds for _, seconds in fleet.simulation.job_waits)
        longer = [1 - place / len(waits) for place in range(len(waits))]
        tail.step(waits, longer, where="post", color=color, label=name)
        seconds = fleet.waiting_by_second
        time.step(range(len(seconds)), [100 * share for share in seconds], where="post", color=color, label=name)
    tail.set(xscale="log", yscale="log", xlim=(LEAST_WAIT, None), ylim=(None, 0.3))
    tail.set_xlabel("wait of the slowest process of a job, s")
    tail.set_ylabel("fraction of the steps that wait longer")
    tail.set_title("Tail of the waits for batches")
    tail.legend()
    time.set_xlabel("simulated time, s")
    time.set_ylabel("time of the jobs spent waiting, %")
    time.set_title("Waits that began in each second")
    time.set_ylim(0, None)
    _mark_changes(time, next(iter(fleets.values())))
    return figure


def _load(fleet: Fleet) -> Any:
    """Draw the load of the servers by their size, and their requests."""
    figure, (busy, requests) = _panels()
    sizes = sorted({server.num_workers for server in fleet.loads})
    for color, size in zip(COLORS, sizes, strict=False):
        loads = [load for server, (load, _) in fleet.loads.items() if server.num_workers == size]
        rates = [rate for server, (_, rate) in fleet.loads.items() if server.num_workers == size]
        bins = [5 * place for place in range(21)]
        busy.hist([100 * load for load in loads], bins, histtype="step", linewidth=1.6, color=color)
        highest = 5 * (1 + int(max(rate for _, rate in fleet.loads.values()) / 5))
        requests.hist(
            rates, list(range(highest + 1)), histtype="step", linewidth=1.6, color=color, label=f"{size} workers"
        )
    busy.set_xlabel("busy workers, %")
    requests.set_xlabel("requests per second")
    for axis in (busy, requests):
        axis.set_ylabel("number of servers")
    busy.set_title("Load of the servers")
    requests.set_title("Requests to the servers")
    requests.legend(title="servers with")
    return figure


def _work(fleets: Mapping[str, Fleet], moved: Mapping[str, Sequence[float]]) -> Any:
    """Draw the repeated computations over time, and the blocks that a change moves."""
    figure, (time, shares) = _panels()
    for color, (name, fleet) in zip(COLORS, fleets.items(), strict=False):
        simulation = fleet.simulation
        seconds = range(int(fleet.scenario.seconds))
        repeated = [100 * simulation.repeated_at[each] / max(1, simulation.computed_at[each]) for each in seconds]
        time.step(seconds, repeated, where="post", color=color, label=name)
    time.set_xlabel("simulated time, s")
    time.set_ylabel("batches computed again, %")
    time.set_title("Repeated computations")
    time.set_ylim(0, 1.5 * time.get_ylim()[1])
    time.legend(loc="upper left", fontsize="small")
    _mark_changes(time, next(iter(fleets.values())))
    numbers = [2, 4, 8, 16, 32]
    for color, (change, row) in zip(COLORS, moved.items(), strict=True):
        shares.plot(numbers, [100 * share for share in row], marker="o", color=color, label=f"a server {change}")
    shares.plot(numbers, [100 / number for number in numbers], color=INK, linestyle="--", label="minimum: 1 / servers")
    shares.set_xscale("log", base=2)
    shares.set_xticks(numbers, list(map(str, numbers)))
    shares.set_ylim(0, None)
    shares.set_xlabel("servers of the loader")
    shares.set_ylabel("blocks with another server, %")
    shares.set_title("Blocks moved by a change")
    shares.legend(fontsize="small")
    return figure


def _servers(used: Sequence[int], fleet: Fleet) -> Any:
    """Draw the number of servers of a job, and the prefetched batches of the training processes."""
    figure, (servers, buffered) = _panels()
    servers.plot(range(1, len(used) + 1), used, color=COLORS[0])
    for loaders in (8, 64):
        servers.plot(loaders, used[loaders - 1], marker="o", color=COLORS[0])
        servers.annotate(
            f"{loaders}: {used[loaders - 1]}", (loaders, used[loaders - 1]), (4, -12), textcoords="offset points"
        )
    servers.set_xscale("log", base=2)
    ticks = [2**power for power in range(0, len(used).bit_length(), 2)]
    servers.set_xticks(ticks, list(map(str, ticks)))
    servers.set_ylim(0, None)
    servers.set_xlabel("loaders of a job")
    servers.set_ylabel("servers")
    servers.set_title(f"Servers that a job uses, of {fleet.scenario.servers:,}")
    most = [consumer.most_buffered for consumer in fleet.simulation.consumers]
    buffered.hist(most, bins=40, color=COLORS[0])
    buffered.set_yscale("log")
    buffered.set_xlabel("maximum number of prefetched batches")
    buffered.set_ylabel("training processes")
    buffered.set_title("Prefetched batches")
    return figure
