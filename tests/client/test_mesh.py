"""Position of a process in a device mesh, and arguments of loaders with a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader import DataLoader, RemoteDataset
from teleloader.mesh import DATA_DIMS, MODEL_DIMS, MeshPosition, locate
from teleloader.testing import FakeServer
from tests.conftest import examples

NAMES = sorted(DATA_DIMS | MODEL_DIMS)


class Mesh:
    """Attributes of torch's DeviceMesh."""

    def __init__(self, shape: Sequence[int], names: Sequence[str] | None, coordinate: Sequence[int] | None) -> None:
        self.mesh = np.arange(np.prod(shape)).reshape(shape)
        self.mesh_dim_names = names
        self._coordinate = coordinate

    def get_coordinate(self) -> Sequence[int] | None:
        """Return the coordinate of this process."""
        return self._coordinate


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Any, list[str]]:
    """Return the ranks of a mesh in any order, and the names of its dims."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True))
    shape = draw(st.lists(st.integers(1, 4), min_size=len(names), max_size=len(names)))
    ranks = np.array(draw(st.permutations(range(int(np.prod(shape))))), np.int64)
    return ranks.reshape(shape), names


@settings(max_examples=examples(200))
@given(meshes())
def test_groups_partition_the_mesh(mesh: tuple[Any, list[str]]) -> None:
    """Each process is in one group, at its place; a group has one data rank, and each data rank has one group."""
    ranks, names = mesh
    positions = {int(ranks[at]): locate(ranks, names, at) for at in np.ndindex(ranks.shape)}
    groups: dict[int, tuple[int, ...]] = {}
    for rank, position in positions.items():
        assert position.members[position.place] == rank
        assert groups.setdefault(position.rank, position.members) == position.members
    assert sorted(groups) == list(range(next(iter(positions.values())).world_size))
    assert sorted(rank for members in groups.values() for rank in members) == list(range(ranks.size))


@settings(max_examples=examples(200))
@given(meshes(), st.data())
def test_ranks_differ_exactly_in_data_dims(mesh: tuple[Any, list[str]], data: st.DataObject) -> None:
    """Two processes have the same data rank if and only if their coordinates in the data dims are equal."""
    ranks, names = mesh
    coordinates = list(np.ndindex(ranks.shape))
    first, second = data.draw(st.sampled_from(coordinates)), data.draw(st.sampled_from(coordinates))
    is_same = all(a == b for a, b, name in zip(first, second, names, strict=True) if name in DATA_DIMS)
    assert (locate(ranks, names, first).rank == locate(ranks, names, second).rank) == is_same


@settings(max_examples=examples(200))
@given(meshes(), st.data())
def test_named_data_dims(mesh: tuple[Any, list[str]], data: st.DataObject) -> None:
    """With ``data_dims``, names have no other meaning: renaming the dims changes nothing."""
    ranks, names = mesh
    coordinate = data.draw(st.sampled_from(list(np.ndindex(ranks.shape))))
    chosen = data.draw(st.sets(st.sampled_from(names)))
    renamed = {name: "dp" * (name in chosen) + str(number) for number, name in enumerate(names)}
    found = locate(ranks, names, coordinate, tuple(chosen))
    assert found == locate(ranks, list(renamed.values()), coordinate, tuple(renamed[name] for name in chosen))
    assert found.world_size == int(np.prod([ranks.shape[names.index(name)] for name in chosen]))


def test_the_dims_of_torchtitan() -> None:
    """Replicated and sharded data ranks count together, in the order of the dims."""
    ranks = np.arange(32).reshape(2, 2, 2, 2, 2)
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert locate(ranks, names, (1, 1, 0, 1, 0)) == MeshPosition(2, 4, (8, 9, 10, 11, 24, 25, 26, 27), 6)


def test_an_unknown_dim() -> None:
    """A dim whose use is unknown is an error that names it, unless it has one rank."""
    ranks = np.arange(4).reshape(2, 2)
    with pytest.raises(ValueError, match=r"unknown dims \(ep\) of the mesh with dims \(dp, ep\): pass data_dims="):
        locate(ranks, ("dp", "ep"), (0, 0))
    assert locate(ranks.reshape(4, 1), ("dp", "ep"), (3, 0)) == MeshPosition(3, 4, (3,), 0)
    assert locate(ranks, ("dp", "ep"), (1, 0), ("dp", "ep")) == MeshPosition(2, 4, (2,), 0)
    assert locate(ranks, ("dp", "ep"), (1, 0), ("dp",)) == MeshPosition(1, 2, (2, 3), 0)
    with pytest.raises(ValueError, match=r"data_dims contains \(data\), but the dims of the mesh are \(dp, ep\)"):
        locate(ranks, ("dp", "ep"), (1, 0), ("data", "ep"))


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"rank": 0, "world_size": 2}, ValueError, "mesh option is mutually exclusive with rank and world_size"),
        (
            {"sampler": [1, 0]},
            ValueError,
            "mesh option is mutually exclusive with sampler",
        ),
        ({"mesh": 3}, TypeError, r"mesh must be a DeviceMesh, got 3 \(int\)"),
        ({"mesh": Mesh((2,), None, (0,))}, ValueError, "have no names: pass mesh_dim_names= to init_device_mesh"),
        ({"mesh": Mesh((2,), ("dp",), None)}, ValueError, "this process is not in "),
        ({"mesh": None, "data_dims": ("dp",)}, ValueError, r"data_dims=\('dp',\) requires mesh="),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    """Arguments that the mesh determines are errors, and so are meshes without names."""
    with FakeServer({"train": list(range(10))}) as server, pytest.raises(kind, match=text):
        DataLoader(RemoteDataset(server.url), **{"mesh": Mesh((2,), ("dp",), (0,)), **arguments})


def test_a_dataset_of_this_process() -> None:
    """Batches that the calling thread loads cannot be broadcast."""
    with pytest.raises(ValueError, match="mesh requires batches from a server"):
        DataLoader(list(range(10)), mesh=Mesh((2,), ("dp",), (0,)))


def test_data_ranks_alone() -> None:
    """A mesh with data dims alone has the batches of ``rank`` and ``world_size``, and no process group."""
    with FakeServer({"train": list(range(12))}) as server:
        dataset = RemoteDataset(server.url)
        for rank in range(4):
            mesh = Mesh((2, 2), ("dp_replicate", "dp_shard"), divmod(rank, 2))
            of_mesh = DataLoader(dataset, 3, mesh=mesh, shuffle=True)
            assert (of_mesh.spec.rank, of_mesh.spec.world_size) == (rank, 4)
            by_rank = DataLoader(dataset, 3, rank=rank, world_size=4, shuffle=True)
            assert [batch.tolist() for batch in of_mesh] == [batch.tolist() for batch in by_rank]
