"""Cached samples: equal to computed ones, shared by processes and runs, and never a reason for a batch to fail."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import pickle
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server import CachedDataset
from teleloader_server.loading import sample_cache
from teleloader_server.loading.sample_cache import CHECKED, UNUSED_SECONDS, take_counts
from teleloader_shared.errors import EncodeError

MAX_BYTES = 2**24


@pytest.fixture(autouse=True)
def _no_counts() -> None:
    """Reset the counts of earlier tests in this process."""
    take_counts()


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare no samples, so that each is computed once."""
    monkeypatch.setattr(sample_cache, "CHECKED", 0)


class Made:
    """Dataset whose samples a function computes from their index, and which records the indices."""

    def __init__(self, make: Callable[[Any], Any] = lambda index: index, length: int = 100) -> None:
        self.make = make
        self.length = length
        self.computed: list[Any] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        """Return a sample."""
        self.computed.append(index)
        return self.make(index)


class WithEpoch(Made):
    """Dataset whose samples may depend on the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch."""


def cached(dataset: Any, directory: Path, version: str = "1", max_bytes: int = MAX_BYTES) -> CachedDataset:
    """Return a cached dataset."""
    return CachedDataset(dataset, directory, version=version, max_bytes=max_bytes)


def image(index: int) -> Any:
    """Return a sample of 64 KB."""
    return {"image": np.full((256, 256), index % 256, np.uint8), "label": index}


def test_a_sample_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In all runs; only the first samples that a process computes or reads are computed again, and compared."""
    monkeypatch.setattr(sample_cache, "CHECKED", 1)
    first = Made(image)
    for _ in range(2):
        dataset = cached(first, tmp_path)
        assert [dataset[index]["label"] for index in range(3)] == [0, 1, 2]
    assert first.computed == [0, 0, 1, 2, 0]
    second = Made(image)
    dataset = cached(second, tmp_path)
    assert [dataset[index]["label"] for index in (2, 1, 2)] == [2, 1, 2]
    assert second.computed == [2]
    assert len(dataset) == 100


def test_samples_have_the_same_types_whether_computed_or_read(tmp_path: Path) -> None:
    """Also those that the codec converts."""
    value = {
        "array": np.arange(6, dtype=np.float16).reshape(2, 3), "scalar": np.float32(1), "empty": np.zeros((2, 0)),
        "pair": (1, "a"), "items": [b"x", None, 1.5], "ordered": OrderedDict(a=1), "names": np.array(["a", "bc"]),
    }  # fmt: skip
    dataset = cached(Made(lambda index: value), tmp_path)
    computed, read = dataset[0], dataset[0]
    assert repr(computed) == repr(read)
    assert [type(each) for each in computed.values()] == [type(each) for each in read.values()]
    read["array"] += 1  # transforms may change a sample in place
    assert dataset[0]["array"].sum() == 15


def test_samples_have_the_classes_of_the_dataset_before_it_imports_them(tmp_path: Path) -> None:
    """In each process: until the dataset has imported the class of a stored sample, samples are computed."""
    (tmp_path / "classes.py").write_text(
        "from collections import namedtuple; from dataclasses import dataclass\n"
        "Pt = namedtuple('Pt', 'x y')\n"
        "@dataclass\n"
        "class Box:\n"
        "    low: int\n"
    )
    program = (
        "import sys; from teleloader_server import CachedDataset\n"
        "class Points:\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, index):\n"
        "        import classes\n"
        "        return classes.Pt(index, {'box': classes.Box(index)})\n"
        "dataset = CachedDataset(Points(), 'cache', version='1', max_bytes=2**20)\n"
        "found = [dataset[index] for index in range(3)]\n"
        "import classes\n"
        "assert {(type(point), type(point.y['box'])) for point in found} == {(classes.Pt, classes.Box)}, found\n"
        "assert found == [(index, {'box': classes.Box(index)}) for index in range(3)]\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)


def test_tensors_stay_tensors(tmp_path: Path) -> None:
    """In a process that has not imported torch yet, too."""
    torch = pytest.importorskip("torch")
    dataset = cached(Made(lambda index: (torch.arange(3), torch.zeros(2, dtype=torch.bfloat16))), tmp_path)
    for _ in range(2):
        numbers, zeros = dataset[0]
        assert numbers.tolist() == [0, 1, 2]
        assert zeros.dtype == torch.bfloat16
    program = (
        "import sys; sys.path[:] = eval(sys.argv[2])\n"
        "from tests.server.test_sample_cache import Made, cached; from pathlib import Path\n"
        "found = cached(Made(lambda index: 1 / 0), Path(sys.argv[1]))\n"
        "found._unchecked['read'] = 0\n"
        "print(type(found[0][0]).__name__)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, tmp_path, repr(sys.path)], check=True, capture_output=True, text=True
    )
    assert found.stdout == "Tensor\n"


def test_random_numbers_do_not_depend_on_the_cache(tmp_path: Path) -> None:
    """Transforms of a sample draw the same numbers, whether it was computed, read or compared."""

    def make(index: int) -> int:
        return (index + random.randrange(5) + np.random.randint(5)) * 0

    dataset, drawn = cached(Made(make), tmp_path), []
    for index in (0, 0, 1, 0):
        random.seed(3)
        np.random.seed(3)
        assert dataset[index] == 0
        drawn.append((random.random(), np.random.random()))
    assert len(set(drawn)) == 1


def test_samples_that_depend_on_random_numbers_are_detected(tmp_path: Path) -> None:
    """Also if the same seed is set before each sample. The error states where random transforms belong."""
    dataset = cached(Made(lambda index: np.random.random()), tmp_path)
    with pytest.raises(ValueError, match=r"sample 0 for the cache .* depends on random numbers"):
        dataset[0]
    for seed in range(20):
        dataset = cached(Made(lambda index: np.random.random() < 0.5), tmp_path / str(seed))
        with pytest.raises(ValueError, match="depends on random numbers"):
            _read_all(dataset, seed)


def _read_all(dataset: CachedDataset, seed: int) -> None:
    for index in (*range(CHECKED), *range(CHECKED)):
        np.random.seed(100 * seed + index)
        dataset[index]


def test_a_file_of_other_data_is_detected(tmp_path: Path) -> None:
    """Two datasets of the same type, length and version in one directory."""
    cached(Made(), tmp_path)[1]
    with pytest.raises(ValueError, match="data or code have changed"):
        cached(Made(lambda index: -index), tmp_path)[1]


def test_the_file_of_another_version_is_deleted_if_it_is_unused(tmp_path: Path) -> None:
    """An hour after it was opened last: two versions can be in use during an update."""
    old = cached(Made(), tmp_path)
    assert [old[1], old[1]] == [1, 1]
    new = cached(Made(lambda index: -index), tmp_path, version="2")
    assert [new[1], new[1]] == [-1, -1]
    assert [old[1], old[2], old[2]] == [1, 2, 2]
    assert len(list(tmp_path.glob("*.sqlite"))) == 2
    for path in tmp_path.iterdir():
        os.utime(path, (0, time.time() - UNUSED_SECONDS - 1))
    assert cached(Made(lambda index: -index), tmp_path, version="2")[1] == -1
    assert len(list(tmp_path.glob("*.sqlite"))) == 1
    assert [old[1], old[2], old[2]] == [1, 2, 2]


@pytest.mark.usefixtures("unchecked")
def test_integers_and_strings_are_stored(tmp_path: Path) -> None:
    """Samples of other indices are computed each time."""
    made = Made(lambda index: ascii(str(index)))
    dataset = cached(made, tmp_path)
    for index in (1, np.int64(1), "1", "1", (1, 2), (1, 2), 2**70, 2**70, "\ud800", "x" * 501):
        assert dataset[index] == ascii(str(index))
    assert made.computed == [1, "1", (1, 2), (1, 2), 2**70, 2**70, "\ud800", "x" * 501]
    assert take_counts()[:2] == (2, 8)
    assert take_counts()[:2] == (0, 0)


@pytest.mark.usefixtures("unchecked")
def test_the_size_of_the_file_is_limited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Further samples are computed; stored ones are read."""
    caplog.set_level(logging.INFO)
    made = Made(image)
    dataset = cached(made, tmp_path, max_bytes=2**20)
    for _ in range(2):
        assert [dataset[index]["label"] for index in range(50)] == list(range(50))
    assert sum("has reached max_bytes" in text for text in caplog.messages) == 1
    assert 60 < len(made.computed) < 90
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2**20


def _limited(directory: Path, writer: Any) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, 2**19))  # as on a full disk
    dataset = cached(Made(image), directory)
    found = [dataset[index]["label"] for _ in range(2) for index in range(50)]
    writer.send((found == [*range(50)] * 2, take_counts()))


def test_samples_are_computed_if_the_file_cannot_grow(tmp_path: Path) -> None:
    """The stored ones are read as long as the file is readable."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe()
    process = context.Process(target=_limited, args=(tmp_path, writer))
    process.start()
    are_right, counts = reader.recv()
    process.join()
    assert are_right
    assert counts[1] >= 50
    later = cached(Made(image), tmp_path)
    assert [later[index]["label"] for index in range(50)] == list(range(50))


@pytest.mark.parametrize("damage", ["garbage", "directory", "public"])
def test_samples_are_computed_if_the_file_is_unusable(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning is logged; a damaged file is deleted, and a later process writes a new one."""
    directory = tmp_path / "cache"
    cached(Made(image), directory)[0]
    (path,) = directory.glob("*.sqlite")
    if damage == "garbage":
        path.write_bytes(b"garbage" * 10_000)
    elif damage == "directory":
        path.unlink()
        path.mkdir()
    else:
        directory.chmod(0o777)
    dataset = cached(Made(image), directory)
    assert [dataset[index]["label"] for index in (0, 1, 0)] == [0, 1, 0]
    assert sum("samples are computed without it" in text for text in caplog.messages) == 1
    if damage == "garbage":
        later = cached(Made(image), directory)
        take_counts()
        assert [later[0]["label"], later[0]["label"]] == [0, 0]
        assert take_counts().hits == 1


def test_samples_are_read_if_the_file_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on a read-only file system."""
    dataset = cached(Made(image), tmp_path)
    dataset[0]
    assert dataset._file is not None
    dataset._file._database.execute("PRAGMA query_only = ON")
    take_counts()
    assert [dataset[index]["label"] for index in (0, 1, 0, 1)] == [0, 1, 0, 1]
    assert take_counts()[:2] == (2, 2)
    assert sum("no further samples are stored" in text for text in caplog.messages) == 1


@given(st.data())
def test_damaged_samples_are_computed_again(data: st.DataObject) -> None:
    """Each frame has a checksum."""
    with tempfile.TemporaryDirectory() as directory:
        dataset = cached(Made(image), Path(directory))
        dataset[3]
        (path,) = Path(directory).glob("*.sqlite")
        with closing(sqlite3.connect(path)) as database, database:
            (frame,) = database.execute("SELECT frame FROM samples").fetchone()
            damaged = bytearray(frame)
            place = data.draw(st.integers(0, len(frame) - 1))
            damaged[place] ^= data.draw(st.integers(1, 255))
            database.execute("UPDATE samples SET frame = ?", (bytes(damaged),))
        database.close()
        take_counts()
        assert np.array_equal(dataset[3]["image"], image(3)["image"])
        assert take_counts()[:2] == (0, 1)
        assert dataset[3]["label"] == 3
        assert take_counts()[:2] == (1, 0)


def test_a_sample_under_the_key_of_another_one_is_not_returned(tmp_path: Path) -> None:
    """The checksum covers the key: damage to the index of the database is noticed."""
    dataset = cached(Made(image), tmp_path)
    dataset[3]
    (path,) = tmp_path.glob("*.sqlite")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE samples SET item = 4")
    database.close()
    assert dataset[4]["label"] == 4


def _fill(dataset: CachedDataset, first: int) -> None:
    for round_ in range(1000):
        index = (first + round_) % 100
        assert dataset[index]["label"] == index


def test_processes_share_the_file_and_may_be_killed(tmp_path: Path) -> None:
    """Concurrent writers that are killed at any moment leave complete samples."""
    context = multiprocessing.get_context("fork")
    dataset = cached(Made(image), tmp_path)
    assert dataset[99]["label"] == 99  # the children inherit an open file
    processes = [context.Process(target=_fill, args=(dataset, 25 * number)) for number in range(4)]
    for process in processes:
        process.start()
    while next(tmp_path.glob("*.sqlite")).stat().st_size < 2**20:
        assert any(process.is_alive() for process in processes)
    for process in processes:
        process.kill()
        process.join()
    take_counts()
    assert [dataset[index]["label"] for index in range(100)] == list(range(100))
    assert take_counts().hits > 0
    with closing(sqlite3.connect(next(tmp_path.glob("*.sqlite")))) as database, database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


def _append(dataset: CachedDataset, numbers: range) -> None:
    assert dataset._file is None, "the file is closed for the fork"
    for index in numbers:
        assert dataset[index]["label"] == index


def test_a_forked_process_locks_the_file_itself(tmp_path: Path) -> None:
    """Also after its parent, which had the file open, has closed it: no sample is lost, and none is wrong."""
    context = multiprocessing.get_context("fork")
    dataset = cached(Made(image, 400), tmp_path, max_bytes=2**27)
    dataset[0]
    processes = [
        context.Process(target=_append, args=(dataset, range(100 * k, 100 * k + 100))) for k in range(4)
    ]  # fmt: skip
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        other = cached(Made(image, 400), tmp_path, max_bytes=2**27)
        assert other[0]["label"] == 0
        del other, dataset.__dict__["_file"]
        dataset._file = None
    assert [process.exitcode for process in processes] == [0] * 4
    with closing(sqlite3.connect(next(tmp_path.glob("*.sqlite")))) as database, database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert database.execute("SELECT count(*) FROM samples").fetchone()[0] > 300
    database.close()


def test_copies_open_the_file_themselves(tmp_path: Path) -> None:
    """Pickles and deep copies, as for workers that are spawned."""
    dataset = cached(Made(image), tmp_path)
    dataset[0]
    dataset.dataset.make = str
    for other in (pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)):
        other._unchecked["read"] = 0
        assert other[0]["label"] == 0


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    """The error states what is expected."""
    with pytest.raises(TypeError, match="cannot cache a dataset of type list_iterator: expected __getitem__"):
        cached(iter([1]), tmp_path)
    with pytest.raises(TypeError, match="it has set_epoch"):
        cached(WithEpoch(), tmp_path)
    with pytest.raises(ValueError, match="expected at least 1048576"):
        cached([1], tmp_path, max_bytes=1000)
    with pytest.raises(EncodeError, match="object"):
        cached(Made(lambda index: object()), tmp_path)[0]
