"""Resuming in the middle of an epoch through accelerate and through transformers' Trainer."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from tests.end_to_end.contract import Made, ShardedRange, assert_same, seed_everything, torch, torch_is_there
from tests.examples.running import need_framework

__all__ = ["torch_is_there"]

AUGMENTED = Made(lambda i: (i, random.random(), torch.rand(())))

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "seeded": (AUGMENTED, {"batch_size": 3, "shuffle": True, "seed": 5}),
    "seeded, 2 workers": (AUGMENTED, {"batch_size": 3, "shuffle": True, "seed": 5, "num_workers": 2}),
    "in sequence": (AUGMENTED, {"batch_size": 3}),
    "shuffled without a seed": (AUGMENTED, {"batch_size": 3, "shuffle": True}),
    "shuffled without a seed, 2 workers": (AUGMENTED, {"batch_size": 3, "shuffle": True, "num_workers": 2}),
    "iterable-style": (ShardedRange(0, 9), {"batch_size": 2, "num_workers": 2}),
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make accelerate leave accelerators alone."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    need_framework("accelerate")


@pytest.mark.parametrize("name", CASES)
def test_skip_first_batches_leaves_the_rest_of_the_epoch(name: str) -> None:
    """``skip_first_batches(loader, n)`` yields the loader's own batches from n on; later epochs follow as without it.

    The function is imported before the loader is made, as scripts and transformers' Trainer import it.
    """
    from accelerate import data_loader

    dataset, arguments = CASES[name]
    with serve(dataset, num_workers=2) as url:
        remote = RemoteDataset(url)
        seed_everything()
        loader = DataLoader(remote, **arguments)
        whole = [list(loader), list(loader)]
        for n in range(len(whole[0]) + 1):
            seed_everything()
            loader = DataLoader(remote, **arguments)
            skipped = data_loader.skip_first_batches(loader, n)
            assert_same([whole[0][:n] + list(skipped), list(loader)], whole, f"{n} batches skipped: epochs")


def test_the_epoch_may_be_set_after_skipping() -> None:
    """``set_epoch`` on the result, as Trainer calls it, chooses the loader's epoch and keeps the skipped batches."""
    from accelerate.data_loader import skip_first_batches as imported_by_name

    with serve(AUGMENTED) as url:
        loader = DataLoader(RemoteDataset(url), batch_size=3, shuffle=True, seed=5)
        epochs = [list(loader) for _ in range(4)]
        again = DataLoader(RemoteDataset(url), batch_size=3, shuffle=True, seed=5)
        skipped = imported_by_name(again, 1)
        skipped.set_epoch(2)
        assert len(skipped) == len(again) - 1
        assert_same([list(skipped), list(again)], [epochs[2][1:], epochs[3]])


@pytest.mark.parametrize("name", CASES)
def test_accelerates_stateful_data_loaders(name: str, tmp_path: Path) -> None:
    """With ``use_stateful_dataloader=True``, save_state and load_state keep the position of a prepared loader."""
    need_framework("torchdata")
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    dataset, arguments = CASES[name]

    def prepared(remote: RemoteDataset) -> tuple[Any, Any]:
        loader = DataLoader(remote, **arguments)
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        return accelerator, accelerator.prepare(loader)

    with serve(dataset, num_workers=2) as url:
        remote = RemoteDataset(url)
        seed_everything()
        accelerator, loader = prepared(remote)
        iterator = iter(loader)
        next(iterator)
        accelerator.save_state(str(tmp_path))
        expected = [list(iterator), list(loader)]
        seed_everything(77)
        accelerator, loader = prepared(remote)
        accelerator.load_state(str(tmp_path))
        assert_same([list(loader), list(loader)], expected)


def _trained(make_loader: Callable[[], Any], folder: Path, checkpoint: str | None) -> list[Any]:
    """Train two epochs by transformers' Trainer and return the batches; a checkpoint is written after each step."""
    from transformers import Trainer, TrainingArguments

    batches: list[Any] = []

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: Any) -> Any:
            batches.append(x.clone())
            return {"loss": (self.weight * x.float()).mean() * 0}

    class Overridden(Trainer):  # type: ignore[misc, unused-ignore]
        def get_train_dataloader(self) -> Any:
            return make_loader()

    arguments = TrainingArguments(
        str(folder), num_train_epochs=2, save_strategy="steps", save_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    Overridden(Model(), arguments, train_dataset=[0]).train(resume_from_checkpoint=checkpoint)
    return batches


@pytest.mark.parametrize("step", [2, 4, 6])
def test_trainer_resumes_with_the_next_batch(step: int, tmp_path: Path) -> None:
    """From a checkpoint of any epoch, a seeded loader of `get_train_dataloader` yields all remaining batches."""
    need_framework("transformers")
    dataset = Made(lambda i: {"x": i * 1000 + random.randrange(1000)})
    with serve(dataset) as url:

        def make_loader() -> Any:
            return DataLoader(RemoteDataset(url), batch_size=3, shuffle=True, seed=5)

        whole = _trained(make_loader, tmp_path / "whole", None)
        assert len(whole) == 8
        rest = _trained(make_loader, tmp_path / "rest", str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert_same(rest, whole[step:])
