"""Credentials of a client, its token and certificate, and the CAs by which it verifies servers.

The token is in no ``repr``, error message, pickle or saved state, and a `Secret` in each local variable.
"""

from __future__ import annotations

import os
import re
import ssl
import threading
from pathlib import Path
from typing import Any, Final

from teleloader_shared.errors import TlsError
from teleloader_shared.messages import NO_PAGE_HEADER
from teleloader_shared.secret import Secret

TOKEN_VARIABLE: Final = "TELELOADER_TOKEN"  # noqa: S105 - where it is, not what
TOKEN_FILE_VARIABLE: Final = "TELELOADER_TOKEN_FILE"  # noqa: S105 - as above
CA_VARIABLE: Final = "TELELOADER_CA"
CERT_VARIABLE: Final = "TELELOADER_CERT"
KEY_VARIABLE: Final = "TELELOADER_KEY"

_TOKEN: Final = re.compile(r"[A-Za-z0-9._~+/=-]{1,512}")


class Credentials:
    """Those of one `RemoteDataset`; what is None is what the environment says.

    Args:
        token: The token that authenticates the client; else ``TELELOADER_TOKEN``, or the content of the file that
            ``TELELOADER_TOKEN_FILE`` names.
        ca: File (PEM) of the CAs that servers' certificates may be of; else ``TELELOADER_CA``, or the system's.
        cert: File (PEM) of a certificate that servers may want; else ``TELELOADER_CERT``.
        key: File (PEM) of its key, if that is in another one; else ``TELELOADER_KEY``.

    Raises:
        ValueError: When the token cannot be one, or its file cannot be read.
    """

    def __init__(
        self, token: Secret | None = None, ca: str | None = None, cert: str | None = None, key: str | None = None
    ) -> None:
        self._given = token
        self._ca, self._cert, self._key = ca, cert, key
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._token = self._read()

    @property
    def token(self) -> Secret | None:
        """The token; None if there is none."""
        return self._token

    @property
    def has_certificate(self) -> bool:
        """Whether a certificate is shown."""
        return bool(self._cert or os.environ.get(CERT_VARIABLE))

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a request that authenticate the client and show that it is not a web page."""
        token = self._token
        return {NO_PAGE_HEADER: "1", **({} if token is None else {"Authorization": Secret(f"Bearer {token}")})}

    def renew(self, refused: str | None) -> bool:
        """Read the token again after a server refused one; return True if it differs from the refused one."""
        with self._lock:
            if self._token == refused:
                try:
                    self._token = self._read()
                except ValueError:
                    return False  # it is being written; what the server said is what the user should see
            return self._token != refused

    def context(self) -> ssl.SSLContext:
        """How TLS is spoken: at least TLS 1.2, and only with servers whose certificate and name are right.

        Raises:
            TlsError: When a file cannot be used.
        """
        with self._lock:
            if self._context is None:
                self._context = self._make_context()
            return self._context

    def __repr__(self) -> str:
        return "Credentials(...)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Credentials:
        return self  # a copy in the same process may have the token

    def __reduce__(self) -> tuple[Any, ...]:
        # whoever gets the pickle shall not get the token: there, the environment says it
        return Credentials, (None, self._ca, self._cert, self._key)

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
                content = Secret(opened.read(4096).decode(errors="replace").strip())
        except OSError as error:
            raise ValueError(f"cannot read the token in {file} ({TOKEN_FILE_VARIABLE}): {error.strerror}") from None
        return _checked(content, f"{file} ({TOKEN_FILE_VARIABLE})")

    def _make_context(self) -> ssl.SSLContext:
        ca = self._ca or os.environ.get(CA_VARIABLE) or None
        cert, key = self._cert or os.environ.get(CERT_VARIABLE), self._key or os.environ.get(KEY_VARIABLE) or None
        try:
            context = ssl.create_default_context(cafile=ca)
        except OSError as error:
            raise TlsError(f"{ca} must hold CA certificates in PEM format: {_why(error)}") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if cert:
            try:
                # a password is given in every case: OpenSSL would ask for one in the terminal
                context.load_cert_chain(cert, key, lambda: "")
            except OSError as error:
                raise TlsError(
                    f"{cert} must hold a certificate and {key or 'the same file'} its key, in PEM format and not "
                    f"encrypted: {_why(error)}{'' if key else f'. Another file is named by {KEY_VARIABLE}, or key='}"
                ) from None
        return context


def _checked(token: Secret, where: str) -> Secret:
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"invalid token in {where}: expected letters, digits and -._~+/= on one line")
    return token


def _why(error: OSError) -> str:
    said = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return said or "that is not so"


def tls_error(error: BaseException | None, url: str) -> TlsError | None:
    """What a failure to talk to a server means, where it is one of TLS that asking again does not mend."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    if error is None or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return None  # the connection broke
    sentence = _untrusted(error) if isinstance(error, ssl.SSLCertVerificationError) else _refused(error.reason or "")
    return None if sentence is None else TlsError(f"no batches from {url}: {sentence}")


def refused_client(url: str, credentials: Credentials) -> TlsError:
    """What it means that a server hangs up after the handshake."""
    reason = "UNKNOWN" if credentials.has_certificate else "REQUIRED"
    return TlsError(f"no batches from {url}: {_refused(f'ALERT_CERTIFICATE_{reason}')}")


def _untrusted(error: ssl.SSLCertVerificationError) -> str:
    said = error.verify_message
    if "expired" in said:
        return "its certificate has expired: renew it on the server (or set this machine's clock)"
    if "not yet valid" in said:
        return "its certificate is not valid yet: look at this machine's clock and the server's"
    if "mismatch" in said or "not valid for" in said:
        return f"its certificate is for another name ({said}): use a name that is in it"
    return f"its certificate is of no CA that is known here ({said}): set TELELOADER_CA to the file of its CA, or ca="


def _refused(reason: str) -> str | None:
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNEXPECTED_MESSAGE"):
        return "there is no TLS: write http://, or start the server with --ssl-certfile"
    if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
        return "it wants a certificate of the client: set TELELOADER_CERT and TELELOADER_KEY, or cert= and key="
    if "ALERT" in reason and ("_CA" in reason or "CERTIFICATE" in reason):
        said = reason.partition("ALERT_")[2].replace("_", " ").lower()
        return f"it does not take the client's certificate ({said}): TELELOADER_CERT must be of a CA that it knows"
    if "PROTOCOL_VERSION" in reason or "UNSUPPORTED_PROTOCOL" in reason:
        return "it speaks no TLS of version 1.2 or later"
    return None
