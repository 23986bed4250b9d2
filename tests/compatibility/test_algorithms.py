"""Versions of algorithms in specs and saved states: equal ones continue, others are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from teleloader import DataLoader, RemoteDataset, StateMismatch, VersionMismatch
from teleloader_server import serve
from teleloader_shared.algorithms import ALGORITHMS, Change
from teleloader_shared.errors import InvalidSpec
from teleloader_shared.spec import LoaderSpec

SPEC = LoaderSpec(dataset="dataset", batch_size=4, shuffle=True, seed=7)
NUMBERS = list(range(20))
Raise = Callable[[str], None]


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> Raise:
    """Return a function that raises the version of an algorithm, as a later release would."""

    def change(name: str) -> None:
        later = (*ALGORITHMS[name], Change("0.2.0", "another mixing function"))
        monkeypatch.setitem(ALGORITHMS, name, later)

    return change


def loader_of(url: str, **options: Any) -> DataLoader:
    """Create a loader of numbers in a seeded order."""
    return DataLoader(RemoteDataset(url), output="numpy", **{"batch_size": 4, "shuffle": True, "seed": 7, **options})


def test_first_versions_are_omitted() -> None:
    """Specs and their keys contain only versions above 1, so most specs contain none."""
    assert "algorithms" not in SPEC.to_json()
    assert LoaderSpec.from_json({**SPEC.to_json(), "algorithms": {}}) == SPEC
    assert LoaderSpec.from_json({**SPEC.to_json(), "algorithms": {"permutation": 1}}) == SPEC


def test_a_later_version_is_part_of_spec_and_key(raised: Raise) -> None:
    """A changed algorithm changes the keys of the specs that use it, and of no others."""
    sequential = LoaderSpec(dataset="dataset", batch_size=4)
    before = SPEC.key, sequential.key
    raised("permutation")
    assert SPEC.to_json()["algorithms"] == {"permutation": 2}
    assert (SPEC.key != before[0], sequential.key == before[1]) == (True, True)
    assert LoaderSpec.from_json(SPEC.to_json()) == SPEC


@pytest.mark.parametrize(
    "given",
    [
        None,
        5,
        [],
        {"permutation": "1"},
        {"permutation": 0},
        {"permutation": True},
        {"x" * 99: 1},
    ],
)
def test_invalid_versions_are_refused(given: Any) -> None:
    """The error has the field and the value."""
    with pytest.raises(InvalidSpec, match="algorithms must be an object of names and versions"):
        LoaderSpec.from_json({**SPEC.to_json(), "algorithms": given})


@pytest.mark.parametrize("given", [{"permutation": 2}, {"sorting": 1}])
def test_a_server_refuses_later_versions_and_unknown_algorithms(given: dict[str, int]) -> None:
    """The response has status 426, names the algorithm, and says that the server must be updated."""
    with serve(NUMBERS, num_workers=0) as url:
        response = httpx.post(f"{url}/v1/loaders", json={**SPEC.to_json(), "algorithms": given})
    problem = response.json()
    assert (response.status_code, problem["code"]) == (426, "VersionMismatch")
    assert next(iter(given)) in problem["detail"]
    assert problem["detail"].endswith("Update the server")


def test_a_server_refuses_the_version_before(raised: Raise) -> None:
    """A client of an earlier release gets the change, its release, and the side to update, instead of other batches."""
    fields = SPEC.to_json()
    raised("permutation")
    with pytest.raises(VersionMismatch, match=r"changed in release 0.2.0: another mixing function.*Update the client"):
        LoaderSpec.from_json(fields)
    LoaderSpec.from_json({"dataset": "dataset"})


def test_a_state_of_the_version_before_is_refused(raised: Raise) -> None:
    """The error says what changed in which release, and what to do; loaders without the algorithm continue."""
    with serve(NUMBERS, num_workers=0) as url:
        shuffled, sequential = loader_of(url).state_dict(), loader_of(url, shuffle=False).state_dict()
        assert "algorithms" not in shuffled
        raised("permutation")
        with pytest.raises(StateMismatch) as caught:
            loader_of(url).load_state_dict(shuffled)
        assert str(caught.value) == (
            "the state was saved with version 1 of algorithm 'permutation', but this release has version 2, changed in "
            "release 0.2.0: another mixing function: batches would be different. Continue the run with a release "
            "before 0.2.0, or start a new run"
        )
        loader_of(url, shuffle=False).load_state_dict(sequential)
        loader_of(url).load_state_dict(loader_of(url).state_dict())
        assert len(list(loader_of(url))) == 5


@pytest.mark.parametrize("given", [{"permutation": 2}, {"sorting": 1}])
def test_a_state_of_a_later_version_is_refused(given: dict[str, int]) -> None:
    """A release never continues a state with an algorithm that it does not have."""
    with serve(NUMBERS, num_workers=0) as url:
        state = {**loader_of(url).state_dict(), "algorithms": given}
        with pytest.raises(StateMismatch, match="Install the release that saved the state, or a later one"):
            loader_of(url).load_state_dict(state)
        with pytest.raises(StateMismatch, match="invalid state: algorithms"):
            loader_of(url).load_state_dict({**state, "algorithms": 3})
