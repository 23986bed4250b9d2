"""Control requests to a loader server (all except requests for training batches), one connection per request."""

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
from functools import wraps
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TypeVar
from urllib.parse import quote, urlencode

import httpx
import numpy as np

from teleloader.api.credentials import Credentials, refused_client, tls_error
from teleloader.api.responses import error_of, parse_retry_after, record
from teleloader.tensors.memory import pageable_memory
from teleloader.tensors.output import choose_output
from teleloader_shared import codec, local
from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES, BatchId, Frame
from teleloader_shared.directory import MAX_PORT, port_of
from teleloader_shared.errors import ProtocolError, ServerUnavailable, TeleloaderError, TlsError, UnknownDataset
from teleloader_shared.messages import (
    CONSUMER_HEADER,
    DATASETS_PATH,
    HEALTH_PATH,
    LOADERS_PATH,
    PROTOCOL_HEADER,
    REPORT_HEADER,
    SERVERS_PATH,
    STATS_PATH,
    VERSIONS_PATH,
    ConsumerReport,
    DatasetInfo,
    PublishedVersion,
    Registration,
    batches_path,
    check_protocol,
    format_protocols,
    loader_path,
    progress_path,
    timings_path,
)
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.text import excerpt, printable, sentence, short

MAX_JSON_BYTES: Final = 4 * 2**20
"""Maximum size of the responses of ``/v1/datasets`` and ``/stats``."""
MAX_RECORD_BYTES: Final = 2**20
"""Maximum size of the description of one dataset, and of a registration, as JSON."""
MAX_PROBLEM_BYTES: Final = 2**18
"""Maximum number of bytes to read from the body of an error response."""
PATIENCE_FACTOR: Final = 3
"""Maximum duration of a request, as a multiple of its timeout, which limits only the time between received bytes."""
END_TIMEOUT: Final = 2.0
"""Timeout of the request that ends a session, in seconds; short, because finalizers of iterators send it."""
MAX_PATIENCE: Final = 4
"""Maximum timeout for a slow server, as a multiple of its `timeout`."""
SUSPECT_S: Final = 60.0
"""Seconds after an error for which a large fleet's other servers are preferred."""
PROBE_S: Final = 1.0
"""Timeout of a probe in seconds: a server that sends nothing for this long has accepted the TLS connection."""

logger = logging.getLogger("teleloader")

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Server = TypeVar("_Server", bound="Server")


class Unreached(ServerUnavailable):
    """The connection to the server could not be established."""


class Response(NamedTuple):
    """Complete HTTP response to a control request."""

    status: int
    body: bytearray
    retry_after: float
    """Seconds to wait before a retry, from the ``Retry-After`` header; 0.0 if the header is missing or invalid."""


def confirmed(
    request: Callable[Concatenate[_Server, _Arguments], _Result],
) -> Callable[Concatenate[_Server, _Arguments], _Result]:
    """Decorate a request so that a refused request is repeated once, immediately, on a new connection.

    Any refusal may result from a corrupted bit in the request or the response. Three kinds of errors are raised
    without a repetition: an unavailable server, because the caller waits before a retry; a TLS error, because TLS
    detects corruption; and any error of a URL at which no loader server has ever responded, because it probably belongs
    to another server.
    """

    @wraps(request)
    def repeated(server: _Server, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return request(server, *args, **kwargs)
        except (ServerUnavailable, TlsError):
            raise
        except TeleloaderError:
            if not server.is_identified:
                raise
        return request(server, *args, **kwargs)

    return repeated


class Server:
    """Client for control requests to one loader server; stores the server's health state and the credentials.

    Args:
        url: URL of the server.
        timeout: Seconds without a received byte after which the server counts as disconnected.
        credentials: Token and certificates; None reads them from the environment.
        server_name: Name that the server's certificate must contain; None for the host of the URL.

    Raises:
        ValueError: If `url` is not an HTTP URL, or contains a password.
    """

    def __init__(
        self, url: str, timeout: float, credentials: Credentials | None = None, server_name: str | None = None
    ) -> None:
        parsed = _parsed(url)
        self.url = str(parsed).rstrip("/")
        self.timeout = timeout
        self.server_name = server_name or parsed.host
        self.credentials = Credentials() if credentials is None else credentials
        if self.credentials.token is not None and not self._is_secure and not _is_this_machine(parsed.host):
            _warn_of_clear_token(self.url)
        self.last_error: type[Exception] | None = None
        """Type of the latest error, None once the server responds again; servers without an error are preferred."""
        self._failed_at = 0.0
        """Time of the latest error (``time.monotonic()``)."""
        self.is_identified = False
        """True once a loader server has responded at this URL; later unexpected responses are attributed to a proxy."""
        self._slowest = 0.0
        """Duration of the slowest recent response or timeout, in seconds; decays by a tenth per faster response."""

    def succeeded(self) -> None:
        """Record a successful request; log the server's recovery if the previous request failed."""
        if self.last_error is not None:
            logger.warning("%s responds again", self.url)
            self.last_error = None

    def failed(self, error: Exception) -> None:
        """Record a failed request."""
        self.last_error = ServerUnavailable if isinstance(error, ServerUnavailable) else type(error)
        self._failed_at = time.monotonic()

    @property
    def has_recently_failed(self) -> bool:
        """True if the latest error is less than `SUSPECT_S` old, and the server has not responded since."""
        return self.last_error is not None and 0 <= time.monotonic() - self._failed_at < SUSPECT_S

    @confirmed
    def datasets(self) -> list[DatasetInfo]:
        """Fetch the descriptions of all hosted datasets that the client may access."""
        datasets = self._request("GET", DATASETS_PATH, limit=MAX_JSON_BYTES)
        if not isinstance(datasets, list):
            raise ProtocolError(
                f"invalid response from {self.url}: expected a list of datasets, got {short(datasets)}. Check that "
                f"{self.url} is the URL of a loader server"
            )
        return [record(DatasetInfo, fields, self.url) for fields in datasets]

    @confirmed
    def dataset(self, name: str, version: str | None = None, fingerprint: str | None = None) -> DatasetInfo:
        """Fetch the description of one dataset: by default of its newest version.

        Args:
            name: Name of the dataset.
            version: Version of the dataset; None for any.
            fingerprint: Fingerprint of the version; None for any.

        Raises:
            UnknownDataset: If the server hosts no dataset of that name, or not this version.
        """
        wanted = {"version": version, "fingerprint": fingerprint}
        query = urlencode({name: value for name, value in wanted.items() if value is not None})
        path = f"{DATASETS_PATH}/{quote(name, safe='')}{'?' if query else ''}{query}"
        info = record(DatasetInfo, self._request("GET", path), self.url)
        # servers of earlier releases ignore the query
        if version not in (None, info.version) or fingerprint not in (None, info.fingerprint):
            what = f"version {version!r}" if fingerprint is None else f"fingerprint {fingerprint}"
            raise UnknownDataset(
                f"dataset {name!r} has no {what}: {self.url} hosts version {info.version!r} (fingerprint "
                f"{info.fingerprint})"
            )
        return info

    @confirmed
    def servers(self) -> list[Any]:
        """Fetch the servers that announced themselves to this one; the values are not validated.

        Raises:
            ServerUnavailable: If the server does not respond.
            ProtocolError: If the response is not a list of servers.
        """
        response = self._request("GET", SERVERS_PATH, limit=MAX_JSON_BYTES)
        servers = response.get("servers") if isinstance(response, dict) else None
        if not isinstance(servers, list):
            raise ProtocolError(
                f"invalid response from {self.url}{SERVERS_PATH}: {short(response)}, expected a list of servers. Check "
                f"that {self.url} is the URL of a loader server"
            )
        return servers

    @confirmed
    def register(self, spec: LoaderSpec, epoch: int) -> Registration:
        """Register a loader with the server (idempotent).

        Args:
            spec: Specification of the loader.
            epoch: Epoch to load, whose batch rate the server states.

        Raises:
            ServerUnavailable: If the server does not respond.
            DatasetChanged: If the server hosts data with another fingerprint than that of `spec`.
            VersionMismatch: If both sides have no protocol version in common, or different versions of an algorithm.
            ProtocolError: If the response is not the registration of `spec`.
        """
        response = self._request("POST", f"{LOADERS_PATH}?epoch={epoch}", json=spec.to_json())
        registered = record(Registration, response, self.url)
        check_protocol(registered.protocol, self.url)
        key = replace(spec, fingerprint=registered.fingerprint).key
        if registered.key != key:
            raise ProtocolError(
                f"{self.url} registered loader {short(registered.key)}, expected {key}: install the same release of "
                "teleloader on both sides, and check proxies between client and server"
            )
        return registered

    @confirmed
    def touch(self, key: str) -> None:
        """Send a heartbeat, which keeps a session alive while the client requests no batches.

        Raises:
            ServerUnavailable: If the server does not respond.
            UnknownLoader: If the server has evicted the session.
        """
        self._request("GET", loader_path(key))

    def log_replay(self, key: str) -> None:
        """Log the progress of a worker that iterates its shard again, if any worker of the loader does so."""
        with suppress(TeleloaderError):
            found = record(Registration, self._request("GET", loader_path(key)), self.url).replayed
            if found is not None:
                logger.warning(
                    "%s iterates a shard again: %s of %s batches. To avoid this, define state_dict() and "
                    "load_state_dict() (torchdata's Stateful) in the dataset",
                    self.url, *(f"{batches:,}" for batches in found),
                )  # fmt: skip

    def end_session(self, key: str) -> None:
        """Request the end of a session and its private workers; ignore errors, because both also end when idle."""
        with suppress(TeleloaderError):
            self._end_session(key)

    @confirmed
    def _end_session(self, key: str) -> None:
        self._request("DELETE", loader_path(key), timeout=END_TIMEOUT)

    def report_progress(self, key: str, epoch: int, consumer: str, report: ConsumerReport, timeout: float) -> None:
        """Report the progress of a training loop that sends no requests.

        Args:
            key: Key of the loader.
            epoch: Epoch number.
            consumer: Name of the consumer in the server's statistics.
            report: Progress of the training loop.
            timeout: Seconds to wait for the server.

        Raises:
            TeleloaderError: If the server does not confirm the report.
        """
        headers = {CONSUMER_HEADER: consumer, REPORT_HEADER: report.to_header()}
        self._request("PUT", progress_path(key, epoch), headers=headers, timeout=timeout)

    def report_timings(self, key: str, epoch: int, consumer: str, times: dict[str, Any], timeout: float) -> Any:
        """Report the client's part of the timeline; return the times at which the server handled the request.

        Args:
            key: Key of the loader.
            epoch: Epoch number.
            consumer: Name of the consumer in the server's statistics.
            times: Body of the request, see docs/protocol.md.
            timeout: Seconds to wait for the server.

        Raises:
            TeleloaderError: If the server does not confirm the report.
        """
        headers = {CONSUMER_HEADER: consumer, "Content-Type": "application/json"}
        content = json.dumps(times).encode()
        return self._request("PUT", timings_path(key, epoch), headers=headers, content=content, timeout=timeout)

    @confirmed
    def batch(self, batch_id: BatchId, listed: bytes | None = None, *, consumer: str) -> Frame:
        """Fetch and decode one batch.

        Args:
            batch_id: Identifier of the batch.
            listed: Encoded sample indices of the batch; None if the server computes the indices.
            consumer: Name of the consumer in the server's statistics.

        Raises:
            ProtocolError: If the response is not a frame of that batch, of at most `DEFAULT_MAX_BATCH_BYTES`.
        """
        path = batches_path(batch_id.loader, batch_id.epoch)
        options = {"limit": DEFAULT_MAX_BATCH_BYTES, "timeout": None, "headers": {CONSUMER_HEADER: consumer}}
        body = (
            self._successful("GET", f"{path}/{batch_id.batch}", **options)
            if listed is None
            else self._successful("POST", path, content=listed, **options)
        )
        frame = codec.read(pageable_memory(choose_output(None), np.frombuffer(body, np.uint8)))
        if frame.batch_id != batch_id:
            raise ProtocolError(
                f"{self.url} sent {frame.batch_id}, expected {batch_id}: check proxies between client and server"
            )
        return frame

    @confirmed
    def stats(self, limit: int) -> Any:
        """Fetch the statistics of the server (``/stats``) as JSON.

        Args:
            limit: Maximum number of consumers to include.

        Raises:
            ServerUnavailable: If the server does not respond.
            ProtocolError: If the response is not that of a loader server.
        """
        return self._request("GET", f"{STATS_PATH}?limit={limit}", limit=MAX_JSON_BYTES)

    @confirmed
    def inspect(self, path: str, limit: int = MAX_JSON_BYTES) -> Any:
        """Fetch a record of `teleloader_shared.inspection` as JSON.

        Args:
            path: URL path, with query.
            limit: Maximum size of the response in bytes.

        Raises:
            ServerUnavailable: If the server does not respond.
            ProtocolError: If the response is not that of a loader server.
        """
        return self._request("GET", path, limit=limit)

    def publish(self) -> list[PublishedVersion]:
        """Request that the server publishes the current content of its configuration file; wait until it has done so.

        Raises:
            ServerUnavailable: If the server does not respond.
            TeleloaderError: If the server cannot publish the configuration; the message has the traceback.
        """
        response = self._response("POST", VERSIONS_PATH, timeout=None)
        if response.status == httpx.codes.CONFLICT:
            raise TeleloaderError(f"{self.url}: {printable(_json_object(response.body).get('detail', ''))}")
        if response.status != httpx.codes.OK:
            raise error_of(response.status, response.body, self.url, VERSIONS_PATH)
        found = _json_object(response.body).get("versions", ())
        return [record(PublishedVersion, fields, self.url) for fields in found]

    def retire(self, name: str, version: str) -> int:
        """Request that the server retires a version of a dataset; return the number of loaders that used it.

        Raises:
            ServerUnavailable: If the server does not respond.
            UnknownDataset: If the server does not have this version.
            InvalidSpec: If it is the newest version of the dataset.
        """
        path = f"{VERSIONS_PATH}/{quote(name, safe='')}?{urlencode({'version': version})}"
        response = self._request("DELETE", path)
        count = response.get("loaders") if isinstance(response, dict) else None
        return count if isinstance(count, int) else 0

    def is_alive(self) -> bool:
        """Send a health check; return False if the server does not respond, or a proxy responds with a 5xx status."""
        if local.is_served_in_process(self.url):
            return True  # user code may delay a server in this process, but it cannot become unavailable
        try:
            response = self._response("GET", HEALTH_PATH, timeout=self._patience(self.timeout / 2))
        except ServerUnavailable:
            return False
        except TeleloaderError:
            return True
        # a proxy responds with 5xx if the server behind it is unavailable
        return response.status < httpx.codes.INTERNAL_SERVER_ERROR

    def broke(self, error: Exception) -> TlsError | None:
        """Return the TLS error that broke a connection, or None if TLS is not the cause of `error`.

        If `error` does not show the cause, this method probes the server with another TLS connection.
        """
        found = tls_error(error, self.url)
        if found is not None or not isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
            return found
        if self._is_secure:
            return refused_client(self.url, self.credentials) if self._disconnects(self.credentials.context()) else None
        blind = ssl.create_default_context()
        blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
        if self._disconnects(blind) is None:
            return None
        return TlsError(f"cannot connect to {self.url}: the server uses TLS. Use an https:// URL")

    @property
    def _is_secure(self) -> bool:
        return self.url.startswith("https")

    def _disconnects(self, context: ssl.SSLContext) -> bool | None:
        """Return True if the server closes a new TLS connection before a request, False if it keeps it open.

        Servers that reject the client's certificate close the connection like this. None means that no TLS connection
        could be established.
        """
        try:
            with (
                socket.create_connection((httpx.URL(self.url).host, port_of(self.url)), PROBE_S) as plain,
                context.wrap_socket(plain, server_hostname=self.server_name) as connected,
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
        """Return the timeout of a response in seconds: `least`, or longer if the server has been slow recently."""
        return min(max(least, 2 * self._slowest), MAX_PATIENCE * self.timeout)

    def _request(self, method: str, path: str, *, limit: int = MAX_RECORD_BYTES, **options: Any) -> Any:
        """Send a request and return the JSON value of the response, or None if the response has no content."""
        body = self._successful(method, path, limit=limit, **options)
        if not body:
            return None
        try:
            content = json.loads(body)
        except (ValueError, RecursionError):
            raise ProtocolError(
                f"the response of {self.url}{path} is not JSON: {excerpt(body)}. Check that {self.url} is the URL of a "
                "loader server"
            ) from None
        self.is_identified = True
        return content

    def _successful(self, method: str, path: str, **options: Any) -> bytearray:
        """Send a request and return the body of a successful response.

        Raises:
            TeleloaderError: If the status is not 200 or 204.
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
            ServerUnavailable: If the response is not complete in time.
            TlsError: If the TLS handshake fails, for example because one side rejects the certificate of the other.
            ProtocolError: If the body of a successful response has more than `limit` bytes.
        """
        headers = {
            PROTOCOL_HEADER: format_protocols(), "Accept-Encoding": "identity", **self.credentials.headers,
            **options.get("headers", {}),
        }  # fmt: skip
        timeout = options.pop("timeout", self._patience(self.timeout))
        connect = self.timeout if timeout is None else min(timeout, self.timeout)
        options = {**options, "headers": headers, "timeout": httpx.Timeout(timeout, connect=connect)}
        verify = self.credentials.context() if self._is_secure else False
        connected: list[socket.socket] = []
        began = time.monotonic()
        try:
            # a new client for each request, so that no socket stays open: control requests are rare. Proxy settings of
            # the environment are ignored, because batches do not use a proxy either
            with (
                httpx.Client(verify=verify, trust_env=False) as client,
                _deadline(timeout, connected) as trace,
                client.stream(
                    method, self.url + path, extensions={"trace": trace, "sni_hostname": self.server_name}, **options
                ) as response,
            ):
                # the time to compute a batch is not limited, but pauses within a response are
                response.request.extensions["timeout"]["read"] = timeout or self.timeout
                body = _body_of(response, limit)
        except (httpx.TransportError, OSError) as error:  # OSError: no free file descriptor
            if timeout is not None and connected and isinstance(error, httpx.TimeoutException):
                self._slowest = max(self._slowest, timeout)
            raise self.broke(error) or self._unavailable(error, is_reached=bool(connected)) from None
        if timeout is not None:
            self._slowest = max(time.monotonic() - began, 0.9 * self._slowest)
        return Response(response.status_code, body, parse_retry_after(response.headers.get("retry-after", "")))

    def _unavailable(self, error: Exception, *, is_reached: bool) -> ServerUnavailable:
        why = sentence(str(error)) or type(error).__name__
        if is_reached:
            return ServerUnavailable(f"{self.url} accepted the connection, but did not respond: {why}")
        return Unreached(f"cannot connect to {self.url}: {why}")


def _json_object(body: bytearray) -> dict[str, Any]:
    """Return the JSON object in a body; {} for any other body."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _parsed(url: object) -> httpx.URL:
    """Parse and validate the URL of a server.

    Raises:
        ValueError: If the URL is not an HTTP URL, or contains a password.
    """
    invalid = f"invalid server URL {_without_secrets(url)}: expected http://host:port"
    if not isinstance(url, str) or any(c.isspace() for c in url):
        raise ValueError(invalid)
    try:
        parsed = httpx.URL(url)
        host = parsed.host  # decoded here
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ValueError(f"{invalid} ({error})") from None
    if parsed.scheme not in ("http", "https") or not host:
        raise ValueError(invalid)
    if parsed.port is not None and not 0 < parsed.port <= MAX_PORT:
        raise ValueError(f"{invalid} with a port in [1, {MAX_PORT}]")
    if parsed.userinfo or parsed.query or parsed.fragment:
        raise ValueError(
            "invalid server URL: a password, query or fragment is not allowed, because URLs are logged. Pass a token "
            "as token=, or set TELELOADER_TOKEN"
        )
    return parsed


def _is_this_machine(host: str) -> bool:
    """Return True for a loopback host name or IP address, without a DNS lookup."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


@functools.lru_cache(maxsize=1024)  # usually one warning for each server
def _warn_of_clear_token(url: str) -> None:
    logger.warning(
        "the token for %s is sent unencrypted: attackers on the network path can read and use the token. Start the "
        "server with --ssl-certfile, and use an https:// URL",
        url,
    )


def _without_secrets(url: object) -> str:
    """Return the repr of a URL for a message, or a placeholder if the URL may contain a password."""
    return "(hidden, contains '@')" if isinstance(url, str) and "@" in url else f"{url!r:.200}"


@contextmanager
def _deadline(timeout: float | None, connected: list[socket.socket]) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """Context manager that shuts the connection down after `PATIENCE_FACTOR` times the timeout; yields httpx's hook.

    The timeout itself limits only the time between two bytes, so a server that sends single bytes could delay the
    client indefinitely.

    Args:
        timeout: Timeout in seconds; None for no limit.
        connected: List to which the socket of the connection is appended.
    """

    def trace(event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            # a duplicate, because TLS takes ownership of the socket itself
            stream = info["return_value"]
            try:
                connected.append(stream.get_extra_info("socket").dup())
            except OSError:  # no free file descriptor; nothing else closes the connection
                stream.close()
                raise

    def abort() -> None:
        for one in connected:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    watch = threading.Timer(0 if timeout is None else PATIENCE_FACTOR * timeout, abort)
    watch.daemon = True
    if timeout is not None:
        with suppress(RuntimeError):  # no thread can start while the interpreter exits
            watch.start()
    try:
        yield trace
    finally:
        watch.cancel()
        for one in connected:
            one.close()


def _body_of(response: httpx.Response, limit: int) -> bytearray:
    """Read the body of a response without decompression, because a small body could decompress to a very large one.

    Args:
        response: Response to read.
        limit: Maximum size of a successful response in bytes; others are truncated to `MAX_PROBLEM_BYTES`.

    Raises:
        ProtocolError: If a successful response is larger.
    """
    is_success = response.status_code == httpx.codes.OK
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if is_success and len(body) > limit:
            raise ProtocolError(
                f"the response of {response.url} exceeds {limit:,} bytes: check that the URL is that of a loader server"
            )
        if not is_success and len(body) >= MAX_PROBLEM_BYTES:
            del body[MAX_PROBLEM_BYTES:]
            break
    return body
