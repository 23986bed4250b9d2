"""Checks of the registered claims of a JWT (RFC 7519, 4.1). Pure functions: the time is an argument."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from teleloader_shared.errors import Unauthorized

SUBJECT: Final = re.compile(r"[\x21-\x7e]{1,255}")
"""Pattern of subjects: OpenID Connect permits at most 255 ASCII characters. Names appear in logs and metrics."""
MAX_TIME: Final = 2**53
"""Maximum of a time in seconds since 1970: larger integers have no exact float."""


def check_times(claims: Mapping[str, Any], leeway: float, now: float) -> float:
    """Check the claims ``exp``, ``nbf`` and ``iat``; return the end of the validity, in seconds since 1970.

    Args:
        claims: Claims of a token.
        leeway: Permitted difference of the clocks of issuer and server, in seconds.
        now: Current time, in seconds since 1970.

    Raises:
        Unauthorized: If the token has expired or is not valid yet, or a claim is missing or invalid.
    """
    expires = _time(claims, "exp")
    if expires is None:
        raise Unauthorized("the token has no expiry: the claim 'exp' is required. Request a token that expires")
    if expires + leeway <= now:
        raise Unauthorized(
            f"the token expired {duration(now - expires)} ago: request a new token from its issuer. A client that "
            "reads its token from TELELOADER_TOKEN_FILE reads the file again"
        )
    for name, what in (("nbf", "is not valid yet"), ("iat", "was issued in the future")):
        since = _time(claims, name)
        if since is not None and since - leeway > now:
            raise Unauthorized(
                f"the token {what}: its claim {name!r} is {duration(since - now)} ahead of the server's clock. Check "
                "the clocks of the issuer and of the server"
            )
    return expires + leeway


def check_audience(claims: Mapping[str, Any], expected: Sequence[str]) -> None:
    """Check that the claim ``aud`` contains one of the expected audiences.

    Raises:
        Unauthorized: If it does not.
    """
    stated = claims.get("aud")
    audiences = stated if isinstance(stated, list) else [stated]
    if not any(isinstance(audience, str) and audience in expected for audience in audiences):
        shown = " or ".join(map(repr, expected))
        raise Unauthorized(
            f"wrong audience {excerpt(stated)}: expected {shown:.200}. Request a token for this audience from its "
            "issuer"
        )


def subject_of(claims: Mapping[str, Any]) -> str:
    """Return the claim ``sub``.

    Raises:
        Unauthorized: If the claim is missing, or is not 1 to 255 printable ASCII characters without spaces.
    """
    subject = claims.get("sub")
    if not isinstance(subject, str) or not SUBJECT.fullmatch(subject):
        raise Unauthorized(
            "invalid subject of the token: the claim 'sub' must be 1 to 255 printable ASCII characters without spaces, "
            f"got {excerpt(subject)}"
        )
    return subject


def duration(seconds: float) -> str:
    """Format a duration with one unit, rounded down: ``45 s``, ``5 min``, ``3 h`` or ``2 d``."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{int(seconds)} s"


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    stated = claims.get(name)
    if stated is None:
        return None
    # no float(): an integer may have thousands of digits
    if not isinstance(stated, int | float) or isinstance(stated, bool) or not 0 <= stated <= MAX_TIME:
        raise Unauthorized(f"invalid claim {name!r} of the token: expected seconds since 1970, got {excerpt(stated)}")
    return float(stated)


def excerpt(value: object) -> str:
    """Return the beginning of a claim or header for messages.

    Not its `repr`, which can be long, and exhausts the stack for lists in lists.
    """
    if isinstance(value, str):
        return repr(value[:100])
    if isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return f"[{', '.join(repr(each[:60]) for each in value[:3])}{', ...' if len(value) > 3 else ''}]"
    return "none" if value is None else f"a value of type {type(value).__name__}"
