"""Identity files of a server (``--identity``): principals of JWTs and client certificates, reloaded after changes."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from teleloader_server import audit
from teleloader_server.auth.certificates import PeerCertificate
from teleloader_server.auth.file_watch import FileWatch
from teleloader_server.auth.identity_config import IdentityConfig, parse_identity
from teleloader_server.auth.outcomes import Refusal
from teleloader_server.auth.token_file import read_text
from teleloader_server.auth.tokens import Token
from teleloader_server.config import ConfigError
from teleloader_shared.errors import Unauthorized

if TYPE_CHECKING:
    from teleloader_server.auth.bearer import JwtVerifier
    from teleloader_server.auth.key_source import KeySource

REFUSAL_S: Final = 1.0
"""Seconds for which a refusal is remembered: a request looks up its token several times."""
MAX_REFUSALS: Final = 256
"""Maximum number of remembered refusals."""

logger = logging.getLogger(__name__)


def is_jwt(token: bytes) -> bool:
    """Return True if a token has the form of a JWT: three parts, the first of which is a JSON object in base64."""
    return token.startswith(b"e") and token.count(b".") == 2


class IdentityFile:
    """Identity file that is reloaded when it changes, with the keys of its issuers.

    Args:
        path: Path of the file.

    Raises:
        ConfigError: If the file is missing, unreadable or invalid, or a package that it requires is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watch = FileWatch(path)
        self._sources: Mapping[str, KeySource] = {}
        self._verifier: JwtVerifier | None = None
        self._refusals: OrderedDict[bytes, tuple[float, Refusal]] = OrderedDict()
        """Refused tokens by digest, each with the end of its time."""
        self.config = IdentityConfig({}, ())
        self._use(self._load())
        if not self.config.issuers and not self.config.certificate_rules:
            raise ConfigError(
                f"no issuer and no [certificates] in {path} (--identity): the file is missing or empty. "
                "docs/identity.md has examples"
            )

    def reload_if_changed(self) -> bool:
        """Reload the file and the keys of issuers if they changed; return True if they did. Called once a second.

        An empty or missing file identifies no clients. If the file is invalid, the previous content stays valid.
        """
        changed = self._reload()
        for source in self._sources.values():
            changed |= source.poll()
        if changed:
            self._refusals.clear()
        return changed

    def load_keys(self) -> None:
        """Fetch the keys of all issuers now; blocks.

        Raises:
            ConfigError: If the keys of an issuer cannot be fetched.
        """
        for source in self._sources.values():
            source.load()

    def of_token(self, token: bytes) -> Token | Refusal:
        """Verify a JWT; return its principal and the end of its validity, or the reason why it is refused."""
        if self._verifier is None:
            return Refusal(Unauthorized, "the server accepts no JWTs: use a token of the server's operator")
        digest, now = hashlib.sha256(token).digest(), time.monotonic()
        until, refusal = self._refusals.get(digest, (0.0, None))
        if refusal is not None and now < until:
            return refusal
        found = self._verifier.verify(token, digest, time.time())
        if isinstance(found, Refusal):
            self._refusals[digest] = now + REFUSAL_S, found
            if len(self._refusals) > MAX_REFUSALS:
                self._refusals.popitem(last=False)
        return found

    def of_certificate(self, certificate: PeerCertificate) -> Token | Refusal | None:
        """Return the principal of a client certificate, or the refusal; None if certificates identify no clients."""
        return certificate.identify(self.config) if self.config.certificate_rules else None

    def __str__(self) -> str:
        found = [f"issuer {issuer.name}" for issuer in self.config.issuers.values()]
        return ", ".join([*found, *(["client certificates"] if self.config.certificate_rules else [])])

    def _reload(self) -> bool:
        if not self._watch.poll():
            return False
        try:
            config = self._load()
            if self._watch.has_changed():
                return False
            self._use(config)
        except ConfigError as error:
            logger.error("reload of the identity file failed, keeping the previous one: %s", error)
            return False
        if str(self):
            logger.info("reloaded %s: %s", self._path, self)
        else:
            logger.warning("%s is empty or missing: no JWT or client certificate identifies a client", self._path)
        audit.record(
            "identity_changed",
            issuers=sorted(issuer.name for issuer in config.issuers.values()),
            certificates=bool(config.certificate_rules),
        )
        return True

    def _load(self) -> IdentityConfig:
        return parse_identity(
            read_text(self._path, "identity file").text, str(self._path), self._path.absolute().parent
        )

    def _use(self, config: IdentityConfig) -> None:
        if config.issuers:
            try:
                from teleloader_server.auth.bearer import JwtVerifier
                from teleloader_server.auth.key_source import KeySource
            except ImportError as error:
                raise ConfigError(
                    f"{self._path} lists issuers of JWTs, which require PyJWT and cryptography ({error}): pip install "
                    "'teleloader[oidc]'"
                ) from None
            sources = {}
            for url, issuer in config.issuers.items():
                known = self._sources.get(url)
                unchanged = known is not None and known.settings == issuer.keys
                sources[url] = known if known is not None and unchanged else KeySource(issuer.name, issuer.keys)
            self._sources, self._verifier = sources, JwtVerifier(config, sources)
        else:
            self._sources, self._verifier = {}, None
        self.config = config
