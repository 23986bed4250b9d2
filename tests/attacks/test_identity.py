"""Attacks on identities: forged JWTs, hostile claims and key IDs, and certificates that a client does not have."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization

from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.auth.identity_file import IdentityFile
from tests.attacks.test_event_loop import Measured
from tests.conftest import ServerProcess, StartServer, eventually
from tests.end_to_end.certificates import Files
from tests.end_to_end.test_audit import bearer
from tests.end_to_end.test_identity import CERTIFICATES, NUMBERS, URI, context_of, tls_server
from tests.issuers import (
    AUDIENCE,
    SUBJECT,
    Issuer,
    forged,
    issuer_table,
    jwk_of,
    private_key,
    signed_with_public_key,
    write,
)

KIB: Final = 1024
RULE: Final = 'match = { sub = "*" }\nscopes = ["read", "stats"]\n'


class Target:
    """Server that trusts two issuers."""

    def __init__(self, folder: Path) -> None:
        self.issuer, self.other, self.attacker = Issuer("RS256"), Issuer(), Issuer()
        self.folder = folder

    def __enter__(self) -> Target:
        for issuer in (self.issuer, self.other, self.attacker):
            issuer.__enter__()
        text = issuer_table(self.issuer, RULE) + issuer_table(self.other, RULE, "second")
        identity = write(self.folder / "identity.toml", text)
        self.server = ServerProcess("--port", "0", NUMBERS, "--num-workers", "1", "--identity", identity)
        for issuer in (self.issuer, self.other):
            eventually(partial(self._accepts, issuer))
        return self

    def __exit__(self, *_: object) -> None:
        code = self.server.end()
        for issuer in (self.issuer, self.other, self.attacker):
            issuer.__exit__()
        assert code == 0
        assert "Traceback" not in "".join(self.server.log)

    def get(self, token: str | bytes, **headers: str) -> httpx.Response:
        """Send a request with a token."""
        raw = token if isinstance(token, bytes) else token.encode()
        found = {
            b"Authorization": b"Bearer " + raw,
            **{name.encode(): value.encode() for name, value in headers.items()},
        }
        return httpx.get(f"{self.server.url}/stats", headers=found, timeout=60, trust_env=False)

    def _accepts(self, issuer: Issuer) -> bool:
        return self.status(issuer.token()) == 200

    def status(self, token: str) -> int:
        """Return the status of a request with a token."""
        return self.get(token).status_code


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Run the server of this module."""
    with Target(tmp_path_factory.mktemp("identity")) as running:
        yield running


def claims(target: Target, **more: object) -> dict[str, object]:
    """Return the claims of a valid token."""
    return {"iss": target.issuer.url, "aud": AUDIENCE, "sub": SUBJECT, "exp": int(time.time()) + 600, **more}


def nested(target: Target, opening: bytes, depth: int) -> bytes:
    """Return a payload with a deeply nested claim."""
    return json.dumps(claims(target)).encode()[:-1] + b', "x": ' + opening * depth


def public(target: Target, form: str) -> bytes:
    """Return the public key of the issuer in a form that an attacker could use as a secret."""
    key = target.issuer.key.public_key()
    spki, pkcs1 = serialization.PublicFormat.SubjectPublicKeyInfo, serialization.PublicFormat.PKCS1
    pem = key.public_bytes(serialization.Encoding.PEM, spki)
    forms: dict[str, bytes] = {
        "pem": pem,
        "pem without newline": pem.strip(),
        "pkcs1": key.public_bytes(serialization.Encoding.PEM, pkcs1),
        "der": key.public_bytes(serialization.Encoding.DER, spki),
        "jwk": json.dumps(target.issuer.keys[0]).encode(),
        "modulus": target.issuer.keys[0]["n"].encode(),
        "empty": b"",
    }
    return forms[form]


def own(target: Target, **headers: object) -> str:
    """Return a token that an attacker has signed with a key of its own."""
    key = target.attacker.key
    return jwt.encode(claims(target), key, "ES256", {"kid": target.issuer.kid, **headers})


def with_algorithm(name: object, target: Target) -> str:
    """Return a token without a signature that states an algorithm."""
    return forged({"alg": name, "kid": "first"}, claims(target), b"")


def with_public_key(form: str, target: Target) -> str:
    """Return a token with a symmetric signature for which the public key is the secret."""
    return signed_with_public_key(target.issuer, public(target, form), target.issuer.token())


Forge = Callable[[Target], str | bytes]
FORGED: Final[dict[str, Forge]] = {
    **{f"alg {name!r}": partial(with_algorithm, name)
       for name in ("none", "None", "nOnE", "", None, 5, ["RS256"], {"RS256": 1})},
    "no alg": lambda t: forged({"kid": "first"}, claims(t)),
    "alg none with a signature": lambda t: forged({"alg": "none", "kid": "first"}, claims(t)),
    **{f"HS256 with the public key: {form}": partial(with_public_key, form)
       for form in ("pem", "pem without newline", "pkcs1", "der", "jwk", "modulus", "empty")},
    "key of the attacker": own,
    "key of the attacker with the issuer's algorithm": lambda t: jwt.encode(
        claims(t), private_key("RS256"), "RS256", {"kid": "first"}),
    "key in the header": lambda t: own(t, jwk=jwk_of(t.attacker.key, "first")),
    "jku": lambda t: own(t, jku=f"{t.attacker.url}/keys"),
    "x5u": lambda t: own(t, x5u=f"{t.attacker.url}/keys", x5c=["MIIB"]),
    "token of another issuer": lambda t: jwt.encode(claims(t), t.other.key, "ES256", {"kid": "first"}),
    "issuer of the attacker": lambda t: t.attacker.token(),
    "issuer with a slash": lambda t: t.issuer.token(iss=f"{t.issuer.url}/"),
    "issuer in capitals": lambda t: t.issuer.token(iss=t.issuer.url.upper()),
    "two issuers": lambda t: t.issuer.token(iss=None, issuer=t.issuer.url),
    "audience of another service": lambda t: t.issuer.token(aud="https://kubernetes.default.svc"),
    "no audience": lambda t: t.issuer.token(aud=None),
    "expired": lambda t: t.issuer.token(lifetime=-31),
    "no expiry": lambda t: t.issuer.token(exp=None),
    "expiry is text": lambda t: t.issuer.token(exp=str(int(time.time()) + 600)),
    "not valid yet": lambda t: t.issuer.token(nbf=time.time() + 60),
    "issued in the future": lambda t: t.issuer.token(iat=time.time() + 60),
    "critical header": lambda t: t.issuer.token(headers={"crit": ["exp"], "exp": 1}),
    "empty critical header": lambda t: t.issuer.token(headers={"crit": []}),
    "unencoded payload": lambda t: forged({"alg": "RS256", "kid": "first", "b64": False, "crit": ["b64"]}, claims(t)),
    "compressed": lambda t: t.issuer.token(headers={"zip": "DEF"}),
    "encrypted": lambda t: ".".join(["eyJhbGciOiJSU0EtT0FFUCIsImVuYyI6IkEyNTZHQ00ifQ", "a", "b", "c", "d"]),
    "logout token": lambda t: t.issuer.token(headers={"typ": "logout+jwt"}),
    "kid is a list": lambda t: forged({"alg": "RS256", "kid": ["first"]}, claims(t)),
    "kid is long": lambda t: forged({"alg": "RS256", "kid": "x" * 5000}, claims(t)),
    "subject with a line break": lambda t: t.issuer.token(sub="x\n2026-01-01 forged=line"),
    "subject is an object": lambda t: forged({"alg": "RS256", "kid": "first"}, claims(t, sub={"a": 1})),
    "oversized": lambda t: t.issuer.token(x="x" * 16 * KIB),
    "oversized header": lambda t: forged({"alg": "RS256", "kid": "first", "x": "x" * 40 * KIB}, claims(t)),
    "nested lists": lambda t: forged({"alg": "RS256", "kid": "first"}, nested(t, b"[", 11_000)),
    "nested objects": lambda t: forged({"alg": "RS256", "kid": "first"}, nested(t, b'{"":', 2_500)),
    "nested header": lambda t: forged(b'{"alg": "RS256", "x": ' + b"[" * 9_000, claims(t)),
    "nested and closed": lambda t: forged(
        b'{"alg": "RS256", "kid": "first", "x": ' + b"[" * 5_000 + b"]" * 5_000 + b"}", claims(t)),
    "digits": lambda t: forged({"alg": "RS256", "kid": "first"}, nested(t, b"9", 10_000) + b"}"),
    "infinity": lambda t: forged({"alg": "RS256", "kid": "first"}, b'{"iss": Infinity, "exp": NaN}'),
    "header is a list": lambda t: forged([], claims(t)),
    "payload is text": lambda t: forged({"alg": "RS256", "kid": "first"}, "x"),
    "payload is no UTF-8": lambda t: forged({"alg": "RS256", "kid": "first"}, b"\xff\xfe"),
    "issuer is nested": lambda t: forged(
        {"alg": "RS256", "kid": "first"}, b'{"iss": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "algorithm is nested": lambda t: forged(
        b'{"kid": "first", "alg": ' + b"[" * 900 + b"]" * 900 + b"}", claims(t)),
    "surrogates": lambda t: forged({"alg": "RS256", "kid": "\ud800"}, claims(t, iss="\ud800")),
    "padding": lambda t: t.issuer.token().replace(".", "=."),
    "spaces": lambda t: t.issuer.token().replace(".", ". "),
    "not base64": lambda t: "e!.e!.e!",
    "empty parts": lambda t: "e..",
    "no signature": lambda t: t.issuer.token().rpartition(".")[0] + ".",
    "bytes": lambda t: b"e\xff.\xff.\x80",
}  # fmt: skip
"""Functions that return a token which must be refused."""


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_token_is_refused(target: Target, name: str) -> None:
    """The response is 401 with a reason, and contains no part of a signature; the log has no line that it chose."""
    token = FORGED[name](target)
    refused = target.get(token)
    assert (refused.status_code, refused.json()["code"]) == (401, "Unauthorized"), refused.text
    raw = token if isinstance(token, bytes) else token.encode()
    signature = raw.rpartition(b".")[2].decode("latin-1")
    assert len(signature) < 8 or signature not in refused.text
    assert not any(line.startswith("2026-01-01 forged") for line in target.server.log)
    assert sum(target.attacker.requests.values()) == 0, "no URL of a token is requested"


def test_a_path_as_key_id_reads_no_file(target: Target) -> None:
    """An unknown key ID is first looked for at the issuer, and then refused."""
    token = jwt.encode(claims(target), target.attacker.key, "ES256", {"kid": "../../etc/passwd"})
    with_rsa = forged({"alg": "RS256", "kid": "../../etc/passwd"}, claims(target))
    for each in (token, with_rsa):
        while target.status(each) == 503:
            time.sleep(0.1)
        assert target.status(each) == 401


def test_a_flood_of_key_ids_does_not_reach_the_issuer(target: Target) -> None:
    """Meanwhile other tokens are accepted, and the flood is limited like other requests without a valid token."""
    before, began = target.issuer.requests["/keys"], time.monotonic()
    with httpx.Client(base_url=target.server.url, trust_env=False, timeout=60) as client:
        for number in range(150):
            token = forged({"alg": "RS256", "kid": f"k{number}"}, claims(target))
            assert client.get("/stats", headers=bearer(token)).status_code in (401, 429, 503)
    assert target.status(target.issuer.token()) == 200
    elapsed = time.monotonic() - began
    assert target.issuer.requests["/keys"] - before <= 2 + elapsed / 10


def test_a_valid_token_within_the_leeway_is_accepted(target: Target) -> None:
    """The attacks fail for the reason that they are about: these tokens differ from them in one claim."""
    now = time.time()
    for token in (
        target.issuer.token(nbf=now + 20), target.issuer.token(iat=now + 20), target.issuer.token(lifetime=-10),
        target.issuer.token(iat=None), target.issuer.token(headers={"typ": "at+jwt"}), target.other.token(),
        target.issuer.token(headers={"jku": f"{target.attacker.url}/keys"}),
    ):  # fmt: skip
        assert target.status(token) == 200
    assert sum(target.attacker.requests.values()) == 0


# -- certificates


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Create a CA."""
    return Files(tmp_path_factory.mktemp("certificates"))


HEADERS: Final = (
    "X-Client-Cert", "X-SSL-Client-Cert", "X-SSL-Client-S-DN", "X-Forwarded-Client-Cert", "Client-Cert",
    "SSL-Client-Cert", "X-SSL-Client-Verify", "X-Forwarded-Tls-Client-Cert", "Teleloader.Certificate", "Peercert",
    "State",
)  # fmt: skip


def test_no_header_states_a_certificate(start_server: StartServer, files: Files, tmp_path: Path) -> None:
    """Proxies pass certificates in headers; a client could send them, too."""
    server = tls_server(start_server, files, tmp_path / "identity.toml", "--ssl-cert-reqs", "optional")
    certificate = Path(files.identity("trainer", URI)[0]).read_text().strip().replace("\n", " ")
    plain = ssl.create_default_context(cafile=files.ca)
    with httpx.Client(base_url=server.url, verify=plain, trust_env=False) as client:
        for value in (certificate, f"URI={URI}", f"certificate:{URI}", "SUCCESS"):
            assert client.get("/stats", headers=dict.fromkeys(HEADERS, value)).status_code == 401
    with httpx.Client(base_url=server.url, verify=context_of(files, "trainer"), trust_env=False) as client:
        assert client.get("/stats").status_code == 200


@pytest.mark.parametrize("mode", ["required", "optional"])
def test_a_certificate_of_another_ca_is_refused(
    start_server: StartServer, files: Files, tmp_path: Path, mode: str
) -> None:
    """Also if certificates are optional: the connection fails, and does not become one without a certificate."""
    server = tls_server(start_server, files, tmp_path / "identity.toml", "--ssl-cert-reqs", mode)
    strangers = Files(tmp_path)
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(*strangers.identity("trainer", URI))
    with pytest.raises((httpx.TransportError, ssl.SSLError)), httpx.Client(verify=context, trust_env=False) as client:
        client.get(f"{server.url}/stats")
    assert "Traceback" not in "".join(server.log)


def test_a_page_of_another_site_cannot_use_the_certificate_of_a_browser(
    start_server: StartServer, files: Files, tmp_path: Path
) -> None:
    """Browsers send certificates with requests of other sites, as they send cookies."""
    rules = CERTIFICATES.replace('"read", "stats"', '"admin"')
    server = tls_server(start_server, files, tmp_path / "identity.toml", text=rules)
    with httpx.Client(base_url=server.url, verify=context_of(files, "trainer"), trust_env=False) as browser:
        assert browser.get("/stats").status_code == 200
        for headers in (
            {"Origin": "https://evil.example"},
            {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        ):
            for method, path in (("GET", "/stats"), ("POST", "/v1/drain"), ("PUT", "/v1/workers")):
                refused = browser.request(method, path, headers=headers)
                assert (refused.status_code, refused.json()["code"]) == (403, "CrossSite")
        evil = browser.get("/stats", headers={"Host": "evil.example"})
        assert (evil.status_code, evil.json()["code"]) == (421, "UnknownHost")


# -- the event loop


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Measured, Target]]:
    """Run a server in this process that trusts an issuer; yield it, and an attacker's view of the issuer."""
    folder = tmp_path_factory.mktemp("measured")
    found = Target(folder)
    with found.issuer, found.other, found.attacker:
        text = issuer_table(found.issuer, RULE) + issuer_table(found.other, RULE, "second")
        identities = IdentityFile(Path(write(folder / "identity.toml", text)))
        identities.load_keys()
        with Measured(Authenticator(identities=identities)) as running:
            yield running, found


SLOW: Final = (
    "oversized", "oversized header", "nested lists", "nested objects", "nested header", "nested and closed", "digits",
    "key of the attacker with the issuer's algorithm", "padding",
)  # fmt: skip


@pytest.mark.parametrize("name", SLOW)
def test_a_hostile_token_does_not_hold_the_event_loop(measured: tuple[Measured, Target], name: str) -> None:
    """Verifying it stays below the limit."""
    server, target = measured
    token = FORGED[name](target)

    def attempt() -> None:
        found = httpx.get(f"{server.url}/stats", headers=bearer(str(token)), trust_env=False)
        assert found.status_code == 401, found.text

    assert server.blocked(attempt) < 1, server.what


@pytest.mark.parametrize("algorithm", ["RS512", "PS512", "ES512", "EdDSA"])
def test_a_long_token_of_any_algorithm_does_not_hold_the_event_loop(tmp_path: Path, algorithm: str) -> None:
    """Each request has another token, so that none is cached, and many claims."""
    with Issuer(algorithm) as issuer:
        identities = IdentityFile(Path(write(tmp_path / "identity.toml", issuer_table(issuer, RULE))))
        identities.load_keys()
        with Measured(Authenticator(identities=identities)) as running:

            def attempt() -> None:
                token = issuer.token(jti=time.time_ns(), groups=["x" * 36] * 250)
                found: Any = httpx.get(f"{running.url}/v1/datasets", headers=bearer(token), trust_env=False)
                assert found.status_code == 200, found.text

            assert running.blocked(attempt) < 1, running.what
