"""Packed sequences: batches that consist of pieces of documents, in place of collation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from teleloader_server.loading.datasets import HostedDataset
from teleloader_shared.errors import BatchTooLarge
from teleloader_shared.orders.packing import Pieces
from teleloader_shared.packing import PackingSpec
from teleloader_shared.tree import Tensor

Arrays = Mapping[str, NDArray[Any]]

IGNORED_LABEL: Final = -100
"""Label that loss functions ignore: the default `ignore_index` of ``torch.nn.functional.cross_entropy``."""
_OMITTED: Final = "attention_mask"
_TOKEN_BYTES: Final = 28
"""Bytes of a token in a batch: input_ids, labels and position_ids are int64, and document_ids int32."""
_RESERVED: Final = ("position_ids", "document_ids", "cu_seqlens", "max_seqlen")


def pack(
    hosted: HostedDataset, packing: PackingSpec, pieces: Pieces, documents: Sequence[Any], max_bytes: int
) -> tuple[int, Any]:
    """Pack documents into a batch of sequences; return the number of sequences and the batch.

    Args:
        hosted: The dataset.
        packing: Parameters.
        pieces: Pieces of the batch.
        documents: The documents, as the dataset returns them, in the order of `Pieces.distinct`.
        max_bytes: Maximum size of the batch in bytes.

    Raises:
        BatchTooLarge: If the batch is larger; it is not allocated.
        ValueError: If a document has another length than its dataset states, or its entries cannot be packed.
        RuntimeError: If the dataset returns another number of documents.
    """
    indices = pieces.distinct
    if len(documents) != len(indices):
        raise RuntimeError(
            f"dataset {hosted.info.name!r} returned {len(documents)} documents for {len(indices)} indices: "
            "__getitems__ must return one for each index"
        )
    if hosted.lengths is None:
        raise RuntimeError(f"dataset {hosted.info.name!r} has no lengths. This is a bug in the server")
    lengths = hosted.lengths.of(indices).tolist()
    found: dict[int, Arrays] = {}
    for index, length, document in zip(indices.tolist(), lengths, documents, strict=True):
        found[index] = _arrays(f"sample {index} of dataset {hosted.info.name!r}", document, length)
    nbytes = _TOKEN_BYTES * (int(pieces.sequences[-1]) + 1) * packing.sequence_length
    if nbytes > max_bytes:
        raise BatchTooLarge(
            f"a batch of packed sequences of {packing.sequence_length:,} tokens has {nbytes:,} bytes, and the maximum "
            f"is {max_bytes:,}: use a smaller batch_size or sequence_length, or increase --max-batch-bytes"
        )
    layout = _Layout(pieces, packing.sequence_length)
    batch: dict[str, Any] = {}
    for name, dtype in _types(hosted, found).items():
        out = layout.filled(dtype, {"input_ids": packing.pad_token_id, "labels": IGNORED_LABEL}.get(name, 0))
        layout.copy({index: arrays[name] for index, arrays in found.items()}, out)
        batch[name] = out
    if "labels" not in batch:
        batch["labels"] = np.where(layout.numbers > 0, batch["input_ids"], IGNORED_LABEL)
    batch["labels"][layout.boundaries[:-1]] = IGNORED_LABEL
    batch["position_ids"], batch["document_ids"] = layout.positions, layout.numbers.astype(np.int32)
    shaped = {name: values.reshape(layout.sequences, -1).view(Tensor) for name, values in batch.items()}
    boundaries = layout.boundaries.astype(np.int32).view(Tensor)
    return layout.sequences, {**shaped, "cu_seqlens": boundaries, "max_seqlen": int(layout.sizes.max())}


def _arrays(what: str, document: Any, length: int) -> Arrays:
    """Return the entries of a document as arrays of shape (length,), after they are checked."""
    entries = document if isinstance(document, Mapping) else {"input_ids": document}
    if "input_ids" not in entries:
        raise ValueError(f"{what} has no entry 'input_ids', only {', '.join(map(repr, entries))}: packing requires it")
    arrays = {name: np.asarray(value) for name, value in entries.items() if name != _OMITTED}
    for name, values in arrays.items():
        shown = "" if document is not entries else f"entry {name!r} of "
        if name in _RESERVED:
            raise ValueError(f"cannot pack {shown}{what}: batches of packed sequences have an entry of this name")
        if values.ndim == 1 and len(values) != length:
            raise ValueError(
                f"{shown}{what} has {len(values)} tokens, and sample_lengths states {length}: packing requires exact "
                "lengths. Compute sample_lengths again"
            )
        are_tokens = name == "input_ids"
        if values.ndim != 1 or values.dtype.kind not in ("iu" if are_tokens else "biuf"):
            kinds = "integers" if are_tokens else "numbers, one for each token"
            raise ValueError(
                f"cannot pack {shown}{what}: expected a 1-D array of {kinds}, got shape {values.shape} and dtype "
                f"{values.dtype}. Convert or remove it in the dataset"
            )
    return arrays


def _types(hosted: HostedDataset, documents: Mapping[int, Arrays]) -> dict[str, np.dtype[Any]]:
    """Return the entries of the documents and their types, which must be equal in all documents."""
    found: dict[int, dict[str, np.dtype[Any]]] = {}
    for index, arrays in documents.items():
        found[index] = {name: values.dtype for name, values in arrays.items()}
        found[index].update({name: np.dtype(np.int64) for name in ("input_ids", "labels") if name in arrays})
    (first, types), *others = found.items()
    for index, other in others:
        if other != types:
            raise ValueError(
                f"cannot pack samples {first} and {index} of dataset {hosted.info.name!r} into one batch: their "
                f"entries are {_shown(types)} and {_shown(other)}. Return the same entries for all samples"
            )
    return types


def _shown(types: Mapping[str, np.dtype[Any]]) -> str:
    return ", ".join(f"{name} ({dtype})" for name, dtype in types.items())


class _Layout:
    """Places of pieces in a flattened batch.

    Args:
        pieces: Pieces of the batch.
        length: Tokens in a sequence.
    """

    def __init__(self, pieces: Pieces, length: int) -> None:
        self._pieces = pieces
        sizes = pieces.stops - pieces.starts
        self.sequences = int(pieces.sequences[-1]) + 1
        filled = np.zeros(self.sequences, np.int64)
        np.add.at(filled, pieces.sequences, sizes)
        first = np.searchsorted(pieces.sequences, np.arange(self.sequences))
        ends = np.cumsum(sizes)
        before = ends - sizes
        self._starts = pieces.sequences * length + before - before[first][pieces.sequences]
        """Place of the first token of each piece."""
        padding = np.arange(self.sequences) * length + filled
        starts = np.concatenate([self._starts, padding[filled < length]])
        numbers = np.arange(1, len(sizes) + 1) - first[pieces.sequences]
        order = np.argsort(starts)
        self.boundaries = np.append(starts[order], self.sequences * length)
        """Start of each piece and of the padding of each sequence, ascending, and the end of the batch."""
        self.sizes = np.diff(self.boundaries)
        """Lengths of the pieces, and of the padding of each sequence."""
        numbers = np.concatenate([numbers, np.zeros(len(starts) - len(numbers), np.int64)])
        self.numbers = np.repeat(numbers[order], self.sizes)
        """Number of the piece in its sequence, from 1, for each token; 0 for padding."""
        self.positions = np.arange(self.boundaries[-1]) - np.repeat(self.boundaries[:-1], self.sizes)
        """Position in its piece of each token."""

    def filled(self, dtype: np.dtype[Any], value: int) -> NDArray[Any]:
        """Return a flattened batch that consists of padding."""
        return np.full(self.boundaries[-1], value, dtype)

    def copy(self, documents: Mapping[int, NDArray[Any]], out: NDArray[Any]) -> None:
        """Copy the pieces of documents to their places in a flattened batch."""
        listed = zip(*(each.tolist() for each in (self._starts, *self._pieces[1:])), strict=True)
        for place, document, start, stop in listed:
            out[place : place + stop - start] = documents[document][start:stop]
