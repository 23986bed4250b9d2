"""The audit log of a real server: it answers who read what, who changed what, and what was refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from teleloader import DataLoader, Forbidden, RemoteDataset
from tests.conftest import ServerProcess, eventually
from tests.end_to_end.test_access import TokenTable

NUMBERS = "numbers=tests.end_to_end.hosted:numbers"
MANY = "many=tests.end_to_end.hosted:many"


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind in a file."""
    lines = map(json.loads, path.read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def bearer(token: str) -> dict[str, str]:
    """Return the header with a token."""
    return {"Authorization": f"Bearer {token}"}


def test_the_log_answers_an_auditors_questions(tmp_path: Path) -> None:
    """Who read which dataset when, who changed what, and what was refused; no line contains a token."""
    table, path = TokenTable(tmp_path / "tokens.toml"), tmp_path / "audit.jsonl"
    for name, scope in (("anna", "read"), ("ben", "read:numbers"), ("carla", "admin")):
        table.add(name, scope)
    server = ServerProcess(
        "--port", "0", NUMBERS, MANY, "--num-workers", "1", "--tokens", table.write(), "--audit-log", str(path)
    )
    anna, ben, carla = (table.secrets[name] for name in ("anna", "ben", "carla"))
    for name, token, batch_size in (("run of anna", anna, 1000), ("run of ben", ben, 10)):
        dataset = RemoteDataset(server.url, "many" if token is anna else "numbers", token=token)
        list(DataLoader(dataset, batch_size, name=name))
    with pytest.raises(Forbidden):
        RemoteDataset(server.url, "many", token=ben)
    for _ in range(20):
        assert httpx.get(f"{server.url}/stats", headers=bearer("an-unknown-token")).status_code == 401
    httpx.put(f"{server.url}/v1/workers", json={"num_workers": 2}, headers=bearer(carla)).raise_for_status()
    httpx.post(f"{server.url}/session", json={"token": carla}).raise_for_status()
    assert httpx.post(f"{server.url}/session", json={"token": "a-guessed-token-of-24-letters"}).status_code == 401
    dora = table.add("dora", "read")
    table.remove("anna")
    table.write()
    eventually(lambda: events_of(path, "tokens_changed"))
    assert server.end() == 0

    started, ended = events_of(path, "read_started"), events_of(path, "read_ended")
    assert [(each["principal"], each["datasets"], each["run"]) for each in started] == [
        ("anna", ["many"], "run of anna"),
        ("ben", ["numbers"], "run of ben"),
    ]
    assert {(each["principal"], each["batches"]) for each in ended} == {("anna", 100), ("ben", 10)}
    assert all(each["bytes"] > 0 for each in ended)
    assert {each["address"] for each in started} == {"127.0.0.1"}
    (action,) = events_of(path, "action")
    assert (action["principal"], action["method"], action["path"], action["status"]) == (
        "carla", "PUT", "/v1/workers", 200,
    )  # fmt: skip
    (signed_in,) = events_of(path, "signed_in")
    assert signed_in["principal"] == "carla"
    (changed,) = events_of(path, "tokens_changed")
    assert (changed["added"], changed["removed"], changed["changed"]) == (["dora"], ["anna"], [])
    refused = events_of(path, "refused")
    assert sum(each["count"] for each in refused if each["code"] == "Unauthorized") == 21
    assert {each["principal"] for each in refused if each["code"] == "Forbidden"} == {"ben"}
    assert len(refused) <= 4  # the first of each kind, and the count of the others
    assert [len(events_of(path, kind)) for kind in ("server_started", "server_stopped")] == [1, 1]
    text = path.read_text()
    assert not any(secret in text for secret in (anna, ben, carla, dora, "an-unknown-token"))


def test_several_servers_write_a_file_each(tmp_path: Path) -> None:
    """The names contain the number of the server."""
    path = tmp_path / "audit.jsonl"
    server = ServerProcess("--port", "0", NUMBERS, "--servers", "2", "-n", "2", "--audit-log", str(path))
    list(DataLoader(RemoteDataset(server.url, "numbers"), 10))
    assert server.end() == 0
    for number in range(2):
        (started,) = events_of(tmp_path / f"audit-{number}.jsonl", "server_started")
        assert started["server"] == number
    assert not path.exists()
