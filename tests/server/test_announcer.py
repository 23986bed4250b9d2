"""Announcements of a server: files that several processes change, and registries that misbehave."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from teleloader_server.fleet import announcer
from teleloader_server.fleet.announcer import Announcer, FileDirectory, NotAnnounced, RegistryDirectory
from teleloader_server.fleet.registry import instance_of
from teleloader_shared.secret import Secret
from tests.server.test_verification import KEY, peer, response

URL = "http://10.0.0.5:8000"
TOKEN = Secret("a-token-of-a-test")


def file_at(path: Path, number: int = 0) -> FileDirectory:
    """Return the directory of the server with this number."""
    return FileDirectory(path, f"http://10.0.0.5:{8000 + number}")


def run(directory: FileDirectory, *actions: str) -> None:
    """Announce and withdraw, in turn."""
    for action in actions:
        asyncio.run(getattr(directory, action)())


def child(work: Callable[[], object]) -> int:
    """Run a function in a forked process, and return the PID."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    """Return the exit code of a process when it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# -- files


def test_a_file_has_a_line_for_each_server(tmp_path: Path) -> None:
    """A server adds and removes its own line, and keeps comments and the lines of other servers."""
    path = tmp_path / "servers"
    path.write_text("http://other:1\n# kept\n")
    directory = FileDirectory(path, URL)
    run(directory, "announce", "announce")
    assert path.read_text() == f"http://other:1\n# kept\n{URL}\n"
    run(directory, "withdraw", "withdraw")
    assert path.read_text() == "http://other:1\n# kept\n"


@pytest.mark.parametrize("other", ["http://10.0.0.5:80", "http://10.0.0.5:8000/x", "# http://10.0.0.5:8000", ""])
def test_a_line_may_contain_the_name_of_an_instance(tmp_path: Path, other: str) -> None:
    """A server recognizes its line by the URL, also if an instance follows."""
    path = tmp_path / "servers"
    path.write_text(f"{other}\n{URL} 6e340b9c\n")
    run(FileDirectory(path, URL), "announce")
    assert path.read_text() == f"{other}\n{URL} 6e340b9c\n"
    run(FileDirectory(path, URL), "withdraw")
    assert path.read_text() == f"{other}\n"


async def test_a_server_that_joins_removes_lines_of_killed_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A joining server removes lines whose machine refuses connections, and a heartbeat opens no connection."""
    monkeypatch.setattr(announcer, "PROBE_TIMEOUT_S", 0.3)
    path = tmp_path / "servers"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:  # does not accept connections
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        async with peer() as live:
            kept = ["# kept", "", live.url, f"{live.url} 1", "http://999.1.1.1", "http://nothing.invalid:1", "?",
                    f"http://127.0.0.1:{full.getsockname()[1]}"]  # fmt: skip
            killed = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port} instance"]
            path.write_text("\n".join([*kept[:3], killed[0], *kept[3:], killed[1], ""]))
            directory = FileDirectory(path, URL)
            await directory.announce()
            assert path.read_text().splitlines() == [*kept, URL]
            path.write_text(f"{killed[0]}\n{URL}\n")
            await directory.announce()
            assert path.read_text() == f"{killed[0]}\n{URL}\n"
        for each in waiting:
            each.close()


async def test_a_server_that_joins_opens_few_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A joining server checks a limited number of lines, so that several servers clean up a long file."""
    monkeypatch.setattr(announcer, "MAX_PROBED", 3)
    path = tmp_path / "servers"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    path.write_text("".join(f"http://127.0.0.1:{port}/{number}\n" for number in range(5)))
    for number, left in ((1, 2 + 1), (2, 0 + 2)):
        await file_at(path, number).announce()
        assert len(path.read_text().splitlines()) == left


def test_a_heartbeat_does_not_write(tmp_path: Path) -> None:
    """A heartbeat neither writes the file nor takes its lock, because a thousand servers may share it."""
    path = tmp_path / "servers"
    run(file_at(path), "announce")
    before = path.stat()
    (tmp_path / "servers.lock").unlink()
    run(file_at(path), "announce")
    assert path.stat().st_ino == before.st_ino
    assert not (tmp_path / "servers.lock").exists()


def test_servers_change_a_file_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent changes lose no line, and readers see whole lines at any time."""
    monkeypatch.setattr(announcer, "MAX_PROBED", 0)  # no server adds a line again
    path = tmp_path / "servers"
    rounds = ("announce", "withdraw") * 8
    workers = [child(lambda n=n: run(file_at(path, n), *rounds, "announce")) for n in range(6)]  # type: ignore[misc]
    running = set(workers)
    while running:
        content = path.read_text() if path.exists() else ""
        assert content == "" or content.endswith("\n")
        assert all(re.fullmatch(r"http://10\.0\.0\.5:800\d", line) for line in content.splitlines()), content
        for pid in list(running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                running.remove(pid)
    assert set(path.read_text().splitlines()) == {f"http://10.0.0.5:{8000 + number}" for number in range(6)}


def test_a_server_that_is_killed_while_it_changes_the_file_leaves_it_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill before the rename, the file is unchanged, the lock is free, and the temporary file is replaced."""
    path = tmp_path / "servers"
    run(file_at(path, 1), "announce")
    before = path.read_text()

    def be_killed() -> None:
        monkeypatch.setattr(Path, "rename", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        run(file_at(path, 2), "announce")

    assert exit_code(child(be_killed)) == -signal.SIGKILL
    assert path.read_text() == before
    assert (tmp_path / "servers.new").exists()
    run(file_at(path, 3), "announce")
    assert path.read_text() == before + "http://10.0.0.5:8003\n"
    assert not (tmp_path / "servers.new").exists()


def test_a_lock_that_is_never_released_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server does not wait for a lock that another process keeps, and retries later."""
    monkeypatch.setattr(announcer, "LOCK_TIMEOUT_S", 0.1)
    path = tmp_path / "servers"
    with announcer._locked(tmp_path / "servers.lock"), pytest.raises(NotAnnounced, match="is locked by another"):
        run(file_at(path), "announce")
    run(file_at(path), "announce")


def test_files_that_another_user_prepared_are_not_written(tmp_path: Path) -> None:
    """A server writes through no link at the lock or at the new file, which another user could create."""
    victim = tmp_path / "victim"
    victim.write_text("content")
    for name in ("servers.lock", "servers.new"):
        link = tmp_path / name
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
        if name == "servers.lock":
            with pytest.raises(NotAnnounced):
                run(file_at(tmp_path / "servers"), "announce")
            link.unlink()
        else:
            run(file_at(tmp_path / "servers"), "announce")
    assert victim.read_text() == "content"
    assert not (tmp_path / "servers").is_symlink()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"http://a:1 1\n" * 100_000], ids=["binary", "too long"])
def test_a_file_that_is_not_a_list_is_not_changed(tmp_path: Path, content: bytes) -> None:
    """A file with other content is refused and stays the same, because the option probably names the wrong file."""
    path = tmp_path / "servers"
    path.write_bytes(content)
    with pytest.raises(NotAnnounced, match="cannot change"):
        run(file_at(path), "announce")
    assert path.read_bytes() == content


async def test_a_withdrawal_follows_an_announcement_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops does not wait for a slow disk, and its line is removed after the disk has responded."""
    monkeypatch.setattr(announcer, "WITHDRAW_TIMEOUT_S", 0.1)
    path, rename = tmp_path / "servers", Path.rename
    writing, responded = threading.Event(), threading.Event()
    contents: list[str] = []

    def slow(source: Path, target: Path) -> None:
        writing.set()
        responded.wait()
        contents.append(source.read_text())
        rename(source, target)

    monkeypatch.setattr(Path, "rename", slow)
    announced = Announcer([FileDirectory(path, URL)], lambda: True)
    try:
        await asyncio.to_thread(writing.wait)
        await announced.withdraw()
        assert not path.exists()
    finally:
        responded.set()
    async with asyncio.timeout(10):
        while not path.exists() or path.read_text():
            await asyncio.sleep(0.01)
    assert contents == [f"{URL}\n", ""]


# -- registries


def registry_at(url: str, token: Secret | None = TOKEN) -> RegistryDirectory:
    """Return the directory of a registry."""
    return RegistryDirectory(url, URL, Secret(KEY), lambda: token, ssl.create_default_context)


async def test_an_announcement_has_the_key_and_the_token() -> None:
    """An announcement contains the key and the token, and a withdrawal has the public name in its path."""
    async with peer(response(b"{}")) as found:
        directory = registry_at(found.url)
        await directory.announce()
        await directory.withdraw()
    first, last = found.requests
    assert first.startswith(b"POST /v1/servers HTTP/1.1\r\n")
    assert last.startswith(b"DELETE /v1/servers/%b HTTP/1.1\r\n" % instance_of(KEY).encode())
    for request in found.requests:
        assert b"\r\nAuthorization: Bearer a-token-of-a-test\r\n" in request
        assert KEY.encode() not in request.partition(b"\r\n\r\n")[0]


async def test_a_registry_cannot_redirect_the_token() -> None:
    """A redirect by a registry is not followed, so that another server gets no token."""
    async with peer() as target:
        redirect = response(b"", "307 Temporary Redirect", f"Location: {target.url}/v1/servers\r\n".encode())
        async with peer(redirect) as found:
            with pytest.raises(NotAnnounced, match="status 307"):
                await registry_at(found.url).announce()
        assert target.requests == []


@pytest.mark.parametrize(
    ("sent", "message", "is_refused"),
    [
        (response(b'{"detail": "no\\u001b[2J\\nwhy"}', "403 Forbidden"), "status 403: no\ufffd[2J why", True),
        (response(b'{"detail": "later"}', "503 Service Unavailable"), "status 503: later", False),
        (response(b"x" * 10_000, "500 Internal Server Error"), "status 500: ", False),
        (response(b"{}", "202 Accepted"), "is still verifying an earlier announcement", False),
        (b"SSH-2.0\r\n", "no response from", False),
    ],
    ids=["refused", "unavailable", "long", "pending", "no http"],
)
async def test_the_reason_of_a_registry_is_reported_in_one_line(sent: bytes, message: str, is_refused: bool) -> None:
    """The error of a registry is reported in one line without control characters."""
    async with peer(sent) as found:
        with pytest.raises(NotAnnounced) as caught:
            await registry_at(found.url).announce()
    assert message in str(caught.value)
    assert caught.value.is_refused is is_refused


async def test_a_registry_that_hangs_does_not_delay_the_shutdown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The withdrawals from all directories together have one timeout."""
    monkeypatch.setattr(announcer, "WITHDRAW_TIMEOUT_S", 0.3)
    requested = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requested.set()
        try:
            await reader.read()
        finally:
            writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        announced = Announcer([registry_at(url) for _ in range(3)], lambda: True)
        await requested.wait()
        began = time.monotonic()
        await announced.leave()
        assert time.monotonic() - began < 2
        assert caplog.text.count(f"cannot withdraw this server from {url} within 0.3 s") == 3
        await asyncio.sleep(0.01)  # connections close
        server.close()


async def test_a_server_that_drains_while_it_announces_itself_is_withdrawn_last() -> None:
    """The withdrawal follows a pending announcement, which would list the server again."""
    events: list[bytes] = []
    requested = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method = head.partition(b" ")[0]
                events.append(method + b" begins")
                requested.set()
                if method == b"POST":
                    length = re.search(rb"Content-Length: (\d+)", head)
                    assert length is not None
                    await reader.readexactly(int(length[1]))
                    await asyncio.sleep(0.3)
                events.append(method + b" ends")
                writer.write(response(b"{}"))
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(slow, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        announced = Announcer([registry_at(url)], lambda: True)
        await requested.wait()
        await announced.withdraw()
        await asyncio.sleep(0.01)  # connections close
        server.close()
    assert events == [b"POST begins", b"POST ends", b"DELETE begins", b"DELETE ends"]


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


class Recorder:
    """A directory that records what happens."""

    name = "recorder"

    def __init__(self, failures: int = 0, *, is_refused: bool = False) -> None:
        self.events: list[str] = []
        self._failures = failures
        self._is_refused = is_refused

    async def announce(self) -> None:
        """Fail as often as specified."""
        self.events.append("announce")
        if len(self.events) <= self._failures:
            raise NotAnnounced("not yet", is_refused=self._is_refused)

    async def withdraw(self) -> None:
        """Record it."""
        self.events.append("withdraw")


async def test_a_server_is_announced_while_it_is_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server is withdrawn once and never announced afterwards, and each change is logged once."""
    monkeypatch.setattr(announcer, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(announcer, "PROPAGATION_S", 0.2)
    caplog.set_level(logging.INFO)
    ready, checks = False, 0

    def is_ready() -> bool:
        nonlocal checks
        checks += 1
        return ready

    directory = Recorder(failures=3)
    announced = Announcer([directory], is_ready)
    await until(lambda: checks > 3)
    assert directory.events == []
    ready = True
    await until(lambda: len(directory.events) > 5)
    ready = False
    count, last = len(directory.events), checks
    await until(lambda: checks > last + 3)
    assert len(directory.events) == count, "no heartbeat while it cannot compute batches"
    began = time.monotonic()
    await announced.leave()
    assert time.monotonic() - began > 0.15, "clients read the directory meanwhile"
    await announced.withdraw()
    assert directory.events.count("withdraw") == 1
    assert directory.events[-1] == "withdraw"
    messages = [record.getMessage() for record in caplog.records if record.name == "teleloader_server"]
    assert messages == ["cannot announce this server, retrying: not yet", "announced in recorder"]


@pytest.mark.parametrize("bad", ["announce", "withdraw", "ready"])
async def test_unexpected_errors_do_not_end_the_heartbeats(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    """Heartbeats continue after an unexpected error, which is logged once with the traceback."""
    monkeypatch.setattr(announcer, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(announcer, "NOT_READY_S", 0.01)
    monkeypatch.setattr(announcer, "REFUSED_S", 0.02)
    directory, failures = Recorder(), 3

    def fail(*_: object) -> bool:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise RuntimeError("can't start new thread")
        return True

    async def failing() -> None:
        fail()
        directory.events.append(bad)

    if bad != "ready":
        monkeypatch.setattr(directory, bad, failing)
    announced = Announcer([directory], fail if bad == "ready" else lambda: True)
    await until(lambda: directory.events.count("announce") >= 2)
    await announced.withdraw()
    if bad != "withdraw":
        assert directory.events[-1] == "withdraw"
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    doing = "withdraw this server" if bad == "withdraw" else "announce this server, retrying"
    reason = "unexpected error of recorder: RuntimeError: can't start new thread"
    assert record.getMessage() == f"cannot {doing}: {reason}"
    assert record.exc_info is not None


async def test_urls_that_no_client_accepts_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """A URL that HTTP clients reject is reported as an error, also if the command line did not check it."""
    announced = Announcer([registry_at("http://999.1.1.1")], lambda: True)
    await until(lambda: caplog.records)
    await announced.withdraw()
    assert "unexpected error of http://999.1.1.1: InvalidURL: Invalid IPv4 address" in caplog.text


async def test_a_failed_announcement_is_followed_by_a_withdrawal() -> None:
    """A server withdraws after an announcement without a response, because the directory may list it."""
    directory = Recorder(failures=1000)
    announced = Announcer([directory], lambda: True)
    await until(lambda: directory.events)
    await announced.withdraw()
    assert directory.events[-1] == "withdraw"


async def test_a_refused_announcement_is_repeated_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused announcement is repeated soon at first: the registry may not resolve a new server's name yet."""
    monkeypatch.setattr(announcer, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(announcer, "REFUSED_S", 0.08)
    refused, failing = Recorder(1000, is_refused=True), Recorder(1000)
    announced = Announcer([refused, failing], lambda: True)
    await until(lambda: len(refused.events) == 6)
    assert len(failing.events) > 2 * len(refused.events)
    await announced.withdraw()


async def test_a_server_that_was_never_announced_drains_at_once() -> None:
    """A server that was never announced drains without a delay, because no client can have found it."""
    directory = Recorder()
    announced = Announcer([directory], lambda: False)
    began = time.monotonic()
    await announced.leave()
    assert time.monotonic() - began < announcer.PROPAGATION_S / 2
    assert directory.events == []
