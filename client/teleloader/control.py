"""The control plane: what a client asks a server for besides batches, each request on a connection of its own."""

from __future__ import annotations

import functools
import ipaddress
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from reprlib import repr as short
from types import UnionType
from typing import Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import quote

import httpx

from teleloader.credentials import Credentials, refused_client, tls_error
from teleloader.failures import known_error
from teleloader_shared import local
from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES
from teleloader_shared.errors import (
    AccessDenied,
    ProtocolError,
    ServerUnavailable,
    TeleloaderError,
    TlsError,
    Unauthorized,
    VersionMismatch,
    WorkerDied,
)
from teleloader_shared.messages import (
    CONSUMER_HEADER,
    DATASETS_PATH,
    FRAME_MEDIA_TYPE,
    HEALTH_PATH,
    LOADERS_PATH,
    PROTOCOL_HEADER,
    PROTOCOL_VERSION,
    STATS_PATH,
    DatasetInfo,
    Registration,
    batches_path,
    loader_path,
)
from teleloader_shared.spec import MAX_EPOCH, LoaderSpec
from teleloader_shared.text import sentence

MAX_PORT: Final = 65535
MAX_JSON_BYTES: Final = 16 * 2**20
MAX_NAME: Final = 4096
"""Characters of a name that a server states."""
MAX_LISTED: Final = 4096
"""Names in a list of them."""
PATIENCE_FACTOR: Final = 3
"""An answer must be complete in so many times the seconds after which a silent server counts as gone."""
END_TIMEOUT: Final = 2.0
"""Seconds that an iterator which is dropped waits for the server to take note."""
PROBE: Final = 1.0
"""Seconds after which a server that says nothing counts as one that waits for a request."""

logger = logging.getLogger("teleloader")

_Record = TypeVar("_Record", DatasetInfo, Registration)


class Unreached(ServerUnavailable):
    """There was not even a connection."""


class Server:
    """A loader server.

    Args:
        url: Where it is.
        timeout: Seconds without a byte after which it counts as gone.
        credentials: What is shown to it; None shows what the environment says.

    Raises:
        ValueError: When `url` is no HTTP URL, or holds a password.
    """

    def __init__(self, url: str, timeout: float, credentials: Credentials | None = None) -> None:
        parsed = _parsed(url)
        self.url = str(parsed).rstrip("/")
        self.timeout = timeout
        self.credentials = Credentials() if credentials is None else credentials
        if self.credentials.token is not None and not self._is_secure and not _is_this_machine(parsed.host):
            _warn_of_clear_token(self.url)
        self.trouble: type[Exception] | None = None
        """Why it did not do what it was asked for last: others are asked first, and the user was told of it."""

    def answered(self) -> None:
        """It did what it was asked for: the user, who was told that it does not, is told so."""
        if self.trouble is not None:
            logger.warning("%s answers now", self.url)
            self.trouble = None

    def datasets(self) -> list[DatasetInfo]:
        """What it hosts."""
        answer = self._request("GET", DATASETS_PATH)
        if not isinstance(answer, list):
            raise ProtocolError(f"{self.url} lists no datasets, but says {short(answer)}: is it a loader server?")
        return [_record(DatasetInfo, found) for found in answer]

    def dataset(self, name: str) -> DatasetInfo:
        """What it says of a dataset."""
        return _record(DatasetInfo, self._request("GET", f"{DATASETS_PATH}/{quote(name, safe='')}"))

    def register(self, spec: LoaderSpec) -> Registration:
        """Make a loader known, however often.

        Raises:
            ServerUnavailable: When the server does not answer.
            DatasetChanged: When it hosts other data now than `spec` was made for.
            VersionMismatch: When it speaks another version of the protocol.
        """
        registered = _record(Registration, self._request("POST", LOADERS_PATH, json=spec.to_json()))
        if registered.protocol != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"{self.url} speaks protocol version {short(registered.protocol)} and this client {PROTOCOL_VERSION}: "
                "install the same release of teleloader on both sides"
            )
        return registered

    def touch(self, key: str) -> None:
        """Say that a session's client is still there, though it asks for nothing.

        Raises:
            ServerUnavailable: When the server does not answer.
            UnknownLoader: When it has no such session any more.
        """
        self._request("GET", loader_path(key))

    def end_session(self, key: str) -> None:
        """Say that a loader's own workers are not needed any more; the server would find out by itself, later."""
        with suppress(TeleloaderError):
            self._request("DELETE", loader_path(key), timeout=END_TIMEOUT)

    def batch(self, key: str, epoch: int, k: int, listed: bytes | None = None, *, consumer: str) -> bytes:
        """The frame of one batch.

        Args:
            key: The loader's.
            epoch: The epoch.
            k: Number of the batch.
            listed: The frame of its indices, for an order of the client's own.
            consumer: What the server calls whoever asks.
        """
        path, options = batches_path(key, epoch), {"timeout": None, "headers": {CONSUMER_HEADER: consumer}}
        frame: bytes = (
            self._request("GET", f"{path}/{k}", **options)
            if listed is None
            else self._request("POST", f"{path}?start={k}", content=listed, **options)
        )
        return frame

    def stats(self, limit: int) -> Any:
        """What ``/stats`` answers, as JSON, with at most so many consumers.

        Raises:
            ServerUnavailable: When the server does not answer.
            ProtocolError: When what answers is no loader server.
        """
        return self._request("GET", f"{STATS_PATH}?limit={limit}")

    def is_alive(self) -> bool:
        """Whether it answers at all."""
        if local.is_served_here(self.url):
            return True  # what holds it up is user code in this process
        try:
            self._request("GET", HEALTH_PATH, timeout=self.timeout / 2)
        except ServerUnavailable:
            return False
        except TeleloaderError:
            pass  # it answers, whatever it is
        return True

    def broke(self, error: Exception) -> TlsError | None:
        """What it means that a connection broke, where it is nothing that asking again mends."""
        found = tls_error(error, self.url)
        if found is not None or not isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
            return found
        if self._is_secure:
            return refused_client(self.url, self.credentials) if self._hangs_up(self.credentials.context()) else None
        blind = ssl.create_default_context()
        blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
        if self._hangs_up(blind) is None:
            return None
        return TlsError(f"no batches from {self.url}: the server speaks TLS, so write https://")

    @property
    def _is_secure(self) -> bool:
        return self.url.startswith("https")

    def _hangs_up(self, context: ssl.SSLContext) -> bool | None:
        """Whether the server ends a TLS connection that nobody has asked for anything; None when there is no TLS.

        That is how it looks from here when a server does not take the client's certificate.
        """
        url = httpx.URL(self.url)
        try:
            with (
                socket.create_connection((url.host, url.port or (443 if self._is_secure else 80)), PROBE) as plain,
                context.wrap_socket(plain, server_hostname=url.host) as connected,
            ):
                try:
                    return not connected.recv(1)
                except TimeoutError:
                    return False
                except OSError:
                    return True
        except OSError:
            return None

    def _request(self, method: str, path: str, **options: Any) -> Any:
        shown = self.credentials.token
        try:
            return self._ask(method, path, **options)
        except Unauthorized:
            if not self.credentials.renew(shown):
                raise
        return self._ask(method, path, **options)

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        headers = {
            PROTOCOL_HEADER: str(PROTOCOL_VERSION), "Accept-Encoding": "identity", **self.credentials.headers,
            **options.get("headers", {}),
        }  # fmt: skip
        options = {"timeout": self.timeout, **options, "headers": headers}
        verify = self.credentials.context() if self._is_secure else False
        connected: list[socket.socket] = []
        try:
            # a client for each of these few requests: no socket is left open between them. What the environment says
            # of proxies is ignored, because the batches themselves do not go through one either
            with (
                httpx.Client(verify=verify, trust_env=False) as client,
                _deadline(options["timeout"], connected) as trace,
                client.stream(method, self.url + path, extensions={"trace": trace}, **options) as answer,
            ):
                body = _body_of(answer)
        except httpx.TransportError as error:
            raise self.broke(error) or self._unanswered(error, is_reached=bool(connected)) from None
        if answer.status_code == httpx.codes.NO_CONTENT:
            return None
        if answer.status_code != httpx.codes.OK:
            raise error_of(answer.status_code, body, self.url, path)
        if answer.headers.get("content-type") == FRAME_MEDIA_TYPE:
            return body
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise ProtocolError(f"{answer.url} answers with something that is not JSON: no loader server?") from None

    def _unanswered(self, error: httpx.TransportError, *, is_reached: bool) -> ServerUnavailable:
        why = sentence(str(error)) or type(error).__name__
        if is_reached:
            return ServerUnavailable(f"no loader server answers at {self.url}, though something listens there: {why}")
        return Unreached(f"no loader server answers at {self.url}: {why}")


def _parsed(url: object) -> httpx.URL:
    """A URL of a server.

    Raises:
        ValueError: When it is none, or holds a password.
    """
    wrong = f"the server's URL must look like http://host:8000, was {_without_secrets(url)}"
    if not isinstance(url, str) or any(c.isspace() for c in url):
        raise ValueError(wrong)
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"{wrong} ({error})") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(wrong)
    if parsed.port is not None and not 0 < parsed.port <= MAX_PORT:
        raise ValueError(f"{wrong} (a port is a number in [1, {MAX_PORT}])")
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ValueError(
            "the server's URL must hold no password, query or fragment, because URLs are logged: give a token as "
            "token= or by TELELOADER_TOKEN"
        )
    return parsed


def _is_this_machine(host: str) -> bool:
    """Whether a host of a URL is this machine, without a look-up of its name."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


@functools.cache  # once for each server, however many datasets are made of it
def _warn_of_clear_token(url: str) -> None:
    logger.warning(
        "the token for %s is sent in clear, because http:// has no TLS: everybody on the network path can read and use "
        "it. Start the server with --ssl-certfile and write https://",
        url,
    )


def _without_secrets(url: object) -> str:
    """As much of a URL as may stand in a log."""
    return "one with a password or something like it" if isinstance(url, str) and "@" in url else f"{url!r:.200}"


@contextmanager
def _deadline(timeout: float | None, connected: list[socket.socket]) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """What tells of a connection, which is broken when the answer is not there after a few times the timeout.

    The timeout is for each byte: a server that sends one now and then would be waited for without end.

    Args:
        timeout: In seconds.
        connected: Where the connection is put when there is one.
    """

    def trace(event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            # a duplicate: TLS takes the socket itself over
            connected.append(info["return_value"].get_extra_info("socket").dup())

    def break_off() -> None:
        for one in connected:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    watch = threading.Timer(0 if timeout is None else PATIENCE_FACTOR * timeout, break_off)
    watch.daemon = True
    if timeout is not None:
        with suppress(RuntimeError):  # when the interpreter ends, no thread starts any more
            watch.start()
    try:
        yield trace
    finally:
        watch.cancel()
        for one in connected:
            one.close()


def _body_of(answer: httpx.Response) -> bytes:
    """The body as it came: what was compressed unasked is not unpacked, because a little can unpack to very much."""
    most = DEFAULT_MAX_BATCH_BYTES if answer.headers.get("content-type") == FRAME_MEDIA_TYPE else MAX_JSON_BYTES
    body = bytearray()
    for piece in answer.iter_raw():
        body += piece
        if len(body) > most:
            raise ProtocolError(f"{answer.url} answers with more than {most:,} bytes: no loader server?")
    return bytes(body)


def error_of(status: int, body: bytes, server: str, path: str = "") -> TeleloaderError:
    """The error that an answer other than 200 stands for; a 5xx, which may be a proxy's, means: not now.

    Args:
        status: The answer's.
        body: The answer's; a loader server says in it what is wrong, with a code.
        server: URL of the server that was asked, which is named where it lets somebody not do something.
        path: Below that.
    """
    problem = _problem_of(body)
    code, detail = problem.get("code", ""), sentence(problem.get("detail", body[:200].decode(errors="replace")))
    # any web server has addresses where nothing is
    doubt = "" if code and status != httpx.codes.NOT_FOUND else ". Is that the address and port of a loader server?"
    error = known_error(code, detail) or ProtocolError(
        f"{server}{path} answered {status}{f': {detail}' if detail else ''}{doubt}"
    )
    if isinstance(error, AccessDenied | ServerUnavailable):
        return type(error)(f"{refusing(server)}{error}")
    if status >= httpx.codes.INTERNAL_SERVER_ERROR and not isinstance(error, WorkerDied):
        return ServerUnavailable(str(error))
    return error


def refusing(server: str) -> str:
    """How an error begins that says why a server does not do something."""
    return f"{server} refuses: "


def _problem_of(body: bytes) -> dict[str, str]:
    """The fields of a problem+json body, {} when it is none."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, str)} if isinstance(content, dict) else {}


def _record(kind: type[_Record], fields: Any) -> _Record:
    """A record from JSON; fields that a newer server adds are ignored."""
    hints = get_type_hints(kind)
    if not isinstance(fields, dict) or not set(hints) <= set(fields):
        raise ProtocolError(
            f"the server's answer lacks some of {', '.join(hints)}: is it a loader server, and of the same release of "
            "teleloader as this client?"
        )
    for name, hint in hints.items():
        if not _fits(fields[name], hint):
            raise ProtocolError(f"the server says that {name} is {short(fields[name])}: is it a loader server?")
    return kind(**{name: fields[name] for name in hints})


def _fits(value: object, hint: Any) -> bool:
    """Whether a JSON value is of the type of a record's field."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return value in parts
    if kind is list:
        return isinstance(value, list) and len(value) <= MAX_LISTED and all(_fits(item, parts[0]) for item in value)
    if hint is str:
        return type(value) is str and len(value) <= MAX_NAME and value.isprintable()
    if hint is int:
        return type(value) is int and 0 <= value <= MAX_EPOCH
    return type(value) is hint
