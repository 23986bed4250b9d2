"""Training and validation with Lightning, with a resume in the middle of an epoch.

    teleloader-server --demo                                        # in one terminal
    python examples/with_lightning.py                               # in another: two epochs of 25 batches
    python examples/with_lightning.py --stop-after 35               # stops in the second epoch and saves a checkpoint
    python examples/with_lightning.py --resume digits-step=35.ckpt  # continues in another process

Lightning saves ``state_dict()`` of the loader in its checkpoints and loads it on resume. The resumed run receives the
same batches as an uninterrupted one, and therefore ends with the same model.
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
    """Classifier of handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: Any, _: int) -> None:
        """Log the accuracy of a batch."""
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean(), batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(options: argparse.Namespace) -> None:
    """Train from the start or from a checkpoint."""
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
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)")
    parser.add_argument("--stop-after", type=int, default=-1, help="stop after this number of batches")
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    parser.add_argument("--folder", type=Path, default=".", help="folder of the checkpoints (default: %(default)s)")
    main(parser.parse_args())
