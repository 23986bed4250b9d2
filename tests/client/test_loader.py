"""Errors of the loader's constructor, and their texts."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from typing import Any

import numpy as np
import pytest

import teleloader
from teleloader import DataLoader, RemoteDataset, ServerUnavailable, TeleloaderError, UnknownDataset
from teleloader.loader import _ORDERING
from teleloader_server import serve
from teleloader_shared.spec import LoaderSpec
from tests.conftest import need


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Run a server with a dataset of 10 samples and an empty one."""
    with serve({"ten": list(range(10)), "none": []}, num_workers=1) as address:
        yield address


NOT_ORDERING = {"dataset", "num_workers", "checksum", "compression", "on_error", "error_retries"}
"""Arguments in loader specs that do not determine the order of the samples."""

AS_TORCH: list[dict[str, Any]] = [
    {"timeout": -1},
    {"prefetch_factor": 2},
    {"prefetch_factor": -1, "num_workers": 1},
    {"persistent_workers": True},
    {"multiprocessing_context": "fork"},
    {"sampler": [1], "shuffle": True},
    {"batch_sampler": [[1]], "batch_size": 2},
    {"batch_size": 0},
    {"batch_size": -1},
    {"batch_size": 2.0},
    {"batch_size": True},
    {"batch_size": None, "drop_last": True},
    {"drop_last": 1},
]


def test_the_arguments_of_specs_that_determine_the_order_are_known() -> None:
    """A loader with another sampler, as accelerate creates it, is created without these arguments."""
    arguments = signature(DataLoader.__init__).parameters.keys() & {field.name for field in fields(LoaderSpec)}
    assert arguments - NOT_ORDERING == arguments & set(_ORDERING)


@pytest.mark.parametrize("arguments", AS_TORCH, ids=str)
def test_bad_arguments_fail_as_in_torch(url: str, arguments: dict[str, Any]) -> None:
    """Errors have torch's types and texts."""
    need("torch")
    from torch.utils.data import DataLoader as TorchLoader

    with pytest.raises(ValueError) as torchs:
        TorchLoader(list(range(10)), **arguments)
    with pytest.raises(ValueError) as ours:
        DataLoader(RemoteDataset(url, "ten"), **arguments)
    assert str(ours.value) == str(torchs.value)


def test_an_empty_dataset(url: str) -> None:
    """An empty dataset has no batches; shuffling it raises an error, as in torch."""
    assert list(DataLoader(RemoteDataset(url, "none"), 2)) == []
    with pytest.raises(ValueError, match="num_samples should be a positive integer value, but got num_samples=0"):
        DataLoader(RemoteDataset(url, "none"), 2, shuffle=True)


@pytest.mark.parametrize(("batch_size", "drop_last", "batches"), [(3, False, 4), (3, True, 3), (None, False, 10)])
def test_length(url: str, batch_size: int | None, drop_last: bool, batches: int) -> None:
    """len() equals the number of batches of an iteration."""
    loader = DataLoader(RemoteDataset(url, "ten"), batch_size, drop_last=drop_last, output="numpy")
    assert len(loader) == batches == len(list(loader))


def test_each_iteration_is_the_next_epoch(url: str) -> None:
    """Each iteration is the next epoch unless set_epoch selects another; an epoch's order is always the same."""
    loader = DataLoader(RemoteDataset(url, "ten"), 10, shuffle=True, output="numpy")
    first, second = (next(iter(loader)).tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    loader.set_epoch(0)
    assert next(iter(loader)).tolist() == first


def test_an_interrupted_epoch_survives_set_epoch(url: str) -> None:
    """A resumed epoch is kept when a framework calls set_epoch at its start."""
    loader = DataLoader(RemoteDataset(url, "ten"), 2, shuffle=True, output="numpy")
    batches = iter(loader)
    seen = [next(batches).tolist() for _ in range(2)]
    again = DataLoader(RemoteDataset(url, "ten"), 2, shuffle=True, output="numpy")
    again.load_state_dict(loader.state_dict())
    again.set_epoch(0)
    seen += [batch.tolist() for batch in again]
    assert sorted(i for batch in seen for i in batch) == list(range(10))


@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_a_sampler_is_batched_whatever_the_output(url: str, output: Any) -> None:
    """The output does not change batching by batch_size and drop_last, or its absence."""
    if output == "torch":
        need("torch")
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"batch_size": 2}, [[3, 1], [4, 1], [5]]),
        ({"batch_size": 2, "drop_last": True}, [[3, 1], [4, 1]]),
        ({"batch_size": None}, [3, 1, 4, 1, 5]),
    ]
    for arguments, expected in cases:
        loader = DataLoader(RemoteDataset(url, "ten"), sampler=[3, 1, 4, 1, 5], output=output, **arguments)
        assert len(loader) == len(expected)
        assert [np.asarray(batch).tolist() for batch in loader] == expected


def test_numpy_on_request(url: str) -> None:
    """output="numpy" does not import torch; an unknown output is rejected."""
    assert type(next(iter(DataLoader(RemoteDataset(url, "ten"), output="numpy")))).__module__ == "numpy"
    with pytest.raises(ValueError, match="invalid output='tensorflow': expected 'torch', 'numpy', 'jax' or None"):
        DataLoader(RemoteDataset(url, "ten"), output="tensorflow")  # type: ignore[arg-type]


@pytest.mark.parametrize(("output", "package"), [("torch", r"teleloader\[torch\]"), ("jax", "jax")])
def test_what_is_not_installed_is_named(url: str, output: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the missing package and how to install it; by default the loader returns NumPy arrays."""
    dataset = RemoteDataset(url, "ten")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TeleloaderError, match=f"output='{output}' requires .*, which is not installed: .*{package}"):
        DataLoader(dataset, output=output)
    assert type(next(iter(DataLoader(dataset)))).__module__ == "numpy"


def test_pinning_without_an_accelerator_warns_as_torch_does(url: str) -> None:
    """Each iter() causes the warning, not the constructor; the batches are ordinary tensors."""
    need("torch")
    import torch

    if torch.cuda.is_available():
        pytest.skip("an accelerator is there")
    loader = DataLoader(RemoteDataset(url, "ten"), 5, pin_memory=True)
    for _ in range(2):
        with pytest.warns(UserWarning, match="'pin_memory' argument is set as true but no accelerator is found"):
            batches = iter(loader)
        assert not next(batches).is_pinned()


def test_pinning_needs_torch(url: str) -> None:
    """Pinning NumPy arrays is rejected."""
    with pytest.raises(TeleloaderError, match="pin_memory=True requires torch tensors"):
        DataLoader(RemoteDataset(url, "ten"), pin_memory=True, output="numpy")


def test_what_is_no_dataset_is_refused() -> None:
    """An invalid dataset raises a TypeError that states what a dataset must define."""
    with pytest.raises(TypeError, match=r"or define __getitem__ and __len__, or __iter__; got 5 \(int\)"):
        DataLoader(5)


def test_a_local_dataset_needs_a_server_that_hosts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only the client is installed, the error for a local list states what to install."""
    monkeypatch.setattr("teleloader.hosting.entry_points", lambda group: ())
    with pytest.raises(TypeError, match=r"got list. .* install the server: pip install 'teleloader\[server\]'"):
        DataLoader([1, 2, 3])


def test_wrong_turns_on_the_way_to_a_server(url: str) -> None:
    """The errors for an invalid URL, no server, an unknown dataset and a missing name state what to do."""
    with pytest.raises(ValueError, match="invalid server URL 'cpu-box:8000': expected http://host:port"):
        RemoteDataset("cpu-box:8000")
    with pytest.raises(ServerUnavailable, match="Check that teleloader-server is running"):
        RemoteDataset("http://127.0.0.1:9", reconnect_timeout=0)
    with pytest.raises(UnknownDataset, match=r"unknown dataset 'eleven': .* hosts 'ten', 'none'"):
        RemoteDataset(url, "eleven")
    with pytest.raises(UnknownDataset, match=r"no dataset name was given: .* hosts 'ten', 'none'\. Pass the name"):
        RemoteDataset(url)


def test_ranks_come_from_torch_distributed(url: str, tmp_path: Any) -> None:
    """Rank and world size are those of torch.distributed if it is initialized, otherwise 0 and 1."""
    need("torch")
    import torch.distributed as dist

    assert DataLoader(RemoteDataset(url, "ten")).spec.world_size == 1
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sys.modules["torch.distributed"].get_world_size()
        spec = DataLoader(RemoteDataset(url, "ten")).spec
        assert (spec.rank, spec.world_size) == (0, 1)
    finally:
        dist.destroy_process_group()


def test_what_is_exported() -> None:
    """The list of public names changes only deliberately."""
    assert set(teleloader.__all__) == {
        "AccessDenied", "BatchOutOfRange", "BatchTooLarge", "CorruptFrame", "DataLoader", "DatasetChanged",
        "DecodeError", "EncodeError", "Forbidden", "InvalidSpec", "LengthBalance", "LoaderStats", "LoaderTimeout",
        "Mixture", "Packing",
        "ProtocolError", "RemoteDataset", "RemoteError", "ServerUnavailable", "StateMismatch", "TeleloaderError",
        "TlsError",
        "TooManyErrors", "Unauthorized", "UnknownDataset", "UnknownLoader", "VersionMismatch", "WorkerDied",
        "__version__", "register",
    }  # fmt: skip
    assert all(hasattr(teleloader, name) for name in teleloader.__all__)
