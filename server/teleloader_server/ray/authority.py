"""Certificate authority of a fleet, which issues the certificates of its servers."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from teleloader_shared.secret import Secret

VALIDITY: Final = timedelta(days=3650)
CLOCK_SKEW: Final = timedelta(days=1)
"""Maximum lag of the clocks of other machines."""


class FleetSecret(Secret):
    """Secret of a fleet, whose pickles contain the text: Ray sends the arguments and results of actors as pickles."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return FleetSecret, (str(self),)


class Certificate(NamedTuple):
    """Certificate and private key in PEM format."""

    certificate: str
    key: FleetSecret


def create_authority() -> Certificate:
    """Create a CA."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject("teleloader fleet")
    usage = x509.KeyUsage(
        key_cert_sign=True, digital_signature=False, crl_sign=False, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = (
        _builder(subject, subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _signed(builder, key, key)


def issue(authority: Certificate, address: str) -> Certificate:
    """Issue the certificate of a server.

    Args:
        authority: The CA.
        address: IP address of the server.
    """
    issuer = x509.load_pem_x509_certificate(authority.certificate.encode())
    issuer_key = cast("ec.EllipticCurvePrivateKey", serialization.load_pem_private_key(authority.key.encode(), None))
    key = ec.generate_private_key(ec.SECP256R1())
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    builder = (
        _builder(_subject(address), issuer.subject, key.public_key())
        .add_extension(host, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    return _signed(builder, issuer_key, key)


def _builder(subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALIDITY)
    )


def _signed(
    builder: x509.CertificateBuilder, signing_key: ec.EllipticCurvePrivateKey, key: ec.EllipticCurvePrivateKey
) -> Certificate:
    certificate = builder.sign(signing_key, hashes.SHA256())
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Certificate(certificate.public_bytes(serialization.Encoding.PEM).decode(), FleetSecret(key_pem.decode()))


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
