"""Command ``teleloader peek``: shows the content of one batch."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from teleloader.cli.showing import Column, print_json, results_console, table
from teleloader.dataset import RemoteDataset
from teleloader.errors import exception_of
from teleloader_shared.codec import End, Failure, Frame
from teleloader_shared.summary import summarize
from teleloader_shared.text import printable
from teleloader_shared.units import counted, size


def show(frame: Frame, dataset: RemoteDataset, *, as_json: bool) -> bool:
    """Print the content of a batch, as text or JSON; return False if the batch failed."""
    if as_json:
        print_json(_facts(frame, dataset))
        return not isinstance(frame.content, Failure)
    console = results_console()
    if isinstance(frame.content, Failure):
        error = exception_of(frame.content, frame.batch_id, dataset.url)
        console.print(Text(printable(f"{type(error).__name__}: {error}")), soft_wrap=True)
        return False
    _show_batch(frame, dataset, console)
    return True


def _facts(frame: Frame, dataset: RemoteDataset) -> dict[str, object]:
    facts: dict[str, object] = {
        "server": dataset.url, "dataset": dataset.name, "epoch": frame.batch_id.epoch, "batch": frame.batch_id.batch,
        "bytes": frame.nbytes, "padding": frame.padding,
    }  # fmt: skip
    if isinstance(frame.content, Failure):
        return {**facts, "error": {name: getattr(frame.content, name) for name in Failure.__slots__}}
    if isinstance(frame.content, End):
        return {**facts, "end": {name: getattr(frame.content, name) for name in End.__slots__}}
    return {**facts, "parts": [asdict(part) for part in summarize(frame.content)]}


def _show_batch(frame: Frame, dataset: RemoteDataset, console: Console) -> None:
    where = f"batch {frame.batch_id.batch} of epoch {frame.batch_id.epoch} of {dataset.name} on {dataset.url}"
    if isinstance(frame.content, End):
        console.print(Text(f"{where} does not exist: the shard ended after {counted(frame.content.samples, 'sample')}"))
        return
    padding = f", with {counted(frame.padding, 'repeated sample')} at its end" if frame.padding else ""
    console.print(Text(printable(f"{where}, {size(frame.nbytes)}{padding}")), soft_wrap=True)
    columns = (
        Column("part", lambda part: part.path, least=20, is_name=True),
        Column("type", lambda part: part.type, least=12),
        Column("shape", lambda part: "" if part.shape is None else str(part.shape), least=10),
        Column("values", lambda part: part.value, least=10),
    )
    console.print(table(columns, summarize(frame.content), console.width))
