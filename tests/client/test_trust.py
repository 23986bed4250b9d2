"""Servers that a client must not use."""

from __future__ import annotations

import pytest

from teleloader import DatasetChanged, TlsError
from teleloader.fleet.trust import check_environment, check_trust


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1:8000", "http://127.0.0.1:8000", "http://127.8.9.1", "http://[::1]:8000"]
)
def test_local_servers_are_used(url: str) -> None:
    """A server with a loopback IP address is used with and without a CA."""
    check_trust(url, is_verified=False, trust_directory=False)
    check_trust(url, is_verified=True, trust_directory=False)


@pytest.mark.parametrize("url", ["https://a", "https://10.0.0.5:8000", "https://localhost", "https://127.0.0.1.a"])
def test_servers_with_tls_are_used_if_it_verifies_that_they_are_those_of_the_user(url: str) -> None:
    """A server with TLS requires the user's CA, because a public CA proves only who owns the host name."""
    check_trust(url, is_verified=True, trust_directory=False)
    check_trust(url, is_verified=False, trust_directory=True)
    with pytest.raises(TlsError, match=r"Pass the CA of your servers as ca= .*trust_directory=True") as error:
        check_trust(url, is_verified=False, trust_directory=False)
    assert str(error.value).startswith(f"{url} is not used: the CAs of the system verify only")


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://10.0.0.5:8000",
            "http://attacker.example",
            "http://localhost:8000",
            "http://localhost.attacker.example",
        ),
        *("http://127.0.0.1.attacker.example", "http://0.0.0.0:8000", "http://[::]:8000", "http://[fe80::1%25lo]"),
        *("http://2130706433", "http://0x7f.1", "http://127.1", "http://[::ffff:10.0.0.5]"),
    ],
)
def test_other_servers_are_used_if_the_user_trusts_the_directory(url: str) -> None:
    """Unverified servers require `trust_directory=True`; the error names the server and the choices."""
    with pytest.raises(TlsError, match="trust_directory=True") as error:
        check_trust(url, is_verified=True, trust_directory=False)
    assert str(error.value).startswith(f"{url} is not used: without TLS")
    check_trust(url, is_verified=False, trust_directory=True)


def test_a_server_with_other_library_versions_is_not_used() -> None:
    """A server with different library versions raises an error that names the server and both environments."""
    with pytest.raises(DatasetChanged, match=r"http://a runs numpy 2, but most servers run numpy 1: .*mixed"):
        check_environment("http://a", "numpy 2", "numpy 1")


@pytest.mark.parametrize("environment", ["numpy 1", None])
def test_servers_with_equal_or_unknown_library_versions_are_used(environment: str | None) -> None:
    """A server that reports the same library versions, or none like older releases, is used."""
    check_environment("http://a", environment, "numpy 1")
    check_environment("http://a", "numpy 2", None)
