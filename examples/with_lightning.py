"""Lightning's Trainer with a loader to train and one to validate; and how it resumes in the middle of an epoch.

    teleloader-server --demo                                        # in one terminal
    python examples/with_lightning.py                               # in another: two epochs of 25 batches
    python examples/with_lightning.py --stop-after 35               # leaves in the second epoch, with a checkpoint
    python examples/with_lightning.py --resume digits-step=35.ckpt  # the rest, in another process

Lightning saves what ``state_dict()`` of the loader says in its checkpoints, and gives it back when it resumes. With
``seed=`` what is left comes exactly as it would have without the interruption, so the same model comes out at the end.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from teleloader import DataLoader, RemoteDataset


class Classifier(lightning.LightningModule):
    """Tells handwritten digits apart."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """The loss on one batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: Any, _: int) -> None:
        """Log the part of the images that are told right."""
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean(), batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(options: argparse.Namespace) -> None:
    """Train, or train on."""
    lightning.seed_everything(0, verbose=False)
    train_loader = DataLoader(RemoteDataset(options.url, "digits-train"), batch_size=64, shuffle=True, seed=0)
    val_loader = DataLoader(RemoteDataset(options.url, "digits-test"), batch_size=64)

    model = Classifier()
    save = ModelCheckpoint(options.folder, "digits-{step}", every_n_train_steps=5, save_top_k=-1)
    trainer = lightning.Trainer(
        max_epochs=2, max_steps=options.stop_after, callbacks=[save], accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, train_loader, val_loader, ckpt_path=options.resume)
    where = train_loader.state_dict()
    print(f"steps {trainer.global_step}, next is sample {where['samples']} of epoch {where['epoch']}")
    print(f"accuracy {trainer.callback_metrics.get('accuracy', float('nan')):.3f}")
    print(f"weights {sum(weights.double().sum().item() for weights in model.parameters()):.12f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the loader server (default: %(default)s)")
    parser.add_argument("--stop-after", type=int, default=-1, help="leave after so many batches")
    parser.add_argument("--resume", type=Path, help="the checkpoint to go on from")
    parser.add_argument("--folder", type=Path, default=".", help="where checkpoints go (default: %(default)s)")
    main(parser.parse_args())
