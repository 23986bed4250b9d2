"""Ranks that exit while the loader, its connections and, in some cases, an iterator are referenced."""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from teleloader import DataLoader, RemoteDataset

url, way = sys.argv[1:]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
loader = DataLoader(RemoteDataset(url, "noisy"), mesh=mesh)
for number, _ in enumerate(loader):
    if way != "finished" and number == 2:
        break
iterator = iter(loader) if way == "open" else None
sys.stdout.write(f"{dist.get_rank()}\n")  # not print, which writes the line end separately
