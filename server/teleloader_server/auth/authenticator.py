"""Authentication of requests by token, certificate or session cookie, and protection against cross-site requests.

Because a loader sends many requests, the principal of a token is cached by Authorization header until the token
expires, or a token file, identity file or key of an issuer changes.
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

from teleloader_server import audit
from teleloader_server.auth.certificates import PEER_CERTIFICATE
from teleloader_server.auth.claims import duration
from teleloader_server.auth.identity_file import IdentityFile, is_jwt
from teleloader_server.auth.origins import is_known_host, is_of_another_site, known_hosts
from teleloader_server.auth.outcomes import Refusal
from teleloader_server.auth.token_file import TokenFile
from teleloader_server.auth.tokens import Token, Tokens
from teleloader_server.config import ConfigError
from teleloader_server.permissions import ANYONE, OPEN, Principal
from teleloader_server.problems import HttpProblem
from teleloader_shared.errors import AccessDenied, ServerUnavailable, Unauthorized
from teleloader_shared.messages import NO_PAGE_HEADER
from teleloader_shared.secret import Secret

MAX_REMEMBERED: Final = 4096
"""Maximum number of cached Authorization headers, the most recently used ones."""
MAX_KEY_BYTES: Final = 600
"""Maximum size of an Authorization header that is itself a key of the cache: a digest takes longer than its lookup."""
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
    principal: str
    """Name of the principal, which may have several JWTs."""
    ends: float
    """Latest end of the session, in the time of `time.monotonic`, which a step of the clock does not change."""
    jwt: Secret | None
    """The token, if it is a JWT, which is verified again after changes of keys and rules; None for other tokens."""


class Authenticator:
    """Authentication of all requests to a server.

    Args:
        sources: Token files. Without `sources`, `fixed` tokens and `identities`, authentication is disabled.
        fixed: Tokens that do not come from a file.
        identities: Issuers of JWTs, and rules for client certificates; None for none.
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
        identities: IdentityFile | None = None,
    ) -> None:
        self._sources = tuple(sources)
        self._fixed = () if fixed is None else fixed.entries
        self._hosts = known_hosts((host, socket.gethostname(), *allowed_hosts))
        self.identities: Final = identities
        self._known: OrderedDict[bytes, Token] = OrderedDict()
        """Valid tokens by Authorization header; long headers, and JWTs of sessions, are represented by their digest."""
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._refused: Counter[str] = Counter()
        self._last_logged = -LOG_EVERY
        self.on_change: Callable[[], object] = lambda: None
        """Callback, called after tokens were added, removed or changed, and after a token of a file has expired."""
        self.on_expiry: Callable[[], object] = lambda: None
        """Callback, called after a JWT or client certificate that a client used has expired."""
        self._next_expiry = math.inf
        """First end of the validity of the JWTs and client certificates that clients used since the last expiry."""
        self.tokens = self._all()
        self._expired = self._expired_names()

    @property
    def has_tokens(self) -> bool:
        """True if clients must authenticate; remains true if all tokens were revoked."""
        return bool(self._sources or self._fixed or self.identities)

    @property
    def is_shared(self) -> bool:
        """True if there can be several principals."""
        return len(self.tokens.entries) > 1 or self.identities is not None

    def reload_if_changed(self) -> None:
        """Reload changed token files and the identity file, and replace the tokens; called once a second.

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
                _record_changes(before, self.tokens)
        if self.identities is not None:
            changed |= self.identities.reload_if_changed()
        if changed:
            self._known.clear()
        expired = self._expired_names()  # all of them: the clock may have been set forward or back
        if changed or expired != self._expired:
            self._expired = expired
            self.on_change()
        if self._next_expiry <= time.time():
            self._next_expiry = math.inf  # each open request that is checked again sets it again
            self.on_expiry()

    def authenticate(self, headers: Mapping[bytes, bytes], scope: Scope) -> Principal:
        """Return the principal identified by a request's token, cookie or client certificate.

        The principal is `ANYONE` on a server without authentication. A token takes precedence over a certificate.

        Args:
            headers: Request headers, as selected by `RequestCaller`.
            scope: ASGI scope of the request.

        Raises:
            Unauthorized: If the request has no valid token, session cookie or certificate.
            Forbidden: If no rule of the identity file matches the JWT or certificate.
            ServerUnavailable: If the keys that verify a JWT are not available now.
        """
        if not self.has_tokens:
            return ANYONE
        authorization = headers.get(b"authorization")
        if authorization is None:
            return self._without_token(scope, headers.get(b"cookie", b""))
        # a dictionary lookup uses a keyed hash, so its duration discloses nothing about the entries
        key = authorization if len(authorization) <= MAX_KEY_BYTES else _digest_key(authorization)
        known = self._remembered(key)
        if known is None:
            scheme, _, token = authorization.partition(b" ")
            if scheme.lower() != b"bearer":
                raise Unauthorized("unsupported Authorization scheme: expected 'Bearer' and a token")
            known = self._remember(key, self._valid(token.strip()))
        return known.principal

    def _remembered(self, key: bytes) -> Token | None:
        """Return a valid token from the cache, or None."""
        known = self._known.get(key)
        if known is None or known.expires <= time.time():
            return None
        self._known.move_to_end(key)
        if known.expires < self._next_expiry:
            self._watch_expiry(known)
        return known

    def _remember(self, key: bytes, token: Token) -> Token:
        self._known[key] = token
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        self._watch_expiry(token)
        return token

    def _watch_expiry(self, token: Token) -> None:
        if self.identities is not None:  # tokens of files: see `_expired_names`
            self._next_expiry = min(self._next_expiry, token.expires)

    def _without_token(self, scope: Scope, cookies: bytes) -> Principal:
        """Return the principal of a request's session, or of the client certificate of its connection."""
        name = _value(cookies, self._cookie_name(scope)) if cookies else ""
        session = self._of_session(name) if name else None
        if session is not None:
            return session
        found = self._of_certificate(scope)
        if found is None:
            if name:
                raise Unauthorized("the browser session has expired or was revoked: sign in again at /")
            cert = " or client certificate" if self._has_certificate_rules else ""
            raise Unauthorized(
                f"authentication required: no token{cert} provided. Set TELELOADER_TOKEN or pass RemoteDataset(..., "
                "token=...); in a browser, sign in at /"
            )
        if isinstance(found, Refusal):
            raise found.error()
        if found.expires <= time.time():
            raise Unauthorized(
                f"the client certificate of {found.principal.name!r} expired {duration(time.time() - found.expires)} "
                "ago: renew it, and connect again"
            )
        self._watch_expiry(found)
        return found.principal

    # -- sessions of browsers, which store a cookie and not the token

    def sign_in(self, token: str, scope: Scope) -> tuple[Principal, str]:
        """Open a browser session for a token; return the token's principal and the value of the Set-Cookie header.

        Raises:
            Unauthorized: If the token is not valid.
        """
        content = token.encode(errors="replace")
        found = self._valid(content)
        jwt = None if self.tokens.has(found.digest) else Secret(token)
        name = secrets.token_urlsafe(32)
        same = [key for key, session in self._sessions.items() if session.principal == found.principal.name]
        if len(same) >= MAX_SESSIONS_PER_TOKEN:
            del self._sessions[same[0]]
        self._sessions[_digest_of(name)] = _Session(
            found.digest, found.principal.name, time.monotonic() + SESSION_SECONDS, jwt
        )
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
            audit.record("signed_out", principal=self._name_of_session(session))
        return self._cookie(scope, "", 0)

    def _of_session(self, name: str) -> Principal | None:
        """Return the principal of a session, or None if the session is unknown, has ended, or was revoked."""
        session = self._sessions.get(_digest_of(name))
        token = None if session is None else self._token_of(session)
        if session is None or token is None or session.ends <= time.monotonic() or token.expires <= time.time():
            self._sessions.pop(_digest_of(name), None)
            return None
        return token.principal

    def _token_of(self, session: _Session) -> Token | None:
        """Return the token of a session, or None if it has expired or was revoked.

        Raises:
            ServerUnavailable: If the keys that verify a JWT are not available now.
        """
        if session.jwt is None:
            return self.tokens.has(session.digest)
        jwt = session.jwt.encode()
        key = _digest_key(jwt)
        known = self._remembered(key)
        if known is not None:
            return known
        try:
            return self._remember(key, self._valid(jwt))
        except AccessDenied:
            return None

    def _name_of_session(self, session: _Session) -> str | None:
        if session.jwt is not None:
            return self._name_of_token(session.jwt.encode())
        token = self.tokens.has(session.digest)
        return None if token is None else token.principal.name

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

    @property
    def _has_certificate_rules(self) -> bool:
        return self.identities is not None and bool(self.identities.config.certificate_rules)

    def _of_certificate(self, scope: Scope) -> Token | Refusal | None:
        """Return the principal of a connection's client certificate, or its refusal; None without a certificate."""
        certificate = scope.get("state", {}).get(PEER_CERTIFICATE)
        return None if self.identities is None or certificate is None else self.identities.of_certificate(certificate)

    def _valid(self, token: bytes) -> Token:
        found = self.tokens.find(token)
        if found is None and self.identities is not None and is_jwt(token):
            verified = self.identities.of_token(token)
            if isinstance(verified, Refusal):
                raise verified.error()
            return verified
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
            return self._name_of_token(headers[b"authorization"].partition(b" ")[2].strip())
        cookie = _value(headers.get(b"cookie", b""), self._cookie_name(scope))
        if cookie:
            session = self._sessions.get(_digest_of(cookie))
            return None if session is None else self._name_of_session(session)
        return _name_of(self._of_certificate(scope))

    def _name_of_token(self, token: bytes) -> str | None:
        found = self.tokens.find(token)
        if found is None and self.identities is not None and is_jwt(token):
            return _name_of(self.identities.of_token(token))
        return _name_of(found)


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
        except (AccessDenied, ServerUnavailable):
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


def _name_of(found: Token | Refusal | None) -> str | None:
    """Return the name of a principal that was identified, even if it was refused."""
    if found is None or isinstance(found, Refusal):
        return None if found is None else found.principal
    return found.principal.name


def _expired(principal: Principal) -> Unauthorized:
    return Unauthorized(f"the token {principal.name!r} has expired: request a new token from the server's operator")


def _digest_key(content: bytes) -> bytes:
    """Return a key of the cache that no header can equal, because headers contain no null bytes."""
    return b"\0" + hashlib.sha256(content).digest()


def _digest_of(name: str) -> bytes:
    return hashlib.sha256(name.encode(errors="replace")).digest()


def _value(cookies: bytes, name: str) -> str:
    # a regular expression, because splitting a long header would block the event loop
    found = re.search(rb"(?:^|;)[ ]*%b=([^;]*)" % re.escape(name.encode()), cookies)
    return found[1].strip().decode("latin-1") if found else ""
