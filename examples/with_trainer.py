"""Training and evaluation with the Trainer of Hugging Face transformers.

    python examples/with_trainer.py

Differences from the torch version: the overridden methods ``get_train_dataloader`` and ``get_eval_dataloader``, which
pass the loader to ``accelerator.prepare``. As usual, the Trainer then handles devices, gradient accumulation, several
processes and resuming. The script starts its own server.
"""

import tempfile
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve


class Points:
    """Points in a plane; the label tells whether the sum of the coordinates is positive."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        point = torch.randn(2, generator=torch.Generator().manual_seed(index))
        return {"points": point, "labels": (point.sum() > 0).long()}


class Classifier(nn.Module):
    """Linear classifier; the Trainer passes the entries of a batch as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and logits."""
        logits = self.linear(points)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class RemoteTrainer(Trainer):
    """Trainer whose datasets are on a server."""

    def get_train_dataloader(self) -> Any:
        """Return the loader of the training data."""
        loader = DataLoader(
            self.train_dataset, batch_size=self.args.train_batch_size, shuffle=True, seed=self.args.seed
        )
        return self.accelerator.prepare(loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of the evaluation data."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.accelerator.prepare(DataLoader(dataset, batch_size=self.args.eval_batch_size))


def accuracy(result: Any) -> dict[str, float]:
    """Return the accuracy of a prediction."""
    return {"accuracy": float((result.predictions.argmax(1) == result.label_ids).mean())}


if __name__ == "__main__":
    torch.manual_seed(0)
    with serve(Points(), num_workers=2) as url, tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=5, per_device_train_batch_size=32, learning_rate=0.05, use_cpu=True, seed=0,
            gradient_accumulation_steps=3, report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        remote: Any = RemoteDataset(url)
        trainer = RemoteTrainer(
            Classifier(), arguments, train_dataset=remote, eval_dataset=remote, compute_metrics=accuracy
        )
        trainer.train()
        print(f"{trainer.state.global_step} optimizer steps, accuracy {trainer.evaluate()['eval_accuracy']:.3f}")
