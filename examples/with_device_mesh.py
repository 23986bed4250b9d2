"""Training with data and tensor parallelism on CPUs: two data-parallel ranks of two tensor-parallel ranks each.

    python examples/with_device_mesh.py

The script starts its own server. Both tensor-parallel ranks of a data-parallel rank compute parts of the same layers,
so they need the same batches: one of them fetches each batch, and the loader broadcasts it to the other. With torch's
DataLoader, training code needs a sampler with the data-parallel rank, and a broadcast in each step.
"""

import gc
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve

DATA_PARALLEL, TENSOR_PARALLEL, SAMPLES, EPOCHS = 2, 2, 1024, 4


class Bumps:
    """Points of a surface: sample i is ``(i, point, height of the surface at the point)``."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        point = torch.rand(2, generator=torch.Generator().manual_seed(index)) * 2 - 1
        return index, point, torch.sin(3 * point).sum()


def rank_main(rank: int, url: str) -> None:
    """Run the process of one rank."""
    dist.init_process_group("gloo", rank=rank, world_size=DATA_PARALLEL * TENSOR_PARALLEL)
    train(url, init_device_mesh("cpu", (DATA_PARALLEL, TENSOR_PARALLEL), mesh_dim_names=("dp", "tp")))
    gc.collect()
    dist.destroy_process_group()


def train(url: str, mesh: DeviceMesh) -> None:
    """Train a network whose hidden layer is divided among the tensor-parallel ranks."""
    loader = DataLoader(RemoteDataset(url), batch_size=32, shuffle=True, mesh=mesh)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    model = parallelize_module(network, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03, foreach=False)
    for epoch in range(EPOCHS):
        seen, loss = [], torch.zeros(())
        for indices, points, heights in loader:
            loss = (model(points).squeeze(1) - heights).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                assert isinstance(parameter.grad, DTensor)
                dist.all_reduce(parameter.grad.to_local(), dist.ReduceOp.AVG, group=mesh.get_group("dp"))
            optimizer.step()
            seen += indices.tolist()
        report(epoch, seen, loss.item())


def report(epoch: int, seen: list[int], loss: float) -> None:
    """Print on rank 0 whether tensor-parallel ranks received the same samples, and all samples arrived once."""
    everyone: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, seen)
    groups = [everyone[i : i + TENSOR_PARALLEL] for i in range(0, len(everyone), TENSOR_PARALLEL)]
    same = all(each == group[0] for group in groups for each in group)
    once = sorted(index for group in groups for index in group[0]) == list(range(SAMPLES))
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: tensor-parallel ranks agree: {same}, each sample once: {once}, loss {loss:.4f}")


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    with serve(Bumps(), num_workers=2) as address:
        mp.spawn(rank_main, args=(address,), nprocs=DATA_PARALLEL * TENSOR_PARALLEL)
