"""Command ``teleloader audit``: checks that an epoch visits each sample or token exactly once, or matches weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from teleloader.cli.showing import print_json, progress_bar, results_console
from teleloader_shared.lengths import Lengths
from teleloader_shared.orders.packing import TokenCoverage, audit_tokens
from teleloader_shared.orders.plan import Coverage, Plan, count_visits
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.text import printable
from teleloader_shared.units import counted, share
from teleloader_shared.weights import MixtureSpec

SHOWN = 10
"""Maximum number of missing, and of repeated, indices in the output."""
STEP = 256
"""Batches between updates of the progress bar."""


def planned(spec: LoaderSpec, length: int, epoch: int, lengths: Lengths | None = None) -> NDArray[np.int64]:
    """Count the visits to each sample in an epoch, over all ranks, and show a progress bar.

    Args:
        spec: Parameters of the loader.
        length: Number of samples in the dataset.
        epoch: Epoch number.
        lengths: Lengths of the samples, if the spec has `balance`.
    """
    plans = [Plan(replace(spec, rank=rank), length, epoch, lengths) for rank in range(spec.world_size)]
    return count_visits((np.concatenate([plan[k] for k in numbers]) for plan, numbers in _in_steps(plans)), length)


def planned_tokens(spec: LoaderSpec, lengths: Lengths, epoch: int) -> TokenCoverage:
    """Count the tokens in the packed sequences of an epoch, over all ranks, and show a progress bar.

    Args:
        spec: Parameters of the loader, with `packing`.
        lengths: Lengths of the documents.
        epoch: Epoch number.
    """
    plans = [Plan(replace(spec, rank=rank), len(lengths), epoch, lengths) for rank in range(spec.world_size)]
    batches = (plan.pieces(k) for plan, numbers in _in_steps(plans) for k in numbers)
    return audit_tokens(batches, lengths, spec.packing.sequence_length if spec.packing is not None else 0)


def _in_steps(plans: Sequence[Plan]) -> Iterator[tuple[Plan, range]]:
    """Yield successive batch numbers of all plans, and show a progress bar."""
    columns = (TextColumn("batches"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar(*columns) as progress:
        bar = progress.add_task("", total=sum(map(len, plans)))
        for plan in plans:
            for start in range(0, len(plan), STEP):
                yield plan, (numbers := range(start, min(start + STEP, len(plan))))
                progress.advance(bar, len(numbers))


def received(files: Sequence[str], length: int) -> NDArray[np.int64]:
    """Add the visits in .npy files, one per rank.

    Args:
        files: Paths of arrays of ``DataLoader.visits()``.
        length: Number of samples in the dataset.

    Raises:
        ValueError: If a file is not such an array.
    """
    visits = np.zeros(length, np.int64)
    for path in files:
        found = _array_in(path)
        if found is None or found.shape != (length,) or found.dtype != np.int64 or np.any(found < 0):
            raise ValueError(
                f"invalid visits in {path!r}: expected an int64 array of shape ({length},), one non-negative number "
                "per sample of the dataset. Save DataLoader.visits() with numpy.save"
            )
        visits += found
    return visits


def _array_in(path: str) -> NDArray[Any] | None:
    """Return the array in a .npy file; None if the file has another format."""
    try:
        with Path(path).open("rb") as file:
            found: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)  # load() also reads .npz files
    except (ValueError, EOFError, OSError):
        return None
    return found


@dataclass(frozen=True, slots=True)
class SourceCoverage:
    """Visits to one source of a mixture."""

    source: str
    samples: int
    """Samples in the source."""
    visits: int
    expected: float
    """Weight of the source times the number of visits to all sources."""
    missing: int
    """Samples that were never visited."""
    repeated: int
    """Samples that were visited more than once."""


def by_source(visits: NDArray[np.int64], mixture: MixtureSpec) -> list[SourceCoverage]:
    """Divide the visits to a mixture with constant weights among its sources.

    Args:
        visits: Number of visits to each sample, as of `planned` and `received`.
        mixture: Parameters of the mixture.
    """
    weights, total, start, found = mixture.stages[0][1], int(visits.sum()), 0, []
    for (name, length), weight in zip(mixture.sources, weights, strict=True):
        own = Coverage.of(visits[start : start + length])
        expected = total * weight / mixture.period
        found.append(SourceCoverage(name, length, own.visits, expected, own.missing.size, own.repeated.size))
        start += length
    return found


def has_weights(sources: Sequence[SourceCoverage], spec: LoaderSpec) -> bool:
    """Return True if the visits to each source differ from its weight as little as those of any window of the order.

    The padding of ``tail="pad"`` is a window of its own.
    """
    most = 4 if spec.tail == "pad" and spec.world_size > 1 else 2
    return all(abs(each.visits - each.expected) < most for each in sources)


def show_sources(sources: Sequence[SourceCoverage], spec: LoaderSpec, epoch: int | None, *, as_json: bool) -> None:
    """Print the visits to each source of a mixture; `epoch` as in `show`."""
    if as_json:
        exact = has_weights(sources, spec)
        print_json({"epoch": epoch, "exact": exact, "sources": [asdict(each) for each in sources]})
        return
    console = results_console()
    ranks = f" by {spec.world_size} ranks" if spec.world_size > 1 else ""
    title = "mixture, as received" if epoch is None else f"epoch {epoch} of the mixture"
    total = sum(each.visits for each in sources)
    console.print(Text(f"{title}: {counted(total, 'visit')}{ranks} to {counted(len(sources), 'source')}", style="bold"))
    for each in sources:
        share = f"{each.visits / total:.4%}" if total else "0 %"
        visits = f"{counted(each.visits, 'visit')} ({share}, expected {each.expected:.1f})"
        repeats = f"{each.missing:,} never visited, {each.repeated:,} more than once"
        samples = counted(each.samples, "sample")
        console.print(Text(printable(f"{each.source}: {visits} to {samples}: {repeats}")))
    if has_weights(sources, spec):
        console.print(Text("the visits to each source match its weight", style="green"))
    else:
        console.print(Text("the visits differ from the weights: pass the files of all ranks, after a whole batch"))


def show(found: Coverage, name: str, spec: LoaderSpec, epoch: int | None, *, as_json: bool) -> None:
    """Print an audit result as text or JSON; `epoch` is None if the visits are those that training loops received."""
    if as_json:
        print_json({"dataset": name, "epoch": epoch, **facts(found)})
        return
    ranks = f" by {spec.world_size} ranks" if spec.world_size > 1 else ""
    console = results_console()
    visits = f"{counted(found.visits, 'visit')}{ranks} to {counted(found.length, 'sample')}"
    title = f"{name}, as received" if epoch is None else f"epoch {epoch} of {name}"
    console.print(Text(printable(f"{title}: {visits}"), style="bold"))
    if found.exact:
        console.print(Text("each sample is visited exactly once", style="green"))
    if found.missing.size:
        console.print(Text(f"never visited: {_some(found.missing)}{_why_missing(spec)}"))
    if found.repeated.size:
        console.print(Text(f"visited more than once: {_some(found.repeated)}{_why_repeated(spec)}"))


def show_tokens(found: TokenCoverage, name: str, spec: LoaderSpec, epoch: int, *, as_json: bool) -> None:
    """Print an audit result of packed sequences as text or JSON."""
    if as_json:
        values = {each.name: getattr(found, each.name) for each in fields(found)}
        values = {each: value.size if isinstance(value, np.ndarray) else value for each, value in values.items()}
        print_json({"dataset": name, "epoch": epoch, "exact": found.exact, **values})
        return
    console = results_console()
    ranks = f" by {spec.world_size} ranks" if spec.world_size > 1 else ""
    visits = f"{counted(found.visits, 'visit')}{ranks} to {counted(found.tokens, 'token')}"
    title = f"epoch {epoch} of {name}: {visits} of {counted(found.documents, 'document')}"
    console.print(Text(printable(title), style="bold"))
    console.print(Text(f"{counted(found.sequences, 'sequence')}, {share(found.padding_fraction)} of which is padding"))
    if found.exact:
        console.print(Text("each token is in exactly one sequence", style="green"))
    if found.missing_tokens:
        where = f"of {_some(found.missing, 'document')}{_why_missing(spec)}"
        console.print(Text(f"never visited: {counted(found.missing_tokens, 'token')} {where}"))
    if found.repeated_tokens:
        where = f"of {_some(found.repeated, 'document')}{_why_repeated(spec)}"
        console.print(Text(f"visited more than once: {counted(found.repeated_tokens, 'token')} {where}"))


def facts(found: Coverage) -> dict[str, Any]:
    """Convert the result of an audit to JSON values: counts, and the first missing and repeated indices."""
    return {
        "samples": found.length,
        "visits": found.visits,
        "exact": found.exact,
        "missing": int(found.missing.size),
        "missing_first": found.missing[:SHOWN].tolist(),
        "repeated": int(found.repeated.size),
        "repeated_first": found.repeated[:SHOWN].tolist(),
    }


def _some(indices: NDArray[np.int64], what: str = "sample") -> str:
    more = ", ..." if indices.size > SHOWN else ""
    return f"{counted(indices.size, what)} ({', '.join(map(str, indices[:SHOWN].tolist()))}{more})"


def _why_missing(spec: LoaderSpec) -> str:
    reasons = [name for name, holds in (("--drop-last", spec.drop_last), ("--tail drop", spec.tail == "drop")) if holds]
    return f", omitted by {' and '.join(reasons)}" if reasons else ""


def _why_repeated(spec: LoaderSpec) -> str:
    return ", for equal sample counts of all ranks (--tail pad)" if spec.tail == "pad" and spec.world_size > 1 else ""
