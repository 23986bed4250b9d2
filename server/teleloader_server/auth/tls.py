"""The server's certificate: checked before anything starts, and read again when it is renewed."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teleloader_server.auth.file_watch import FileWatch
from teleloader_server.config import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """Where certificate and key stand, under the names that uvicorn has for them.

    Raises:
        ConfigError: At construction, when no server can run with them.
    """

    certfile: Path
    """The server's certificate, and those between it and its CA."""
    keyfile: Path | None = None
    """Its private key; None is in the same file."""
    keyfile_password: str | None = None
    """What the key is encrypted with."""
    ca_certs: Path | None = None
    """The CAs of clients, which must have a certificate then; None asks for none."""

    def __post_init__(self) -> None:
        """Refuse what does not fit together."""
        self.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def load(self, context: ssl.SSLContext) -> None:
        """Put them into a context; connections that are open keep what they have.

        Raises:
            ConfigError: When that cannot be.
        """
        for path in self.paths():
            try:
                path.open("rb").close()
            except OSError as error:
                raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        try:
            # a password is given in every case: OpenSSL would ask for one in the terminal
            context.load_cert_chain(self.certfile, self.keyfile, lambda: self.keyfile_password or "")
        except ssl.SSLError as error:
            raise ConfigError(self._sentence(error)) from None
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except ssl.SSLError:
                raise ConfigError(f"{self.ca_certs} (--ssl-ca-certs) holds no certificates in PEM format") from None

    def for_uvicorn(self) -> dict[str, Any]:
        """The options of ``uvicorn.Config``."""
        return {
            "ssl_certfile": self.certfile,
            "ssl_keyfile": self.keyfile,
            "ssl_keyfile_password": self.keyfile_password,
            "ssl_ca_certs": self.ca_certs,
            "ssl_cert_reqs": ssl.CERT_NONE if self.ca_certs is None else ssl.CERT_REQUIRED,
        }

    def paths(self) -> Iterator[Path]:
        """Yield the files, which may change while the server runs."""
        yield from (path for path in (self.certfile, self.keyfile, self.ca_certs) if path is not None)

    def _sentence(self, error: ssl.SSLError) -> str:
        key = self.keyfile or self.certfile
        if error.reason == "KEY_VALUES_MISMATCH":
            return (
                f"the key in {key} is not that of the certificate in {self.certfile}: give the two that belong together"
            )
        if b"ENCRYPTED" in key.read_bytes():
            given = "is another" if self.keyfile_password else "must be given"
            return f"the key in {key} is encrypted, and its password {given}: set TELELOADER_SSL_KEYFILE_PASSWORD"
        if self.keyfile is None:
            return f"{self.certfile} must hold a certificate and its key in PEM format, or --ssl-keyfile the key"
        return f"{self.certfile} must hold a certificate and {key} its key, both in PEM format ({error.reason})"


class Renewal:
    """Reload of the certificate when its files change."""

    def __init__(self, files: TlsFiles, context: ssl.SSLContext) -> None:
        self._files = files
        self._context = context
        self._watch = FileWatch(*files.paths())

    def look(self) -> None:
        """Load the files again if they changed and are complete; a pair that does not match is left until it does."""
        if not self._watch.look():
            return
        try:
            self._files.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            if self._watch.has_changed():
                return
            self._files.load(self._context)
        except ConfigError as error:
            logger.error("the certificate stays as it was: %s", error)
            return
        logger.info("%s was read again", self._files.certfile)
        if self._files.ca_certs is not None:
            logger.info(
                "CAs that were added to %s are trusted now; those that were taken out are trusted until the server is "
                "started again",
                self._files.ca_certs,
            )
