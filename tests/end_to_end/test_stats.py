"""/stats, its stream and /metrics: figures equal the real events, and requests are cheap."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as families
from prometheus_client.samples import Sample

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from teleloader_server.dispatch import counters
from teleloader_server.web.status import MAX_WATCHERS
from teleloader_shared.messages import CONSUMER_HEADER, PROBLEM_MEDIA_TYPE, REPORT_HEADER, batches_path, progress_path
from teleloader_shared.stats import ConsumerStats, DatasetStats, ServerStats, Stats
from tests.conftest import StartServer, eventually
from tests.raw import Raw


class Rows:
    """Dataset of 100,000 rows of 1,000 numbers; row 37 fails."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        if index == 37:
            raise LookupError("row 37 is damaged")
        return np.full(1000, index)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Run a server with rows and two workers; return its URL."""
    with serve({"rows": Rows(), "stream": iter_of_five}, num_workers=2) as address:
        yield address


class FromFive:
    """Iterable-style dataset that counts down from 5."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5, 0, -1))


def iter_of_five() -> FromFive:
    """Return the dataset: a factory for servers."""
    return FromFive()


def stats_of(url: str, **query: int) -> dict[str, Any]:
    """Return the current /stats."""
    found: dict[str, Any] = httpx.get(f"{url}/stats", params=query).raise_for_status().json()
    return found


def registered(url: str, **spec: Any) -> str:
    """Return the key of a new loader."""
    return str(httpx.post(f"{url}/v1/loaders", json={"dataset": "rows", **spec}).raise_for_status().json()["key"])


# -- the records


def test_every_field_is_reported(url: str) -> None:
    """The response has exactly the fields of the records."""
    iterator = iter(DataLoader(RemoteDataset(url, "rows"), 2, seed=0))
    next(iterator)
    found = stats_of(url)
    assert set(found) == {field.name for field in fields(Stats)}
    for kind, records in (
        (ServerStats, [found["server"]]), (DatasetStats, found["datasets"]), (ConsumerStats, found["consumers"]),
    ):  # fmt: skip
        assert records
        assert all(set(record) == {field.name for field in fields(kind)} for record in records)
    described = httpx.get(f"{url}/openapi.json").json()
    assert {"/stats", "/stats/stream", "/metrics"} <= set(described["paths"])
    assert set(described["components"]["schemas"]["Stats"]["properties"]) == set(found)


def test_totals_and_failures_are_reported() -> None:
    """Totals are exact; failed and slow batches have their indices."""
    with serve(Rows(), num_workers=2) as url:
        iterator = iter(DataLoader(RemoteDataset(url), 10, seed=0))
        for _ in range(3):
            next(iterator)
        with pytest.raises(LookupError, match="row 37 is damaged"):
            next(iterator)
        for _ in range(10):
            next(iterator)
        found = stats_of(url)
    (rows,) = found["datasets"]
    (error,) = rows["errors"]
    assert (error["type"], error["count"], error["last"]) == ("LookupError", 1, "row 37 is damaged")
    assert error["indices"] == list(range(30, 40))
    assert "raise LookupError" in error["traceback"]
    assert rows["batches_failed"] == 1
    assert (
        rows["stages"]["fetch"]["count"]
        == rows["batches_computed"]
        == sum(worker["batches"] for worker in found["workers"])
    )
    assert len(rows["slowest"]) == 5
    assert all(slow["indices"] == list(range(10 * slow["batch"], 10 * slow["batch"] + 10)) for slow in rows["slowest"])
    assert rows["slowest"][0]["seconds"] == pytest.approx(rows["stages"]["fetch"]["max"])
    server = found["server"]
    assert server["pid"] == os.getpid()
    assert server["cpus"] >= 1
    assert 0 < server["cpu"] < 2 * server["cpus"]
    assert server["connections"] >= 1
    assert server["batches_per_second"] > 0


def test_an_epoch_of_unknown_length_has_no_number_of_batches(url: str) -> None:
    """The number of batches is None."""
    iterator = iter(DataLoader(RemoteDataset(url, "stream"), 2))
    next(iterator)
    (mine,) = [consumer for consumer in stats_of(url)["consumers"] if consumer["dataset"] == "stream"]
    assert mine["batches"] is None
    assert mine["position"] >= 1
    del iterator


def test_a_busy_worker_says_what_it_does(start_server: StartServer, tmp_path: Path, monkeypatch: Any) -> None:
    """The worker shows task and duration, and counts as busy during a long batch."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    server = start_server("tests.end_to_end.hosted:slow", "--num-workers", "1", "--batch-timeout", "0")
    iterator = iter(DataLoader(RemoteDataset(server.url, "slow"), 2, seed=0))

    def doing() -> Any:
        (worker,) = server.stats()["workers"]
        return worker if worker["current_task"] and worker["busy_fraction"] > 0.5 else None

    worker = eventually(doing)
    assert worker["current_task"] == "batch 0 of epoch 0 of slow"
    assert worker["state"] == "busy"
    assert worker["current_task_seconds"] > 0
    assert worker["batches"] == 0
    gate.touch()
    assert len(list(iterator)) == 4
    (worker,) = server.stats()["workers"]
    assert (worker["current_task"], worker["current_task_seconds"]) == (None, None)


def test_a_killed_worker_is_reported(start_server: StartServer) -> None:
    """The statistics have the replacement's restart and the reason."""
    server = start_server("tests.end_to_end.hosted:many", "--num-workers", "2")
    os.kill(server.worker_pids()[0], signal.SIGKILL)
    eventually(lambda: server.stats()["workers"][0]["restarts"] == 1)
    stats = eventually(lambda: (found := server.stats())["workers"][0]["last_restart"] and found)
    assert "killed by signal SIGKILL" in stats["workers"][0]["last_exit"]
    assert stats["server"]["worker_restarts"] == 1


def test_a_report_that_is_none_is_ignored(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid and outdated reports do not reject their requests; valid ones are shown."""
    monkeypatch.setattr(counters, "OVERTAKEN", 60.0)
    key = registered(url)
    path = f"{url}{batches_path(key, 0)}/0"

    def record_after(report: str) -> dict[str, Any]:
        httpx.get(path, headers={CONSUMER_HEADER: "telling", REPORT_HEADER: report}).raise_for_status()
        (mine,) = [consumer for consumer in stats_of(url)["consumers"] if consumer["consumer"] == "telling"]
        return dict(mine)

    for wrong in ("", "nonsense", "x" * 10_000, "elapsed=nan"):
        assert record_after(wrong)["reconnects"] is None
    assert record_after("elapsed=1.000,waited=0.500,taken=3,reconnects=4,hedges=5")["data_wait_fraction"] is None
    told = record_after("elapsed=3.000,waited=1.500,taken=3,reconnects=6,hedges=7")
    assert (told["data_wait_fraction"], told["reconnects"], told["hedges"]) == (0.5, 6, 7)
    overtaken = record_after("elapsed=2.900,waited=0.000,taken=2,reconnects=5,hedges=6")
    assert (overtaken["data_wait_fraction"], overtaken["reconnects"], overtaken["hedges"]) == (0.5, 6, 7)


# -- progress


def of_run(url: str, run: str) -> dict[str, Any]:
    """Return the only consumer of a training run."""
    (mine,) = [consumer for consumer in stats_of(url)["consumers"] if consumer["run"] == run]
    return dict(mine)


def test_progress_and_rate_count_what_the_training_loop_consumed() -> None:
    """Prefetched batches count as sent, and as consumed only once the training loop has received them."""
    with serve(Rows(), num_workers=2) as url:
        loader = DataLoader(RemoteDataset(url), 10, seed=0, prefetch_factor=64, num_workers=1, name="slow")
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        found = eventually(lambda: (now := of_run(url, "slow"))["batches_sent"] > 50 and now["position"] == 3 and now)
        assert (found["batches"], found["finished"]) == (10_000, False)
        eventually(lambda: 0 < of_run(url, "slow")["batches_per_second"] < 3)
        del iterator


def test_a_finished_consumer_is_finished() -> None:
    """The consumption of the last, prefetched batches is reported without a request for batches, and so is the end."""
    with serve(list(range(40)), num_workers=1) as url:
        iterator = iter(DataLoader(RemoteDataset(url), 1, seed=0, prefetch_factor=64, num_workers=1, name="short"))
        next(iterator)
        eventually(lambda: of_run(url, "short")["batches_sent"] == 40)
        next(iterator)
        eventually(lambda: of_run(url, "short")["position"] == 2)
        assert not of_run(url, "short")["finished"]
        assert len(list(iterator)) == 38
        found = eventually(lambda: (now := of_run(url, "short"))["finished"] and now)
    assert (found["position"], found["batches"], found["batches_per_second"]) == (40, 40, 0.0)
    assert (found["diagnosis"]["bottleneck"], found["diagnosis"]["confidence"]) == ("finished", 1.0)


def test_a_process_that_exits_reports_the_end(start_server: StartServer, tmp_path: Path) -> None:
    """The name of the run is the script's file name by default."""
    server = start_server("tests.end_to_end.hosted:many", "--num-workers", "1")
    script = "from teleloader import DataLoader, RemoteDataset\nlist(DataLoader(RemoteDataset({!r}, 'many'), 100))"
    path = tmp_path / "train model.py"
    path.write_text(script.format(server.url))
    subprocess.run([sys.executable, str(path)], check=True, timeout=60)
    assert of_run(server.url, "train model.py")["finished"]


def test_progress_of_an_unknown_consumer_is_ignored(url: str) -> None:
    """The response is 204; an unknown loader and a missing report are errors."""
    key = registered(url)
    headers = {CONSUMER_HEADER: "nobody", REPORT_HEADER: "elapsed=1.0,waited=0.0,taken=1,reconnects=0,hedges=0"}
    assert httpx.put(f"{url}{progress_path(key, 0)}", headers=headers).status_code == 204
    assert httpx.put(f"{url}{progress_path('unknown', 0)}", headers=headers).status_code == 404
    assert httpx.put(f"{url}{progress_path(key, 0)}").status_code == 422
    assert "nobody" not in [consumer["consumer"] for consumer in stats_of(url)["consumers"]]


# -- many consumers


def test_a_thousand_consumers_fit_on_pages(url: str) -> None:
    """A page has the latest consumers in less than a megabyte; all pages together have each once."""
    key = registered(url, batch_size=1)
    with httpx.Client() as client:
        for number in range(1000):
            headers = {CONSUMER_HEADER: f"consumer {number}"}
            client.get(f"{url}{batches_path(key, 0)}/{number}", headers=headers).raise_for_status()
        response = client.get(f"{url}/stats")
        first = response.json()
        assert len(response.content) < 10**6
        assert [consumer["consumer"] for consumer in first["consumers"][:3]] == [
            "consumer 999", "consumer 998", "consumer 997",
        ]  # fmt: skip
        assert len(first["consumers"]) == 100
        assert first["consumers_total"] >= 1000
        found: list[str] = []
        while page := stats_of(url, limit=400, offset=len(found))["consumers"]:
            found += (consumer["consumer"] for consumer in page)
        assert len(found) == len(set(found)) == first["consumers_total"]
    assert httpx.get(f"{url}/stats", params={"limit": 1001}).status_code == 422
    assert httpx.get(f"{url}/stats", params={"offset": -1}).status_code == 422


# -- the stream


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the content of a stream's events."""
    lines = response.iter_lines()
    for line in lines:
        assert line == "event: stats"
        name, _, data = next(lines).partition(": ")
        assert (name, next(lines)) == ("data", "")
        yield json.loads(data)


def test_the_stream_sends_statistics_repeatedly(url: str) -> None:
    """The first event comes immediately, further ones after each interval."""
    with httpx.stream("GET", f"{url}/stats/stream", params={"interval": 0.5, "limit": 1}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        told = events(response)
        first, second, third = next(told), next(told), next(told)
    assert set(first) == set(stats_of(url))
    assert 0.9 < third["server"]["uptime"] - first["server"]["uptime"] < 5
    assert second["server"]["uptime"] > first["server"]["uptime"]


def test_streams_are_limited_and_end_with_their_clients(url: str) -> None:
    """Another stream is rejected with 503 until a client disconnects."""
    with ExitStack() as stack, httpx.Client() as client:
        for _ in range(MAX_WATCHERS):
            stack.enter_context(client.stream("GET", f"{url}/stats/stream"))
        refused = httpx.get(f"{url}/stats/stream")
        assert (refused.status_code, refused.json()["code"]) == (503, "ServerUnavailable")
    with httpx.Client() as client:

        def has_room() -> bool:
            with client.stream("GET", f"{url}/stats/stream") as response:
                return response.status_code == 200

        eventually(has_room)


def test_a_stopping_server_ends_its_streams(start_server: StartServer) -> None:
    """Streams end properly and immediately, without the time limit for responses."""
    server = start_server("tests.end_to_end.hosted:many", "--num-workers", "1", "--shutdown-grace", "60")
    with httpx.stream("GET", f"{server.url}/stats/stream", params={"interval": 60}) as response:
        told = events(response)
        next(told)
        began = time.monotonic()
        server.process.terminate()
        assert list(told) == []
    assert server.end() == 0
    assert time.monotonic() - began < 20


def test_intervals_have_limits(url: str) -> None:
    """Intervals range from half a second to a minute."""
    for interval in ("0.4", "61", "nan", "often"):
        assert httpx.get(f"{url}/stats/stream", params={"interval": interval}).status_code == 422


def test_a_watcher_that_does_not_read_does_not_delay_other_requests(url: str) -> None:
    """The server also keeps the watcher's connection open."""
    with Raw(url, buffer=4096) as watcher:
        watcher.send_get("/stats/stream?interval=0.5")
        eventually(lambda: stats_of(url)["server"]["connections"] >= 2)
        started = time.monotonic()
        for _ in range(20):
            stats_of(url)
        assert time.monotonic() - started < 10
        assert watcher.is_open()


# -- metrics


def scraped(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return all samples by name and labels."""
    text = httpx.get(f"{url}/metrics").raise_for_status().text
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples(text)}


def samples(text: str) -> Iterator[Sample]:
    """Return all samples of a scrape."""
    for family in families(text):
        yield from family.samples


def test_metrics_are_what_stats_says(url: str) -> None:
    """Totals and histogram counts equal those of /stats."""
    key = registered(url, batch_size=2)
    httpx.get(f"{url}{batches_path(key, 0)}/100").raise_for_status()
    found = scraped(url)
    stats = stats_of(url)
    for dataset in stats["datasets"]:
        label = (("dataset", dataset["dataset"]),)
        assert found["teleloader_batches_computed_total", label] == dataset["batches_computed"]
        assert found["teleloader_batches_sent_total", label] == dataset["batches_sent"]
        assert found["teleloader_samples_computed_total", label] == dataset["samples_computed"]
        stage = (*label, ("stage", "fetch"))
        assert found["teleloader_stage_seconds_count", stage] == dataset["stages"]["fetch"]["count"]
        assert found["teleloader_stage_seconds_sum", stage] == pytest.approx(
            dataset["stages"]["fetch"]["mean"] * dataset["stages"]["fetch"]["count"]
        )
    assert found["teleloader_memory_budget_bytes", ()] == stats["server"]["memory_budget"]
    held = sum(value for (name, _), value in found.items() if name == "teleloader_consumers")
    assert held == min(1000, stats["consumers_total"])


def test_counters_never_fall(start_server: StartServer) -> None:
    """Counters do not decrease when a worker is killed, a session ends or a consumer disconnects."""
    server = start_server("tests.end_to_end.hosted:many", "tests.end_to_end.hosted:stream", "--num-workers", "2")

    def happen(number: int) -> None:
        match number:
            case 0:
                list(DataLoader(RemoteDataset(server.url, "stream"), 2, num_workers=2))
            case 1:
                os.kill(server.worker_pids()[0], signal.SIGKILL)
                eventually(lambda: server.stats()["workers"][0]["restarts"])
            case 2:
                iterator = iter(DataLoader(RemoteDataset(server.url, "many"), 10, seed=0))
                next(iterator)

    before = scraped(server.url)
    for number in range(3):
        happen(number)
        now = scraped(server.url)
        for (name, labels), value in before.items():
            if name.endswith(("_total", "_count", "_sum", "_bucket")):
                assert now[name, labels] >= value, (name, labels)
        before = now
    assert before["teleloader_worker_restarts_total", (("worker", "0"),)] == 1


UNITS = ("_seconds", "_bytes", "_info")
NOT_BASE_UNITS = re.compile(
    r"_(ms|us|milliseconds|microseconds|minutes|hours|kb|mb|kib|mib|kilobytes|megabytes|percent)\b"
)


def lint(text: str) -> list[str]:
    """Return the errors that ``promtool check metrics`` would find, according to Prometheus' naming conventions."""
    found = []
    for family in families(text):
        name = family.name
        checks = {
            "no help text": not family.documentation,
            "a counter without _total": family.type == "counter"
            and not all(sample.name.endswith("_total") for sample in family.samples),
            "_total on what is no counter": family.type != "counter" and name.endswith("_total"),
            "no base unit": bool(NOT_BASE_UNITS.search(name)),
            "capitals": name != name.lower(),
            "its type in the name": bool(re.search(r"_(counter|gauge|histogram|summary)\b", name)),
            "_count, _sum or _bucket in the name": name.endswith(("_count", "_sum", "_bucket")),
            "a label le or quantile": family.type != "histogram"
            and any({"le", "quantile"} & set(sample.labels) for sample in family.samples),
            "a label in capitals": any(label != label.lower() for sample in family.samples for label in sample.labels),
            "another prefix": not name.startswith(("teleloader_", "process_")),
        }
        found += [f"{name}: {what}" for what, wrong in checks.items() if wrong]
    return found


def test_metrics_keep_to_the_conventions(url: str) -> None:
    """Metrics follow promtool's rules; both formats are readable, with the right content types."""
    httpx.get(f"{url}/metrics")  # requests have metrics once the first one has ended
    response = httpx.get(f"{url}/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert lint(response.text) == []
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    other = httpx.get(f"{url}/metrics", headers=accept)
    assert other.headers["content-type"].startswith("application/openmetrics-text")
    read: Any = openmetrics.text_string_to_metric_families
    told = {sample.name for family in read(other.text) for sample in family.samples}
    assert told == {sample.name for sample in samples(response.text)}


def test_promtool_finds_nothing_wrong(url: str) -> None:
    """The rules above replicate promtool's, which is used if it is installed."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool")
    text = httpx.get(f"{url}/metrics").text
    checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_each_metric_says_what_it_is(url: str) -> None:
    """Each metric has a type, and a help text that is a sentence."""
    for family in families(httpx.get(f"{url}/metrics").text):
        assert family.type in ("counter", "gauge", "histogram"), family
        assert family.documentation.endswith("."), family
        assert family.documentation[0].isupper(), family


def test_the_lint_finds_what_is_wrong() -> None:
    """The check detects errors."""
    wrong = "# TYPE teleloader_waited_ms gauge\nteleloader_waited_ms 1\n# TYPE jobs_total gauge\njobs_total 1\n"
    assert len(lint(wrong)) >= 4


def test_the_number_of_series_does_not_grow_with_consumers(url: str) -> None:
    """Consumers are not a label, because each epoch's iterator is a new one."""
    key = registered(url, batch_size=3)

    def take(count: int) -> int:
        for number in range(count):
            headers = {CONSUMER_HEADER: f"one of many {number}"}
            httpx.get(f"{url}{batches_path(key, 0)}/0", headers=headers).raise_for_status()
        return len(scraped(url))

    assert take(1) == take(50)


def test_the_number_of_series_is_bounded(url: str) -> None:
    """Labels are datasets, shared workers, stages, buckets and kinds of errors, and no others."""
    allowed = {
        "dataset", "worker", "stage", "le", "type", "bottleneck", "state", "version", "process", "handler", "code",
        "reason", "token",
    }  # fmt: skip
    for family in families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            assert set(sample.labels) <= allowed, sample
    series = Counter(name for name, _ in scraped(url))
    assert max(series.values()) <= 3 * 2 * 60, series.most_common(3)


def test_requests_and_refusals_are_counted() -> None:
    """Responses are counted by handler and status code, refusals by their code, and durations per handler."""
    with serve(Rows(), num_workers=1) as url:
        key = registered(url, dataset="dataset")
        httpx.get(f"{url}{batches_path(key, 0)}/0").raise_for_status()
        assert httpx.get(f"{url}{batches_path('unknown', 0)}/0").status_code == 404
        with Raw(url) as client:
            client.send(b"nonsense\r\n\r\n")
            client.receive_all()
        found = scraped(url)
    batches = ("handler", "batches")
    assert found["teleloader_http_responses_total", (("code", "200"), batches)] == 1
    assert found["teleloader_http_responses_total", (("code", "404"), batches)] == 1
    assert found["teleloader_http_request_duration_seconds_count", (batches,)] == 2
    assert 0 < found["teleloader_http_request_duration_seconds_sum", (batches,)] < 60
    assert found["teleloader_refusals_total", (("reason", "UnknownLoader"),)] == 1
    assert found["teleloader_refusals_total", (("reason", "BadRequest"),)] == 1
    assert found["teleloader_connections_closed_total", (("reason", "400 BadRequest"),)] == 1


def test_the_server_process_has_the_standard_metrics(url: str) -> None:
    """CPU time is a counter, and the start of the process a timestamp."""
    registered(url)
    found = scraped(url)
    assert found["process_cpu_seconds_total", ()] > 0
    assert found["process_resident_memory_bytes", ()] > 2**20
    assert found["process_start_time_seconds", ()] < time.time()
    assert found["teleloader_cpu_seconds_total", (("process", "server"),)] > 0
    workers = found["teleloader_cpu_seconds_total", (("process", "workers"),)]
    key = registered(url, batch_size=1000)
    httpx.get(f"{url}{batches_path(key, 0)}?ranges=1:40").raise_for_status()
    assert eventually(lambda: scraped(url)["teleloader_cpu_seconds_total", (("process", "workers"),)] > workers)


def test_faults_of_clients_are_counted_once(url: str) -> None:
    """A report has totals of the loader: only what was added since the previous report counts."""
    key = registered(url, batch_size=7)

    def report(second: int, reconnects: int, hedges: int) -> None:
        text = f"elapsed={second}.0,waited=0.0,taken={second},reconnects={reconnects},hedges={hedges}"
        headers = {CONSUMER_HEADER: "failing#0", REPORT_HEADER: text}
        httpx.get(f"{url}{batches_path(key, 0)}/0", headers=headers).raise_for_status()

    def counted() -> list[float]:
        found = scraped(url)
        return [found[f"teleloader_client_{name}_total", (("dataset", "rows"),)] for name in ("reconnects", "hedges")]

    before = counted()
    for second, (reconnects, hedges) in enumerate([(2, 5), (3, 5), (3, 7)], 1):
        report(second, reconnects, hedges)
    assert [after - earlier for after, earlier in zip(counted(), before, strict=True)] == [1, 2]


# -- cost


def test_concurrent_requests_share_a_measurement_of_memory(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes at most 1 % of the time, because the kernel is slow: requests share results."""
    from teleloader_server.workers import procfs

    measured = []
    real: Callable[..., Any] = procfs.memory

    def slow(pids: Any) -> Any:
        measured.append(pids)
        time.sleep(0.2)
        return real(pids)

    monkeypatch.setattr(procfs, "memory", slow)
    key = registered(url, batch_size=5)
    httpx.get(f"{url}{batches_path(key, 0)}/0").raise_for_status()
    # a measurement of an earlier test that took 0.3 s postpones this one by 30 s
    eventually(lambda: stats_of(url) and measured, 90)
    before, started = len(measured), time.monotonic()
    for _ in range(20):
        stats_of(url)
    elapsed = time.monotonic() - started  # on a busy machine it may well be due again
    assert len(measured) <= before + 1 + elapsed * 0.01 / 0.2


# -- errors in OpenAPI


def test_each_endpoint_says_what_its_errors_look_like(url: str) -> None:
    """All errors have one documented form."""
    described = httpx.get(f"{url}/openapi.json").json()
    operations = [operation for path in described["paths"].values() for operation in path.values()]
    documented = [
        operation["responses"]["default"]["content"][PROBLEM_MEDIA_TYPE]["schema"] for operation in operations
    ]
    assert len(documented) > 10
    assert not any("422" in operation["responses"] for operation in operations)
    wrong = httpx.get(f"{url}/stats", params={"limit": -1})
    assert wrong.headers["content-type"] == PROBLEM_MEDIA_TYPE
    assert set(wrong.json()) == set(documented[0]["required"]) == set(documented[0]["properties"])
