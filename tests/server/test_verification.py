"""Endpoints of the registry, and the requests that verify announced servers."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.auth.tls import ClientTls, TlsFiles
from teleloader_server.auth.tokens import parse_tokens
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.fleet import registry, verification
from teleloader_server.fleet.registry import instance_of
from teleloader_server.fleet.verification import Unverified, is_loopback, may_connect, verify
from teleloader_server.limits import Limits
from teleloader_server.loading.datasets import host
from teleloader_server.web.app import create_app
from teleloader_server.workers.factory import ObjectPools
from teleloader_shared.directory import Entry, server_url
from tests.end_to_end.certificates import Files

KEY = "k" * 32
TOKEN = "a-token-of-a-test"
ANNOUNCER = f'[server]\ntoken = "{TOKEN}"\nscopes = ["announce", "read"]\n'
LOCAL, REMOTE = ("127.0.0.1", 4000), ("10.0.0.7", 4000)
HEALTHY = json.dumps({"status": "ok", "instance": instance_of(KEY)}).encode()


def response(body: bytes, status: str = "200 OK", headers: bytes = b"") -> bytes:
    """Return the bytes of an HTTP response, after which the connection is closed."""
    head = b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: %d\r\n" % (status.encode(), len(body))
    return head + headers + b"\r\n" + body


class Peer:
    """A server that sends the same bytes to each request, and keeps the requests."""

    def __init__(self, sent: bytes) -> None:
        self.sent = sent
        self.requests: list[bytes] = []
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Respond to one request."""
        try:
            self.requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(self.sent)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has closed the connection
        finally:
            writer.close()


@asynccontextmanager
async def peer(sent: bytes = b"", tls: ssl.SSLContext | None = None, name: str = "127.0.0.1") -> AsyncIterator[Peer]:
    """Run a peer; by default it responds as the instance of `KEY`."""
    found = Peer(sent or response(HEALTHY))
    server = await asyncio.start_server(found.handle, "127.0.0.1", 0, ssl=tls)
    async with server:
        scheme = "http" if tls is None else "https"
        found.url = f"{scheme}://{name}:{server.sockets[0].getsockname()[1]}"
        yield found
        await asyncio.sleep(0.01)  # connections close


def client(app: FastAPI, address: tuple[str, int] = LOCAL, token: str = "") -> httpx.AsyncClient:
    """Return a client of the application that has an IP address."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    transport = httpx.ASGITransport(app, client=address)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers)


def make_app(tokens: str = "") -> FastAPI:
    """Return the application of a registry."""
    limits = Limits()
    service = LoaderService(ObjectPools(lambda: {"x": host([1], name="x")}, limits), limits)
    return create_app(service, Authenticator(fixed=parse_tokens(tokens, "tokens.toml")))


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """A registry without tokens that lists servers at once."""
    monkeypatch.setattr(registry, "STARTUP_DELAY_S", 0.0)
    monkeypatch.setattr(verification, "TIMEOUT_S", 1.0)
    return make_app()


async def urls(clients: httpx.AsyncClient) -> list[str]:
    """Return the URLs that the registry lists."""
    return [server["url"] for server in (await clients.get("/v1/servers")).json()["servers"]]


# -- addresses to which the registry connects


@pytest.mark.parametrize(
    "target",
    ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "0.0.0.0", "::", "169.254.169.254", "fe80::1",
     "::ffff:169.254.169.254", "224.0.0.1", "ff02::1", "255.255.255.255", "64:ff9b::7f00:1", "localhost", "",
     "fd00:ec2::254", "100.100.100.200", "::ffff:168.63.129.16"],
)  # fmt: skip
def test_a_remote_announcer_cannot_reach_addresses_of_the_registrys_machine(target: str) -> None:
    """A remote announcement leads to no loopback, link-local or other special address, in any notation."""
    for announcer in ("10.0.0.7", "192.168.1.4", "2001:db8::1", "", "localhost.evil.example"):
        assert not may_connect(target, announcer)


def test_servers_of_private_and_public_networks_are_reached() -> None:
    """Announcements lead to private and public addresses, and local announcements also to loopback addresses."""
    for target in ("10.0.0.5", "192.168.1.9", "172.16.0.1", "8.8.8.8", "fd00::5", "2600::1"):
        assert may_connect(target, "10.0.0.7")
    for announcer in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        assert may_connect("127.0.0.1", announcer)


def test_loopback_hosts() -> None:
    """Loopback IP addresses and the names `localhost` and `*.localhost` count as loopback."""
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost", "a.localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "example.com", "localhost.example.com", "")))


# -- verification


async def test_the_announced_process_is_verified() -> None:
    """The verification request contains no token, and names the announced host."""
    async with peer(name="localhost") as server:
        await verify(Entry(server.url, instance_of(KEY)), "127.0.0.1", ClientTls().context, "token")
        assert server.requests[0].startswith(b"GET /healthz HTTP/1.1\r\n")
        assert f"Host: {server.url[7:]}\r\n".encode() in server.requests[0]
        assert b"authorization" not in server.requests[0].lower()


@pytest.mark.parametrize(
    "sent",
    [
        response(json.dumps({"instance": instance_of("another key")}).encode()),
        response(b"<html>"),
        response(b"[]"),
        response(b'{"status": "ok"}'),
        response(b"[" * 2000),
        response(HEALTHY + b" " * 5000),
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000,
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"\r\n",
    ],
    ids=["another", "html", "list", "no instance", "nested", "long", "headers", "no http", "nothing"],
)
async def test_another_process_is_refuted(sent: bytes) -> None:
    """A process that is not the announced one is refuted, whatever it sends."""
    async with peer(sent) as server:
        with pytest.raises(Unverified, match=f"cannot verify {server.url}: ") as refuted:
            await verify(Entry(server.url, instance_of(KEY)), "127.0.0.1", ClientTls().context, "token")
    assert "SSH" not in str(refuted.value), "the announcer does not learn what another service sends"


@pytest.mark.parametrize(
    "host",
    ["a..b", "a" * 64, ".", "-", "%", "%25", "[::1%25lo]", "[::1%]", "[:::]", "[1.2.3.4]", "0x7f.1", "017700000001",
     "1.2.3.4.5", "nothing.invalid"],
)  # fmt: skip
async def test_unusual_hosts_are_refuted(host: str) -> None:
    """Hosts in other notations of loopback addresses are resolved before they are checked."""
    try:
        url = server_url(f"http://{host}:1")
    except ValueError:
        return
    with pytest.raises(Unverified):
        await verify(Entry(url, instance_of(KEY)), "10.0.0.7", ClientTls().context, "token")


async def test_redirects_are_not_followed() -> None:
    """A verification follows no redirect, which could lead to an address that was not checked."""
    async with peer() as target:
        location = f"Location: {target.url}/healthz\r\n".encode()
        async with peer(response(b"", "302 Found", location)) as server:
            with pytest.raises(Unverified):
                await verify(Entry(server.url, instance_of(KEY)), "127.0.0.1", ClientTls().context, "token")
        assert target.requests == []


async def test_a_verification_has_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification ends after its timeout, also if a peer sends single bytes."""
    monkeypatch.setattr(verification, "TIMEOUT_S", 0.3)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for byte in response(HEALTHY):
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)
        finally:
            writer.close()

    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(Unverified, match=r"no response within 0\.3 s"):
            await verify(Entry(url, instance_of(KEY)), "127.0.0.1", ClientTls().context, "token")
        assert time.monotonic() - began < 3
        server.close()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
async def test_a_remote_announcer_cannot_make_the_registry_connect_to_itself(name: str) -> None:
    """A remote announcement of a loopback address or name opens no connection."""
    async with peer(name=name) as server:
        with pytest.raises(Unverified, match=r"a server at 10\.0\.0\.7 must not announce (127\.0\.0\.1|::1)"):
            await verify(Entry(server.url, instance_of(KEY)), "10.0.0.7", ClientTls().context, "token")
        assert server.requests == []


async def test_the_checked_ip_address_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host name is looked up once, because another lookup could return an IP address that was not checked."""
    lookups: list[object] = []

    async with peer(name="rebind.example") as server:

        def resolve(host: object, port: object, **_: Any) -> list[Any]:
            lookups.append(host)
            return [(2, 1, 6, "", ("127.0.0.1", 0))]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        await verify(Entry(server.url, instance_of(KEY)), "127.0.0.1", ClientTls().context, "token")
    assert lookups == ["rebind.example"]


async def test_slow_lookups_delay_no_server_of_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups that outlast their verifications are limited per token, and a host has one lookup at a time."""
    monkeypatch.setattr(verification, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(verification, "MAX_LOOKUPS_PER_TOKEN", 2)
    original, responded, lookups = socket.getaddrinfo, threading.Event(), list[str]()

    def resolve(host: str, *arguments: Any, **options: Any) -> list[Any]:
        lookups.append(host)
        if host.startswith("slow"):
            responded.wait()
            raise socket.gaierror(socket.EAI_AGAIN, "no response")
        return original(host, *arguments, **options)

    async def refute(host: str) -> None:
        with pytest.raises(Unverified, match=r"no response within 0\.5 s"):
            await verify(Entry(f"http://{host}:8000", instance_of(KEY)), "127.0.0.1", ClientTls().context, "slow")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    async with peer(name="localhost") as server, peer() as numeric:
        try:
            for hosts in (["slow-0", "slow-0", "slow-1", "slow-2"], ["slow-0", "slow-3"]):
                await asyncio.gather(*map(refute, hosts))
            await verify(Entry(server.url, instance_of(KEY)), "127.0.0.1", ClientTls().context, "other")
            await verify(Entry(numeric.url, instance_of(KEY)), "127.0.0.1", ClientTls().context, "slow")
            assert sorted(lookups) == ["localhost", "slow-0", "slow-1"]
        finally:
            responded.set()
        await verify(Entry(server.url, instance_of(KEY)), "127.0.0.1", ClientTls().context, "slow")


async def test_tls_is_verified(tmp_path: Path) -> None:
    """The CA must have signed the certificate for the URL's host; the registry presents its certificate on request."""
    files = Files(tmp_path)
    cert, key = files.make("server", "server.example")
    own = TlsFiles(certfile=Path(cert), keyfile=Path(key))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
    tls.load_cert_chain(cert, key)
    tls.verify_mode = ssl.CERT_REQUIRED

    async def verify_as(name: str, settings: ClientTls) -> None:
        async with peer(tls=tls, name=name) as server:

            def resolve(host: str, port: object, **_: Any) -> list[Any]:
                return [(2, 1, 6, "", ("127.0.0.1", 0))]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(socket, "getaddrinfo", resolve)
                await verify(Entry(server.url, instance_of(KEY)), "127.0.0.1", settings.context, "token")

    await verify_as("server.example", ClientTls(Path(files.ca), own))
    for name, settings in (
        ("server.example", ClientTls()),
        ("server.example", ClientTls(Path(files.ca))),
        ("other.example", ClientTls(Path(files.ca), own)),
        ("server.example", ClientTls(tmp_path / "nothing.pem")),
    ):
        with pytest.raises(Unverified, match=r"cannot verify https://"):
            await verify_as(name, settings)


def test_renewed_certificates_are_used(tmp_path: Path) -> None:
    """The TLS context is replaced when a certificate file changes, and kept otherwise."""
    files = Files(tmp_path)
    cert, key = files.make("server", "server.example")
    settings = ClientTls(Path(files.ca), TlsFiles(certfile=Path(cert), keyfile=Path(key)))
    first = settings.context()
    assert settings.context() is first
    files.make("server", "server.example")
    assert settings.context() is not first


# -- endpoints


async def test_an_announced_server_is_listed_until_it_withdraws(app: FastAPI) -> None:
    """A server is withdrawn by the public name of its instance."""
    async with client(app) as fleet, peer() as server:
        for _ in range(2):
            returned = await fleet.post("/v1/servers", json={"url": server.url + "/", "instance_key": KEY})
            assert (returned.status_code, returned.json()) == (200, {"instance": instance_of(KEY), "state": "listed"})
        listed = (await fleet.get("/v1/servers")).json()
        assert listed == {"servers": [{"url": server.url, "instance": instance_of(KEY)}]}
        assert KEY not in json.dumps(listed)
        assert len(server.requests) == 1, "a heartbeat is not verified again"
        for _ in range(2):
            assert (await fleet.delete(f"/v1/servers/{instance_of(KEY)}")).status_code == 204
        assert await urls(fleet) == []


async def test_a_public_name_is_not_sufficient_to_announce_a_server(app: FastAPI) -> None:
    """An announcement with the public name of an instance in place of its key is refused."""
    async with client(app) as fleet, peer() as server:
        returned = await fleet.post("/v1/servers", json={"url": server.url, "instance_key": instance_of(KEY)})
        assert (returned.status_code, returned.json()["code"]) == (422, "ServerNotVerified")
        assert await urls(fleet) == []


async def test_loopback_urls_are_listed_to_this_machine_only(app: FastAPI) -> None:
    """Clients on other machines get no loopback URLs, which would lead to other servers and disclose the token."""
    async with client(app) as local, client(app, REMOTE) as remote, peer(name="localhost") as server:
        await local.post("/v1/servers", json={"url": server.url, "instance_key": KEY})
        assert await urls(local) == [server.url]
        assert await urls(remote) == []


async def test_a_remote_server_cannot_announce_a_loopback_url() -> None:
    """The registry refuses a loopback URL from another machine without a connection to itself."""
    app = make_app(ANNOUNCER)
    async with client(app, REMOTE, TOKEN) as remote, peer() as server:
        returned = await remote.post("/v1/servers", json={"url": server.url, "instance_key": KEY})
        assert returned.status_code == 422
        assert "10.0.0.7 must not announce 127.0.0.1" in returned.json()["detail"]
        assert server.requests == []


async def test_a_registry_without_tokens_is_changed_from_its_own_machine_only(app: FastAPI) -> None:
    """Without tokens, other machines can neither announce nor withdraw servers."""
    async with client(app) as local, client(app, REMOTE) as remote, peer() as server:
        announcement = {"url": server.url, "instance_key": KEY}
        await local.post("/v1/servers", json=announcement)
        for returned in (
            await remote.post("/v1/servers", json=announcement),
            await remote.delete(f"/v1/servers/{instance_of(KEY)}"),
        ):
            assert (returned.status_code, returned.json()["code"]) == (403, "Forbidden")
            assert "start it with --tokens" in returned.json()["detail"]
        assert await urls(local) == [server.url]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"[" * 4000, 422),
        (b"{}", 422),
        (b'{"url": "http://127.0.0.1:1"}', 422),
        (b'{"url": "http://127.0.0.1:1", "instance_key": "short"}', 422),
        (b'{"url": "http://127.0.0.1:1", "instance_key": "%b"}' % (b"k" * 129), 422),
        (b'{"url": "ftp://127.0.0.1:1", "instance_key": "%b"}' % KEY.encode(), 422),
        (b'{"url": "http://me:pw@127.0.0.1:1", "instance_key": "%b"}' % KEY.encode(), 422),
        (b'{"url": ["http://127.0.0.1:1"], "instance_key": "%b"}' % KEY.encode(), 422),
        (b'{"url": "%b"}' % (b"x" * 9000), 413),
    ],
)
async def test_invalid_announcements_are_refused(app: FastAPI, body: bytes, status: int) -> None:
    """Announcements with invalid fields or too large bodies are refused."""
    async with client(app) as fleet:
        returned = await fleet.post("/v1/servers", content=body)
        code = {413: "BodyTooLarge", 422: "InvalidRequest"}[status]
        assert (returned.status_code, returned.json()["code"]) == (status, code)
        assert await urls(fleet) == []


async def test_verifications_are_limited(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """Announcements above the limit are refused at once, and one announcement has one verification at a time."""
    monkeypatch.setattr(registry, "MAX_PENDING_PER_TOKEN", 2)
    seen = asyncio.Event()
    connections = 0

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if connections == 2:
            seen.set()
        try:
            await reader.read()
        finally:
            writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server, client(app) as fleet:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        def announce(path: str) -> Awaitable[httpx.Response]:
            return fleet.post("/v1/servers", json={"url": url + path, "instance_key": KEY})

        waiting = [asyncio.ensure_future(announce(path)) for path in ("/a", "/b")]
        await seen.wait()
        assert (await announce("/a")).json()["state"] == "pending"
        assert (await announce("/c")).status_code == 503
        assert {(await one).status_code for one in waiting} == {422}
        assert (await announce("/c")).status_code == 422, "there is room again"
        server.close()


async def test_a_token_that_is_revoked_during_the_verification_lists_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scope of a token is checked again after the verification, before the server is listed."""
    monkeypatch.setattr(registry, "STARTUP_DELAY_S", 0.0)
    app = make_app(ANNOUNCER)
    async with client(app, token=TOKEN) as fleet:

        async def revoke(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            app.state.authenticator.tokens = parse_tokens("", "tokens.toml")
            app.state.authenticator._known.clear()
            await Peer(response(HEALTHY)).handle(reader, writer)

        async with await asyncio.start_server(revoke, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            returned = await fleet.post("/v1/servers", json={"url": url, "instance_key": KEY})
            assert returned.status_code == 401
            assert app.state.registry.servers(time.monotonic()) == ()
