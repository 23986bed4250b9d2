"""Servers that join and leave through a directory, with real server processes."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset, TeleloaderError, TlsError
from teleloader_shared.messages import SERVERS_PATH
from tests.client.test_directories import can_unshare
from tests.conftest import ROOT, ServerProcess, StartServer, eventually
from tests.end_to_end.certificates import Files
from tests.end_to_end.test_access import TokenTable
from tests.end_to_end.test_several_servers import computed, rest, start

Batches = Iterator[Any]


class Fleet:
    """A file that lists servers."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "job.servers"
        self.list()

    @property
    def address(self) -> str:
        """Address of the directory."""
        return f"file://{self._path}"

    def list(self, *servers: ServerProcess) -> None:
        """Replace the listed servers atomically."""
        written = self._path.with_suffix(".new")
        written.write_text("".join(f"{server.url}\n" for server in servers))
        written.rename(self._path)


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Return a file that lists no servers."""
    return Fleet(tmp_path)


def shuffled(fleet: Fleet | str, **arguments: Any) -> tuple[DataLoader, list[list[int]]]:
    """Return a loader of 5,000 shuffled batches, and its first epoch in the order of a single server."""
    address = fleet if isinstance(fleet, str) else fleet.address
    loader = DataLoader(RemoteDataset(address, "data", stall_timeout=2), 20, shuffle=True, seed=5,
                        output="numpy", **arguments)  # fmt: skip
    return loader, [indices.tolist() for indices in loader.plan(0)]


def paced(batches: Batches, until: ServerProcess) -> list[list[int]]:
    """Return batches, 10 ms apart, until a server has computed one."""
    seen = []
    while computed(until) == 0:
        seen.append(next(batches).tolist())
        time.sleep(0.01)
    return seen


def test_servers_join_leave_and_die_in_mid_epoch(start_server: StartServer, fleet: Fleet) -> None:
    """An epoch with changing servers has the same batches and order as on one server, to the bit."""
    first = start(start_server)
    fleet.list(first)
    loader, expected = shuffled(fleet)
    batches = iter(loader)
    seen = [next(batches).tolist()]
    second = start(start_server)
    fleet.list(first, second)
    seen += paced(batches, second)
    first.kill()
    seen += [next(batches).tolist() for _ in range(100)]
    third = start(start_server)
    fleet.list(second, third)
    seen += paced(batches, third)
    fleet.list(third)
    dataset: RemoteDataset = loader.dataset
    eventually(lambda: [server.url for server in dataset.servers.known] == [third.url])
    before = computed(second)
    assert seen + rest(batches) == expected
    assert computed(second) <= before + 16, "a request that was pending"


def test_a_server_that_is_drained_leaves_without_an_error(
    start_server: StartServer, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that leaves the directory and drains completes its responses, and exits with code 0."""
    leaving, staying = start(start_server), start(start_server)
    fleet.list(leaving, staying)
    loader, expected = shuffled(fleet)
    batches = iter(loader)
    seen = [next(batches).tolist()]
    fleet.list(staying)
    dataset: RemoteDataset = loader.dataset
    eventually(lambda: len(dataset.servers.known) == 1)
    assert leaving.end(signal.SIGTERM) == 0
    assert seen + rest(batches) == expected
    assert "WARNING" not in caplog.text


def test_shards_move_to_a_server_that_joined(start_server: StartServer, fleet: Fleet) -> None:
    """Shards of an iterable-style dataset stay on their server until it fails, and then move to the joined one."""
    first = start(start_server, dataset="stream")
    fleet.list(first)
    loader = DataLoader(RemoteDataset(fleet.address, "data"), 2, num_workers=2, prefetch_factor=1, output="numpy")
    expected = rest(iter(loader))
    batches = iter(loader)
    seen = [next(batches).tolist()]
    second = start(start_server, dataset="stream")
    fleet.list(first, second)
    dataset: RemoteDataset = loader.dataset
    eventually(lambda: len(dataset.servers.known) == 2)
    first.kill()
    assert seen + rest(batches) == expected
    assert computed(second) > 0


def test_a_server_with_other_data_is_refused_alone(
    start_server: StartServer, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the server with different data, and the epoch continues on the others."""
    right, wrong = start(start_server), start(start_server, dataset="numbers")
    fleet.list(right)
    loader, expected = shuffled(fleet)
    batches = iter(loader)
    seen = [next(batches).tolist()]
    fleet.list(right, wrong)
    eventually(lambda: wrong.url in caplog.text)
    assert seen + rest(batches) == expected
    assert computed(wrong) == 0
    assert "has fingerprint" in caplog.text


@pytest.mark.parametrize("kind", ["token", "data"])
def test_a_server_that_refuses_the_client_does_not_stop_a_new_dataset(
    start_server: StartServer, fleet: Fleet, caplog: pytest.LogCaptureFixture, tmp_path: Path, kind: str
) -> None:
    """A warning names a server with different tokens or different data, and the other servers are used."""
    right = start(start_server), start(start_server)
    table = TokenTable(tmp_path / "tokens.toml")
    table.add("another")
    wrong = (
        start_server("data=tests.end_to_end.hosted:many", "--num-workers", "1", "--tokens", table.write())
        if kind == "token"
        else start(start_server, dataset="numbers")
    )
    fleet.list(wrong, *right)
    loader = DataLoader(RemoteDataset(fleet.address, "data", token=TOKEN), 1000, output="numpy")
    assert [len(batch) for batch in loader] == [1000] * 100
    assert sum(map(computed, right)) >= 100
    assert wrong.url in caplog.text
    assert ("refused the request" if kind == "token" else "host different data") in caplog.text


def test_a_client_side_sampler_uses_servers_that_join(start_server: StartServer, fleet: Fleet) -> None:
    """The client sends the indices of a batch to the server that computes the batch, also if it joined later."""
    first, second = start(start_server), start(start_server)
    fleet.list(first)
    order = np.random.default_rng(1).permutation(4000).reshape(-1, 8).tolist()
    loader = DataLoader(
        RemoteDataset(fleet.address, "data"), batch_sampler=order, num_workers=1, prefetch_factor=8, output="numpy"
    )
    batches = iter(loader)
    seen = [next(batches).tolist()]
    fleet.list(first, second)
    seen += paced(batches, second)
    assert seen + rest(batches) == order


# --- Servers that announce themselves ------------------------------------------------------------------------------


def announced(start_server: StartServer, address: str) -> ServerProcess:
    """Start a server with one worker that announces itself."""
    return start_server("data=tests.end_to_end.hosted:many", "--num-workers", "1", "--announce", address)


@pytest.mark.parametrize("kind", ["registry", "file"])
def test_announced_servers_join_and_leave_by_themselves(
    start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """A server withdraws before it stops, so that the client logs no error."""
    registry = start(start_server, dataset="numbers")
    address = f"registry+{registry.url}" if kind == "registry" else f"file://{tmp_path}/job.servers"
    first = announced(start_server, address)
    loader, expected = shuffled(address)
    batches = iter(loader)
    seen = [next(batches).tolist()]
    second = announced(start_server, address)
    seen += paced(batches, second)
    assert first.end(signal.SIGTERM) == 0
    assert seen + rest(batches) == expected
    assert "cannot receive" not in caplog.text


def test_an_epoch_survives_its_registries_and_servers(start_server: StartServer, free_port: int) -> None:
    """Every batch arrives although registries and servers are killed and a registry restarts with an empty list."""
    registry, other = start(start_server, free_port, dataset="numbers"), start(start_server, dataset="numbers")
    address = f"registry+{registry.url},{other.url.removeprefix('http://')}"
    first, second = announced(start_server, address), announced(start_server, address)
    loader, expected = shuffled(address)
    dataset: RemoteDataset = loader.dataset
    batches = iter(loader)
    eventually(lambda: len(dataset.servers.known) == 2)
    seen = [next(batches).tolist()]
    registry.kill()
    other.kill()
    seen += [next(batches).tolist() for _ in range(100)]
    start(start_server, free_port, dataset="numbers")
    first.kill()
    seen += [next(batches).tolist() for _ in range(100)]
    third = announced(start_server, address)
    seen += paced(batches, third)
    assert computed(second) > 0
    assert seen + rest(batches) == expected


# --- Servers of an attacker ------------------------------------------------------------------------------------------

TOKEN = "a-token-of-24-characters"


class Attacker:
    """HTTPS server with a certificate that the system trusts, which records connections and tokens."""

    def __init__(self, files: Files) -> None:
        self.connections = 0
        self.tokens: list[str | None] = []
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*files.make("attacker", "localhost"))

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Accept connections; yield the URL, whose host is a name that the attacker owns."""
        attacker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                attacker.tokens.append(self.headers["Authorization"])
                self.send_error(404)

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            def verify_request(self, *_: Any) -> bool:
                attacker.connections += 1
                return True

        listener = Server(("127.0.0.1", 0), Handler)
        listener.socket = self._context.wrap_socket(listener.socket, server_side=True)
        with serving(listener) as server:
            yield f"https://localhost:{server.server_address[1]}"


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[ThreadingHTTPServer]:
    """Run a server in a thread."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def registry_of(*urls: str) -> Iterator[str]:
    """Run a registry that lists these URLs; yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == SERVERS_PATH
            body = json.dumps({"servers": [{"url": url} for url in urls]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"registry+http://127.0.0.1:{server.server_address[1]}"


@pytest.mark.parametrize("kind", ["registry", "file"])
def test_a_directory_cannot_collect_tokens_over_https(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_server: StartServer, caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:  # fmt: skip
    """A listed https server that only a public CA verifies gets no token: anyone can get such a certificate."""
    files = Files(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", files.ca)  # the system trusts this CA
    attacker, right = Attacker(files), start(start_server)
    with attacker.listening() as url, registry_of(url) as alone, registry_of(url, right.url) as both:
        if kind == "file":
            alone, both = f"file://{tmp_path}/alone", f"file://{tmp_path}/both"
            (tmp_path / "alone").write_text(url)
            (tmp_path / "both").write_text(f"{url}\n{right.url}")
        with pytest.raises(TlsError, match=f"{url} is not used: .*ca=.*trust_directory=True"):
            RemoteDataset(alone, "data", token=TOKEN)
        loader = DataLoader(RemoteDataset(both, "data", token=TOKEN), 1000, output="numpy")
        assert [len(batch) for batch in loader] == [1000] * 100
        assert (attacker.connections, attacker.tokens) == (0, [])
        assert f"{url} is not used" in caplog.text
        for choice in ({"trust_directory": True}, {"ca": files.ca}):
            attacker.tokens.clear()
            with pytest.raises(TeleloaderError, match="404"):
                RemoteDataset(alone, "data", token=TOKEN, **choice)
            assert f"Bearer {TOKEN}" in attacker.tokens, "the user's choice"


@pytest.mark.skipif(not can_unshare(), reason="needs mount and network namespaces")
def test_servers_of_a_dns_name_join_and_stop_during_an_epoch() -> None:
    """An address that is added to a DNS name joins; a server that stops while its address is listed causes no error."""
    done = subprocess.run(
        ["unshare", "-mn", sys.executable, "-m", "tests.end_to_end.dns_epoch"],
        cwd=ROOT, stdout=subprocess.PIPE, timeout=110, check=True,
    )  # fmt: skip
    is_same_order, counts, exit_code = json.loads(done.stdout)
    assert is_same_order
    assert all(counts)
    assert exit_code == 0
