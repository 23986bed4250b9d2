"""Verification of JWTs: signature, claims and rules. The caller passes the time and remembers results."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from teleloader_server.auth.certificates import no_rule
from teleloader_server.auth.claims import check_audience, check_times, excerpt, subject_of
from teleloader_server.auth.identity_config import IdentityConfig, Issuer
from teleloader_server.auth.key_source import KeySource
from teleloader_server.auth.keys import is_valid
from teleloader_server.auth.outcomes import Refusal
from teleloader_server.auth.rules import first_match
from teleloader_server.auth.tokens import Token
from teleloader_shared.errors import AccessDenied, ServerUnavailable, Unauthorized

MAX_JWT_BYTES: Final = 16 * 1024
"""Maximum size of a JWT: tokens with hundreds of groups have 10 KB."""
MAX_KID: Final = 256
"""Maximum number of characters of a key ID."""
_TYPES: Final = (None, "jwt", "at+jwt", "application/at+jwt")
"""Values of the header ``typ`` in lower case: tokens of other types, such as logout tokens, grant no access."""


class JwtVerifier:
    """Verifier of the JWTs of all issuers of an identity file.

    Args:
        config: Content of the identity file.
        sources: Keys by the claim ``iss``.
    """

    def __init__(self, config: IdentityConfig, sources: Mapping[str, KeySource]) -> None:
        self._config = config
        self._sources = sources

    def verify(self, token: bytes, digest: bytes, now: float) -> Token | Refusal:
        """Verify a token; return its principal and the end of its validity, or the reason why it is refused.

        Args:
            token: The token.
            digest: SHA-256 of the token.
            now: Current time, in seconds since 1970.
        """
        name = None
        try:
            issuer, claims = self._signed_claims(token)
            name = f"{issuer.name}:{subject_of(claims)}"
            check_audience(claims, issuer.audiences)
            expires = check_times(claims, issuer.leeway, now)
        except (AccessDenied, ServerUnavailable) as error:
            return Refusal(type(error), str(error), name)
        rule = first_match(issuer.rules, claims)
        if rule is None or not rule.grant.scopes:
            return no_rule(name, f"[issuers.{issuer.name}]", is_explicit=rule is not None)
        return Token(rule.grant.principal(name), digest, expires)

    def _signed_claims(self, token: bytes) -> tuple[Issuer, dict[str, Any]]:
        """Return the issuer and the claims of a token whose signature is valid.

        Raises:
            Unauthorized: If the token is malformed, its issuer is unknown, or its signature is invalid.
            ServerUnavailable: If the keys of the issuer are not available now.
        """
        if len(token) > MAX_JWT_BYTES:
            raise Unauthorized(
                f"the token has {len(token):,} bytes, and the limit is {MAX_JWT_BYTES:,}: request a token with fewer "
                "claims"
            )
        head, body, _ = token.split(b".")
        header, claims = _object_in(head, "header"), _object_in(body, "payload")
        _check_header(header)
        stated = claims.get("iss")
        issuer = self._config.issuers.get(stated) if isinstance(stated, str) else None
        if issuer is None:
            known = ", ".join(map(repr, self._config.issuers))
            raise Unauthorized(
                f"unknown issuer {excerpt(stated)}: expected {known:.500}. Request a token from an issuer that the "
                "server trusts"
            )
        algorithm, kid = header.get("alg"), header.get("kid")
        if not isinstance(algorithm, str) or algorithm not in issuer.algorithms:
            raise Unauthorized(
                f"algorithm {excerpt(algorithm)} not allowed: tokens of issuer {issuer.name!r} must be signed with one "
                f"of {', '.join(sorted(issuer.algorithms))}"
            )
        key = self._sources[issuer.issuer].find(kid, algorithm)
        if not is_valid(token, key, algorithm):
            raise Unauthorized(
                f"invalid signature: the token was not signed by issuer {issuer.name!r}, or was changed. Request a new "
                "token from the issuer"
            )
        return issuer, claims


def _check_header(header: Mapping[str, Any]) -> None:
    """Reject headers that change how a token must be interpreted; ``jku``, ``jwk`` and ``x5u`` are ignored."""
    for name in ("crit", "b64", "zip"):
        if name in header:
            raise Unauthorized(f"unsupported header {name!r} of the token: request a plain signed token (JWS)")
    kind = header.get("typ")
    if (kind.lower() if isinstance(kind, str) else kind) not in _TYPES:
        raise Unauthorized(f"wrong type {excerpt(kind)} of the token: expected JWT or at+jwt. Request an access token")
    kid = header.get("kid")
    if kid is not None and not (isinstance(kid, str) and len(kid) <= MAX_KID):
        raise Unauthorized(f"invalid key ID of the token: expected a string of at most {MAX_KID} characters")


def _object_in(segment: bytes, what: str) -> dict[str, Any]:
    try:
        text = base64.b64decode(segment + b"=" * (-len(segment) % 4), altchars=b"-_", validate=True)
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unauthorized(
            f"malformed token: its {what} is not a JSON object in base64url. Check that the token is complete"
        )
    return found
