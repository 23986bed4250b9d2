"""`Packing`: batches of token sequences that are packed from documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from teleloader_shared.errors import InvalidSpec
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.orders.plan import check_windows
from teleloader_shared.packing import PackingSpec

DEFAULT_WINDOW: Final = 2**14
"""Documents per window: large enough for less than 0.1 % of padding with common lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Batches of token sequences of a fixed length, as the `packing` argument of a `DataLoader`.

    The epoch's order of the documents is cut into windows. The documents of a window are packed into as few sequences
    as best-fit decreasing finds, and only those longer than a sequence are cut. Each token of an epoch is in exactly
    one sequence. Sequences are the samples of the loader: `batch_size`, `drop_last`, `tail` and saved states count
    sequences.

    The dataset is map-style and states the number of tokens of each document in its attribute or method
    `sample_lengths`. A document is a 1-D array, tensor or list of integers; or a mapping with such an entry
    ``input_ids``, and optionally further entries with one value per token. Their names are arbitrary, except that
    ``attention_mask`` is omitted, and ``labels`` are those of Hugging Face's models, which shift them by one token
    themselves. A batch of B sequences of L tokens is a dict of

    - ``input_ids``: tokens, int64 of shape (B, L);
    - ``labels``: those of the documents, or else the tokens; -100 for the first token of each piece of a document,
      which no token of this piece precedes, and for padding; int64 of shape (B, L);
    - ``position_ids``: position of each token in its piece, int64 of shape (B, L);
    - ``document_ids``: number of the piece in its sequence, from 1; 0 for padding; int32 of shape (B, L). Tokens with
      equal numbers attend to each other;
    - ``cu_seqlens``: boundaries of the pieces in the flattened batch, int32 of shape (N + 1,), from 0 to B * L, for
      kernels with variable lengths. The padding of a sequence is a piece of its own;
    - ``max_seqlen``: length of the longest of these N pieces, as an int;
    - all other entries of the documents, in the dtype of the first document, of shape (B, L), with zeros as padding.

    Raises:
        InvalidSpec: If a value is out of range.

    Example:
        >>> loader = DataLoader(
        ...     dataset, batch_size=8, shuffle=True, seed=7, packing=Packing(sequence_length=2048)
        ... )  # doctest: +SKIP
    """

    sequence_length: int
    """Tokens in each sequence, including padding."""
    window: int = DEFAULT_WINDOW
    """Documents that are packed together, over all ranks, at least 16; 16,384 by default. Larger windows have less
    padding."""
    pad_token_id: int = 0
    """Token that fills the end of a sequence if no document fits; 0 by default."""

    def __post_init__(self) -> None:
        """Validate the values."""
        self._spec("0" * 32)

    def spec(self, info: DatasetInfo) -> PackingSpec:
        """Return the parameters for servers.

        Args:
            info: Description of the dataset.

        Raises:
            InvalidSpec: If the dataset states no lengths, or the window is too small for their number.
        """
        if info.lengths is None:
            raise InvalidSpec(
                f"packing requires the lengths of the documents, and dataset {info.name!r} states none: define its "
                "attribute sample_lengths, a 1-D integer array or the path of a .npy file"
            )
        check_windows(self.window, info.length or 0)
        return self._spec(info.lengths)

    def _spec(self, digest: str) -> PackingSpec:
        return PackingSpec(digest, self.sequence_length, self.window, self.pad_token_id)
