"""Authentication of requests by token or session cookie, and protection from pages of other sites.

The principal of a token is looked up once and cached by its Authorization header, until the token expires or the token
file changes, because a loader sends many requests.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import secrets
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from starlette.types import Scope

from teleloader_server.auth.origins import is_known_host, is_of_another_site, known_hosts
from teleloader_server.auth.token_file import TokenFile
from teleloader_server.auth.tokens import Token, Tokens
from teleloader_server.config import ConfigError
from teleloader_server.permissions import ANYONE, OPEN, Principal
from teleloader_server.problems import HttpProblem
from teleloader_shared.errors import AccessDenied, Unauthorized
from teleloader_shared.messages import NO_PAGE_HEADER

MAX_REMEMBERED: Final = 1024
"""Cached Authorization headers; one token may have several spellings."""
SESSION_SECONDS: Final = 12 * 3600
MAX_SESSIONS: Final = 1024
"""Maximum of browser sessions; one more ends the oldest session."""
MAX_SESSIONS_PER_TOKEN: Final = 128
"""Maximum of browser sessions of one token; one more ends the oldest of them."""
LOG_EVERY: Final = 10.0
"""Seconds between two log lines about rejected requests, because a client can send millions."""


_NO_PAGE: Final = NO_PAGE_HEADER.lower().encode()
_LOOKED_AT: Final = frozenset({
    b"authorization", b"cookie", b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", _NO_PAGE,
})  # fmt: skip

logger = logging.getLogger(__name__)


class _Known(NamedTuple):
    principal: Principal
    expires: float


class _Session(NamedTuple):
    digest: bytes
    """Digest of its token."""
    expires: float


class Authenticator:
    """Authenticator of a server's requests.

    Args:
        sources: Token files; without tokens, authentication is disabled.
        fixed: Tokens that do not come from a file.
        host: Name or IP address on which the server listens.
        allowed_hosts: Further host names of the server.

    Raises:
        ConfigError: Two tokens or their names are equal.
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
        self._known: dict[bytes, _Known] = {}
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._refused: Counter[str] = Counter()
        self._told = -LOG_EVERY
        self.on_change: Callable[[], object] = lambda: None
        """Called after tokens were added, removed or changed, and after one has expired."""
        self._tokens = self._all()
        self._next_expiry = self._expiry_after(time.time())

    @property
    def has_tokens(self) -> bool:
        """True if clients must authenticate. Still true when all tokens were revoked: then no client can."""
        return bool(self._sources or self._fixed)

    @property
    def tokens(self) -> Tokens:
        """Current tokens."""
        return self._tokens

    def look(self) -> None:
        """Replace the tokens if one of their files changed; the server calls this every second.

        All requests after this call see all of the new tokens and none of the old ones. Tokens of several files that
        contradict each other change nothing.
        """
        changed = bool([source for source in self._sources if source.look()])
        if changed:
            try:
                self._tokens = self._all()
            except ConfigError as error:
                logger.error("token reload failed, keeping the previous tokens: %s", error)
                changed = False
            else:
                self._known.clear()
        if changed or self._next_expiry <= time.time():
            self._next_expiry = self._expiry_after(time.time())
            self.on_change()

    def authenticate(self, headers: Mapping[bytes, bytes], scope: Scope) -> Principal:
        """Return the principal whose token or session cookie came with a request.

        Args:
            headers: The request's headers, as far as `RequestCaller` keeps them.
            scope: ASGI scope of the request.

        Raises:
            Unauthorized: There is none, or it is not valid, or not any more.
        """
        if not self.has_tokens:
            return ANYONE
        authorization = headers.get(b"authorization")
        if authorization is None:
            return self._of_session(scope, headers.get(b"cookie", b""))
        # a lookup by keyed hash, whose time discloses nothing about the entries
        known = self._known.get(authorization)
        if known is None:
            scheme, _, token = authorization.partition(b" ")
            if scheme.lower() != b"bearer":
                raise Unauthorized("unsupported Authorization scheme: expected 'Bearer' and a token")
            found = self._valid(token.strip())
            known = _Known(found.principal, found.expires)
            if len(self._known) < MAX_REMEMBERED:
                self._known[authorization] = known
        if known.expires <= time.time():
            raise _expired(known.principal)
        return known.principal

    # -- browsers, which receive a session cookie instead of the token

    def sign_in(self, token: str, scope: Scope) -> tuple[Principal, str]:
        """Open a session for a browser; return its principal and the Set-Cookie header.

        Raises:
            Unauthorized: The token is not valid.
        """
        found = self._valid(token.encode(errors="replace"))
        name = secrets.token_urlsafe(32)
        of_token = [key for key, session in self._sessions.items() if session.digest == found.digest]
        if len(of_token) >= MAX_SESSIONS_PER_TOKEN:
            del self._sessions[of_token[0]]
        expires = min(found.expires, time.time() + SESSION_SECONDS)
        self._sessions[_digest_of(name)] = _Session(found.digest, expires)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return found.principal, self._cookie(scope, name, max(0, int(expires - time.time())))

    def sign_out(self, scope: Scope) -> str:
        """End the session of a request, if it has one; return the Set-Cookie header that removes its cookie."""
        cookies = next((value for name, value in scope["headers"] if name == b"cookie"), b"")
        self._sessions.pop(_digest_of(_value(cookies, self._cookie_name(scope))), None)
        return self._cookie(scope, "", 0)

    def _of_session(self, scope: Scope, cookies: bytes) -> Principal:
        name = _value(cookies, self._cookie_name(scope)) if cookies else ""
        if not name:
            raise Unauthorized(
                "authentication required: no token provided. Set TELELOADER_TOKEN or pass RemoteDataset(..., "
                "token=...); in a browser, sign in at /"
            )
        session = self._sessions.get(_digest_of(name))
        token = None if session is None else self._tokens.has(session.digest)
        if session is None or token is None or min(session.expires, token.expires) <= time.time():
            self._sessions.pop(_digest_of(name), None)
            raise Unauthorized("the session has expired or was revoked: sign in again at /")
        return token.principal

    def _cookie_name(self, scope: Scope) -> str:
        # browsers share cookies among all ports of a host, so the name contains the port
        server = scope.get("server") or ("", 0)
        name = f"teleloader-{server[1]}"
        return f"__Host-{name}" if scope["scheme"] == "https" else name

    def _cookie(self, scope: Scope, value: str, seconds: int) -> str:
        secure = "; Secure" if scope["scheme"] == "https" else ""
        return f"{self._cookie_name(scope)}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"

    # -- parts

    def check_site(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Check that a request is meant for this server, and not caused by a page of another site.

        Args:
            method: The request's method; GET for a WebSocket.
            headers: The request's headers, as far as `RequestCaller` keeps them.

        Raises:
            HttpProblem: With 421 or 403, if it is not.
        """
        host = headers.get(b"host", b"").decode("latin-1")
        if host and _NO_PAGE not in headers and not is_known_host(host, self._hosts):
            raise HttpProblem(
                421,
                "UnknownHost",
                f"host {host[:200]!r} not allowed: if it is a name of this server, start the server with "
                "--allowed-host NAME, or use its IP address",
            )
        origin, site, mode = (
            headers[name].decode("latin-1") if name in headers else None
            for name in (b"origin", b"sec-fetch-site", b"sec-fetch-mode")
        )
        if is_of_another_site(method, host, origin, site, mode):
            raise HttpProblem(
                403,
                "CrossSite",
                "cross-site request rejected: use the dashboard of this server. Proxies must not change Host",
            )

    def _valid(self, token: bytes) -> Token:
        found = self._tokens.find(token)
        if found is None:
            raise Unauthorized(
                "unknown token: it is not in this server's token file. It may have been revoked or rotated: ask the "
                "server's operator for a new one"
            )
        if found.expires <= time.time():
            raise _expired(found.principal)
        return found

    def _expiry_after(self, now: float) -> float:
        """Return the time at which the next token expires; infinity if none does."""
        return min((entry.expires for entry in self._tokens.entries if entry.expires > now), default=math.inf)

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

    def note(self, error: Exception, scope: Scope) -> None:
        """Count a rejected request for the log, which has at most one line per 10 s."""
        self._refused[error.code if isinstance(error, HttpProblem) else type(error).__name__] += 1
        now = time.monotonic()
        if now - self._told >= LOG_EVERY:
            self._told = now
            what = ", ".join(f"{count} x {code}" for code, count in self._refused.items())
            peer, _ = scope.get("client") or ("unknown", 0)
            logger.warning("rejected requests: %s; the last one from %s: %s", what, peer, error)
            self._refused.clear()


class RequestCaller:
    """The `Caller` of one HTTP request or WebSocket.

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
        """The principal now, `ANYONE` on a server without tokens; None if the request has no valid token."""
        try:
            return self._authenticator.authenticate(self._headers, self._scope)
        except Unauthorized:
            return None

    def authorize(self, need: str, dataset: str | None = None) -> Principal:
        """See `Caller.authorize`."""
        try:
            return self._authenticator.authenticate(self._headers, self._scope).authorize(need, dataset)
        except AccessDenied as error:
            self._authenticator.note(error, self._scope)
            raise

    def admit(self, need: str) -> Principal:
        """Authorize a request for an endpoint; datasets are authorized when they are used.

        Args:
            need: Declared requirement of the endpoint.

        Returns:
            Its principal; `ANYONE` for an endpoint that is open to all.

        Raises:
            HttpProblem: The request is meant for another server, or a page of another site has caused it.
            Unauthorized: The request has no valid token.
            Forbidden: The token's scopes do not suffice.
        """
        try:
            self._authenticator.check_site(self._scope.get("method", "GET"), self._headers)
        except HttpProblem as refusal:
            self._authenticator.note(refusal, self._scope)
            raise
        return ANYONE if need == OPEN else self.authorize(need)


def _expired(principal: Principal) -> Unauthorized:
    return Unauthorized(f"the token {principal.name!r} has expired: ask the server's operator for a new one")


def _digest_of(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="replace")).digest()


def _value(cookies: bytes, name: str) -> str:
    # one search: splitting the header would block the event loop for too long
    found = re.search(rb"(?:^|;)[ ]*%b=([^;]*)" % re.escape(name.encode()), cookies)
    return found[1].strip().decode("latin-1") if found else ""
