"""Announcements of this server in directories: registries and files. Clients find the server there.

A server announces itself when its first worker is ready, and withdraws before it rejects requests. In between, a
heartbeat renews the announcement, so that a registry that restarts and a file that is replaced list the server again.
A server that stops being ready, for example because its workers exit, sends no heartbeats and does not withdraw: a
registry removes it after `registry.TTL_S`, and a file keeps its line.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import random
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

import httpx

from teleloader_server.fleet.registry import instance_of
from teleloader_server.fleet.responses import NO_TLS, read_object
from teleloader_shared.directory import port_of, server_url
from teleloader_shared.messages import NO_PAGE_HEADER, SERVERS_PATH
from teleloader_shared.secret import Secret
from teleloader_shared.server_summary import ServerSummary
from teleloader_shared.text import sentence

TOKEN_VARIABLE: Final = "TELELOADER_ANNOUNCE_TOKEN"  # noqa: S105 - a name, not a token
"""Environment variable with the token for registries."""
HEARTBEAT_S: Final = 0.5
REFUSED_S: Final = 5.0
"""Maximum seconds until the next attempt after a registry refused the announcement; doubled from attempt to attempt."""
NOT_READY_S: Final = 0.05
"""Interval in seconds at which a server that has never been ready is checked."""
JITTER: Final = 0.2
"""Largest random change of an interval, as a fraction, so that servers do not send heartbeats at the same time."""
REQUEST_TIMEOUT_S: Final = 5.0
"""Timeout of a request to a registry, which verifies the announcement meanwhile."""
WITHDRAW_TIMEOUT_S: Final = 2.0
PROPAGATION_S: Final = 1.0
"""Seconds until all clients of a file or registry have read a change; changes of DNS names take longer."""
LOCK_TIMEOUT_S: Final = 1.0
"""Timeout for the lock of a file; servers hold it for milliseconds."""
MAX_FILE_BYTES: Final = 2**20
MAX_PROBED: Final = 64
"""Lines of a file that a server checks when it joins."""
PROBE_TIMEOUT_S: Final = 1.0

logger = logging.getLogger("teleloader_server")


class NotAnnounced(Exception):
    """A directory does not list this server; the message contains the reason.

    Attributes:
        is_refused: True if the directory rejected the announcement, so that a retry will probably fail again.
    """

    def __init__(self, reason: str, *, is_refused: bool = False) -> None:
        super().__init__(reason)
        self.is_refused = is_refused


class Directory(Protocol):
    """Interface of a directory that lists this server."""

    name: str
    """Address, for messages."""

    async def announce(self) -> None:
        """List this server, or renew its announcement.

        Raises:
            NotAnnounced: If the directory does not list the server now.
        """

    async def withdraw(self) -> None:
        """Remove this server from the list.

        Raises:
            NotAnnounced: If the directory cannot be changed.
        """


class RegistryDirectory:
    """A registry: any teleloader-server.

    Args:
        registry: URL of the registry.
        url: URL of this server.
        key: Secret key of this server process.
        token: Function that returns the token with the scope ``announce``; None for a registry without tokens.
        context: Function that returns the TLS context for an https registry.
        summary: Function that returns the figures of this server, which the registry's dashboard shows.
    """

    def __init__(
        self,
        registry: str,
        url: str,
        key: Secret,
        token: Callable[[], Secret | None],
        context: Callable[[], ssl.SSLContext],
        summary: Callable[[], ServerSummary] | None = None,
    ) -> None:
        self.name = registry
        self._announcement = {"url": url, "instance_key": key}
        self._summary = summary
        self._instance = instance_of(key)
        self._token = token
        self._context = context
        self._client: httpx.AsyncClient | None = None

    async def announce(self) -> None:
        """Send an announcement; the first one also makes the registry verify the URL."""
        figures = {} if self._summary is None else {"summary": asdict(self._summary())}
        await self._request("POST", SERVERS_PATH, json=self._announcement | figures)

    async def withdraw(self) -> None:
        """Withdraw the announcement, and close the connection."""
        try:
            await self._request("DELETE", f"{SERVERS_PATH}/{self._instance}")
        finally:
            await self._close()

    async def _request(self, method: str, path: str, json: dict[str, Any] | None = None) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                client = self._connect()
                async with client.stream(method, self.name + path, json=json) as response:
                    problem = {} if response.is_success else await read_object(response)
        except (httpx.HTTPError, OSError, ValueError) as error:  # OSError: also a file of a token or certificate
            await self._close()
            reason = sentence(str(error)) or type(error).__name__
            raise NotAnnounced(f"no response from {self.name}: {reason}") from None
        if not response.is_success:
            await self._close()  # the next attempt reads the token and the certificates again
            detail = sentence(str(problem.get("detail", "")))
            if response.status_code == httpx.codes.UNAUTHORIZED:  # its advice is for clients
                detail = "the token is missing or unknown. Pass one with the scope announce in --announce-token-file"
            raise NotAnnounced(
                f"{self.name} responded with status {response.status_code}: {detail}",
                is_refused=response.is_client_error,
            )
        if response.status_code == httpx.codes.ACCEPTED:
            raise NotAnnounced(f"{self.name} is still verifying an earlier announcement")

    def _connect(self) -> httpx.AsyncClient:
        """Return the client, with a token and certificates as they were when it was created.

        Raises:
            OSError: If a file of the token or of a certificate is unreadable.
            ValueError: If the token is malformed.
        """
        if self._client is None:
            headers = {NO_PAGE_HEADER: "1", "Accept-Encoding": "identity"}
            token = self._token()
            if token is not None:
                headers["Authorization"] = Secret(f"Bearer {token}")
            verify = self._context() if self.name.startswith("https:") else NO_TLS
            self._client = httpx.AsyncClient(verify=verify, trust_env=False, timeout=REQUEST_TIMEOUT_S, headers=headers)
        return self._client

    async def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


class FileDirectory:
    """A file on a disk that clients and servers share, with the URL of a server on each line.

    A server changes its own line only. It holds a lock on ``PATH.lock``, and replaces the file by a rename, so that
    readers see a whole file at any time, also if the server is killed: the kernel releases the lock.

    Args:
        path: The file.
        url: URL of this server.
    """

    def __init__(self, path: Path, url: str) -> None:
        self.name = f"file://{path}"
        self._path = path
        self._url = url
        self._thread = ThreadPoolExecutor(1, "teleloader-announce")
        """Applies changes in their order. A change continues when the task that waits for it is cancelled."""

    async def announce(self) -> None:
        """Add this server's line, if the file lacks it; then also remove lines of servers that were killed.

        Only a server that joins removes them. Thus, the file does not grow when servers are replaced, and heartbeats
        open no connections. A running server whose line was removed adds the line again with its next heartbeat.
        """
        try:
            before = await self._changed(self._announced)
            if self._url not in map(_url_in, before):
                killed = await _refusing(before)
                await self._changed(lambda lines: [line for line in lines if line not in killed])
        except asyncio.CancelledError:  # this server stops, and no longer waits
            self._thread.submit(self._change, self._withdrawn)
            raise

    async def withdraw(self) -> None:
        """Remove this server's line."""
        await self._changed(self._withdrawn)

    async def _changed(self, change: Callable[[list[str]], list[str]]) -> list[str]:
        """Change the file in the thread, and return its former lines."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._change, change)

    def _announced(self, lines: list[str]) -> list[str]:
        return lines if self._url in map(_url_in, lines) else [*lines, self._url]

    def _withdrawn(self, lines: list[str]) -> list[str]:
        return [line for line in lines if _url_in(line) != self._url]

    def _change(self, change: Callable[[list[str]], list[str]]) -> list[str]:
        """Change the file, and return its former lines."""
        try:
            before = self._read()
            if change(before) != before:  # a heartbeat takes no lock
                with _locked(self._path.with_name(f"{self._path.name}.lock")):
                    before = self._read()
                    self._write(change(before))
            return before
        except (OSError, UnicodeDecodeError) as error:
            raise NotAnnounced(f"cannot change {self._path}: {error}") from None

    def _read(self) -> list[str]:
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return []
        if len(content) > MAX_FILE_BYTES:
            raise OSError(f"the file exceeds {MAX_FILE_BYTES:,} bytes: check that --announce names a list of servers")
        return content.decode().splitlines()

    def _write(self, lines: list[str]) -> None:
        new = self._path.with_name(f"{self._path.name}.new")
        new.unlink(missing_ok=True)  # remains of a server that was killed before its rename
        # O_EXCL: other users who can write to the folder could create a link, or a file that they can write
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o644)  # clients reject a file that other users can write
            file.writelines(f"{line}\n" for line in lines)
        new.rename(self._path)


def _url_in(line: str) -> str:
    """Return the URL in a line, which may be followed by the name of an instance; "" for an empty line."""
    return (line.split() or [""])[0]


async def _refusing(lines: Sequence[str]) -> list[str]:
    """Return the lines of servers whose machine refuses connections, because no process listens at the URL.

    Without a response, the server may still be reachable for clients. At most `MAX_PROBED` lines are checked.
    """
    probed = random.sample(lines, min(len(lines), MAX_PROBED))
    refused = await asyncio.gather(*map(_is_refused, probed))
    return [line for line, is_refused in zip(probed, refused, strict=True) if is_refused]


async def _is_refused(line: str) -> bool:
    try:
        url = server_url(_url_in(line))
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(httpx.URL(url).host, port_of(url))
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, httpx.InvalidURL):  # ValueError: also a comment
        return False
    writer.close()
    return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is created if it is missing.

    The file is not removed: another process could wait for the lock of a removed file while a third one creates it.

    Raises:
        OSError: If the lock is held for longer than `LOCK_TIMEOUT_S`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError(f"{path} is locked by another process") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


class Announcer:
    """Announcement of this server in several directories at the same time.

    Args:
        directories: The directories.
        is_ready: Function that returns True if the server can compute batches.
    """

    def __init__(self, directories: Sequence[Directory], is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready
        self._stopping = asyncio.Event()
        self._was_announced = False
        self._tasks = [asyncio.create_task(self._run(directory), name=directory.name) for directory in directories]

    async def withdraw(self) -> None:
        """Withdraw the server from all directories, and end the heartbeats; no-op if it has withdrawn."""
        self._stopping.set()
        if not self._tasks:
            return
        _, pending = await asyncio.wait(self._tasks, timeout=WITHDRAW_TIMEOUT_S)
        for task in pending:
            logger.warning("cannot withdraw this server from %s within %g s", task.get_name(), WITHDRAW_TIMEOUT_S)
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def leave(self) -> None:
        """Withdraw the server, and wait until clients have read the change and send no new requests."""
        await self.withdraw()
        if self._was_announced:
            await asyncio.sleep(PROPAGATION_S)

    async def _run(self, directory: Directory) -> None:
        reported: str | None = None
        """Problem that was logged last; "" after a success, None at first."""
        was_sent, pause = False, NOT_READY_S
        while not self._stopping.is_set():
            try:
                if self._is_ready():
                    was_sent = True
                    await directory.announce()
                    pause = HEARTBEAT_S
                    if reported != "":
                        logger.info("announced in %s", directory.name)
                    reported = ""
                    self._was_announced = True
            except Exception as error:  # the end of this task would go unnoticed
                problem = _problem(directory, error)
                pause = min(REFUSED_S, 2 * max(pause, HEARTBEAT_S)) if problem.is_refused else HEARTBEAT_S
                if str(problem) != reported:
                    reported = str(problem)
                    logger.warning("cannot announce this server, retrying: %s", problem, exc_info=problem.__cause__)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause * random.uniform(1 - JITTER, 1 + JITTER)):  # noqa: S311
                    await self._stopping.wait()
        if was_sent:  # the directory may list the server although the last response was an error
            try:
                await directory.withdraw()
            except Exception as error:
                problem = _problem(directory, error)
                logger.warning("cannot withdraw this server: %s", problem, exc_info=problem.__cause__)


def _problem(directory: Directory, error: Exception) -> NotAnnounced:
    """Return the reason why a directory failed; an unexpected error is the cause of the returned one."""
    if isinstance(error, NotAnnounced):
        return error
    problem = NotAnnounced(f"unexpected error of {directory.name}: {type(error).__name__}: {error}", is_refused=True)
    problem.__cause__ = error
    return problem
