"""Authentication of requests by token or session cookie, and protection against cross-site requests.

Because a loader sends many requests, the principal of a token is cached by Authorization header until the token expires
or a token file changes.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from starlette.types import Scope

from teleloader_server import audit
from teleloader_server.auth.origins import is_known_host, is_of_another_site, known_hosts
from teleloader_server.auth.token_file import TokenFile
from teleloader_server.auth.tokens import Token, Tokens
from teleloader_server.config import ConfigError
from teleloader_server.permissions import ANYONE, OPEN, Principal
from teleloader_server.problems import HttpProblem
from teleloader_shared.errors import AccessDenied, Unauthorized
from teleloader_shared.messages import NO_PAGE_HEADER

MAX_REMEMBERED: Final = 1024
"""Maximum number of cached Authorization headers: headers with different spelling can contain the same token."""
SESSION_SECONDS: Final = 12 * 3600
MAX_SESSIONS: Final = 1024
"""Maximum number of browser sessions; a further sign-in ends the oldest session."""
MAX_SESSIONS_PER_TOKEN: Final = 128
"""Maximum number of browser sessions of one token; a further sign-in ends the token's oldest session."""
LOG_EVERY: Final = 10.0
"""Minimum seconds between two log lines about rejected requests: a client can send millions of requests."""


_NO_PAGE: Final = NO_PAGE_HEADER.lower().encode()
_LOOKED_AT: Final = frozenset({
    b"authorization", b"cookie", b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", _NO_PAGE,
})  # fmt: skip

logger = logging.getLogger(__name__)


class _Session(NamedTuple):
    digest: bytes
    """SHA-256 of the token with which the user signed in."""
    ends: float
    """Latest end of the session, in the time of `time.monotonic`, which a step of the clock does not change."""


class Authenticator:
    """Authentication of all requests to a server.

    Args:
        sources: Token files. If `sources` is empty and `fixed` contains no token, authentication is disabled.
        fixed: Tokens that do not come from a file.
        host: Name or IP address on which the server listens.
        allowed_hosts: Further host names to accept in the Host header.

    Raises:
        ConfigError: If two tokens, or two token names, are equal.
    """

    def __init__(
        self,
        sources: Iterable[TokenFile] = (),
        fixed: Tokens | None = None,
        host: str = "",
        allowed_hosts: Iterable[str] = (),
    ) -> None:
        self._sources = tuple(sources)
        self._fixed = () if fixed is None else fixed.entries
        self._hosts = known_hosts((host, socket.gethostname(), *allowed_hosts))
        self._known: dict[bytes, Token] = {}
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._refused: Counter[str] = Counter()
        self._last_logged = -LOG_EVERY
        self.on_change: Callable[[], object] = lambda: None
        """Callback, called after tokens were added, removed or changed, and after a token has expired."""
        self.tokens = self._all()
        self._expired = self._expired_names()

    @property
    def has_tokens(self) -> bool:
        """True if clients must authenticate; remains true if all tokens were revoked."""
        return bool(self._sources or self._fixed)

    def reload_if_changed(self) -> None:
        """Reload changed token files, and replace the tokens; called once a second.

        The replacement is atomic. If the files contain duplicate tokens or names, the previous tokens stay valid.
        """
        changed = bool([source for source in self._sources if source.reload_if_changed()])
        if changed:
            before = self.tokens
            try:
                self.tokens = self._all()
            except ConfigError as error:
                logger.error("token reload failed, keeping the previous tokens: %s", error)
                changed = False
            else:
                self._known.clear()
                _record_changes(before, self.tokens)
        expired = self._expired_names()  # all of them: the clock may have been set forward or back
        if changed or expired != self._expired:
            self._expired = expired
            self.on_change()

    def authenticate(self, headers: Mapping[bytes, bytes], scope: Scope) -> Principal:
        """Return the principal identified by a request's token or cookie; `ANYONE` on a server without tokens.

        Args:
            headers: Request headers, as selected by `RequestCaller`.
            scope: ASGI scope of the request.

        Raises:
            Unauthorized: If the request has no valid token or session cookie.
        """
        if not self.has_tokens:
            return ANYONE
        authorization = headers.get(b"authorization")
        if authorization is None:
            return self._of_session(scope, headers.get(b"cookie", b""))
        # a dictionary lookup uses a keyed hash, so its duration discloses nothing about the entries
        known = self._known.get(authorization)
        if known is None:
            scheme, _, token = authorization.partition(b" ")
            if scheme.lower() != b"bearer":
                raise Unauthorized("unsupported Authorization scheme: expected 'Bearer' and a token")
            known = self._valid(token.strip())
            if len(self._known) < MAX_REMEMBERED:
                self._known[authorization] = known
        if known.expires <= time.time():
            raise _expired(known.principal)
        return known.principal

    # -- sessions of browsers, which store a cookie and not the token

    def sign_in(self, token: str, scope: Scope) -> tuple[Principal, str]:
        """Open a browser session for a token; return the token's principal and the value of the Set-Cookie header.

        Raises:
            Unauthorized: If the token is not valid.
        """
        found = self._valid(token.encode(errors="replace"))
        name = secrets.token_urlsafe(32)
        of_token = [key for key, session in self._sessions.items() if session.digest == found.digest]
        if len(of_token) >= MAX_SESSIONS_PER_TOKEN:
            del self._sessions[of_token[0]]
        self._sessions[_digest_of(name)] = _Session(found.digest, time.monotonic() + SESSION_SECONDS)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        audit.record("signed_in", principal=found.principal.name)
        seconds = min(SESSION_SECONDS, found.expires - time.time())
        return found.principal, self._cookie(scope, name, max(0, int(seconds)))

    def sign_out(self, scope: Scope) -> str:
        """End the browser session of a request, if any; return the Set-Cookie header value that deletes the cookie."""
        cookies = next((value for name, value in scope["headers"] if name == b"cookie"), b"")
        session = self._sessions.pop(_digest_of(_value(cookies, self._cookie_name(scope))), None)
        if session is not None:
            token = self.tokens.has(session.digest)
            audit.record("signed_out", principal=None if token is None else token.principal.name)
        return self._cookie(scope, "", 0)

    def _of_session(self, scope: Scope, cookies: bytes) -> Principal:
        name = _value(cookies, self._cookie_name(scope)) if cookies else ""
        if not name:
            raise Unauthorized(
                "authentication required: no token provided. Set TELELOADER_TOKEN or pass RemoteDataset(..., "
                "token=...); in a browser, sign in at /"
            )
        session = self._sessions.get(_digest_of(name))
        token = None if session is None else self.tokens.has(session.digest)
        if session is None or token is None or session.ends <= time.monotonic() or token.expires <= time.time():
            self._sessions.pop(_digest_of(name), None)
            raise Unauthorized("the browser session has expired or was revoked: sign in again at /")
        return token.principal

    def _cookie_name(self, scope: Scope) -> str:
        # browsers share cookies among all ports of a host, so the cookie's name contains the port
        server = scope.get("server") or ("", 0)
        name = f"teleloader-{server[1]}"
        return f"__Host-{name}" if scope["scheme"] == "https" else name

    def _cookie(self, scope: Scope, value: str, seconds: int) -> str:
        secure = "; Secure" if scope["scheme"] == "https" else ""
        return f"{self._cookie_name(scope)}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"

    # -- checks of single parts

    def check_site(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Reject cross-site requests, and requests whose Host header names another server.

        Protects against DNS rebinding and cross-site request forgery.

        Args:
            method: HTTP method of the request; GET for a WebSocket.
            headers: Request headers, as selected by `RequestCaller`.

        Raises:
            HttpProblem: If the Host header names another server (status 421), or the request is cross-site (403).
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if host and _NO_PAGE not in headers and not is_known_host(host, self._hosts):
            raise HttpProblem(
                421,
                "UnknownHost",
                f"host {host[:200]!r} not allowed: use the IP address of the server, or start the server with "
                "--allowed-host NAME",
            )
        origin, site, mode = (
            headers[name].decode("latin-1") if name in headers else None
            for name in (b"origin", b"sec-fetch-site", b"sec-fetch-mode")
        )
        if is_of_another_site(method, host, origin, site, mode):
            raise HttpProblem(
                403,
                "CrossSite",
                "cross-site request rejected: use the dashboard of this server. Proxies must preserve the Host header",
            )

    def _valid(self, token: bytes) -> Token:
        found = self.tokens.find(token)
        if found is None:
            raise Unauthorized(
                "unknown token: the token may have been revoked or rotated. Request a new token from the server's "
                "operator"
            )
        if found.expires <= time.time():
            raise _expired(found.principal)
        return found

    def _expired_names(self) -> frozenset[str]:
        """Return the names of the tokens that have expired."""
        now = time.time()
        return frozenset(entry.principal.name for entry in self.tokens.entries if entry.expires <= now)

    def _all(self) -> Tokens:
        entries = [*self._fixed, *(entry for source in self._sources for entry in source.tokens.entries)]
        names = Counter(entry.principal.name for entry in entries)
        digests = Counter(entry.digest for entry in entries)
        for entry in entries:
            name = entry.principal.name
            if names[name] > 1 or digests[entry.digest] > 1:
                raise ConfigError(
                    f"duplicate token {name!r}: --tokens and --token-file contain the same token or the same name (the "
                    "token of --token-file is named 'token'). Rename or remove one of the two"
                )
        return Tokens(tuple(entries))

    def count_rejection(self, error: Exception, scope: Scope) -> None:
        """Count a rejected request, and log the counts at most every `LOG_EVERY` seconds."""
        code = error.code if isinstance(error, HttpProblem) else type(error).__name__
        self._refused[code] += 1
        peer, _ = scope.get("client") or ("unknown", 0)
        if audit.is_on():
            audit.refused(code, self._token_name(scope), peer)
        now = time.monotonic()
        if now - self._last_logged >= LOG_EVERY:
            self._last_logged = now
            what = ", ".join(f"{count} x {code}" for code, count in self._refused.items())
            logger.warning("rejected requests: %s; latest from %s: %s", what, peer, error)
            self._refused.clear()

    def _token_name(self, scope: Scope) -> str | None:
        """Return the name of a request's token, which may have expired; None if there is none, or it is not known."""
        headers = dict(scope["headers"])
        if b"authorization" in headers:
            found = self.tokens.find(headers[b"authorization"].partition(b" ")[2].strip())
        else:
            cookie = _value(headers.get(b"cookie", b""), self._cookie_name(scope))
            session = self._sessions.get(_digest_of(cookie))
            found = None if session is None else self.tokens.has(session.digest)
        return None if found is None else found.principal.name


class RequestCaller:
    """Authentication and authorization of the client of one HTTP request or WebSocket; implements `Caller`.

    Args:
        authenticator: The server's authenticator.
        scope: ASGI scope of the request.
    """

    __slots__ = ("_authenticator", "_headers", "_scope")

    def __init__(self, authenticator: Authenticator, scope: Scope) -> None:
        self._authenticator = authenticator
        self._scope = scope
        self._headers = {name: value for name, value in scope["headers"] if name in _LOOKED_AT}

    @property
    def principal(self) -> Principal | None:
        """Current principal of the client; `ANYONE` on a server without tokens, None if the token is not valid."""
        try:
            return self._authenticator.authenticate(self._headers, self._scope)
        except Unauthorized:
            return None

    def authorize(self, need: str, dataset: str | None = None) -> Principal:
        """Return the client's principal if its scopes permit the operation; see `Caller.authorize`."""
        try:
            return self._authenticator.authenticate(self._headers, self._scope).authorize(need, dataset)
        except AccessDenied as error:
            self._authenticator.count_rejection(error, self._scope)
            raise

    def admit(self, need: str) -> Principal:
        """Authorize a request to an endpoint; access to the dataset is authorized separately, on use.

        Args:
            need: Declared requirement of the endpoint.

        Returns:
            The client's principal; `ANYONE` for an endpoint without a required token.

        Raises:
            HttpProblem: If the Host header names another server, or the request is cross-site.
            Unauthorized: If the request has no valid token.
            Forbidden: If the token's scopes do not permit the request.
        """
        try:
            self._authenticator.check_site(self._scope.get("method", "GET"), self._headers)
        except HttpProblem as refusal:
            self._authenticator.count_rejection(refusal, self._scope)
            raise
        return ANYONE if need == OPEN else self.authorize(need)


def _record_changes(before: Tokens, now: Tokens) -> None:
    """Add the names of tokens that were added, removed or changed to the audit log."""
    old, new = ({entry.principal.name: entry for entry in tokens.entries} for tokens in (before, now))
    changed = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    audit.record("tokens_changed", added=sorted(new.keys() - old), removed=sorted(old.keys() - new), changed=changed)


def _expired(principal: Principal) -> Unauthorized:
    return Unauthorized(f"the token {principal.name!r} has expired: request a new token from the server's operator")


def _digest_of(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="replace")).digest()


def _value(cookies: bytes, name: str) -> str:
    # a regular expression, because splitting a long header would block the event loop
    found = re.search(rb"(?:^|;)[ ]*%b=([^;]*)" % re.escape(name.encode()), cookies)
    return found[1].strip().decode("latin-1") if found else ""
