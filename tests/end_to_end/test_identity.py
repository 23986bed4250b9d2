"""JWTs and client certificates: real servers, an issuer over HTTP, TLS, and clients whose credentials rotate."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from teleloader import DataLoader, Forbidden, RemoteDataset, Unauthorized
from teleloader.api.credentials import Credentials
from tests.conftest import ServerProcess, StartServer, eventually
from tests.end_to_end.certificates import Files
from tests.end_to_end.terminal import SERVER, TOOLS, piped
from tests.end_to_end.test_audit import bearer, events_of
from tests.end_to_end.test_websocket import stream
from tests.issuers import NAMESPACE_RULE, SUBJECT, Issuer, issuer_table, write

NUMBERS: Final = "numbers=tests.end_to_end.hosted:numbers"
MANY: Final = "many=tests.end_to_end.hosted:many"
NAME: Final = f"cluster:{SUBJECT}"
URI: Final = "spiffe://example/ns/vision/sa/trainer"
CERTIFICATES: Final = (
    '[[certificates.rules]]\nmatch = { uri = "spiffe://example/ns/vision/*" }\nscopes = ["read", "stats"]\n'
)


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings of the tests' own environment."""
    for name in ("TOKEN", "TOKEN_FILE", "CA", "CERT", "KEY"):
        monkeypatch.delenv(f"TELELOADER_{name}", raising=False)


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    """Run an issuer."""
    with Issuer() as running:
        yield running


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the path of an identity file."""
    return tmp_path / "identity.toml"


def status(url: str, token: str, path: str = "/stats") -> int:
    """Return the status of a request with a token; wait while the server has no keys."""

    def response() -> httpx.Response | None:
        found = httpx.get(url + path, headers=bearer(token), trust_env=False)
        return None if found.status_code == 503 else found

    found = eventually(response)
    assert found is not None
    return found.status_code


# -- tokens


def test_a_service_account_loads_batches(start_server: StartServer, file: Path, issuer: Issuer) -> None:
    """The client waits until the server has the keys; statistics and messages have the principal's name."""
    rules = NAMESPACE_RULE.replace('"read"', '"read:numbers"')
    server = start_server(NUMBERS, MANY, "--num-workers", "1", "--identity", write(file, issuer_table(issuer, rules)))
    server.await_line("access: issuer cluster$")
    token = issuer.token()
    assert len(list(DataLoader(RemoteDataset(server.url, "numbers", token=token), 10, output="numpy"))) == 10
    with pytest.raises(Forbidden, match=f"requires 'read:many', and token '{NAME}' has only"):
        RemoteDataset(server.url, "many", token=token)
    stats = httpx.get(f"{server.url}/stats", headers=bearer(token)).json()
    assert [used["token"] for used in stats["tokens"]] == [NAME]


def test_the_three_kinds_of_credentials_work_side_by_side(
    start_server: StartServer, file: Path, issuer: Issuer, tmp_path: Path
) -> None:
    """A token of a file, a JWT and a certificate; a certificate is optional with --ssl-cert-reqs optional."""
    files = Files(tmp_path)
    tokens = tmp_path / "tokens.toml"
    done = piped(SERVER, "token", "add", "operator", "--scope", "admin", "--file", str(tokens))
    cert, key = files.make("server", "127.0.0.1")
    server = start_server(
        NUMBERS, "--num-workers", "1", "--tokens", str(tokens),
        "--identity", write(file, issuer_table(issuer) + CERTIFICATES),
        "--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", files.ca, "--ssl-cert-reqs", "optional",
    )  # fmt: skip
    server.await_line(r"access: 1 token \(operator\), issuer cluster, client certificates$")
    own, own_key = files.identity("trainer", URI)
    everyone: list[dict[str, Any]] = [
        {"token": done.out.strip()}, {"token": issuer.token()}, {"cert": own, "key": own_key},
    ]  # fmt: skip
    for credentials in everyone:
        loader = DataLoader(RemoteDataset(server.url, "numbers", ca=files.ca, **credentials), 10, output="numpy")
        assert len(list(loader)) == 10
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(own, own_key)
    with httpx.Client(base_url=server.url, verify=context, trust_env=False) as client:
        used = {each["token"] for each in client.get("/stats").raise_for_status().json()["tokens"]}
        assert used == {"operator", NAME, f"certificate:{URI}"}
        assert client.get("/stats", headers=bearer("an-unknown-token")).status_code == 401
    with pytest.raises(Unauthorized, match="no token or client certificate provided"):
        RemoteDataset(server.url, "numbers", ca=files.ca)


def test_an_epoch_outlives_its_tokens(
    start_server: StartServer, file: Path, issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reads its file again when the token has expired; batches arrive once and in order."""
    server = start_server(MANY, "--num-workers", "1", "--identity", write(file, issuer_table(issuer, leeway="0")))
    current = tmp_path / "token"
    monkeypatch.setenv("TELELOADER_TOKEN_FILE", str(current))
    token = issuer.token(lifetime=5)
    write(current, token)
    batches = iter(DataLoader(RemoteDataset(server.url, "many"), 100, num_workers=1, prefetch_factor=2, output="numpy"))
    seen = next(batches).tolist()
    for _ in range(2):
        eventually(partial(lambda spent: status(server.url, spent) == 401, token))
        token = issuer.token(lifetime=5)
        write(current, token)
        seen += [index for _ in range(100) for index in next(batches).tolist()]
    write(current, issuer.token())
    seen += [index for batch in batches for index in batch.tolist()]
    assert seen == list(range(100_000))


def test_an_expired_token_ends_an_epoch_and_open_responses(
    start_server: StartServer, file: Path, issuer: Issuer
) -> None:
    """The error states how long ago the token has expired."""
    server = start_server(MANY, "--num-workers", "1", "--identity", write(file, issuer_table(issuer, leeway="0")))
    token = issuer.token(lifetime=5)
    dataset = RemoteDataset(server.url, "many", token=token)
    batches = iter(DataLoader(dataset, 10, num_workers=1, prefetch_factor=2, output="numpy"))
    next(batches)
    with httpx.stream("GET", f"{server.url}/stats/stream", headers=bearer(token), timeout=60) as events:
        assert all(isinstance(line, str) for line in events.iter_lines()), "the stream ends by itself"
    with pytest.raises(Unauthorized, match=r"refused the request: the token expired [0-9]+ s ago"):
        list(batches)


def test_an_expired_token_ends_an_idle_websocket(start_server: StartServer, file: Path, issuer: Issuer) -> None:
    """The last message has the reason."""
    server = start_server(MANY, "--num-workers", "1", "--identity", write(file, issuer_table(issuer, leeway="0")))
    assert status(server.url, issuer.token()) == 200
    token = issuer.token(lifetime=4)
    spec = {"dataset": "many", "batch_size": 10}
    registered = httpx.post(f"{server.url}/v1/loaders", json=spec, headers=bearer(token)).raise_for_status()
    with stream(server.url, registered.json()["key"], **bearer(token)) as socket:
        problem = json.loads(socket.recv(30))
        assert (problem["code"], "the token expired" in problem["detail"]) == ("Unauthorized", True)
        with pytest.raises(ConnectionClosed):
            socket.recv(30)
    assert socket.close_code == 1008


def test_keys_rotate_while_the_server_runs(start_server: StartServer, file: Path) -> None:
    """A token with a new key is accepted after the keys were fetched again, and the client waits meanwhile."""
    with Issuer() as issuer:
        server = start_server(NUMBERS, "--num-workers", "1", "--identity", write(file, issuer_table(issuer)))
        old = issuer.token()
        assert status(server.url, old) == 200
        issuer.rotate("second")
        loader = DataLoader(RemoteDataset(server.url, "numbers", token=issuer.token()), 10, output="numpy")
        assert len(list(loader)) == 10
        assert httpx.get(f"{server.url}/stats", headers=bearer(old)).status_code in (401, 503)


def test_a_server_starts_without_its_issuer(start_server: StartServer, file: Path) -> None:
    """Clients wait, and are accepted once the issuer responds."""
    with Issuer() as issuer:
        issuer.is_down = True
        server = start_server(NUMBERS, "--num-workers", "1", "--identity", write(file, issuer_table(issuer)))
        server.await_line("WARNING +cannot fetch the keys of issuer cluster: .* responded with status 503")
        found = httpx.get(f"{server.url}/stats", headers=bearer(issuer.token()))
        assert (found.status_code, found.headers["retry-after"]) == (503, "1")
        assert "the keys of issuer 'cluster' are unavailable" in found.json()["detail"]
        issuer.is_down = False
        assert RemoteDataset(server.url, "numbers", token=issuer.token())[3] == [3, 9.0]


def test_several_servers_of_a_machine_fetch_keys(start_server: StartServer, file: Path, issuer: Issuer) -> None:
    """Each has keys of its own."""
    server = start_server(NUMBERS, "--servers", "2", "-n", "2", "--identity", write(file, issuer_table(issuer)))
    assert len(list(DataLoader(RemoteDataset(server.url, "numbers", token=issuer.token()), 10))) == 10


def test_a_browser_signs_in_with_a_jwt(start_server: StartServer, file: Path, issuer: Issuer) -> None:
    """The session has the principal's permissions; a token with many claims is accepted."""
    server = start_server(NUMBERS, "--num-workers", "1", "--identity", write(file, issuer_table(issuer)))
    token = issuer.token(groups=["x" * 36] * 250)
    assert len(token) > 10_000
    assert status(server.url, token) == 200
    with httpx.Client(base_url=server.url, trust_env=False) as browser:
        assert browser.post("/session", json={"token": token}).json()["name"] == NAME
        assert browser.get("/session").json() == {"required": True, "name": NAME, "scopes": ["read", "stats"]}
        assert browser.get("/stats").status_code == 200
        assert browser.delete("/session").status_code == 204
        assert browser.get("/stats").status_code == 401
        other = issuer.token(namespace="audio")
        refused = browser.post("/session", json={"token": other})
        assert (refused.status_code, refused.json()["code"]) == (403, "Forbidden")


def test_the_audit_log_names_principals(file: Path, issuer: Issuer, tmp_path: Path) -> None:
    """Refusals name a principal only if the signature of its token is valid; no line contains a token."""
    path = tmp_path / "audit.jsonl"
    server = ServerProcess(
        "--port", "0", NUMBERS, "--num-workers", "1", "--identity", write(file, issuer_table(issuer)),
        "--audit-log", str(path),
    )  # fmt: skip
    good, expired = issuer.token(), issuer.token(lifetime=-100)
    unmatched = issuer.token(sub="audio", namespace="audio")
    forged = f"{issuer.token(sub='mallory').rpartition('.')[0]}.{'A' * 86}"
    assert [status(server.url, token) for token in (good, expired, unmatched, forged)] == [200, 401, 403, 401]
    list(DataLoader(RemoteDataset(server.url, "numbers", token=good), 10))
    write(file, issuer_table(issuer, 'match = { sub = "*" }\nscopes = ["read"]\n'))
    eventually(lambda: events_of(path, "identity_changed"))
    assert server.end() == 0
    assert [each["principal"] for each in events_of(path, "read_started")] == [NAME]
    refused = {(each["code"], each.get("principal")) for each in events_of(path, "refused")}
    assert refused == {("Unauthorized", NAME), ("Forbidden", "cluster:audio"), ("Unauthorized", None)}
    assert [(each["issuers"], each["certificates"]) for each in events_of(path, "identity_changed")] == [
        (["cluster"], False)
    ]
    everything = path.read_text() + "".join(server.log)
    assert "mallory" not in everything
    assert not any(token in everything for token in (good, expired, unmatched, forged))


# -- the command


def test_a_token_can_be_checked_without_a_server(file: Path, issuer: Issuer, tmp_path: Path) -> None:
    """The command prints principal, permissions and claims, or the refusal; keys come from the issuer."""
    write(file, issuer_table(issuer, NAMESPACE_RULE + 'priority = "high"\n'))
    (tmp_path / "token").write_text(issuer.token() + "\n")
    command = ("token", "check", "--token-file", str(tmp_path / "token"))
    done = piped(SERVER, *command, "--identity", str(file), "-o", "json")
    assert done.code == 0, done
    found = json.loads(done.out)
    assert (found["principal"], found["scopes"], found["weight"]) == (NAME, ["read", "stats"], 10)
    assert found["claims"]["kubernetes.io"]["namespace"] == "vision"
    done = piped(SERVER, *command, TELELOADER_IDENTITY=str(file))
    assert (done.code, f"principal     {NAME}\n" in done.out) == (0, True), done
    (tmp_path / "token").write_text(issuer.token(aud="other"))
    done = piped(SERVER, *command, "--identity", str(file))
    assert (done.code, "wrong audience 'other': expected 'teleloader'" in done.out) == (1, True), done
    (tmp_path / "token").write_text("tl_a-token-of-the-operator")
    done = piped(SERVER, *command, "--identity", str(file))
    assert (done.code, "the token is not a JWT" in done.err) == (2, True), done


def test_a_server_does_not_start_with_an_invalid_identity_file(file: Path, issuer: Issuer) -> None:
    """The error has the remedy."""
    for text, complaint in (
        ("", "no issuer and no [certificates] in"),
        (issuer_table(issuer, algorithms='["HS256"]'), "invalid algorithms ['HS256']"),
        (CERTIFICATES, "requires --ssl-ca-certs, the CAs of the clients' certificates"),
    ):
        done = piped(SERVER, NUMBERS, "--port", "0", "--identity", write(file, text))
        assert (done.code, complaint in done.err) == (2, True), done


# -- certificates


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Create a CA."""
    return Files(tmp_path_factory.mktemp("certificates"))


def tls_server(
    start_server: StartServer, files: Files, file: Path, *more: str, text: str = CERTIFICATES
) -> ServerProcess:
    """Start a server that identifies clients by their certificates."""
    cert, key = files.make("server", "127.0.0.1")
    return start_server(
        MANY, "--num-workers", "1", "--identity", write(file, text), "--ssl-certfile", cert, "--ssl-keyfile", key,
        "--ssl-ca-certs", files.ca, *more,
    )  # fmt: skip


def context_of(files: Files, name: str, uri: str = URI) -> ssl.SSLContext:
    """Return the TLS settings of a client with a certificate."""
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(*files.identity(name, uri))
    return context


def test_a_certificate_is_the_only_credential(start_server: StartServer, files: Files, file: Path) -> None:
    """The client needs no token; the commands have options for it; a certificate without a rule is refused."""
    server = tls_server(start_server, files, file)
    cert, key = files.identity("trainer", URI)
    assert len(list(DataLoader(RemoteDataset(server.url, "many", ca=files.ca, cert=cert, key=key), 1000))) == 100
    done = piped(TOOLS, "stats", server.url, "--ca", files.ca, "--cert", cert, "--key", key, "-o", "json")
    assert done.code == 0, done
    other, other_key = files.identity("other", "spiffe://example/ns/audio/sa/trainer")
    with pytest.raises(Forbidden, match="'certificate:spiffe://example/ns/audio/sa/trainer' has no permissions"):
        RemoteDataset(server.url, "many", ca=files.ca, cert=other, key=other_key)


def test_a_websocket_has_the_certificate_of_its_connection(start_server: StartServer, files: Files, file: Path) -> None:
    """Also one without permissions is identified, and refused before it is accepted."""
    server = tls_server(start_server, files, file)
    where = f"{server.url.replace('https', 'wss')}/v1/loaders"
    context = context_of(files, "trainer")
    with httpx.Client(base_url=server.url, verify=context, trust_env=False) as client:
        spec = {"dataset": "many", "batch_size": 10}
        key = client.post("/v1/loaders", json=spec).raise_for_status().json()["key"]
    with connect(f"{where}/{key}/stream", ssl=context, proxy=None) as socket:
        socket.ping().wait(30)
    other = context_of(files, "other", "spiffe://example/ns/audio/sa/trainer")
    with pytest.raises(InvalidStatus) as refused, connect(f"{where}/{key}/stream", ssl=other, proxy=None):
        pass
    assert refused.value.response.status_code == 403


def test_an_epoch_outlives_its_certificate(start_server: StartServer, files: Files, file: Path) -> None:
    """When the certificate has expired on an open connection, the client connects with the one in its files."""
    server = tls_server(start_server, files, file)
    cert, key = files.identity("short", URI, seconds=4)
    until = time.time() + 4
    dataset = RemoteDataset(server.url, "many", ca=files.ca, cert=cert, key=key)
    batches = iter(DataLoader(dataset, 100, num_workers=1, prefetch_factor=2, output="numpy"))
    seen = next(batches).tolist()
    eventually(lambda: time.time() > until)
    files.identity("short", URI)
    seen += [index for batch in batches for index in batch.tolist()]
    assert seen == list(range(100_000))


def test_files_that_are_being_replaced_keep_the_previous_certificate(files: Files) -> None:
    """A changed certificate is loaded once it matches its key."""
    cert, key = files.identity("replaced", URI)
    credentials = Credentials(ca=files.ca, cert=cert, key=key)
    first = credentials.context()
    assert credentials.context() is first
    Path(cert).write_text("incomplete")
    assert credentials.context() is first
    files.identity("replaced", URI)
    assert credentials.context() is not first


def test_a_revoked_certificate_ends_open_requests(start_server: StartServer, files: Files, file: Path) -> None:
    """A rule without scopes before the others revokes it, within seconds and without a restart."""
    server = tls_server(start_server, files, file)
    with (
        httpx.Client(base_url=server.url, verify=context_of(files, "trainer"), trust_env=False, timeout=60) as client,
        client.stream("GET", "/stats/stream") as events,
    ):
        lines = events.iter_lines()
        next(lines)
        write(file, f'[[certificates.rules]]\nmatch = {{ uri = "{URI}" }}\nscopes = []\n{CERTIFICATES}')
        assert all(isinstance(line, str) for line in lines), "the stream ends by itself"
        found: dict[str, Any] = client.get("/stats").json()
    assert (found["code"], "a rule without scopes matches" in found["detail"]) == ("Forbidden", True)
