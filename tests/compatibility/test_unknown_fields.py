"""Fields and entries that a later release adds are ignored, except those that would change batches."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader.api import control
from teleloader.cli.stats import record_of
from teleloader_server import serve
from teleloader_shared import codec
from teleloader_shared.errors import InvalidSpec
from teleloader_shared.messages import ConsumerReport, ReceivingTotals
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.stats import Stats

VALUES: list[Any] = [None, True, -1, 2**62, 1.5, "", "é" * 300, [], [1, [2]], {}, {"a": {"b": [None]}}]
ORDERS: dict[str, dict[str, Any]] = {
    "seeded": {"shuffle": True, "seed": 7},
    "sampler": {"sampler": list(range(39, -1, -1))},
}


def more(fields: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a JSON object with up to three unknown fields; at its end, so that it begins with the known ones."""
    return fields | {f"future_{rng.randrange(10**6)}": rng.choice(VALUES) for _ in range(rng.randrange(1, 4))}


def deep(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with unknown fields in each object."""
    if isinstance(value, list):
        return [deep(each, rng) for each in value]
    if isinstance(value, dict):
        return more({name: deep(each, rng) for name, each in value.items()}, rng)
    return value


def epoch(url: str, order: str) -> list[Any]:
    """Return the batches of an epoch, and of the rest of it after a saved state."""
    loader = DataLoader(RemoteDataset(url), batch_size=4, output="numpy", **ORDERS[order])
    batches = [batch.tolist() for batch in loader]
    next(iter(loader))
    resumed = DataLoader(RemoteDataset(url), batch_size=4, output="numpy", **ORDERS[order])
    resumed.load_state_dict({**loader.state_dict(), "future": {"x": 1}})
    return [batches, [batch.tolist() for batch in resumed]]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(5))
def test_unknown_fields_of_responses_and_states_are_ignored(
    monkeypatch: pytest.MonkeyPatch, order: str, seed: int
) -> None:
    """Random fields in each object of each JSON response of a server change nothing."""
    rng, responses = random.Random(seed), []

    def loads(text: bytes) -> Any:
        responses.append(deep(json.loads(text), rng))
        return responses[-1]

    with serve(np.arange(40), num_workers=0) as url:
        expected = epoch(url, order)
        monkeypatch.setattr(control, "json", SimpleNamespace(loads=loads))
        assert epoch(url, order) == expected
    assert len(responses) >= 4


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(5))
def test_unknown_entries_of_frame_headers_are_ignored(monkeypatch: pytest.MonkeyPatch, order: str, seed: int) -> None:
    """Random entries in the headers of all frames, of both the server's batches and the client's index lists."""
    rng, entries = random.Random(seed), more({}, random.Random(seed))
    heads: list[Any] = []

    def packb(value: Any, **options: Any) -> bytes:
        if isinstance(value, dict) and {"loader", "epoch", "batch"} < value.keys():
            heads.append(value := more(value, rng) if seed % 2 else value | entries)
        packed: bytes = msgpack.packb(value, **options)
        return packed

    with serve(np.arange(40), num_workers=0) as url:
        expected = epoch(url, order)
    with serve(np.arange(40), num_workers=0) as url:  # the first server would not encode its batches again
        monkeypatch.setattr(codec, "_layouts", {})  # contains encoded headers
        monkeypatch.setattr(codec, "msgpack", SimpleNamespace(packb=packb, unpackb=msgpack.unpackb))
        assert epoch(url, order) == expected
    assert heads


def test_unknown_fields_of_statistics_are_ignored() -> None:
    """The client reads the statistics of a later server."""
    with serve([1, 2, 3], num_workers=0) as url:
        found = httpx.get(f"{url}/stats").json()
    rng = random.Random(1)
    # in objects whose names are data, such as those of bottlenecks, further names are further data
    later = more(
        {
            name: [more(each, rng) if isinstance(each, dict) else each for each in value]
            if isinstance(value, list)
            else value
            for name, value in found.items()
        },
        rng,
    )
    assert record_of(Stats, later, url) == record_of(Stats, found, url)


@pytest.mark.parametrize("receiving", [None, ReceivingTotals(1, 2, 3, 4, 5, 6, 7, 8)])
def test_unknown_entries_of_reports_are_ignored(receiving: ReceivingTotals | None) -> None:
    """A server reads the known entries of a later client's report."""
    report = ConsumerReport(2.0, 1.0, 3, 4, 5, 6, run="train.py", receiving=receiving)
    assert ConsumerReport.from_header(f"{report.to_header()},future=1.5,more=x") == report


def test_unknown_headers_queries_and_fields_of_requests_are_ignored() -> None:
    """A server responds to a later client's requests as if the additions were missing."""
    with serve([1, 2, 3], num_workers=0) as url, httpx.Client(base_url=url, headers={"Teleloader-Future": "1"}) as send:
        found = send.post("/v1/loaders?future=1", json={"dataset": "dataset"})
        batches = f"/v1/loaders/{found.json()['key']}/epochs/0/batches"
        for path in (f"{batches}?ranges=0:1&future=1", f"{batches}/0?future=1", "/v1/datasets?future=1"):
            assert send.get(path).status_code == 200
        # only then is the body valid: the embedded server has no workers whose number could change
        assert send.put("/v1/workers", json={"num_workers": 2, "future": 1}).status_code == 409
        assert send.put("/v1/workers", json={"future": 1}).status_code == 422


NESTED: dict[str, dict[str, Any]] = {
    "balance": {"lengths": "0" * 32, "window": 8, "group": 4, "max_tokens": None},
    "packing": {"lengths": "0" * 32, "sequence_length": 8, "window": 16, "pad_token_id": 0},
}


@pytest.mark.parametrize("name", [None, *NESTED])
def test_a_spec_with_an_unknown_field_is_refused(name: str | None) -> None:
    """A field of a spec can change batches, so the server refuses an unknown one and names it."""
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda fields: {**fields, "future": 1}  # noqa: E731
    spec = {"dataset": "dataset", "batch_size": 4}
    changed = change(spec) if name is None else {**spec, name: change(NESTED[name])}
    LoaderSpec.from_json(spec if name is None else {**spec, name: NESTED[name]})
    with pytest.raises(InvalidSpec, match="future"):
        LoaderSpec.from_json(changed)
