"""Parsing and validation of identity files: issuers of JWTs, and rules. Pure functions, without I/O or clocks."""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from teleloader_server.auth.rules import Rule, parse_rules
from teleloader_server.auth.tokens import TOKEN_NAME, TOKEN_NAME_RULE, shown
from teleloader_server.config import ConfigError, check_keys

CERTIFICATE: Final = "certificate"
"""Prefix of the names of principals that a client certificate identifies; no issuer may have this name."""
ALGORITHMS: Final[Mapping[str, str]] = {
    **{f"{family}{bits}": "RSA" for family in ("RS", "PS") for bits in (256, 384, 512)},
    **{f"ES{bits}": "EC" for bits in (256, 384, 512)},
    "EdDSA": "OKP",
}
"""Key type of each supported signature algorithm: only asymmetric ones."""
DEFAULT_LEEWAY: Final = 30.0
MAX_LEEWAY: Final = 300.0
_ISSUER_KEYS: Final = (
    "issuer", "audience", "jwks_file", "jwks_url", "ca", "token_file", "algorithms", "leeway", "rules",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeySettings:
    """Place of the keys of an issuer."""

    issuer: str
    """Issuer of the tokens; its discovery document states the URL of the keys if `file` and `url` are None."""
    file: Path | None
    """File with the JWKS."""
    url: str | None
    """URL of the JWKS."""
    ca: Path | None
    """CAs that sign the certificate of the URL; None for the CAs of the system."""
    token_file: Path | None
    """File with a token that the server sends with its requests for the keys; None for no token."""


@dataclass(frozen=True, slots=True)
class Issuer:
    """Issuer of JWTs."""

    name: str
    """Name for logs and as the prefix of the names of principals."""
    issuer: str
    """Claim ``iss`` of its tokens."""
    audiences: tuple[str, ...]
    """Accepted values of the claim ``aud``."""
    algorithms: frozenset[str]
    leeway: float
    """Permitted difference of the clocks of issuer and server, in seconds."""
    keys: KeySettings
    rules: tuple[Rule, ...]


class IdentityConfig(NamedTuple):
    """Content of an identity file."""

    issuers: Mapping[str, Issuer]
    """Issuers by the claim ``iss``."""
    certificate_rules: tuple[Rule, ...]
    """Rules of client certificates; empty if certificates identify no clients."""


def parse_identity(text: str, where: str, folder: Path) -> IdentityConfig:
    """Parse an identity file.

    Args:
        text: The file's content; an empty file identifies no clients.
        where: The file's name, for error messages.
        folder: Folder to which relative paths in the file refer.

    Raises:
        ConfigError: If the file is invalid.
    """
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # tomllib reports nesting and long numbers by errors of its parts
        raise ConfigError(f"invalid identity file {where}: not valid TOML: {error}") from None
    check_keys(where, tables, ("issuers", "certificates"))
    issuers: dict[str, Issuer] = {}
    for name, table in _table(tables, "issuers", where).items():
        issuer = _issuer(name, table, where, folder)
        if issuer.issuer in issuers:
            raise ConfigError(
                f"duplicate issuer {issuer.issuer!r} in {where}: [issuers.{issuers[issuer.issuer].name}] and "
                f"[issuers.{name}]. Put the rules of both into one"
            )
        issuers[issuer.issuer] = issuer
    certificates = _table(tables, "certificates", where)
    check_keys(f"[certificates] of {where}", certificates, ("rules",))
    at = f"invalid entry [certificates] in {where}"
    rules = parse_rules(certificates.get("rules"), at) if "certificates" in tables else ()
    return IdentityConfig(issuers, rules)


def is_secure_url(url: str) -> bool:
    """Return True for an https:// URL, or an http:// URL of a loopback address, without a password."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        _ = parts.port  # raises ValueError for an invalid port
    except ValueError:
        return False
    if parts.username is not None:  # URLs are logged
        return False
    if parts.scheme == "https":
        return bool(host)
    if parts.scheme != "http":
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _table(tables: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    found = tables.get(name, {})
    if not isinstance(found, dict):
        raise ConfigError(f"invalid entry {name!r} in {where}: expected a table [{name}], got {shown(found)}")
    return found


def _issuer(name: str, table: object, where: str, folder: Path) -> Issuer:
    at = f"invalid entry [issuers.{name}] in {where}"
    if not TOKEN_NAME.fullmatch(name) or name == CERTIFICATE:
        raise ConfigError(
            f"invalid issuer name {name!r} in {where}: expected {TOKEN_NAME_RULE}, and not {CERTIFICATE!r}"
        )
    if not isinstance(table, dict):
        raise ConfigError(f"{at}: expected a table with issuer, audience and rules")
    check_keys(f"[issuers.{name}] of {where}", table, _ISSUER_KEYS)
    issuer = table.get("issuer")
    if not isinstance(issuer, str) or not issuer:
        raise ConfigError(f"{at}: expected issuer = URL, the claim 'iss' of its tokens, got {shown(issuer)}")
    keys = _key_settings(issuer, table, at, folder)
    return Issuer(
        name, issuer, _audiences(table.get("audience"), at), _algorithms(table.get("algorithms"), at),
        _leeway(table.get("leeway", DEFAULT_LEEWAY), at), keys, parse_rules(table.get("rules"), at),
    )  # fmt: skip


def _key_settings(issuer: str, table: Mapping[str, object], at: str, folder: Path) -> KeySettings:
    if "jwks_file" in table and "jwks_url" in table:
        raise ConfigError(f"{at}: expected at most one of jwks_file and jwks_url, got both")
    url = table.get("jwks_url")
    if url is not None and (not isinstance(url, str) or not is_secure_url(url)):
        raise ConfigError(f"{at}: invalid jwks_url {shown(url)}: expected https://, or http:// with a loopback address")
    if "jwks_file" not in table and url is None and not is_secure_url(issuer):
        raise ConfigError(
            f"{at}: cannot find the keys of {shown(issuer)}: expected an https:// URL as issuer. Otherwise add "
            "jwks_url or jwks_file"
        )
    paths = {
        name: _path(table.get(name), f"{at}: invalid {name}", folder) for name in ("jwks_file", "ca", "token_file")
    }
    return KeySettings(issuer, paths["jwks_file"], url, paths["ca"], paths["token_file"])


def _path(stated: object, at: str, folder: Path) -> Path | None:
    if stated is None:
        return None
    if not isinstance(stated, str) or not stated:
        raise ConfigError(f"{at}: expected the path of a file, got {shown(stated)}")
    return folder / stated


def _audiences(stated: object, at: str) -> tuple[str, ...]:
    # no default: a token that was issued for another service must not be accepted
    audiences = stated if isinstance(stated, list) else [stated]
    if not audiences or not all(isinstance(audience, str) and audience for audience in audiences):
        raise ConfigError(
            f"{at}: expected audience = NAME, or a list of names, got {shown(stated)}. Use the audience that clients "
            "request their tokens for, such as teleloader"
        )
    return tuple(audiences)


def _algorithms(stated: object, at: str) -> frozenset[str]:
    if stated is None:
        return frozenset(ALGORITHMS)
    if (
        not isinstance(stated, list)
        or not stated
        or not all(isinstance(each, str) and each in ALGORITHMS for each in stated)
    ):
        raise ConfigError(f"{at}: invalid algorithms {shown(stated)}: expected a list of {', '.join(ALGORITHMS)}")
    return frozenset(stated)


def _leeway(stated: object, at: str) -> float:
    if not isinstance(stated, int | float) or isinstance(stated, bool) or not 0 <= stated <= MAX_LEEWAY:
        raise ConfigError(f"{at}: leeway must be a number of seconds in [0, {MAX_LEEWAY:g}], got {shown(stated)}")
    return float(stated)
