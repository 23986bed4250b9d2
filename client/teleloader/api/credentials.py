"""Client credentials (token and certificate) and trusted CAs.

The token never appears in a ``repr``, error message or saved state, and is a `Secret` in each local variable.
"""

from __future__ import annotations

import os
import re
import ssl
import threading
import weakref
from pathlib import Path
from typing import Final

from teleloader_shared.errors import TlsError
from teleloader_shared.forks import after_fork_in_child
from teleloader_shared.messages import NO_PAGE_HEADER
from teleloader_shared.secret import Secret

TOKEN_VARIABLE: Final = "TELELOADER_TOKEN"  # noqa: S105 - a name, not a token
TOKEN_FILE_VARIABLE: Final = "TELELOADER_TOKEN_FILE"  # noqa: S105 - as above
CA_VARIABLE: Final = "TELELOADER_CA"
CERT_VARIABLE: Final = "TELELOADER_CERT"
KEY_VARIABLE: Final = "TELELOADER_KEY"

PEM: Final = "-----BEGIN CERTIFICATE-----"

MAX_TOKEN: Final = 16 * 1024
"""Maximum number of characters of a token, which may be a JWT."""
_TOKEN: Final = re.compile(rf"[A-Za-z0-9._~+/=-]{{1,{MAX_TOKEN}}}")


class Credentials:
    """Token, client certificate and trusted CAs of a `RemoteDataset`.

    Args:
        token: Token that authenticates the client. None reads ``TELELOADER_TOKEN``, or the file that
            ``TELELOADER_TOKEN_FILE`` names.
        ca: File (PEM) of the CAs that sign servers' certificates, or the PEM text itself. None reads ``TELELOADER_CA``,
            or uses the CAs of the system.
        cert: File (PEM) of the client certificate. None reads ``TELELOADER_CERT``.
        key: File (PEM) of the certificate's key, if it is in another file. None reads ``TELELOADER_KEY``.

    Raises:
        ValueError: If the token is malformed, or its file cannot be read.
    """

    def __init__(
        self, token: Secret | None = None, ca: str | None = None, cert: str | None = None, key: str | None = None
    ) -> None:
        self._given = token
        self._ca, self._cert, self._key = ca, cert, key
        self._context: ssl.SSLContext | None = None
        self._changed_at: list[int] = []
        """Times of the last changes of the files of `_context`."""
        self._lock = threading.Lock()
        _created.add(self)
        self.token = self._read()

    @property
    def has_certificate(self) -> bool:
        """True if a client certificate is configured."""
        return bool(self._cert or os.environ.get(CERT_VARIABLE))

    @property
    def ca(self) -> str | None:
        """File of the CAs that sign servers' certificates, or their PEM text; None for the CAs of the system."""
        return self._ca or os.environ.get(CA_VARIABLE) or None

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that authenticate the client and protect against cross-site requests."""
        token = self.token
        return {NO_PAGE_HEADER: "1", **({} if token is None else {"Authorization": Secret(f"Bearer {token}")})}

    def renew(self, refused: str | None) -> bool:
        """Reload the token after a server rejected the token `refused`; return True if the token now differs."""
        with self._lock:
            if self.token == refused:
                try:
                    self.token = self._read()
                except ValueError:
                    return False  # the file is being written: report the server's error
            return self.token != refused

    def context(self) -> ssl.SSLContext:
        """Return the TLS context, which requires TLS 1.2 or later and verifies the server's certificate and hostname.

        The context is replaced when a file changes, because certificates for workloads are valid for an hour or less.

        Raises:
            TlsError: If a certificate or key file cannot be loaded.
        """
        with self._lock:
            changed_at = self._file_times()
            if self._context is None or changed_at != self._changed_at:
                try:
                    self._context = self._make_context()
                except TlsError:
                    if self._context is None:
                        raise
                    return self._context  # the files are being replaced
                self._changed_at = changed_at
            return self._context

    def __repr__(self) -> str:
        return "Credentials(...)"

    def _read(self) -> Secret | None:
        if self._given is not None:
            return _checked(self._given, "the argument token")
        if os.environ.get(TOKEN_VARIABLE):
            return _checked(Secret(os.environ[TOKEN_VARIABLE]), TOKEN_VARIABLE)
        file = os.environ.get(TOKEN_FILE_VARIABLE)
        if not file:
            return None
        try:
            with Path(file).open("rb") as opened:
                content = Secret(opened.read(MAX_TOKEN + 1024).decode(errors="replace").strip())
        except OSError as error:
            raise ValueError(f"cannot read the token in {file} ({TOKEN_FILE_VARIABLE}): {error.strerror}") from None
        return _checked(content, f"{file} ({TOKEN_FILE_VARIABLE})")

    @property
    def _pair(self) -> tuple[str | None, str | None]:
        """Paths of the client certificate and of its key."""
        return self._cert or os.environ.get(CERT_VARIABLE), self._key or os.environ.get(KEY_VARIABLE) or None

    def _file_times(self) -> list[int]:
        return [_changed_at(path) for path in (self.ca, *self._pair) if path and not path.startswith(PEM)]

    def _make_context(self) -> ssl.SSLContext:
        ca = self.ca
        cert, key = self._pair
        is_text = ca is not None and ca.startswith(PEM)
        try:
            context = ssl.create_default_context(cadata=ca) if is_text else ssl.create_default_context(cafile=ca)
        except OSError as error:
            where = "ca=" if is_text else ca
            raise TlsError(f"cannot load CA certificates from {where}: {_why(error)}. Expected PEM format") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if cert:
            try:
                # without a password OpenSSL would prompt for one in the terminal
                context.load_cert_chain(cert, key, lambda: "")
            except OSError as error:
                raise TlsError(
                    f"cannot load the certificate {cert} with the key in {key or 'the same file'}: {_why(error)}. "
                    f"Expected unencrypted PEM. If the key is in another file, set {KEY_VARIABLE} or pass key="
                ) from None
        return context


def _changed_at(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def _checked(token: Secret, where: str) -> Secret:
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"invalid token in {where}: expected letters, digits and -._~+/= on one line")
    return token


def _why(error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return reason or "unknown error"


def tls_error(error: BaseException | None, url: str) -> TlsError | None:
    """Return the TLS error of a failed request, or None for other errors and TLS errors that a retry may fix."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    if error is None or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return None  # the connection broke
    sentence = _untrusted(error) if isinstance(error, ssl.SSLCertVerificationError) else _refused(error.reason or "")
    return None if sentence is None else TlsError(f"cannot connect to {url}: {sentence}")


def refused_client(url: str, credentials: Credentials) -> TlsError:
    """Create the error for a server that closed the connection because of a missing or rejected client certificate."""
    reason = "UNKNOWN" if credentials.has_certificate else "REQUIRED"
    return TlsError(f"cannot connect to {url}: {_refused(f'ALERT_CERTIFICATE_{reason}')}")


def _untrusted(error: ssl.SSLCertVerificationError) -> str:
    reason = error.verify_message
    if "expired" in reason:
        return "the server's certificate has expired. Renew it on the server, or correct the clock of this machine"
    if "not yet valid" in reason:
        return "the server's certificate is not valid yet. Check the clocks of this machine and of the server"
    if "mismatch" in reason or "not valid for" in reason:
        return (
            f"the server's certificate is for another name ({reason}). Use a URL with a host name that the certificate "
            "contains"
        )
    return (
        f"the server's certificate is signed by an unknown CA ({reason}). Set TELELOADER_CA to the CA file, or pass ca="
    )


def _refused(reason: str) -> str | None:
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"):
        return "the server does not use TLS. Use an http:// URL, or start the server with --ssl-certfile"
    if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
        return (
            "the server requires a client certificate. Set TELELOADER_CERT and TELELOADER_KEY, or pass cert= and key="
        )
    if "ALERT" in reason and ("_CA" in reason or "CERTIFICATE" in reason):
        alert = reason.partition("ALERT_")[2].replace("_", " ").lower()
        return (
            f"the server rejected the client certificate ({alert}). Use a certificate from a CA that the server trusts"
        )
    if "PROTOCOL_VERSION" in reason or "UNSUPPORTED_PROTOCOL" in reason:
        return "the server does not support TLS 1.2 or later. Enable a newer version of TLS on the server"
    return None


_created: weakref.WeakSet[Credentials] = weakref.WeakSet()


def _reset_locks() -> None:
    for credentials in list(_created):
        credentials._lock = threading.Lock()


after_fork_in_child(_reset_locks)
