"""Prepared orders: one process computes the numbers of batches per window, and its forks read them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from teleloader_server.loading import preparations
from teleloader_server.loading.preparations import Preparations
from teleloader_server.workers.forkserver import fork
from teleloader_shared.balance import BalanceSpec
from teleloader_shared.lengths import Lengths
from teleloader_shared.orders.plan import prepare
from teleloader_shared.packing import PackingSpec
from teleloader_shared.spec import LoaderSpec

LENGTHS = Lengths(np.random.default_rng(0).integers(1, 100, 2000), 2000)
SPEC = LoaderSpec(
    dataset="text", shuffle=True, seed=7, balance=BalanceSpec(LENGTHS.digest, 64, group=4, max_tokens=500)
)


def expected(epoch: int) -> Any:
    """Return the preparation of an epoch."""
    return prepare(SPEC, LENGTHS, epoch)


def in_fork(run: Callable[[], bool]) -> bool:
    """Return the result of a function in a forked process."""
    _, status = os.waitpid(fork(lambda: int(not run())), 0)
    return status == 0


@pytest.fixture
def shared() -> Iterator[Preparations]:
    """Return an empty file of preparations."""
    with closing(Preparations()) as found:
        yield found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the epochs that this process has prepared."""
    epochs: list[int] = []

    def counting(spec: LoaderSpec, lengths: Lengths, epoch: int) -> Any:
        epochs.append(epoch)
        return prepare(spec, lengths, epoch)

    monkeypatch.setattr(preparations, "prepare", counting)
    return epochs


def test_a_preparation_of_another_process_is_read(shared: Preparations, counted: list[int]) -> None:
    """The first process that needs an epoch computes it, and later ones do not."""
    assert in_fork(lambda: bool((shared.of(SPEC, LENGTHS, 0) == expected(0)).all()))
    assert in_fork(lambda: bool((shared.of(SPEC, LENGTHS, 1) == expected(1)).all()))
    assert shared.of(SPEC, LENGTHS, 0).tolist() == expected(0).tolist()
    assert shared.of(SPEC, LENGTHS, 1).tolist() == expected(1).tolist()
    assert counted == []
    assert shared.of(SPEC, LENGTHS, 2).tolist() == expected(2).tolist()
    assert counted == [2]


def test_a_process_that_dies_while_it_prepares_leaves_the_lock(
    shared: Preparations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process then prepares the epoch itself."""

    def die() -> bool:
        monkeypatch.setattr(preparations, "prepare", lambda *_: os._exit(1))
        shared.of(SPEC, LENGTHS, 0)
        return True

    assert not in_fork(die)
    assert shared.of(SPEC, LENGTHS, 0).tolist() == expected(0).tolist()


def test_a_process_that_dies_while_it_writes_leaves_a_valid_file(
    shared: Preparations, monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    """The incomplete preparation is removed, wherever it ends; those before it are kept."""
    shared.of(SPEC, LENGTHS, 0)

    def die_after(nbytes: int) -> Callable[[], bool]:
        def run() -> bool:
            write = os.pwrite

            def die(file: int, data: bytes, place: int) -> None:
                write(file, data[:nbytes], place)
                os._exit(1)

            monkeypatch.setattr(os, "pwrite", die)
            shared.of(SPEC, LENGTHS, 1)
            return True

        return run

    for nbytes in (0, 1, 16, 24, 25, 100):
        assert not in_fork(die_after(nbytes))
        for epoch in (0, 2):
            assert shared.of(SPEC, LENGTHS, epoch).tolist() == expected(epoch).tolist()
    assert counted == [0, 2]


def test_a_full_file_is_replaced(shared: Preparations, monkeypatch: pytest.MonkeyPatch, counted: list[int]) -> None:
    """The file never exceeds its limit, and the last preparation is kept."""
    size = 40 + 8 * len(expected(0))
    monkeypatch.setattr(preparations, "MAX_BYTES", 2 * size)
    for epoch in (0, 1, 2, 2, 0):
        assert shared.of(SPEC, LENGTHS, epoch).tolist() == expected(epoch).tolist()
    assert counted == [0, 1, 2, 0]


def test_exhausted_memory_does_not_fail_batches(
    shared: Preparations, monkeypatch: pytest.MonkeyPatch, counted: list[int]
) -> None:
    """Each process then prepares the epoch itself."""

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    for _ in range(2):
        assert shared.of(SPEC, LENGTHS, 0).tolist() == expected(0).tolist()
    assert counted == [0, 0]


def test_packed_sequences_are_prepared_once(shared: Preparations, counted: list[int]) -> None:
    """Their preparation is that of the loader's packing, and not of another one."""
    for length in (100, 200, 100):
        spec = LoaderSpec(dataset="text", packing=PackingSpec(LENGTHS.digest, length, 64))
        assert shared.of(spec, LENGTHS, 0).tolist() == prepare(spec, LENGTHS, 0).tolist()
    assert counted == [0, 0]


def test_orders_without_a_limit_of_tokens_have_no_preparation() -> None:
    """Their numbers of batches follow from the number of samples."""
    assert preparations.starts_of(LoaderSpec(dataset="text"), LENGTHS, 0) is None
    assert preparations.starts_of(SPEC, None, 0) is None
