"""The control plane: what a client asks a server for besides batches, each request on a connection of its own."""

from __future__ import annotations

import functools
import ipaddress
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import wraps
from types import UnionType
from typing import (
    Any,
    Concatenate,
    Final,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)
from urllib.parse import quote

import httpx
import numpy as np

from teleloader.api.credentials import Credentials, refused_client, tls_error
from teleloader.errors import known_error
from teleloader.tensors.memory import ordinary_memory
from teleloader.tensors.output import choose_output
from teleloader_shared import codec, local
from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES, Address, Frame
from teleloader_shared.errors import (
    AccessDenied,
    ProtocolError,
    ServerUnavailable,
    TeleloaderError,
    TlsError,
    VersionMismatch,
    WorkerDied,
)
from teleloader_shared.messages import (
    CONSUMER_HEADER,
    DATASETS_PATH,
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
from teleloader_shared.text import excerpt, sentence, short

MAX_PORT: Final = 65535
MAX_JSON_BYTES: Final = 4 * 2**20
"""Bytes of a list of datasets, and of ``/stats``."""
MAX_RECORD_BYTES: Final = 2**20
"""Bytes of one dataset, or one registration, as JSON."""
MAX_PROBLEM_BYTES: Final = 2**18
"""Bytes that are read of a response that is not a success."""
MAX_NAME: Final = 4096
"""Characters of a name that a server states."""
MAX_LISTED: Final = 4096
"""Names in a list of them."""
PATIENCE_FACTOR: Final = 3
"""An answer must be complete in so many times the seconds after which a silent server counts as gone."""
END_TIMEOUT: Final = 2.0
"""Seconds that an iterator which is dropped waits for the server to take note."""
MAX_PATIENCE: Final = 4
"""A response is waited for at most so many times the server's `timeout`, however slow it has been."""
MAX_RETRY_DIGITS: Final = 10
PROBE: Final = 1.0
"""Seconds after which a server that says nothing counts as one that waits for a request."""

logger = logging.getLogger("teleloader")

_Record = TypeVar("_Record", DatasetInfo, Registration)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Unreached(ServerUnavailable):
    """There was not even a connection."""


class Response(NamedTuple):
    """A complete response to a control request."""

    status: int
    body: bytearray
    retry_after: float
    """Seconds to wait before the next request, 0.0 if the response does not state them."""


def _confirmed(
    request: Callable[Concatenate[Server, _Arguments], _Result],
) -> Callable[Concatenate[Server, _Arguments], _Result]:
    """Repeat a refused request at once on a new connection, and raise only the second refusal.

    One damaged bit in a request or in a response can look like any refusal. An unavailable server is left to the
    caller, who waits before the next attempt; TLS has detected damage itself; and a server that has never responded as
    a loader server does is more likely none.
    """

    @wraps(request)
    def confirmed(server: Server, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return request(server, *args, **kwargs)
        except (ServerUnavailable, TlsError):
            raise
        except TeleloaderError:
            if not server.is_identified:
                raise
        return request(server, *args, **kwargs)

    return confirmed


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
        self.last_error: type[Exception] | None = None
        """Why it did not do what it was asked for last: others are asked first, and the user was told of it."""
        self.is_identified = False
        """Whether a loader server has responded: then another kind of response comes from something in between."""
        self._slowest = 0.0
        """Seconds that the slowest recent response took, or was waited for; each faster one takes a tenth away."""

    def answered(self) -> None:
        """It did what it was asked for: the user, who was told that it does not, is told so."""
        if self.last_error is not None:
            logger.warning("%s answers now", self.url)
            self.last_error = None

    @_confirmed
    def datasets(self) -> list[DatasetInfo]:
        """What it hosts."""
        answer = self._request("GET", DATASETS_PATH, limit=MAX_JSON_BYTES)
        if not isinstance(answer, list):
            raise ProtocolError(f"{self.url} lists no datasets, but says {short(answer)}: is it a loader server?")
        return [_record(DatasetInfo, found) for found in answer]

    @_confirmed
    def dataset(self, name: str) -> DatasetInfo:
        """What it says of a dataset."""
        return _record(DatasetInfo, self._request("GET", f"{DATASETS_PATH}/{quote(name, safe='')}"))

    @_confirmed
    def register(self, spec: LoaderSpec) -> Registration:
        """Make a loader known, however often.

        Raises:
            ServerUnavailable: When the server does not answer.
            DatasetChanged: When it hosts other data now than `spec` was made for.
            VersionMismatch: When it speaks another version of the protocol.
            ProtocolError: When the response is not the registration of `spec`.
        """
        registered = _record(Registration, self._request("POST", LOADERS_PATH, json=spec.to_json()))
        if registered.protocol != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"{self.url} speaks protocol version {short(registered.protocol)} and this client {PROTOCOL_VERSION}: "
                "install the same release of teleloader on both sides"
            )
        key = replace(spec, fingerprint=registered.fingerprint).key
        if registered.key != key:
            raise ProtocolError(
                f"{self.url} registered loader {short(registered.key)}, expected {key}: the request or the response "
                "was damaged, or client and server are of different releases of teleloader"
            )
        return registered

    @_confirmed
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
            self._end_session(key)

    @_confirmed
    def _end_session(self, key: str) -> None:
        self._request("DELETE", loader_path(key), timeout=END_TIMEOUT)

    @_confirmed
    def batch(self, address: Address, listed: bytes | None = None, *, consumer: str) -> Frame:
        """Fetch and decode one batch.

        Args:
            address: The batch.
            listed: The frame of its indices, for an order of the client's own.
            consumer: What the server calls whoever asks.

        Raises:
            ProtocolError: When the response is not a frame of that batch, of at most `DEFAULT_MAX_BATCH_BYTES`.
        """
        path = batches_path(address.loader, address.epoch)
        options = {"limit": DEFAULT_MAX_BATCH_BYTES, "timeout": None, "headers": {CONSUMER_HEADER: consumer}}
        body = (
            self._successful("GET", f"{path}/{address.batch}", **options)
            if listed is None
            else self._successful("POST", f"{path}?start={address.batch}", content=listed, **options)
        )
        frame = codec.read(ordinary_memory(choose_output(None), np.frombuffer(body, np.uint8)))
        if frame.address != address:
            raise ProtocolError(f"{self.url} sent {frame.address}, expected {address}: the request was damaged")
        return frame

    @_confirmed
    def stats(self, limit: int) -> Any:
        """What ``/stats`` answers, as JSON, with at most so many consumers.

        Raises:
            ServerUnavailable: When the server does not answer.
            ProtocolError: When what answers is no loader server.
        """
        return self._request("GET", f"{STATS_PATH}?limit={limit}", limit=MAX_JSON_BYTES)

    def is_alive(self) -> bool:
        """Whether it answers at all."""
        if local.is_served_here(self.url):
            return True  # what holds it up is user code in this process
        try:
            response = self._response("GET", HEALTH_PATH, timeout=self._patience(self.timeout / 2))
        except ServerUnavailable:
            return False
        except TeleloaderError:
            return True
        # 502 and its like are a proxy's, of a server that is gone; any other response is one of something that is there
        return response.status < httpx.codes.INTERNAL_SERVER_ERROR

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

    def _patience(self, least: float) -> float:
        """Seconds to wait for a response: longer for a server that has been slow, as one on a busy machine is."""
        return min(max(least, 2 * self._slowest), MAX_PATIENCE * self.timeout)

    def _request(self, method: str, path: str, *, limit: int = MAX_RECORD_BYTES, **options: Any) -> Any:
        """The JSON of a successful response of at most `limit` bytes, None if the response has no content."""
        body = self._successful(method, path, limit=limit, **options)
        if not body:
            return None
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            raise ProtocolError(
                f"{self.url}{path} answers with something that is not JSON: {excerpt(body)}. "
                "Is that the address and port of a loader server?"
            ) from None
        self.is_identified = True
        return content

    def _successful(self, method: str, path: str, **options: Any) -> bytearray:
        """The body of a successful response.

        Raises:
            TeleloaderError: When the status is another one than 200 and 204.
        """
        shown = self.credentials.token
        response = self._response(method, path, **options)
        if response.status in (httpx.codes.OK, httpx.codes.NO_CONTENT):
            return response.body
        if response.status == httpx.codes.UNAUTHORIZED:
            self.credentials.renew(shown)
        raise error_of(
            response.status, response.body, self.url, path,
            retry_after=response.retry_after, is_identified=self.is_identified,
        )  # fmt: skip

    def _response(self, method: str, path: str, *, limit: int = MAX_PROBLEM_BYTES, **options: Any) -> Response:
        """Send a request on a new connection, and receive the response.

        Raises:
            ServerUnavailable: When no complete response comes in time.
            TlsError: When the two sides do not trust each other.
            ProtocolError: When the body of a successful response has more than `limit` bytes.
        """
        headers = {
            PROTOCOL_HEADER: str(PROTOCOL_VERSION), "Accept-Encoding": "identity", **self.credentials.headers,
            **options.get("headers", {}),
        }  # fmt: skip
        timeout = options.pop("timeout", self._patience(self.timeout))
        connect = self.timeout if timeout is None else min(timeout, self.timeout)
        options = {**options, "headers": headers, "timeout": httpx.Timeout(timeout, connect=connect)}
        verify = self.credentials.context() if self._is_secure else False
        connected: list[socket.socket] = []
        began = time.monotonic()
        try:
            # a client for each of these few requests: no socket is left open between them. What the environment says
            # of proxies is ignored, because the batches themselves do not go through one either
            with (
                httpx.Client(verify=verify, trust_env=False) as client,
                _deadline(timeout, connected) as trace,
                client.stream(method, self.url + path, extensions={"trace": trace}, **options) as answer,
            ):
                # a batch may take as long as it takes, but once its response has begun it must go on
                answer.request.extensions["timeout"]["read"] = timeout or self.timeout
                body = _body_of(answer, limit)
        except httpx.TransportError as error:
            if timeout is not None and connected and isinstance(error, httpx.TimeoutException):
                self._slowest = max(self._slowest, timeout)
            raise self.broke(error) or self._unanswered(error, is_reached=bool(connected)) from None
        if timeout is not None:
            self._slowest = max(time.monotonic() - began, 0.9 * self._slowest)
        return Response(answer.status_code, body, parse_retry_after(answer.headers.get("retry-after", "")))

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


def _body_of(answer: httpx.Response, limit: int) -> bytearray:
    """The body as it came: what was compressed unasked is not unpacked, because a little can unpack to very much.

    Args:
        answer: The response.
        limit: Bytes that a successful response may have. Others are cut after `MAX_PROBLEM_BYTES`.
    """
    is_success = answer.status_code == httpx.codes.OK
    body = bytearray()
    for piece in answer.iter_raw():
        body += piece
        if is_success and len(body) > limit:
            raise ProtocolError(f"{answer.url} answers with more than {limit:,} bytes: no loader server?")
        if not is_success and len(body) >= MAX_PROBLEM_BYTES:
            del body[MAX_PROBLEM_BYTES:]
            break
    return body


TRANSIENT: Final = frozenset(
    {httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS, httpx.codes.NOT_FOUND}
)
"""Statuses besides 5xx after which the same request may succeed later; 404 only if something in between sent it."""


def error_of(
    status: int,
    body: bytes | bytearray,
    server: str,
    path: str = "",
    *,
    retry_after: float = 0.0,
    is_identified: bool = True,
) -> TeleloaderError:
    """The error that a response other than 200 stands for.

    Args:
        status: The status of the response.
        body: Its body. A loader server states in it what is wrong, with a code; a proxy does not.
        server: URL of the server that was asked, which is named where it lets somebody not do something.
        path: Below that.
        retry_after: Seconds that the response asks the client to wait.
        is_identified: Whether a loader server has responded at this URL before.

    Returns:
        A `ServerUnavailable` if the request may succeed later.
    """
    problem = _problem_of(body)
    code, detail = problem.get("code", ""), sentence(problem.get("detail", excerpt(body)))
    # any web server has addresses where nothing is
    doubt = "" if code and status != httpx.codes.NOT_FOUND else ". Is that the address and port of a loader server?"
    error = known_error(code, detail) or ProtocolError(
        f"{server}{path} answered {status}{f': {detail}' if detail else ''}{doubt}"
    )
    if isinstance(error, AccessDenied | ServerUnavailable):
        error = type(error)(f"{refusing(server)}{error}")
    elif _is_transient(status, code) and (code or is_identified):
        error = ServerUnavailable(str(error))
    if isinstance(error, ServerUnavailable):
        error.retry_after = retry_after
    return error


def _is_transient(status: int, code: str) -> bool:
    """Whether the same request may succeed later."""
    if code and (status == httpx.codes.NOT_FOUND or code == WorkerDied.__name__):
        return False
    return status in TRANSIENT or status >= httpx.codes.INTERNAL_SERVER_ERROR


def parse_retry_after(header: str) -> float:
    """Seconds that a ``Retry-After`` header states, as a number or a date; 0.0 if it states none."""
    if header.isascii() and header.isdecimal() and len(header) < MAX_RETRY_DIGITS:
        return float(header)
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def refusing(server: str) -> str:
    """How an error begins that says why a server does not do something."""
    return f"{server} refuses: "


def _problem_of(body: bytes | bytearray) -> dict[str, str]:
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
