"""Indices from clients: which ones reach a dataset, and the effect of an invalid one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server import serve
from teleloader_shared import codec
from teleloader_shared.codec import BatchId, Failure
from tests.conftest import ROOT, ServerProcess

RECORDING = '''
from pathlib import Path

class Recording:
    """Writes down each index that reaches it."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        with Path("indices").open("a") as file:
            file.write(f"{index!r}\\n")
        return str(index)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the folder of the server's datasets, which log their indices there."""
    path = tmp_path_factory.mktemp("hosted")
    (path / "recording.py").write_text(RECORDING)
    (path / "loader.toml").write_text(
        '[datasets.strict]\nfactory = "recording:Recording"\n'
        '[datasets.lenient]\nfactory = "recording:Recording"\nindices = "any"\n'
    )
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    """Run a server with one dataset of the default index rule, and one of the other rule."""
    import os

    paths = os.pathsep.join([str(ROOT / "client"), str(ROOT / "server"), str(ROOT / "shared"), str(ROOT), str(folder)])
    running = ServerProcess(
        "--port", "0", "--config", "loader.toml", "--num-workers", "1",
        folder=folder, environment={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    yield running
    assert running.end() == 0
    assert "Traceback" not in "".join(running.log)


def outcome(url: str, dataset: str, indices: Any, **spec: Any) -> Any:
    """Request a batch of indices; return the batch, a failure, or the problem code of a rejection."""
    with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
        fields = {"dataset": dataset, "order": "client", "session": "s", "batch_size": 8, **spec}
        key = client.post("/v1/loaders", json=fields).raise_for_status().json()["key"]
        body = codec.to_bytes(BatchId(key, 0, 0), indices)
        answer = client.post(f"/v1/loaders/{key}/epochs/0/batches", content=body)
        client.delete(f"/v1/loaders/{key}")
    if answer.status_code != 200:
        return answer.json()["code"]
    return codec.read(codec.Bits(np.frombuffer(answer.content, np.uint8))).content


def reached(folder: Path) -> list[str]:
    """Return the indices that reached the dataset since the last call."""
    path = folder / "indices"
    found = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


@pytest.mark.parametrize("index", [-1, 10, 2**62, -(2**63)])
def test_no_index_out_of_range_reaches_a_dataset(server: ServerProcess, folder: Path, index: int) -> None:
    """A configured server reports an `IndexError` in place of the batch, as torch's own datasets raise."""
    for indices, spec in (([0, index], {}), (np.array([0, index]), {}), (index, {"batch_size": None})):
        failure = outcome(server.url, "strict", indices, **spec)
        assert isinstance(failure, Failure)
        assert failure.type == "IndexError"
        assert f"index {index} is out of range: dataset 'strict' has 10 samples" in failure.message
    assert reached(folder) == []


@pytest.mark.parametrize("index", ["../../../../etc/hostname", 10**30, 1.5, None, True, (1, 2), b"x", [1]], ids=repr)
def test_nothing_but_integers_reaches_a_dataset(server: ServerProcess, folder: Path, index: Any) -> None:
    """Indices other than integers are rejected with 422, unless the dataset's configuration allows them."""
    assert outcome(server.url, "strict", [index]) == "InvalidSpec"
    assert outcome(server.url, "strict", index, batch_size=None) == "InvalidSpec"
    assert reached(folder) == []


def test_a_dataset_can_opt_in_to_any_index(server: ServerProcess, folder: Path) -> None:
    """With `indices = "any"`, a dataset receives every type of index that a frame can contain."""
    indices = ["a/b", -1, 10**30, (1, 2), None]
    assert outcome(server.url, "lenient", indices) == [str(index) for index in indices]
    assert reached(folder) == [repr(index) for index in indices]


def test_a_loader_raises_the_error_at_its_batch(server: ServerProcess) -> None:
    """Batches before and after the one with an index out of range arrive."""
    loader = DataLoader(RemoteDataset(server.url, "strict"), 2, sampler=[0, 1, 2, 10, 4, 5], output="numpy")
    batches = iter(loader)
    assert next(batches) == ["0", "1"]
    with pytest.raises(IndexError, match="index 10 is out of range: dataset 'strict'"):
        next(batches)
    assert next(batches) == ["4", "5"]


class Refusing:
    """Dataset whose samples all fail."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: Any) -> int:
        raise ValueError(f"no sample {str(index)[:3]}")


@pytest.mark.parametrize("index", [10**30, -(10**30), 2**64, -(2**63) - 1])
def test_a_failure_at_an_index_of_many_digits_is_sent(index: int) -> None:
    """An object may be indexed by any value; an index that does not fit into a failure is omitted."""
    with serve(Refusing(), num_workers=1) as url, httpx.Client(base_url=url, trust_env=False) as client:
        shared = client.get("/stats").json()["workers"]
        failure = outcome(url, "dataset", [3, index, 4], num_workers=1)
        assert isinstance(failure, Failure)
        assert (failure.type, failure.message) == ("ValueError", "no sample 3")
        assert failure.indices == [3, 4]
        stats = client.get("/stats").json()
    assert stats["workers"] == shared or stats["server"]["worker_restarts"] == 0
    assert stats["server"]["worker_restarts"] == 0
