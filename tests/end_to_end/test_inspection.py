"""Errors with their previews, slow samples, stacks of workers, and traces, with real processes."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner

from teleloader import DataLoader, RemoteDataset
from teleloader.cli.commands import teleloader
from teleloader_server import serve
from teleloader_server.loading.stages import STAGES
from teleloader_shared import codec
from teleloader_shared.codec import Failure, Frame
from teleloader_shared.messages import CONSUMER_HEADER
from tests.client.trace_rules import problems
from tests.conftest import StartServer, eventually
from tests.end_to_end import inspected
from tests.end_to_end.test_access import TokenTable

HOSTED = "tests.end_to_end.inspected:"


def get(url: str, path: str, **options: Any) -> Any:
    """Return the JSON of a successful response."""
    return httpx.get(f"{url}{path}", trust_env=False, timeout=30, **options).raise_for_status().json()


def opened(url: str, preview: dict[str, Any]) -> Frame:
    """Load the batch of a preview, as the page does."""
    spec = {**preview["spec"], **({"session": "preview"} if preview["is_private"] else {})}
    with httpx.Client(base_url=url, trust_env=False, timeout=30, headers={CONSUMER_HEADER: "look"}) as client:
        key = client.post("/v1/loaders", json=spec).raise_for_status().json()["key"]
        path = f"/v1/loaders/{key}/epochs/{preview['epoch']}/batches"
        if preview["indices"] is None:
            content = client.get(f"{path}/{preview['batch']}").raise_for_status().content
        else:
            indices: Any = preview["indices"]
            listed = indices[0] if spec.get("batch_size", 1) is None else indices
            frame = codec.to_bytes(codec.BatchId(key, preview["epoch"], preview["batch"]), listed, name="indices")
            content = client.post(path, content=frame).raise_for_status().content
        if preview["is_private"]:
            client.delete(f"/v1/loaders/{key}")
    return codec.read(codec.Bits(np.frombuffer(content, np.uint8)))


LOADERS: dict[str, dict[str, Any]] = {
    "shuffled with a seed": {"batch_size": 8, "shuffle": True, "seed": 5},
    "rank 1 of 2": {"batch_size": 4, "shuffle": True, "seed": 9, "rank": 1, "world_size": 2},
    "sequential": {"batch_size": 8},
    "shuffled without a seed": {"batch_size": 8, "shuffle": True},
    "batch sampler": {"batch_sampler": [[1, 2, 3], [20, 7, 4, 1], [5]]},
    "single samples": {"batch_size": None},
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_preview_of_an_error_is_exactly_its_batch(name: str) -> None:
    """The preview fails at the same sample of a batch with the same indices; that of the sample has only this one."""
    with serve(inspected.Damaged(), num_workers=2) as url:
        found: list[dict[str, Any]] = []
        for epoch in range(3, 40):  # a rank does not load sample 7 in each epoch
            loader = DataLoader(RemoteDataset(url), name="run-1", **LOADERS[name])
            loader.set_epoch(epoch)
            with suppress(ValueError):
                for _ in loader:
                    pass
            found = get(url, "/v1/errors")["errors"]
            if found:
                break
        (error,) = found
        assert (error["epoch"], error["sample"], error["handling"]) == (epoch, 7, "raised")
        assert error["traceback"].rstrip().endswith("ValueError: sample 7 is damaged")
        assert error["run"] == "run-1"
        batch, sample = (opened(url, error[f"{what}_preview"]).content for what in ("batch", "sample"))
        assert isinstance(batch, Failure)
        assert isinstance(sample, Failure)
        assert (batch.sample, batch.indices) == (7, error["indices"])
        assert (sample.sample, sample.indices) == (7, [7])
        assert get(url, "/v1/errors")["total"] == 1, "a preview does not repeat the error that it shows"


@pytest.mark.parametrize(("on_error", "handling"), [("skip", "skipped"), ("replace", "replaced")])
def test_handled_errors_are_listed(on_error: Any, handling: str) -> None:
    """A sample that was skipped or replaced is listed once, with what was done."""
    with serve(inspected.Damaged(), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), batch_size=8, on_error=on_error, max_errors=1.0)
        for _ in range(2):
            for _ in loader:
                pass
        listed = get(url, "/v1/errors")["errors"]
        found = {(error["sample"], error["handling"], error["type"]) for error in listed}
        assert found == {(7, handling, "ValueError")}
        assert all((error["replacement"] is None) == (handling == "skipped") for error in listed)


def test_the_command_lists_errors_and_opens_their_batches() -> None:
    """`teleloader errors` lists the error; `peek --error` loads its batch, or only its sample."""
    with serve(inspected.Damaged(), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), batch_sampler=[[1, 2], [3, 7, 5]])
        with suppress(ValueError):
            for _ in loader:
                pass
        (error,) = json.loads(run("errors", url, "-o", "json").stdout)
        assert (error["server"], error["sample"], error["batch"]) == (url, 7, 1)
        shown = run("errors", url, "--traceback").stdout
        assert "ValueError: sample 7 is damaged" in shown
        assert "Traceback (most recent call last)" in shown
        peeked = run("peek", url, "--error", "1", code=1).stdout
        assert "with the indices [3, 7, 5]" in peeked
        assert "with the indices [7]" in run("peek", url, "--error", "1", "--sample", code=1).stdout
        assert "unknown error 2" in run("peek", url, "--error", "2", code=2).stderr


def run(*args: str, code: int = 0) -> Any:
    """Run a command of teleloader, and restore the log level that it changes."""
    logger = logging.getLogger("teleloader")
    level = logger.level
    found = CliRunner().invoke(teleloader, args)
    logger.setLevel(level)
    assert found.exit_code == code, (found.output, found.exception)
    return found


def test_slow_samples_are_listed() -> None:
    """The sample is listed with its time, the median, how often, and the batch that contained it."""
    with serve(inspected.Slow(), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), batch_size=8, shuffle=True, seed=1)
        for epoch in range(2):
            loader.set_epoch(epoch)
            for _ in loader:
                pass
        (slow,) = get(url, "/v1/slow-samples")["samples"]
        assert (slow["index"], slow["times"], slow["epoch"]) == (inspected.SLOW, 2, 1)
        assert slow["seconds"] >= 0.3 > slow["typical"]
        batch = opened(url, slow["batch_preview"]).content
        assert inspected.SLOW in np.asarray(batch)[:, 0]
        assert opened(url, slow["sample_preview"]).content.tolist() == [[inspected.SLOW] * 4]
        assert str(inspected.SLOW) in run("errors", url, "--slow").stdout


# -- workers


@contextmanager
def loading(url: str) -> Iterator[None]:
    """Load batches in a thread, which may hang."""
    loader = DataLoader(RemoteDataset(url), batch_size=2, seed=1)

    def load() -> None:
        with suppress(Exception):
            for _ in loader:
                pass

    threading.Thread(target=load, daemon=True).start()
    yield


def stack_of(url: str, **options: Any) -> str:
    """Return the stack of worker 0; an empty string before the server has started the worker."""
    response = httpx.get(f"{url}/v1/workers/0/stack", trust_env=False, timeout=30, **options)
    return "" if response.status_code == 404 else str(response.raise_for_status().json()["stack"])


@pytest.mark.parametrize("how", ["sleep", "read", "c"])
def test_the_stack_of_a_worker_that_hangs_names_the_function(how: str) -> None:
    """In Python, in a blocked read, and in C code that holds the GIL; the worker survives repeated requests."""
    with serve(inspected.Stuck(how), num_workers=1) as url, loading(url):
        eventually(lambda: f"hang_in_{how}" in stack_of(url))
        eventually(lambda: "__getitem__" in stack_of(url))
        detail = get(url, "/v1/workers/0")
        for _ in range(5):
            eventually(lambda: f"hang_in_{how}" in stack_of(url))
        later = get(url, "/v1/workers/0")
        assert (later["pid"], later["restarts"]) == (detail["pid"], 0)
        assert (detail["task"]["batch"], detail["state"]) == (0, "busy")
        assert f"hang_in_{how}" in run("workers", url, "--stack", "0").stdout


def test_no_request_for_a_stack_ends_a_starting_worker(start_server: StartServer) -> None:
    """Requests from the fork on, before the worker has registered the signal, whose default action ends a process."""
    server = start_server(f"{HOSTED}Damaged", "--num-workers", "2", "--max-batches-per-worker", "1")
    stop = threading.Event()
    stacks: set[str] = set()

    def request() -> None:
        while not stop.is_set():
            for worker in (0, 1):
                stacks.add(get(server.url, f"/v1/workers/{worker}/stack")["stack"].splitlines()[0][:40])

    threads = [threading.Thread(target=request) for _ in range(3)]
    for thread in threads:
        thread.start()
    loader = DataLoader(RemoteDataset(server.url), batch_size=2, on_error="skip", max_errors=1.0, seed=0)
    assert sum(1 for _ in loader) == 32
    stop.set()
    for thread in threads:
        thread.join()
    workers = server.stats()["workers"]
    assert sum(worker["recycled"] for worker in workers) >= 25, "each worker was replaced after one batch"
    assert [worker["restarts"] for worker in workers] == [0, 0], stacks


@pytest.mark.parametrize("dataset", ["own_signal_in_init", "own_signal_in_getitem", "default_signal"])
def test_a_dataset_may_use_the_signal_itself(start_server: StartServer, dataset: str) -> None:
    """Its handler is neither replaced nor called, the worker survives, and the response says why it has no stack."""
    server = start_server(f"{HOSTED}{dataset}", "--num-workers", "1")
    loader = DataLoader(RemoteDataset(server.url), batch_size=2, seed=0)
    for _ in range(2):
        batches = list(loader)
        stack = stack_of(server.url)
        if dataset != "default_signal":
            assert stack.startswith("(the dataset handles signal")
            assert all(int(batch.sum()) == 0 for batch in batches)
    assert server.stats()["workers"][0]["restarts"] == 0


def test_the_stack_requires_admin(start_server: StartServer, tmp_path: Path) -> None:
    """Tokens with the scopes stats or read get 403, and learn nothing of the stack; admin gets it."""
    table = TokenTable(tmp_path / "tokens.toml")
    tokens = {scope: table.add(scope, scope) for scope in ("stats", "read", "admin")}
    server = start_server(f"{HOSTED}Damaged", "--num-workers", "1", "--tokens", table.write())
    for scope, status in (("stats", 403), ("read", 403), ("admin", 200)):
        headers = {"Authorization": f"Bearer {tokens[scope]}"}
        answer = httpx.get(f"{server.url}/v1/workers/0/stack", headers=headers, trust_env=False, timeout=30)
        assert answer.status_code == status
        assert ("File" in answer.text) == (status == 200)


def test_a_server_without_workers_has_the_stack_of_its_thread() -> None:
    """With `num_workers=0`, the stack is that of the loading thread."""
    with serve(inspected.Stuck("sleep"), num_workers=0) as url, loading(url):
        assert eventually(lambda: "hang_in_sleep" in stack_of(url))


def test_a_worker_has_its_last_batches_and_its_memory() -> None:
    """The details have the last 20 batches, newest first; the memory is measured every five seconds."""
    with serve(inspected.Slow(), num_workers=1) as url:
        for _ in DataLoader(RemoteDataset(url), batch_size=8, seed=0):
            pass
        found = get(url, "/v1/workers/0")
        numbers = [each["number"] for each in found["recent"]]
        assert numbers == list(range(49, 29, -1))
        assert found["recent"][0]["ready_at"] >= found["recent"][1]["ready_at"]
        history = eventually(lambda: get(url, "/v1/workers/0")["history"])
        assert history[0]["pid"] == found["pid"] != os.getpid()
        assert history[0]["rss"] > 2**20
        assert found["stages"] == [stage.name for stage in STAGES]
        assert {len(each["stages"]) for each in found["recent"]} == {len(STAGES)}
        assert httpx.get(f"{url}/v1/workers/3", trust_env=False).status_code == 404


# -- timeline and trace


def test_a_trace_has_all_stages_of_every_batch(tmp_path: Path) -> None:
    """For each batch of a training loop: queue, stages, result, send, receive, decode, wait and step, in this order."""
    file = tmp_path / "trace.json"
    with serve(inspected.Damaged(), num_workers=2) as url:
        loads, done = threading.Event(), threading.Event()

        def train() -> None:
            for epoch in count():
                loader = DataLoader(RemoteDataset(url), batch_size=4, on_error="skip", max_errors=1.0, seed=0)
                loader.set_epoch(epoch)
                for _ in loader:
                    loads.set()
                    done.wait(0.005)
                if done.is_set():
                    return

        thread = threading.Thread(target=train)
        thread.start()
        try:
            assert loads.wait(60)
            run("trace", url, "--seconds", "3", "-f", str(file))
        finally:
            done.set()
            thread.join()
    trace = json.loads(file.read_text())
    assert problems(trace) == []
    uncertainty = max(client["clock_uncertainty_s"] for client in trace["otherData"]["clients"])
    parts: defaultdict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for number, batch, name, end in completed(trace):
        parts[number, batch].setdefault(name, end)
    order = ["queue", "fetch", "collate", "encode", "result", "send", "receive", "decode", "wait", "step"]
    complete = [found for found in parts.values() if set(order) <= set(found)]
    assert len(complete) >= 16, "at least one epoch is completely recorded"
    for found in complete:
        ends = [found[name] for name in order[:-1]]
        assert all(a <= b + 1e6 * uncertainty + 1 for a, b in pairwise(ends)), found


def completed(trace: dict[str, Any]) -> Iterator[tuple[int, int, str, float]]:
    """Yield epoch, batch, name and end in microseconds of each part of a batch."""
    events = trace["traceEvents"]
    started: dict[int, dict[str, Any]] = {}
    epochs = {
        (event["args"]["batch"], round(event["ts"])): event["args"]["epoch"]
        for event in events
        if event["ph"] == "X" and event["name"].startswith("batch ")
    }
    starts = sorted((at, batch, epoch) for (batch, at), epoch in epochs.items())

    def epoch_of(batch: int, at: float) -> int:
        known = [epoch for start, number, epoch in starts if number == batch and start <= at + 1]
        return known[-1] if known else -1

    for event in events:
        args = event.get("args", {})
        if event["ph"] == "b":
            started[event["id"]] = event
        elif event["ph"] == "e":
            begun = started[event["id"]]
            if "epoch" in begun["args"]:
                yield begun["args"]["epoch"], begun["args"]["batch"], event["name"], event["ts"]
        elif event["ph"] == "X":
            end = event["ts"] + event["dur"]
            for batch in args.get("batches", [args["batch"]] if "batch" in args else []):
                yield args.get("epoch", epoch_of(batch, end)), batch, event["name"], end


def test_clients_report_nothing_unless_requested() -> None:
    """Without a request for the timeline, no client sends its part; after one, clients do."""
    with serve(inspected.Damaged(), num_workers=1) as url:

        def train() -> None:
            for _ in DataLoader(RemoteDataset(url), batch_size=4, on_error="skip", max_errors=1.0, seed=0):
                pass

        train()
        assert get(url, "/v1/timeline")["clients"] == []
        get(url, "/v1/timeline?clients=true")
        train()
        (client,) = get(url, "/v1/timeline")["clients"]
        assert [step["batch"] for step in client["steps"]] == list(range(client["steps"][0]["batch"], 16))
        assert abs(client["offset"]) <= client["uncertainty"], "both have the same clock"
