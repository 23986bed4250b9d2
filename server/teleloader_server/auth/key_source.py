"""Keys of issuers: read from files, or fetched by a thread and refreshed periodically."""

from __future__ import annotations

import json
import logging
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx

from teleloader_server.auth.claims import duration
from teleloader_server.auth.file_watch import FileWatch
from teleloader_server.auth.identity_config import KeySettings, is_secure_url
from teleloader_server.auth.keys import InvalidKeys, Key, Keys, parse_keys
from teleloader_server.config import ConfigError
from teleloader_shared.errors import ServerUnavailable, Unauthorized
from teleloader_shared.secret import Secret
from teleloader_shared.units import counted

REFRESH_S: Final = 300.0
"""Interval of regular requests for the keys, in seconds: a key that the issuer has removed stays valid so long."""
MIN_INTERVAL_S: Final = 10.0
"""Minimum seconds between two requests for the keys, also after failures and for unknown key IDs."""
MAX_AGE_S: Final = 24 * 3600.0
"""Seconds for which keys stay valid while the issuer is unreachable."""
FETCH_TIMEOUT_S: Final = 10.0
"""Maximum duration of a request for the keys, with the discovery document."""
MAX_BYTES: Final = 2**20
"""Maximum size of a JWKS, a discovery document or a file of keys."""
MAX_UNKNOWN: Final = 256
"""Maximum number of remembered unknown key IDs."""
LOG_INTERVAL_S: Final = 60.0
"""Minimum seconds between two log lines about an issuer that is unreachable."""

logger = logging.getLogger(__name__)


class KeySource:
    """Keys of one issuer. Not thread-safe, except that it fetches keys in a thread of its own.

    Args:
        name: Name of the issuer, for messages.
        settings: Place of the keys.
        now: Returns the monotonic time.

    Raises:
        ConfigError: If a file of keys is unreadable or invalid.
    """

    def __init__(self, name: str, settings: KeySettings, now: Callable[[], float] = time.monotonic) -> None:
        self.settings: Final = settings
        self._name = name
        self._now = now
        self._keys: Keys | None = None
        self._watch = None if settings.file is None else FileWatch(settings.file)
        if settings.file is not None:
            self._keys = _read(settings.file)
        self._began = float("-inf")
        """Time at which the last fetch started."""
        self._valid_since = float("-inf")
        """Time at which the last successful fetch started."""
        self._logged_at = float("-inf")
        self._is_wanted = False
        """True if a token has an unknown key ID."""
        self._thread: threading.Thread | None = None
        self._result: Keys | Exception | None = None
        """Result of the thread."""
        self._unknown: OrderedDict[str, float] = OrderedDict()
        """Time of the first token with each unknown key ID."""

    def poll(self) -> bool:
        """Reload a changed file, or start and end requests for the keys; return True if the keys changed.

        Called once a second.
        """
        if self._watch is None or self.settings.file is None:
            return self._poll_url()
        return self._poll_file(self.settings.file, self._watch)

    def load(self) -> None:
        """Fetch the keys now, unless they come from a file; blocks.

        Raises:
            ConfigError: If the keys cannot be fetched.
        """
        if self._watch is None:
            self._began = self._now()
            try:
                self._end(fetch(self.settings))
            except (InvalidKeys, OSError, httpx.HTTPError, httpx.InvalidURL) as error:
                raise ConfigError(f"cannot fetch the keys of issuer {self._name!r}: {error}") from None

    def find(self, kid: str | None, algorithm: str) -> Key:
        """Return the key that verifies a token.

        A token with an unknown key ID causes a request for the keys, at most every `MIN_INTERVAL_S`.

        Args:
            kid: Key ID in the token's header, or None.
            algorithm: Algorithm in the token's header.

        Raises:
            Unauthorized: If the issuer has no such key.
            ServerUnavailable: If the keys are not available, or are being refreshed because the key ID is unknown.
        """
        now = self._now()
        if self._keys is None or (self._watch is None and now - self._valid_since > MAX_AGE_S):
            raise ServerUnavailable(
                f"cannot verify the token: the keys of issuer {self._name!r} are unavailable. Retry later; the "
                "server's log has the reason"
            )
        found = self._keys.find(kid, algorithm)
        if found is not None:
            return found
        shown = "no key ID" if kid is None else f"the key ID {kid[:100]!r}"
        is_new = self._watch is None and kid is not None and all(key.kid != kid for key in self._keys.keys)
        if is_new and not self._was_refreshed(str(kid), now):
            raise ServerUnavailable(
                f"cannot verify the token yet: it has {shown}, which is unknown, and the keys of issuer {self._name!r} "
                f"are refreshed at most every {MIN_INTERVAL_S:g} s. Retry later"
            )
        raise Unauthorized(
            f"unknown key: the token has {shown}, and issuer {self._name!r} has no such key for {algorithm}. Request a "
            "new token from the issuer"
        )

    def _was_refreshed(self, kid: str, now: float) -> bool:
        """Return True if the keys were fetched since the first token with an unknown key ID; else request a refresh."""
        first = self._unknown.setdefault(kid[:256], now)
        if len(self._unknown) > MAX_UNKNOWN:
            self._unknown.popitem(last=False)
        if self._valid_since > first:
            return True
        self._is_wanted = True
        return False

    def _poll_file(self, path: Path, watch: FileWatch) -> bool:
        if not watch.poll():
            return False
        try:
            keys = _read(path)
        except ConfigError as error:
            logger.error("reload of keys failed, keeping the previous keys: %s", error)
            return False
        return not watch.has_changed() and self._replace(keys)

    def _poll_url(self) -> bool:
        now = self._now()
        changed = False
        if self._thread is not None:
            if self._thread.is_alive():
                return False
            self._thread, result = None, self._result
            changed = self._end(result)
        interval = MIN_INTERVAL_S if self._is_wanted or self._valid_since != self._began else REFRESH_S
        if now - self._began >= interval:
            self._began, self._is_wanted = now, False
            # a thread of its own: the threads of asyncio's executor would delay the server's exit
            self._thread = threading.Thread(target=self._fetch, name="teleloader-keys", daemon=True)
            self._thread.start()
        return changed

    def _fetch(self) -> None:
        try:
            self._result = fetch(self.settings)
        except Exception as error:  # noqa: BLE001 - reported by the next poll
            self._result = error

    def _end(self, result: Keys | Exception | None) -> bool:
        now = self._now()
        if isinstance(result, Keys):
            self._valid_since = self._began
            return self._replace(result)
        if now - self._logged_at >= LOG_INTERVAL_S:
            self._logged_at = now
            logger.warning(
                "cannot fetch the keys of issuer %s: %s. Tokens %s", self._name, str(result) or type(result).__name__,
                "cannot be verified" if self._keys is None
                else f"are verified with the previous keys for up to {duration(self._valid_since + MAX_AGE_S - now)}",
            )  # fmt: skip
        return False

    def _replace(self, keys: Keys) -> bool:
        changed = self._keys is None or self._keys.fingerprint != keys.fingerprint
        self._keys = keys
        if changed:
            logger.info("loaded %s of issuer %s", counted(len(keys.keys), "key"), self._name)
        return changed


def fetch(settings: KeySettings) -> Keys:
    """Fetch the keys of an issuer; blocks for up to `FETCH_TIMEOUT_S`.

    Redirects are not followed, and URLs in tokens (``jku``, ``x5u``) are never used.

    Raises:
        InvalidKeys: If a response is invalid, or too large.
        OSError: If a file is unreadable.
        httpx.HTTPError: If a request fails.
        TimeoutError: If the responses arrive too slowly.
    """
    deadline = time.monotonic() + FETCH_TIMEOUT_S
    context = ssl.create_default_context(cafile=settings.ca)
    headers = {"Accept-Encoding": "identity"}
    if settings.token_file is not None:
        token = Secret(settings.token_file.read_text(encoding="utf-8", errors="replace").strip())
        headers["Authorization"] = Secret(f"Bearer {token}")
    with httpx.Client(verify=context, trust_env=False, timeout=FETCH_TIMEOUT_S / 2, headers=headers) as client:
        url = settings.url
        if url is None:
            url = _keys_url(settings.issuer, client, deadline)
        return parse_keys(_get(client, url, deadline))


def _keys_url(issuer: str, client: httpx.Client, deadline: float) -> str:
    """Return the URL of the keys in the discovery document of an issuer (OpenID Connect Discovery, 4)."""
    where = f"{issuer.rstrip('/')}/.well-known/openid-configuration"
    try:
        document = json.loads(_get(client, where, deadline))
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("issuer") != issuer:
        raise InvalidKeys(f"the document at {where} is not the discovery document of {issuer}. Set jwks_url instead")
    url = document.get("jwks_uri")
    if not isinstance(url, str) or not is_secure_url(url):
        raise InvalidKeys(f"the document at {where} states no https:// URL as jwks_uri. Set jwks_url instead")
    return url


def _get(client: httpx.Client, url: str, deadline: float) -> bytes:
    with client.stream("GET", url) as response:
        if response.status_code != httpx.codes.OK:
            raise InvalidKeys(f"{url} responded with status {response.status_code}")
        content = bytearray()
        for piece in response.iter_bytes():
            content += piece
            if len(content) > MAX_BYTES:
                raise InvalidKeys(f"the response of {url} has more than {MAX_BYTES:,} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"the response of {url} took more than {FETCH_TIMEOUT_S:g} s")
    return bytes(content)


def _read(path: Path) -> Keys:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {path} (jwks_file): {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"invalid keys in {path} (jwks_file): expected at most {MAX_BYTES:,} bytes")
    try:
        return parse_keys(content)
    except InvalidKeys as error:
        raise ConfigError(f"invalid keys in {path} (jwks_file): {error}") from None
