"""Errors for server URLs and datasets that cannot exist: each has the value and what to do."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest

from teleloader import RemoteDataset, UnknownDataset
from teleloader.api.control import Server
from teleloader.api.credentials import Credentials
from teleloader_server import serve
from teleloader_shared.secret import Secret

NO_URLS: list[Any] = [
    "", "http://", "https://", "http:///train", "ftp://cpu-box", "cpu-box:8000", "//cpu-box", "http://[::1",
    "http://cpu box", "http://cpu-box\n:80", "http://h:80.", "http://h:port", "http://h:99999", "http://h:0",
    "http://h:-1", "http://\ud800.de", None, 5, b"http://cpu-box",
]  # fmt: skip


@pytest.mark.parametrize("url", NO_URLS, ids=repr)
def test_what_is_no_url_is_refused(url: Any) -> None:
    """An invalid URL is rejected immediately, by the public class and by its internal parts."""
    for make in (lambda: Server(url, 1.0), lambda: RemoteDataset([url, "http://127.0.0.1:9"], "train")):
        with pytest.raises(ValueError, match="invalid server URL ") as error:
            make()
        assert repr(url) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("url", [None, 5])
def test_what_is_neither_a_url_nor_a_list_of_them_is_refused(url: Any) -> None:
    """Other types of values raise the same error as an invalid URL."""
    with pytest.raises(ValueError, match=r"invalid server URL (None|5): expected http://host:port$"):
        RemoteDataset(url)


def test_a_list_of_no_servers_is_refused() -> None:
    """An empty list of servers is rejected."""
    with pytest.raises(ValueError, match="empty list of server URLs"):
        RemoteDataset([])


def test_a_url_is_written_as_it_is_meant() -> None:
    """Equivalent URLs are normalized to the same text; a path prefix is kept."""
    assert Server("HTTPS://CPU-Box:8000/", 1.0).url == "https://cpu-box:8000"
    assert Server("http://proxy/loaders/", 1.0).url == "http://proxy/loaders"
    assert Server("http://[::1]:8000", 1.0).url == "http://[::1]:8000"


def test_of_several_datasets_one_must_be_named() -> None:
    """The error lists the hosted datasets, and states that no name was given, not that None is unknown."""
    with serve({"a": [1], "b": [2]}, num_workers=0) as url:
        with pytest.raises(UnknownDataset, match=r"no dataset name was given: .* hosts 'a', 'b'\. "):
            RemoteDataset(url)
        with pytest.raises(UnknownDataset, match=r"unknown dataset 'c': .* hosts 'a', 'b'\. "):
            RemoteDataset(url, "c")


def test_an_attribute_of_the_hosted_dataset_is_not_available() -> None:
    """The error names the attribute and the reason; `hasattr`, copies and errors of properties work as before."""
    with serve([1, 2], num_workers=0) as url:
        dataset = RemoteDataset(url)
        with pytest.raises(AttributeError, match=r"no attribute 'classes': attributes of the hosted dataset are not"):
            dataset.classes  # type: ignore[attr-defined] # noqa: B018
        with pytest.raises(AttributeError, match=r"no attribute '_classes'$"):
            dataset._classes  # type: ignore[attr-defined] # noqa: B018
        assert not hasattr(dataset, "transform")
        assert len(copy.copy(dataset)) == len(pickle.loads(pickle.dumps(dataset))) == 2
        del dataset.servers
        with pytest.raises(AttributeError, match="attribute 'servers'"):
            dataset.url  # noqa: B018


@pytest.mark.parametrize(
    ("url", "token", "lines"),
    [
        ("http://clear-1:8000", "a-token-of-the-tests", 1),
        ("http://10.9.8.7:8000", "a-token-of-the-tests", 1),
        ("http://clear-2:8000", None, 0),
        ("https://clear-3:8000", "a-token-of-the-tests", 0),
        ("http://localhost:8000", "a-token-of-the-tests", 0),
        ("http://127.0.0.2:8000", "a-token-of-the-tests", 0),
        ("http://[::1]:8000", "a-token-of-the-tests", 0),
    ],
)
def test_a_token_in_clear_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, url: str, token: str | None, lines: int
) -> None:
    """A client that sends a token to another machine without TLS logs one warning for each server."""
    for name in ("TELELOADER_TOKEN", "TELELOADER_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        Server(url, 1.0, Credentials(None if token is None else Secret(token)))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == lines
    assert all(f"the token for {url} is sent unencrypted" in line and "a-token" not in line for line in warnings)
