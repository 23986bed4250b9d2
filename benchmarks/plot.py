"""Plot the throughput of a benchmark run relative to torch's DataLoader.

    python -m benchmarks --json results.json
    python -m benchmarks.plot results.json throughput.svg

The tables that a run prints serve as well: docs/throughput.svg is drawn from those of the latest result.

    python -m benchmarks.plot benchmarks/README.md docs/throughput.svg

Needs matplotlib: pip install --group bench.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.measuring import Spread

MEASURED: Final = "checksum"
"""Contenders with the default settings end with this word."""
BAR: Final = 0.38


def ratios(results: Mapping[str, Any]) -> dict[int, dict[str, Spread]]:
    """Return throughput relative to torch's local DataLoader, by number of workers and by workload."""
    found: dict[int, dict[str, Spread]] = {}
    for name, rows in results["workloads"].items():
        for row in rows:
            if row.get("to_torch") and row["contender"].endswith(MEASURED):
                found.setdefault(row["num_workers"], {})[name] = Spread(*row["to_torch"])
    return found


def printed(text: str) -> dict[str, Any]:
    """Return the figures that `ratios` uses, from the Markdown tables that a run prints."""
    workloads: dict[str, list[dict[str, Any]]] = {}
    name = ""
    for line in text.splitlines():
        if heading := re.match(r"\*\*(\w+)\*\* - ", line):
            name = heading[1]
        number = r"([\d.]+)"
        row = rf"\| (teleloader, (\d+) workers?, {MEASURED}) \|.*\|.*\|.*\| {number} \({number}\.\.{number}\) \|.*\|"
        if name and (found := re.fullmatch(row, line)):
            spread = [float(figure) for figure in found.groups()[2:]]
            workloads.setdefault(name, []).append(
                {"contender": found[1], "num_workers": int(found[2]), "to_torch": spread}
            )
    machine = re.search(
        r"^ *cpu (?P<cpu>[^,]+),.* torch (?P<torch>[^,]+),.* revision (?P<revision>\w+)", text, re.MULTILINE
    )
    return {"workloads": workloads, "machine": {} if machine is None else machine.groupdict()}


def draw(results: Mapping[str, Any], picture: Path) -> None:
    """Write a bar chart with a group for each workload and a bar for each number of workers.

    Raises:
        SystemExit: If no workload of the run includes torch's DataLoader.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "teleloader"  # the same figures give the same file
    import matplotlib.pyplot as plt

    by_workers = ratios(results)
    if not by_workers:
        raise SystemExit(
            "nothing to plot: the results do not include torch's DataLoader. Run python -m benchmarks with torch"
        )
    figure, axis = plt.subplots(figsize=(8, 4))
    for offset, (workers, spreads) in enumerate(sorted(by_workers.items())):
        middles = [spread.middle for spread in spreads.values()]
        below = [spread.middle - spread.low for spread in spreads.values()]
        above = [spread.high - spread.middle for spread in spreads.values()]
        places = [place + offset * BAR for place in range(len(spreads))]
        label = f"{workers} worker{'s' if workers > 1 else ''}"
        axis.bar(places, middles, BAR, yerr=(below, above), capsize=3, label=label)
    names = list(next(iter(by_workers.values())))
    axis.set_xticks([place + BAR * (len(by_workers) - 1) / 2 for place in range(len(names))], names)
    axis.axhline(1, color="black", linewidth=1)
    axis.set_ylabel("throughput relative to torch")
    facts = results["machine"]
    axis.set_title(", ".join(f"{name} {facts[name]}" for name in ("cpu", "torch", "revision")), fontsize="small")
    axis.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=120, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="file written by --json, or a Markdown file with the printed tables")
    parser.add_argument("picture", type=Path, help="file to write; its extension selects the format")
    options = parser.parse_args()
    text = options.results.read_text()
    draw(json.loads(text) if options.results.suffix == ".json" else printed(text), options.picture)


if __name__ == "__main__":
    main()
