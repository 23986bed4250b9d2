"""Certificates of a test CA, in files."""

from __future__ import annotations

import datetime
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Files:
    """Certificates of a test CA, in files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = trustme.CA()
        self.ca = str(folder / "ca.pem")
        self.authority.cert_pem.write_to_path(self.ca)

    def make(self, name: str, *hosts: str, until: datetime.datetime | None = None) -> tuple[str, str]:
        """Create a certificate and its key; return their paths."""
        since = None if until is None else until - datetime.timedelta(days=9)
        made = self.authority.issue_cert(*hosts, not_before=since, not_after=until)
        chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        return self._write(name, chain, made.private_key_pem.bytes())

    def identity(self, name: str, uri: str, seconds: float = 86_400) -> tuple[str, str]:
        """Create the certificate of a workload, such as that of a SPIFFE identity, and its key; return their paths.

        Args:
            name: Name of the files.
            uri: Alternative name of the subject.
            seconds: Time for which the certificate is valid.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        authority = x509.load_pem_x509_certificate(self.authority.cert_pem.bytes())
        signing = serialization.load_pem_private_key(self.authority.private_key_pem.bytes(), None)
        assert isinstance(signing, ec.EllipticCurvePrivateKey)
        made = (
            x509.CertificateBuilder(authority.subject, x509.Name([]), key.public_key(), x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=1))
            .not_valid_after(now + datetime.timedelta(seconds=seconds))
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=True)
            .sign(signing, hashes.SHA256())
        )
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        return self._write(name, made.public_bytes(pem), key.private_bytes(pem, form, serialization.NoEncryption()))

    def _write(self, name: str, certificate: bytes, private_key: bytes) -> tuple[str, str]:
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        for path, content in ((cert, certificate), (key, private_key)):
            new = path.with_suffix(".new")
            new.write_bytes(content)
            new.replace(path)
        return str(cert), str(key)
