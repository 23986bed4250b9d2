"""Priorities and accounting of tokens on a real server under load."""

from __future__ import annotations

import itertools
import re
import threading
from pathlib import Path

import httpx

from teleloader import DataLoader, RemoteDataset
from tests.conftest import ServerProcess, eventually
from tests.end_to_end.test_access import TokenTable

BATCHES = 400


class Use(threading.Thread):
    """Training loop with a token, which never pauses."""

    def __init__(self, url: str, token: str, seed: int) -> None:
        super().__init__(daemon=True)
        # each has an order of its own, so that no batch is shared
        loader = DataLoader(RemoteDataset(url, "unhurried", token=token), 4, shuffle=True, seed=seed)
        self._epochs = itertools.chain.from_iterable(loader for _ in itertools.count())
        self.batches = 0
        self._ends = threading.Event()

    def run(self) -> None:
        """Load batches until `end` is called."""
        while not self._ends.is_set():
            next(self._epochs)
            self.batches += 1

    def end(self) -> None:
        """End the loop."""
        self._ends.set()
        self.join(60)


def test_a_priority_divides_the_worker_time(tmp_path: Path) -> None:
    """A trainer gets most of it and a notebook the rest, each is accounted for, and unused time is not reserved."""
    table = TokenTable(tmp_path / "tokens.toml")
    table.add("trainer", priority='"high"')
    table.add("notebook", priority='"normal"')
    server = ServerProcess(
        "--port", "0", "tests.end_to_end.hosted:unhurried", "--num-workers", "1", "--tokens", table.write()
    )
    notebook = Use(server.url, table.secrets["notebook"], 1)
    notebook.start()
    eventually(lambda: notebook.batches > 50)  # alone, it gets all
    trainer = Use(server.url, table.secrets["trainer"], 2)
    trainer.start()
    eventually(lambda: trainer.batches > 20)
    before = notebook.batches, trainer.batches
    eventually(lambda: trainer.batches - before[1] >= BATCHES, timeout=100)
    received = notebook.batches - before[0]
    assert 0.3 < received / (BATCHES / 10) < 3
    for loop in (trainer, notebook):
        loop.end()

    headers = {"Authorization": f"Bearer {table.secrets['trainer']}"}
    used = {each["token"]: each for each in httpx.get(f"{server.url}/stats", headers=headers).json()["tokens"]}
    assert set(used) == {"trainer", "notebook"}
    for name, loop in (("trainer", trainer), ("notebook", notebook)):
        assert used[name]["batches_sent"] >= loop.batches
        assert used[name]["bytes_sent"] > 32 * loop.batches
        assert used[name]["worker_seconds"] > 0.004 * loop.batches
        assert 0 < used[name]["cpu_seconds"] < used[name]["worker_seconds"]
    text = httpx.get(f"{server.url}/metrics", headers=headers).text
    (seconds,) = re.findall(r'^teleloader_token_worker_seconds_total\{token="trainer"\} (\S+)$', text, re.MULTILINE)
    assert float(seconds) >= used["trainer"]["worker_seconds"]
    assert server.end() == 0
