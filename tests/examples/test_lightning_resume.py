"""Resuming from Lightning's checkpoints of any step: all remaining batches are those of the uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from tests.end_to_end.contract import ShardedRange, assert_same, few_cpus_are_fine, torch, torch_is_there
from tests.end_to_end.test_resumed_runs import AUGMENTED, Hidden
from tests.examples.running import need_framework

__all__ = ["torch_is_there"]

EPOCHS = 3

CASES: dict[str, tuple[Any, Callable[[], dict[str, Any]]]] = {
    "seeded": (AUGMENTED, lambda: {"batch_size": 4, "shuffle": True, "seed": 5}),
    "in sequence": (AUGMENTED, lambda: {"batch_size": 4}),
    "shuffled without a seed": (AUGMENTED, lambda: {"batch_size": 4, "shuffle": True}),
    "shuffled without a seed, 2 workers": (AUGMENTED, lambda: {"batch_size": 4, "shuffle": True, "num_workers": 2}),
    "iterable-style": (ShardedRange(0, 9), lambda: {"batch_size": 2, "num_workers": 2}),
    "iterable-style, persistent": (
        ShardedRange(0, 9), lambda: {"batch_size": 2, "num_workers": 2, "persistent_workers": True}
    ),
    "Stateful sampler": (AUGMENTED, lambda: {"batch_size": 4, "sampler": Hidden(3)}),
}  # fmt: skip


def _trained(loader: DataLoader, folder: Path, checkpoint: Path | None = None) -> list[Any]:
    """Train by Lightning and return the batches; a checkpoint is written after each step."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    batches: list[Any] = []

    class Model(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, _: int) -> Any:
            batches.append(batch)
            return self.weight.sum() * torch.rand(())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    # another seed after the resume, on which nothing may depend
    lightning.seed_everything(20 if checkpoint is None else 77, verbose=False)
    save = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS, callbacks=[save], accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), loader, ckpt_path=checkpoint)
    return batches


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_lightning_resumes_with_the_next_batch(name: str, tmp_path: Path) -> None:
    """From a checkpoint of any step; only an iterable-style epoch's last one resumes with an epoch without batches.

    There, the loader does not know yet that the epoch is over: Lightning takes its empty rest for the next epoch.
    """
    need_framework("lightning")
    dataset, fresh = CASES[name]
    with few_cpus_are_fine(), serve(dataset, num_workers=2) as url:
        remote = RemoteDataset(url)
        whole = _trained(DataLoader(remote, **fresh()), tmp_path / "whole")
        assert len(whole) >= 2 * EPOCHS
        for step in range(1, len(whole)):
            skipped = len(whole) // EPOCHS if remote.iterable and step % (len(whole) // EPOCHS) == 0 else 0
            checkpoint = tmp_path / "whole" / f"step={step}.ckpt"
            rest = _trained(DataLoader(remote, **fresh()), tmp_path / f"rest{step}", checkpoint)
            assert_same(rest, whole[step + skipped :], f"step {step}: batches")
