"""Authentication and authorization: real servers with tokens, clients with and without, and secrecy of tokens."""

from __future__ import annotations

import json
import logging
import pickle
import re
import secrets
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.core import ParameterSource

from teleloader import DataLoader, RemoteDataset
from teleloader.api import credentials
from teleloader_server import serve
from teleloader_server.cli.commands import server as server_command
from teleloader_server.config import ConfigError
from teleloader_shared.errors import AccessDenied, Forbidden, Unauthorized, UnknownDataset
from teleloader_shared.spec import LoaderSpec
from tests.conftest import ServerProcess, StartServer, eventually
from tests.end_to_end.terminal import SERVER, TOOLS, piped

NUMBERS = "tests.end_to_end.hosted:numbers"
MANY = "tests.end_to_end.hosted:many"


class TokenTable:
    """Token file and its tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries: dict[str, str] = {}
        self.secrets: dict[str, str] = {}

    def add(self, name: str, *scopes: str, **fields: str) -> str:
        """Create a token, without writing the file."""
        token = secrets.token_urlsafe(24)
        said = {"token": f'"{token}"', "scopes": json.dumps(scopes or ("read", "stats")), **fields}
        self._entries[name] = f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in said.items())
        self.secrets[name] = token
        return token

    def remove(self, name: str) -> None:
        """Remove a token, without writing the file."""
        del self._entries[name]

    def write(self) -> str:
        """Write the file with the current tokens atomically; return its path."""
        new = self.path.with_suffix(".new")
        new.touch(0o600)
        new.write_text("\n".join(self._entries.values()))
        new.replace(self.path)
        return str(self.path)


@pytest.fixture
def table(tmp_path: Path) -> TokenTable:
    """Return an empty table."""
    return TokenTable(tmp_path / "tokens.toml")


@pytest.fixture(autouse=True)
def no_token_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings of the tests' own environment."""
    for name in ("TOKEN", "TOKEN_FILE", "CA", "CERT", "KEY"):
        monkeypatch.delenv(f"TELELOADER_{name}", raising=False)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> TokenTable:
    """Return a table with tokens of all kinds."""
    made = TokenTable(tmp_path_factory.mktemp("tokens") / "tokens.toml")
    made.add("all")
    made.add("numbers", "read:numbers")
    made.add("figures", "stats")
    made.add("boss", "admin")
    made.add("old", expires="2020-01-01T00:00:00Z")
    made.write()
    return made


@pytest.fixture(scope="module")
def server(tables: TokenTable) -> Iterator[ServerProcess]:
    """Run a server with these tokens, and check its log at the end."""
    running = ServerProcess("--port", "0", NUMBERS, MANY, "--num-workers", "1", "--debug", "--tokens", str(tables.path))
    yield running
    assert running.end() == 0
    log = "".join(running.log)
    assert "Traceback" not in log
    for token in tables.secrets.values():
        assert token not in log


def spec(dataset: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a registration."""
    return {"dataset": dataset, "batch_size": 4, **fields}


def asker(url: str, token: str | None) -> httpx.Client:
    """Return a client with a token."""
    return httpx.Client(base_url=url, timeout=30, headers={} if token is None else {"Authorization": f"Bearer {token}"})


PATHS = (
    "/v1/datasets", "/v1/datasets/numbers", "/v1/loaders/x", "/v1/loaders/x/epochs/0/batches/0",
    "/v1/loaders/x/epochs/0/batches?ranges=0:1", "/stats", "/stats/stream", "/metrics", "/openapi.json", "/docs",
)  # fmt: skip


def test_a_registry_that_refuses_the_token_is_an_error_at_once(server: ServerProcess) -> None:
    """As for a server that is not found through a registry: a retry would not help."""
    with pytest.raises(Unauthorized, match=f"no server found through registry.{server.url}: .*unknown token"):
        RemoteDataset(f"registry+{server.url}", "numbers", token="unknown", reconnect_timeout=600)


@pytest.mark.parametrize("token", [None, "not-one-of-the-servers-tokens", "old", "\N{SNOWMAN}"])
def test_without_a_valid_token_nothing_is_revealed(
    server: ServerProcess, tables: TokenTable, token: str | None
) -> None:
    """All endpoints except probes respond with 401, whether the resource exists or not."""
    shown = tables.secrets.get(str(token), token)
    with httpx.Client(base_url=server.url) as client:
        headers = httpx.Headers() if shown is None else httpx.Headers({b"Authorization": f"Bearer {shown}".encode()})
        for path in PATHS:
            answer = client.get(path, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (401, "Unauthorized"), path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert shown is None or shown not in answer.text
        for method, path in (("POST", "/v1/loaders"), ("DELETE", "/v1/loaders/x"), ("POST", PATHS[4])):
            assert client.request(method, path, headers=headers).status_code == 401
        assert client.get("/healthz", headers=headers).status_code == 200
        assert client.get("/readyz", headers=headers).status_code == 200


def test_a_token_is_good_for_what_its_scopes_say(server: ServerProcess, tables: TokenTable) -> None:
    """Other requests are rejected with the required scope."""
    tokens = tables.secrets
    with asker(server.url, tokens["boss"]) as boss:
        keys = {name: boss.post("/v1/loaders", json=spec(name)).json()["key"] for name in ("numbers", "many")}
        assert boss.get("/stats").status_code == 200
    with asker(server.url, tokens["figures"]) as client:
        assert client.get("/stats").status_code == 200
        assert client.get("/metrics").status_code == 200
        for path in PATHS[:5]:
            assert client.get(path).json()["code"] == "Forbidden"
    with asker(server.url, tokens["numbers"]) as client:
        assert client.get("/stats").status_code == 403
        assert [info["name"] for info in client.get("/v1/datasets").json()] == ["numbers"]
        assert client.get("/v1/datasets/numbers").status_code == 200
        for name in ("many", "unheard-of"):
            assert client.get(f"/v1/datasets/{name}").json()["code"] == "Forbidden"
            assert client.post("/v1/loaders", json=spec(name)).json()["code"] == "Forbidden"
        of_numbers, of_many = (f"/v1/loaders/{keys[name]}/epochs/0/batches" for name in ("numbers", "many"))
        assert client.get(f"{of_numbers}/3").status_code == 200
        assert client.get(f"{of_numbers}?ranges=0:3&ready=true").status_code == 200
        for refused in (
            client.get(f"/v1/loaders/{keys['many']}"), client.delete(f"/v1/loaders/{keys['many']}"),
            client.get(f"{of_many}/3"), client.get(f"{of_many}?ranges=0:3"), client.post(of_many),
        ):  # fmt: skip
            assert (refused.status_code, refused.json()["code"]) == (403, "Forbidden")
            assert "the request requires 'read:many'" in refused.json()["detail"]


def test_what_holds_up_others_needs_admin(server: ServerProcess, tables: TokenTable) -> None:
    """In-process loading, which blocks other requests, requires the scope admin even where --debug allows it."""
    own = spec("numbers", session="own", in_process=True)
    for name, status in (("all", 403), ("boss", 200)):
        with asker(server.url, tables.secrets[name]) as client:
            assert client.post("/v1/loaders", json=own).status_code == status


# -- the client


def test_a_client_with_a_token_is_authenticated(
    server: ServerProcess, tables: TokenTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token may be an argument, an environment variable, or in a file that a variable names."""
    token = tables.secrets["all"]
    batches = list(DataLoader(RemoteDataset(server.url, "numbers", token=token), 10, output="numpy"))
    assert len(batches) == 10
    monkeypatch.setenv("TELELOADER_TOKEN", token)
    assert len(RemoteDataset(server.url, "numbers")) == 100
    monkeypatch.delenv("TELELOADER_TOKEN")
    (tmp_path / "token").write_text(f"{token}\n")
    monkeypatch.setenv("TELELOADER_TOKEN_FILE", str(tmp_path / "token"))
    assert RemoteDataset(server.url, "numbers")[7][1] == 49.0


@pytest.mark.parametrize(
    ("token", "kind", "advice"),
    [
        (None, Unauthorized, "Set TELELOADER_TOKEN"),
        ("not-one-of-the-servers-tokens", Unauthorized, "may have been revoked"),
        ("old", Unauthorized, "'old' has expired"),
        ("figures", Forbidden, "requires 'read'"),
        ("numbers", Forbidden, "requires 'read:many'"),
    ],
)
def test_a_client_without_a_token_gets_an_error_at_once(
    server: ServerProcess, tables: TokenTable, token: str | None, kind: type[AccessDenied], advice: str
) -> None:
    """A client without a token raises an error without retries."""
    with pytest.raises(kind, match=advice):
        RemoteDataset(server.url, "many", token=tables.secrets.get(str(token), token), reconnect_timeout=1e9)


def test_an_unknown_dataset_is_still_reported(server: ServerProcess, tables: TokenTable) -> None:
    """Tokens for all datasets get the error for an unknown dataset."""
    with pytest.raises(UnknownDataset, match="hosts 'numbers', 'many'"):
        RemoteDataset(server.url, "nothing", token=tables.secrets["all"])


@pytest.mark.parametrize("url", ["http://user:{}@127.0.0.1:1", "http://{}@127.0.0.1:1", "http://127.0.0.1:1/?t={}"])
def test_a_url_with_a_secret_in_it_is_refused(url: str) -> None:
    """URLs with credentials are rejected, and not repeated, because URLs appear in logs and errors."""
    with pytest.raises(ValueError, match="a password, query or fragment is not allowed") as refused:
        RemoteDataset(url.format("the-secret-of-it"))
    assert "the-secret-of-it" not in str(refused.value)


@pytest.mark.parametrize("token", ["", "two words", "line\r\nX-Forged: 1", "\N{SNOWMAN}" * 20, "x" * 16_385])
def test_what_cannot_be_a_token_is_refused(token: str) -> None:
    """An invalid token is rejected before a request is sent, and not repeated in the error."""
    with pytest.raises(ValueError, match="invalid token in the argument token: expected letters") as refused:
        RemoteDataset("http://127.0.0.1:1", token=token)
    assert not token or token not in str(refused.value)


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the path and the environment variable."""
    monkeypatch.setenv("TELELOADER_TOKEN_FILE", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"cannot read the token in .*nowhere \(TELELOADER_TOKEN_FILE\): No such file"):
        RemoteDataset("http://127.0.0.1:1")


# -- rotation


def test_tokens_are_replaced_while_training_goes_on(
    table: TokenTable, tmp_path: Path, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token is replaced in both files without restarts: the new one is added first, then the old one removed."""
    file = tmp_path / "token"
    file.write_text(table.add("first"))
    server = start_server(MANY, "--num-workers", "1", "--tokens", table.write())
    monkeypatch.setenv("TELELOADER_TOKEN_FILE", str(file))
    loader = DataLoader(RemoteDataset(server.url, "many"), 10, output="numpy")
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(10)]
    second = table.add("second")
    for change, token, status in ((None, second, 200), ("first", table.secrets["first"], 401)):
        if change is not None:
            file.write_text(second)
            table.remove(change)
        table.write()
        with asker(server.url, token) as client:
            while client.get("/v1/datasets").status_code != status:
                pass
    server.await_line(r"reloaded .*tokens\.toml: 1 token \(second\)")
    seen += [batch.tolist() for batch in batches]
    assert [index for batch in seen for index in batch] == list(range(100_000))


@pytest.mark.parametrize("others", [("other",), ()], ids=["one of two", "the last one"])
def test_a_token_that_is_taken_away_stops_its_owner(
    table: TokenTable, start_server: StartServer, others: tuple[str, ...]
) -> None:
    """Revocation ends epochs with an error that has the reason, and closes endless responses."""
    token = table.add("first")
    for name in others:
        table.add(name)
    server = start_server(MANY, "--num-workers", "1", "--tokens", table.write())
    batches = iter(DataLoader(RemoteDataset(server.url, "many", token=token), 10, output="numpy"))
    next(batches)
    with asker(server.url, token) as client, client.stream("GET", "/stats/stream?interval=0.5") as events:
        lines = events.iter_lines()
        next(lines)
        table.remove("first")
        table.write()
        assert all(isinstance(line, str) for line in lines), "the stream ends by itself"
    with pytest.raises(Unauthorized, match=f"^{re.escape(server.url)} refused the request: .* may have been revoked"):
        list(batches)


# -- starting


@pytest.mark.parametrize("given", [(), ("--tokens",)])
def test_a_server_that_others_reach_needs_tokens(given: tuple[str, ...], table: TokenTable) -> None:
    """The server does not start, and the error states how to create a token."""
    table.path.write_text("")
    done = piped(SERVER, NUMBERS, "--host", "0.0.0.0", "--port", "0", *given, *([str(table.path)] if given else []))
    assert done.code == 2
    assert "teleloader-server token add" in done.err
    assert "Traceback" not in done.err


def test_a_server_without_its_token_file_rejects_all_clients(table: TokenTable, start_server: StartServer) -> None:
    """A server that requires tokens rejects all clients while its token file is missing."""
    token = table.add("first")
    server = start_server(NUMBERS, "--num-workers", "1", "--tokens", table.write())
    table.path.unlink()
    server.await_line(r"tokens\.toml is empty or missing: clients cannot authenticate")
    for refused in (token, None, "no-token-of-this-server"):
        with asker(server.url, refused) as client:
            assert client.get("/v1/datasets").status_code == 401
            assert client.get("/stats").status_code == 401
    table.write()
    server.await_line(r"reloaded .*tokens\.toml: 1 token \(first\)")
    assert len(RemoteDataset(server.url, token=token)) == 100


def test_a_server_without_tokens_requires_the_option_insecure(start_server: StartServer) -> None:
    """With --insecure the server starts without tokens, and logs a warning."""
    server = start_server(NUMBERS, "--num-workers", "1", "--host", "0.0.0.0", "--insecure")
    server.await_line("WARNING authentication is disabled, and the server sends batches without encryption")
    assert httpx.get(f"{server.url}/v1/datasets").status_code == 200


def test_a_server_reads_its_own_variable_only(
    table: TokenTable, tmp_path: Path, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ignores the variable with a client's token, and starts."""
    token = secrets.token_urlsafe(24)
    (tmp_path / "token").write_text(token)
    monkeypatch.setenv("TELELOADER_TOKEN", token)
    monkeypatch.setenv("TELELOADER_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("TELELOADER_TOKENS", str(tmp_path / "nowhere"))
    refused = piped(SERVER, NUMBERS, "--host", "0.0.0.0", "--port", "0")
    assert (refused.code, "without tokens" in refused.err) == (2, True), refused
    table.add("of-the-server")
    monkeypatch.setenv("TELELOADER_SERVER_TOKENS", table.write())
    server = start_server(NUMBERS, "--num-workers", "1", "--host", "0.0.0.0")
    with pytest.raises(Unauthorized):
        RemoteDataset(server.url)
    assert len(RemoteDataset(server.url, token=table.secrets["of-the-server"])) == 100


def test_no_option_of_the_server_reads_a_variable_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of the client's variables set, each option of the server has its default."""
    variables = {value for name, value in vars(credentials).items() if name.endswith("_VARIABLE")}
    assert {"TELELOADER_TOKEN", "TELELOADER_TOKEN_FILE", "TELELOADER_CA"} <= variables

    def from_environment() -> list[str]:
        context = server_command.make_context("teleloader-server", ["--demo"], auto_envvar_prefix="TELELOADER")
        return [name for name in context.params if context.get_parameter_source(name) == ParameterSource.ENVIRONMENT]

    for variable in variables:
        monkeypatch.setenv(variable, "x")
    assert from_environment() == []
    monkeypatch.setenv("TELELOADER_SERVER_TOKENS", "tokens.toml")
    assert from_environment() == ["tokens"]


def test_one_token_by_a_file(tmp_path: Path, start_server: StartServer) -> None:
    """A secret's file serves both sides; each names it by its own variable or option."""
    token = secrets.token_urlsafe(24)
    (tmp_path / "token").write_text(token)
    server = start_server(NUMBERS, "--num-workers", "1", "--token-file", str(tmp_path / "token"))
    assert len(RemoteDataset(server.url, token=token)) == 100
    assert httpx.get(f"{server.url}/v1/datasets").status_code == 401
    assert not any(token in line for line in server.log)


def test_serve_keeps_to_the_same_rule() -> None:
    """serve() on a non-loopback address requires a token, unless authentication is explicitly disabled."""
    with pytest.raises(ConfigError, match="without tokens"), serve([1, 2], host_address="0.0.0.0"):
        pass
    with serve([1, 2], num_workers=0, host_address="0.0.0.0", insecure=True) as url:
        assert len(RemoteDataset(url)) == 2
    token = secrets.token_urlsafe(24)
    with serve([1, 2], num_workers=0, host_address="0.0.0.0", token=token) as url:
        assert [RemoteDataset(url, token=token)[i] for i in (0, 1)] == [1, 2]
        with pytest.raises(Unauthorized):
            RemoteDataset(url)


def test_the_tools_take_a_token_file(server: ServerProcess, tables: TokenTable, tmp_path: Path) -> None:
    """The tools accept a token file, and no token as an argument, which other users could see."""
    file = tmp_path / "token"
    file.write_text(tables.secrets["all"])
    commands: list[tuple[str, ...]] = [
        ("stats", server.url),
        *((name, server.url, "numbers") for name in ("peek", "audit")),
        ("bench", server.url, "numbers", "--seconds", "0.2"),
    ]
    for arguments in commands:
        refused = piped(TOOLS, *arguments)
        assert (refused.code, "Set TELELOADER_TOKEN" in refused.err) == (1, True), refused
        done = piped(TOOLS, *arguments, "--token-file", str(file))
        assert done.code == 0, done
        assert tables.secrets["all"] not in done.out + done.err


# -- secrets show nowhere


def test_the_token_shows_nowhere(
    table: TokenTable, start_server: StartServer, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """No log, error, repr, pickle or saved state contains the token, whatever fails."""
    token = table.add("first")
    server = start_server(
        "failing=tests.end_to_end.hosted:failing", MANY, "--num-workers", "1", "--tokens", table.write(),
        "--log-level", "debug",
    )  # fmt: skip
    caplog.set_level(logging.DEBUG)
    said: list[str] = []

    def note(action: Callable[[], object]) -> None:
        try:
            said.append(repr(action()))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked at
            said.append("".join(traceback.TracebackException.from_exception(error, capture_locals=False).format()))
            said.append(repr(error) + repr(error.args))

    remote = RemoteDataset(server.url, "failing", token=token, reconnect_timeout=0.2)
    loader = DataLoader(remote, 4, output="numpy")
    note(lambda: list(loader))
    note(lambda: remote)
    note(lambda: vars(remote.servers.known[0]))
    note(lambda: (loader, loader.state_dict()))
    note(lambda: pickle.dumps(remote))
    note(lambda: pickle.dumps(loader))
    note(lambda: RemoteDataset(server.url, "nothing", token=token))
    note(lambda: remote.batch(LoaderSpec(dataset="failing", batch_size=4), 0, 10**6))
    many = iter(DataLoader(RemoteDataset(server.url, "many", token=token, reconnect_timeout=0.2), 4, output="numpy"))
    next(many)
    said.append(httpx.get(f"{server.url}/stats", headers={"Authorization": f"Bearer {token}"}).text)
    table.add("second")
    table.remove("first")
    table.write()
    note(lambda: list(many))

    def is_revoked() -> bool:
        note(lambda: RemoteDataset(server.url, "many", token=token))
        return "may have been revoked" in said[-1]

    eventually(is_revoked)
    server.kill()
    note(lambda: RemoteDataset(server.url, "many", token=token, reconnect_timeout=0.2))
    everything = "\n".join([*said, *caplog.messages, caplog.text, *server.log])
    assert "ValueError: sample 17 is damaged" in everything
    assert "may have been revoked" in everything
    assert "cannot connect to" in everything
    assert token not in everything
    assert token[:12] not in everything


def test_a_pickled_dataset_takes_its_token_from_where_it_is_opened(
    server: ServerProcess, tables: TokenTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle contains no token; unpickling uses that of the new environment."""
    pickled = pickle.dumps(RemoteDataset(server.url, "numbers", token=tables.secrets["all"]))
    with pytest.raises(Unauthorized):
        pickle.loads(pickled)[0]
    monkeypatch.setenv("TELELOADER_TOKEN", tables.secrets["all"])
    assert pickle.loads(pickled)[3] == [3, 9.0]


def test_no_command_line_shows_a_token() -> None:
    """No tool has an option for a token."""
    for command in ([SERVER], [TOOLS, "stats"], [TOOLS, "bench"], [TOOLS, "peek"], [TOOLS, "audit"]):
        options = piped(command[0], *command[1:], "--help").out.split()
        assert "--token-file" in options
        assert "--token" not in options


def test_the_expiry_of_tokens_is_a_metric(server: ServerProcess, tables: TokenTable) -> None:
    """Tokens that expire are listed by name, also those that have expired; the others are omitted."""
    with asker(server.url, tables.secrets["figures"]) as client:
        text = client.get("/metrics").raise_for_status().text
    found = re.findall(r'^teleloader_token_expiry_timestamp_seconds\{token="(\w+)"\} (\S+)$', text, re.MULTILINE)
    assert [(name, float(at)) for name, at in found] == [("old", 1577836800.0)]
