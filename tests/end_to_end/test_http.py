"""The endpoints, as curl or a client in another language sees them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgpack
import numpy as np
import psutil
import pytest

from teleloader_server import serve
from teleloader_server.dispatch import service
from teleloader_server.limits import ClientLimits
from teleloader_shared import codec
from teleloader_shared.messages import FRAME_MEDIA_TYPE, PROTOCOL_HEADER
from tests.conftest import eventually
from tests.end_to_end import hosted


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    """Yield an HTTP client of a server with one dataset of 50 samples."""
    with serve(hosted.samples["dict"], num_workers=2) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.fixture(scope="module")
def key(server: httpx.Client) -> str:
    """Return the key of a registered loader with 7 batches."""
    answer = server.post("/v1/loaders", json={"dataset": "dataset", "batch_size": 8})
    assert answer.status_code == 200, answer.text
    registered: str = answer.json()["key"]
    return registered


def _frames(answer: httpx.Response) -> list[codec.Frame]:
    return list(codec.read_all(codec.Bits(np.frombuffer(answer.content, np.uint8))))


def test_the_same_spec_has_the_same_key(server: httpx.Client, key: str) -> None:
    """The key is independent of repeated registrations, and of explicit or omitted defaults."""
    spec = {"dataset": "dataset", "batch_size": 8, "shuffle": False, "seed": 0, "rank": 0}
    answer = server.post("/v1/loaders", json=spec).json()
    assert answer["key"] == key
    assert (answer["batches"], answer["length"], answer["num_workers"], answer["protocol"]) == (7, 50, 2, 1)


def test_a_batch_is_one_msgpack_array(server: httpx.Client, key: str) -> None:
    """Any msgpack library reads a batch: prologue, header, and arrays in their memory layout."""
    answer = server.get(f"/v1/loaders/{key}/epochs/0/batches/2")
    assert answer.headers["content-type"] == FRAME_MEDIA_TYPE
    assert "immutable" in answer.headers["cache-control"]
    magic, size, checked, _, _, header, *payload = msgpack.unpackb(answer.content)
    assert (magic, size, checked) == ("TLF1", len(answer.content), True)
    assert (header["loader"], header["epoch"], header["batch"]) == (key, 0, 2)
    names = [name for name, _ in header["tree"]["dict"]]
    assert names == ["image", "label", "weight"]
    labels = np.frombuffer(payload[3], "<i8")
    assert labels.tolist() == list(range(16, 24))


def test_a_batch_that_the_client_has_is_not_sent_again(server: httpx.Client, key: str) -> None:
    """A request with If-None-Match and the batch's ETag gets status 304."""
    path = f"/v1/loaders/{key}/epochs/0/batches/1"
    etag = server.get(path).headers["etag"]
    again = server.get(path, headers={"If-None-Match": etag})
    assert (again.status_code, again.content) == (304, b"")


def test_a_range_is_all_its_frames_in_order(server: httpx.Client, key: str) -> None:
    """The response contains all frames in order, each as soon as it is ready."""
    answer = server.get(f"/v1/loaders/{key}/epochs/3/batches", params={"ranges": "1:7"})
    batch_ids = [frame.batch_id for frame in _frames(answer)]
    assert batch_ids == [codec.BatchId(key, 3, k) for k in range(1, 7)]


def test_a_range_of_what_is_ready_states_its_size(server: httpx.Client, key: str) -> None:
    """With ready=true the response has the first batches of the range, at least one, and a Content-Length."""
    answer = server.get(f"/v1/loaders/{key}/epochs/4/batches", params={"ranges": "0:7", "ready": True})
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert 1 <= len(_frames(answer)) <= 7


def test_several_ranges_are_one_response(server: httpx.Client, key: str) -> None:
    """One response contains all requested ranges in order, and batches between them are not computed."""

    def computed() -> int:
        found: int = server.get("/stats").json()["datasets"][0]["batches_computed"]
        return found

    before = computed()
    path, ranges, wanted = f"/v1/loaders/{key}/epochs/5/batches", "0:2,4:5,6:7", [0, 1, 4, 6]
    answer = server.get(path, params={"ranges": ranges})
    assert [frame.batch_id for frame in _frames(answer)] == [codec.BatchId(key, 5, k) for k in wanted]
    ready = server.get(path, params={"ranges": ranges, "ready": True})
    assert [frame.batch_id.batch for frame in _frames(ready)] == wanted
    assert computed() == before + 4


def test_a_registration_can_be_requested(server: httpx.Client, key: str) -> None:
    """The response equals that to the loader's registration."""
    registered = server.post("/v1/loaders", json={"dataset": "dataset", "batch_size": 8}).json()
    answer = server.get(f"/v1/loaders/{key}")
    assert (answer.status_code, answer.json()) == (200, registered)


BAD: list[tuple[str, str, Any, int, str, str]] = [
    ("POST", "/v1/loaders", {"dataset": "nope"}, 404, "UnknownDataset", "this server hosts 'dataset'"),
    ("POST", "/v1/loaders", {"dataset": "dataset", "batch_size": 0}, 422, "InvalidSpec", "batch_size must be"),
    ("POST", "/v1/loaders", {"dataset": "dataset", "batch_size": 10**9}, 422, "InvalidSpec", "1048576"),
    ("POST", "/v1/loaders", {"dataset": "dataset", "batch_size": True}, 422, "InvalidSpec", "got True"),
    ("POST", "/v1/loaders", {"dataset": "dataset", "seed": 2**64}, 422, "InvalidSpec", "seed must be"),
    ("POST", "/v1/loaders", {"dataset": "dataset", "rank": 1}, 422, "InvalidSpec", "rank must be"),
    ("POST", "/v1/loaders", {"dataset": "dataset", "tail": "cut"}, 422, "InvalidSpec", '"pad", "drop", "uneven"'),
    ("POST", "/v1/loaders", {"dataset": "dataset", "colour": 1}, 422, "InvalidSpec", "unknown field 'colour'"),
    ("POST", "/v1/loaders", {"dataset": "dataset", "fingerprint": "x"}, 409, "DatasetChanged", "requires x"),
    ("POST", "/v1/loaders", [], 422, "InvalidSpec", "must be a JSON object"),
    ("GET", "/v1/datasets/nope", None, 404, "UnknownDataset", "unknown dataset 'nope'"),
    ("GET", "/v1/datasets/..%2F..%2Fetc%2Fpasswd", None, 404, "NotFound", "/openapi.json lists"),
    ("GET", "/v1/loaders/{key}/epochs/0/batches/7", None, 404, "BatchOutOfRange", "has batches 0 to 6"),
    ("GET", "/v1/loaders/{key}/epochs/0/batches/-1", None, 422, "InvalidRequest", "path.k"),
    ("GET", "/v1/loaders/{key}/epochs/0/batches/x", None, 422, "InvalidRequest", "path.k"),
    ("GET", f"/v1/loaders/{{key}}/epochs/0/batches/{2**63}", None, 422, "InvalidRequest", "path.k"),
    ("GET", "/v1/loaders/{key}/epochs/0/batches?ranges=0:99", None, 404, "BatchOutOfRange", "0 to 6"),
    ("GET", "/v1/loaders/{key}/epochs/0/batches?ranges=3:3", None, 422, "InvalidSpec", "3 after 3"),
    ("GET", "/v1/loaders/{key}/epochs/0/batches", None, 422, "InvalidRequest", "query.ranges"),
    ("GET", f"/v1/loaders/{'0' * 32}/epochs/0/batches/0", None, 404, "UnknownLoader", "Register the loader with POST"),
    ("GET", f"/v1/loaders/{'0' * 32}", None, 404, "UnknownLoader", "Register the loader with POST"),
    ("GET", "/nothing/here", None, 404, "NotFound", "/openapi.json lists"),
    ("DELETE", "/stats", None, 405, "MethodNotAllowed", "DELETE not allowed for '/stats'"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "code", "words"), BAD)
def test_a_bad_request_gets_a_sentence(
    server: httpx.Client, key: str, method: str, path: str, body: Any, status: int, code: str, words: str
) -> None:
    """The response is problem+json with the reason, the value and what to do."""
    answer = server.request(method, path.format(key=key), json=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == status
    assert problem["code"] == code
    assert words in problem["detail"]


def test_a_body_that_is_too_large_is_refused(server: httpx.Client) -> None:
    """The status is 413, whether the body's size is declared or not."""
    for body in (b" " * (2**20 + 1), iter([b" " * 2**19] * 3)):
        answer = server.post("/v1/loaders", content=body)
        assert (answer.status_code, answer.json()["code"]) == (413, "BodyTooLarge")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 10_000, b" " * 100_000], ids=lambda body: body[:4])
def test_a_body_that_is_no_json_is_refused(server: httpx.Client, body: bytes) -> None:
    """Bodies that are empty, invalid, not UTF-8, nested or too large are rejected."""
    answer = server.post("/v1/loaders", content=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "InvalidSpec")


def test_another_protocol_version_is_refused(server: httpx.Client) -> None:
    """The status is 426, with both versions and what to do."""
    answer = server.post("/v1/loaders", json={"dataset": "dataset"}, headers={PROTOCOL_HEADER: "2"})
    assert (answer.status_code, answer.json()["code"]) == (426, "VersionMismatch")
    detail = answer.json()["detail"]
    assert "no common protocol version: the client supports 2, and this server supports 1. Update the server" in detail


def test_probes_and_stats(server: httpx.Client, key: str) -> None:
    """Probes report the server as alive and ready; /stats has records for server, datasets, workers and consumers."""
    health = server.get("/healthz").json()
    assert health == {"status": "ok", "instance": health["instance"]}
    server.get(f"/v1/loaders/{key}/epochs/0/batches/0", headers={"Teleloader-Consumer": "me"})
    assert server.get("/readyz").json() == {"status": "ready"}
    stats = server.get("/stats").json()
    assert stats["server"]["num_workers"] == len(stats["workers"]) == 2
    assert [dataset["dataset"] for dataset in stats["datasets"]] == ["dataset"]
    (mine,) = [consumer for consumer in stats["consumers"] if consumer["consumer"] == "me"]
    assert (mine["loader"], mine["position"], mine["batches_sent"]) == (key, 1, 1)
    assert 0 < stats["workers"][0]["pss"] <= stats["workers"][0]["rss"]


def test_the_api_describes_itself(server: httpx.Client) -> None:
    """The OpenAPI description has every path and the fields of a spec."""
    described = server.get("/openapi.json").json()
    assert "/v1/loaders/{key}/epochs/{epoch}/batches/{k}" in described["paths"]
    body = described["paths"]["/v1/loaders"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"dataset", "batch_size", "shuffle", "tail"} <= set(body["properties"])


def test_a_client_that_leaves_is_not_worked_for() -> None:
    """After a client disconnects, no further batches of its range are computed."""
    dataset = hosted.Samples(lambda i: np.zeros(2**20, np.uint8), 500)
    with serve(dataset, num_workers=2) as url, httpx.Client(base_url=url) as client:
        key = client.post("/v1/loaders", json={"dataset": "dataset"}).json()["key"]
        path = f"/v1/loaders/{key}/epochs/0/batches"
        with client.stream("GET", path, params={"ranges": "0:500"}) as answer:
            next(answer.iter_raw())
        before = -1
        while (computed := _computed(client)) != before or _busy(client):
            before = computed
        assert computed < 400
        client.get(path, params={"ranges": "0:1"}).raise_for_status()


def _computed(client: httpx.Client) -> int:
    return int(client.get("/stats").json()["datasets"][0]["batches_computed"])


def _busy(client: httpx.Client) -> bool:
    return any(worker["state"] == "busy" for worker in client.get("/stats").json()["workers"])


def test_a_failure_is_not_kept_by_caches() -> None:
    """A failure is not an immutable resource, because a later attempt may succeed."""
    with serve(hosted.failing(), num_workers=1) as url, httpx.Client(base_url=url) as client:
        key = client.post("/v1/loaders", json={"dataset": "dataset", "batch_size": 4}).json()["key"]
        failed = client.get(f"/v1/loaders/{key}/epochs/0/batches/4")
        assert failed.headers["cache-control"] == "no-store"
        assert "etag" not in failed.headers


SESSION = {"dataset": "dataset", "order": "client", "session": "mine", "num_workers": 2}


def test_the_workers_of_a_killed_client_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed client's session becomes idle; that of a client without requests does not."""
    monkeypatch.setattr(service, "SESSION_IDLE", 0.5)
    monkeypatch.setattr(service, "HOUSEKEEPING_INTERVAL", 0.05)
    lives = (
        "import sys, time, httpx\n"
        "client = httpx.Client(base_url=sys.argv[1])\n"
        f"key = client.post('/v1/loaders', json={SESSION!r}).json()['key']\n"
        "print(key, flush=True)\n"
        "while client.get('/v1/loaders/' + key).status_code == 200: time.sleep(0.1)\n"
    )
    with serve(hosted.samples["dict"], num_workers=1) as url, httpx.Client(base_url=url) as client:
        with subprocess.Popen([sys.executable, "-c", lives, url], stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            key = other.stdout.readline().strip()
            eventually(lambda: len(_own_workers(client, key)) == 2)
            workers = [psutil.Process(worker["pid"]) for worker in _own_workers(client, key)]
            time.sleep(2)
            assert len(_own_workers(client, key)) == 2, "its client is there"
            other.kill()
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive
        assert client.get(f"/v1/loaders/{key}").json()["code"] == "UnknownLoader"


def test_sessions_together_have_so_many_workers() -> None:
    """The total number of sessions' workers is limited; a session that ends makes room."""
    few = ClientLimits(max_session_workers=3)
    with serve(hosted.samples["dict"], num_workers=1, limits=few) as url, httpx.Client(base_url=url) as client:
        first = client.post("/v1/loaders", json=SESSION).raise_for_status().json()["key"]
        another = {**SESSION, "session": "another"}
        refused = client.post("/v1/loaders", json=another)
        assert (refused.status_code, refused.json()["code"]) == (503, "ServerUnavailable")
        assert "2 running, 2 requested" in refused.json()["detail"]
        assert refused.headers["retry-after"]
        assert client.post("/v1/loaders", json=SESSION).json()["key"] == first
        client.delete(f"/v1/loaders/{first}")
        client.post("/v1/loaders", json=another).raise_for_status()


def _own_workers(client: httpx.Client, key: str) -> list[dict[str, Any]]:
    return [worker for worker in client.get("/stats").json()["workers"] if worker["loader"] == key and worker["pid"]]
