"""Peers: other ways to load batches from another process, each configured as its documentation advises.

Their batches are NumPy arrays, or torch tensors with WebDataset, without a copy on the client.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Final

from benchmarks.measuring import Contender
from benchmarks.peers.flight import Flight
from benchmarks.peers.grain import Grain
from benchmarks.peers.ray_data import RayData
from benchmarks.peers.tf_data import TfData
from benchmarks.peers.webdataset import WebDataset
from benchmarks.workloads import Workload

PEERS: Final[dict[str, type[Flight] | type[TfData] | type[RayData] | type[Grain] | type[WebDataset]]] = {
    "flight": Flight,
    "tf_data": TfData,
    "ray_data": RayData,
    "grain": Grain,
    "webdataset": WebDataset,
}


def missing(name: str) -> list[str]:
    """Return the modules that a peer needs and that are not installed."""
    return [module for module in PEERS[name].requires if importlib.util.find_spec(module) is None]


def taking_part(names: Sequence[str], workload: Workload) -> list[Contender]:
    """Return the contenders for a workload, without the peers that cannot run it."""
    return [PEERS[name](workload) for name in names if workload.name in PEERS[name].workloads]
