"""HTTPS with real certificates: trust decisions, and the same behavior as without TLS."""

from __future__ import annotations

import datetime
import itertools
import os
import pickle
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from teleloader import DataLoader, RemoteDataset
from teleloader.api.credentials import Credentials
from teleloader_shared.errors import ServerUnavailable, TlsError
from tests.conftest import ServerProcess, StartServer, eventually
from tests.end_to_end.certificates import Files
from tests.end_to_end.terminal import SERVER, TOOLS, piped

NUMBERS = "tests.end_to_end.hosted:numbers"
MANY = "tests.end_to_end.hosted:many"
HEAVY = "tests.end_to_end.hosted:heavy"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Create the files of all tests in this module."""
    return Files(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings of the tests' own environment."""
    for name in ("TOKEN", "TOKEN_FILE", "CA", "CERT", "KEY"):
        monkeypatch.delenv(f"TELELOADER_{name}", raising=False)


def tls(cert: str, key: str, *more: str) -> tuple[str, ...]:
    """Return the arguments of a server with a certificate."""
    return ("--num-workers", "1", "--ssl-certfile", cert, "--ssl-keyfile", key, *more)


@pytest.fixture(scope="module")
def server(files: Files) -> Iterator[ServerProcess]:
    """Run a server with TLS, and check its log at the end."""
    running = ServerProcess(
        "--port", "0", NUMBERS, MANY, HEAVY, *tls(*files.make("server", "127.0.0.1", "localhost")),
        "--memory-budget", "64MiB",
    )  # fmt: skip
    yield running
    assert running.end() == 0
    log = "".join(running.log)
    assert "Traceback" not in log
    assert "ERROR" not in log


def numbers_at(url: str, **credentials: Any) -> list[int]:
    """Return an epoch's samples."""
    loader = DataLoader(RemoteDataset(url, "numbers", reconnect_timeout=1e9, **credentials), 10, output="numpy")
    return [int(index) for indices, _ in loader for index in indices]


def test_a_loader_works_as_it_does_without(
    server: ServerProcess, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An https:// URL works with the CA from an argument or the environment; large batches arrive completely."""
    assert server.url.startswith("https://127.0.0.1:")
    assert numbers_at(server.url, ca=files.ca) == list(range(100))
    monkeypatch.setenv("TELELOADER_CA", files.ca)
    assert numbers_at(server.url) == list(range(100))
    for k, batch in enumerate(DataLoader(RemoteDataset(server.url, "heavy"), 1, output="numpy")):
        assert batch.shape == (1, 8 * 2**20)
        assert np.all(batch == k)
    assert len(RemoteDataset(server.url.replace("127.0.0.1", "localhost"), "numbers")) == 100


def test_the_expiry_of_the_certificate_is_a_metric(server: ServerProcess, files: Files) -> None:
    """The metric is the timestamp in the certificate."""
    (path, _) = files.make("server", "127.0.0.1", "localhost")
    until = x509.load_pem_x509_certificate(Path(path).read_bytes()).not_valid_after_utc
    text = httpx.get(f"{server.url}/metrics", verify=ssl.create_default_context(cafile=files.ca)).text
    (found,) = re.findall(r"^teleloader_certificate_expiry_timestamp_seconds (\S+)$", text, re.MULTILINE)
    assert float(found) == until.timestamp()


def test_an_order_of_the_clients_own_is_sent_over_tls(server: ServerProcess, files: Files) -> None:
    """Index lists are sent while batches are received."""
    remote = RemoteDataset(server.url, "numbers", ca=files.ca)
    order = list(reversed(range(100)))
    assert [int(i) for indices, _ in DataLoader(remote, 7, sampler=order, output="numpy") for i in indices] == order


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_tls_1_2_and_later_are_spoken(
    server: ServerProcess, files: Files, monkeypatch: pytest.MonkeyPatch, version: ssl.TLSVersion
) -> None:
    """Batches arrive over TLS 1.2 and later versions."""
    make = Credentials._make_context

    def context(self: Credentials) -> ssl.SSLContext:
        made = make(self)
        assert made.minimum_version == ssl.TLSVersion.TLSv1_2
        made.minimum_version = made.maximum_version = version
        return made

    monkeypatch.setattr(Credentials, "_make_context", context)
    assert numbers_at(server.url, ca=files.ca) == list(range(100))


def test_older_versions_are_not(server: ServerProcess) -> None:
    """The server rejects older versions of TLS."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="deprecated"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port or 0)) as plain, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(plain)


def test_the_tools_speak_it(server: ServerProcess, files: Files) -> None:
    """The tools have an option for the CA's file."""
    done = piped(TOOLS, "peek", server.url, "numbers", "--ca", files.ca)
    assert done.code == 0, done
    refused = piped(TOOLS, "stats", server.url)
    assert (refused.code, "Set TELELOADER_CA" in refused.err) == (1, True), refused


# -- untrusted certificates


def refusal(url: str, **credentials: Any) -> str:
    """Return the error that a client raises immediately."""
    with pytest.raises(TlsError) as refused:
        RemoteDataset(url, "numbers", reconnect_timeout=1e9, **credentials)
    return str(refused.value)


def test_a_certificate_of_another_ca_is_refused(server: ServerProcess, files: Files, tmp_path: Path) -> None:
    """The error has the variable to set."""
    for credentials in ({}, {"ca": Files(tmp_path).ca}):
        said = refusal(server.url, **credentials)
        assert server.url in said
        assert "the server's certificate is signed by an unknown CA" in said
        assert "Set TELELOADER_CA to the CA file" in said


def test_an_expired_certificate_is_refused(files: Files, start_server: StartServer) -> None:
    """The error states to renew the certificate, or to check the clock."""
    day = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    pair = files.make("expired", "127.0.0.1", until=day)
    server = start_server(NUMBERS, *tls(*pair))
    assert "the server's certificate has expired. Renew it" in refusal(server.url, ca=files.ca)


def test_a_certificate_for_another_name_is_refused(files: Files, start_server: StartServer) -> None:
    """A valid certificate for another host name is rejected."""
    server = start_server(NUMBERS, *tls(*files.make("other", "loader.example", "127.0.0.9")))
    assert "the server's certificate is for another name" in refusal(server.url, ca=files.ca)


def test_https_at_a_plain_port_and_http_at_one_with_tls(
    server: ServerProcess, files: Files, start_server: StartServer
) -> None:
    """The error states to use the other scheme."""
    assert "the server uses TLS. Use an https:// URL" in refusal(server.url.replace("https", "http"))
    plain = start_server(NUMBERS, "--num-workers", "1")
    assert "the server does not use TLS. Use an http:// URL" in refusal(plain.url.replace("http", "https"), ca=files.ca)


@pytest.mark.parametrize("content", [None, "", "no certificate"])
def test_files_that_cannot_be_used_are_named(server: ServerProcess, tmp_path: Path, content: str | None) -> None:
    """The error names each unusable file."""
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    assert f"cannot load CA certificates from {file}" in refusal(server.url, ca=str(file))
    assert f"cannot load the certificate {file}" in refusal(server.url, cert=str(file))


def test_the_ca_may_be_text(server: ServerProcess, files: Files) -> None:
    """The text of the file has the same effect, also in a pickle."""
    dataset = RemoteDataset(server.url, "numbers", ca=Path(files.ca).read_text())
    assert pickle.loads(pickle.dumps(dataset))[3] == [3, 9.0]
    assert "cannot load CA certificates from ca=" in refusal(server.url, ca="-----BEGIN CERTIFICATE-----\nno")


def test_a_server_that_is_not_there_is_still_waited_for(files: Files, free_port: int) -> None:
    """With TLS, the client also retries to connect to an unavailable server."""
    with pytest.raises(ServerUnavailable, match=r"tried for 0\.2 s"):
        RemoteDataset(f"https://127.0.0.1:{free_port}", ca=files.ca, reconnect_timeout=0.2)


def test_credentials_travel_with_a_pickle_as_paths(server: ServerProcess, files: Files) -> None:
    """Unpickling reads the files again."""
    assert pickle.loads(pickle.dumps(RemoteDataset(server.url, "numbers", ca=files.ca)))[3] == [3, 9.0]


# -- both sides


def test_clients_may_have_to_have_a_certificate(files: Files, start_server: StartServer, tmp_path: Path) -> None:
    """The client certificate must be of the configured CA; the error states whether it is missing or wrong."""
    server = start_server(NUMBERS, *tls(*files.make("mutual", "127.0.0.1"), "--ssl-ca-certs", files.ca))
    cert, key = files.make("client", "trainer-0")
    assert numbers_at(server.url, ca=files.ca, cert=cert, key=key) == list(range(100))
    assert "the server requires a client certificate. Set TELELOADER_CERT" in refusal(server.url, ca=files.ca)
    other, other_key = Files(tmp_path).make("client", "trainer-0")
    said = refusal(server.url, ca=files.ca, cert=other, key=other_key)
    assert "the server rejected the client certificate" in said
    assert "Traceback" not in "".join(server.log)


def test_cas_of_clients_can_be_added_while_the_server_runs(
    files: Files, start_server: StartServer, tmp_path: Path
) -> None:
    """A removed CA stays trusted until a restart, which the log states."""
    other = Files(tmp_path)
    cas = tmp_path / "clients.pem"
    cas.write_text(Path(files.ca).read_text())
    server = start_server(NUMBERS, *tls(*files.make("added", "127.0.0.1"), "--ssl-ca-certs", str(cas)))
    cas.write_text(Path(other.ca).read_text())
    server.await_line(r"removed CAs are trusted until the server restarts")
    for cert, key in (files.make("client", "trainer-0"), other.make("client", "trainer-0")):
        assert numbers_at(server.url, ca=files.ca, cert=cert, key=key) == list(range(100))


# -- the server's side


def encrypt(key: str, folder: Path) -> str:
    """Return the path of a copy of a key that is encrypted with the password "pass"."""
    loaded = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    secret = serialization.BestAvailableEncryption(b"pass")
    copy = folder / "encrypted.key"
    copy.write_bytes(loaded.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret))
    return str(copy)


def test_files_that_do_not_fit_are_refused_at_the_start(files: Files, tmp_path: Path) -> None:
    """The server exits with code 2 and an error before it builds datasets."""
    cert, key = files.make("one", "127.0.0.1")
    _, other = files.make("two", "127.0.0.1")
    encrypted = encrypt(key, tmp_path)
    (tmp_path / "empty").touch()
    for arguments, sentence in (
        (("--ssl-certfile", cert, "--ssl-keyfile", other), "does not match the certificate"),
        (("--ssl-certfile", cert, "--ssl-keyfile", str(tmp_path / "nowhere")), "cannot read"),
        (("--ssl-certfile", cert), "expected a certificate and a key"),
        (("--ssl-certfile", key, "--ssl-keyfile", cert), "expected a certificate in"),
        (("--ssl-certfile", cert, "--ssl-keyfile", encrypted), "set TELELOADER_SSL_KEYFILE_PASSWORD"),
        (
            ("--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", str(tmp_path / "empty")),
            "expected certificates",
        ),
        (("--ssl-keyfile", key), "require --ssl-certfile"),
    ):
        done = piped(SERVER, NUMBERS, "--port", "0", *arguments)
        assert (done.code, sentence in done.err) == (2, True), done
        assert "Traceback" not in done.err
    wrong = piped(SERVER, NUMBERS, *("--ssl-certfile", cert, "--ssl-keyfile", encrypted),
                  TELELOADER_SSL_KEYFILE_PASSWORD="wrong-password")  # fmt: skip
    assert (wrong.code, "the password is wrong" in wrong.err) == (2, True)
    assert "wrong-password" not in wrong.err


def test_a_key_may_be_encrypted(
    files: Files, tmp_path: Path, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The password is an environment variable, which other users cannot see."""
    cert, key = files.make("encrypted", "127.0.0.1")
    encrypted = encrypt(key, tmp_path)
    monkeypatch.setenv("TELELOADER_SSL_KEYFILE_PASSWORD", "pass")
    server = start_server(NUMBERS, *tls(cert, encrypted))
    assert numbers_at(server.url, ca=files.ca) == list(range(100))


def serial(url: str) -> int:
    """Return the serial number of a server's certificate."""
    where = httpx.URL(url)
    return x509.load_pem_x509_certificate(
        ssl.get_server_certificate((where.host, where.port or 0)).encode()
    ).serial_number


def test_a_renewed_certificate_is_shown_without_a_restart(files: Files, start_server: StartServer) -> None:
    """Open connections continue; a mismatching pair of files is ignored until both match."""
    cert, key = files.make("renewed", "127.0.0.1")
    server = start_server(MANY, *tls(cert, key))
    first = serial(server.url)
    batches = iter(DataLoader(RemoteDataset(server.url, ca=files.ca), 10, output="numpy"))
    seen = [next(batches).tolist()]
    Path(key).write_bytes(Path(files.make("unrelated", "127.0.0.1")[1]).read_bytes())
    server.await_line("ERROR +certificate reload failed, .*: the key in .* does not match")
    assert serial(server.url) == first
    files.make("renewed", "127.0.0.1")
    while serial(server.url) == first:
        time.sleep(0.05)
    seen += [batch.tolist() for batch in batches]
    assert [index for batch in seen for index in batch] == list(range(100_000))
    assert len(RemoteDataset(server.url, ca=files.ca)) == 100_000


def connected(url: str) -> socket.socket:
    """Open a connection, before its TLS handshake."""
    where = httpx.URL(url)
    found = socket.create_connection((where.host, where.port or 0))
    found.settimeout(60)
    return found


def test_an_unfinished_handshake_closes_the_connection(server: ServerProcess, files: Files) -> None:
    """Connections that stall before or during the handshake are closed; other clients are not affected."""
    hello = b"\x16\x03\x01\x02\x00\x01"
    silent = [connected(server.url) for _ in range(100)]
    for one in silent[::2]:
        one.sendall(hello)
    assert numbers_at(server.url, ca=files.ca) == list(range(100))
    for one in silent:
        with one:
            while one.recv(100):
                pass  # an alert may come first


def test_garbage_in_place_of_a_handshake_closes_the_connection(server: ServerProcess, files: Files) -> None:
    """Invalid handshakes close the connection without one log line for each."""
    for _ in range(50):
        with connected(server.url) as one:
            one.sendall(os.urandom(500))
    assert numbers_at(server.url, ca=files.ca) == list(range(100))


def secured(url: str, files: Files) -> ssl.SSLSocket:
    """Open a connection, and complete its TLS handshake."""
    return ssl.create_default_context(cafile=files.ca).wrap_socket(connected(url), server_hostname="127.0.0.1")


def test_an_endless_response_is_an_error_over_tls(files: Files) -> None:
    """A response whose bytes arrive in time but never end raises an error."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files.make("dripping", "127.0.0.1"))
    sent = 0

    def drip() -> None:
        nonlocal sent
        with suppress(OSError), context.wrap_socket(listening.accept()[0], server_side=True) as to:
            for byte in itertools.cycle(b"HTTP/1.1 200 OK\r\n"):
                to.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=drip, daemon=True).start()
        url = f"https://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ServerUnavailable, match="accepted the connection"):
            RemoteDataset(url, "data", ca=files.ca, reconnect_timeout=0, stall_timeout=2.0)
    assert sent > 1


def test_a_request_that_breaks_a_rule_gets_a_response_over_tls(server: ServerProcess, files: Files) -> None:
    """The response arrives completely, and the connection is closed."""
    for request, status in (
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000, b"431 "),
        (b"POST /v1/loaders HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n", b"413 "),
        (b"no HTTP at all\r\n\r\n", b"400 "),
    ):
        with secured(server.url, files) as one:
            one.sendall(request)
            answer = b""
            while piece := one.recv(65536):
                answer += piece
            assert status in answer[:20]
            assert answer.endswith(b"}")


def test_an_unfinished_head_closes_the_connection_over_tls(server: ServerProcess, files: Files) -> None:
    """The status is 408 after ten seconds, as without TLS."""
    with secured(server.url, files) as one:
        one.sendall(b"GET / HTTP/1.1\r\n")
        assert b"408 Request Timeout" in one.recv(1000)


def test_a_client_that_does_not_read_uses_bounded_memory(server: ServerProcess, files: Files) -> None:
    """Responses that are not read are dropped while they exceed the budget."""
    with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=files.ca)) as client:
        key = client.post("/v1/loaders", json={"dataset": "heavy", "checksum": False}).json()["key"]
        greedy = [secured(server.url, files) for _ in range(16)]
        for k, one in enumerate(greedy):
            one.sendall(f"GET /v1/loaders/{key}/epochs/0/batches/{k} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        eventually(lambda: client.get("/stats").json()["server"]["memory_sending"] < 64 * 2**20)
        for one in greedy:
            one.close()
    assert numbers_at(server.url, ca=files.ca) == list(range(100))


def test_a_server_with_tls_drains(files: Files, start_server: StartServer) -> None:
    """Pending requests are completed, and the process exits soon."""
    server = start_server(HEAVY, *tls(*files.make("draining", "127.0.0.1")))
    batches = iter(DataLoader(RemoteDataset(server.url, ca=files.ca, reconnect_timeout=0.1), 1, output="numpy"))
    assert int(next(batches)[0, 0]) == 0
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    received = 1
    with pytest.raises(ServerUnavailable):  # noqa: PT012 - how many come before is not known
        for batch in batches:
            assert np.all(batch == received)
            received += 1
    assert server.process.wait(60) == 0
    assert time.monotonic() - began < 30


def test_a_server_with_tls_restarts_during_training(files: Files, start_server: StartServer, free_port: int) -> None:
    """Each batch arrives once."""
    pair = files.make("restarting", "127.0.0.1")
    first = start_server(MANY, *tls(*pair), port=free_port)
    batches = iter(DataLoader(RemoteDataset(first.url, ca=files.ca), 10, output="numpy"))
    seen = [next(batches).tolist()]
    first.kill()
    threading.Thread(target=start_server, args=(MANY, *tls(*pair)), kwargs={"port": free_port}).start()
    seen += [batch.tolist() for batch in batches]
    assert [index for batch in seen for index in batch] == list(range(100_000))


def test_servers_of_a_dns_name_must_have_a_certificate_for_the_name(
    files: Files, start_server: StartServer, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates of servers behind a DNS name must contain the name, and need not contain the IP addresses."""

    def resolve(host: str, port: int, *more: Any, **options: Any) -> Any:
        return resolved("127.0.0.1" if host == "loaders.example" else host, port, *more, **options)

    resolved = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    start_server(NUMBERS, *tls(*files.make("named", "loaders.example")), port=free_port)
    assert sorted(numbers_at(f"dns+https://loaders.example:{free_port}", ca=files.ca)) == list(range(100))
    # the address of the server is not sufficient
    assert "the server's certificate is for another name" in refusal(f"https://127.0.0.1:{free_port}", ca=files.ca)
