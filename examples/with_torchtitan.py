"""Loop in the style of torchtitan: an endless iterator, and a loader in the distributed checkpoint.

    teleloader-server --demo                                            # in one terminal
    torchrun --nproc-per-node 2 examples/with_torchtitan.py             # in another

Difference from the torch version: torchtitan's ``ParallelAwareDataloader`` derives from StatefulDataLoader, and stores
a pickled state for each data-parallel rank. Here it derives from the loader, whose ``dp_rank`` and ``dp_world_size``
are `rank` and `world_size`. With ``seed=``, the state is the same on all ranks, except for the failed samples with
``on_error=``, so a run can resume with another number of ranks if batch size times ranks remains the same.
"""

import argparse
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from teleloader import DataLoader, RemoteDataset

SEED = 0


class ParallelAwareDataloader(DataLoader):
    """Loader of one data-parallel rank; ``state_dict`` and ``load_state_dict`` are those of the loader."""

    def __init__(self, dataset: Any, dp_rank: int, dp_world_size: int, **options: Any) -> None:
        super().__init__(dataset, rank=dp_rank, world_size=dp_world_size, shuffle=True, seed=SEED, **options)


def batch_generator(loader: ParallelAwareDataloader) -> Iterator[Any]:
    """Yield batches without end; each ``iter()`` starts the next epoch."""
    while True:
        yield from loader


def main(url: str, dp_rank: int, dp_world_size: int, folder: str) -> None:
    """Train 30 steps, save a checkpoint, and compare the next batches with those of a resumed loader."""
    dataset = RemoteDataset(url, "digits-train")
    loader = ParallelAwareDataloader(dataset, dp_rank, dp_world_size, batch_size=64 // dp_world_size)
    batches = batch_generator(loader)
    for _ in range(30):
        next(batches)
    dcp.save({"dataloader": loader}, checkpoint_id=folder)
    expected = [next(batches) for _ in range(30)]

    resumed = ParallelAwareDataloader(dataset, dp_rank, dp_world_size, batch_size=64 // dp_world_size)
    dcp.load({"dataloader": resumed}, checkpoint_id=folder)
    batches = batch_generator(resumed)
    same = all(torch.equal(labels, next(batches)[1]) for _, labels in expected)
    print(f"rank {dp_rank} of {dp_world_size}: the resumed loader yields the same batches: {same}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as own_folder:
        folders = [own_folder]
        dist.broadcast_object_list(folders)  # the ranks write one checkpoint, to the folder of rank 0
        main(options.url, dist.get_rank(), dist.get_world_size(), folders[0])
        dist.barrier()
    dist.destroy_process_group()
