"""Directories: functions, files, DNS names and registries that list the URLs of servers."""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from teleloader.api.control import Server
from teleloader_shared.directory import Listing, directory_address, listing, merged, port_of
from teleloader_shared.errors import Forbidden, TeleloaderError, TlsError, Unauthorized
from teleloader_shared.text import sentence

REGISTRY_TIMEOUT_S: Final = 2.0
"""Seconds without a received byte after which a registry counts as unavailable."""
SLOW_REGISTRY_S: Final = 0.5
"""Maximum wait in seconds for a registry if another one lists servers."""
MAX_FILE_BYTES: Final = 2**20
"""Maximum size of a file with server URLs."""
SCHEMES: Final = ("file:", "dns+http:", "dns+https:", "registry+http:", "registry+https:")
"""Beginnings of the addresses of directories."""


class Directory(Protocol):
    """List of servers, which can change at any time."""

    address: str
    """Name of the directory in messages."""
    is_trusted: bool
    """True if the URLs are the user's own: then the client sends its token to each of them."""
    grace: float
    """Seconds for which a server that is not listed any more remains in use."""
    server_name: str | None
    """Name that the certificates of the servers must contain; None for the hosts of their URLs."""

    def read(self) -> Listing:
        """Return the servers that are listed now; errors are `Listing.problems`."""


class FunctionDirectory:
    """Servers that a function of the user returns, all of which the client trusts.

    Args:
        function: Function without arguments that returns server URLs, called in a background thread.
    """

    is_trusted: bool = True
    grace: float = 0.0
    server_name: str | None = None

    def __init__(self, function: Callable[[], Iterable[str]]) -> None:
        self._function = function
        self.address = f"{getattr(function, '__qualname__', None) or type(function).__qualname__}()"

    def read(self) -> Listing:
        """Call the function."""
        try:
            return listing(self._function())
        except Exception as error:  # noqa: BLE001 - code of the user; the known servers remain
            return _unreadable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


class FileDirectory:
    """Servers that a file lists, one per line: the URL, and optionally the name of the instance, which is ignored.

    Empty lines and lines that begin with ``#`` are ignored.

    Args:
        address: Address of the directory.
        path: Absolute path of the file.
    """

    is_trusted: bool = False
    grace: float = 0.0
    server_name: str | None = None

    def __init__(self, address: str, path: Path) -> None:
        self.address = address
        self._path = path

    def read(self) -> Listing:
        """Read the file, unless other users can write to it."""
        if sys.platform == "win32":
            problem = (
                "on Windows, the client cannot check which users can write to a file: pass a function that returns the "
                "URLs in place of the file"
            )
            return replace(_unreadable(problem), refusal=TeleloaderError(problem))
        user = os.geteuid()

        def without_waiting(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NONBLOCK)  # a named pipe would block until a writer opens it

        try:
            with open(self._path, "rb", opener=without_waiting) as file:
                problem = _writable(os.fstat(file.fileno()), self._path, user)
                problem = problem or _writable(self._path.parent.stat(), self._path.parent, user)
                content = b"" if problem else file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            return _unreadable(error.strerror or str(error))
        if problem is None and len(content) > MAX_FILE_BYTES:
            problem = f"the file exceeds {MAX_FILE_BYTES:,} bytes"
        if problem is not None:
            return _unreadable(problem)
        lines = (line.split(maxsplit=1) for line in content.decode(errors="replace").splitlines())
        return listing(
            [dict(zip(("url", "instance"), words, strict=False)) for words in lines if words and words[0][0] != "#"]
        )


class DnsDirectory:
    """Servers at all IP addresses of a DNS name, such as a headless Service of Kubernetes.

    Args:
        address: Address of the directory.
        url: URL of the servers with the DNS name as the host.
    """

    is_trusted: bool = False
    grace: float = 3.0  # some DNS servers return another part of their records each time

    def __init__(self, address: str, url: str) -> None:
        self.address = address
        self._url = url
        self.server_name = urlsplit(url).hostname

    def read(self) -> Listing:
        """Resolve the name with the resolver of the operating system."""
        parts = urlsplit(self._url)
        port = port_of(self._url)
        try:
            found = socket.getaddrinfo(self.server_name, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            return _unreadable(sentence(getattr(error, "strerror", None) or str(error)))
        hosts = sorted({str(address[0]) for *_, address in found})
        return listing(
            [f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}{parts.path}" for host in hosts]
        )


class RegistryDirectory:
    """Servers that announced themselves to registries.

    Args:
        address: Address of the directory.
        registries: Clients of the registries, each of which is a loader server.
    """

    is_trusted: bool = False
    grace: float = 0.0
    server_name: str | None = None

    def __init__(self, address: str, registries: Sequence[Server]) -> None:
        self.address = address
        self._registries = registries
        self._pending: list[_Request] = []
        """Pending requests of the last read."""

    def read(self) -> Listing:
        """Request the lists of all registries concurrently; incomplete if a registry does not respond.

        A registry gets no further request while its response to an earlier read is pending.
        """
        if len(self._registries) == 1:
            return _listed_by(self._registries[0])
        # the threads of a parent process do not exist in its children
        pending = {request.registry: request for request in self._pending if request.is_alive() or request.has_ended}
        requests = [pending.get(registry) or _Request(registry) for registry in self._registries]
        deadline = time.monotonic() + SLOW_REGISTRY_S
        for request in requests:
            request.join(max(0.0, deadline - time.monotonic()))
        for request in requests:
            if any(each.listing.entries for each in requests):
                break
            request.join()  # the timeout of the request limits this wait
        self._pending = [request for request in requests if request.is_alive()]
        return merged([request.listing for request in requests])


class _Request(threading.Thread):
    """Thread that requests the list of a registry; a daemon, so that it does not delay the exit of the process."""

    def __init__(self, registry: Server) -> None:
        super().__init__(name="teleloader-registry", daemon=True)
        self.registry = registry
        self.has_ended = False
        self.listing = _unreadable(f"{registry.url} has not responded within {SLOW_REGISTRY_S:g} s")
        self.start()

    def run(self) -> None:
        """Request the list."""
        self.listing = _listed_by(self.registry)
        self.has_ended = True


def _listed_by(registry: Server) -> Listing:
    try:
        return listing(registry.servers())
    except (Unauthorized, Forbidden, TlsError) as error:
        return replace(_unreadable(str(error)), refusal=error)
    except TeleloaderError as error:
        return _unreadable(str(error))


def directory_of(source: object, connect: Callable[..., Server]) -> Directory | None:
    """Return the directory that a user passed: a function or an address; None for the URLs of servers.

    Args:
        source: Argument of the user.
        connect: Function that creates the client of a registry, given the URL and ``timeout=``.

    Raises:
        ValueError: If the address is invalid.
    """
    if callable(source):
        return FunctionDirectory(source)
    if not isinstance(source, str) or not source.startswith(SCHEMES):
        return None
    parsed = directory_address(source)
    if parsed.kind == "file":
        return FileDirectory(source, Path(parsed.path))
    if parsed.kind == "dns":
        return DnsDirectory(source, parsed.urls[0])
    return RegistryDirectory(source, [connect(url, timeout=REGISTRY_TIMEOUT_S) for url in parsed.urls])


def _unreadable(problem: str) -> Listing:
    return Listing((), is_complete=False, problems=(problem,))


def _writable(status: os.stat_result, path: Path, user: int) -> str | None:
    """Return why users other than `user` can change a file or folder, or None if they cannot."""
    if status.st_uid not in (0, user):
        return f"{path} belongs to another user, who could add servers: change its owner"
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        return f"other users can write to {path}, and could add servers: run chmod go-w {path}"
    return None
