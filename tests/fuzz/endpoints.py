"""A server under hostile requests must reject them and keep running, while another client receives correct batches.

There are two attackers: schemathesis, if it is installed, which uses the server's OpenAPI page; and raw sockets, which
send invalid HTTP, and invalid index lists in valid HTTP.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any, Final

import numpy as np

from teleloader import DataLoader, RemoteDataset
from teleloader_shared.spec import LoaderSpec
from tests.conftest import ROOT, ServerProcess
from tests.fuzz import frames
from tests.fuzz.hosted import BATCH_SIZE, LENGTH
from tests.fuzz.mutation import mutate_bytes
from tests.raw import Raw

PATIENCE: Final = 10.0
"""Seconds that a raw connection waits for a response."""
MOST_ANSWER: Final = 2**20
ALLOWED: Final = 503
"""The only 5xx status that is documented for a healthy server."""
UNSUPPORTED: Final = 505
"""Status for a request line with another HTTP version, which only raw bytes can contain."""
RAW_SHARE: Final = 10
"""Number of requested executions per raw connection, which is slower than an execution without a network."""


@dataclass(slots=True)
class Attack:
    """Outcome of an attack."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


def fuzz(executions: int, seed: int, seconds: int) -> int:
    """Run both attackers and print the outcome; return the number of broken rules."""
    server = ServerProcess("--port", "0", "rows=tests.fuzz.hosted:rows", "--num-workers", "2")
    try:
        with healthy_client(server.url) as client:
            found = attack_raw(server.url, max(1, executions // RAW_SHARE), seed)
            found += attack_documented(server.url, seed, seconds)
        found += client.findings + examine(server)
        print(f"  beside it, a client took {client.outcomes['batches']:,} batches, each as it should be")
    finally:
        server.end()
    print(f"  {len(found)} findings")
    for finding in found:
        print(f"\n  {finding}")
    return len(found)


def examine(server: ServerProcess) -> list[str]:
    """Return the problems of a server that was attacked."""
    if server.process.poll() is not None:
        return [f"the server has ended with exit status {server.process.returncode}:\n{''.join(server.log[-50:])}"]
    log = "".join(server.log)
    found = []
    if "Traceback" in log:
        at = log.index("Traceback")
        found.append(f"a traceback in the server's log:\n{log[max(0, at - 500) : at + 3000]}")
    if "\r" in log or any(ord(letter) < 32 and letter not in "\n\t" for letter in log):
        found.append("control characters in the server's log")
    return found


# -- a client beside it


@contextmanager
def healthy_client(url: str) -> Iterator[Attack]:
    """Run a client that loads epochs and compares each batch with the expected one."""
    taken, over = Attack(), Event()

    def run() -> None:
        loader = DataLoader(
            RemoteDataset(url, "rows"), batch_size=BATCH_SIZE, shuffle=True, seed=5, output="numpy"
        )  # fmt: skip
        while not over.is_set():
            registered(url)  # an attacker may have ended the session
            epoch = loader.state_dict()["epoch"]
            plan = loader.plan(epoch)
            batches = 0
            for batch, indices in zip(loader, plan, strict=True):
                if not np.array_equal(np.asarray(batch), np.repeat(np.asarray(indices)[:, None], 16, axis=1)):
                    taken.findings.append(f"a healthy client got a wrong batch in epoch {epoch}: {batch}")
                batches += 1
            taken.outcomes["batches"] += batches
            if batches != LENGTH // BATCH_SIZE:
                taken.findings.append(f"a healthy client got {batches} batches in epoch {epoch}")

    def watched() -> None:
        try:
            run()
        except Exception as error:  # noqa: BLE001 - whatever it is, it should not have happened
            taken.findings.append(f"a healthy client was disturbed: {error!r}")

    thread = Thread(target=watched)
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join()


# -- raw sockets


def attack_raw(url: str, connections: int, seed: int) -> list[str]:
    """Send garbage on a number of connections; return the findings."""
    attack, began = Attack(), time.perf_counter()
    keys = registered(url)
    for number in range(connections):
        random = Random(f"{seed}/raw/{number}")
        data = random.choice((_broken_request, _broken_request, _broken_body))(random, keys)
        for status in exchange(url, data):
            attack.outcomes[f"status {status}" if status else "closed without an answer"] += 1
            if status >= 500 and status not in (ALLOWED, UNSUPPORTED):
                attack.findings.append(f"status {status} for {data[:400]!r} (connection {number} of seed {seed})")
    took = time.perf_counter() - began
    print(f"endpoints, raw sockets: {connections:,} connections in {took:.1f} s, {connections / took:,.0f} a second")
    _print_outcomes(attack.outcomes)
    return attack.findings


def registered(url: str) -> list[str]:
    """Return the keys of a loader in seeded order and of one with a client-side sampler."""
    dataset = RemoteDataset(url, "rows")
    fingerprint = dataset.info.fingerprint
    plan = LoaderSpec(dataset="rows", batch_size=BATCH_SIZE, fingerprint=fingerprint)
    listed = LoaderSpec(dataset="rows", order="client", session="fuzz", fingerprint=fingerprint)
    for spec in (plan, listed):
        dataset.register(spec, 0)
    return [plan.key, listed.key]


def exchange(url: str, data: bytes) -> list[int]:
    """Send data, and read until the server is idle or closes; return the statuses, or [0] without any."""
    with Raw(url) as connection:
        connection.socket.settimeout(PATIENCE)
        connection.send(data)
        with suppress(OSError):
            connection.socket.shutdown(1)  # nothing more will come: the server need not wait
        got = bytearray()
        with suppress(OSError):
            while len(got) < MOST_ANSWER and (piece := connection.socket.recv(2**16)):
                got += piece
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", got)] or [0]


def _broken_request(random: Random, keys: list[str]) -> bytes:
    """Return an invalid HTTP request."""
    requests = _requests(keys)
    return mutate_bytes(random, random.choice(requests), requests)


def _broken_body(random: Random, keys: list[str]) -> bytes:
    """Return a valid HTTP request with an invalid index list."""
    body = frames.mutate_list(random, keys[-1])
    return _request("POST", f"/v1/loaders/{keys[-1]}/epochs/0/batches", body)


def _requests(keys: list[str]) -> list[bytes]:
    loader = f"/v1/loaders/{keys[0]}"
    spec = json.dumps(asdict(LoaderSpec(dataset="rows", batch_size=2))).encode()
    chunked = (
        b"POST /v1/loaders HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        b'5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n'
    )
    return [
        *(
            _request("GET", path)
            for path in ("/v1/datasets", "/v1/datasets/rows", "/stats", "/healthz", "/openapi.json")
        ),
        _request("GET", f"{loader}/epochs/0/batches/3"),
        _request("GET", f"{loader}/epochs/0/batches?ranges=0:2,3:4&ahead=2&ready=true"),
        _request("GET", f"{loader}/epochs/0/batches?ranges=0:4"),
        _request("POST", "/v1/loaders", spec, "Teleloader-Protocol: 1\r\nContent-Type: application/json\r\n"),
        _request("DELETE", loader),
        _request("GET", "/stats", headers="Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"),
        chunked,
        _request("GET", "/healthz") * 3,
        b"GET / HTTP/1.0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    ]


def _request(method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
    size = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}{size}\r\n".encode() + body


# -- schemathesis


def attack_documented(url: str, seed: int, seconds: int) -> list[str]:
    """Let schemathesis derive requests from the OpenAPI page; return the findings."""
    if importlib.util.find_spec("schemathesis") is None:
        print("endpoints, schemathesis: skipped, it is not installed (pip install --group fuzz)")
        return []
    with tempfile.TemporaryDirectory() as folder:
        config, report = Path(folder, "schemathesis.toml"), Path(folder, "report.json")
        config.write_text(f'[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", "{ALLOWED}"]\n')
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config), "run", f"{url}/openapi.json"),
            *("--checks", "not_a_server_error", "--max-time", str(seconds), "--max-examples", "1000"),
            *("--seed", str(seed), "--phases", "examples,coverage,fuzzing", "--request-timeout", str(PATIENCE)),
            *("--report", "json", "--report-json-path", str(report), "--generation-database", "none", "--no-color"),
            *("--exclude-path", "/stats/stream"),  # it has no end
            *("--exclude-path", "/v1/drain"),  # it ends the server
            *("--exclude-path", "/v1/workers"),  # it would start up to 1,024 processes
            *("--suppress-health-check", "all", "--continue-on-failure", "--warnings", "off"),
        ]
        keys = ",".join(registered(url))
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "SCHEMATHESIS_HOOKS": "tests.fuzz.hooks", "FUZZ_KEYS": keys
        }  # fmt: skip
        # schemathesis leaves files in its working folder
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if not report.exists():
            return [f"schemathesis ended with exit status {ran.returncode}:\n{ran.stdout[-3000:]}{ran.stderr[-3000:]}"]
        told: dict[str, Any] = json.loads(report.read_text())
    requests, took = told["test_cases"]["generated"], told["running_time"]
    print(f"endpoints, schemathesis: {requests:,} requests in {took:.1f} s, {requests / took:,.0f} a second")
    if not requests:
        return ["schemathesis made no request: give it more --seconds"]
    rates = [phase for phases in told["valid_rates"].values() for phase in phases.values()]
    _print_outcomes(sum((Counter(phase) for phase in rates), Counter[str]()))
    return [] if ran.returncode == 0 else [f"schemathesis found:\n{ran.stdout[-6000:]}"]


def _print_outcomes(outcomes: Counter[str]) -> None:
    for outcome, count in outcomes.most_common():
        print(f"  {count:>9,}  {outcome}")
