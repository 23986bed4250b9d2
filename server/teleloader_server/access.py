"""Who may come in, and what they may do: decisions only, without files, sockets or clocks.

::

    scope        allows
    read         batches of all datasets
    read:NAME    batches of one dataset
    stats        /stats, /metrics and the dashboard
    admin        all of it, and what holds up others: loading in the server's own process
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from teleloader_server.config import ConfigError
from teleloader_shared.errors import Forbidden

READ: Final = "read"
STATS: Final = "stats"
ADMIN: Final = "admin"
ALL_SCOPES: Final = frozenset({READ, STATS, ADMIN})
DEFAULT_SCOPES: Final = (READ, STATS)
"""Scopes of a server's only token, and of tokens that ``teleloader-server token add`` generates."""

ANY: Final = "any"
"""What an endpoint needs that is for whoever may come in, whatever for."""
OPEN: Final = "open"
"""What an endpoint needs that is for everybody, but not for pages of other sites."""
UNCHECKED: Final = "unchecked"
"""What an endpoint needs that tells nothing and does nothing: probes, and the files of the dashboard."""

TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
"""What a token may look like: what RFC 6750 lets stand in a header, and no shorter than can be guessed."""

TOKEN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TOKEN_NAME_RULE: Final = "1 to 64 letters, digits, '.', '_' and '-', starting with a letter or digit"  # noqa: S105
SCOPE: Final = re.compile(r"read|stats|admin|read:[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SCOPE_RULE: Final = "read, read:DATASET, stats or admin"

MAX_HOST: Final = 300
"""Characters of a ``Host`` header: a DNS name has at most 253, and a port follows."""

_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_ENTRIES: Final = ("token", "sha256", "scopes", "expires", "memory_share")

_Endpoint = TypeVar("_Endpoint", bound=Callable[..., Any])


class Principal(NamedTuple):
    """Who asks."""

    name: str
    """What the token is called."""
    scopes: frozenset[str]
    """What its owner may do."""
    memory_share: float
    """The part of the memory for batches that its owner's consumers may fill together, in (0, 1]."""

    def authorize(self, need: str, dataset: str | None = None) -> Principal:
        """Return the principal itself if its scopes suffice: a principal is the `Caller` whose token never ends.

        Args:
            need: A scope, or `ANY`.
            dataset: The dataset to be used; None stands for an operation that uses none.

        Raises:
            Forbidden: The scopes do not suffice.
        """
        if allows(self.scopes, need, dataset):
            return self
        wanted = f"{need}:{dataset}" if need == READ and dataset is not None else need
        raise Forbidden(
            f"the token {self.name!r} has the scopes {said_scopes(self.scopes)}, and this needs {wanted[:200]!r}: ask "
            "who runs the server"
        )


class Caller(Protocol):
    """The sender of a request.

    A caller is kept instead of its principal because a token can expire, be revoked or lose a scope while the request
    waits: `authorize` looks it up each time.
    """

    def authorize(self, need: str, dataset: str | None = None) -> Principal:
        """Return the caller's principal if its token is valid now and its scopes suffice.

        Args:
            need: A scope, or `ANY`.
            dataset: The dataset to be used; None stands for an operation that uses none.

        Raises:
            Unauthorized: The request has no token, or its token is not valid any more.
            Forbidden: The scopes do not suffice.
        """


ANYONE: Final = Principal("anyone", ALL_SCOPES, 1.0)
"""Who asks a server that has no tokens."""


class Token(NamedTuple):
    """An entry of the table of tokens; the token itself is not kept."""

    principal: Principal
    digest: bytes
    """SHA-256 of the token."""
    expires: float
    """When it ends to be one, in seconds since 1970; infinity is never."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A table of tokens; immutable, so that a server replaces it in one step."""

    entries: tuple[Token, ...]
    holds_secrets: bool = False
    """Whether the tokens themselves stood where this was read."""

    def find(self, token: bytes) -> Token | None:
        """The entry of a token. It takes as long for each, whichever it is like and whether it is one."""
        digest = hashlib.sha256(token).digest()
        found = None
        for entry in self.entries:
            if hmac.compare_digest(entry.digest, digest):
                found = entry
        return found

    def has(self, digest: bytes) -> Token | None:
        """The entry with that digest, if it is still there."""
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
    """Return the table of a server with one token, which has the scopes of `DEFAULT_SCOPES`.

    Args:
        token: The token.
        where: Where the token was given, for error messages.

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
            f"invalid token name {name!r} in {where}: limits count clients without a token under this name. Choose "
            "another name"
        )
    if not isinstance(table, dict):
        raise ConfigError(f'{at}: expected a table: [{name}], followed by sha256 = "..." and scopes = ["..."]')
    for field in table:
        if field not in _ENTRIES:
            raise ConfigError(f"{at}: unknown field {field!r}; expected {', '.join(_ENTRIES)}")
    if ("token" in table) == ("sha256" in table):
        raise ConfigError(f'{at}: expected either token = "..." or sha256 = "..."')
    digest = _digest(table["token"], at) if "token" in table else _stated_digest(table["sha256"], at)
    principal = Principal(name, _scopes(table.get("scopes"), at), _share(table.get("memory_share", 1), at))
    return Token(principal, digest, _expiry(table.get("expires"), at))


def _digest(token: object, at: str) -> bytes:
    if not isinstance(token, str) or not TOKEN.fullmatch(token):
        raise ConfigError(
            f"{at}: expected a token of 16 to 512 letters, digits and -._~+/=. Generate one with: "
            "teleloader-server token add NAME --file tokens.toml"
        )
    return hashlib.sha256(token.encode()).digest()


def _stated_digest(stated: object, at: str) -> bytes:
    if not isinstance(stated, str) or not _SHA256.fullmatch(stated.lower()):
        raise ConfigError(f"{at}: sha256 must be the 64 hexadecimal digits of a token's SHA-256")
    return bytes.fromhex(stated)


def _scopes(stated: object, at: str) -> frozenset[str]:
    # No default: an entry that a truncated or mistyped file leaves without scopes must not gain access by it.
    if not isinstance(stated, list) or not stated:
        got = "none" if stated is None else _shown(stated)
        raise ConfigError(f'{at}: expected a list of scopes, got {got}. Add scopes = ["read", "stats"], for example')
    for scope in stated:
        if not isinstance(scope, str) or not SCOPE.fullmatch(scope):
            raise ConfigError(f"{at}: invalid scope {_shown(scope)}: expected {SCOPE_RULE}")
    return frozenset(stated)


def _share(stated: object, at: str) -> float:
    if not isinstance(stated, int | float) or isinstance(stated, bool) or not 0 < stated <= 1:
        raise ConfigError(f"{at}: memory_share must be a number in (0, 1], got {_shown(stated)}")
    return float(stated)


def _expiry(stated: object, at: str) -> float:
    if stated is None:
        return math.inf
    if not isinstance(stated, datetime) or stated.tzinfo is None:
        raise ConfigError(
            f"{at}: expires must be a time with its zone, such as 2027-01-01T00:00:00Z, got {_shown(stated)}"
        )
    return stated.timestamp()


def _shown(stated: object) -> str:
    try:
        return f"{stated!r:.80}"
    except ValueError:
        return "a number of very many digits"


# -- what an endpoint needs


def needs(scope: str) -> Callable[[_Endpoint], _Endpoint]:
    """Declare what an endpoint needs: a scope, `ANY`, `OPEN` or `UNCHECKED`; without that it is not served."""

    def declare(endpoint: _Endpoint) -> _Endpoint:
        endpoint.needs = scope  # type: ignore[attr-defined]
        return endpoint

    return declare


def need_of(endpoint: object) -> str:
    """What an endpoint has declared.

    Raises:
        LookupError: When it has declared nothing.
    """
    need = getattr(endpoint, "needs", None)
    if not isinstance(need, str):
        raise LookupError(f"{endpoint!r} does not declare who may ask for it: @needs(...)")
    return need


def allows(scopes: frozenset[str], need: str, dataset: str | None = None) -> bool:
    """Whether these scopes are enough.

    Args:
        scopes: What somebody has.
        need: What an endpoint has declared.
        dataset: Which dataset it is about; None is any.
    """
    if ADMIN in scopes or need in scopes or need in (ANY, OPEN, UNCHECKED):
        return True
    if need != READ:
        return False
    return any(s.startswith("read:") for s in scopes) if dataset is None else f"{READ}:{dataset}" in scopes


# -- where a server may stand, and what it may be called


def refuse_unprotected(address: str, *, has_tokens: bool, insecure: bool) -> None:
    """Refuse to listen where others are without asking them for a token.

    Args:
        address: The IP address that was bound.
        has_tokens: Whether there are tokens.
        insecure: Whether the user has said that it shall be so.

    Raises:
        ConfigError: When whoever reaches the address could come in.
    """
    if has_tokens or insecure or is_loopback(address):
        return
    raise ConfigError(
        f"cannot listen on {address} without tokens: every machine that reaches this address could load data. Generate "
        "a token with teleloader-server token add trainer --file tokens.toml and start with --tokens tokens.toml "
        "(serve(..., token=...)), listen on 127.0.0.1, or disable authentication with --insecure "
        "(serve(..., insecure=True))"
    )


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a server that listens on an IP address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def known_hosts(names: Iterable[str]) -> frozenset[str]:
    """What `is_known_host` goes by: names, in lower case and without their final dot."""
    return frozenset(name.lower().rstrip(".") for name in names if name)


def is_known_host(header: str, known: frozenset[str]) -> bool:
    """Whether a request that says ``Host: header`` may be meant for this server.

    A page of evil.example whose name is made to lead to this server's address has its browser say evil.example here. An
    address is not a name, so nobody can have made it lead elsewhere.

    Args:
        header: The header, with or without a port.
        known: Names, of which ``*.example.com`` is all below it and ``*`` is any.
    """
    if len(header) > MAX_HOST:
        return False  # each parent domain is looked up below, which takes time by the square of the length
    name = _without_port(header).lower().rstrip(".")
    if name in known or name == "localhost" or name.endswith(".localhost") or "*" in known:
        return True
    parts = name.split(".")
    if any(f"*.{'.'.join(parts[i:])}" in known for i in range(1, len(parts))):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _without_port(header: str) -> str:
    name, colon, port = header.rpartition(":")
    return name if colon and port.isdecimal() else header


def is_of_another_site(method: str, host: str, origin: str | None, site: str | None, mode: str | None) -> bool:
    """Whether a page of another site has caused a request, as its browser says. Other clients say nothing of it.

    A link to this server may stand anywhere, so going to it is allowed.

    Args:
        method: The request's method.
        host: Its header Host, which a proxy must leave as it is.
        origin: Its header Origin, None where it has none.
        site: Its header Sec-Fetch-Site, which browsers send to HTTPS and to their own machine only.
        mode: Its header Sec-Fetch-Mode.
    """
    if origin is not None and origin.partition("://")[2].lower() != host.lower():
        return True
    if site is None or site in ("same-origin", "none"):
        return False
    return not (mode == "navigate" and method in ("GET", "HEAD"))


def said_scopes(scopes: Sequence[str] | frozenset[str]) -> str:
    """Scopes as a sentence names them."""
    return ", ".join(sorted(scopes))
