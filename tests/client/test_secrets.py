"""Tokens in error reports: no local variable of a traceback's frames contains them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import ConfigError, serve
from teleloader_shared.errors import ServerUnavailable, Unauthorized
from teleloader_shared.secret import Secret
from tests.client.fake_server import fake_server

TOKEN = "tl_the-token-of-these-tests"


def reported(error: BaseException) -> str:
    """Return the output of an error reporter: the error's text, and the repr of all locals outside this file."""
    parts = [repr(error)]
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename != __file__:
            names = ", ".join(f"{name}={value!r}" for name, value in frame.f_locals.items())
            parts.append(f"{frame.f_code.co_filename}:{line}: {names}")
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join([*parts, *([] if cause is None else [reported(cause)])])


def connect_to_nobody() -> None:
    """Send a request to a port without a listener."""
    RemoteDataset("http://127.0.0.1:9", token=TOKEN, reconnect_timeout=0)


def pass_a_line_break() -> None:
    """Pass a token that is invalid in a header."""
    RemoteDataset("http://127.0.0.1:9", token=f"{TOKEN}\n")


def pass_a_wrong_url() -> None:
    """Make the construction fail before the token is read."""
    RemoteDataset([], token=TOKEN)


def present_a_wrong_token() -> None:
    """Send a token that the server rejects."""
    with serve([1], num_workers=0, token=f"{TOKEN}-of-the-server") as url:
        RemoteDataset(url, token=TOKEN)


def lose_the_server() -> None:
    """Stop the server during an epoch that is longer than the prefetched batches."""
    with serve(range(100_000), num_workers=0, token=TOKEN) as url:
        batches = iter(DataLoader(RemoteDataset(url, token=TOKEN, reconnect_timeout=0.1), 1, output="numpy"))
    list(batches)


def receive_a_cut_response() -> None:
    """Receive a truncated response."""

    def hang_up(connection: Any) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{")

    with fake_server(lambda request: hang_up) as url:
        list(DataLoader(RemoteDataset(url, token=TOKEN, reconnect_timeout=0.1), 1, output="numpy"))


def serve_a_short_token() -> None:
    """Start a server with a token that is too short."""
    with serve([1], token=TOKEN[:12]):
        pass


def serve_where_others_are() -> None:
    """Start a server with a token on a port that is in use."""
    with serve([1], token=TOKEN, host_address="192.0.2.1"):
        pass


@pytest.fixture(autouse=True)
def no_token_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the credentials of the user who runs the tests."""
    for name in ("TOKEN", "TOKEN_FILE"):
        monkeypatch.delenv(f"TELELOADER_{name}", raising=False)


@pytest.mark.parametrize(
    ("fail", "kind"),
    [
        (connect_to_nobody, ServerUnavailable),
        (pass_a_line_break, ValueError),
        (pass_a_wrong_url, ValueError),
        (present_a_wrong_token, Unauthorized),
        (lose_the_server, ServerUnavailable),
        (receive_a_cut_response, ServerUnavailable),
        (serve_a_short_token, ConfigError),
        (serve_where_others_are, OSError),
    ],
)
def test_no_local_variable_shows_a_token(fail: Callable[[], None], kind: type[Exception]) -> None:
    """No token is among the locals of any frame that error reporters and ``pytest --showlocals`` print."""
    with pytest.raises(kind) as raised:
        fail()
    report = reported(raised.value)
    assert "site-packages" in report or "teleloader" in report
    assert TOKEN[:12] not in report


def test_a_token_file_that_is_refused_shows_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content of a rejected token file, which contains a token, is not shown."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\nsecond line\n")
    monkeypatch.setenv("TELELOADER_TOKEN_FILE", str(file))
    with pytest.raises(ValueError, match="expected letters, digits") as raised:
        RemoteDataset("http://127.0.0.1:9")
    assert TOKEN not in reported(raised.value)


def test_a_dataset_whose_construction_failed_has_a_repr() -> None:
    """The repr works, because error reports print `self` of the failed frame."""
    for fail in (connect_to_nobody, pass_a_wrong_url, pass_a_line_break):
        with pytest.raises((ServerUnavailable, ValueError)) as raised:
            fail()
        frames = [frame for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
        dataset = next(found for frame in frames if isinstance(found := frame.f_locals.get("self"), RemoteDataset))
        assert repr(dataset) == "<RemoteDataset, not connected>"


def test_a_secret_is_sent_as_a_string_and_shown_as_none() -> None:
    """Formatting a secret returns its text for headers; repr does not show it, not in containers either."""
    secret = Secret("text")
    assert f"{secret}" == str(secret) == "text"
    assert "text" not in f"{secret!r} {[secret]} { {'key': secret} }"
