"""Outcome of a check that refuses a client."""

from __future__ import annotations

from typing import NamedTuple

from teleloader_shared.errors import TeleloaderError


class Refusal(NamedTuple):
    """Refusal of a JWT or client certificate."""

    kind: type[TeleloaderError]
    """Type of the error."""
    message: str
    principal: str | None = None
    """Name of the principal; None unless the signature of the token or certificate was verified."""

    def error(self) -> TeleloaderError:
        """Return a new exception: one that was raised before would collect tracebacks."""
        return self.kind(self.message)
