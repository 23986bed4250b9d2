"""Frameworks without an example: a training ends with the same weights as with torch's loader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from teleloader import RemoteDataset
from teleloader_server import serve
from tests.end_to_end.contract import torch, torch_is_there
from tests.examples.running import need_framework

__all__ = ["torch_is_there"]

POINTS = [((i % 7) / 7, float(i % 3)) for i in range(50)]


def loaders(url: str) -> list[Callable[..., Any]]:
    """Return functions that construct torch's loader and teleloader's."""
    from teleloader.torch import DataLoader

    remote = RemoteDataset(url)
    return [
        lambda **arguments: torch.utils.data.DataLoader(POINTS, batch_size=8, **arguments),
        lambda **arguments: DataLoader(remote, batch_size=8, **arguments),
    ]


def weights_of(model: Any) -> list[float]:
    """Return all weights of a model."""
    return [float(value) for weights in model.parameters() for value in weights.flatten()]


def as_column(batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch as float columns."""
    inputs, targets = batch
    return inputs.float()[:, None], targets.float()[:, None]


@pytest.mark.filterwarnings("ignore")
def test_ignite() -> None:
    """Ignite's engine counts epochs and iterations of the loader."""
    need_framework("ignite")
    from ignite.engine import create_supervised_trainer

    results = []
    with serve(POINTS, num_workers=1) as url:
        for make in loaders(url):
            torch.manual_seed(0)
            model = torch.nn.Linear(1, 1)
            trainer = create_supervised_trainer(
                model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.functional.mse_loss,
                prepare_batch=lambda batch, device, non_blocking: as_column(batch),
            )  # fmt: skip
            state = trainer.run(make(shuffle=True), max_epochs=3)
            results.append((state.epoch, state.iteration, state.epoch_length, weights_of(model)))
    assert results[0] == results[1]


@pytest.mark.filterwarnings("ignore")
def test_skorch() -> None:
    """Skorch constructs the loader itself, from ``iterator_train``."""
    need_framework("skorch")
    from skorch import NeuralNet

    results = []
    with serve(POINTS, num_workers=1) as url:
        for number in range(2):

            def iterator(dataset: Any, number: int = number, **arguments: Any) -> Any:
                return loaders(url)[number](shuffle=True, collate_fn=None)

            torch.manual_seed(0)
            net = NeuralNet(
                Column, torch.nn.MSELoss, max_epochs=3, lr=0.1, train_split=None, iterator_train=iterator, verbose=0
            )
            net.fit(POINTS)
            results.append((net.history[:, "train_loss"], weights_of(net.module_)))
    assert results[0] == results[1]


@pytest.mark.filterwarnings("ignore")
def test_fastai(tmp_path: Path) -> None:
    """A fastai Learner trains and validates on plain loaders, as its page on migrating from PyTorch describes."""
    need_framework("fastai")
    from fastai.basics import DataLoaders, Learner
    from fastai.callback.core import Callback

    class AsColumns(Callback):  # type: ignore[misc, unused-ignore]
        """Converts inputs and targets of each batch."""

        def before_batch(self) -> None:
            """Replace the batch's tensors."""
            inputs, targets = as_column((self.x, self.y))
            self.learn.xb, self.learn.yb = (inputs,), (targets,)

    results = []
    with serve(POINTS, num_workers=1) as url:
        for make in loaders(url):
            torch.manual_seed(0)
            data = DataLoaders(make(shuffle=True), make(), device="cpu", path=tmp_path)
            learner = Learner(
                data, torch.nn.Linear(1, 1), loss_func=torch.nn.functional.mse_loss, lr=0.1, cbs=AsColumns()
            )
            with learner.no_logging():
                learner.fit(3)
            results.append(([list(values) for values in learner.recorder.values], weights_of(learner.model)))
    assert results[0] == results[1]
    assert len(results[0][0]) == 3, "epochs"


class Column(torch.nn.Module if hasattr(torch, "nn") else object):  # type: ignore[misc, name-defined, unused-ignore]
    """Linear model of single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, inputs: Any) -> Any:
        """Return a prediction for each input."""
        return self.linear(inputs.float()[:, None])[:, 0].double()
