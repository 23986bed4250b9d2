"""Data-parallel training on CPUs with two ranks (gloo); each rank loads half of every epoch.

    python examples/ddp_gloo.py                      # the loader reads the ranks from torch.distributed
    python examples/ddp_gloo.py --sampler            # with a DistributedSampler, as in existing scripts

The script starts its own server. As in torch, ``shuffle=True`` gives each epoch a different order, and a
DistributedSampler needs ``set_epoch``. Samples contain their index, from which rank 0 verifies that the ranks together
received each sample once.
"""

import argparse
import gc
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve

WORLD_SIZE, SAMPLES, EPOCHS = 2, 1000, 4
SLOPES = torch.tensor([2.0, -3.0, 0.5])


class Plane:
    """Points of a plane: sample i is ``(i, point, height of the plane at the point)``."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        point = torch.randn(3, generator=torch.Generator().manual_seed(index))
        return index, point, point @ SLOPES


def rank_main(rank: int, url: str, with_sampler: bool) -> None:
    """Run the process of one rank."""
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    train(url, with_sampler)
    # With any loader: DDP's reference cycles would keep gloo's threads alive, which can abort the process as it exits.
    gc.collect()
    dist.destroy_process_group()


def train(url: str, with_sampler: bool) -> None:
    """Train a linear model."""
    dataset: Any = RemoteDataset(url)
    if with_sampler:
        sampler: Any = DistributedSampler(dataset)  # reads the ranks from torch.distributed
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    else:
        sampler, loader = None, DataLoader(dataset, batch_size=32, shuffle=True)  # the same

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        mine: list[int] = []
        for numbers, points, heights in loader:
            loss = nn.functional.mse_loss(model(points).squeeze(1), heights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mine += numbers.tolist()
        parts: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(parts, mine)
        if dist.get_rank() == 0:
            whole = [number for part in parts for number in part]
            once = sorted(whole) == list(range(SAMPLES))
            print(f"epoch {epoch}: {list(map(len, parts))} samples, each once: {once}, first {whole[:6]}")
    if dist.get_rank() == 0:
        print(f"error {(model.module.weight[0] - SLOPES).abs().max().item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sampler", action="store_true", help="divide the epoch with a DistributedSampler")
    options = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29500")}
    with serve(Plane(), num_workers=2) as address:
        mp.spawn(rank_main, args=(address, options.sampler), nprocs=WORLD_SIZE)
