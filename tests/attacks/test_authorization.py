"""Attacks on authorization: a token for one dataset, a revoked token, and routes without authorization."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route
from websockets.exceptions import ConnectionClosed, InvalidStatus

from teleloader_server.dispatch.service import LoaderService
from teleloader_server.limits import Limits
from teleloader_server.loading.datasets import host
from teleloader_server.permissions import READ, UNCHECKED, needs
from teleloader_server.web.app import create_app
from teleloader_server.web.authentication import GuardedRoute
from teleloader_server.web.direct_routes import DirectRoute
from teleloader_server.workers.factory import ObjectPools
from teleloader_shared import codec
from teleloader_shared.codec import BatchId
from teleloader_shared.messages import CONSUMER_HEADER, REPORT_HEADER
from teleloader_shared.spec import LoaderSpec
from tests.conftest import ServerProcess, StartServer, eventually
from tests.end_to_end.test_access import TokenTable
from tests.end_to_end.test_websocket import send_range, stream
from tests.raw import HOST, Raw

HOSTED = "tests.end_to_end.hosted:"


def bearer(token: str) -> bytes:
    """Return the Authorization header of a raw request."""
    return f"Authorization: Bearer {token}\r\n".encode()


def client_of(url: str, token: str) -> httpx.Client:
    """Return a client with a token."""
    return httpx.Client(base_url=url, timeout=30, headers={"Authorization": f"Bearer {token}"}, trust_env=False)


@pytest.fixture
def table(tmp_path: Path) -> TokenTable:
    """Return an empty table of tokens."""
    return TokenTable(tmp_path / "tokens.toml")


# -- a token for one dataset


@pytest.mark.parametrize(
    "path",
    ["", "/epochs/0/batches/3", "/epochs/0/batches?ranges=0:3&ready=true", "/epochs/0/batches?ranges=0:3"],
    ids=["registration", "one batch", "ready batches", "streamed batches"],
)
def test_a_request_that_waits_is_authorized_for_the_loader_that_it_finds(
    start_server: StartServer, table: TokenTable, path: str
) -> None:
    """A token of `read:numbers` gets nothing of `many`, also if its request comes before the loader is registered.

    A loader's key can be computed. The attacker sends requests beyond its rate, so that the server holds them for up to
    a second; the owner registers the loader meanwhile. No response may be 200.
    """
    attacker, owner = table.add("attacker", "read:numbers"), table.add("owner")
    limit = ("--limit", "max_requests_per_second=8")
    server = start_server(f"{HOSTED}numbers", f"{HOSTED}many", "--num-workers", "1", "--tokens", table.write(), *limit)
    with client_of(server.url, owner) as client, ExitStack() as stack:
        fingerprint = client.get("/v1/datasets/many").json()["fingerprint"]
        spec = LoaderSpec(dataset="many", batch_size=4, fingerprint=fingerprint)
        requests = [stack.enter_context(Raw(server.url)) for _ in range(24)]
        for request in requests:
            request.send_get(f"/v1/loaders/{spec.key}{path}", bearer(attacker))
        statuses = [requests[0].receive().status]
        assert client.post("/v1/loaders", json=spec.to_json()).json()["key"] == spec.key
        statuses += [request.receive().status for request in requests[1:]]
    assert 200 not in statuses
    assert 403 in statuses, "some were held until the loader was there"


def test_a_websocket_that_waits_is_authorized_for_the_loader_that_it_finds(
    start_server: StartServer, table: TokenTable
) -> None:
    """Each message of a WebSocket is authorized for the loader that exists when it is processed, as over HTTP."""
    attacker, owner = table.add("attacker", "read:numbers"), table.add("owner")
    limit = ("--limit", "max_requests_per_second=4")
    server = start_server(f"{HOSTED}numbers", f"{HOSTED}many", "--num-workers", "1", "--tokens", table.write(), *limit)
    with client_of(server.url, owner) as client, client_of(server.url, attacker) as filler:
        fingerprint = client.get("/v1/datasets/many").json()["fingerprint"]
        spec = LoaderSpec(dataset="many", batch_size=4, fingerprint=fingerprint)
        while filler.get("/v1/datasets").elapsed.total_seconds() < 0.2:
            pass  # its burst is used up: from now on its requests are held
        with pytest.raises((ConnectionClosed, InvalidStatus)), ExitStack() as stack:  # noqa: PT012 - where is not said
            socket = stack.enter_context(stream(server.url, spec.key, Authorization=f"Bearer {attacker}"))
            client.post("/v1/loaders", json=spec.to_json()).raise_for_status()
            send_range(socket, 0, 0, 3)
            while True:
                assert isinstance(socket.recv(30), str), "a batch of a dataset that the token is not for"


def test_each_message_of_a_websocket_is_authorized_for_its_loader(start_server: StartServer, table: TokenTable) -> None:
    """A token that loses the dataset's scope receives no further batches on its open connection."""
    table.add("owner")
    token = table.add("first")
    server = start_server(f"{HOSTED}numbers", f"{HOSTED}many", "--num-workers", "1", "--tokens", table.write())
    with client_of(server.url, token) as client:
        key = client.post("/v1/loaders", json={"dataset": "many", "batch_size": 4}).json()["key"]
        with stream(server.url, key, Authorization=f"Bearer {token}") as socket:
            table.add("first", "read:numbers", token=f'"{token}"')
            table.write()
            problem = json.loads(socket.recv(30))
    assert problem["code"] == "Forbidden", "it is told so at once, though nothing was asked for"


# -- a revoked token


@pytest.fixture
def blocked(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: TokenTable
) -> ServerProcess:
    """Run a server whose dataset `slow` never returns a sample, with a token `first`."""
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    table.add("other")
    table.add("first")
    return start_server(f"{HOSTED}slow", f"{HOSTED}numbers", "--num-workers", "1", "--tokens", table.write())


def revoke(server: ServerProcess, table: TokenTable) -> None:
    """Remove the token `first`, and wait until the server has noticed."""
    table.remove("first")
    table.write()
    server.await_line(r"reloaded .*tokens\.toml")


@pytest.mark.parametrize(
    "path", ["/epochs/0/batches/3", "/epochs/0/batches?ranges=0:3&ready=true"], ids=["one batch", "ready batches"]
)
def test_a_request_that_waits_for_a_batch_ends_when_its_token_is_revoked(
    blocked: ServerProcess, table: TokenTable, path: str
) -> None:
    """The request gets status 401 immediately, although its batch is never computed."""
    token = table.secrets["first"]
    with client_of(blocked.url, token) as client, Raw(blocked.url) as waiting:
        key = client.post("/v1/loaders", json={"dataset": "slow", "batch_size": 1}).json()["key"]
        waiting.send_get(f"/v1/loaders/{key}{path}", bearer(token))
        eventually(lambda: client.get("/stats").json()["consumers_total"] == 1)
        revoke(blocked, table)
        assert waiting.receive().problem["code"] == "Unauthorized"


@pytest.mark.parametrize("path", ["/stats/stream?interval=60", "/v1/loaders/{key}/epochs/0/batches?ranges=0:3"])
def test_a_stream_ends_when_its_token_is_revoked(blocked: ServerProcess, table: TokenTable, path: str) -> None:
    """The server closes the stream immediately, long before its next part is due."""
    token = table.secrets["first"]
    with client_of(blocked.url, token) as client, Raw(blocked.url) as waiting:
        key = client.post("/v1/loaders", json={"dataset": "slow", "batch_size": 1}).json()["key"]
        waiting.send_get(path.format(key=key), bearer(token) + b"Connection: close\r\n")
        assert b"200 OK" in waiting.socket.recv(1 << 16)
        revoke(blocked, table)
        waiting.receive_all()


def test_an_idle_websocket_ends_when_its_token_is_revoked(blocked: ServerProcess, table: TokenTable) -> None:
    """The server sends the reason and closes the WebSocket, with or without a pending request."""
    token = table.secrets["first"]
    with client_of(blocked.url, token) as client:
        key = client.post("/v1/loaders", json={"dataset": "slow", "batch_size": 1}).json()["key"]
        sockets = [stream(blocked.url, key, Authorization=f"Bearer {token}") for _ in range(2)]
        with sockets[0] as idle, sockets[1] as waiting:
            waiting.send(msgpack.packb([0, 0, 4]))
            eventually(lambda: client.get("/stats").json()["consumers_total"] == 1)
            revoke(blocked, table)
            for socket in (idle, waiting):
                assert json.loads(socket.recv(30))["code"] == "Unauthorized"


def test_a_token_that_is_revoked_while_the_body_arrives_gets_nothing(blocked: ServerProcess, table: TokenTable) -> None:
    """A request is authorized when it is processed, not when its headers arrive."""
    token = table.secrets["first"]
    with client_of(blocked.url, token) as client, Raw(blocked.url) as late:
        spec = {"dataset": "numbers", "order": "client", "session": "s", "batch_size": 2}
        key = client.post("/v1/loaders", json=spec).json()["key"]
        body = codec.to_bytes(BatchId(key, 0, 0), np.array([1, 2]))
        head = f"POST /v1/loaders/{key}/epochs/0/batches HTTP/1.1\r\nContent-Length: {len(body)}\r\n"
        late.send(head.encode() + HOST + bearer(token) + b"\r\n" + body[:10])
        revoke(blocked, table)
        late.send(body[10:])
        assert late.receive().problem["code"] == "Unauthorized"


def test_a_token_ends_what_waits_when_it_expires(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: TokenTable
) -> None:
    """A pending request ends when its token expires, without a change of the token file."""
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    expires = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 20))
    token = table.add("first", expires=expires)
    server = start_server(f"{HOSTED}slow", "--num-workers", "1", "--tokens", table.write())
    with client_of(server.url, token) as client, Raw(server.url) as waiting:
        key = client.post("/v1/loaders", json={"dataset": "slow", "batch_size": 1}).json()["key"]
        waiting.send_get(f"/v1/loaders/{key}/epochs/0/batches/3", bearer(token))
        assert "has expired" in waiting.receive().problem["detail"]


def test_a_loader_in_the_servers_process_ends_with_the_scope_admin(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: TokenTable
) -> None:
    """Each use of an in-process loader checks the scope `admin`; losing the scope ends its pending requests."""
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    token = table.add("first", "admin")
    server = start_server(
        f"{HOSTED}numbers", f"{HOSTED}slow", "--num-workers", "1", "--debug", "--tokens", table.write()
    )
    with client_of(server.url, token) as client, Raw(server.url) as waiting:
        keys = [
            client.post("/v1/loaders", json={"dataset": name, "session": "s", "in_process": True}).json()["key"]
            for name in ("numbers", "slow")
        ]
        assert client.get(f"/v1/loaders/{keys[0]}/epochs/0/batches/0").status_code == 200
        waiting.send_get(f"/v1/loaders/{keys[1]}/epochs/0/batches/0", bearer(token))
        eventually(lambda: any(consumer["dataset"] == "slow" for consumer in client.get("/stats").json()["consumers"]))
        table.add("first", "read", token=f'"{token}"')
        table.write()
        assert waiting.receive().problem["code"] == "Forbidden"
        for path in ("", "/epochs/0/batches/1"):
            answer = client.get(f"/v1/loaders/{keys[0]}{path}")
            assert (answer.status_code, answer.json()["code"]) == (403, "Forbidden")
        (tmp_path / "gate").touch()


# -- visibility of other users' data


def test_stats_separate_consumers_of_different_tokens(start_server: StartServer, table: TokenTable) -> None:
    """Clients choose the names of consumers, so two tokens may use the same name for the same loader and epoch."""
    tokens = {name: table.add(name) for name in ("first", "second")}
    server = start_server(f"{HOSTED}numbers", "--num-workers", "1", "--tokens", table.write())
    for count, token in enumerate(tokens.values(), 1):
        with client_of(server.url, token) as client:
            key = client.post("/v1/loaders", json={"dataset": "numbers", "batch_size": 4}).json()["key"]
            for k in range(count):
                path = f"/v1/loaders/{key}/epochs/0/batches/{k}"
                assert client.get(path, headers={"Teleloader-Consumer": "trainer"}).status_code == 200
            consumers = client.get("/stats").json()["consumers"]
    found = {consumer["token"]: (consumer["consumer"], consumer["batches_sent"]) for consumer in consumers}
    assert found == {"first": ("trainer", 1), "second": ("trainer", 2)}


# -- all routes

KEY = "0" * 32
ROUTES: dict[tuple[str, str], tuple[type[Any], str]] = {
    ("GET", "/v1/datasets"): (GuardedRoute, "read"),
    ("GET", "/v1/datasets/{name}"): (GuardedRoute, "read"),
    ("POST", "/v1/loaders"): (GuardedRoute, "read"),
    ("GET", "/v1/loaders/{key}"): (GuardedRoute, "read"),
    ("DELETE", "/v1/loaders/{key}"): (GuardedRoute, "read"),
    ("GET", "/v1/loaders/{key}/epochs/{epoch}/batches/{k}"): (DirectRoute, "read"),
    ("GET", "/v1/loaders/{key}/epochs/{epoch}/batches"): (DirectRoute, "read"),
    ("POST", "/v1/loaders/{key}/epochs/{epoch}/batches"): (DirectRoute, "read"),
    ("PUT", "/v1/loaders/{key}/epochs/{epoch}/progress"): (GuardedRoute, "read"),
    ("PUT", "/v1/loaders/{key}/epochs/{epoch}/timings"): (GuardedRoute, "read"),
    ("WEBSOCKET", "/v1/loaders/{key}/stream"): (APIWebSocketRoute, "read"),
    ("GET", "/v1/servers"): (GuardedRoute, "read"),
    ("POST", "/v1/servers"): (GuardedRoute, "announce"),
    ("DELETE", "/v1/servers/{instance}"): (GuardedRoute, "announce"),
    ("GET", "/v1/drain"): (GuardedRoute, "admin"),
    ("POST", "/v1/drain"): (GuardedRoute, "admin"),
    ("PUT", "/v1/workers"): (GuardedRoute, "admin"),
    ("POST", "/v1/versions"): (GuardedRoute, "admin"),
    ("DELETE", "/v1/versions/{dataset}"): (GuardedRoute, "admin"),
    ("GET", "/v1/workers/{worker}"): (GuardedRoute, "stats"),
    ("GET", "/v1/workers/{worker}/stack"): (GuardedRoute, "admin"),
    ("GET", "/v1/errors"): (GuardedRoute, "stats"),
    ("GET", "/v1/slow-samples"): (GuardedRoute, "stats"),
    ("GET", "/v1/timeline"): (GuardedRoute, "stats"),
    ("GET", "/stats"): (GuardedRoute, "stats"),
    ("GET", "/stats/history"): (GuardedRoute, "stats"),
    ("GET", "/stats/servers"): (GuardedRoute, "stats"),
    ("GET", "/stats/stream"): (GuardedRoute, "stats"),
    ("GET", "/metrics"): (GuardedRoute, "stats"),
    ("GET", "/openapi.json"): (GuardedRoute, "any"),
    ("GET", "/docs"): (GuardedRoute, "any"),
    ("GET", "/session"): (GuardedRoute, "open"),
    ("POST", "/session"): (GuardedRoute, "open"),
    ("DELETE", "/session"): (GuardedRoute, "open"),
    ("GET", "/healthz"): (GuardedRoute, "unchecked"),
    ("GET", "/readyz"): (GuardedRoute, "unchecked"),
    ("GET", "/"): (Route, "unchecked"),
    ("HEAD", "/"): (Route, "unchecked"),
    ("GET", "/dashboard/{name:path}"): (Route, "unchecked"),
    ("HEAD", "/dashboard/{name:path}"): (Route, "unchecked"),
}
"""Class and required scope of each route; `test_each_route_refuses` tests each route with a required scope."""


def bypasses(app: FastAPI) -> list[str]:
    """Return the routes that are not in `ROUTES`, or differ from it in their class or required scope."""
    found = []
    for route in routes(app.router.routes):
        for method in sorted(getattr(route, "methods", None) or {"WEBSOCKET"}):
            path = getattr(route, "path", "?")
            need = getattr(getattr(route, "endpoint", None), "needs", None)
            if ROUTES.get((method, path)) != (type(route), need):
                found.append(f"{method} {path}")
    return found


def routes(listed: list[Any]) -> Iterator[Any]:
    """Return all routes, including those of included routers."""
    for route in listed:
        inner = getattr(route, "original_router", None)
        if inner is None:
            yield route
        else:
            yield from routes(inner.routes)


@pytest.fixture
def app() -> FastAPI:
    """Return a server's application."""
    limits = Limits()
    return create_app(LoaderService(ObjectPools(lambda: {"x": host([1], name="x")}, limits), limits))


def test_all_routes_are_known(app: FastAPI) -> None:
    """`ROUTES` contains exactly the routes of the server."""
    assert bypasses(app) == []
    served = {
        (method, route.path)
        for route in routes(app.router.routes)
        for method in (getattr(route, "methods", None) or {"WEBSOCKET"})
    }
    assert served == set(ROUTES)


async def leak() -> str:
    """Return a response without authorization."""
    return "samples"


async def plain(scope: Any, receive: Any, send: Any) -> None:
    """Run a plain ASGI application."""
    await PlainTextResponse("samples")(scope, receive, send)


@pytest.mark.parametrize(
    "route",
    [
        APIRoute("/v1/leak", leak),
        APIRoute("/v1/datasets/{name}", leak, methods=["GET"]),
        GuardedRoute("/v1/leak", needs(UNCHECKED)(leak)),
        DirectRoute("/v1/leak", needs(UNCHECKED)(leak)),
        Route("/v1/leak", plain),
        Mount("/v1/leak", plain),
        APIWebSocketRoute("/v1/leak", needs(READ)(leak)),
    ],
    ids=[
        "a route", "a known path", "a guarded route", "a direct route", "a plain route", "an application", "WebSocket",
    ],
)  # fmt: skip
def test_a_new_route_is_found(app: FastAPI, route: Any) -> None:
    """A new route fails `test_all_routes_are_known` until it is added to `ROUTES`, so that it is tested."""
    app.router.routes.append(route)
    assert bypasses(app) != []


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TokenTable, dict[str, str]]]:
    """Run a server with two datasets; yield it with tokens, a loader's key and a session's key."""
    table = TokenTable(tmp_path_factory.mktemp("tokens") / "tokens.toml")
    table.add("owner")
    table.add("attacker", "read:numbers")
    table.add("reader", "read")
    server = ServerProcess(
        "--port", "0", f"{HOSTED}numbers", f"{HOSTED}many", "--num-workers", "1", "--tokens", table.write()
    )
    with client_of(server.url, table.secrets["owner"]) as client:
        specs = {"loader": {"dataset": "many"}, "session": {"dataset": "many", "session": "s", "order": "client"}}
        keys = {name: client.post("/v1/loaders", json=spec).json()["key"] for name, spec in specs.items()}
        yield server.url, table, keys
        for key in keys.values():
            assert client.get(f"/v1/loaders/{key}").status_code == 200, "the attacks ended nothing"
    server.end()


def status_of(url: str, token: str | None, method: str, path: str, key: str) -> int:
    """Return the status of a request for a dataset `many`, or for a loader of it."""
    filled = path.format(name="many", dataset="many", key=key, epoch=0, k=0, instance="i", worker=0)
    filled += "?ranges=0:1" if path.endswith("batches") else ""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    if path.endswith("progress"):
        headers |= {CONSUMER_HEADER: "attacker", REPORT_HEADER: ""}
    if path.endswith("timings"):
        headers |= {CONSUMER_HEADER: "attacker"}
    if method == "WEBSOCKET":
        return websocket_status(url, key, headers)
    body = json.dumps({"dataset": "many"}) if path == "/v1/loaders" else codec.to_bytes(BatchId(key, 0, 0), [1])
    content: Any = body if method == "POST" else None
    with httpx.stream(method, url + filled, headers=headers, content=content, timeout=30, trust_env=False) as answer:
        return answer.status_code


def websocket_status(url: str, key: str, headers: dict[str, str]) -> int:
    """Return the status of a rejection, from the response or from a message; 200 for a batch."""
    try:
        with stream(url, key, **headers) as socket:
            with suppress(ConnectionClosed):  # earlier messages are still received
                socket.send(msgpack.packb([0, 0, 1]))
            message = socket.recv(30)
            status: int = json.loads(message)["status"] if isinstance(message, str) else 200
    except InvalidStatus as refused:
        status = refused.response.status_code
    return status


GUARDED = [(method, path) for (method, path), (_, need) in ROUTES.items() if need not in ("open", "unchecked")]


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_each_route_refuses(served: tuple[str, TokenTable, dict[str, str]], method: str, path: str) -> None:
    """Routes reject requests without a token, with a token for another dataset or scope, and for foreign sessions."""
    url, table, keys = served
    need = ROUTES[method, path][1]
    assert status_of(url, None, method, path, keys["loader"]) == 401
    if need == "any" or (method, path) in (("GET", "/v1/datasets"), ("GET", "/v1/servers")):
        return  # `read:numbers` suffices, for a list without `many`
    assert status_of(url, table.secrets["attacker"], method, path, keys["loader"]) == 403
    if need in ("stats", "announce", "admin"):
        assert status_of(url, table.secrets["reader"], method, path, keys["loader"]) == 403
    if "{key}" in path:
        assert status_of(url, table.secrets["attacker"], method, path, keys["session"]) == 403
        assert status_of(url, table.secrets["reader"], method, path, keys["session"]) == 404


def test_a_list_of_datasets_shows_those_of_the_token(served: tuple[str, TokenTable, dict[str, str]]) -> None:
    """The list contains only the token's datasets, and errors do not name others."""
    url, table, _ = served
    with client_of(url, table.secrets["attacker"]) as client:
        assert [info["name"] for info in client.get("/v1/datasets").json()] == ["numbers"]
        for path in ("/v1/datasets/nothing", f"/v1/loaders/{KEY}"):
            assert "many" not in client.get(path).text
