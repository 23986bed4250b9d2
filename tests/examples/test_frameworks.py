"""Lightning, accelerate, transformers, Keras and JAX, each with its own script in examples/.

The frameworks are large: ``pip install --editable . --group dev --group frameworks`` installs them, after a torch for
CPUs. Without a framework its tests are skipped; with TELELOADER_TEST_FRAMEWORKS=1 in the environment they fail.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from teleloader_server import serve
from tests.conftest import StartServer, need
from tests.examples.running import RANKS, figure, need_framework, run_example

LIGHTNINGS_OWN = ("ignore:`isinstance(treespec:FutureWarning", "ignore:The dirpath has changed:UserWarning")
"""Warnings of Lightning on a deprecated function of torch, and on another folder than that of the resumed run."""


def lightning(url: str, folder: Path, *arguments: str) -> str:
    """Run the Lightning example."""
    return run_example(
        "examples/with_lightning.py", "--url", url, "--folder", str(folder), *arguments, ignore=LIGHTNINGS_OWN
    )


def test_lightning_trains_and_validates(start_server: StartServer, tmp_path: Path) -> None:
    """The Lightning example trains two epochs of 25 batches."""
    need_framework("lightning")
    server = start_server("--demo", "--num-workers", "2")
    printed = lightning(server.url, tmp_path)
    assert "steps 50," in printed
    assert figure("accuracy", printed) > 0.9


@pytest.mark.parametrize("stop", [10, 25, 35], ids=["first epoch", "between", "second epoch"])
def test_lightning_resumes_where_it_left(stop: int, start_server: StartServer, tmp_path: Path) -> None:
    """Weights and position equal those of the uninterrupted run, to the last bit."""
    need_framework("lightning")
    server = start_server("--demo", "--num-workers", "2")
    whole = lightning(server.url, tmp_path / "whole")
    left = lightning(server.url, tmp_path / "left", "--stop-after", str(stop))
    assert f"steps {stop}, next is sample {stop % 25 * 64} of epoch" in left
    checkpoint = tmp_path / "left" / f"digits-step={stop}.ckpt"
    assert lightning(server.url, tmp_path / "rest", "--resume", str(checkpoint)) == whole


def test_lightnings_epochs_are_those_of_a_plain_loop(start_server: StartServer, tmp_path: Path) -> None:
    """An iterator from which no batch was requested does not count as an epoch."""
    need_framework("lightning")
    server = start_server("--demo", "--num-workers", "2")
    assert "next is sample 0 of epoch 2\n" in lightning(server.url, tmp_path)


def test_accelerate(start_server: StartServer) -> None:
    """Training uses every sample of each epoch; save_state and load_state resume within an epoch."""
    need_framework("accelerate")
    server = start_server("--demo", "--num-workers", "2")
    printed = run_example("examples/with_accelerate.py", "--url", server.url, ACCELERATE_USE_CPU="true")
    assert printed.count(": 1541 samples on all ranks") == 10
    assert figure("test accuracy", printed) > 0.93
    assert "load_state continues with the batch after save_state: True" in printed


def test_accelerate_on_two_ranks(start_server: StartServer) -> None:
    """The processes divide each epoch of 1,541 samples into batches of 64; each test image is counted once."""
    need_framework("accelerate")
    server = start_server("--demo", "--num-workers", "2")
    printed = run_example(
        *RANKS, "examples/with_accelerate.py", "--url", server.url, "--epochs", "3",
        ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert printed.count(": 1664 samples on all ranks") == 3
    assert figure("test accuracy", printed) > 0.8
    assert "on 256 images" in printed


@pytest.mark.parametrize(("devices", "batches"), [(1, 25), (2, 13)])
def test_fabric(devices: int, batches: int, start_server: StartServer) -> None:
    """The Fabric example trains in one and in two processes, which divide the epoch."""
    need_framework("lightning")
    server = start_server("--demo", "--num-workers", "2")
    printed = run_example(
        "examples/with_fabric.py", "--url", server.url, "--devices", str(devices), ignore=LIGHTNINGS_OWN,
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert f"10 epochs of {batches} batches on each process" in printed
    assert figure("test accuracy", printed) > 0.9


def test_transformers_trainer() -> None:
    """Each epoch of 32 batches makes 11 optimizer steps of 3 batches: the last step has the remaining 2."""
    need_framework("transformers")
    printed = run_example("examples/with_trainer.py")
    assert "55 optimizer steps" in printed
    assert figure("accuracy", printed) > 0.9


def test_a_prefetcher(start_server: StartServer) -> None:
    """A prefetcher in the style of timm reads the loader's sampler, dataset and length."""
    need("torch")
    server = start_server("--demo", "--num-workers", "2")
    printed = run_example("examples/with_prefetcher.py", "--url", server.url)
    assert "1536 of 1541 samples by RandomSampler" in printed
    assert figure("training accuracy", printed) > 0.93


def test_a_distributed_checkpoint(start_server: StartServer) -> None:
    """Two ranks resume from one distributed checkpoint, as in torchtitan."""
    need("torch")
    server = start_server("--demo", "--num-workers", "2")
    printed = run_example(*RANKS, "examples/with_torchtitan.py", "--url", server.url, OMP_NUM_THREADS="1")
    assert printed.count("yields the same batches: True") == 2


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_keras(backend: str, start_server: StartServer) -> None:
    """Keras trains on the loader with both backends."""
    need_framework("keras")
    server = start_server("--demo", "--num-workers", "2")
    printed = run_example("examples/with_keras.py", "--url", server.url, KERAS_BACKEND=backend)
    assert f"{backend}: 240 steps" in printed
    assert figure("test accuracy", printed) > 0.9


def test_jax_distributes_batches_over_devices(start_server: StartServer) -> None:
    """Each of four simulated devices holds a quarter of each batch."""
    need_framework("jax")
    server = start_server("--demo", "--num-workers", "2")
    printed = run_example("examples/with_jax_sharding.py", "--url", server.url, "--epochs", "5")
    assert printed.count("on 4 devices {(16, 8, 8)}") == 5
    assert figure("loss", printed) < 1


def test_jax(start_server: StartServer) -> None:
    """A jitted JAX loop learns."""
    need_framework("jax")
    server = start_server("--demo", "--num-workers", "2")
    printed = run_example("examples/with_jax.py", "--url", server.url)
    assert printed.count(": 24 batches") == 10
    assert figure("test accuracy", printed) > 0.93
    assert "on 256 images" in printed


class OfEachType:
    """Dataset with an array of each dtype that JAX converts."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, object]:
        import ml_dtypes

        types = ("bool", "uint8", "int32", "int64", "uint64", "float16", "float32", "float64", "complex128")
        return {
            **{name: np.full(3, index, name) for name in types},
            **{name: np.full(3, index, getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn")},
            "int": index, "float": index / 3, "str": str(index),
        }  # fmt: skip


class Large:
    """Dataset in which sample i is a MiB of the value i."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        return np.full((256, 1024), index, np.float32)


@pytest.mark.parametrize(
    "rule",
    [
        "types_are_those_that_jax_gives_them",
        "types_are_wide_with_jax_enable_x64",
        "an_array_that_is_kept_does_not_change",
        "the_context_manager_of_x64_holds_for_batches",
        "a_sampler_gives_batches",
    ],
)
def test_jax_arrays(rule: str) -> None:
    """Each rule in jax_arrays.py runs in a separate process, as JAX warns if a process that loaded it forks."""
    need_framework("jax")
    with serve({"types": OfEachType(), "large": Large()}, num_workers=2) as url:
        run_example("-m", "tests.examples.jax_arrays", rule, url)
