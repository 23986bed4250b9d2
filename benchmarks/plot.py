"""Plot the throughput of a benchmark run relative to a plain socket, for all contenders.

    python -m benchmarks --json results.json --peers flight
    python -m benchmarks.plot results.json throughput.svg

``python -m benchmarks --publish`` draws docs/throughput.svg. Needs matplotlib: pip install --group bench.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

INK: Final = "#7a828b"
"""Color of text and lines, readable on a light and on a dark page."""
STYLES: Final = {
    "teleloader": ("#1f77b4", "o"),
    "socket, computing": (INK, "|"),
    "torch local": ("#e4572e", "s"),
    "Flight": ("#2ca02c", "D"),
    "tf.data service": ("#b07cd8", "^"),
}
"""Color and marker of each contender in the plot."""


def draw(results: Mapping[str, Any], picture: Path) -> None:
    """Write a plot with a row for each workload, and a marker with its quartiles for each contender.

    Raises:
        SystemExit: If the run has no workload with a floor.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "teleloader"  # the same figures give the same file
    mpl.rcParams.update(dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK))
    import matplotlib.pyplot as plt

    workloads = {
        name: [row for row in rows if row.get("to_floor") and row["contender"] in STYLES]
        for name, rows in results["workloads"].items()
    }
    workloads = {name: rows for name, rows in workloads.items() if rows}
    if not workloads:
        raise SystemExit("nothing to plot: the results have no floor. Run python -m benchmarks with its own servers")
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.55 * len(workloads)))
    for contender, (color, marker) in STYLES.items():
        found = [
            (place, row["to_floor"])
            for place, rows in enumerate(workloads.values())
            for row in rows
            if row["contender"] == contender
        ]
        if found:
            places = [place for place, _ in found]
            middles = [middle for _, (middle, _, _) in found]
            spans = [[middle - low for _, (middle, low, _) in found], [high - middle for _, (middle, _, high) in found]]
            axis.errorbar(
                middles, places, xerr=spans, fmt=marker, color=color, label=contender, markersize=9, markeredgewidth=2,
            )  # fmt: skip
    axis.axvline(1, color=INK, linewidth=1)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_yticks(range(len(workloads)), list(workloads))
    axis.set_ylim(len(workloads) - 0.5, -0.5)
    axis.grid(axis="x", color=INK, alpha=0.3)
    axis.set_xlabel("throughput relative to prepared frames over a plain socket (log scale)")
    for spine in axis.spines.values():
        spine.set_visible(False)
    facts = results["machine"]
    figure.suptitle(", ".join(f"{name} {facts[name]}" for name in ("cpu", "torch", "revision")), fontsize="small")
    figure.legend(loc="outside lower center", ncols=len(STYLES), frameon=False, fontsize="small")
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(picture, dpi=120, transparent=True, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="file written by --json")
    parser.add_argument("picture", type=Path, help="file to write; its extension selects the format")
    options = parser.parse_args()
    draw(json.loads(options.results.read_text()), options.picture)


if __name__ == "__main__":
    main()
