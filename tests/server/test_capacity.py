"""Capacity of a loader that a server states to its clients."""

from __future__ import annotations

import pytest

from teleloader_server.dispatch.records import MAX_CAPACITIES, Loader
from teleloader_shared.rendezvous import Capacity
from teleloader_shared.spec import LoaderSpec


def loader(batch_seconds: float | None) -> Loader:
    """Return a loader whose batches take so long."""
    return Loader("key", LoaderSpec(dataset="data"), 100, 100, batch_seconds=batch_seconds)


def test_all_clients_of_an_epoch_receive_the_same_capacity() -> None:
    """The capacity of an epoch is that at the first registration, also if its rate was unknown then."""
    measured = loader(None)
    assert measured.capacity_of(0, 4) == Capacity(4, None)
    measured.batch_seconds = 0.1
    assert measured.capacity_of(1, 4) == Capacity(4, 40.0)
    measured.batch_seconds = 0.2
    assert measured.capacity_of(0, 8) == Capacity(4, None)
    assert measured.capacity_of(1, 8) == Capacity(4, 40.0)
    assert measured.capacity_of(2, 8) == Capacity(8, 40.0)


def test_a_server_without_workers_states_the_rate_of_its_own_process() -> None:
    """A server with 0 workers states the rate of its own process."""
    assert loader(0.1).capacity_of(0, 0).batch_rate == pytest.approx(10)


def test_the_capacities_of_the_last_epochs_are_kept() -> None:
    """A loader keeps the capacities of the last `MAX_CAPACITIES` epochs only."""
    measured = loader(0.1)
    for epoch in range(10 * MAX_CAPACITIES):
        measured.capacity_of(epoch, 1)
    assert len(measured.capacities) == MAX_CAPACITIES
