"""Identities of clients: rules, claims of JWTs, keys of issuers, and client certificates."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from teleloader_server.auth import claims, key_source
from teleloader_server.auth.authenticator import Authenticator, RequestCaller
from teleloader_server.auth.certificates import PEER_CERTIFICATE, PeerCertificate, claims_of
from teleloader_server.auth.identity_config import (
    ALGORITHMS,
    IdentityConfig,
    KeySettings,
    is_secure_url,
    parse_identity,
)
from teleloader_server.auth.identity_file import IdentityFile
from teleloader_server.auth.key_source import MAX_AGE_S, MIN_INTERVAL_S, REFRESH_S, KeySource
from teleloader_server.auth.keys import InvalidKeys, Key, Keys, is_valid, parse_keys
from teleloader_server.auth.outcomes import Refusal
from teleloader_server.auth.rules import first_match, parse_rules
from teleloader_server.config import ConfigError
from teleloader_server.dispatch.counters import MAX_PRINCIPALS, OTHER_PRINCIPALS, Counters
from teleloader_server.dispatch.grants import Grants
from teleloader_server.permissions import Principal
from teleloader_shared.errors import Forbidden, ServerUnavailable, Unauthorized
from tests.issuers import NAMESPACE_RULE, SUBJECT, Issuer, issuer_table, jwk_of, private_key, write

NAME = f"cluster:{SUBJECT}"


def parse(text: str) -> IdentityConfig:
    """Parse an identity file."""
    return parse_identity(text, "identity.toml", Path("/etc/teleloader"))


def one_issuer(rules: str = NAMESPACE_RULE, **fields: str) -> str:
    """Return an identity file with one issuer."""
    stated = {"issuer": '"https://a.example"', "audience": '"teleloader"', **fields}
    return "[issuers.a]\n" + "".join(f"{k} = {v}\n" for k, v in stated.items() if v) + f"[[issuers.a.rules]]\n{rules}"


# -- identity files


def test_an_issuer_needs_a_url_an_audience_and_a_rule_only() -> None:
    """By default all asymmetric algorithms are accepted, and the keys are found by the discovery document."""
    (issuer,) = parse(one_issuer()).issuers.values()
    assert (issuer.name, issuer.issuer, issuer.audiences) == ("a", "https://a.example", ("teleloader",))
    assert issuer.algorithms == frozenset(ALGORITHMS)
    assert issuer.keys == KeySettings("https://a.example", None, None, None, None)
    assert issuer.leeway == 30


def test_relative_paths_refer_to_the_folder_of_the_file() -> None:
    """Absolute paths stay as they are."""
    (issuer,) = parse(one_issuer(jwks_file='"keys.json"', ca='"/run/ca.pem"')).issuers.values()
    assert (issuer.keys.file, issuer.keys.ca) == (Path("/etc/teleloader/keys.json"), Path("/run/ca.pem"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "not valid TOML"),
        ("[issuer.a]\n", "unknown key 'issuer' in identity.toml: expected one of issuers, certificates"),
        ("issuers = 5\n", "expected a table [issuers]"),
        ("[issuers]\na = 5\n", "expected a table with issuer, audience and rules"),
        ("[issuers.certificate]\n", "invalid issuer name 'certificate'"),
        ('[issuers."a b"]\n', "invalid issuer name 'a b'"),
        (one_issuer(issuer="5"), "expected issuer = URL"),
        (one_issuer(audience=""), "expected audience = NAME"),
        (one_issuer(audience="[]"), "expected audience = NAME"),
        (one_issuer(audience="[5]"), "expected audience = NAME"),
        (one_issuer(issuer='"http://a.example"'), "expected an https:// URL as issuer"),
        (one_issuer(issuer='"spiffe://a.example"'), "Otherwise add jwks_url or jwks_file"),
        (one_issuer(jwks_url='"http://a.example/keys"'), "invalid jwks_url"),
        (one_issuer(jwks_url='"file:///etc/passwd"'), "invalid jwks_url"),
        (one_issuer(jwks_url='"https://a.example"', jwks_file='"a"'), "at most one of jwks_file and jwks_url"),
        (one_issuer(jwks_file="5"), "invalid jwks_file: expected the path of a file"),
        (one_issuer(algorithms='["HS256"]'), "invalid algorithms ['HS256']: expected a list of RS256"),
        (one_issuer(algorithms='["none"]'), "invalid algorithms"),
        (one_issuer(algorithms="[]"), "invalid algorithms"),
        (one_issuer(leeway="301"), "leeway must be a number of seconds in [0, 300]"),
        (one_issuer(leeway="nan"), "leeway must be"),
        (one_issuer(leeway=f"0x{'f' * 9999}"), "leeway must be"),
        (one_issuer(secret='"x"'), "unknown key 'secret' in [issuers.a]"),
        (one_issuer().partition("[[")[0], "expected 1 to 1,000 rules"),
        (one_issuer('scopes = ["read"]\n'), "rule 1: expected match = { CLAIM = VALUE }"),
        (one_issuer('match = {}\nscopes = ["read"]\n'), "expected match = "),
        (one_issuer('match = { sub = "x" }\n'), "expected a list of scopes, got none"),
        (one_issuer('match = { sub = "x" }\nscopes = ["write"]\n'), "invalid scope 'write'"),
        (one_issuer('match = { sub = "x" }\nscopes = ["read"]\nweigth = 2\n'), "unknown key 'weigth'"),
        (one_issuer('match = { sub = "x" }\nscopes = ["read"]\nweight = 0\n'), "weight must be a number"),
        (one_issuer('match = { sub = "*x*" }\nscopes = ["read"]\n'), "more than one '*'"),
        (one_issuer('match = { sub = 1.5 }\nscopes = ["read"]\n'), "invalid value of 'sub'"),
        (one_issuer('match = { a = { b = [] } }\nscopes = ["read"]\n'), "the list of values of 'a.b' is empty"),
        (one_issuer(f"match = {{ {'a.' * 9}a = 1 }}\nscopes = []\n"), "more than 8 levels"),
        (one_issuer() + one_issuer().replace("issuers.a", "issuers.b"), "duplicate issuer 'https://a.example'"),
        ("[certificates]\n", "invalid entry [certificates] in identity.toml: expected 1 to 1,000 rules"),
        ("[certificates]\nca = 1\n", "unknown key 'ca' in [certificates]"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_refused(text: str, complaint: str) -> None:
    """The error has the place and the reason."""
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert complaint in str(refused.value)
    assert "identity.toml" in str(refused.value)


@pytest.mark.parametrize(
    ("url", "is_secure"),
    [
        ("https://a.example", True), ("https://10.0.0.1:6443/keys", True), ("http://127.0.0.1:80", True),
        ("http://[::1]:80", True), ("http://localhost", True), ("http://a.example", False), ("http://10.0.0.1", False),
        ("http://localhost.example", False), ("http://127.0.0.1@a.example", False), ("file:///etc/passwd", False),
        ("https://", False), ("https://a:x", False), ("https://user:password@a.example", False), ("", False),
    ],
)  # fmt: skip
def test_keys_come_over_tls_or_from_this_machine(url: str, is_secure: bool) -> None:
    """Without TLS, an attacker on the network path could replace the keys."""
    assert is_secure_url(url) is is_secure


# -- rules


def matches(match: str, found: dict[str, Any]) -> bool:
    """Return True if a rule matches claims."""
    (issuer,) = parse(one_issuer(f"match = {match}\nscopes = []\n")).issuers.values()
    return first_match(issuer.rules, found) is not None


@pytest.mark.parametrize(
    ("match", "found", "expected"),
    [
        ('{ sub = "a" }', {"sub": "a"}, True),
        ('{ sub = "a" }', {"sub": "ab"}, False),
        ('{ sub = "a" }', {"sub": "A"}, False),
        ('{ sub = "a" }', {}, False),
        ('{ sub = "a" }', {"sub": None}, False),
        ('{ sub = "a" }', {"sub": {"a": "a"}}, False),
        ('{ sub = ["a", "b"] }', {"sub": "b"}, True),
        ('{ groups = "a" }', {"groups": ["b", "a"]}, True),
        ('{ groups = "a" }', {"groups": ["b", ["a"]]}, False),
        ('{ groups = "a" }', {"groups": []}, False),
        ('{ groups = "a" }', {"groups": "a b"}, False),
        ('{ scope = "a" }', {"scope": "b a"}, True),
        ('{ scope = "a" }', {"scope": "ab"}, False),
        ('{ sub = "a:*" }', {"sub": "a:b"}, True),
        ('{ sub = "a:*" }', {"sub": "a:"}, True),
        ('{ sub = "a:*" }', {"sub": "xa:b"}, False),
        ('{ sub = "*:b" }', {"sub": "a:b"}, True),
        ('{ sub = "aa*aa" }', {"sub": "aaa"}, False),
        ('{ sub = "aa*aa" }', {"sub": "aaaa"}, True),
        ('{ sub = "*" }', {"sub": ""}, True),
        ('{ sub = "*" }', {"sub": 5}, False),
        ('{ sub = "a.c" }', {"sub": "abc"}, False),
        ("{ admin = true }", {"admin": True}, True),
        ("{ admin = true }", {"admin": 1}, False),
        ("{ admin = true }", {"admin": "true"}, False),
        ("{ level = 1 }", {"level": 1}, True),
        ("{ level = 1 }", {"level": True}, False),
        ("{ level = 1 }", {"level": 1.0}, False),
        ('{ sub = "a", groups = "b" }', {"sub": "a", "groups": ["b"]}, True),
        ('{ sub = "a", groups = "b" }', {"sub": "a", "groups": ["c"]}, False),
        ('{ "k.io" = { ns = "a" } }', {"k.io": {"ns": "a"}}, True),
        ('{ "k.io" = { ns = "a" } }', {"k.io": {"ns": "b"}}, False),
        ('{ "k.io" = { ns = "a" } }', {"k.io": ["ns", "a"]}, False),
        ('{ "k.io" = { ns = "a" } }', {"k.io": "a"}, False),
        ('{ "k.io" = { ns = "a" } }', {"k": {"io": {"ns": "a"}}}, False),
    ],
)  # fmt: skip
def test_a_rule_matches_if_all_of_its_conditions_hold(match: str, found: dict[str, Any], expected: bool) -> None:
    """A list is a choice, `*` stands for any characters, and types are not converted."""
    assert matches(match, found) is expected


def test_the_first_rule_counts() -> None:
    """A rule without scopes refuses the clients that it matches, also if a later rule matches them."""
    rules = parse_rules(
        [
            {"match": {"sub": "banned"}, "scopes": []},
            {"match": {"groups": "vision"}, "scopes": ["read:train"], "priority": "high", "weight": 2},
            {"match": {"sub": "*"}, "scopes": ["stats"], "memory_share": 0.5},
        ],
        "rules",
    )
    found = [first_match(rules, each) for each in (
        {"sub": "banned", "groups": ["vision"]}, {"sub": "a", "groups": ["vision"]}, {"sub": "a"}, {},
    )]  # fmt: skip
    assert [None if rule is None else rules.index(rule) for rule in found] == [0, 1, 2, None]
    assert rules[0].grant.scopes == frozenset()
    assert rules[1].grant.principal("x") == Principal("x", frozenset({"read:train"}), 1.0, 20.0)
    assert rules[2].grant.principal("x") == Principal("x", frozenset({"stats"}), 0.5, 1.0)


# -- claims


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        ({}, "'exp' is required"),
        ({"exp": None}, "'exp' is required"),
        ({"exp": "2000"}, "invalid claim 'exp'"),
        ({"exp": True}, "invalid claim 'exp'"),
        ({"exp": math.nan}, "invalid claim 'exp'"),
        ({"exp": math.inf}, "invalid claim 'exp'"),
        ({"exp": -1}, "invalid claim 'exp'"),
        ({"exp": 10**4000}, "invalid claim 'exp'"),
        ({"exp": 1000 - 330}, "the token expired 5 min ago: request a new token"),
        ({"exp": 970}, "the token expired 30 s ago"),
        ({"exp": 2000, "nbf": 1031}, "the token is not valid yet: its claim 'nbf' is 31 s ahead"),
        ({"exp": 2000, "nbf": "x"}, "invalid claim 'nbf'"),
        ({"exp": 2000, "iat": 1031}, "the token was issued in the future: its claim 'iat' is 31 s ahead"),
        ({"exp": 2000, "iat": [1]}, "invalid claim 'iat'"),
    ],
)
def test_times_outside_of_the_leeway_are_refused(found: dict[str, Any], complaint: str) -> None:
    """At the time 1,000, with a leeway of 30 s."""
    with pytest.raises(Unauthorized) as refused:
        claims.check_times(found, 30, 1000)
    assert complaint in str(refused.value)


def test_times_within_the_leeway_are_accepted() -> None:
    """The validity ends after the leeway."""
    assert claims.check_times({"exp": 971, "nbf": 1030, "iat": 1029.5}, 30, 1000) == 1001


@pytest.mark.parametrize(
    "stated", [None, "other", [], ["other"], [["teleloader"]], {"teleloader": 1}, 5, "teleloader2"]
)
def test_a_token_for_another_audience_is_refused(stated: object) -> None:
    """The message has both audiences."""
    with pytest.raises(Unauthorized, match=r"wrong audience .*expected 'teleloader' or 'b'"):
        claims.check_audience({"aud": stated}, ("teleloader", "b"))


@pytest.mark.parametrize("stated", ["teleloader", ["x", "b"]])
def test_one_audience_of_several_suffices(stated: object) -> None:
    """A token may have several audiences, and the server may accept several."""
    claims.check_audience({"aud": stated}, ("teleloader", "b"))


@pytest.mark.parametrize("subject", [None, "", "a b", "a\nb", "\u0101", "x" * 256, 5, ["a"]])
def test_a_subject_that_would_deface_logs_is_refused(subject: object) -> None:
    """Subjects appear in logs, metrics and messages."""
    with pytest.raises(Unauthorized, match="invalid subject"):
        claims.subject_of({"sub": subject})


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.5, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_durations_have_one_unit(seconds: float, text: str) -> None:
    """They are rounded down."""
    assert claims.duration(seconds) == text


# -- keys


def jwks(*keys: object) -> bytes:
    """Return a JWKS."""
    return json.dumps({"keys": keys}).encode()


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """Create a key for each key type."""
    return {algorithm: private_key(algorithm) for algorithm in ("RS256", "ES256", "ES384", "EdDSA")}


def test_a_key_verifies_the_algorithms_of_its_type(made: dict[str, Any]) -> None:
    """An EC key verifies only the algorithm of its curve; `alg` restricts a key to one algorithm."""
    keys = parse_keys(
        jwks(*(jwk_of(key, name) for name, key in made.items()), jwk_of(made["RS256"], "ps", alg="PS256"))
    )
    fitting = {key.kid: {algorithm for algorithm in ALGORITHMS if key.fits(algorithm)} for key in keys.keys}
    assert fitting == {
        "RS256": {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512"}, "ES256": {"ES256"}, "ES384": {"ES384"},
        "EdDSA": {"EdDSA"}, "ps": {"PS256"},
    }  # fmt: skip
    assert keys.find("ES256", "ES384") is None
    assert keys.find("other", "ES256") is None


def test_without_a_key_id_the_only_fitting_key_is_used(made: dict[str, Any]) -> None:
    """Several fitting keys are ambiguous."""
    first, second = jwk_of(made["ES256"], "1"), jwk_of(private_key("ES256"), "2")
    assert parse_keys(jwks(first, jwk_of(made["RS256"], "3"))).find(None, "ES256") is not None
    assert parse_keys(jwks(first, second)).find(None, "ES256") is None


def test_keys_for_other_purposes_are_omitted(made: dict[str, Any]) -> None:
    """Also symmetric keys, and keys that are malformed, short or long: the other keys are used."""
    good = jwk_of(made["RS256"], "good", use="sig", key_ops=["verify"])
    bad = [
        {"kty": "oct", "k": "c2VjcmV0", "kid": "a", "alg": "HS256"}, jwk_of(made["RS256"], "b", use="enc"),
        jwk_of(made["RS256"], "c", key_ops=["sign"]), jwk_of(made["RS256"], "d", alg="HS256"),
        jwk_of(made["RS256"], "e", alg="ES256"), {"kty": "RSA", "kid": "f"}, {"kty": "RSA", "n": "AQ", "e": "AQAB"},
        {"kty": "EC", "crv": "P-256", "x": "AQ", "y": "AQ"}, {"kty": ["RSA"]} | {"kty": None}, 5, None,
        {**jwk_of(made["RS256"], "g"), "kid": 5}, {**jwk_of(made["EdDSA"], "h"), "crv": "X25519"},
        {"kty": "RSA", "kid": "long", "n": "w" + "A" * 2000, "e": "AQAB"},
    ]  # fmt: skip
    assert [key.kid for key in parse_keys(jwks(*bad, good)).keys] == ["good"]
    with pytest.raises(InvalidKeys, match="none of the 14 keys can verify tokens"):
        parse_keys(jwks(*bad))


def test_the_private_part_of_a_key_is_not_used(made: dict[str, Any]) -> None:
    """A JWKS that contains private keys by mistake verifies like one without."""
    from jwt.algorithms import RSAAlgorithm

    private = {**RSAAlgorithm.to_jwk(made["RS256"], as_dict=True), "kid": "a"}
    private.pop("key_ops", None)
    (key,) = parse_keys(jwks(private)).keys
    assert not hasattr(key.public, "sign")


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b'{"keys": {}}', b'{"keys": []}', b"[" * 10**5, b"\xff", jwks(*[1] * 257)]
)
def test_a_text_that_is_no_jwks_is_refused(text: bytes) -> None:
    """The error describes the expected form."""
    with pytest.raises(InvalidKeys, match="expected"):
        parse_keys(text)


# -- refresh


class Source:
    """Key source with a clock of its own, and results of requests that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.fetched = 0
        self.result: Keys | Exception = OSError("unreachable")
        monkeypatch.setattr(key_source, "fetch", self._fetch)
        self.source = KeySource("a", KeySettings("https://a.example", None, None, None, None), lambda: self.now)

    def _fetch(self, _: KeySettings) -> Keys:
        self.fetched += 1
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def poll(self) -> bool:
        """Poll, and let a request end."""
        changed = self.source.poll()
        if self.source._thread is not None:
            self.source._thread.join()
        return changed

    def wait(self, seconds: float) -> list[bool]:
        """Poll once a second, as a server does."""
        found = []
        for _ in range(round(seconds)):
            self.now += 1
            found.append(self.poll())
        return found


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    """Return a key source."""
    return Source(monkeypatch)


@pytest.fixture(scope="module")
def first(made: dict[str, Any]) -> Keys:
    """Return a set of one key."""
    return parse_keys(jwks(jwk_of(made["ES256"], "first")))


@pytest.fixture(scope="module")
def second(made: dict[str, Any]) -> Keys:
    """Return a set of another key."""
    return parse_keys(jwks(jwk_of(made["ES256"], "second")))


def test_keys_are_fetched_at_the_start_and_periodically(source: Source, first: Keys) -> None:
    """Equal keys are no change."""
    source.result = first
    with pytest.raises(ServerUnavailable, match=r"the keys of issuer 'a' are unavailable\. Retry later"):
        source.source.find("first", "ES256")
    assert source.poll() is False
    assert source.wait(1) == [True]
    assert source.source.find("first", "ES256").kid == "first"
    assert source.wait(2 * REFRESH_S) == [False] * round(2 * REFRESH_S)
    assert source.fetched == 3


def test_an_unknown_key_id_causes_one_refresh(source: Source, first: Keys, second: Keys) -> None:
    """Until the keys were fetched again, the error is a reason to retry; then the token is refused or accepted."""
    source.result = first
    source.wait(20)
    for kid in ("second", "third"):
        with pytest.raises(ServerUnavailable, match=r"refreshed at most every 10 s\. Retry later"):
            source.source.find(kid, "ES256")
    source.result = second
    source.wait(2)
    assert source.source.find("second", "ES256").kid == "second"
    with pytest.raises(
        Unauthorized, match="unknown key: the token has the key ID 'third', and issuer 'a' has no such key"
    ):
        source.source.find("third", "ES256")
    assert source.fetched == 2


def test_a_flood_of_key_ids_causes_few_requests(source: Source, first: Keys) -> None:
    """The requests have a minimum interval; memory for unknown key IDs is bounded."""
    source.result = first
    source.wait(2)
    for second_ in range(100):
        for number in range(50):
            with pytest.raises(ServerUnavailable):
                source.source.find(f"{second_}-{number}", "ES256")
        source.wait(1)
    assert source.fetched <= 1 + 100 / MIN_INTERVAL_S
    assert len(source.source._unknown) <= key_source.MAX_UNKNOWN


def test_keys_outlive_an_unreachable_issuer_for_a_day(source: Source, first: Keys) -> None:
    """Requests that fail are repeated."""
    source.result = first
    source.wait(2)
    source.result = OSError("connection refused")
    source.now += MAX_AGE_S - 10
    source.wait(5)
    assert source.source.find("first", "ES256")
    source.wait(10)
    with pytest.raises(ServerUnavailable, match="the keys of issuer 'a' are unavailable"):
        source.source.find("first", "ES256")
    source.result = first
    source.wait(MIN_INTERVAL_S + 2)
    assert source.source.find("first", "ES256")


def test_an_unreachable_issuer_is_logged_once_a_minute(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    """The line has the issuer and the reason."""
    source.wait(120)
    lines = [record.message for record in caplog.records]
    assert len(lines) == 2
    assert "cannot fetch the keys of issuer a: unreachable. Tokens cannot be verified" in lines[0]


def test_a_removed_key_ends(source: Source, first: Keys, second: Keys) -> None:
    """The change is reported, so that tokens are verified again."""
    source.result = first
    source.wait(2)
    source.result = second
    assert True in source.wait(REFRESH_S + 1)
    with pytest.raises(ServerUnavailable):
        source.source.find("first", "ES256")


# -- requests


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    """Run an issuer."""
    with Issuer() as running:
        yield running


def authenticator_of(path: Path, text: str) -> Authenticator:
    """Return an authenticator with an identity file, whose keys are loaded."""
    found = Authenticator(identities=IdentityFile(Path(write(path, text))))
    assert found.identities is not None
    found.identities.load_keys()
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the path of an identity file."""
    return tmp_path / "identity.toml"


def caller(authenticator: Authenticator, token: str | None, certificate: dict[str, Any] | None = None) -> RequestCaller:
    """Return the caller of a request with a token, and with the certificate of its connection."""
    headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
    state = {} if certificate is None else {PEER_CERTIFICATE: PeerCertificate(certificate)}
    return RequestCaller(authenticator, {
        "method": "GET", "headers": headers, "scheme": "https", "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 5),
        "state": state,
    })  # fmt: skip


def test_claims_become_a_principal(file: Path, issuer: Issuer) -> None:
    """Its name consists of the issuer and the subject; priority and weight are those of the rule."""
    rules = NAMESPACE_RULE + 'priority = "high"\nweight = 0.5\nmemory_share = 0.25\n'
    authenticator = authenticator_of(file, issuer_table(issuer, rules))
    assert authenticator.has_tokens
    principal = caller(authenticator, issuer.token()).admit("read")
    assert principal == Principal(NAME, frozenset({"read", "stats"}), 0.25, 5.0)


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_all_asymmetric_algorithms_are_verified(file: Path, algorithm: str) -> None:
    """A token that was changed after it was signed is refused."""
    with Issuer(algorithm) as issuer:
        authenticator = authenticator_of(file, issuer_table(issuer))
        token = issuer.token()
        assert caller(authenticator, token).admit("read").name == NAME
        head, body, signature = token.split(".")
        changed = body[:-8] + ("A" if body[-8] != "A" else "B") + body[-7:]
        for other in (f"{head}.{changed}.{signature}", f"{head}.{body}.{signature[:-6]}AAAAAA", f"{head}.{body}."):
            with pytest.raises(Unauthorized, match=r"invalid signature|malformed token"):
                caller(authenticator, other).admit("read")


def test_a_token_without_a_matching_rule_is_refused(file: Path, issuer: Issuer) -> None:
    """The message says what to do; a rule without scopes has the same effect."""
    authenticator = authenticator_of(file, issuer_table(issuer))
    other = issuer.token(namespace="audio")
    with pytest.raises(Forbidden, match=rf"'{NAME}' has no permissions: no rule matches in \[issuers.cluster\]"):
        caller(authenticator, other).admit("read")
    assert caller(authenticator, other).principal is None
    refusing = authenticator_of(file, issuer_table(issuer, 'match = { sub = "*" }\nscopes = []\n'))
    with pytest.raises(Forbidden, match="a rule without scopes matches"):
        caller(refusing, issuer.token()).admit("read")


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"iss": "https://other.example"}, r"unknown issuer 'https://other.example': expected 'http://127"),
        ({"iss": None}, "unknown issuer none"),
        ({"iss": ["a"]}, "unknown issuer"),
        ({"aud": "other"}, "wrong audience 'other': expected 'teleloader'"),
        ({"sub": None}, "invalid subject"),
        ({"exp": None}, "'exp' is required"),
        ({"lifetime": -330}, "the token expired 5 min ago"),
        ({"nbf": time.time() + 7200}, "not valid yet: its claim 'nbf' is 1 h ahead"),
        ({"headers": {"typ": "logout+jwt"}}, "wrong type 'logout.jwt'"),
        ({"headers": {"kid": "x" * 257}}, "invalid key ID"),
    ],
)
def test_a_token_that_does_not_fit_is_refused(
    file: Path, issuer: Issuer, fields: dict[str, Any], complaint: str
) -> None:
    """The error has the reason, and never the token."""
    authenticator = authenticator_of(file, issuer_table(issuer))
    token = issuer.token(**fields)
    with pytest.raises(Unauthorized, match=complaint) as refused:
        caller(authenticator, token).admit("read")
    assert token not in str(refused.value)


def test_refusals_are_named_only_after_verification(file: Path, issuer: Issuer) -> None:
    """The audit log must not name a subject that an attacker has chosen."""
    authenticator = authenticator_of(file, issuer_table(issuer))
    expired = issuer.token(lifetime=-99)
    head, body, signature = expired.split(".")
    for token, name in ((expired, NAME), (f"{head}.{body}.{signature[:-6]}AAAAAA", None), ("x.y.z", None)):
        request = caller(authenticator, token)
        assert authenticator._token_name(request._scope) == name


def test_a_token_is_verified_once(file: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Valid tokens are cached until they expire, and refused ones for a second."""
    verified = []

    def verify(token: bytes, key: Key, algorithm: str) -> bool:
        verified.append(token)
        return is_valid(token, key, algorithm)

    monkeypatch.setattr("teleloader_server.auth.bearer.is_valid", verify)
    authenticator = authenticator_of(file, issuer_table(issuer))
    good, bad = issuer.token(), issuer.token(aud="other")
    for _ in range(10):
        caller(authenticator, good).admit("read")
        with pytest.raises(Unauthorized):
            caller(authenticator, bad).admit("read")
    assert len(verified) == 2


def test_the_caches_are_bounded(file: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most recently used tokens stay."""
    monkeypatch.setattr("teleloader_server.auth.authenticator.MAX_REMEMBERED", 4)
    monkeypatch.setattr("teleloader_server.auth.identity_file.MAX_REFUSALS", 4)
    authenticator = authenticator_of(file, issuer_table(issuer))
    assert authenticator.identities is not None
    for number in range(8):
        caller(authenticator, issuer.token(jti=number)).admit("read")
        assert caller(authenticator, issuer.token(jti=number, aud="x")).principal is None
    assert len(authenticator._known) == len(authenticator.identities._refusals) == 4


def test_a_token_that_expires_is_reported(file: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server checks open requests again, also of a token that was evicted from the cache."""
    monkeypatch.setattr("teleloader_server.auth.authenticator.MAX_REMEMBERED", 1)
    now = [time.time()]
    monkeypatch.setattr("teleloader_server.auth.authenticator.time.time", lambda: now[0])
    authenticator = authenticator_of(file, issuer_table(issuer, leeway="0"))
    expired: list[float] = []
    authenticator.on_expiry = lambda: expired.append(now[0])
    start = now[0]
    requests = [caller(authenticator, issuer.token(lifetime=lifetime)) for lifetime in (100, 200)]
    for seconds in (0, 50, 101, 150, 201, 300):
        now[0] = start + seconds
        authenticator.reload_if_changed()
        valid = [request.principal is not None for request in requests]
        assert valid == [seconds < 100, seconds < 200]
    assert expired == [start + 101, start + 201]


def test_a_session_of_a_jwt_ends_with_it(file: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server verifies the token of the session again after a change of keys or rules."""
    now = [time.time()]
    monkeypatch.setattr("teleloader_server.auth.authenticator.time.time", lambda: now[0])
    authenticator = authenticator_of(file, issuer_table(issuer, leeway="0"))
    scope = caller(authenticator, None)._scope
    for _ in range(2):
        principal, cookie = authenticator.sign_in(issuer.token(lifetime=100), scope)
    assert (principal.name, "Max-Age=100" in cookie or "Max-Age=99" in cookie) == (NAME, True)
    signed_in = RequestCaller(authenticator, {**scope, "headers": [(b"cookie", cookie.partition(";")[0].encode())]})
    assert signed_in.admit("stats").name == NAME
    authenticator._known.clear()
    assert signed_in.admit("stats").name == NAME
    now[0] += 101
    with pytest.raises(Unauthorized, match="the browser session has expired"):
        signed_in.admit("stats")


def test_sessions_of_one_principal_are_bounded(file: Path, issuer: Issuer) -> None:
    """Although each of its tokens differs."""
    authenticator = authenticator_of(file, issuer_table(issuer))
    scope = caller(authenticator, None)._scope
    for number in range(130):
        authenticator.sign_in(issuer.token(jti=number), scope)
    assert len(authenticator._sessions) == 128


# -- changes


def look_twice(authenticator: Authenticator) -> None:
    """Check the files until a completed change applies, as a server does every second."""
    for _ in range(2):
        authenticator.reload_if_changed()


def test_changed_rules_apply_to_known_tokens(file: Path, issuer: Issuer, caplog: pytest.LogCaptureFixture) -> None:
    """Keys are kept; an invalid file changes nothing, and an empty one refuses all."""
    authenticator = authenticator_of(file, issuer_table(issuer))
    request = caller(authenticator, issuer.token())
    assert request.authorize("stats").name == NAME
    fetched = issuer.requests["/keys"]
    write(file, issuer_table(issuer, NAMESPACE_RULE.replace('"read", "stats"', '"read:train"')))
    look_twice(authenticator)
    assert request.authorize("read", "train").scopes == {"read:train"}
    with pytest.raises(Forbidden, match="insufficient scope"):
        request.authorize("stats")
    write(file, "[")
    look_twice(authenticator)
    assert request.authorize("read", "train")
    assert "keeping the previous one" in caplog.text
    write(file, "")
    look_twice(authenticator)
    with pytest.raises(Unauthorized, match="accepts no JWTs"):
        request.authorize("read", "train")
    assert authenticator.has_tokens
    assert issuer.requests["/keys"] == fetched


def test_keys_of_a_file_are_reloaded(file: Path, issuer: Issuer) -> None:
    """A token of a removed key is refused; an invalid file keeps the keys."""
    keys = file.with_name("keys.json")
    write(keys, json.dumps({"keys": issuer.keys}))
    authenticator = authenticator_of(file, issuer_table(issuer, jwks_file='"keys.json"'))
    request = caller(authenticator, issuer.token())
    assert request.admit("read")
    write(keys, "damaged")
    look_twice(authenticator)
    assert request.admit("read")
    write(keys, json.dumps({"keys": [jwk_of(private_key("ES256"), "other")]}))
    look_twice(authenticator)
    with pytest.raises(Unauthorized, match="unknown key: the token has the key ID 'first'"):
        request.admit("read")


def test_a_server_does_not_start_without_issuers_or_keys(file: Path, issuer: Issuer) -> None:
    """A missing or empty file is probably a wrong path."""
    for text in (None, "", "# nothing\n"):
        if text is not None:
            write(file, text)
        with pytest.raises(ConfigError, match=r"no issuer and no \[certificates\] in .*identity.toml"):
            IdentityFile(file)
    write(file, issuer_table(issuer, jwks_file='"nowhere.json"'))
    with pytest.raises(ConfigError, match=r"cannot read the keys in .*nowhere.json \(jwks_file\): No such file"):
        IdentityFile(file)


@pytest.mark.parametrize("missing", ["jwt", "cryptography"])
def test_a_missing_package_is_named(file: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Client certificates require neither."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("jwt", "cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("bearer", "key_source", "keys"):
        monkeypatch.delitem(sys.modules, f"teleloader_server.auth.{name}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    write(file, issuer_table(issuer))
    with pytest.raises(ConfigError, match=r"require PyJWT and cryptography .*pip install 'teleloader\[oidc\]'"):
        IdentityFile(file)
    write(file, CERTIFICATES)
    assert str(IdentityFile(file)) == "client certificates"


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ({"issuer": "https://other.example"}, "is not the discovery document of http://127"),
        ({"jwks_uri": "http://a.example/keys"}, "states no https:// URL as jwks_uri"),
        ({"jwks_uri": 5}, "states no https:// URL as jwks_uri"),
    ],
)
def test_a_discovery_document_must_fit(file: Path, document: dict[str, object], complaint: str) -> None:
    """Its issuer is the configured one, and its keys are not fetched without TLS."""
    with Issuer() as issuer:
        issuer.document = document
        write(file, issuer_table(issuer))
        with pytest.raises(ConfigError, match=complaint):
            IdentityFile(file).load_keys()
        assert issuer.requests["/keys"] == 0


def test_requests_for_keys_may_carry_a_token(file: Path) -> None:
    """The API server of Kubernetes requires one."""
    with Issuer() as issuer:
        file.with_name("token").write_text("abc\n")
        write(file, issuer_table(issuer, jwks_url=f'"{issuer.url}/keys"', token_file='"token"'))
        IdentityFile(file).load_keys()
        assert (issuer.authorizations, dict(issuer.requests)) == ({"Bearer abc"}, {"/keys": 1})


def test_a_large_response_is_refused(file: Path) -> None:
    """The limit applies while the response arrives."""
    with Issuer() as issuer:
        issuer.keys = [{"kid": "x" * 2**21}]
        write(file, issuer_table(issuer))
        with pytest.raises(ConfigError, match="has more than 1,048,576 bytes"):
            IdentityFile(file).load_keys()


# -- certificates

CERTIFICATES = '[[certificates.rules]]\nmatch = { uri = "spiffe://example/ns/vision/*" }\nscopes = ["read"]\n'
URI = "spiffe://example/ns/vision/sa/trainer"


def certificate(*names: tuple[str, str], cn: str | None = None, days: float = 1) -> dict[str, Any]:
    """Return the fields of a certificate as the TLS library returns them."""
    subject = () if cn is None else ((("organizationName", "Example"),), (("commonName", cn),))
    until = time.strftime("%b %d %H:%M:%S %Y GMT", time.gmtime(time.time() + 86_400 * days))
    return {"subject": subject, "subjectAltName": names, "notAfter": until}


def test_names_in_a_certificate_are_claims() -> None:
    """Several names of a kind are a list."""
    found = claims_of(certificate(("DNS", "a"), ("DNS", "b"), ("URI", URI), ("IP Address", "10.0.0.1"), cn="c"))
    assert found == {"o": ["Example"], "cn": ["c"], "dns": ["a", "b"], "uri": [URI], "ip": ["10.0.0.1"]}
    assert claims_of({"subject": (), "notAfter": "x"}) == {}


def test_a_certificate_identifies_the_client_of_its_connection(file: Path) -> None:
    """Its name is that of the first URI, common name or DNS name."""
    authenticator = authenticator_of(
        file, CERTIFICATES + '[[certificates.rules]]\nmatch = { cn = "b" }\nscopes = ["admin"]\n'
    )
    assert caller(authenticator, None, certificate(("DNS", "a"), ("URI", URI), cn="b")).admit("read") == Principal(
        f"certificate:{URI}", frozenset({"read"}), 1.0
    )
    assert caller(authenticator, None, certificate(("DNS", "a"), cn="b")).admit("admin").name == "certificate:b"
    with pytest.raises(Forbidden, match=r"'certificate:a' has no permissions: no rule matches in \[certificates\]"):
        caller(authenticator, None, certificate(("DNS", "a"))).admit("read")
    with pytest.raises(Unauthorized, match="identifies no client by 'two words'"):
        caller(authenticator, None, certificate(cn="two words")).admit("read")
    with pytest.raises(Unauthorized, match="no token or client certificate provided"):
        caller(authenticator, None).admit("read")


def test_a_token_takes_precedence_over_a_certificate(file: Path, issuer: Issuer) -> None:
    """An invalid token is refused although the certificate is valid."""
    authenticator = authenticator_of(file, issuer_table(issuer) + CERTIFICATES)
    shown = certificate(("URI", URI))
    assert caller(authenticator, issuer.token(), shown).admit("read").name == NAME
    with pytest.raises(Unauthorized, match="expired"):
        caller(authenticator, issuer.token(lifetime=-100), shown).admit("read")
    assert caller(authenticator, None, shown).admit("read").name == f"certificate:{URI}"


def test_a_certificate_that_expires_on_an_open_connection_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TLS verifies its dates only at the start of the connection."""
    now = [time.time()]
    monkeypatch.setattr("teleloader_server.auth.authenticator.time.time", lambda: now[0])
    authenticator = authenticator_of(file, CERTIFICATES)
    expired: list[float] = []
    authenticator.on_expiry = lambda: expired.append(now[0])
    request = caller(authenticator, None, certificate(("URI", URI)))
    assert request.admit("read")
    now[0] += 86_400 + 120
    authenticator.reload_if_changed()
    assert expired == [now[0]]
    with pytest.raises(
        Unauthorized, match=f"the client certificate of 'certificate:{URI}' expired 2 min ago: renew it"
    ):
        request.admit("read")


def test_changed_rules_apply_to_open_connections(file: Path) -> None:
    """The server applies the new rules to the certificate of each connection."""
    authenticator = authenticator_of(file, CERTIFICATES)
    request = caller(authenticator, None, certificate(("URI", URI)))
    assert request.admit("read").scopes == {"read"}
    write(file, CERTIFICATES.replace('["read"]', "[]"))
    look_twice(authenticator)
    with pytest.raises(Forbidden, match="a rule without scopes matches"):
        request.admit("read")


def test_without_rules_a_certificate_identifies_no_client(file: Path, issuer: Issuer) -> None:
    """It is then only a condition to connect, besides a token."""
    authenticator = authenticator_of(file, issuer_table(issuer))
    with pytest.raises(Unauthorized, match="no token provided"):
        caller(authenticator, None, certificate(("URI", URI))).admit("read")


def test_a_stale_cookie_does_not_hide_a_certificate(file: Path) -> None:
    """Browsers keep the cookie of a server that restarted."""
    authenticator = authenticator_of(file, CERTIFICATES)
    request = caller(authenticator, None, certificate(("URI", URI)))
    request._scope["headers"] = [(b"cookie", b"__Host-teleloader-1=old")]
    assert RequestCaller(authenticator, request._scope).admit("read").name == f"certificate:{URI}"


def test_a_refusal_raises_a_new_error_each_time() -> None:
    """An exception that is raised again would collect tracebacks."""
    refusal = Refusal(Unauthorized, "no")
    assert refusal.error() is not refusal.error()


# -- accounting


def test_counters_of_principals_are_bounded() -> None:
    """An issuer may have any number of subjects: those beyond the limit have one counter."""
    counters = Counters()
    found = [counters.principal(f"cluster:{number}") for number in range(MAX_PRINCIPALS + 2)]
    assert found[-1] is found[-2] is counters.principals[OTHER_PRINCIPALS]
    assert len({id(each) for each in found}) == len(counters.principals) == MAX_PRINCIPALS + 1
    assert counters.principal("cluster:5") is found[5]


# -- open requests


def test_a_request_whose_token_cannot_be_verified_ends() -> None:
    """Without keys, the authorization of an open request ends with the error; those of others are checked as before."""

    class Caller:
        def authorize(self, need: str, dataset: str | None = None) -> Principal:
            raise ServerUnavailable("no keys")

    async def test() -> None:
        grants = Grants()
        running = asyncio.create_task(grants.run())
        for _ in range(2):
            ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
            with grants.hold(Caller(), "read", ("train",), ended.set_result):
                grants.tokens_changed.set()
                assert isinstance(await ended, ServerUnavailable)
        running.cancel()

    asyncio.run(test())
