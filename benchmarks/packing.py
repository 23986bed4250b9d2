"""Packed sequences: padding, cut documents and tokens per second on real text, and cost of the preparation.

    python -m benchmarks.packing --plot docs/packing.svg

The documents are the .py, .md, .txt and .rst files of the installed packages. A token is a word or a sign, and its
number a hash. The plot needs matplotlib: pip install --group bench. The comparison with Hugging Face's collator needs
transformers.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader

from teleloader import DataLoader, Packing, RemoteDataset
from teleloader_server import serve
from teleloader_shared.lengths import Lengths
from teleloader_shared.orders.packing import Pieces, audit_tokens, prepared
from teleloader_shared.orders.plan import Plan
from teleloader_shared.packing import PackingSpec
from teleloader_shared.spec import LoaderSpec

LENGTH: Final = 2048
BATCH_SIZE: Final = 8
SEED: Final = 7
VOCABULARY: Final = 32_000
PREPARED: Final = 10**7
"""Documents for which the preparation is measured."""
SECONDS: Final = 8.0
"""Duration of each measurement of tokens per second."""

Row = list[tuple[int, int, int]]
"""Pieces of a sequence: document, start, stop."""


def tokens_of(text: bytes) -> Any:
    """Return the words and signs of a text as hashes, int32."""
    signs = np.frombuffer(text, np.uint8)
    is_word = (signs >= 128) | (signs == 95) | np.isin(signs, np.frombuffer(_ALPHANUMERIC, np.uint8))
    is_space = np.isin(signs, np.frombuffer(b" \t\r\n\f\v", np.uint8))
    starts = np.flatnonzero(~is_space & ~(is_word & np.concatenate([[False], is_word[:-1]])))
    following = np.append(signs, 0)[starts + 1]
    return ((signs[starts].astype(np.int32) * 257 + following) % VOCABULARY).astype(np.int32)


_ALPHANUMERIC: Final = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def corpus() -> list[Any]:
    """Return the tokens of the text files of the installed packages."""
    root = Path(sysconfig.get_path("purelib"))
    paths = [path for path in sorted(root.rglob("*")) if path.suffix in (".py", ".md", ".txt", ".rst")]
    found = (tokens_of(path.read_bytes()) for path in paths if path.is_file())
    return [each for each in found if len(each)]


class Documents:
    """Dataset of documents."""

    def __init__(self, documents: list[Any]) -> None:
        self.documents = documents
        self.sample_lengths = np.array([len(each) for each in documents])

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Any:
        """Return a document."""
        return self.documents[index]


# --- Methods ------------------------------------------------------------------------------------------------------


def one_per_sequence(lengths: list[int], order: Iterable[int]) -> Iterator[Row]:
    """Truncate each document to the sequence length, and pad it."""
    return ([(index, 0, min(lengths[index], LENGTH))] for index in order)


def concatenated(lengths: list[int], order: Iterable[int]) -> Iterator[Row]:
    """Concatenate all documents, and cut the result into sequences (``group_texts`` of transformers' examples)."""
    row: Row = []
    room = LENGTH
    for index in order:
        start = 0
        while start < lengths[index]:
            stop = min(start + room, lengths[index])
            row.append((index, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield row
                row, room = [], LENGTH
    # as in group_texts, the incomplete last sequence is dropped


def best_fit_truncated(lengths: list[int], order: Iterable[int]) -> Iterator[Row]:
    """Truncate the documents, and pack them by best-fit decreasing, as TRL's ``packing_strategy="bfd"``."""
    rows: list[Row] = []
    by_room: list[list[int]] = [[] for _ in range(LENGTH + 1)]
    for index in sorted(order, key=lambda index: -lengths[index]):
        size = min(lengths[index], LENGTH)
        room = next((room for room in range(size, LENGTH) if by_room[room]), LENGTH)
        if room == LENGTH:
            rows.append([])
        number = by_room[room].pop() if room < LENGTH else len(rows) - 1
        rows[number].append((index, 0, size))
        by_room[room - size].append(number)
    return iter(rows)


def packed(lengths: Lengths, window: int) -> Iterator[Row]:
    """Return the sequences of `Packing`."""
    plan = Plan(spec_of(lengths, window), len(lengths), 0, lengths)
    for k in range(len(plan)):
        _, *columns = plan.pieces(k)
        yield [(document, start, stop) for document, start, stop in zip(*columns, strict=True)]


def spec_of(lengths: Lengths, window: int, length: int = LENGTH) -> LoaderSpec:
    """Return the spec of a loader whose batches are one sequence."""
    packing = PackingSpec(lengths.digest, length, window)
    return LoaderSpec(dataset="text", shuffle=True, seed=SEED, packing=packing)


def compare(lengths: Lengths) -> None:
    """Print a table of the methods."""
    listed = lengths.values.tolist()
    order = np.random.default_rng(SEED).permutation(len(listed)).tolist()
    methods: dict[str, Callable[[], Iterator[Row]]] = {
        "one document per sequence": lambda: one_per_sequence(listed, order),
        "concatenated and cut": lambda: concatenated(listed, order),
        "best fit, truncated (TRL bfd)": lambda: best_fit_truncated(listed, order),
        "Packing(window=1024)": lambda: packed(lengths, 1024),
        "Packing()": lambda: packed(lengths, 2**14),
    }
    short = int((lengths.values <= LENGTH).sum())
    print(
        f"{'method':<30} {'sequences':>9} {'padding':>8} {'lost tokens':>11} {'cut of short documents':>22} {'time':>7}"
    )
    for name, method in methods.items():
        began = time.perf_counter()
        rows = list(method())
        seconds = time.perf_counter() - began
        found = audit_tokens((Pieces.of([np.array(row, np.int64)]) for row in rows), lengths, LENGTH)
        pieces = np.bincount([document for row in rows for document, _, _ in row], minlength=len(listed))
        cut = int(((pieces > 1) & (lengths.values <= LENGTH)).sum())
        print(
            f"{name:<30} {len(rows):>9,} {found.padding_fraction:>8.2%} {found.missing_tokens / lengths.total:>11.2%} "
            f"{cut / short:>22.2%} {seconds:>6.2f}s"
        )


# --- Tokens per second --------------------------------------------------------------------------------------------


def rate(batches: Iterable[Any], tokens: Callable[[Any], int]) -> tuple[float, list[int]]:
    """Return the tokens per second without padding after the first batch, and the size of each batch."""
    iterator = iter(batches)
    next(iterator)
    began, total, sizes = time.perf_counter(), 0, []
    for batch in iterator:
        total += tokens(batch)
        sizes.append(batch["input_ids"].numel())
        if time.perf_counter() - began > SECONDS:
            break
    return total / (time.perf_counter() - began), sizes


def as_mapping(documents: list[Any]) -> list[dict[str, Any]]:
    """Truncate documents, for collate functions that expect mappings."""
    return [{"input_ids": torch.from_numpy(each[:LENGTH].astype(np.int64))} for each in documents]


def padded(documents: list[Any]) -> dict[str, Any]:
    """Truncate documents, and pad them to the sequence length."""
    tokens = torch.zeros(len(documents), LENGTH, dtype=torch.int64)
    mask = torch.zeros(len(documents), LENGTH, dtype=torch.int64)
    for row, each in enumerate(as_mapping(documents)):
        size = len(each["input_ids"])
        tokens[row, :size], mask[row, :size] = each["input_ids"], 1
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.where(mask > 0, tokens, -100)}


def flattened(documents: list[Any]) -> Any:
    """Collate with transformers' `DataCollatorWithFlattening`."""
    from transformers import DataCollatorWithFlattening

    return DataCollatorWithFlattening(return_flash_attn_kwargs=True)(as_mapping(documents))


def measure_rates(dataset: Documents) -> None:
    """Print the tokens per second of torch's DataLoader and of this package, each with two workers."""
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "num_workers": 2}
    found = {
        "torch, padded": rate(
            TorchLoader(dataset, collate_fn=padded, **options), lambda batch: int(batch["attention_mask"].sum())
        ),
        "torch, DataCollatorWithFlattening": rate(
            TorchLoader(dataset, collate_fn=flattened, **options), lambda batch: batch["input_ids"].numel()
        ),
    }
    with serve({"text": dataset}, num_workers=2) as url:
        loader = DataLoader(
            RemoteDataset(url, "text"), batch_size=BATCH_SIZE, shuffle=True, seed=SEED,
            packing=Packing(sequence_length=LENGTH),
        )  # fmt: skip
        found["Packing()"] = rate(loader, lambda batch: int((batch["document_ids"] > 0).sum()))
    for name, (tokens, sizes) in found.items():
        spread = max(sizes) / (sum(sizes) / len(sizes))
        print(f"{name:<34} {tokens / 1e6:>6.1f} million tokens/s, largest batch {spread:.2f} x the mean")


def measure_preparation() -> None:
    """Print the time and memory of the preparation, and the time per batch."""
    values = np.random.default_rng(SEED).lognormal(6, 1.2, PREPARED).astype(np.int32).clip(1)
    lengths = Lengths(values, PREPARED)
    for length, window in ((2048, 2**14), (8192, 2**14), (8192, 2**16), (2048, 1024)):
        spec = spec_of(lengths, window, length)
        assert spec.packing is not None
        began = time.perf_counter()
        starts = prepared(spec.packing, lengths, 0, SEED)
        seconds = time.perf_counter() - began
        tracemalloc.start()
        few = Lengths(values[: 2**20], 2**20)
        prepared.__wrapped__(PackingSpec(few.digest, length, window), few, 0, SEED)
        peak = tracemalloc.get_traced_memory()[1] / 2**20
        tracemalloc.stop()
        plan = Plan(spec, PREPARED, 0, lengths, starts)
        middle = len(plan) // 2
        first, rest = timed(plan, range(middle, middle + 1)), timed(plan, range(middle, middle + 2000))
        padding = 1 - lengths.total / (int(starts[-1]) * length)
        print(
            f"L={length}, window={window}: prepared in {seconds:.1f} s, {starts.nbytes:,} bytes kept, {peak:.0f} MiB "
            f"meanwhile, {padding:.3%} padding; first sequence of a window {1e3 * first:.0f} ms, then "
            f"{1e3 * rest:.3f} ms per sequence in order"
        )


def timed(plan: Plan, numbers: range) -> float:
    """Return the seconds per batch to compute batches in succession."""
    began = time.perf_counter()
    for k in numbers:
        plan.pieces(k)
    return (time.perf_counter() - began) / len(numbers)


def draw(path: Path, lengths: Lengths) -> None:
    """Write the plot of the first sequences of three methods, for the documents that are not longer than one."""
    import matplotlib as mpl

    from benchmarks.fleet_plots import COLORS, GROUND, STYLE, save  # selects the Agg backend

    plt = mpl.pyplot
    short = lengths.values[lengths.values <= LENGTH]
    lengths = Lengths(short, len(short))
    listed = lengths.values.tolist()
    order = np.random.default_rng(SEED).permutation(len(listed)).tolist()
    panels = {
        "one document per sequence": one_per_sequence(listed, order),
        "concatenated and cut": concatenated(listed, order),
        "Packing()": packed(lengths, 2**14),
    }
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(9.5, 3.4), sharey=True)
        for axis, (name, rows) in zip(axes, panels.items(), strict=True):
            for place, row in zip(range(16), rows, strict=False):
                left = 0
                for document, start, stop in row:
                    color = COLORS[1 if stop - start < listed[document] else 0]
                    axis.barh(place, stop - start, left=left, color=color, edgecolor=GROUND, linewidth=0.8)
                    left += stop - start
                axis.barh(place, LENGTH - left, left=left, color="#d0d4da")
            axis.set_title(name, fontsize=10)
            axis.set_xlim(0, LENGTH)
            axis.set_xlabel("token")
        axes[0].invert_yaxis()
        axes[0].set_yticks(range(0, 16, 5))
        axes[0].set_ylabel("sequence")
        save(figure, path)


def main() -> None:
    """Print the figures, and draw the plot if its path is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="path of the plot, an SVG file")
    path = parser.parse_args().plot
    dataset = Documents(corpus())
    lengths = Lengths(dataset.sample_lengths, len(dataset))
    longer = int((lengths.values > LENGTH).sum())
    print(
        f"{len(lengths):,} documents, {lengths.total:,} tokens, {longer:,} documents longer than {LENGTH}, longest "
        f"{lengths.longest:,}"
    )
    compare(lengths)
    measure_rates(dataset)
    measure_preparation()
    if path is not None:
        draw(path, lengths)


if __name__ == "__main__":
    main()
