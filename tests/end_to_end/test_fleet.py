"""Servers of a fleet as processes: announcements in registries and files, withdrawal, and the end of the parent."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner

from teleloader import DataLoader, RemoteDataset
from teleloader_server.cli.commands import server as server_command
from teleloader_server.fleet.announcer import PROPAGATION_S
from teleloader_server.fleet.registry import TTL_S
from tests.conftest import ROOT, ServerProcess, StartServer, eventually
from tests.end_to_end.certificates import Files
from tests.end_to_end.test_access import TokenTable
from tests.raw import Raw

SMALL = ("--demo", "--num-workers", "1")
PROGRAM = "from teleloader_server.cli import main; main()"


def listed(registry: str, **options: Any) -> dict[str, str]:
    """Return the instances that a registry lists, by URL."""
    response = httpx.get(f"{registry}/v1/servers", trust_env=False, **options).raise_for_status()
    return {server["url"]: server["instance"] for server in response.json()["servers"]}


def instance(server: ServerProcess) -> str:
    """Return the name of a server's process."""
    name: str = httpx.get(f"{server.url}/healthz").json()["instance"]
    return name


def at(server: ServerProcess | str, kind: str = "registry") -> str:
    """Return the address of a registry."""
    url = server if isinstance(server, str) else server.url
    return f"{kind}+{url}"


# -- registries


def test_a_server_is_listed_from_its_readiness_to_its_withdrawal(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopping server withdraws, accepts requests until clients have read the directory, and then drains."""
    gate, path = tmp_path / "gate", tmp_path / "servers"
    monkeypatch.setenv("GATE", str(gate))
    registry = start_server(*SMALL)
    server = start_server(
        "tests.end_to_end.hosted:slow", "--num-workers", "1", "--announce", at(registry), "--announce", f"file://{path}"
    )
    began = time.monotonic()
    eventually(lambda: listed(registry.url) == {server.url: instance(server)}, 10)
    eventually(lambda: path.exists() and path.read_text() == f"{server.url}\n", 10)
    assert time.monotonic() - began < 5
    key = httpx.post(f"{server.url}/v1/loaders", json={"dataset": "slow"}).json()["key"]
    with Raw(server.url) as waiting:
        waiting.send_get(f"/v1/loaders/{key}/epochs/0/batches/3")
        eventually(lambda: server.stats()["workers"][0]["state"] == "busy")
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: not listed(registry.url), 10)
        withdrawn = time.monotonic()
        assert httpx.get(f"{server.url}/v1/datasets").status_code == 200, "it still accepts requests"
        assert not server.stats()["server"]["draining"]
        assert path.read_text() == ""
        eventually(lambda: server.stats()["server"]["draining"])
        assert time.monotonic() - withdrawn > PROPAGATION_S / 2
        gate.touch()
        assert waiting.receive().status == 200
    assert server.process.wait(20) == 0


def test_a_killed_server_is_dropped_and_a_restarted_one_replaces_it(start_server: StartServer, free_port: int) -> None:
    """A registry drops a killed server without heartbeats, and lists the new process at the URL with another name."""
    registry = start_server(*SMALL)
    first = start_server(*SMALL, "--announce", at(registry), port=free_port)
    eventually(lambda: listed(registry.url))
    before = listed(registry.url)
    first.kill()
    began = time.monotonic()
    eventually(lambda: not listed(registry.url), 10 * TTL_S)
    assert time.monotonic() - began > TTL_S / 2
    second = start_server(*SMALL, "--announce", at(registry), port=free_port)
    eventually(lambda: listed(registry.url) == {second.url: instance(second)}, 10)
    assert before == {second.url: before[second.url]} != listed(registry.url)


def test_a_restarted_registry_lists_the_servers_again(start_server: StartServer, free_port: int) -> None:
    """A restarted registry lists no servers at first and then all of them, and the other registry always lists all."""
    registry, other = start_server(*SMALL, port=free_port), start_server(*SMALL)
    address = f"registry+{registry.url},{other.url.removeprefix('http://')}"
    server = start_server(*SMALL, "--announce", address)
    expected = {server.url: instance(server)}
    eventually(lambda: listed(registry.url) == listed(other.url) == expected)
    registry.kill()
    server.await_line(f"cannot announce this server, retrying: no response from {registry.url}")
    assert listed(other.url) == expected
    registry = start_server(*SMALL, port=free_port)
    assert listed(registry.url) == {}
    eventually(lambda: listed(registry.url) == expected, 10)
    assert listed(other.url) == expected
    warnings = [line for line in server.log if "cannot announce" in line]
    assert len(warnings) < 5, "not one for each heartbeat"
    assert not any("Traceback" in line for line in server.log), "".join(server.log)


def test_announcing_requires_the_scope(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server announces itself with a token from the environment or a file, and no log contains the token."""
    table = TokenTable(tmp_path / "tokens.toml")
    reader, announce = table.add("reader", "read"), table.add("fleet", "announce")
    registry = start_server(*SMALL, "--tokens", table.write())
    options = {"headers": {"Authorization": f"Bearer {reader}"}}
    file = tmp_path / "announce"
    file.write_text("a-token-of-24-characters")
    server = start_server(
        *SMALL, "--announce", at(registry), "--announce-token-file", str(file), "--log-level", "debug"
    )
    server.await_line("cannot announce this server, retrying: .* 401: .* in --announce-token-file")
    file.write_text(reader)
    server.await_line(
        "cannot announce this server, retrying: .* 403: insufficient scope: the request requires 'announce', and token "
        "'reader' has only: read"
    )
    assert listed(registry.url, **options) == {}
    file.write_text(announce)
    eventually(lambda: listed(registry.url, **options), 20)
    assert server.end() == 0
    assert listed(registry.url, **options) == {}
    monkeypatch.setenv("TELELOADER_ANNOUNCE_TOKEN", announce)
    server = start_server(*SMALL, "--announce", at(registry), "--log-level", "debug")
    eventually(lambda: listed(registry.url, **options))
    assert httpx.get(f"{registry.url}/v1/datasets", headers={"Authorization": f"Bearer {announce}"}).status_code == 403
    assert server.end() == 0
    for line in (*server.log, *registry.log):
        assert announce not in line
        assert reader not in line


def test_a_fleet_with_tls(start_server: StartServer, tmp_path: Path) -> None:
    """Registry and server verify each other's certificates."""
    files = Files(tmp_path)
    cert, key = files.make("server", "127.0.0.1")
    tls = ("--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", files.ca)
    registry = start_server(*SMALL, *tls, "--fleet-ca", files.ca)
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(cert, key)
    server = start_server(*SMALL, *tls, "--fleet-ca", files.ca, "--announce", at(registry))
    eventually(lambda: set(listed(registry.url, verify=context)) == {server.url}, 10)
    stranger = start_server(*SMALL, *tls, "--announce", at(registry))
    stranger.await_line(r"cannot announce this server, retrying: no response from https://.*CERTIFICATE_VERIFY_FAILED")
    assert server.end() == 0
    assert listed(registry.url, verify=context) == {}


def test_ipv6(start_server: StartServer) -> None:
    """The URL of a server with an IPv6 address has brackets."""
    registry = start_server(*SMALL, "--host", "::1")
    server = start_server(*SMALL, "--host", "::1", "--announce", at(registry))
    assert server.url.startswith("http://[::1]:")
    eventually(lambda: listed(registry.url) == {server.url: instance(server)}, 10)


# -- files


def test_two_servers_share_a_file(start_server: StartServer, tmp_path: Path) -> None:
    """Each server changes only its own line of a shared file, whose mode clients accept."""
    path = tmp_path / "servers"
    umask = os.umask(0)
    try:
        servers = [start_server(*SMALL, "--announce", f"file://{path}") for _ in range(2)]
    finally:
        os.umask(umask)
    lines = {server.url for server in servers}
    eventually(lambda: path.exists() and set(path.read_text().splitlines()) == lines, 10)
    assert path.stat().st_mode & 0o777 == 0o644
    path.unlink()
    eventually(lambda: path.exists() and set(path.read_text().splitlines()) == lines, 10)
    left = f"{servers[1].url}\n"
    assert servers[0].end() == 0
    assert path.read_text() == left
    servers[1].kill()
    assert path.read_text() == left, "a killed server leaves its line"
    joined = start_server(*SMALL, "--announce", f"file://{path}")
    eventually(lambda: path.read_text() == f"{joined.url}\n")


# -- options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--announce", "dns+http://a:8000"], "expected registry+http://host:port or file:///folder/name"),
        (["--announce", "http://a:8000"], "expected registry+http://host:port or file:///folder/name"),
        (["--announce", "registry+http://me:pw@a:8000"], "invalid server URL"),
        (["--announce", "registry+http://999.1.1.1:80"], "invalid server URL 'http://999.1.1.1'"),
        (["--announce", "registry+http://a:8000,xn--a:8000"], "invalid server URL 'http://xn--a:8000'"),
        (["--announce", "registry+https://a..b"], "Expected an IP address or host name"),
        (["--announce", "file:///no/such/folder/servers"], "create the folder first"),
        (["--announce", "file:///tmp"], "expected a file, not a folder"),
        (["--advertise-url", "10.0.0.5:8000"], "invalid server URL"),
        (["--advertise-url", "http://999.1.1.1:8000"], "invalid server URL 'http://999.1.1.1:8000'"),
        (["--fleet-ca", "/no/such/file"], "does not exist"),
        (["--fleet-ca", __file__], "cannot use --fleet-ca"),
        (["--announce-token-file", "/no/such/file"], "invalid token in /no/such/file (--announce-token-file)"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], message: str) -> None:
    """Invalid options end the program before the datasets are built."""
    result = CliRunner().invoke(server_command, ["--demo", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_malformed_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a malformed token does not contain the token."""
    monkeypatch.setenv("TELELOADER_ANNOUNCE_TOKEN", "a secret")
    result = CliRunner().invoke(server_command, ["--demo", "--announce", "registry+http://a:8000"])
    assert result.exit_code == 2
    assert "invalid token in TELELOADER_ANNOUNCE_TOKEN" in result.output
    assert "a secret" not in result.output


def test_a_server_on_all_addresses_must_name_one() -> None:
    """A server on 0.0.0.0 requires --advertise-url, because clients cannot connect to 0.0.0.0."""
    command = [sys.executable, "-c", PROGRAM, *SMALL, "--port", "0", "--host", "0.0.0.0", "--insecure", "--announce"]
    ended = subprocess.run(
        [*command, "registry+http://127.0.0.1:1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert "clients cannot connect to --host 0.0.0.0. Pass --advertise-url" in ended.stderr


def test_an_advertised_url_is_announced(start_server: StartServer, free_port: int) -> None:
    """The registry lists the value of --advertise-url, which may contain a host name."""
    registry = start_server(*SMALL)
    url = f"http://localhost:{free_port}"
    server = start_server(
        *SMALL, "--host", "0.0.0.0", "--insecure", "--advertise-url", url, "--announce", at(registry), port=free_port
    )
    eventually(lambda: listed(registry.url) == {url: instance(server)}, 10)


# -- the end of the parent


@pytest.fixture
def parent() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that starts a server, and prints the server's log."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> subprocess.Popen[str]:
            program = (
                "import os, subprocess, sys\n"
                "command = [sys.executable, '-c', *sys.argv[1:], '--exit-with-parent', str(os.getpid())]\n"
                "subprocess.run(command)"
            )
            process = subprocess.Popen(
                [sys.executable, "-c", program, PROGRAM, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def await_text(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Return the first match in the lines that a process writes."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"no line matches {pattern!r}")


@pytest.mark.parametrize("reloading", [(), ("--reload",)], ids=["server", "reload"])
def test_all_processes_end_with_the_parent(
    parent: Callable[..., subprocess.Popen[str]], tmp_path: Path, reloading: tuple[str, ...]
) -> None:
    """When the parent exits, the server withdraws as after SIGTERM, and its fork server and workers end."""
    path = tmp_path / "servers"
    process = parent("--demo", "--num-workers", "2", "--port", "0", "--announce", f"file://{path}", *reloading)
    await_text(process, r"announced in file")
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 4 + len(reloading), "server, fork server and workers"
    assert path.read_text()
    process.kill()
    assert not psutil.wait_procs(family, timeout=20)[1]
    assert path.read_text() == ""


def test_all_processes_end_with_the_parent_while_the_datasets_are_built(
    parent: Callable[..., subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes end with the parent, even while the datasets are built."""
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    process = parent("tests.end_to_end.hosted:built_slowly", "--num-workers", "1", "--port", "0")
    await_text(process, r"building built_slowly")
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    assert not psutil.wait_procs(family, timeout=20)[1]


def test_a_parent_that_has_already_exited_is_recognized() -> None:
    """A server whose parent has already exited stops, because the kernel would send no signal."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *SMALL, "--port", "0", "--exit-with-parent", str(ended.pid)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert f"the parent process {ended.pid} has exited" in result.stderr


# -- clients


def paced(batches: Iterator[Any], until: ServerProcess) -> list[list[int]]:
    """Return batches, 10 ms apart, until a server has sent one."""
    received = []
    while until.stats()["datasets"][0]["batches_sent"] == 0:
        received.append(next(batches).tolist())
        time.sleep(0.01)
    return received


@pytest.mark.parametrize("kind", ["registry", "file"])
def test_servers_join_and_drain_during_an_epoch(start_server: StartServer, tmp_path: Path, kind: str) -> None:
    """The order is that of one server while servers join and drain, and clients log no error."""
    target = ("tests.end_to_end.hosted:unhurried", "--num-workers", "1")
    path = tmp_path / "servers"
    first = start_server(*target, "--announce", f"file://{path}")
    directory = at(first) if kind == "registry" else f"file://{path}"
    announcing = ("--announce", at(first) if kind == "registry" else f"file://{path}")
    second = start_server(*target, *announcing)
    eventually(lambda: second.url in (path.read_text() if kind == "file" else listed(first.url)))
    loader = DataLoader(RemoteDataset(directory, "unhurried"), batch_size=2, shuffle=True, seed=3)
    batches = iter(loader)
    received = [next(batches).tolist() for _ in range(60)]
    joined = start_server(*target, *announcing)
    received += paced(batches, joined)
    assert httpx.post(f"{second.url}/v1/drain").status_code == 202
    received += [batch.tolist() for batch in batches]
    assert second.process.wait(20) == 0
    alone = DataLoader(RemoteDataset(joined.url, "unhurried"), batch_size=2, shuffle=True, seed=3)
    assert received == [batch.tolist() for batch in alone]


def test_an_epoch_continues_without_its_registry(start_server: StartServer, free_port: int) -> None:
    """Clients keep their servers while the registry is down, and a restarted registry removes none of them."""
    target = ("tests.end_to_end.hosted:unhurried", "--num-workers", "1")
    registry = start_server(*SMALL, port=free_port)
    first = start_server(*target, "--announce", at(registry))
    eventually(lambda: listed(registry.url))
    batches = iter(DataLoader(RemoteDataset(at(registry), "unhurried"), batch_size=2, shuffle=True, seed=3))
    received = [next(batches).tolist() for _ in range(30)]
    registry.kill()
    received += [next(batches).tolist() for _ in range(70)]
    start_server(*SMALL, port=free_port)
    received += paced(batches, start_server(*target, "--announce", at(registry)))
    received += [batch.tolist() for batch in batches]
    alone = DataLoader(RemoteDataset(first.url, "unhurried"), batch_size=2, shuffle=True, seed=3)
    assert received == [batch.tolist() for batch in alone]
