"""Public keys of an issuer (JWKS, RFC 7517), and verification of signatures with PyJWT.

Only this module imports PyJWT, which is an optional package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import jwt
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from teleloader_server.auth.identity_config import ALGORITHMS

MAX_KEYS: Final = 256
"""Maximum number of keys of an issuer."""
RSA_BITS: Final = (2048, 8192)
"""Minimum and maximum size of RSA keys: smaller ones are insecure, and larger ones slow to verify with."""
_KEY_TYPES: Final[Mapping[str, tuple[Any, tuple[str, ...]]]] = {
    "RSA": (RSAAlgorithm, ("n", "e")),
    "EC": (ECAlgorithm, ("crv", "x", "y")),
    "OKP": (OKPAlgorithm, ("crv", "x")),
}
"""Class of PyJWT and public members of each key type. A symmetric key ("oct") is never used."""
_CURVES: Final[Mapping[str, tuple[str, ...]]] = {
    "ES256": ("P-256",), "ES384": ("P-384",), "ES512": ("P-521",), "EdDSA": ("Ed25519", "Ed448"),
}  # fmt: skip

_jws: Final = jwt.PyJWS(algorithms=sorted(ALGORITHMS))


class Key(NamedTuple):
    """Public key."""

    kid: str | None
    """Key ID; None if the issuer states none."""
    kind: str
    """Key type: RSA, EC or OKP."""
    curve: str | None
    algorithm: str | None
    """The only algorithm for which the issuer uses the key; None for any of its type."""
    public: Any
    """Key object of the package cryptography."""

    def fits(self, algorithm: str) -> bool:
        """Return True if the key can verify signatures of an algorithm."""
        if ALGORITHMS[algorithm] != self.kind or self.algorithm not in (None, algorithm):
            return False
        return algorithm not in _CURVES or self.curve in _CURVES[algorithm]


class Keys(NamedTuple):
    """Keys of an issuer."""

    keys: tuple[Key, ...]
    fingerprint: str
    """Text that differs if a key differs."""

    def find(self, kid: str | None, algorithm: str) -> Key | None:
        """Return the key of a token, or None; for a token without a key ID, the only key that fits the algorithm."""
        fitting = [key for key in self.keys if key.fits(algorithm) and kid in (None, key.kid)]
        return fitting[0] if fitting and (kid is not None or len(fitting) == 1) else None


class InvalidKeys(Exception):
    """Exception for a text that is not a JWKS, or contains no usable key."""


def parse_keys(text: str | bytes) -> Keys:
    """Parse a JWKS; keys that cannot verify signatures of tokens are omitted.

    Raises:
        InvalidKeys: If the text is invalid, or contains no usable key.
    """
    try:
        found = json.loads(text)
        listed = found["keys"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise InvalidKeys('expected a JWKS: a JSON object with the member "keys"') from None
    if not isinstance(listed, list) or len(listed) > MAX_KEYS:
        raise InvalidKeys(f"expected at most {MAX_KEYS} keys in a list")
    keys = tuple(key for stated in listed if isinstance(stated, dict) and (key := _key(stated)) is not None)
    if not keys:
        raise InvalidKeys(
            f"none of the {len(listed)} keys can verify tokens: expected RSA keys of {RSA_BITS[0]:,} to "
            f"{RSA_BITS[1]:,} bits, or keys of the types EC or OKP, for signatures"
        )
    return Keys(keys, json.dumps(listed, sort_keys=True))


def verify(token: bytes, key: Key, algorithm: str) -> bytes:
    """Return the payload of a token if its signature is valid.

    Raises:
        jwt.InvalidTokenError: If the signature is invalid.
    """
    payload: bytes = _jws.decode_complete(token, key.public, algorithms=[algorithm])["payload"]
    return payload


def is_valid(token: bytes, key: Key, algorithm: str) -> bool:
    """Return True if the signature of a token is valid."""
    try:
        verify(token, key, algorithm)
    except (jwt.PyJWTError, ValueError, RecursionError, TypeError):  # the others: headers that json cannot parse
        return False
    return True


def _key(stated: Mapping[str, Any]) -> Key | None:
    kind, kid, algorithm, operations = (stated.get(name) for name in ("kty", "kid", "alg", "key_ops"))
    if not isinstance(kind, str) or kind not in _KEY_TYPES or stated.get("use") not in (None, "sig"):
        return None
    if isinstance(operations, list) and "verify" not in operations:
        return None
    if not isinstance(kid, str | None) or not isinstance(algorithm, str | None):
        return None
    if algorithm is not None and ALGORITHMS.get(algorithm) != kind:
        return None
    make, members = _KEY_TYPES[kind]
    try:
        # only public members: PyJWT would return a private key otherwise
        public = make.from_jwk({"kty": kind, **{name: stated[name] for name in members}})
    except (jwt.PyJWTError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if kind == "RSA" and not RSA_BITS[0] <= public.key_size <= RSA_BITS[1]:
        return None
    return Key(kid, kind, stated.get("crv"), algorithm, public)
