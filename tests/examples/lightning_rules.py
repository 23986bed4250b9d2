"""Rules for Lightning in one or several processes: ``python -m tests.examples.lightning_rules URL PROCESSES``.

Each rule compares ``teleloader.torch.DataLoader`` with torch's loader in the same processes (see test_lightning.py).
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch

from teleloader import DataLoader as PlainLoader
from teleloader import RemoteDataset
from teleloader.torch import DataLoader

LENGTH = 23
PROCESSES = int(sys.argv[2])


def both(url: str, **arguments: Any) -> Iterator[Any]:
    """Yield torch's loader and teleloader's, each after the same ``torch.manual_seed``."""
    for kind, dataset in ((torch.utils.data.DataLoader, range(LENGTH)), (DataLoader, RemoteDataset(url))):
        torch.manual_seed(0)
        yield kind(dataset, batch_size=4, **arguments)


class Model(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
    """Model that notes the batches of this process; with `loader`, its hook returns the training data."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches: list[Any] = []
        self._loader = loader

    def train_dataloader(self) -> Any:
        """Return the training data."""
        return self._loader()

    def training_step(self, batch: Any, _: int) -> Any:
        """Note a batch."""
        self.batches.append(batch.tolist())
        return self.weight.sum()

    def validation_step(self, batch: Any, _: int) -> None:
        """Note a batch of the validation data."""
        self.batches.append(("validation", batch.tolist()))

    def predict_step(self, batch: Any, _: int) -> Any:
        """Return the batch."""
        return batch

    def configure_optimizers(self) -> Any:
        """Return an optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options: Any) -> Any:
    """Return a trainer of two epochs."""
    return lightning.Trainer(
        max_epochs=2, accelerator="cpu", devices=PROCESSES, strategy="ddp" if PROCESSES > 1 else "auto", logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, num_sanity_val_steps=0,
        **options,
    )  # fmt: skip


def trained(loader: Any, val_loader: Any = None, **options: Any) -> list[Any]:
    """Train two epochs; return the batches of this process."""
    model = Model(loader if callable(loader) else None)
    trainer(**options).fit(model, None if callable(loader) else loader, val_loader)
    return model.batches


def fabric(url: str) -> None:
    """`Fabric.setup_dataloaders` accepts the loader; each process receives the batches of torch's loader."""
    for shuffle in (False, True):
        theirs, ours = (
            [[batch.tolist() for batch in prepared] for _ in range(2)]
            for prepared in map(started_fabric().setup_dataloaders, both(url, shuffle=shuffle))
        )
        assert ours == theirs, f"shuffle={shuffle}: {ours} is not {theirs}"


def fabric_checkpoints(url: str) -> None:
    """A loader in the state of `Fabric.save` and `Fabric.load` resumes after any batch, also with another seed."""
    process = started_fabric()
    options: tuple[dict[str, Any], ...] = ({}, {"shuffle": True}, {"shuffle": True, "seed": 5})
    with tempfile.TemporaryDirectory() as own_folder:
        path = Path(process.broadcast(own_folder)) / "checkpoint.ckpt"
        for arguments in options:
            for number in range(1, len(setup(process, url, arguments))):
                torch.manual_seed(0)
                loader = setup(process, url, arguments)
                iterator = iter(loader)
                for _ in range(number):
                    next(iterator)
                process.save(path, {"loader": loader, "batches": number})
                expected = [batch.tolist() for batch in itertools.chain(iterator, loader)]
                torch.manual_seed(77)
                resumed = setup(process, url, arguments)
                process.load(path, {"loader": resumed})
                found = [batch.tolist() for batch in itertools.chain(resumed, resumed)]
                assert found == expected, f"{arguments} after {number} batches: {found} is not {expected}"
                process.barrier()
        process.barrier()


def setup(process: Any, url: str, arguments: dict[str, Any]) -> Any:
    """Return a loader that Fabric has prepared."""
    return process.setup_dataloaders(DataLoader(RemoteDataset(url), batch_size=4, **arguments))


def started_fabric() -> Any:
    """Return a Fabric object in this process."""
    started = lightning.Fabric(accelerator="cpu", devices=PROCESSES, strategy="ddp" if PROCESSES > 1 else "auto")
    started.launch()
    return started


def fit_and_validate(url: str) -> None:
    """`Trainer.fit` yields the batches of torch's loader, for training and validation data."""
    theirs, ours = (
        trained(loader, val) for loader, val in zip(both(url, shuffle=True), both(url), strict=True)
    )  # fmt: skip
    assert ours == theirs


def hooks(url: str) -> None:
    """Lightning also replaces the sampler of a loader that a hook of the module constructs."""
    theirs, ours = (trained(lambda number=number: list(both(url, shuffle=True))[number]) for number in range(2))
    assert ours == theirs


def overfit(url: str) -> None:
    """`overfit_batches` turns shuffling off, as with torch's loader."""
    theirs, ours = (trained(loader, overfit_batches=2) for loader in both(url, shuffle=True))
    assert ours == theirs
    assert len(ours) == 4


def predict(url: str) -> None:
    """`Trainer.predict` yields all samples, in order, although the loader drops the last batch."""
    theirs, ours = (
        [batch.tolist() for batch in trainer().predict(Model(), loader)] for loader in both(url, drop_last=True)
    )
    assert ours == theirs


def seeded(url: str) -> None:
    """Lightning leaves a loader with `seed` as it is: the loader divides the epoch itself."""
    dataset = RemoteDataset(url)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 5}
    expected = DataLoader(dataset, **options, rank=started_fabric().global_rank, world_size=PROCESSES)
    plan = [indices.tolist() for epoch in range(2) for indices in expected.plan(epoch)]
    for kind in (DataLoader, PlainLoader):
        assert trained(kind(dataset, **options)) == plan
    prepared = started_fabric().setup_dataloaders(DataLoader(dataset, **options))
    assert [batch.tolist() for _ in range(2) for batch in prepared] == plan


RULES = (fabric, fabric_checkpoints, fit_and_validate, hooks, overfit, predict, seeded)

if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")  # advice about loaders, workers and devices
    for rule in RULES:
        rule(sys.argv[1])
        print(f"{rule.__name__}: passed", flush=True)
