"""Loaders of other projects, FFCV and DALI, which run if they are installed.

Neither generates torch's order from a seed, so the benchmark passes it as a list of indices.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.gpu.accelerator import Accelerator
from benchmarks.gpu.contenders import ALONE, Config, Contender, Copies, Ranks
from benchmarks.gpu.data import ROWS, SHAPE, Images, Samples, Source
from benchmarks.gpu.training import Batch, Begin, to_float

MODULES: Final = {"FFCV": "ffcv", "DALI": "nvidia.dali"}


def torchs_order(seed: int, source: Source) -> NDArray[np.int64]:
    """Return the rows of an epoch in the order of torch's RandomSampler for a seed."""
    torch.manual_seed(seed)
    torch.empty((), dtype=torch.int64).random_()  # the loader draws the seed of its workers first
    order: NDArray[np.int64] = np.array(list(torch.utils.data.RandomSampler(range(source.length)))) % ROWS
    return order


class Dali:
    """NVIDIA DALI with an external source in worker processes, and a queue of two batches on the device."""

    name = "DALI"
    has_torchs_order = True

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        self._accelerator = accelerator
        self._config = config

    @contextmanager
    def open(self, source: Source, ranks: Ranks = ALONE, copies: Copies | None = None) -> Iterator[Begin]:
        """Start a pipeline with each epoch."""
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import Pipeline
        from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

        accelerator, config = self._accelerator, self._config

        def begin(seed: int) -> Iterator[Batch]:
            pipeline = Pipeline(
                batch_size=config.batch_size,
                num_threads=config.num_workers,
                device_id=accelerator.device.index if accelerator.is_gpu else None,
                py_num_workers=config.num_workers,
                py_start_method="spawn",
                prefetch_queue_depth=2,
            )
            with pipeline:
                outputs = fn.external_source(
                    Samples(torchs_order(seed, source)),
                    num_outputs=2,
                    batch=False,
                    parallel=True,
                    dtype=[types.UINT8, types.INT64],
                )
                pipeline.set_outputs(*([each.gpu() for each in outputs] if accelerator.is_gpu else outputs))
            batches = DALIGenericIterator(
                [pipeline], ["images", "rows"], size=source.length, last_batch_policy=LastBatchPolicy.DROP
            )
            return (to_float((batch["images"], batch["rows"].reshape(-1)), accelerator.dtype) for (batch,) in batches)

        yield begin

    def processes(self, server: int) -> list[int]:
        """Return none."""
        return []


class Ffcv:
    """FFCV, which reads a file in its own format: the benchmark writes the images to it beforehand, uncompressed."""

    name = "FFCV"
    has_torchs_order = True

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        self._accelerator = accelerator
        self._config = config

    @contextmanager
    def open(self, source: Source, ranks: Ranks = ALONE, copies: Copies | None = None) -> Iterator[Begin]:
        """Write the file."""
        from ffcv.fields import IntField, NDArrayField
        from ffcv.fields.decoders import IntDecoder, NDArrayDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import Squeeze, ToDevice, ToTensor
        from ffcv.writer import DatasetWriter

        accelerator, config = self._accelerator, self._config
        with TemporaryDirectory() as folder:
            file = str(Path(folder, "images.beton"))
            fields = {"image": NDArrayField(np.dtype(np.uint8), SHAPE), "row": IntField()}
            DatasetWriter(file, fields, num_workers=1).from_indexed_dataset(Images(ROWS))

            def begin(seed: int) -> Iterator[Batch]:
                loader = Loader(
                    file,
                    batch_size=config.batch_size,
                    num_workers=config.num_workers,
                    order=OrderOption.SEQUENTIAL,
                    indices=torchs_order(seed, source).astype(np.uint64),
                    drop_last=True,
                    pipelines={
                        "image": [NDArrayDecoder(), ToTensor(), ToDevice(accelerator.device)],
                        "row": [IntDecoder(), ToTensor(), Squeeze(), ToDevice(accelerator.device)],
                    },
                )
                return (to_float((images, numbers), accelerator.dtype) for images, numbers in loader)

            yield begin

    def processes(self, server: int) -> list[int]:
        """Return none."""
        return []


def installed(accelerator: Accelerator, config: Config) -> tuple[list[Contender], list[str]]:
    """Return the loaders that are installed, and the names of those that are not."""
    kinds: dict[str, type[Ffcv] | type[Dali]] = {"FFCV": Ffcv, "DALI": Dali}
    absent = [name for name, module in MODULES.items() if not _is_installed(module)]
    return [kind(accelerator, config) for name, kind in kinds.items() if name not in absent], absent


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package
        return False
