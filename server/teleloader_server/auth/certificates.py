"""Identity of clients by their TLS certificates. Without I/O or clocks.

The TLS library has verified the certificate with the CAs of ``--ssl-ca-certs``. It belongs to the connection: no header
of a request states or changes it.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from typing import Any, Final

from teleloader_server.auth.claims import SUBJECT
from teleloader_server.auth.identity_config import CERTIFICATE, IdentityConfig
from teleloader_server.auth.outcomes import Refusal
from teleloader_server.auth.rules import first_match
from teleloader_server.auth.tokens import Token
from teleloader_shared.errors import Forbidden, Unauthorized

PEER_CERTIFICATE: Final = "teleloader.certificate"
"""Key under which the state in an ASGI scope contains the `PeerCertificate` of the connection."""
_SUBJECT: Final = {"commonName": "cn", "organizationName": "o", "organizationalUnitName": "ou"}
"""Claims for fields of the subject."""
_ALTERNATIVE: Final = {"URI": "uri", "DNS": "dns", "email": "email", "IP Address": "ip"}
"""Claims for alternative names of the subject."""


class PeerCertificate:
    """Verified certificate of the client of a connection.

    Args:
        fields: Fields of the certificate, as returned by `ssl.SSLSocket.getpeercert`.
    """

    __slots__ = ("_decided", "_fields")

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields
        self._decided: tuple[IdentityConfig, Token | Refusal] | None = None

    def identify(self, config: IdentityConfig) -> Token | Refusal:
        """Return the principal by the rules of an identity file, with the end of the certificate's validity."""
        if self._decided is None or self._decided[0] is not config:
            self._decided = config, _decide(self._fields, config)
        return self._decided[1]


def claims_of(fields: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the claims of a certificate: a list of values for each kind of name.

    Args:
        fields: Fields of the certificate, as returned by `ssl.SSLSocket.getpeercert`.
    """
    found: dict[str, list[str]] = {}
    for claim, value in _names(fields):
        found.setdefault(claim, []).append(value)
    return found


def _names(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for relative_name in fields.get("subject", ()):
        yield from ((_SUBJECT[kind], value) for kind, value in relative_name if kind in _SUBJECT)
    yield from ((_ALTERNATIVE[kind], value) for kind, value in fields.get("subjectAltName", ()) if kind in _ALTERNATIVE)


def _decide(fields: Mapping[str, Any], config: IdentityConfig) -> Token | Refusal:
    claims = claims_of(fields)
    identity = next((claims[kind][0] for kind in ("uri", "cn", "dns") if kind in claims), "")
    if not SUBJECT.fullmatch(identity):
        return Refusal(
            Unauthorized,
            f"the client certificate identifies no client by {identity!r:.100}: expected a URI, common name or DNS "
            "name of 1 to 255 printable ASCII characters without spaces. Use another certificate",
        )
    name = f"{CERTIFICATE}:{identity}"
    rule = first_match(config.certificate_rules, claims)
    if rule is None or not rule.grant.scopes:
        return no_rule(name, "[certificates]", is_explicit=rule is not None)
    return Token(rule.grant.principal(name), b"", ssl.cert_time_to_seconds(fields["notAfter"]))


def no_rule(name: str, table: str, *, is_explicit: bool) -> Refusal:
    """Return the refusal of a principal without permissions.

    Args:
        name: Name of the principal.
        table: Table of the identity file with the rules.
        is_explicit: Whether a rule refuses the principal; otherwise, no rule matches.
    """
    why = "a rule without scopes matches" if is_explicit else "no rule matches"
    return Refusal(
        Forbidden,
        f"{name!r} has no permissions: {why} in {table} of the server's identity file. Ask the server's operator to "
        "add a rule",
        name,
    )
