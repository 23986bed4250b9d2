"""Issuer of JWTs with real keys, which are served over HTTP, and identity files for its tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

AUDIENCE: Final = "teleloader"
SUBJECT: Final = "system:serviceaccount:vision:trainer"
NAMESPACE_RULE: Final = 'match = { "kubernetes.io" = { namespace = "vision" } }\nscopes = ["read", "stats"]\n'
"""Rule that matches `Issuer.token`."""

_CURVES: Final[dict[str, Callable[[], ec.EllipticCurve]]] = {
    "ES256": ec.SECP256R1,
    "ES384": ec.SECP384R1,
    "ES512": ec.SECP521R1,
}


def private_key(algorithm: str) -> Any:
    """Create a key for an algorithm."""
    if algorithm in _CURVES:
        return ec.generate_private_key(_CURVES[algorithm]())
    return ed25519.Ed25519PrivateKey.generate() if algorithm == "EdDSA" else rsa.generate_private_key(65537, 2048)


def jwk_of(key: Any, kid: str, **fields: object) -> dict[str, Any]:
    """Return the public part of a key as a JWK."""
    kinds: list[tuple[type, Any]] = [(rsa.RSAPrivateKey, RSAAlgorithm), (ec.EllipticCurvePrivateKey, ECAlgorithm)]
    algorithm = next((found for kind, found in kinds if isinstance(key, kind)), OKPAlgorithm)
    public: dict[str, Any] = algorithm.to_jwk(key.public_key(), as_dict=True)
    return {**public, "kid": kid, **fields}


class Issuer:
    """Issuer whose discovery document and keys are served at its URL.

    Args:
        algorithm: Algorithm of its first key.
    """

    def __init__(self, algorithm: str = "ES256") -> None:
        self.algorithm = algorithm
        self.key = private_key(algorithm)
        self.kid = "first"
        self.keys = [jwk_of(self.key, self.kid)]
        self.requests: Counter[str] = Counter()
        """Number of requests by path."""
        self.authorizations: set[str | None] = set()
        """Authorization headers of the requests."""
        self.is_down = False
        """True to respond with status 503."""
        self.document: dict[str, object] = {}
        """Members of the discovery document that differ from those of a correct one."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Issuer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def rotate(self, kid: str) -> None:
        """Replace the key by a new one."""
        self.key, self.kid = private_key(self.algorithm), kid
        self.keys = [jwk_of(self.key, kid)]

    def token(
        self,
        *,
        headers: Mapping[str, object] | None = None,
        lifetime: float = 600,
        namespace: str = "vision",
        **claims: object,
    ) -> str:
        """Return a token of a Kubernetes service account; claims that are None are omitted."""
        now = time.time()
        found = {
            "iss": self.url, "aud": [AUDIENCE], "sub": SUBJECT, "iat": now, "exp": now + lifetime,
            "kubernetes.io": {"namespace": namespace, "serviceaccount": {"name": "trainer"}}, **claims,
        }  # fmt: skip
        stated = {name: value for name, value in found.items() if value is not None}
        return signed(stated, self.key, self.algorithm, {"kid": self.kid, **(headers or {})})

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.requests[self.path] += 1
                issuer.authorizations.add(self.headers["Authorization"])
                content = issuer._response(self.path)
                self.send_response(503 if issuer.is_down else 200 if content else 404)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _response(self, path: str) -> bytes:
        if path == "/.well-known/openid-configuration":
            return json.dumps({"issuer": self.url, "jwks_uri": f"{self.url}/keys", **self.document}).encode()
        return json.dumps({"keys": self.keys}).encode() if path == "/keys" else b""


def issuer_table(issuer: Issuer, rules: str = NAMESPACE_RULE, name: str = "cluster", **fields: str) -> str:
    """Return the table of an issuer in an identity file.

    Args:
        issuer: The issuer.
        rules: Keys of the only rule, or several rules that begin with ``[[``.
        name: Name of the issuer.
        fields: Further keys with their values in TOML.
    """
    stated = {"issuer": f'"{issuer.url}"', "audience": f'"{AUDIENCE}"', **fields}
    listed = rules if rules.startswith("[[") else f"[[issuers.{name}.rules]]\n{rules}"
    return f"[issuers.{name}]\n" + "".join(f"{key} = {value}\n" for key, value in stated.items()) + listed


def write(path: Path, text: str) -> str:
    """Write a file atomically; return its path."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)
    return str(path)


# -- tokens that no library makes


def signed(claims: Mapping[str, object], key: Any, algorithm: str, headers: Mapping[str, object]) -> str:
    """Sign claims, which may be invalid."""
    return jwt.PyJWS().encode(json.dumps(claims).encode(), key, algorithm, dict(headers))


def encoded(content: bytes) -> bytes:
    """Encode a part of a token."""
    return base64.urlsafe_b64encode(content).rstrip(b"=")


def forged(header: object, payload: object, signature: bytes = b"x" * 64) -> str:
    """Return a token of this header and payload, which are JSON values or bytes, with any signature."""
    head, body = (encoded(part if isinstance(part, bytes) else json.dumps(part).encode()) for part in (header, payload))
    return b".".join((head, body, encoded(signature))).decode()


def signed_with_public_key(issuer: Issuer, secret: bytes, token: str) -> str:
    """Return a token with the claims of another one, and a symmetric signature for which a public key is the secret."""
    head = encoded(json.dumps({"alg": "HS256", "typ": "JWT", "kid": issuer.kid}).encode())
    signed = head + b"." + token.split(".")[1].encode()
    return (signed + b"." + encoded(hmac.new(secret, signed, hashlib.sha256).digest())).decode()
