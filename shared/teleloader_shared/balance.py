"""Parameters of length-balanced batches (`BalanceSpec`); part of the loader spec."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from teleloader_shared.checks import check_digest, check_whole
from teleloader_shared.errors import InvalidSpec
from teleloader_shared.text import short

MAX_WINDOW: Final = 2**22
"""Maximum samples in a window; bounds the time to sort one to about a second."""
MAX_WINDOWS: Final = 2**20
"""Maximum windows in an epoch with `max_tokens`: the preparation stores 8 bytes per window."""
MAX_TOKENS: Final = 2**40
"""Maximum length of a sample, and of a batch with its padding: products of lengths and counts fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class BalanceSpec:
    """Validated parameters of length-balanced batches.

    Raises:
        InvalidSpec: If a field is invalid.
    """

    lengths: str
    """Digest of the lengths (`Lengths.digest`)."""
    window: int
    """Samples that are sorted together, over all ranks; a multiple of `group`."""
    group: int
    """Without `max_tokens`, samples per step of all ranks: batch size x world size. With `max_tokens`, number of
    successive batches of similar length: steps of all world sizes that divide it contain only such batches."""
    max_tokens: int | None = None
    """Maximum of (samples x longest sample) of a batch; None for batches of a fixed number of samples."""

    def __post_init__(self) -> None:
        """Validate all fields."""
        check_digest("lengths of balance", self.lengths)
        check_whole("window of balance", self.window, 1, MAX_WINDOW)
        check_whole("group of balance", self.group, 1, MAX_WINDOW)
        if self.max_tokens is not None:
            check_whole("max_tokens of balance", self.max_tokens, 1, MAX_TOKENS)
        if self.window % self.group:
            unit = "batch_size * world_size" if self.max_tokens is None else "group"
            raise InvalidSpec(
                f"window of balance must be a multiple of {unit} = {self.group}, got {self.window}: use "
                f"{max(1, round(self.window / self.group)) * self.group}"
            )

    @property
    def identity(self) -> str:
        """All parameters as a short text, which is part of saved states."""
        return f"window={self.window}, group={self.group}, max_tokens={self.max_tokens}, lengths={self.lengths[:16]}"

    def to_json(self) -> dict[str, Any]:
        """Return the parameters as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: object) -> BalanceSpec:
        """Create parameters from a JSON object.

        Raises:
            InvalidSpec: If the object has another structure, or a field is invalid.
        """
        match fields:
            case {"lengths": lengths, "window": window, "group": group, "max_tokens": most, **others} if not others:
                return cls(lengths, window, group, most)
        raise InvalidSpec(
            f"balance must be null or an object with lengths, window, group and max_tokens, got {short(fields)}"
        )
