"""A training process: loads epochs, appends each batch to its history, and saves its state after each step.

``python -m tests.chaos.consumer ORDERS``, where ORDERS is a JSON object with the fields of `Orders`. After SIGKILL, a
process with the same orders resumes from the saved state.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teleloader import DataLoader
from teleloader.api.control import MAX_PATIENCE, PATIENCE_FACTOR
from tests.chaos.dataset import digest
from tests.chaos.roles import ROLES


@dataclass(frozen=True)
class Orders:
    """Settings of a consumer."""

    role: int
    urls: list[str]
    seed: int
    epochs: int | None
    """Number of epochs; None continues until the stop file exists."""
    history: str
    state: str
    stop: str
    """Path of the stop file: once it exists, the consumer finishes its epoch and starts no other one."""
    reconnect_timeout: float
    stall_timeout: float


class Consumer:
    """Training loop of a consumer."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._role = ROLES[orders.role]
        self._history = os.open(orders.history, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._state = Path(orders.state)

    def run(self) -> None:
        """Load epochs until the configured number or until the stop file exists."""
        orders = self._orders
        before = _open_now()
        loader = self._role.loader(orders.urls, orders.seed, orders.reconnect_timeout, orders.stall_timeout)
        epoch, k = self._resume(loader)
        self._write("begin", epoch, k)
        while epoch != orders.epochs and (k or not Path(orders.stop).exists()):
            self._load(loader, epoch, k)
            self._write("end", epoch)
            epoch, k = epoch + 1, 0
        del loader
        gc.collect()
        # a thread that waits for the response to a control request ends after it, or after the timeout
        deadline = time.monotonic() + PATIENCE_FACTOR * MAX_PATIENCE * orders.stall_timeout
        while _open_now() != before and time.monotonic() < deadline:
            time.sleep(0.1)
        self._write("left", *(now - then for now, then in zip(_open_now(), before, strict=True)))

    def _resume(self, loader: DataLoader) -> tuple[int, int]:
        if not self._state.exists():
            return 0, 0
        saved = json.loads(self._state.read_text())
        loader.load_state_dict(saved["loader"])
        return saved["epoch"], saved["k"]

    def _load(self, loader: DataLoader, epoch: int, k: int) -> None:
        loader.set_epoch(epoch)
        expected = self._role.expected(self._orders.seed, epoch)
        asked = time.monotonic()
        for number, batch in enumerate(loader, k):
            crc = digest(batch)
            self._write("batch", epoch, number, crc, f"{time.monotonic() - asked:.3f}")
            if crc not in expected:
                self._give_evidence(epoch, number, crc, batch)
            self._role.train()
            self._save(loader, epoch, number + 1)
            asked = time.monotonic()

    def _give_evidence(self, epoch: int, k: int, crc: int, batch: dict[str, Any]) -> None:
        """Describe a wrong batch on stderr; the outcome of the run depends only on the history."""
        time.sleep(1)
        moved = "" if digest(batch) == crc else ", and they change while they are looked at"
        difference = self._role.difference(self._orders.seed, epoch, k, batch)
        print(f"wrong bytes in batch {k} of epoch {epoch}{moved}: {difference}", file=sys.stderr, flush=True)

    def _save(self, loader: DataLoader, epoch: int, k: int) -> None:
        state: dict[str, Any] = loader.state_dict()
        if state["epoch"] != epoch:
            epoch, k = state["epoch"], 0
        beside = self._state.with_suffix(".new")
        beside.write_text(json.dumps({"epoch": epoch, "k": k, "loader": state}))
        beside.replace(self._state)
        self._write("saved", epoch, k)

    def _write(self, *words: object) -> None:
        os.write(self._history, f"{' '.join(map(str, words))}\n".encode())


def _open_now() -> tuple[int, int]:
    """Return the numbers of open descriptors and threads."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def main() -> None:
    """Run with the orders of the command line."""
    faulthandler.register(signal.SIGUSR1)
    Consumer(Orders(**json.loads(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
