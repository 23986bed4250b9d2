"""Computation of a task's frame: the right samples, or a failure in place of the batch."""

from __future__ import annotations

import re
import subprocess
import time
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from teleloader_server.loading.failures import describe
from teleloader_server.loading.stages import STAGES
from teleloader_shared.codec import MAX_INDICES, MAX_TEXT, Failure
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import LoaderSpec
from tests.conftest import need
from tests.server.bench import Bench, Bulk, Made, raising

Point = namedtuple("Point", ["x", "y"])


# --- The samples of a batch ---------------------------------------------------------------------------------------


def test_a_batch_holds_the_samples_of_its_plan() -> None:
    """A batch has its samples in the plan's order, collated as by torch."""
    bench = Bench(Made(lambda index: {"index": index, "square": np.float32(index**2)}, 100))
    spec = LoaderSpec(dataset="data", batch_size=8, shuffle=True, seed=5, rank=1, world_size=2)
    for k, indices in enumerate(Plan(spec, 100, 3)):
        batch = bench.batch(k, 3, batch_size=8, shuffle=True, seed=5, rank=1, world_size=2)
        assert batch["index"].tolist() == indices.tolist()
        assert batch["square"].dtype == np.float32
        assert batch["square"].tolist() == [float(index**2) for index in indices.tolist()]


def test_indices_are_ints_of_python() -> None:
    """User code receives Python's int as index, as from torch's own loader."""
    kinds = Bench(Made(lambda index: type(index).__name__)).batch(batch_size=4, shuffle=True)
    assert kinds == ["int"] * 4


def test_padding_is_stated() -> None:
    """A batch that repeats samples states their number."""
    assert Bench(Made(lambda index: index, 5)).frame(1, batch_size=2, rank=1, world_size=2).padding == 1
    assert Bench(Made(lambda index: index, 5)).frame(0, batch_size=2, rank=1, world_size=2).padding == 0


def test_a_dataset_that_reads_in_bulk_gets_all_indices_at_once() -> None:
    """`__getitems__` receives the indices of the whole batch as a list of ints."""
    dataset = Bulk()
    assert Bench(dataset).batch(1, batch_size=4).tolist() == [40, 50, 60, 70]
    assert dataset.calls == [[4, 5, 6, 7]]
    assert type(dataset.calls[0]) is list
    assert {type(index) for index in dataset.calls[0]} == {int}


class Whole(Made):
    """Dataset with whole batches."""

    def __init__(self) -> None:
        super().__init__(lambda index: index)
        self.calls: list[Any] = []

    def __getbatch__(self, indices: NDArray[np.int64]) -> dict[str, Any]:
        self.calls.append(indices)
        indices.sort()  # as readers of sorted files do
        return {"square": indices**2, "names": [f"row {i}" for i in indices.tolist()]}


def test_whole_batches_are_requested_from_a_dataset_that_supports_them() -> None:
    """`__getbatch__` receives an int64 array and returns the batch, whose arrays arrive as tensors."""
    dataset = Whole()
    bench = Bench(dataset)
    batch = bench.batch(1, batch_size=4)
    assert (batch["square"].tolist(), batch["names"]) == ([16, 25, 36, 49], ["row 4", "row 5", "row 6", "row 7"])
    assert dataset.calls[0].dtype == np.int64
    assert bench.report is not None
    assert bench.report.samples == 4
    assert bench.batch(indices=[7, 3], batch_size=2)["square"].tolist() == [9, 49]


def test_a_batch_may_do_what_it_likes_with_its_indices() -> None:
    """A dataset may sort its indices in place without changing other batches."""
    bench = Bench(Whole())
    first = bench.batch(batch_size=4, shuffle=True)
    assert first["names"] == bench.batch(batch_size=4, shuffle=True)["names"]


@pytest.mark.parametrize(
    ("hosted", "asked"),
    [
        ({"seeding": "sample"}, {"batch_size": 4}),
        ({"collate": np.array}, {"batch_size": 4}),
        ({"functions": {"m:array": np.array}}, {"batch_size": 4, "collate": "m:array"}),
    ],
    ids=["seeded sample by sample", "collated", "collated on request"],
)
def test_whole_batches_are_not_requested_where_samples_are_needed(
    hosted: dict[str, Any], asked: dict[str, Any]
) -> None:
    """Where single samples are needed, `__getbatch__` is not called."""
    dataset = Whole()
    assert Bench(dataset, **hosted).batch(**asked).tolist() == [0, 1, 2, 3]
    assert Bench(dataset).batch(3, batch_size=None) == 3
    assert dataset.calls == []


def test_single_samples_are_not_read_in_bulk() -> None:
    """Without batches, no bulk method is called."""
    dataset = Bulk()
    assert Bench(dataset).batch(3, batch_size=None) == 3
    assert dataset.calls == []


def test_a_dataset_that_is_seeded_for_each_sample_is_read_sample_by_sample() -> None:
    """No bulk method is called, because seeding must run between two samples."""
    dataset = Bulk()
    assert Bench(dataset, seeding="sample").batch(batch_size=4).tolist() == [0, 1, 2, 3]
    assert dataset.calls == []


def test_a_dataset_may_say_that_it_does_not_read_in_bulk() -> None:
    """`__getitems__ = None` means no bulk reading, as in torch."""

    class Without(Made):
        __getitems__ = None

    assert Bench(Without(lambda index: index)).batch(batch_size=3).tolist() == [0, 1, 2]


def test_a_single_sample_is_converted_and_not_collated() -> None:
    """With batch_size=None, no dimension is added."""
    sample = Bench(Made(lambda index: (np.full(2, index), "s", index))).batch(5, batch_size=None)
    assert sample[0].tolist() == [5, 5]
    assert sample[1:] == ["s", 5]


def test_a_users_collate_function_gets_the_samples() -> None:
    """The collate function receives a list of samples and returns the batch."""
    bench = Bench(Made(lambda index: [0] * index), collate=lambda samples: (type(samples).__name__, len(samples)))
    assert bench.batch(batch_size=4) == ("list", 4)


def test_containers_keep_their_types() -> None:
    """The result of the collate function arrives with the same types."""
    batch = {"t": (1, 2), "n": Point(1, None), "l": ["a", b"b", 2.5, True, 10**30, 1j], "e": {}, "s": {3, (4, "x")}}
    got = Bench(Made(lambda index: 0), collate=lambda samples: batch).batch()
    assert got == batch
    assert type(got["n"]).__name__ == "Point"
    assert [type(item) for item in got["l"]] == [str, bytes, float, bool, int, complex]


def test_a_report_says_how_it_went() -> None:
    """The report has the number of samples and the time per stage."""
    bench = Bench(Made(lambda index: index, 10))
    bench.batch(1, batch_size=8)
    report = bench.report
    assert report is not None
    assert (report.samples, report.failed) == (2, False)
    assert len(report.stages) == len(STAGES)
    assert min(report.stages) >= 0


def test_the_time_of_a_failure_counts_for_its_stage() -> None:
    """A fetch that fails slowly is a slow fetch."""

    def fail(index: int) -> int:
        time.sleep(0.02)
        raise ValueError(index)

    bench = Bench(Made(fail))
    assert isinstance(bench.frame(batch_size=2).content, Failure)
    assert bench.report is not None
    assert bench.report.failed
    assert bench.report.stages[0] >= 0.02
    assert not any(bench.report.stages[1:])


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
@pytest.mark.parametrize("checksum", [True, False])
def test_a_loader_decides_how_its_frames_are_written(compression: Any, checksum: bool) -> None:
    """With or without a checksum and compression, the batch is the same."""
    if compression is not None:
        need({"zstd": "zstandard", "lz4": "lz4"}[compression])
    bench = Bench(Made(lambda index: np.full(5000, index, np.int32)))
    batch = bench.batch(batch_size=3, compression=compression, checksum=checksum)
    assert np.array_equal(batch, np.repeat(np.arange(3), 5000).reshape(3, 5000))
    assert (len(bench.places[0]) < 3 * 5000 * 4) == (compression is not None)


# --- Functions that a loader chooses ------------------------------------------------------------------------------


def test_a_loader_may_choose_among_the_datasets_collate_functions() -> None:
    """A loader selects a function by name in place of the default, for single samples too."""
    bench = Bench(Made(lambda index: index), collate=lambda samples: "usual", functions={"m:sum": sum, "m:str": str})
    assert bench.batch(batch_size=3) == "usual"
    assert bench.batch(batch_size=3, collate="m:sum") == 3
    assert bench.batch(5, batch_size=None, collate="m:str") == "5"


def test_a_function_that_is_not_there_is_a_failure() -> None:
    """A name that the dataset does not list is a failure; no module is searched."""
    bench = Bench(Made(lambda index: index), functions={"m:sum": sum})
    for name in ("builtins:print", "local:0123", "sum"):
        assert bench.failure(collate=name).type == "KeyError"


# --- Failures -----------------------------------------------------------------------------------------------------


def test_an_exception_of_the_dataset_is_a_failure_at_its_batch() -> None:
    """The failure has type, message, traceback, indices and worker; other batches are not affected."""
    bench = Bench(raising(ValueError("sample 2 is damaged")))
    failure = bench.failure(1, batch_size=2)
    assert (failure.type, failure.message) == ("ValueError", "sample 2 is damaged")
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert "raise error" in failure.traceback
    assert failure.traceback.endswith("ValueError: sample 2 is damaged\n")
    assert (failure.indices, failure.worker) == ([2, 3], 3)
    assert [bench.batch(k, batch_size=2).tolist() for k in (0, 2)] == [[0, 1], [4, 5]]


def test_a_traceback_begins_with_the_users_code() -> None:
    """Frames of the server are omitted, also of the exception's cause, unless only the server's code was running."""

    def fail(samples: list[Any]) -> Any:
        try:
            return samples[9]
        except IndexError as error:
            raise ValueError("no sample") from error

    failure = Bench(Made(lambda index: index), collate=fail).failure(batch_size=2)
    files = re.findall(r'File "(.+?)", line', failure.traceback)
    assert files == [__file__, __file__]
    ragged = Bench(Made(lambda index: np.zeros(index))).failure(batch_size=2)
    assert ", in lazy_collate" in ragged.traceback
    assert 'loading/stages.py"' in Bench(Made(lambda index: object), collate=list).failure(batch_size=2).traceback


@pytest.mark.parametrize(
    ("error", "type_name", "message"),
    [
        (KeyError("label"), "KeyError", "'label'"),
        (IndexError("list index out of range"), "IndexError", "list index out of range"),
        (RuntimeError(), "RuntimeError", ""),
        (MemoryError(), "MemoryError", ""),
        (
            UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
            "UnicodeDecodeError",
            "'utf-8' codec can't decode byte 0xff",
        ),
        (FileNotFoundError(2, "No such file", "a.jpg"), "FileNotFoundError", "[Errno 2] No such file: 'a.jpg'"),
        (subprocess.CalledProcessError(1, "x"), "subprocess.CalledProcessError", "Command 'x' returned non-zero"),
        (ExceptionGroup("several", [ValueError("a"), KeyError("b")]), "ExceptionGroup", "several (2 sub-exceptions)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_any_exception_is_reported_by_type_and_text(error: Exception, type_name: str, message: str) -> None:
    """Builtin types are given by name, others with their module."""
    failure = Bench(raising(error)).failure(batch_size=3)
    assert failure.type == type_name
    assert failure.message.startswith(message)
    assert "Traceback" in failure.traceback


def test_a_type_is_named_with_its_module_and_class() -> None:
    """The failure has the type's module and qualified name."""

    class Damaged(Exception):
        pass

    failure = Bench(raising(Damaged("x"))).failure(batch_size=3)
    assert failure.type == f"{__name__}.test_a_type_is_named_with_its_module_and_class.<locals>.Damaged"


def test_the_chain_of_causes_travels() -> None:
    """`raise ... from ...` and exceptions during handling are in the traceback's text."""

    def make(index: int) -> Any:
        found: dict[str, int] = {}
        try:
            return found["the first"]
        except KeyError:
            try:
                return int("the second")
            except ValueError as second:
                raise OSError("the third") from second

    text = Bench(Made(make)).failure().traceback
    assert text.index("the first") < text.index("the second") < text.index("the third")
    assert "The above exception was the direct cause of the following exception" in text
    assert "During handling of the above exception, another exception occurred" in text


def test_notes_travel() -> None:
    """The traceback contains the notes of `add_note`."""
    error = ValueError("damaged")
    error.add_note("in shard 7")
    assert "in shard 7" in Bench(raising(error)).failure(batch_size=3).traceback


class Unprintable(Exception):
    """Exception whose text raises an exception."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class NotText(Exception):
    """Exception whose str() returns a number."""

    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [Unprintable, NotText])
def test_an_exception_that_cannot_be_printed_does_not_hide_itself(kind: type[Exception]) -> None:
    """The failure has the exception's type and traceback."""
    failure = Bench(raising(kind())).failure(batch_size=3)
    assert failure.type == f"{__name__}.{kind.__name__}"
    assert failure.message == f"<{failure.type} whose str() fails>"
    assert "raise error" in failure.traceback


def test_a_huge_message_is_cut() -> None:
    """A message of 10 MiB is truncated."""
    failure = Bench(raising(ValueError("x" * 10 * 2**20))).failure(batch_size=3)
    assert failure.message == "x" * MAX_TEXT
    assert len(failure.traceback) <= MAX_TEXT


def test_the_traceback_of_a_huge_message_still_says_where() -> None:
    """A long message does not displace the traceback's lines."""
    assert "raise error" in Bench(raising(ValueError("x" * 10 * 2**20))).failure(batch_size=3).traceback


def test_many_indices_are_cut() -> None:
    """At most a thousand indices of a batch are included."""
    bench = Bench(Made(lambda index: 1 // (index - 4999), 5000))
    assert bench.failure(batch_size=5000).indices == list(range(MAX_INDICES))


def test_text_that_is_no_unicode_travels_as_escapes() -> None:
    """Characters without UTF-8 encoding, for example in file names, are escaped."""
    failure = Bench(raising(ValueError("bad \udcff name"))).failure(batch_size=3)
    assert failure.message == "bad \\udcff name"
    assert "bad \\udcff name" in failure.traceback


def test_endless_recursion_is_a_failure() -> None:
    """A RecursionError is a failure like other exceptions."""

    def make(index: int) -> Any:
        return make(index)

    assert Bench(Made(make)).failure().type == "RecursionError"


def test_stop_iteration_is_no_end() -> None:
    """StopIteration of a sample becomes an error with the index, since it would end a loop silently."""
    failure = Bench(raising(StopIteration())).failure(batch_size=3)
    assert failure.type == "RuntimeError"
    assert failure.message.startswith("the dataset raised StopIteration at index 2, which would end the epoch early: ")
    assert "StopIteration" in failure.traceback


def test_what_ends_a_process_is_not_held_up() -> None:
    """`sys.exit` in user code exits the worker, which the server notices."""
    with pytest.raises(SystemExit):
        Bench(raising(SystemExit(3))).frame(batch_size=3)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), GeneratorExit(), BaseExceptionGroup("two", [KeyboardInterrupt()])], ids=repr
)
def test_what_else_is_no_exception_is_a_failure_all_the_same(error: BaseException) -> None:
    """KeyboardInterrupt and the like come from user code, as Ctrl-C does not reach workers: they are not retried."""
    assert Bench(raising(error)).failure(batch_size=3).type == type(error).__name__


@pytest.mark.parametrize(
    ("make", "type_name", "message"),
    [
        (
            lambda index: None,
            "TypeError",
            "default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found "
            "<class 'NoneType'>",
        ),
        (lambda index: [0] * index, "RuntimeError", "each element in list of batch should be of equal size"),
        (
            lambda index: np.zeros(index),
            "RuntimeError",
            "stack expects each tensor to be equal size, but got [0] at entry 0 and [1] at entry 1",
        ),
        (lambda index: {"a": 1} if index == 0 else {}, "KeyError", "'a'"),
    ],
    ids=["none", "lists", "arrays", "dicts"],
)
def test_samples_that_cannot_be_collated_are_a_failure(make: Any, type_name: str, message: str) -> None:
    """The failure has torch's text."""
    failure = Bench(Made(make)).failure(batch_size=3)
    assert (failure.type, failure.message) == (type_name, message)


def test_an_exception_of_the_collate_function_is_a_failure() -> None:
    """An exception of the collate function is a failure, like one of the dataset."""

    def collate(samples: list[Any]) -> Any:
        raise ValueError(f"cannot pad {samples}")

    assert Bench(Made(lambda index: index), collate=collate).failure(batch_size=2).message == "cannot pad [0, 1]"


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        (object(), "cannot encode batch: unsupported type object"),
        ({"a": [1, (2, iter([3]))]}, "cannot encode batch['a'][1][1]: unsupported type list_iterator"),
        (Point([1], {"b": print}), "cannot encode batch.y['b']: unsupported type builtin_function_or_method"),
        ([np.array([None])], "cannot encode batch[0]: unsupported dtype object of an array"),
        ([{3}, {Point}], "cannot encode an element of batch[1]: unsupported type type"),
        ({Point: 1}, "cannot encode a key of batch: unsupported type type"),
    ],
    ids=["object", "iterator", "function", "strings", "element", "key"],
)
def test_what_cannot_travel_is_a_failure_with_its_path(batch: Any, path: str) -> None:
    """The message has the path of the unsupported value, and what to do."""
    failure = Bench(Made(lambda index: 0), collate=lambda samples: batch).failure()
    assert failure.type == "teleloader.EncodeError"
    assert failure.message.startswith(path)
    assert re.search("Supported types|Supported dtypes|register the type", failure.message)


def test_an_element_type_that_cannot_travel_is_a_failure_with_its_path_in_the_default_collate_too() -> None:
    """Arrays of samples are checked like any array."""
    failure = Bench(Made(lambda index: {"a": np.zeros(2, np.longdouble)})).failure()
    assert failure.type == "teleloader.EncodeError"
    assert failure.message.startswith("cannot encode batch['a']: unsupported dtype")


def test_a_batch_that_is_too_large_is_a_failure() -> None:
    """The message has the size and what to change; no memory of that size is allocated."""
    bench = Bench(Made(lambda index: np.zeros(2**20, np.uint8)), max_batch_bytes=2**20)
    failure = bench.failure(batch_size=4)
    assert failure.type == "teleloader.BatchTooLarge"
    assert "use a smaller batch_size" in failure.message
    assert max(len(place) for place in bench.places) < 2**20


def test_a_failure_travels_however_small_batches_must_be() -> None:
    """The size limit does not apply to failures, so that a long traceback does not exit the worker."""
    bench = Bench(raising(ValueError("x" * 2000)), max_batch_bytes=2**10)
    assert bench.failure(batch_size=3).type == "ValueError"


def test_a_place_that_cannot_be_had_is_a_failure() -> None:
    """If no memory is available, the batch is a failure, which itself is small."""

    class Full(Bench):
        def _place(self, nbytes: int) -> NDArray[np.uint8]:
            if nbytes > 2**20:
                raise OSError(28, "No space left on device")
            return super()._place(nbytes)

    failure = Full(Made(lambda index: np.zeros(2**20))).failure()
    assert (failure.type, failure.message) == ("OSError", "[Errno 28] No space left on device")


def test_samples_that_change_while_they_are_written_are_a_failure() -> None:
    """A batch that fails during writing is replaced by its failure, in another slot."""

    class Fickle:
        kind, dtype_name, shape = "ndarray", "int64", (3,)

        def write(self, out: NDArray[Any]) -> None:
            raise ValueError("gone")

    bench = Bench(Made(lambda index: 0), collate=lambda samples: Fickle())
    assert bench.failure().message == "gone"
    assert len(bench.places) == 2


def test_a_dataset_that_is_not_hosted_is_a_failure() -> None:
    """A task for another dataset does not end the worker."""
    bench = Bench(Made(lambda index: index))
    assert bench.failure(dataset="other").type == "KeyError"


def test_describe_needs_no_traceback() -> None:
    """An exception that was never raised has no traceback, and is described without one."""
    failure = describe(ValueError("x"), [0, 1, 2], -1)
    assert (failure.type, failure.message, failure.traceback) == ("ValueError", "x", "ValueError: x\n")
    assert (failure.indices, failure.worker) == ([0, 1, 2], -1)
