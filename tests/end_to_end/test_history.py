"""`GET /stats/history` of real servers."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from tests.conftest import StartServer, eventually
from tests.end_to_end import hosted
from tests.end_to_end.training import training


def history(url: str, **query: Any) -> dict[str, Any]:
    """Return the history of a server."""
    response = httpx.get(f"{url}/stats/history", params=query)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def values(found: dict[str, Any], name: str) -> list[float]:
    """Return the known values of a series with one value per second."""
    return [value for value in found["series"][name]["mean"] if value is not None]


def test_the_history_of_server_dataset_and_run_is_recorded() -> None:
    """The sums of one-second rates equal the totals, and the run is found by its name."""
    with (
        serve(hosted.Samples(int, 1_000_000), num_workers=1) as url,
        training(RemoteDataset(url), step=0.01, batch_size=10, seed=0),
    ):
        eventually(lambda: any(change["bottleneck"] for change in history(url)["diagnoses"]), 60)
        found = history(url)
        assert found["marks"][0]["kind"] == "start"
        assert f"{found['pid']}" in found["marks"][0]["text"]
        assert found["datasets"] == ["dataset"]
        (loop,) = found["consumers"]
        assert (loop["dataset"], loop["token"]) == ("dataset", "anyone")
        assert loop["run"] == httpx.get(f"{url}/stats").json()["consumers"][0]["run"]
        for query in ({"dataset": "dataset"}, {"consumer": loop["id"]}, {}):
            assert max(values(history(url, **query), "batches_per_second")) > 10
        recorded = history(url, dataset="dataset")
        sent = httpx.get(f"{url}/stats").json()["datasets"][0]["batches_sent"]
        assert 0 < sum(values(recorded, "batches_per_second")) <= 1.1 * sent
        assert all(0 <= value <= 1 for value in values(history(url), "workers_busy"))
        assert max(values(history(url), "consumers")) == 1


def test_the_history_continues_where_a_client_stopped_reading() -> None:
    """A client requests the seconds after those that it has; later responses contain the same values."""
    with serve(hosted.Samples(int, 100), num_workers=1) as url:
        eventually(lambda: history(url)["now"] >= 3)
        first = history(url)
        length = len(first["series"]["consumers"]["mean"])
        assert (first["since"], first["step"], length) == (0, 1, first["now"])
        eventually(lambda: history(url)["now"] > first["now"] + 1)
        rest = history(url, since=first["now"])
        assert rest["since"] == first["now"]
        assert history(url, until=first["now"])["series"]["event_loop_lag"] == first["series"]["event_loop_lag"]
        (wide,) = history(url, since=1, until=3, step=2)["series"]["event_loop_lag"]["max"]
        assert wide == max(first["series"]["event_loop_lag"]["mean"][1:3])


def test_exits_and_errors_are_events(start_server: StartServer) -> None:
    """A killed worker is an event with its reason, a failed batch with its exception."""
    server = start_server("tests.end_to_end.hosted:failing", "--num-workers", "1")
    with pytest.raises(ValueError, match="damaged"):
        list(DataLoader(RemoteDataset(server.url), batch_size=4, output="numpy"))
    os.kill(server.worker_pids()[0], signal.SIGKILL)

    def marks() -> dict[str, str]:
        return {mark["kind"]: mark["text"] for mark in history(server.url)["marks"]}

    eventually(lambda: {"start", "error", "restart"} <= marks().keys())
    assert "ValueError in dataset failing: sample 17 is damaged" in marks()["error"]
    assert "killed by signal SIGKILL" in marks()["restart"]


def test_unknown_series_and_invalid_queries_are_rejected() -> None:
    """The error states which series are kept."""
    with serve(hosted.Samples(int, 100), num_workers=0) as url:
        for name in ("dataset", "consumer"):
            response = httpx.get(f"{url}/stats/history", params={name: "other"})
            assert response.status_code == 404
            assert "the server keeps the history of recently active ones" in response.json()["detail"]
        for query in ("since=-1", "step=0", "until=x"):
            assert httpx.get(f"{url}/stats/history?{query}").status_code == 422


def test_the_announced_advice_is_for_the_demand(start_server: StartServer) -> None:
    """The advice in announcements has the number of workers that meets the demand, as that of /stats."""
    registry = start_server("tests.end_to_end.hosted:numbers", "--num-workers", "1")
    other = start_server(
        "tests.end_to_end.hosted:unhurried", "--num-workers", "1", "--announce", f"registry+{registry.url}"
    )

    def advice() -> str:
        servers = httpx.get(f"{registry.url}/stats/servers").json()["servers"]
        summaries = [server["summary"] or {} for server in servers if server["url"] == other.url]
        return "".join(summary.get("advice", "") for summary in summaries)

    with training(RemoteDataset(other.url), step=0.01, batch_size=40, seed=0):
        eventually(lambda: "fetch" in advice(), 60)
        (consumer,) = httpx.get(f"{other.url}/stats").json()["consumers"]
        assert "would keep up" in consumer["diagnosis"]["advice"]
        assert "would keep up" in advice()


def test_a_registry_has_the_figures_of_announced_servers(start_server: StartServer) -> None:
    """Figures come with the heartbeats; after a crash, the registry states for how long the server has been gone."""
    registry = start_server("tests.end_to_end.hosted:numbers", "--num-workers", "1")
    other = start_server(
        "tests.end_to_end.hosted:numbers", "--num-workers", "1", "--announce", f"registry+{registry.url}"
    )

    def found() -> dict[str, Any]:
        servers = httpx.get(f"{registry.url}/stats/servers").json()["servers"]
        return next((server for server in servers if server["url"] == other.url), {})

    eventually(lambda: found().get("summary"))
    assert found()["summary"]["workers"] == 1
    assert found()["lost_for"] is None
    os.kill(other.pid, signal.SIGKILL)
    eventually(lambda: found()["lost_for"])
    assert found()["summary"] is None
