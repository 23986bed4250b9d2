"""Position of a process in a device mesh: its data-parallel rank, and the ranks that receive the same batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

DATA_DIMS: Final = frozenset({
    "batch", "data", "data_parallel", "ddp", "dp", "dp_replicate", "dp_shard", "dp_shard_in_ep", "dp_shard_mod_ep",
    "fsdp", "hsdp", "replicate", "shard",
})  # fmt: skip
"""Names of dims whose ranks receive different batches."""
MODEL_DIMS: Final = frozenset({
    "context_parallel", "cp", "model", "model_parallel", "mp", "pipeline_parallel", "pp", "sequence_parallel", "sp",
    "tensor_parallel", "tp",
})  # fmt: skip
"""Names of dims whose ranks receive the same batches. Ranks of an expert-parallel dim may do either."""


class MeshPosition(NamedTuple):
    """Data-parallel rank of a process, and the ranks that have the same data-parallel rank."""

    rank: int
    """Data-parallel rank."""
    world_size: int
    """Number of data-parallel ranks."""
    members: tuple[int, ...]
    """Global ranks of the model-parallel group: the processes with this data-parallel rank. The first is the leader,
    which fetches the batches."""
    place: int
    """Index of the process in `members`."""


def locate(
    ranks: NDArray[np.int64], names: Sequence[str], coordinate: Sequence[int], data_dims: Sequence[str] | None = None
) -> MeshPosition:
    """Return the position of a process in a device mesh.

    Args:
        ranks: Global ranks, with one dimension for each mesh dim.
        names: Names of the mesh dims.
        coordinate: Coordinate of the process.
        data_dims: Names of the dims whose ranks receive different batches; None uses `DATA_DIMS`.

    Raises:
        ValueError: If the use of a dim is unknown, or `data_dims` contains a name that the mesh lacks.
    """
    is_data = [name in (DATA_DIMS if data_dims is None else data_dims) for name in names]
    if data_dims is None:
        unknown = [
            name
            for name, size, data in zip(names, ranks.shape, is_data, strict=True)
            if size > 1 and not data and name not in MODEL_DIMS
        ]
        if unknown:
            raise ValueError(
                f"unknown dims {_listed(unknown)} of the mesh with dims {_listed(names)}: pass data_dims= with the "
                "names of the dims whose ranks receive different batches"
            )
    elif missing := [name for name in data_dims if name not in names]:
        raise ValueError(f"data_dims contains {_listed(missing)}, but the dims of the mesh are {_listed(names)}")
    rank, world_size = _flat_index(ranks.shape, coordinate, is_data)
    place, _ = _flat_index(ranks.shape, coordinate, [not data for data in is_data])
    group = ranks[tuple(at if data else slice(None) for at, data in zip(coordinate, is_data, strict=True))]
    return MeshPosition(rank, world_size, tuple(map(int, group.reshape(-1))), place)


def locate_process(mesh: Any, data_dims: Sequence[str] | None) -> MeshPosition:
    """Return the position of this process in a ``torch.distributed.device_mesh.DeviceMesh``.

    Raises:
        TypeError: If `mesh` is not a DeviceMesh.
        ValueError: If the dims of the mesh have no names, the process is not in it, or `locate` raises.
    """
    try:
        names, coordinate, ranks = mesh.mesh_dim_names, mesh.get_coordinate(), mesh.mesh
    except AttributeError:
        raise TypeError(f"mesh must be a DeviceMesh, got {mesh!r:.80} ({type(mesh).__qualname__})") from None
    if names is None:
        raise ValueError(f"the dims of {mesh!r:.80} have no names: pass mesh_dim_names= to init_device_mesh")
    if coordinate is None:
        raise ValueError(f"this process is not in {mesh!r:.80}: create the loader only in processes of the mesh")
    return locate(np.array(ranks.tolist(), np.int64), names, coordinate, data_dims)


def _flat_index(shape: Sequence[int], coordinate: Sequence[int], chosen: Sequence[bool]) -> tuple[int, int]:
    """Return the row-major index of a coordinate in the chosen dims, and the number of such indices."""
    index, sizes = 0, []
    for size, at, is_chosen in zip(shape, coordinate, chosen, strict=True):
        if is_chosen:
            index = index * size + at
            sizes.append(size)
    return index, math.prod(sizes)


def _listed(names: Sequence[str]) -> str:
    return f"({', '.join(names)})"
