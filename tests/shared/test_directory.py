"""Lists of servers from untrusted sources."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader_shared.directory import (
    MAX_INSTANCE,
    MAX_PROBLEMS,
    MAX_SERVERS,
    MAX_URL,
    DirectoryAddress,
    Entry,
    Listing,
    at_port,
    directory_address,
    listing,
    merged,
    port_of,
    server_url,
)
from teleloader_shared.errors import Unauthorized
from tests.conftest import examples

fixed = settings(max_examples=examples(200))
json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://A:8000/", DirectoryAddress("server", ("http://a:8000",))),
        ("https://a", DirectoryAddress("server", ("https://a",))),
        ("dns+http://teleloader.ns:8000", DirectoryAddress("dns", ("http://teleloader.ns:8000",))),
        ("dns+https://teleloader.ns/", DirectoryAddress("dns", ("https://teleloader.ns",))),
        ("registry+http://a:8266,b:8266", DirectoryAddress("registry", ("http://a:8266", "http://b:8266"))),
        ("registry+https://a,a/", DirectoryAddress("registry", ("https://a",))),
        ("file:///shared/my%20job.servers", DirectoryAddress("file", path="/shared/my job.servers")),
    ],
)
def test_addresses_have_four_forms(text: str, address: DirectoryAddress) -> None:
    """The address of a directory or server names a server, DNS name, file or registries."""
    assert directory_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", "a:8000", "ray://a:10001", "srv+http://a", "dns+ftp://a", "+http://a", "dns+dns+http://a", "dns://a"),
        *("file://relative", "file://host/path", "file:/path", "file:///a%00b", "file:///a?b", "file:///a%23b"),
        *("dns+http://", "registry+http://a,,b", "registry+http://a,http://b", "registry+http://", "http+http://a"),
    ],
)
def test_other_addresses_are_refused(text: str) -> None:
    """The error for an invalid address names the four forms or the invalid URL."""
    with pytest.raises(ValueError, match=r"^invalid server (or directory|URL) .*expected http://host:port"):
        directory_address(text)


def test_a_password_in_an_address_is_not_shown() -> None:
    """The error for an invalid address in any form hides a password."""
    for text in ("http://u:secret@a", "dns+http://u:secret@a", "registry+http://a,u:secret@b", "ray://u:secret@a"):
        with pytest.raises(ValueError, match="invalid server") as error:
            directory_address(text)
        assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://a", "http://a"),
        ("HTTP://Cpu-Box:8000/", "http://cpu-box:8000"),
        ("http://a:80", "http://a"),
        ("https://a:443/loaders/", "https://a/loaders"),
        ("https://a:80", "https://a:80"),
        ("http://[FE80::1]:8000", "http://[fe80::1]:8000"),
        ("http://[fe80::1%25eth0]:8000", "http://[fe80::1%25eth0]:8000"),
        ("http://10.0.0.5:8000", "http://10.0.0.5:8000"),
    ],
)
def test_equal_urls_have_one_form(text: str, url: str) -> None:
    """A normalized URL stays the same when it is normalized again."""
    assert server_url(text) == url == server_url(url)


@pytest.mark.parametrize(
    "text",
    [
        *("", "a:8000", "ftp://a", "file:///etc/passwd", "http://", "http://:80", "http:///path", "//a:80"),
        *("http://a:0", "http://a:65536", "http://a:x", "http://[::1", "http://a b", "http://a\n", "http://a\x00"),
        *("http://h\u00f6st", "http://a\\b", "http://a/\u202e", "javascript:alert(1)", "http://" + MAX_URL * "a"),
        *(None, 5, b"http://a", ["http://a"], {"url": "http://a"}, 1e300),
    ],
)
def test_other_values_are_refused_as_urls(text: object) -> None:
    """The error for an invalid URL shows a bounded part of the value."""
    with pytest.raises(ValueError, match=r"^invalid server URL ") as error:
        server_url(text)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("text", ["http://user:secret@a", "http://a?token=secret", "http://a#secret", "http://a/?"])
def test_a_secret_in_a_url_is_refused_and_not_shown(text: str) -> None:
    """A URL with a password, query or fragment is refused, because URLs are logged."""
    with pytest.raises(ValueError, match="a password, query or fragment is not allowed") as error:
        server_url(text)
    assert "secret" not in str(error.value)


def test_a_list_of_urls_and_one_of_records_are_read() -> None:
    """Lists of URLs and of records are read, and equal URLs are one entry."""
    entries = (Entry("http://a"), Entry("http://b:1", "x7"))
    assert listing(["http://a/", {"url": "http://b:1", "instance": "x7", "more": [1]}, "http://a"]) == Listing(
        entries, is_complete=True
    )
    assert listing(iter(["http://a"])).entries == entries[:1]
    assert listing([]) == Listing((), is_complete=True)


def test_an_invalid_entry_makes_the_rest_incomplete() -> None:
    """The valid entries of a list are used, because a server may have been killed while it wrote the last one."""
    found = listing(["http://a", "http//b", {"url": "http://c", "instance": 5}, {}])
    assert found.entries == (Entry("http://a"),)
    assert not found.is_complete
    assert len(found.problems) == 3
    assert len(listing(["x"] * 100).problems) == MAX_PROBLEMS


@pytest.mark.parametrize("instance", [None, 5, "a b", "\u00e4", "x" * (MAX_INSTANCE + 1), "a\n", b"x"])
def test_an_instance_is_a_short_name(instance: object) -> None:
    """An instance that is long or not printable is refused, because instances are logged."""
    found = listing([{"url": "http://c", "instance": instance}])
    assert found.entries == ()
    assert "invalid instance" in found.problems[0]


@pytest.mark.parametrize("source", ["http://a", b"http://a", {"servers": ["http://a"]}, None, 5])
def test_a_value_that_is_not_a_list_has_no_entries(source: object) -> None:
    """A single URL in place of a list is a problem, and not a list of characters."""
    found = listing(source)
    assert (found.entries, found.is_complete) == ((), False)
    assert "expected a list of server URLs" in found.problems[0]


def test_a_list_that_is_too_long_has_no_entries() -> None:
    """A list above the limit, or without an end, has no entries: a part of it would retire the other servers."""
    urls = [f"http://a:{port}" for port in range(1, MAX_SERVERS + 2)]
    assert len(listing(urls[:MAX_SERVERS]).entries) == MAX_SERVERS
    for source in (urls, (f"http://a:{port}" for port in range(1, 10_001)), iter(lambda: "http://a", None)):
        found = listing(source)
        assert (found.entries, found.is_complete) == ((), False)
        assert found.problems == ("more than 4,096 servers",)


def test_registries_are_merged() -> None:
    """The union of registries is incomplete if one of them does not respond."""
    one, other = listing(["http://a", "http://b"]), listing(["http://b", "http://c"])
    assert merged([one, other]) == listing(["http://a", "http://b", "http://c"])
    silent = Listing((), is_complete=False, problems=("no response",))
    assert merged([one, silent]) == Listing(one.entries, is_complete=False, problems=("no response",))
    refusing = replace(silent, refusal=Unauthorized("unknown token"))
    assert merged([refusing, silent]).refusal is None
    assert merged([refusing, refusing]).refusal is refusing.refusal


def test_a_registry_with_many_servers_does_not_hide_those_of_others() -> None:
    """The servers of the registries are listed in turn, because the client uses the first ones of a long list."""
    huge = listing([f"http://a:{port}" for port in range(1, MAX_SERVERS + 1)])
    found = merged([huge, listing(["http://b", "http://c"])])
    assert [entry.url for entry in found.entries[:4]] == ["http://a:1", "http://b", "http://a:2", "http://c"]
    assert (len(found.entries), found.is_complete) == (MAX_SERVERS + 2, True)


@fixed
@given(json | st.lists(json | st.fixed_dictionaries({"url": json, "instance": json})))
def test_an_untrusted_value_raises_no_error(source: Any) -> None:
    """Any value from a directory results in valid entries only."""
    found = listing(source)
    assert all(server_url(entry.url) == entry.url for entry in found.entries)
    assert found.is_complete == (not found.problems)


@fixed
@given(st.text())
def test_a_text_raises_value_errors_only(text: str) -> None:
    """`server_url` raises only `ValueError`, and normalizing an accepted URL again does not change it."""
    for candidate in (text, f"http://{text}", f"https://a{text}"):
        try:
            url = server_url(candidate)
        except ValueError:
            continue
        assert server_url(url) == url


@pytest.mark.parametrize(
    ("url", "port", "other"),
    [
        ("http://a:8000", 8001, "http://a:8001"),
        ("http://a", 8001, "http://a:8001"),
        ("https://a:8000/path", 443, "https://a/path"),
        ("http://[fe80::1%eth0]:8000", 8001, "http://[fe80::1%eth0]:8001"),
    ],
)
def test_a_server_at_another_port_of_the_same_host(url: str, port: int, other: str) -> None:
    """A URL at another port keeps its scheme, host and path, and omits the default port."""
    assert at_port(url, port) == other == server_url(other)
    assert port_of(other) == port
    assert at_port(other, port_of(url)) == url
