"""States that no loader has saved, and answers that no loader server gives."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from teleloader import state
from teleloader.control import Server, error_of
from teleloader_shared.errors import ProtocolError, StateMismatch
from teleloader_shared.spec import LoaderSpec
from tests.client.fake_server import INFO

IDENTITY = {"dataset": "f", "order": "iterable"}
SAVED = {"version": 1, "epoch": 3, **IDENTITY, "batch": 17}
REGISTERED = {
    "key": "0" * 32, "batches": 8, "length": 8, "fingerprint": "f", "num_workers": 1, "max_batch_bytes": 2**20,
    "protocol": 1,
}  # fmt: skip


def nested() -> Any:
    """Lists inside each other, more than Python walks through."""
    value: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shard_states", -1),
        ("shard_states", "ab"),
        ("random", [1]),
        ("base_seed", "5"),
        ("batch", None),
        ("epoch", nested()),
        ("order", nested()),
        ("version", ["x" * 100] * 1000),
    ],
    ids=lambda value: repr(value)[:10] if not isinstance(value, list) else "list",
)
def test_a_state_with_another_value_is_refused_in_a_sentence(name: str, value: Any) -> None:
    """It names the entry, and does not repeat a long value, or fall over a deep one."""
    assert state.load(SAVED, IDENTITY, None).batch == 17
    with pytest.raises(StateMismatch, match=name) as caught:
        state.load({**SAVED, name: value}, IDENTITY, None)
    assert len(str(caught.value)) < 500


class Saying(Server):
    """A server that answers everything with one value."""

    def __init__(self, answer: Any) -> None:
        super().__init__("http://server", 1)
        self._answer = answer

    def _request(self, method: str, path: str, **options: Any) -> Any:
        return self._answer


@pytest.mark.parametrize("answer", [None, 5, "x", {}, [5], [{}], [[INFO]], nested()], ids=lambda answer: type(answer))
def test_a_list_of_datasets_that_is_none_is_refused(answer: Any) -> None:
    """As what it is: something that is no loader server."""
    with pytest.raises(ProtocolError, match="is it a loader server"):
        Saying(answer).datasets()


@pytest.mark.parametrize("name", [name for name in INFO if name != "a_field_of_the_future"])
def test_a_dataset_with_a_value_of_another_type_is_refused(name: str) -> None:
    """Where it is read, and not where it is used."""
    assert Saying(INFO).dataset("fake").name == "fake"
    with pytest.raises(ProtocolError, match=f"says that {name} is .*: is it a loader server"):
        Saying({**INFO, name: [[name]]}).dataset("fake")


@pytest.mark.parametrize("name", REGISTERED)
def test_a_registration_with_a_value_of_another_type_is_refused(name: str) -> None:
    """As above."""
    assert Saying(REGISTERED).register(LoaderSpec(dataset="fake")).batches == 8
    with pytest.raises(ProtocolError, match=f"says that {name} is"):
        Saying({**REGISTERED, name: [1]}).register(LoaderSpec(dataset="fake"))


@pytest.mark.parametrize("body", [b"[" * 100_000, json.dumps({"code": [1], "detail": {}}).encode(), b"\xff", b""])
def test_an_error_without_a_sense_is_a_protocol_error(body: bytes) -> None:
    """Whatever an answer that is no 200 has for a body."""
    assert type(error_of(500, body, "http://server")) is ProtocolError
