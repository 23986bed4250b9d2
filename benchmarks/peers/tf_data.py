"""The tf.data service of TensorFlow.

A dispatcher and a worker run in one process, whose threads execute the pipeline's operations without Python. The
pipelines do the same work as the datasets: the crops have the same distribution but other random numbers, and
TensorFlow's pixels differ slightly from those of OpenCV, so the shapes and types of batches are verified, not their
content. Datasets whose samples only Python can make are left out: the service would run them in one thread at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from benchmarks.processes import ROOT, end
from benchmarks.workloads import Workload

QUIET: Final = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


class TfData:
    """tf.data service; `num_workers` operations of a pipeline run in parallel."""

    name = "tf.data service"
    beside = None
    requires = ("tensorflow",)
    workloads = ("wire", "small", "whole", "jpeg_native")

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    @contextmanager
    def open(self) -> Iterator[Iterator[Any]]:
        """Start the service, and request a pipeline's batches.

        Raises:
            AssertionError: The pipeline's batches have other shapes or types than the workload's.
        """
        os.environ.update(QUIET)
        import tensorflow as tf

        server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers", "tf_data"],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            service = server.stdout.readline().strip() if server.stdout else ""
            pipeline = _PIPELINES[self._workload.name](tf, self._workload)
            self._verify(pipeline.element_spec)
            # compression is for slow networks: here, it would cost more than it saves
            remote = tf.data.experimental.service.distribute(
                tf.data.experimental.service.ShardingPolicy.OFF, service, compression=None
            )
            yield iter(pipeline.apply(remote).prefetch(tf.data.AUTOTUNE).as_numpy_iterator())
        finally:
            end(server)

    def _verify(self, spec: Any) -> None:
        expected = self._workload.expected(self._workload.dataset(), next(self._workload.batches()))
        found = spec if isinstance(spec, tuple) else (spec,)
        layout = [(tuple(part.shape), part.dtype.as_numpy_dtype) for part in found]
        assert layout == [(array.shape, array.dtype) for array in expected], layout

    def indices(self, count: int) -> None:
        """Return None: the order and the pixels are TensorFlow's."""

    def server_cpu(self) -> None:
        """Return None: the service also computes."""


def _rows(tf: Any, workload: Workload) -> Any:
    """Return batches of successive rows of an array."""
    dataset = workload.dataset()
    rows = tf.constant(dataset.rows)
    return _gathered(tf, workload, tf.data.Dataset.range(len(dataset)), lambda i: tf.gather(rows, i % len(rows)))


def _table(tf: Any, workload: Workload) -> Any:
    """Return batches of the rows of a table, in random order."""
    dataset = workload.dataset()
    rows, labels = tf.constant(dataset.rows), tf.constant(dataset.labels)
    order = tf.data.Dataset.range(len(labels)).shuffle(len(labels)).repeat()
    return _gathered(tf, workload, order, lambda i: (tf.gather(rows, i), tf.gather(labels, i)))


def _gathered(tf: Any, workload: Workload, order: Any, gather: Callable[[Any], Any]) -> Any:
    batches = order.batch(workload.batch_size, drop_remainder=True)
    return batches.map(gather, num_parallel_calls=workload.num_workers).prefetch(tf.data.AUTOTUNE)


def _photographs(tf: Any, workload: Workload) -> Any:
    """Return batches of decoded, cropped and resized photographs; only the crop is decoded."""
    dataset = workload.dataset()
    files, (width, height) = tf.constant(dataset.files), dataset.SIZE

    def sample(index: Any) -> Any:
        drawn = tf.random.stateless_uniform((3,), tf.stack([index, 0]))
        size = 160 + tf.cast(drawn[0] * (height - 160), tf.int32)
        left = tf.cast(drawn[1] * tf.cast(width - size, tf.float32), tf.int32)
        top = tf.cast(drawn[2] * tf.cast(height - size, tf.float32), tf.int32)
        crop = tf.image.decode_and_crop_jpeg(files[index % len(files)], tf.stack([top, left, size, size]), channels=3)
        resized = tf.cast(tf.round(tf.image.resize(crop, (224, 224))), tf.uint8)
        return tf.transpose(resized, (2, 0, 1))

    return (
        tf.data.Dataset.range(len(dataset))
        .map(sample, num_parallel_calls=workload.num_workers)
        .batch(workload.batch_size, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )


_PIPELINES: Final[dict[str, Callable[[Any, Workload], Any]]] = {
    "wire": _rows,
    "small": _rows,
    "whole": _table,
    "jpeg_native": _photographs,
}


def serve() -> None:
    """Run the service; print its address."""
    os.environ.update(QUIET)
    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    print(dispatcher.target, flush=True)
    worker.join()
