"""Plot of measurement 2: copies and computation of a few steps on one timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.contenders import DEVICE, NOT_AHEAD, PREFETCHER, TORCH

SHOWN: Final = (DEVICE, NOT_AHEAD, PREFETCHER, TORCH)
STEPS: Final = 6
COLORS: Final = {"copies": "#d1495b", "computation": "#8fb8de"}


def draw(results: Sequence[Mapping[str, Any]], path: Path, *, is_gpu: bool, device: str) -> None:
    """Draw the first round of an `Overlap` measurement.

    Args:
        results: Its results.
        path: The PNG file to write.
        is_gpu: Whether the times are those of a GPU.
        device: Its name, for the title.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rounds = {row["contender"]: row["rounds"][0] for row in results if row.get("rounds")}
    names = [name for name in SHOWN if name in rounds]
    figure, axes = plt.subplots(len(names), 1, figsize=(10, 1.5 * len(names) + 1), sharex=True, squeeze=False)
    ends = []
    for axis, name in zip(axes[:, 0], names, strict=True):
        ends.append(_lanes(axis, rounds[name]))
        axis.set_title(f"{name} (control)" if name == NOT_AHEAD else name, loc="left", fontsize="medium")
    axes[-1, 0].set_xlim(0, max(ends))
    axes[-1, 0].set_xlabel("time, ms")
    clock = f"{device}, CUDA events" if is_gpu else "CPU fallback, host clock: no figures of a GPU"
    figure.suptitle(f"Copies to the device and computation\n{clock}", fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _lanes(axis: Any, turn: Mapping[str, Any]) -> float:
    """Draw copies above computation, from the first shown step on; return the last time."""
    compute = turn["compute_spans_ms"][: STEPS + 1]
    origin, end = compute[0][0], compute[-1][1]
    copies = [span for span in turn["copy_spans_ms"] if span[0] < end]
    for height, (label, spans) in enumerate((("computation", compute), ("copies", copies))):
        bars = [(start - origin, stop - start) for start, stop in spans]
        axis.broken_barh(bars, (height - 0.35, 0.7), facecolors=COLORS[label])
    axis.set_yticks([0, 1], ["computation", "copies"])
    axis.set_ylim(-0.6, 1.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", linewidth=0.4, alpha=0.6)
    axis.set_axisbelow(True)
    return float(end - origin)
