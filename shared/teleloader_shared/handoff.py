"""Channels on which a server hands shared-memory slots to clients on the same machine (docs/protocol.md)."""

from __future__ import annotations

import hmac
import re
import struct
from typing import Final, NamedTuple

from teleloader_shared.secret import Secret

CHANNEL_HEADER: Final = "Teleloader-Channel"
"""Carries the name of the client's channel: the response may then be a loan in place of a frame."""
LOAN_MEDIA_TYPE: Final = "application/vnd.teleloader.loan"
"""Content type of a response whose frame is in shared memory; its body is a `GIVE_BACK` record."""

HELLO: Final = struct.Struct("16s16s")
"""First message of a client: identifier of the principal, and a nonce."""
WELCOME: Final = struct.Struct("16s32s")
"""Response of the server: a nonce, and the server's proof that it knows the key."""
LOAN: Final = struct.Struct("<QQ")
"""Message of the server with a descriptor: number of the loan, and size of the frame in bytes."""
GIVE_BACK: Final = struct.Struct("<Q")
"""Message of a client: number of a loan that it gives back."""

_OFFER: Final = re.compile(r"(teleloader-[0-9a-f]{32}):([0-9a-f]{32}):([0-9a-f]{64})", re.ASCII)


class Offer(NamedTuple):
    """Parsed `Registration.handoff`."""

    socket_name: str
    """Name of an abstract Unix socket, without the leading null byte."""
    identifier: bytes
    """Public identifier of the principal."""
    key: Secret
    """Key of the principal, in hexadecimal digits."""

    @classmethod
    def parse(cls, text: str) -> Offer | None:
        """Parse an offer; return None if it is invalid, because only sockets of this form may be connected to."""
        match = _OFFER.fullmatch(text)
        return None if match is None else cls(match[1], bytes.fromhex(match[2]), Secret(match[3]))

    def format(self) -> str:
        """Return the text that `parse` accepts."""
        return f"{self.socket_name}:{self.identifier.hex()}:{self.key}"


def server_proof(key: Secret, nonces: bytes) -> bytes:
    """Return the server's proof that it knows the key of an offer."""
    return hmac.digest(bytes.fromhex(key), b"server" + nonces, "sha256")


def channel_name(key: Secret, nonces: bytes) -> str:
    """Return the value of `CHANNEL_HEADER`, which proves that the client knows the key of an offer."""
    return hmac.digest(bytes.fromhex(key), b"client" + nonces, "sha256")[:16].hex()
