"""``teleloader-server check`` recognizes what does not work in a forked process."""

from __future__ import annotations

import _thread
import ctypes
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from teleloader_server.cli.fork_safety import ProcessState, dangers

PR_SET_NAME = 15


class Environment:
    """Stand-in of a type of a library."""


def test_nothing_has_changed() -> None:
    """A dataset that starts and holds nothing has no dangers."""
    assert dangers(ProcessState(), {"files": ["a", "b"]}) == []


def test_threads_of_python_and_of_native_libraries() -> None:
    """Threads are named; native ones only if they have a name of their own, unlike those of OpenMP.

    Threads that a dataset does not need in a forked process are not reported.
    """
    before, started, end = ProcessState(), threading.Barrier(6), threading.Event()

    def run(name: bytes | None) -> None:
        if name is not None:
            ctypes.CDLL(None).prctl(PR_SET_NAME, name)
        started.wait()
        end.wait()

    for python_name in ("reader", "tqdm_monitor"):
        threading.Thread(target=run, args=[b"python's"], name=python_name, daemon=True).start()
    for name in (b"tokio-runtime", b"jemalloc_bg_thd", None):
        _thread.start_new_thread(run, (name,))
    started.wait()
    try:
        assert dangers(before, None) == ["building the dataset starts threads: reader, tokio-runtime"]
    finally:
        end.set()


def test_imported_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that starts threads later is reported if the dataset imports it."""
    monkeypatch.delitem(sys.modules, "grpc", raising=False)
    before = ProcessState()
    monkeypatch.setitem(sys.modules, "grpc", SimpleNamespace())
    assert dangers(before, None) == ["building the dataset imports grpc"]
    assert dangers(ProcessState(), None) == []


@pytest.mark.parametrize(
    ("held", "path"), [(lambda one: one, ""), (lambda one: {"store": [one]}, "['store'][0]")]
)  # fmt: skip
def test_objects_of_libraries(monkeypatch: pytest.MonkeyPatch, held: Any, path: str) -> None:
    """An open lmdb environment is found in attributes and containers of the dataset."""
    monkeypatch.setitem(sys.modules, "lmdb", SimpleNamespace(Environment=Environment))
    assert dangers(ProcessState(), held(Environment())) == [f"dataset{path} is a lmdb.Environment"]
