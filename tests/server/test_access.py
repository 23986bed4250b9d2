"""Authentication and authorization: decisions about tokens, scopes, addresses and cross-site requests."""

from __future__ import annotations

import gc
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.routing import Route

from teleloader_server import permissions
from teleloader_server.auth import origins, token_file
from teleloader_server.auth.authenticator import Authenticator, RequestCaller
from teleloader_server.auth.origins import is_known_host, is_of_another_site, known_hosts
from teleloader_server.auth.token_file import TokenFile
from teleloader_server.auth.tokens import parse_tokens
from teleloader_server.config import ConfigError
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.limits import Limits
from teleloader_server.loading.datasets import host
from teleloader_server.permissions import ANYONE, Principal, allows
from teleloader_server.web.app import create_app
from teleloader_server.web.authentication import GuardedRoute
from teleloader_server.workers.factory import ObjectPools
from teleloader_shared.errors import Forbidden, Unauthorized

SECRET = "a-token-of-a-test"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


SCOPES = '["read", "stats"]'
LATER = f'[later]\ntoken = "another-token-of-it"\nscopes = {SCOPES}\n'


def one_entry(**fields: str) -> str:
    """Return a file with one token, with the scopes read and stats unless given."""
    return "[trainer]\n" + "".join(f"{name} = {value}\n" for name, value in {"scopes": SCOPES, **fields}.items())


# -- the table of tokens


def test_an_entry_needs_a_token_and_scopes_only() -> None:
    """By default a token does not expire, and its owner may use all of the memory."""
    (entry,) = parse_tokens(one_entry(token=f'"{SECRET}"'), "tokens.toml").entries
    assert entry.principal == Principal("trainer", frozenset({"read", "stats"}), 1.0)
    assert entry.expires == math.inf


def test_an_empty_file_lists_no_tokens() -> None:
    """A file without entries is valid, with or without comments."""
    for text in ("", "\n", "# revoked: trainer\n"):
        assert parse_tokens(text, "tokens.toml").entries == ()


def test_no_token_has_the_name_of_clients_without_one() -> None:
    """Quotas use names: strangers would share the quota, and count as authenticated."""
    with pytest.raises(ConfigError, match=r"reserved token name 'anyone' in tokens\.toml"):
        parse_tokens(f'[anyone]\ntoken = "{SECRET}"\nscopes = ["read"]\n', "tokens.toml")


def test_an_entry_may_say_all() -> None:
    """An entry may have all settings, and a digest in place of the token."""
    text = one_entry(
        sha256=f'"{DIGEST}"', scopes='["read:train", "admin"]', expires="2027-01-01T00:00:00Z", memory_share="0.5",
        priority='"high"', weight="0.5",
    )  # fmt: skip
    tokens = parse_tokens(text, "tokens.toml")
    assert tokens.find(SECRET.encode()) == tokens.entries[0]
    assert tokens.entries[0].principal == Principal("trainer", frozenset({"read:train", "admin"}), 0.5, 5.0)
    assert tokens.entries[0].expires == 1798761600
    assert not tokens.holds_secrets


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "not valid TOML"),
        ("x = " + "[" * 10_000, "not valid TOML"),
        ("x = " + "1" * 10_000, "not valid TOML"),
        ("trainer = 5", "expected a table"),
        ("['']\n", "invalid token name '' in"),
        ("['a b']\n", "invalid token name 'a b' in"),
        ("a-bare-token-of-a-test", "expected one TOML table per token, got a bare token"),
        (one_entry(), "got neither"),
        (f'[trainer]\ntoken = "{SECRET}"\n', "expected a list of scopes, got none. Add scopes ="),
        (one_entry(token=f'"{SECRET}"', sha256=f'"{DIGEST}"'), "expected exactly one of token = "),
        (one_entry(token='"short"'), "16 to 512"),
        (one_entry(token='"with a space in it, and more"'), "16 to 512"),
        (one_entry(token="5"), "16 to 512"),
        (one_entry(sha256='"abc"'), "64 hexadecimal"),
        (one_entry(token=f'"{SECRET}"', scope='["read"]'), "unknown key 'scope'"),
        (one_entry(token=f'"{SECRET}"', scopes='"read"'), "expected a list of scopes"),
        (one_entry(token=f'"{SECRET}"', scopes="[]"), "expected a list of scopes"),
        (one_entry(token=f'"{SECRET}"', scopes='["write"]'), "expected read, read:DATASET"),
        (one_entry(token=f'"{SECRET}"', scopes='["read:../x"]'), "expected read, read:DATASET"),
        (one_entry(token=f'"{SECRET}"', expires="2027-01-01T00:00:00"), "a time with a time zone"),
        (one_entry(token=f'"{SECRET}"', expires="2027-01-01"), "a time with a time zone"),
        (one_entry(token=f'"{SECRET}"', memory_share="0"), "in (0, 1]"),
        (one_entry(token=f'"{SECRET}"', memory_share="1.01"), "in (0, 1]"),
        (one_entry(token=f'"{SECRET}"', memory_share="nan"), "in (0, 1]"),
        (one_entry(token=f'"{SECRET}"', memory_share="true"), "in (0, 1]"),
        (one_entry(token=f'"{SECRET}"', memory_share=f"0x{'f' * 9999}"), "in (0, 1]"),
        (one_entry(token=f'"{SECRET}"', priority='"urgent"'), 'priority must be one of "high", "normal", "low"'),
        (one_entry(token=f'"{SECRET}"', priority="1"), "priority must be one of"),
        (one_entry(token=f'"{SECRET}"', weight="0"), "weight must be a number in [0.01, 100]"),
        (one_entry(token=f'"{SECRET}"', weight="nan"), "weight must be a number in [0.01, 100]"),
        (one_entry(token=f'"{SECRET}"', weight='"2"'), "weight must be a number in [0.01, 100]"),
        (one_entry(token=f'"{SECRET}"') + f'[other]\nsha256 = "{DIGEST}"\nscopes = {SCOPES}\n', "the same token"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_is_refused(text: str, complaint: str) -> None:
    """The error has the file, the place and the reason, and never the token."""
    gc.collect()  # one text exhausts the stack, in which finalizers of earlier tests' objects would fail
    with pytest.raises(ConfigError) as refused:
        parse_tokens(text, "tokens.toml")
    assert complaint in str(refused.value)
    assert "tokens.toml" in str(refused.value)
    assert SECRET not in str(refused.value)


def test_all_entries_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is compared with all entries in constant time, even after a match."""
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    tokens = parse_tokens("".join(f'[t{n}]\ntoken = "{n:020}"\nscopes = {SCOPES}\n' for n in range(9)), "tokens.toml")
    found = tokens.find(b"%020d" % 4)
    assert found is not None
    assert found.principal.name == "t4"
    assert tokens.find(b"%020d" % 10) is None
    assert len(compared) == 18


# -- scopes


@pytest.mark.parametrize(
    ("scopes", "need", "dataset", "enough"),
    [
        ({"read"}, "read", "train", True),
        ({"read"}, "read", None, True),
        ({"read:train"}, "read", "train", True),
        ({"read:train"}, "read", None, True),
        ({"read:train"}, "read", "train2", False),
        ({"read:train"}, "read", "", False),
        ({"stats"}, "read", None, False),
        ({"read"}, "stats", None, False),
        ({"stats"}, "stats", None, True),
        ({"stats"}, "any", None, True),
        ({"read", "stats"}, "admin", None, False),
        ({"read", "stats"}, "announce", None, False),
        ({"announce"}, "announce", None, True),
        ({"announce"}, "read", "train", False),
        ({"admin"}, "announce", None, True),
        ({"admin"}, "admin", None, True),
        ({"admin"}, "read", "train", True),
        ({"admin"}, "stats", None, True),
        (ANYONE.scopes, "admin", None, True),
    ],
)
def test_a_scope_allows_what_it_says(scopes: set[str], need: str, dataset: str | None, enough: bool) -> None:
    """A scope allows exactly its own operations; admin allows all."""
    assert allows(frozenset(scopes), need, dataset) is enough


# -- hosts and sites


@pytest.mark.parametrize(
    ("header", "known"),
    [
        ("127.0.0.1:8000", True), ("127.0.0.1", True), ("10.1.2.3:80", True), ("[::1]:8000", True), ("[fe80::1]", True),
        ("localhost", True), ("LOCALHOST:8000", True), ("a.localhost", True), ("cpu-box:8000", True),
        ("CPU-Box.:8000", True), ("a.loader.example", True), ("a.b.loader.example:1", True),
        ("loader.example", False), ("evil.example:8000", False), ("evilloader.example", False),
        ("127.0.0.1.evil.example", False), ("localhost.evil.example", False), ("cpu-box.evil.example", False),
        ("127.1", False), ("0x7f000001", False), ("", False), ("cpu-box:8000:8000", False), ("x@127.0.0.1", False),
    ],
)  # fmt: skip
def test_a_name_that_others_could_have_led_here_is_not_known(header: str, known: bool) -> None:
    """IP addresses, localhost and configured names are accepted as Host; similar names are not."""
    assert is_known_host(header, known_hosts(["cpu-box", "*.loader.example", ""])) is known


def test_a_star_is_any_name() -> None:
    """The setting `*` allows any name."""
    assert is_known_host("evil.example", known_hosts(["*"]))


@pytest.mark.parametrize(
    ("method", "origin", "site", "mode", "refused"),
    [
        ("GET", None, None, None, False),
        ("POST", None, None, None, False),
        ("POST", "http://box:8000", "same-origin", "cors", False),
        ("GET", None, "none", "navigate", False),
        ("GET", None, "cross-site", "navigate", False),
        ("POST", None, "cross-site", "navigate", True),
        ("GET", None, "cross-site", "no-cors", True),
        ("GET", None, "same-site", "cors", True),
        ("POST", "http://evil.example", None, None, True),
        ("GET", "http://evil.example", None, None, True),
        ("POST", "http://box:3000", None, None, True),
        ("POST", "null", None, None, True),
        ("POST", "", None, None, True),
    ],
)
def test_what_a_page_of_another_site_causes_is_refused(
    method: str, origin: str | None, site: str | None, mode: str | None, refused: bool
) -> None:
    """Cross-site requests are rejected except links to this server; another port of this machine is another site."""
    assert is_of_another_site(method, "box:8000", origin, site, mode) is refused


# -- every endpoint


@pytest.fixture
def app() -> FastAPI:
    """Return a server's application."""
    limits = Limits()
    return create_app(LoaderService(ObjectPools(lambda: {"x": host([1], name="x")}, limits), limits))


def endpoints(routes: list[Any]) -> Iterator[Route]:
    """Yield all routes of the application."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        if isinstance(inner, APIRouter):  # how later releases of FastAPI include a router
            yield from endpoints(inner.routes)
        else:
            yield route


def test_every_endpoint_declares_its_authorization(app: FastAPI) -> None:
    """Only probes and static files are public; signing in is open to all but cross-site requests."""
    needs: dict[str, set[str]] = {}
    for route in endpoints(app.router.routes):
        need = permissions.need_of(route.endpoint)
        needs.setdefault(need, set()).add(route.path)
        # a WebSocket is authorized at each message: tests/end_to_end/test_websocket.py
        assert need == permissions.UNCHECKED or isinstance(route, GuardedRoute | APIWebSocketRoute), route.path
    assert needs.pop("unchecked") == {"/healthz", "/readyz", "/", "/dashboard/{name:path}"}
    assert needs.pop("open") == {"/session"}
    assert needs.pop("any") == {"/openapi.json", "/docs"}
    assert needs.pop("stats") == {
        "/stats", "/stats/stream", "/stats/history", "/stats/servers", "/metrics", "/v1/workers/{worker}",
        "/v1/timeline", "/v1/slow-samples", "/v1/errors",
    }  # fmt: skip
    assert needs.pop("announce") == {"/v1/servers", "/v1/servers/{instance}"}
    assert needs.pop("admin") == {
        "/v1/drain", "/v1/workers", "/v1/workers/{worker}/stack", "/v1/versions", "/v1/versions/{dataset}",
    }  # fmt: skip
    assert set(needs) == {"read"}
    assert all(path.startswith("/v1/") for path in needs["read"])
    assert len(needs["read"]) == 10


def test_an_endpoint_that_declares_nothing_is_not_served() -> None:
    """A server with such an endpoint does not start."""
    router = APIRouter(route_class=GuardedRoute)
    with pytest.raises(LookupError, match="declares no required scope"):

        @router.get("/forgotten")
        async def forgotten() -> None: ...


def test_a_route_that_is_described_is_guarded(app: FastAPI) -> None:
    """Each route in the API's description requires authentication, or is a probe."""
    guarded = {route.path for route in endpoints(app.router.routes) if isinstance(route, APIRoute)}
    assert set(app.openapi()["paths"]) <= guarded


# -- the authenticator


def scope(authorization: str | None = None, **headers: str) -> dict[str, Any]:
    """Return the ASGI scope of a request."""
    found = {**headers} if authorization is None else {"authorization": authorization, **headers}
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in found.items()]
    return {"method": "GET", "headers": raw, "scheme": "http", "server": ("127.0.0.1", 8000), "client": ("10.0.0.9", 5)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the time by one that only the test changes."""
    now = [1_000_000.0]
    monkeypatch.setattr("teleloader_server.auth.authenticator.time.time", lambda: now[0])
    monkeypatch.setattr("teleloader_server.auth.authenticator.time.monotonic", lambda: now[0])
    return now


def test_tokens_expire_although_the_clock_was_wrong(tmp_path: Path, clock: list[float]) -> None:
    """A clock that was set forward and corrected delays no expiry: `on_change` is called each time."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"', expires="1970-01-12T13:46:41Z"))  # in a second
    changes: list[float] = []
    authenticator.on_change = lambda: changes.append(clock[0])
    for now in (1_000_000.0, 5_000_000.0, 1_000_000.0, 1_000_002.0):
        clock[0] = now
        authenticator.reload_if_changed()
    assert changes == [5_000_000.0, 1_000_000.0, 1_000_002.0]


def look_twice(authenticator: Authenticator) -> None:
    """Make an authenticator check its files until a completed change applies, as a server does every second."""
    for _ in range(2):
        authenticator.reload_if_changed()


def gate_of(tmp_path: Path, text: str) -> Authenticator:
    """Return an authenticator with a file of tokens."""
    file = tmp_path / "tokens.toml"
    file.write_text(text)
    file.chmod(0o600)
    return Authenticator([TokenFile.table(file)])


def test_a_changed_file_counts_from_then_on(tmp_path: Path) -> None:
    """A removed token is rejected, even if it was accepted before; a new one is accepted."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"'))
    assert RequestCaller(authenticator, scope(f"Bearer {SECRET}")).admit("read").name == "trainer"
    (tmp_path / "tokens.toml").write_text(LATER)
    look_twice(authenticator)
    with pytest.raises(Unauthorized, match="may have been revoked"):
        RequestCaller(authenticator, scope(f"Bearer {SECRET}")).admit("read")
    assert RequestCaller(authenticator, scope("bearer another-token-of-it")).admit("read").name == "later"


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (TokenFile.table, ""), (TokenFile.table, "# nobody\n"), (TokenFile.table, None),
        (TokenFile.single, "\n"), (TokenFile.single, None),
    ],
    ids=["empty", "comment", "missing", "empty single", "missing single"],
)  # fmt: skip
def test_an_empty_or_missing_file_rejects_all_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Callable[[Path], TokenFile], content: str | None
) -> None:
    """After the last token is revoked, the server rejects all clients until a token is added."""
    file = tmp_path / "tokens.toml"
    first, later = (one_entry(token=f'"{SECRET}"'), LATER) if kind == TokenFile.table else (SECRET, LATER.split('"')[1])
    file.write_text(first)
    file.chmod(0o600)
    authenticator = Authenticator([kind(file)])
    signed_in = scope(cookie=cookie_of(authenticator.sign_in(SECRET, scope())[1]))
    admitted = RequestCaller(authenticator, scope(f"Bearer {SECRET}"))
    admitted.admit("read")
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    look_twice(authenticator)
    assert authenticator.has_tokens
    for refused in (signed_in, scope(f"Bearer {SECRET}"), scope()):
        with pytest.raises(Unauthorized):
            RequestCaller(authenticator, refused).admit("stats")
    with pytest.raises(Unauthorized):
        admitted.authorize("read", "train")
    assert [record.message for record in caplog.records if "clients cannot authenticate" in record.message]
    file.write_text(later)
    look_twice(authenticator)
    assert RequestCaller(authenticator, scope("Bearer another-token-of-it")).admit("read")


def test_a_file_that_is_being_written_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file is used once two consecutive reads are equal: an incomplete one may lack tokens, or be outdated."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"'))
    file = tmp_path / "tokens.toml"
    with file.open("w") as writing:  # empty from here on
        for part in ("", "# a long\n", LATER.partition("scopes")[0], "scopes" + LATER.partition("scopes")[2]):
            writing.write(part)
            writing.flush()
            authenticator.reload_if_changed()
            assert RequestCaller(authenticator, scope(f"Bearer {SECRET}")).admit("read").name == "trainer"
    authenticator.reload_if_changed()
    assert RequestCaller(authenticator, scope("Bearer another-token-of-it")).admit("read").name == "later"
    assert [record.levelname for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_file_that_changes_while_it_is_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that changes during a read is discarded: it may mix old and new content."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"'))
    file = tmp_path / "tokens.toml"
    file.write_text("# revoked: all")
    authenticator.reload_if_changed()
    read = token_file.read_text

    def interrupted(path: Path) -> token_file.TokenText:
        found = read(path)
        file.write_text(LATER)
        return found

    monkeypatch.setattr(token_file, "read_text", interrupted)
    authenticator.reload_if_changed()
    assert RequestCaller(authenticator, scope(f"Bearer {SECRET}")).admit("read").name == "trainer"
    monkeypatch.setattr(token_file, "read_text", read)
    look_twice(authenticator)
    assert RequestCaller(authenticator, scope("Bearer another-token-of-it")).admit("read").name == "later"


def test_an_entry_that_loses_its_scopes_gains_none(tmp_path: Path) -> None:
    """Scopes have no default: a file that ends after ``sha256`` must not turn ``read:train`` into ``read``."""
    authenticator = gate_of(tmp_path, one_entry(scopes='["read:train"]', token=f'"{SECRET}"'))
    (tmp_path / "tokens.toml").write_text(f'[trainer]\ntoken = "{SECRET}"\n')
    look_twice(authenticator)
    caller = RequestCaller(authenticator, scope(f"Bearer {SECRET}"))
    for need, dataset in (("read", "other"), ("stats", None)):
        with pytest.raises(Forbidden):
            caller.authorize(need, dataset)


@pytest.mark.parametrize("content", ["[broken", "[x]\ntoken = 'short'\n", b"\xff", "#" * 2**20 + "#", None])
def test_an_invalid_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | bytes | None
) -> None:
    """After an invalid change, the previous tokens stay valid, and one error is logged."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"'))
    file = tmp_path / "tokens.toml"
    if content is None:  # unreadable, for root as well
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    for _ in range(3):
        look_twice(authenticator)
        assert RequestCaller(authenticator, scope(f"Bearer {SECRET}")).admit("read").name == "trainer"
    assert [record.message[:19] for record in caplog.records] == ["token reload failed"]


@pytest.mark.parametrize("content", ["", None], ids=["empty", "missing"])
@pytest.mark.parametrize("kind", [TokenFile.table, TokenFile.single])
def test_a_server_does_not_start_with_a_file_without_tokens(
    tmp_path: Path, kind: Callable[[Path], TokenFile], content: str | None
) -> None:
    """At startup, a wrong path is more probable than the intention to reject all clients."""
    file = tmp_path / "tokens.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"no token in .*tokens.toml: the file is missing or empty"):
        kind(file)


def test_a_token_ends_when_it_expires(tmp_path: Path, clock: list[float]) -> None:
    """An expired token is rejected, even if it was accepted before."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"', expires="1970-01-12T13:46:50Z"))
    assert RequestCaller(authenticator, scope(f"Bearer {SECRET}")).admit("read").name == "trainer"
    clock[0] += 11
    with pytest.raises(Unauthorized, match="'trainer' has expired"):
        RequestCaller(authenticator, scope(f"Bearer {SECRET}")).admit("read")


def test_a_caller_is_authorized_as_its_token_stands_at_each_use(tmp_path: Path) -> None:
    """An admitted request loses its authorization with the token or its scope."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"'))
    caller = RequestCaller(authenticator, scope(f"Bearer {SECRET}"))
    for dataset in ("train", "other"):
        assert caller.authorize("read", dataset).name == "trainer"
    assert caller.authorize("stats").name == "trainer"
    (tmp_path / "tokens.toml").write_text(one_entry(token=f'"{SECRET}"', scopes='["read:train"]'))
    look_twice(authenticator)
    assert caller.authorize("read", "train").name == "trainer"
    with pytest.raises(Forbidden):
        caller.authorize("read", "other")
    with pytest.raises(Forbidden):
        caller.authorize("stats")
    (tmp_path / "tokens.toml").write_text(LATER)
    look_twice(authenticator)
    with pytest.raises(Unauthorized):
        caller.authorize("read", "train")


def test_changed_and_expired_tokens_are_reported(tmp_path: Path, clock: list[float]) -> None:
    """`on_change` is called once for a changed file and once when a token expires, and not otherwise."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"', expires="1970-01-12T13:46:50Z"))
    calls: list[float] = []
    authenticator.on_change = lambda: calls.append(clock[0])
    for _ in range(10):
        clock[0] += 2
        authenticator.reload_if_changed()
    assert calls == [1_000_010.0]
    (tmp_path / "tokens.toml").write_text(LATER)
    for _ in range(3):
        clock[0] += 2
        authenticator.reload_if_changed()
    assert calls == [1_000_010.0, 1_000_024.0]


@pytest.mark.parametrize(
    ("name", "token"), [("token", "another-token-of-it"), ("trainer", SECRET)], ids=["a name", "a token"]
)
def test_tokens_of_several_sources_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, token: str
) -> None:
    """Names and tokens are unique across sources; a changed file that breaks this rule is ignored."""
    single = tmp_path / "token"
    single.write_text(SECRET)
    single.chmod(0o600)
    twice = f'[{name}]\ntoken = "{token}"\nscopes = {SCOPES}\n'
    file = tmp_path / "tokens.toml"
    file.write_text(twice)
    with pytest.raises(ConfigError, match=f"duplicate token '(token|{name})': --tokens and --token-file contain"):
        Authenticator([TokenFile.table(file), TokenFile.single(single)])
    file.write_text(f'[other]\ntoken = "a-third-token-of-it"\nscopes = {SCOPES}\n')
    authenticator = Authenticator([TokenFile.table(file), TokenFile.single(single)])
    file.write_text(twice)
    look_twice(authenticator)
    assert RequestCaller(authenticator, scope("Bearer a-third-token-of-it")).admit("read").name == "other"
    assert RequestCaller(authenticator, scope(f"Bearer {SECRET}")).admit("read").name == "token"
    assert "keeping the previous tokens: duplicate token" in caplog.text


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Basic abc", SECRET, f"Bearer {SECRET}x", f"Bearer {SECRET[:-1]}", "Bearer \xff"],
)
def test_anything_else_is_no_token(tmp_path: Path, header: str) -> None:
    """Values similar to a token are rejected."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"'))
    with pytest.raises(Unauthorized):
        RequestCaller(authenticator, scope(header)).admit("read")


def test_a_token_reads_its_dataset_and_no_other(tmp_path: Path) -> None:
    """A token of `read:NAME` suffices to list datasets and to use the one with that name."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"', scopes='["read:train"]'))
    caller = RequestCaller(authenticator, scope(f"Bearer {SECRET}"))
    assert caller.admit("read").name == "trainer"
    assert caller.authorize("read", "train").name == "trainer"
    with pytest.raises(Forbidden, match="the request requires 'read:other'"):
        caller.authorize("read", "other")
    with pytest.raises(Forbidden, match="the request requires 'stats'"):
        caller.admit("stats")


def test_refusals_fill_no_log(caplog: pytest.LogCaptureFixture, tmp_path: Path, clock: list[float]) -> None:
    """Many rejections are logged in one line, with the peer and without the request's data."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"'))
    for _ in range(2):
        for _ in range(1000):
            with pytest.raises(Unauthorized):
                RequestCaller(authenticator, scope("Bearer not-the-right-one")).admit("read")
        clock[0] += 20
    assert len(caplog.messages) == 2
    assert "1000 x Unauthorized; latest from 10.0.0.9" in caplog.messages[1]
    assert "not-the-right-one" not in caplog.text


def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A readable file with tokens causes a warning; one with digests does not."""
    file = tmp_path / "tokens.toml"
    for text, warned in ((one_entry(sha256=f'"{DIGEST}"'), False), (one_entry(token=f'"{SECRET}"'), True)):
        file.write_text(text)
        os.chmod(file, 0o644)
        TokenFile.table(file)
        assert ("every user of this machine can read" in caplog.text) is warned
    assert SECRET not in caplog.text


# -- sessions of browsers


def cookie_of(header: str) -> str:
    """Return the cookie that a browser sends back."""
    return header.partition(";")[0]


def test_a_session_stands_for_its_token(tmp_path: Path, clock: list[float]) -> None:
    """The cookie is not accessible to scripts and other sites, and does not contain the token."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"'))
    principal, header = authenticator.sign_in(SECRET, scope())
    assert principal.name == "trainer"
    assert header.startswith("teleloader-8000=")
    assert header.endswith("; Path=/; Max-Age=43200; HttpOnly; SameSite=Strict")
    assert SECRET not in header
    asking = scope(cookie=f"a=b; {cookie_of(header)}; c=d")
    assert RequestCaller(authenticator, asking).admit("stats").name == "trainer"
    assert "Max-Age=0" in authenticator.sign_out(asking)
    with pytest.raises(Unauthorized, match="browser session has expired or was revoked"):
        RequestCaller(authenticator, asking).admit("stats")


def test_a_session_ends_at_the_new_expiry_of_its_token(tmp_path: Path, clock: list[float]) -> None:
    """The session ends at the token's new expiry, which is earlier than that at sign-in."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"'))
    asking = scope(cookie=cookie_of(authenticator.sign_in(SECRET, scope())[1]))
    (tmp_path / "tokens.toml").write_text(one_entry(token=f'"{SECRET}"', expires="1970-01-12T13:46:50Z"))
    look_twice(authenticator)
    assert RequestCaller(authenticator, asking).admit("stats").name == "trainer"
    clock[0] += 11
    with pytest.raises(Unauthorized):
        RequestCaller(authenticator, asking).admit("stats")


def test_under_tls_the_cookie_is_of_this_host_only(tmp_path: Path) -> None:
    """Under TLS the cookie is limited to this host, and never sent in clear text."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"'))
    _, header = authenticator.sign_in(SECRET, {**scope(), "scheme": "https"})
    assert header.startswith("__Host-teleloader-8000=")
    assert header.endswith("; Secure")


def test_a_session_ends_with_its_token_and_after_a_day(tmp_path: Path, clock: list[float]) -> None:
    """A session ends after 12 hours, and immediately when its token is removed."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"'))
    first, second = (scope(cookie=cookie_of(authenticator.sign_in(SECRET, scope())[1])) for _ in range(2))
    clock[0] += 12 * 3600 - 1
    assert RequestCaller(authenticator, first).admit("stats").name == "trainer"
    clock[0] += 2
    authenticator.reload_if_changed()
    with pytest.raises(Unauthorized):
        RequestCaller(authenticator, first).admit("stats")
    third = scope(cookie=cookie_of(authenticator.sign_in(SECRET, scope())[1]))
    (tmp_path / "tokens.toml").write_text(LATER)
    look_twice(authenticator)
    for session in (second, third):
        with pytest.raises(Unauthorized):
            RequestCaller(authenticator, session).admit("stats")


def test_a_wrong_token_opens_no_session(tmp_path: Path) -> None:
    """An unknown or malformed token does not sign in."""
    authenticator = gate_of(tmp_path, one_entry(token=f'"{SECRET}"'))
    for wrong in ("", "x", "\ud800", SECRET + "\n"):
        with pytest.raises(Unauthorized):
            authenticator.sign_in(wrong, scope())


def test_sessions_are_bounded(tmp_path: Path) -> None:
    """Beyond the limit of a token, or of all sessions, the oldest session ends."""
    tokens = [f"{number:020}" for number in range(10)]
    authenticator = gate_of(
        tmp_path, "".join(f'[t{n}]\ntoken = "{token}"\nscopes = {SCOPES}\n' for n, token in enumerate(tokens))
    )

    def signed_in(token: str) -> dict[str, Any]:
        return scope(cookie=cookie_of(authenticator.sign_in(token, scope())[1]))

    other = signed_in(tokens[0])
    sessions = [signed_in(tokens[1]) for _ in range(1100)]
    with pytest.raises(Unauthorized):
        RequestCaller(authenticator, sessions[-129]).admit("stats")
    assert RequestCaller(authenticator, sessions[-128]).admit("stats").name == "t1"
    assert RequestCaller(authenticator, other).admit("stats").name == "t0"
    for token in tokens[2:]:
        for _ in range(128):
            signed_in(token)
    with pytest.raises(Unauthorized):
        RequestCaller(authenticator, other).admit("stats")


# -- addresses that require tokens


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1"])
def test_this_machine_needs_no_tokens(address: str) -> None:
    """A server that listens on a loopback address requires no tokens."""
    origins.refuse_unprotected(address, has_tokens=False, insecure=False)


@pytest.mark.parametrize("address", ["0.0.0.0", "10.0.0.5", "::", "192.168.1.1", "fe80::1%eth0"])
def test_others_need_tokens(address: str) -> None:
    """A server that other machines can reach requires tokens, unless authentication is explicitly disabled."""
    origins.refuse_unprotected(address, has_tokens=True, insecure=False)
    origins.refuse_unprotected(address, has_tokens=False, insecure=True)
    with pytest.raises(ConfigError, match="teleloader-server token add trainer --file "):
        origins.refuse_unprotected(address, has_tokens=False, insecure=False)
