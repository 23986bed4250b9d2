"""The contract's rules on failures: errors in the training loop, and continuation after them."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from teleloader import DataLoader, LoaderTimeout, RemoteDataset, RemoteError, ServerUnavailable, WorkerDied
from teleloader_server import serve
from tests.conftest import StartServer, eventually
from tests.end_to_end.contract import (
    IterableDataset,
    Made,
    Numbers,
    both,
    both_raise,
    get_worker_info,
    ours,
    torch,
    torch_is_there,
    torchs,
)

__all__ = ["torch_is_there"]


class SeveralArguments(Exception):
    """Exception whose constructor needs more than a message."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class KeywordOnly(Exception):
    """Exception whose constructor has no positional argument."""

    def __init__(self, *, why: str) -> None:
        super().__init__(why)


class WithMessage(Exception):
    """Exception with an attribute `message`, which torch passes by keyword."""

    message = "a class attribute"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message


class Custom(ValueError):
    """User-defined exception."""


def _raising(error: Exception, at: int = 2) -> Made:
    def sample(index: int) -> int:
        if index == at:
            raise error
        return index

    return Made(sample, 4)


def _outcomes(loader: Any) -> list[Any]:
    """Return all batches, with exceptions in place of some."""
    iterator, found = iter(loader), []
    while True:
        try:
            found.append(next(iterator).tolist())
        except StopIteration:
            return found
        except Exception as error:  # noqa: BLE001 - that is the test
            found.append((type(error), str(error)))


def _head(text: str) -> str:
    """Return the lines of a message that are independent of paths: the first one, and the traceback's last one."""
    caught, _, rest = text.partition("\nOriginal Traceback (most recent call last):\n")
    theirs, _, _ = rest.partition("\n\nThe error occurred ")
    return f"{caught} ... {theirs.rstrip().splitlines()[-1:]}"


ERRORS: list[Exception] = [
    ValueError("damaged"), KeyError("no such key"), IndexError("no such index"), OSError(5, "disk"), Custom("custom"),
    SeveralArguments(7, "several"), KeywordOnly(why="keyword"), WithMessage("message"), RuntimeError("two\nlines"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), AssertionError(), NotImplementedError("later"),
    ZeroDivisionError("zero"), MemoryError("full"), AttributeError("none"), FileNotFoundError(2, "gone", "a.png"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_have_torchs_type_and_text(error: Exception) -> None:
    """A3: the exception is torch's: ``Caught X in DataLoader worker process 0.`` and the whole traceback."""
    expected = _outcomes(torchs(_raising(error), num_workers=1))
    with ours(_raising(error), num_workers=1) as loader:
        got = _outcomes(loader)
    assert [found for found in got if isinstance(found, list)] == [[0], [1], [3]]
    (kind, text), (theirs, their_text) = got[2], expected[2]
    assert kind is theirs
    assert _head(text) == _head(their_text)


def test_an_error_says_where_it_happened() -> None:
    """A3: the error has batch, indices, server, worker, and the failed line of the user's code."""
    with serve(_raising(Custom("damaged"), at=5), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 2, sampler=[0, 1, 5, 2], num_workers=1)
        with pytest.raises(Custom) as raised:
            list(loader)
    text = str(raised.value)
    assert text.startswith("Caught Custom in DataLoader worker process 0.\nOriginal Traceback (most recent call last):")
    assert "raise error" in text
    assert Path(__file__).name in text
    assert re.search(r"batch 1 of epoch 0, with the indices \[5, 2\], on " + re.escape(url), text)


def test_key_errors_keep_their_lines() -> None:
    """A3: the traceback in a KeyError is readable, not one escaped line."""
    with ours(_raising(KeyError("name")), num_workers=1) as loader, pytest.raises(KeyError) as raised:
        list(loader)
    assert len(str(raised.value).splitlines()) > 4


def test_errors_of_a_server_elsewhere(start_server: StartServer) -> None:
    """A3: builtin types keep their type; others become RemoteError, because nothing is imported."""
    server = start_server(
        "builtin=tests.end_to_end.hosted:failing", "own=tests.end_to_end.test_contract_errors:own_failing"
    )
    with pytest.raises(ValueError, match="Caught ValueError in DataLoader worker process"):
        list(DataLoader(RemoteDataset(server.url, "builtin")))
    with pytest.raises(RemoteError, match="Caught Custom in DataLoader worker process") as raised:
        list(DataLoader(RemoteDataset(server.url, "own")))
    assert raised.value.type == "tests.end_to_end.test_contract_errors.Custom"


def own_failing() -> Made:
    """Return a dataset that raises a user-defined exception."""
    return _raising(Custom("damaged"))


def test_without_workers_errors_come_from_the_same_process() -> None:
    """A3: with ``num_workers=0`` a debugger stops in the dataset, in this process."""
    seen = []

    def sample(index: int) -> int:
        seen.append((os.getpid(), index))
        raise ValueError("damaged")

    with ours(Made(sample, 1), serve_with={"num_workers": 0}) as loader, pytest.raises(ValueError, match="damaged"):
        list(loader)
    assert seen == [(os.getpid(), 0)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_errors_of_init_come_with_the_first_batch(num_workers: int) -> None:
    """A6: ``Caught ValueError in DataLoader worker process 0.``, in place of the first batch."""

    def init(worker: int) -> None:
        raise ValueError(f"no init in {worker}")

    expected = _outcomes(torchs(Numbers(4), num_workers=num_workers, worker_init_fn=init))
    with ours(Numbers(4), num_workers=num_workers, worker_init_fn=init) as loader:
        got = _outcomes(loader)
    # in torch, later batches of a worker fail because its fetcher does not exist
    mine, theirs = got[:num_workers], expected[:num_workers]
    assert [(kind, _head(text)) for kind, text in mine] == [(kind, _head(text)) for kind, text in theirs]
    assert all(kind is ValueError for kind, _ in got)


@pytest.mark.parametrize("what", ["dataset", "collate_fn", "stream"])
def test_the_iterator_survives_an_error(what: str) -> None:
    """A28: only the failed batch is missing, and others follow; a stream that raised has ended."""

    def collate(samples: list[int]) -> Any:
        if 2 in samples:
            raise ValueError("damaged")
        return torch.tensor(samples)

    class Stream(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            yield 0
            yield 1
            raise ValueError("damaged")

    dataset: Any = {"dataset": _raising(ValueError("damaged")), "collate_fn": Numbers(4), "stream": Stream()}[what]
    arguments: dict[str, Any] = {"collate_fn": collate} if what == "collate_fn" else {}
    for num_workers in (0, 1):
        expected = _outcomes(torchs(dataset, num_workers=num_workers, **arguments))
        with ours(dataset, num_workers=num_workers, **arguments) as loader:
            got = _outcomes(loader)
        assert [item if isinstance(item, list) else item[0] for item in got] == [
            item if isinstance(item, list) else item[0] for item in expected
        ]


def test_index_errors_are_errors() -> None:
    """A19: an IndexError of ``__getitem__`` is raised as such; it does not end the epoch."""
    for num_workers in (0, 1):
        with ours(_raising(IndexError("beyond")), num_workers=num_workers) as loader:
            outcomes = _outcomes(loader)
        assert [found for found in outcomes if isinstance(found, list)] == [[0], [1], [3]]
        assert outcomes[2][0] is IndexError


def test_stop_iteration_does_not_end_the_epoch() -> None:
    """A19: a RuntimeError names the sample, and the rest follows, whereas torch loses it silently."""
    assert _outcomes(torchs(_raising(StopIteration()), num_workers=1)) == [[0], [1]]
    with ours(_raising(StopIteration()), num_workers=1) as loader:
        outcomes = _outcomes(loader)
    assert [found for found in outcomes if isinstance(found, list)] == [[0], [1], [3]]
    assert outcomes[2][0] is RuntimeError
    assert "raised StopIteration at index 2" in outcomes[2][1]


def test_errors_of_a_sampler_come_in_their_place() -> None:
    """A11: a sampler's exception is raised unchanged on the client, after the batches before it."""

    def broken() -> Iterator[int]:
        yield 0
        yield 1
        raise Custom("the sampler")

    for num_workers in (0, 2):
        results = []
        for make in (torchs, None):
            if make is not None:
                results.append(_outcomes_until_error(make(Numbers(), sampler=broken(), num_workers=num_workers)))
                continue
            with ours(Numbers(), sampler=broken(), num_workers=num_workers) as loader:
                results.append(_outcomes_until_error(loader))
        assert results[1] == ([0, 1], Custom, "the sampler")
        assert results[0][1:] == results[1][1:]


def _outcomes_until_error(loader: Any) -> tuple[list[int], Any, str]:
    found: list[int] = []
    try:
        found.extend(batch.item() for batch in loader)
    except Exception as error:  # noqa: BLE001 - that is the test
        return found, type(error), str(error)
    return found, None, ""


# -- functions that cannot be used


class Locked:
    """Object that cannot be pickled."""

    def __init__(self) -> None:
        self.lock = multiprocessing.get_context("fork").Lock()

    def collate(self, samples: list[int]) -> list[int]:
        """Return the samples: a bound method."""
        with self.lock:
            return [-sample for sample in samples]


@pytest.mark.parametrize("form", ["bound method", "lambda", "closure", "partial", "callable object"])
def test_any_callable_collates_in_the_process_that_serves(form: str) -> None:
    """A25: bound methods (also of objects that cannot be pickled), lambdas and closures work with a local server."""
    import functools

    locked, factor = Locked(), -1

    def closure(samples: list[int]) -> list[int]:
        return [factor * sample for sample in samples]

    class Callable:
        def __call__(self, samples: list[int]) -> list[int]:
            return closure(samples)

    collate: Any = {
        "bound method": locked.collate,
        "lambda": lambda samples: closure(samples),
        "closure": closure,
        "partial": functools.partial(lambda sign, samples: [sign * sample for sample in samples], -1),
        "callable object": Callable(),
    }[form]
    expected = both(Numbers(5), batch_size=2, num_workers=2, collate_fn=collate, epochs=1)[0]
    assert expected == [[0, -1], [-2, -3], [-4]]
    with ours(Numbers(5), batch_size=2, num_workers=2, serve_with={"collate_fn": collate}) as loader:
        assert list(loader) == expected


def test_functions_that_would_have_to_travel_are_refused_at_construction(start_server: StartServer) -> None:
    """A25: functions are never pickled for a remote server, which allows them by name; the error states how."""
    server = start_server("numbers=tests.end_to_end.contract:Numbers")
    dataset = RemoteDataset(server.url)
    for function in (lambda samples: samples, Locked().collate, _head):
        with pytest.raises(ValueError, match=r"collate_fn=.* (runs on the server|for dataset)") as raised:
            DataLoader(dataset, collate_fn=function)  # type: ignore[arg-type]
        assert function.__qualname__ in str(raised.value)


def test_functions_of_a_script_are_refused_with_a_reason(start_server: StartServer) -> None:
    """A40: the server cannot import a function of ``__main__``: the error states to move it to a module."""
    server = start_server("numbers=tests.end_to_end.contract:Numbers")

    def collate(samples: list[int]) -> list[int]:
        return samples

    collate.__module__, collate.__qualname__ = "__main__", "collate"
    with pytest.raises(ValueError, match="__main__") as raised:
        DataLoader(RemoteDataset(server.url), collate_fn=collate)
    assert "module" in str(raised.value)
    assert 'functions = ["__main__:' not in str(raised.value), "that would not help"


# -- unsupported values


def _uncollated(dataset: Any) -> Any:
    return ours(dataset, num_workers=1, collate_fn=lambda samples: samples)


def test_accelerator_tensors_are_refused_with_their_place() -> None:
    """A32: tensors of workers on another device than the CPU raise an error with their path and ``device``."""
    meta = Made(lambda i: {"image": [torch.zeros(2, device="meta")]}, 1)
    place = re.escape("batch[0]['image'][0]")
    with _uncollated(meta) as loader, pytest.raises(TypeError, match=place) as raised:
        list(loader)
    assert "meta" in str(raised.value)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda i: {"meta": [0, 1, sys.stderr]}, "batch[0]['meta'][2]"),
        (lambda i: (i, {"function": _head}), "batch[0][1]['function']"),
        (lambda i: [object()], "batch[0][0]"),
    ],
)
def test_what_cannot_travel_is_named(make: Any, path: str) -> None:
    """A29: the error for files, functions and arbitrary objects has their path in the batch."""
    with _uncollated(Made(make, 2)) as loader, pytest.raises(TypeError, match=re.escape(path)):
        list(loader)


# -- time, and death


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_finished_batch_does_not_wait_for_the_next_one(num_workers: int) -> None:
    """A42: a batch arrives as soon as it is ready, even if its worker has started a slow one."""
    gate = multiprocessing.get_context("fork").Event()

    def sample(index: int) -> int:
        if index > 0:
            gate.wait()
        return index

    with ours(Made(sample, 4), num_workers=num_workers, timeout=20) as loader:
        iterator = iter(loader)
        try:
            assert next(iterator).item() == 0
        finally:
            gate.set()
        assert [batch.item() for batch in iterator] == [1, 2, 3]


def test_a_timeout_is_raised_and_the_iterator_continues() -> None:
    """A42: a slow batch raises ``DataLoader timed out after 4 seconds``, and can be received afterwards."""
    gate = multiprocessing.get_context("fork").Event()

    def sample(index: int) -> int:
        if index == 1:
            gate.wait()
        return index

    with ours(Made(sample, 4), num_workers=2, timeout=4) as loader:
        iterator = iter(loader)
        assert next(iterator).item() == 0
        with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 4 seconds$") as raised:
            next(iterator)
        assert isinstance(raised.value, LoaderTimeout)
        gate.set()
        assert [batch.item() for batch in iterator] == [1, 2, 3]


def test_without_a_timeout_slow_data_are_waited_for_and_dead_servers_are_not(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A42: timeout=0 waits as long as the server runs; its exit is noticed whatever the timeout."""
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    server = start_server("slow=tests.end_to_end.hosted:slow")
    loader = DataLoader(RemoteDataset(server.url, reconnect_timeout=1))
    iterator = iter(loader)
    eventually(lambda: any(worker["state"] == "busy" for worker in server.stats()["workers"]))
    server.kill()
    with pytest.raises(ServerUnavailable, match="did not send batch 0"):
        next(iterator)


def _dying(how: str, at: int = 1) -> Made:
    def sample(index: int) -> int:
        if index == at:
            if how == "exit":
                sys.exit(3)
            if how == "_exit":
                os._exit(4)
            os.kill(os.getpid(), getattr(signal, how))
        return index

    return Made(sample, 4)


@pytest.mark.parametrize("how", ["exit", "_exit", "SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_batch_that_ends_its_workers_is_an_error(how: str) -> None:
    """A42: the error has the reason of the exits; other batches arrive, because workers are replaced."""
    with ours(_dying(how), num_workers=2) as loader:
        outcomes = _outcomes(loader)
    assert [found for found in outcomes if isinstance(found, list)] == [[0], [2], [3]]
    kind, text = outcomes[1]
    assert issubclass(kind, RuntimeError)
    assert kind is WorkerDied
    assert text.startswith("DataLoader worker")
    assert {"exit": "code 3", "_exit": "code 4"}.get(how, how) in text
    assert "indices [1]" in text


def test_a_worker_that_dies_once_costs_nothing() -> None:
    """A22: another worker recomputes the batch, which arrives once, in its place."""
    died = multiprocessing.get_context("fork").Event()

    def sample(index: int) -> int:
        if index == 7 and not died.is_set():
            died.set()
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    with ours(Made(sample, 20), num_workers=2) as loader:
        assert [batch.item() for batch in loader] == [*range(20)]
    assert died.is_set()


def test_a_dead_workers_shard_goes_on_elsewhere() -> None:
    """A14: a replacement continues the shard at the same sample."""
    died = multiprocessing.get_context("fork").Event()

    class Shards(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            number = get_worker_info().id
            for i in range(6):
                if number == 1 and i == 3 and not died.is_set():
                    died.set()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield 10 * number + i

    with ours(Shards(), num_workers=2, worker_init_fn=lambda _: None) as loader:
        assert [batch.item() for batch in loader] == [10 * j + i for i in range(6) for j in (0, 1)]


def test_an_iterator_cannot_be_pickled() -> None:
    """A20: pickling an iterator raises torch's error."""
    import pickle

    with ours(Numbers()) as loader, pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(iter(loader))


def test_datasets_without_a_length() -> None:
    """A18: a map-style dataset without ``__len__`` is rejected at construction, unless a sampler yields the indices."""

    class Mapping(torch.utils.data.Dataset):  # type: ignore[misc]
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(TypeError, match=r"object of type 'Mapping' has no len\(\)"):
        list(torchs(Mapping()))
    with serve(Mapping()) as url:
        with pytest.raises(TypeError, match=r"object of type 'Mapping' has no len\(\)"):
            DataLoader(RemoteDataset(url))
        assert [batch.tolist() for batch in DataLoader(RemoteDataset(url), 2, sampler=[3, 4, 5])] == [[3, 4], [5]]
    both_raise(TypeError, lambda make, data: make(data, shuffle=True), Mapping())
