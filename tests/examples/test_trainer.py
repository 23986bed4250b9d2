"""Hugging Face transformers' Trainer over teleloader, compared with the same Trainer over torch's own loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from tests.end_to_end.contract import Made, torch, torch_is_there
from tests.examples.running import need_framework

__all__ = ["torch_is_there"]

TEXTS = Made(lambda i: {"input_ids": [(i * 7 + k) % 11 for k in range(1 + i % 5)], "labels": i % 3})
"""Sequences of token IDs of different lengths, which a collate function pads."""


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate sequences to the length of the longest one."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    return {
        "input_ids": torch.tensor([s["input_ids"] + [0] * (longest - len(s["input_ids"])) for s in samples]),
        "labels": torch.tensor([s["labels"] for s in samples]),
    }


def fine_tuned(
    make_loader: Callable[[], Any] | None, folder: Path, checkpoint: Path | None = None
) -> tuple[list[Any], list[float], list[Any]]:
    """Train a classifier for three epochs.

    Args:
        make_loader: Creates the training loader; None for that of the Trainer.
        folder: Folder of the checkpoints, one for each step.
        checkpoint: Checkpoint to resume from; None to start from the beginning.

    Returns:
        The batches, the logged losses and the weights.
    """
    from transformers import Trainer, TrainingArguments, set_seed

    batches: list[Any] = []

    class Classifier(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(11, 8)
            self.classes = torch.nn.Linear(8, 3)

        def forward(self, input_ids: Any, labels: Any) -> Any:
            batches.append((input_ids.tolist(), labels.tolist()))
            # noise from torch's generator shows whether a resumed run continues with the same random numbers
            hidden = torch.nn.functional.dropout(self.tokens(input_ids).mean(1), 0.5)
            return {"loss": torch.nn.functional.cross_entropy(self.classes(hidden), labels)}

    class Overridden(Trainer):  # type: ignore[misc, unused-ignore]
        def get_train_dataloader(self) -> Any:
            return super().get_train_dataloader() if make_loader is None else self.accelerator.prepare(make_loader())

    set_seed(5)
    arguments = TrainingArguments(
        str(folder), num_train_epochs=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=0.1, save_strategy="steps", save_steps=1, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, seed=5,
    )  # fmt: skip
    trainer = Overridden(Classifier(), arguments, data_collator=padded, train_dataset=TEXTS)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return batches, losses, [weights.tolist() for weights in trainer.model.parameters()]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_trainer_trains_as_with_torchs_loader(num_workers: int, tmp_path: Path) -> None:
    """Batches, losses and weights are the same, also after a resume in the first, second and third epoch."""
    need_framework("transformers")
    with serve(TEXTS, num_workers=2, collate_fn=padded) as url:

        def make_loader() -> Any:
            return DataLoader(RemoteDataset(url), batch_size=2, shuffle=True, num_workers=num_workers)

        theirs = fine_tuned(None, tmp_path / "theirs")
        assert len(theirs[0]) == 15
        assert fine_tuned(make_loader, tmp_path / "ours") == theirs
        for step in (2, 4, 8):
            name = f"checkpoint-{step}"
            resumed = fine_tuned(None, tmp_path / "theirs-resumed", tmp_path / "theirs" / name)
            assert fine_tuned(make_loader, tmp_path / "ours-resumed", tmp_path / "ours" / name) == resumed
            assert resumed[2] == theirs[2]
