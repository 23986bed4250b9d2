"""Limits on what a client can make a server do: a rejection names its limit, and other clients are not affected."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from teleloader_server.config import ConfigError
from teleloader_server.limits import DEFAULT_LIMITS, ClientLimits
from teleloader_shared import codec
from teleloader_shared.codec import BatchId
from tests.conftest import ROOT, StartServer, eventually
from tests.raw import Raw

LENGTH = 64


TOKEN = "a-token-of-the-tests"


class Numbers:
    """Dataset of 0, 1, 2, ..., whose samples wait for a file if the test names one."""

    opened: Path | None = None

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        while self.opened is not None and not self.opened.exists():
            time.sleep(0.01)
        return index


def iter_dataset() -> Any:
    """Return an iterable-style dataset."""

    class Stream:
        def __iter__(self) -> Iterator[int]:
            return iter(range(LENGTH))

    return Stream()


@contextmanager
def limited(**limits: Any) -> Iterator[tuple[str, httpx.Client]]:
    """Run a server with limits; a limit per principal needs a token, because clients without one share a principal."""
    token = TOKEN if any(name.endswith("_per_principal") for name in limits) else None
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with (
        serve(Numbers(), num_workers=1, limits=ClientLimits(**limits), token=token) as url,
        httpx.Client(base_url=url, timeout=30, headers=headers) as client,
    ):
        yield url, client
        loader = DataLoader(RemoteDataset(url, reconnect_timeout=20, token=token), 8, seed=0, output="numpy")
        taken = np.concatenate([np.asarray(batch) for batch in loader])
        assert taken.tolist() == list(range(LENGTH)), "whatever was refused, an epoch is as it should be"


def registered(client: httpx.Client, **fields: Any) -> str:
    """Return the key of a new loader."""
    response = client.post("/v1/loaders", json={"dataset": "dataset", "batch_size": 8, **fields})
    key: str = response.raise_for_status().json()["key"]
    return key


def refusal(response: httpx.Response, status: int, limit: str) -> str:
    """Return the text of an error, which must name the limit."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    detail: str = response.json()["detail"]
    assert limit in detail, detail
    return detail


def test_consumers_with_open_requests_are_limited(tmp_path: Path) -> None:
    """An idle consumer makes room for another; a consumer that waits for a batch does not."""
    Numbers.opened = tmp_path / "opened"
    with limited(max_consumers=2) as (url, client), ExitStack() as stack:
        path = f"/v1/loaders/{registered(client)}/epochs/"
        waiting = [stack.enter_context(Raw(url)) for _ in range(2)]
        for number, one in enumerate(waiting):
            one.send_get(f"{path}{number}/batches/0", b"Teleloader-Consumer: waiting\r\n")
        eventually(lambda: client.get("/stats").json()["consumers_total"] == 2)
        refusal(client.get(f"{path}2/batches/0"), 503, "max_consumers")
        Numbers.opened.touch()
        assert [one.receive().status for one in waiting] == [200, 200]
        for number in range(5):
            assert client.get(f"{path}{number}/batches/1").status_code == 200


@pytest.mark.parametrize(
    ("limit", "spec", "others"),
    [
        ("max_sessions", {}, {}),
        ("max_sessions_per_principal", {}, {}),
        ("max_session_workers", {"num_workers": 1}, {"num_workers": 1}),
        ("max_session_workers_per_principal", {"num_workers": 1}, {"num_workers": 1}),
    ],
)
def test_sessions_and_their_workers_are_limited(limit: str, spec: dict[str, Any], others: dict[str, Any]) -> None:
    """A session that ends makes room for another."""
    with limited(**{limit: 1}) as (_, client):
        first = registered(client, session="first", **spec)
        refused = client.post("/v1/loaders", json={"dataset": "dataset", "session": "second", **others})
        assert "1" in refusal(refused, 503, limit)
        assert registered(client, session="first", **spec) == first, "the one that there is goes on"
        client.delete(f"/v1/loaders/{first}")
        last = registered(client, session="third", **spec)
        client.delete(f"/v1/loaders/{last}")


def test_unused_loaders_are_evicted() -> None:
    """The least recently used loaders are evicted; clients register them again and continue."""
    with limited(max_loaders=3) as (_, client):
        keys = [registered(client, seed=seed) for seed in range(6)]
        responses = [client.get(f"/v1/loaders/{key}").status_code for key in keys]
        assert responses == [404] * 3 + [200] * 3


def test_the_number_of_batches_per_request_is_limited() -> None:
    """The limit applies to prefetched batches, and to batches with index lists."""
    with limited(max_batches_per_request=4) as (_, client):
        plan = registered(client)
        path = f"/v1/loaders/{plan}/epochs/0/batches/0"
        assert client.get(path, params={"ahead": 4}).status_code == 200
        assert "got 5" in refusal(client.get(path, params={"ahead": 5}), 422, "max_batches_per_request")
        own = registered(client, order="client", session="s")
        lists = [codec.to_bytes(BatchId(own, 0, k), np.array([k])) for k in range(5)]
        path = f"/v1/loaders/{own}/epochs/0/batches"
        refusal(client.post(path, content=b"".join(lists)), 422, "max_batches_per_request")
        assert client.post(path, content=b"".join(lists[:4])).status_code == 200
        client.delete(f"/v1/loaders/{own}")


def test_requests_beyond_the_rate_are_delayed_then_rejected() -> None:
    """Requests slightly above the rate are delayed; far above it, they are rejected with 429 after a delay."""
    with limited(max_requests_per_second=20) as (url, _):
        with ExitStack() as stack:
            many = [stack.enter_context(Raw(url)) for _ in range(80)]
            began = time.monotonic()
            for one in many:
                one.send_get("/v1/datasets")
            responses = [one.receive() for one in many]
            taken = time.monotonic() - began
        statuses = [response.status for response in responses]
        assert set(statuses) == {200, 429}
        # the burst of one second, the requests delayed by up to another second, and those that elapsed time allows
        assert 30 <= statuses.count(200) <= 20 + 20 + 20 * taken + 1
        refused = next(response for response in responses if response.status == 429)
        assert "max_requests_per_second" in refused.problem["detail"]
        assert refused.headers["retry-after"]


def test_a_remote_dataset_retries_requests_beyond_the_rate() -> None:
    """`dataset[i]` sends two requests, and either may be rejected."""
    with limited(max_requests_per_second=10) as (url, _):
        dataset = RemoteDataset(url)
        with ThreadPoolExecutor(24) as several:
            assert list(several.map(lambda index: int(dataset[index]), range(24))) == list(range(24))


def test_requests_without_a_token_are_limited_by_ip_address() -> None:
    """Requests to any path, probes and invalid tokens count together; another IP address has its own rate.

    Requests with a valid token are accepted from an IP address that has exhausted its rate: a stranger behind the same
    proxy does not lock out other users.
    """
    limits = ClientLimits(max_unauthenticated_requests_per_second=10)
    with serve(Numbers(), num_workers=0, token=TOKEN, limits=limits) as url, ExitStack() as stack:
        owner, other = stack.enter_context(Raw(url)), stack.enter_context(Raw(url, source="127.0.0.2"))
        strangers = [stack.enter_context(Raw(url)) for _ in range(60)]
        paths = ("/healthz", "/nothing", "/v1/datasets", "/", "/session", "/v1/loaders/x/stream", "/stats")
        for number, stranger in enumerate(strangers):
            path = paths[number % len(paths)]
            wrong = b"Authorization: Bearer not-one-of-the-tokens\r\n" if number % 2 else b""
            stranger.send_get(path, wrong + (HANDSHAKE if path.endswith("stream") else b""))
        valid = f"Authorization: Bearer {TOKEN}\r\n".encode()
        assert [owner.get("/v1/datasets", valid).status for _ in range(50)] == [200] * 50
        assert other.get("/healthz").status == 200
        refused = [response for response in (stranger.receive() for stranger in strangers) if response.status == 429]
        assert len(refused) >= 20
        assert "max_unauthenticated_requests_per_second" in refused[0].problem["detail"]
        assert all(response.headers["retry-after"] for response in refused)


HANDSHAKE = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)


def test_without_tokens_all_clients_are_one_principal() -> None:
    """Clients without tokens share the rate limit `max_requests_per_second`."""
    with limited(max_unauthenticated_requests_per_second=1) as (url, client):
        assert [client.get(path).status_code for path in ("/healthz", "/v1/datasets") * 20] == [200] * 40
        assert url


@pytest.mark.parametrize("query", ["a&" * 30_000, "ranges=0:1&" + "x" * 5000])
def test_query_strings_are_limited(query: str) -> None:
    """Long query strings are rejected before they are parsed."""
    with limited() as (_, client):
        assert client.get(f"/stats?{query}").json()["code"] == "UriTooLong"


def test_the_memory_of_specs_is_limited() -> None:
    """Unused loaders are evicted; if all are in use, the registration is rejected."""
    session = {"batch_size": 8, "num_workers": 1}
    name = "x" * 500
    limits = ClientLimits(max_total_spec_bytes=60_000)
    with (
        serve(iter_dataset(), num_workers=1, limits=limits) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        states = ["\u0101" * 16_000]
        first = registered(client, session="1" + name, shard_states=states, **session)
        spec = {"dataset": "dataset", "session": "2" + name, "shard_states": states, **session}
        refusal(client.post("/v1/loaders", json=spec), 503, "max_total_spec_bytes")
        small = [registered(client, session=f"{number}{name}") for number in range(3)]
        assert client.get(f"/v1/loaders/{first}").status_code == 200
        for key in (first, *small):
            client.delete(f"/v1/loaders/{key}")
        assert client.post("/v1/loaders", json=spec).status_code == 200, "what ended is not counted"
        client.delete(f"/v1/loaders/{client.post('/v1/loaders', json=spec).json()['key']}")


def test_shared_loaders_are_evicted_if_their_specs_need_too_much_memory() -> None:
    """The least recently used loaders are evicted first."""
    with limited(max_total_spec_bytes=10 * 2**10) as (_, client):
        keys = [registered(client, seed=seed) for seed in range(12)]
        statuses = [client.get(f"/v1/loaders/{key}").status_code for key in keys]
        assert statuses == [404] * 8 + [200] * 4


@pytest.mark.parametrize("field", [{"shard_states": [None, None]}, {"delivered": "[0,null,null]"}], ids=str)
def test_shard_states_of_a_map_style_dataset_are_rejected(field: dict[str, Any]) -> None:
    """The server and each worker would keep them for no purpose."""
    with limited() as (_, client):
        spec = {"dataset": "dataset", "session": "s", "num_workers": 2, **field}
        detail = refusal(client.post("/v1/loaders", json=spec), 422, f"{next(iter(field))} must be null")
        assert "map-style" in detail


def test_connections_from_one_ip_address_are_limited() -> None:
    """Other IP addresses, such as 127.0.0.2, have their own limit."""
    with limited(max_connections_per_address=5) as (url, _), ExitStack() as stack:
        mine = [stack.enter_context(Raw(url, source="127.0.0.2")) for _ in range(5)]
        assert [one.get("/v1/datasets").status for one in mine] == [200] * 5
        refused = stack.enter_context(Raw(url, source="127.0.0.2")).receive()
        assert "127.0.0.2 has reached the limit of 5 connections" in refused.problem["detail"]


@pytest.mark.parametrize(
    ("limit", "value", "status"),
    [("max_spec_bytes", 100, 413), ("max_body_bytes", 2000, 413), ("max_buffered_request_bytes", 50, 503)],
)
def test_bodies_are_limited(limit: str, value: int, status: int) -> None:
    """The size of each body, and of all bodies together, is limited."""
    with serve(Numbers(), num_workers=0, limits=ClientLimits(**{limit: value})) as url, httpx.Client() as client:
        body = json.dumps({"dataset": "dataset", "version": "x" * value * 2})
        refusal(client.post(f"{url}/v1/loaders", content=body), status, limit)


def test_heads_are_limited() -> None:
    """The size of request lines and headers is limited."""
    with limited(max_header_bytes=2048) as (_, client):
        refusal(client.get("/healthz", headers={"x": "y" * 4000}), 431, "max_header_bytes")
        refusal(client.get("/" + "x" * 4000), 414, "max_header_bytes")


# --- The configuration --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"max_consumer": 1}, r"unknown key 'max_consumer'.* max_consumers"),
        ({"max_consumers": 0}, r"invalid limit max_consumers=0: expected an integer greater than 0"),
        ({"max_consumers": 1.5}, r"=1\.5: expected an integer greater than 0"),
        ({"max_consumers": True}, "=True: expected"),
        ({"max_consumers": "many"}, r"invalid limit max_consumers='many': expected a number, or a size such as 64MiB"),
        ({"header_timeout": float("inf")}, "=inf: expected a number greater than 0"),
        ({"header_timeout": -1}, "=-1: expected"),
        ({"max_header_bytes": 10}, "=10: expected at least 1024"),
    ],
)
def test_invalid_limits_are_rejected(table: dict[str, Any], sentence: str) -> None:
    """The error at construction has the name, the value and the allowed range."""
    with pytest.raises(ConfigError, match=sentence):
        ClientLimits.parse(table)


def test_limits_are_read_from_the_file_and_the_command_line(start_server: StartServer, tmp_path: Path) -> None:
    """The command line overrides the configuration file."""
    file = tmp_path / "loader.toml"
    file.write_text('[limits]\nmax_batches_per_request = 3\nmax_spec_bytes = "1KiB"\n')
    server = start_server("--demo", "--num-workers", "1", "--config", str(file), "--limit", "max_batches_per_request=7")
    with httpx.Client(base_url=server.url) as client:
        key = registered(client, dataset="digits-test")
        path = f"/v1/loaders/{key}/epochs/0/batches/0"
        refusal(client.get(path, params={"ahead": 8}), 422, "at most 7")
        refusal(client.post("/v1/loaders", content=b"x" * 1025), 413, "1,024 bytes")


def test_docs_limits_lists_all_limits() -> None:
    """The page lists each limit with its default and description."""
    page = (ROOT / "docs" / "limits.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", page, re.MULTILINE))
    for field in dataclasses.fields(ClientLimits):
        assert rows.get(field.name) == shown(field.name, getattr(DEFAULT_LIMITS, field.name)), field.name


def shown(name: str, value: float) -> str:
    """Return a value as docs/limits.md shows it: in KiB or MiB if it is a size or a rate of bytes."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)) if name.endswith(("_bytes", "_rate")) else ():
        if value >= size and value % size == 0:
            return f"{value / size:g}" + unit
    return f"{value:,.0f}"
