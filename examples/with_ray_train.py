"""Data-parallel training with Ray Train, which restarts failed workers from the last checkpoint.

    teleloader-server --demo                                        # in one terminal
    python examples/with_ray_train.py                               # in another: two workers, three epochs
    python examples/with_ray_train.py --fail-at 50                  # worker 1 fails; both resume from a checkpoint
    python examples/with_ray_train.py --steps 40 --folder /tmp/run  # stops in the second epoch
    python examples/with_ray_train.py --folder /tmp/run             # continues in other processes

Difference from the torch version: each worker passes its rank and the number of workers to the loader, which replaces
``ray.train.torch.prepare_data_loader`` and its DistributedSampler. The state of a loader with ``seed=`` is the same on
all ranks, except for the failed samples with ``on_error=``: worker 0 adds it to the checkpoint. The resumed run
receives the same batches as an uninterrupted one, and therefore ends with the same model.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from teleloader import DataLoader, RemoteDataset

EVERY = 20
"""Steps between two checkpoints."""


def train(config: dict[str, Any]) -> None:
    """Train a classifier of handwritten digits; run by each worker."""
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    dataset = RemoteDataset(config["url"], "digits-train")
    loader = DataLoader(dataset, batch_size=32, shuffle=True, seed=0, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = first = 0

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = first = saved["step"]

    while step < config["steps"]:
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == config["fail_at"] and first == 0 and rank == 1:
                raise RuntimeError("simulated failure of worker 1")
            is_last = step == config["steps"]
            if is_last or step % EVERY == 0:
                weights = sum(values.double().sum().item() for values in model.parameters())
                metrics = {"steps": step, "first": first, "loss": loss.item(), "weights": weights}
                with tempfile.TemporaryDirectory() as folder:
                    if rank == 0:
                        state = {
                            "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                            "loader": loader.state_dict(), "step": step,
                        }  # fmt: skip
                        torch.save(state, Path(folder) / "state.pt")
                        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
                    else:
                        ray.train.report(metrics)
            if is_last:
                break


def main(options: argparse.Namespace) -> None:
    """Train with two workers on CPUs, and print the result of worker 0."""
    # Ray Train resumes a run whose folder contains a checkpoint
    folder = options.folder and options.folder.resolve()
    where = {"name": folder.name, "storage_path": str(folder.parent)} if folder else {}
    trainer = TorchTrainer(
        train,
        train_loop_config={"url": options.url, "steps": options.steps, "fail_at": options.fail_at},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(**where, failure_config=FailureConfig(max_failures=1)),
    )
    result = trainer.fit()
    assert result.metrics is not None
    print(f"started at step {result.metrics['first']}, ended at step {result.metrics['steps']}")
    print(f"loss {result.metrics['loss']:.9f}, weights {result.metrics['weights']:.9f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=75, help="number of steps, 25 per epoch (default: %(default)s)")
    parser.add_argument("--fail-at", type=int, help="step at which worker 1 fails")
    parser.add_argument("--folder", type=Path, help="folder of the run (default: a new one in ~/ray_results)")
    main(parser.parse_args())
