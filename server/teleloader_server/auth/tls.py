"""TLS certificate of the server: validation at start-up, and reload after renewal."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from teleloader_server.auth.file_watch import FileWatch
from teleloader_server.config import ConfigError

ClientCertificates = Literal["required", "optional"]
_CERT_REQS: Final = {"required": ssl.CERT_REQUIRED, "optional": ssl.CERT_OPTIONAL}
_PEM: Final = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION: Final = 0xA0
"""Tag of the first field of a certificate, which is optional."""
_UTC_TIME: Final = 0x17

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """Paths of the TLS certificate and private key, in fields named like uvicorn's options.

    Raises:
        ConfigError: If the files are unreadable or invalid, or do not match; raised at construction.
    """

    certfile: Path
    """The server's certificate, followed by intermediate certificates."""
    keyfile: Path | None = None
    """Private key; None if it is in `certfile`."""
    keyfile_password: str | None = None
    """Password of the private key; None if the key is not encrypted."""
    ca_certs: Path | None = None
    """CA certificates for mutual TLS, which issue the certificates of clients. None disables mutual TLS."""
    cert_reqs: ClientCertificates = "required"
    """Whether clients without a certificate may connect; certificates of other CAs are always rejected."""

    def __post_init__(self) -> None:
        """Validate the files."""
        self.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def load(self, context: ssl.SSLContext) -> None:
        """Load certificate, key and CAs into an SSL context, without affecting established connections.

        Raises:
            ConfigError: If the files are unreadable or invalid, or do not match.
        """
        for path in self.paths():
            try:
                path.open("rb").close()
            except OSError as error:
                raise ConfigError(f"cannot read {path} (TLS certificate, key or CAs): {error.strerror}") from None
        try:
            # always pass a password: otherwise OpenSSL prompts for it in the terminal
            context.load_cert_chain(self.certfile, self.keyfile, lambda: self.keyfile_password or "")
        except ssl.SSLError as error:
            raise ConfigError(self._sentence(error)) from None
        if self.ca_certs is not None:
            try:
                context.load_verify_locations(self.ca_certs)
            except ssl.SSLError:
                raise ConfigError(
                    f"invalid CA file {self.ca_certs} (--ssl-ca-certs): expected certificates in PEM format"
                ) from None

    def for_uvicorn(self) -> dict[str, Any]:
        """Return the TLS options of ``uvicorn.Config`` as keyword arguments."""
        return {
            "ssl_certfile": self.certfile,
            "ssl_keyfile": self.keyfile,
            "ssl_keyfile_password": self.keyfile_password,
            "ssl_ca_certs": self.ca_certs,
            "ssl_cert_reqs": ssl.CERT_NONE if self.ca_certs is None else _CERT_REQS[self.cert_reqs],
        }

    def paths(self) -> Iterator[Path]:
        """Yield the configured paths of certificate, key and CA file."""
        yield from (path for path in (self.certfile, self.keyfile, self.ca_certs) if path is not None)

    def _sentence(self, error: ssl.SSLError) -> str:
        key = self.keyfile or self.certfile
        if error.reason == "KEY_VALUES_MISMATCH":
            return f"the key in {key} does not match the certificate in {self.certfile}: specify a matching pair"
        if b"ENCRYPTED" in key.read_bytes():
            given = "is wrong" if self.keyfile_password else "is missing"
            return f"the key in {key} is encrypted, and the password {given}: set TELELOADER_SSL_KEYFILE_PASSWORD"
        if self.keyfile is None:
            return (
                f"invalid TLS file {self.certfile}: expected a certificate and a key in PEM format. If the key is in "
                "another file, pass --ssl-keyfile"
            )
        return (
            f"invalid TLS files: expected a certificate in {self.certfile} and a key in {key}, both in PEM format "
            f"({error.reason})"
        )


def expiry_of(certfile: Path) -> float | None:
    """Return the time at which the first certificate of a PEM file expires, in seconds since 1970; None if unreadable.

    The standard library returns the fields of a certificate only for a connected peer.
    """
    try:
        pem = _PEM.search(certfile.read_text(errors="replace"))
        certificate = ssl.PEM_cert_to_DER_cert(pem[0]) if pem else b""
        (_, body), *_ = _elements(_elements(certificate)[0][1])  # TBSCertificate (RFC 5280, 4.1)
        fields = [content for tag, content in _elements(body) if tag != _VERSION]
        _, (tag, not_after) = _elements(fields[3])  # after serial number, signature algorithm and issuer
        text = not_after.decode()
        if tag == _UTC_TIME:
            text = ("20" if text < "50" else "19") + text
        return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except (OSError, ValueError, IndexError):
        return None


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    """Return tag and content of the DER elements that follow each other in `der`."""
    found = []
    while der:
        tag, size, start = der[0], der[1], 2
        if size >= 0x80:  # the length takes the number of bytes that the lower bits state
            start += size & 0x7F
            size = int.from_bytes(der[2:start])
        found.append((tag, der[start : start + size]))
        der = der[start + size :]
    return found


class ClientTls:
    """TLS contexts for connections to other servers of a fleet, which verify the other server.

    Args:
        ca: CA certificates that sign the servers' certificates; None for the CAs of the system.
        own: Certificate to present to servers that require one; None for no certificate.
    """

    def __init__(self, ca: Path | None = None, own: TlsFiles | None = None) -> None:
        self._ca = ca
        self._own = own
        self._made: tuple[list[int], ssl.SSLContext] | None = None

    def context(self) -> ssl.SSLContext:
        """Return the current context; it is replaced when a file changes.

        Raises:
            OSError: If a file is unreadable or invalid.
        """
        paths = [path for path in (self._ca, *(() if self._own is None else self._own.paths())) if path is not None]
        changed_at = [path.stat().st_mtime_ns for path in paths]
        if self._made is None or self._made[0] != changed_at:
            context = ssl.create_default_context(cafile=self._ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self._own is not None:
                own = self._own
                context.load_cert_chain(own.certfile, own.keyfile, lambda: own.keyfile_password or "")
            self._made = changed_at, context
        return self._made[1]


class Renewal:
    """Reloader of the TLS certificate, for renewal without a restart."""

    def __init__(self, files: TlsFiles, context: ssl.SSLContext) -> None:
        self._files = files
        self._context = context
        self._watch = FileWatch(*files.paths())
        self.expires = expiry_of(files.certfile)
        """Time at which the loaded certificate expires, in seconds since 1970; None if it cannot be read."""

    def reload_if_changed(self) -> None:
        """Reload certificate and key if their files changed; keep the current certificate if the files are invalid."""
        if not self._watch.poll():
            return
        try:
            self._files.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            if self._watch.has_changed():
                return
            self._files.load(self._context)
            self.expires = expiry_of(self._files.certfile)
        except ConfigError as error:
            logger.error("certificate reload failed, keeping the previous certificate: %s", error)
            return
        logger.info("reloaded certificate %s", self._files.certfile)
        if self._files.ca_certs is not None:
            logger.info(
                "CAs added to %s are trusted now; removed CAs are trusted until the server restarts",
                self._files.ca_certs,
            )
