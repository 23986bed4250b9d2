"""Parsing and validation of token tables: pure functions, without I/O or clocks."""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

from teleloader_server.config import ConfigError
from teleloader_server.permissions import ANYONE, READ, STATS, Principal

DEFAULT_SCOPES: Final = (READ, STATS)
"""Scopes of the token in ``--token-file`` or ``serve(token=...)``, and default of ``teleloader-server token add``."""


TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
"""Pattern of valid tokens: only characters that RFC 6750 allows; at least 16 characters, to prevent guessing."""


SENT_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{16,16384}")
"""Pattern of tokens that this server sends to another one, which may be JWTs."""


TOKEN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


TOKEN_NAME_RULE: Final = "1 to 64 letters, digits, '.', '_' and '-', starting with a letter or digit"  # noqa: S105


SCOPE: Final = re.compile(r"read|stats|announce|admin|read:[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


SCOPE_RULE: Final = "read, read:DATASET, stats, announce or admin"


_SHA256: Final = re.compile(r"[0-9a-f]{64}")


PRIORITIES: Final = {"high": 10.0, "normal": 1.0, "low": 0.1}
"""Priority classes, as factors of the weight: while both wait, a class gets ten times the worker time of the next."""
WEIGHTS: Final = (0.01, 100.0)
"""Minimum and maximum weight of a token within its class."""
GRANT_KEYS: Final = ("scopes", "memory_share", "priority", "weight")
"""Keys of a table that states permissions, in token files and identity files."""
_ENTRIES: Final = ("token", "sha256", "expires", *GRANT_KEYS)


class Grant(NamedTuple):
    """Permissions of a principal: scopes, and shares of memory and worker time."""

    scopes: frozenset[str]
    memory_share: float
    """Fraction of the memory budget, in (0, 1]."""
    weight: float
    """Share of the worker time: the factor of the priority class times the weight within the class."""

    def principal(self, name: str) -> Principal:
        """Return the principal of this name with these permissions."""
        return Principal(name, self.scopes, self.memory_share, self.weight)


class Token(NamedTuple):
    """Token table entry: principal, expiry, and the digest of the token; the token itself is not stored."""

    principal: Principal
    digest: bytes
    """SHA-256 of the token."""
    expires: float
    """Expiry in seconds since 1970; infinity if the token never expires."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Immutable token table; a reload replaces the whole table."""

    entries: tuple[Token, ...]
    holds_secrets: bool = False
    """True if the source contains tokens in plain text."""

    def find(self, token: bytes) -> Token | None:
        """Return the entry of a token, or None if the token is unknown. Takes the same time for all tokens."""
        digest = hashlib.sha256(token).digest()
        found = None
        for entry in self.entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        return found

    def has(self, digest: bytes) -> Token | None:
        """Return the entry of the token with the given SHA-256 digest, or None if the digest is unknown."""
        return next((entry for entry in self.entries if entry.digest == digest), None)


def parse_tokens(text: str, where: str) -> Tokens:
    """Parse a TOML file with one table per token.

    Args:
        text: The file's content; an empty file lists no tokens.
        where: The file's name, for error messages.

    Raises:
        ConfigError: If the file is invalid. The message names entries, never tokens.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib reports nesting and long numbers by errors of its parts
        if TOKEN.fullmatch(text.strip()):
            raise ConfigError(
                f"invalid token table {where}: expected one TOML table per token, got a bare token. Pass the file as "
                "--token-file"
            ) from None
        raise ConfigError(f"invalid token table {where}: not valid TOML: {error}") from None
    entries = tuple(_entry(name, table, where) for name, table in tables.items())
    names: dict[bytes, str] = {}
    for entry in entries:
        other = names.setdefault(entry.digest, entry.principal.name)
        if other != entry.principal.name:
            raise ConfigError(
                f"duplicate token in {where}: [{other}] and [{entry.principal.name}] have the same token. Remove one "
                "of the two"
            )
    return Tokens(entries, any("token" in table for table in tables.values()))


def single_token(token: str, where: str) -> Tokens:
    """Return a token table that contains one token, with `DEFAULT_SCOPES`.

    Args:
        token: The token.
        where: Origin of the token, for error messages.

    Raises:
        ConfigError: If the token has a wrong length or characters.
    """
    principal = Principal("token", frozenset(DEFAULT_SCOPES), 1.0)
    return Tokens((Token(principal, _digest(token, f"invalid token in {where}"), math.inf),), True)


def _entry(name: str, table: object, where: str) -> Token:
    at = f"invalid entry [{name}] in {where}"
    if not TOKEN_NAME.fullmatch(name):
        raise ConfigError(f"invalid token name {name!r} in {where}: expected {TOKEN_NAME_RULE}")
    if name == ANYONE.name:
        raise ConfigError(
            f"reserved token name {name!r} in {where}: the server uses the name for unauthenticated clients. Choose "
            "another name"
        )
    if not isinstance(table, dict):
        raise ConfigError(f'{at}: expected a table: [{name}], followed by sha256 = "..." and scopes = ["..."]')
    for field in table:
        if field not in _ENTRIES:
            raise ConfigError(f"{at}: unknown key {field!r}: expected one of {', '.join(_ENTRIES)}")
    if ("token" in table) == ("sha256" in table):
        got = "both" if "token" in table else "neither"
        raise ConfigError(f'{at}: expected exactly one of token = "..." and sha256 = "...", got {got}')
    digest = _digest(table["token"], at) if "token" in table else _stated_digest(table["sha256"], at)
    return Token(parse_grant(table, at).principal(name), digest, _expiry(table.get("expires"), at))


def parse_grant(table: Mapping[str, object], at: str, *, may_refuse: bool = False) -> Grant:
    """Parse the keys `GRANT_KEYS` of a table.

    Args:
        table: Table of a token or rule.
        at: Place in the file, for error messages.
        may_refuse: Whether the list of scopes may be empty.

    Raises:
        ConfigError: If a value is invalid, or the scopes are missing.
    """
    weight = PRIORITIES[_priority(table.get("priority", "normal"), at)] * _weight(table.get("weight", 1), at)
    scopes = frozenset() if may_refuse and table.get("scopes") == [] else _scopes(table.get("scopes"), at)
    return Grant(scopes, _share(table.get("memory_share", 1), at), weight)


def _digest(token: object, at: str) -> bytes:
    if not isinstance(token, str) or not TOKEN.fullmatch(token):
        raise ConfigError(
            f"{at}: expected a token of 16 to 512 letters, digits and -._~+/=. Generate one with: "
            "teleloader-server token add NAME --file tokens.toml"
        )
    return hashlib.sha256(token.encode()).digest()


def _stated_digest(stated: object, at: str) -> bytes:
    if not isinstance(stated, str) or not _SHA256.fullmatch(stated.lower()):
        raise ConfigError(
            f"{at}: invalid sha256: expected 64 hexadecimal digits, got {len(str(stated))} characters. Generate "
            "an entry with: teleloader-server token add NAME --file tokens.toml"
        )
    return bytes.fromhex(stated)


def _scopes(stated: object, at: str) -> frozenset[str]:
    # No default: an entry whose scopes are missing in a truncated or mistyped file must not get any.
    if not isinstance(stated, list) or not stated:
        got = "none" if stated is None else shown(stated)
        raise ConfigError(f'{at}: expected a list of scopes, got {got}. Add scopes = ["read", "stats"], for example')
    for scope in stated:
        if not isinstance(scope, str) or not SCOPE.fullmatch(scope):
            raise ConfigError(f"{at}: invalid scope {shown(scope)}: expected {SCOPE_RULE}")
    return frozenset(stated)


def _share(stated: object, at: str) -> float:
    if not isinstance(stated, int | float) or isinstance(stated, bool) or not 0 < stated <= 1:
        raise ConfigError(f"{at}: memory_share must be a number in (0, 1], got {shown(stated)}")
    return float(stated)


def _priority(stated: object, at: str) -> str:
    if not isinstance(stated, str) or stated not in PRIORITIES:
        expected = ", ".join(f'"{name}"' for name in PRIORITIES)
        raise ConfigError(f"{at}: priority must be one of {expected}, got {shown(stated)}")
    return stated


def _weight(stated: object, at: str) -> float:
    least, most = WEIGHTS
    if not isinstance(stated, int | float) or isinstance(stated, bool) or not least <= stated <= most:
        raise ConfigError(f"{at}: weight must be a number in [{least:g}, {most:g}], got {shown(stated)}")
    return float(stated)


def _expiry(stated: object, at: str) -> float:
    if stated is None:
        return math.inf
    if not isinstance(stated, datetime) or stated.tzinfo is None:
        raise ConfigError(
            f"{at}: expires must be a time with a time zone, such as 2027-01-01T00:00:00Z, got {shown(stated)}"
        )
    return stated.timestamp()


def shown(stated: object) -> str:
    """Return the beginning of the `repr` of a value in a file, for error messages."""
    try:
        return f"{stated!r:.80}"
    except ValueError:
        return "a number with too many digits"
