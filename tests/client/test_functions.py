"""Names that represent collate_fn and worker_init_fn in the loader's spec, and functions that are rejected."""

from __future__ import annotations

import functools
import gc
import importlib
import os.path
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from teleloader import RemoteDataset
from teleloader.functions import name_on_server
from teleloader_shared import local
from tests.client.fake_server import INFO, fake_server
from tests.conftest import label, need

Loader = type("Loader", (), {})
"""Class whose name the error messages contain."""


@pytest.fixture(params=["map", "iterable"])
def info(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the description of a dataset that has its own functions and allows two more."""
    return {
        **INFO,
        "kind": request.param,
        "collate": "statistics:median",
        "worker_init": "statistics:mode",
        "functions": ["statistics:mean", "statistics:stdev"],
    }


@pytest.fixture
def dataset(info: dict[str, Any]) -> Iterator[RemoteDataset]:
    """Yield the dataset, hosted on a fake server."""
    with fake_server(lambda request: 500, info) as url:
        yield RemoteDataset(url)


@pytest.fixture
def served_here(dataset: RemoteDataset) -> Iterator[RemoteDataset]:
    """Yield the dataset, hosted by a server in this process."""
    local.begin_serving(dataset.url, threading.Thread())
    yield dataset
    local.end_serving(dataset.url)


def named(dataset: RemoteDataset, function: Any, argument: str = "collate_fn") -> str | None:
    """Return the name of the function in the loader's spec."""
    return name_on_server(Loader(), argument, function, dataset)


class Made:
    """Callable class."""

    def __call__(self, samples: list[Any]) -> Any:
        """Do nothing."""

    def collate(self, samples: list[Any]) -> Any:
        """Do nothing."""


# --- On another machine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["collate_fn", "worker_init_fn"])
def test_none_is_the_servers_usual_one(dataset: RemoteDataset, argument: str) -> None:
    """Without a function, the spec has none, so that the server uses its default."""
    assert named(dataset, None, argument) is None


def test_the_servers_own_function_is_its_usual_one(dataset: RemoteDataset) -> None:
    """A client that passes the dataset's configured function shares its batches with a client that passes none."""
    assert named(dataset, statistics.median) is None
    assert named(dataset, statistics.mode, "worker_init_fn") is None


@pytest.mark.parametrize("package", ["torch.utils.data", "teleloader_server"])
def test_torchs_own_function_is_the_usual_one(package: str) -> None:
    """The default function of torch, or the server's equal one, has the same effect as no function."""
    need(package.partition(".")[0])
    function = importlib.import_module(package).default_collate
    with fake_server(lambda request: 500) as url:
        assert named(RemoteDataset(url), function) is None


def test_torchs_own_function_is_not_taken_for_another_one(dataset: RemoteDataset) -> None:
    """If the dataset has a collate function, torch's default selects the built-in one, which servers always allow."""
    need("torch")
    from torch.utils.data import default_collate

    assert named(dataset, default_collate) == "default"


def test_a_function_that_the_server_allows_goes_by_its_name(dataset: RemoteDataset) -> None:
    """The spec has the function's module and qualified name, by which the server finds it."""
    assert named(dataset, statistics.mean) == "statistics:mean"


def test_a_worker_init_function_chooses_only_where_the_workers_are_ones_own(dataset: RemoteDataset) -> None:
    """worker_init_fn works with the private workers of iterable-style datasets, not with shared workers."""
    if dataset.iterable:
        assert named(dataset, statistics.mean, "worker_init_fn") == "statistics:mean"
        return
    with pytest.raises(
        ValueError,
        match=r"all loaders share the workers.* Set worker_init in the configuration of .*statistics:mode.*seed them$",
    ):
        named(dataset, statistics.mean, "worker_init_fn")


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (statistics.variance, "statistics:variance"),
        (os.path.join, "posixpath:join"),
        (Made.collate, r"tests\.client\.test_functions:Made\.collate"),
    ],
    ids=["other", "alias", "method"],
)
def test_any_other_function_is_refused(dataset: RemoteDataset, function: Callable[..., Any], name: str) -> None:
    """The error has the configuration entry that would allow the function, and the allowed functions."""
    with pytest.raises(ValueError, match=rf'not allow collate_fn={name} for dataset .*add functions = \["') as no:
        named(dataset, function)
    assert "Allowed functions: statistics:mean, statistics:stdev" in str(no.value)


@pytest.mark.parametrize(
    ("function", "definition"),
    [
        (Made(), "collate = Made(...);"),
        (functools.partial(statistics.mean), "collate = partial(...);"),
        (Made().collate, "collate = Made(...).collate;"),
        (lambda samples: samples, "def collate(samples): ...;"),
    ],
    ids=["object", "partial", "bound method", "lambda"],
)
def test_the_refusal_of_a_callable_without_a_name_shows_how_to_name_it(
    dataset: RemoteDataset, function: Callable[..., Any], definition: str
) -> None:
    """The error has the definition, the entry of the server's configuration, and the argument to pass."""
    with pytest.raises(ValueError, match=r"collate_fn=.* runs on the server") as refused:
        named(dataset, function)
    for text in (definition, 'functions = ["my_package.data:collate"]', 'pass collate_fn="my_package.data:collate"'):
        assert text in str(refused.value)


made = Made()
partial = functools.partial(statistics.mean)
shortest = lambda samples: min(samples, key=len)  # noqa: E731 - a lambda that is a variable of a module
bound = made.collate


@pytest.mark.parametrize("variable", ["made", "partial", "shortest", "bound", "Made"])
def test_a_variable_of_a_module_gives_a_callable_its_name(info: dict[str, Any], variable: str) -> None:
    """Any callable goes by the allowed name of the variable that refers to it, or as the default by no name."""
    name = f"{__name__}:{variable}"
    with fake_server(lambda request: 500, {**info, "functions": ["statistics:mean", name]}) as url:
        assert named(RemoteDataset(url), globals()[variable]) == name
        with pytest.raises(ValueError, match="runs on the server"):
            named(RemoteDataset(url), Made())
    with fake_server(lambda request: 500, {**info, "collate": name}) as url:
        assert named(RemoteDataset(url), globals()[variable]) is None


def test_allowed_names_are_neither_imported_nor_evaluated(info: dict[str, Any]) -> None:
    """A server cannot make the client import modules, evaluate attributes, or name objects of the main script."""
    names = ["antigravity:geohash", "tests.client.test_functions:Made.collate", "__main__:made", "made", ":", "a:b:c"]
    main = sys.modules["__main__"]
    main.made = made  # type: ignore[attr-defined]
    try:
        with (
            fake_server(lambda request: 500, {**info, "functions": names}) as url,
            pytest.raises(ValueError, match="runs on the server"),
        ):
            named(RemoteDataset(url), made)
    finally:
        del main.made
    assert "antigravity" not in sys.modules


def test_a_name_stands_for_the_function(dataset: RemoteDataset) -> None:
    """The name as in the server's configuration has the effect of the function, without its module on this machine."""
    assert named(dataset, "statistics:mean") == "statistics:mean"
    assert named(dataset, "statistics:median") is None
    with pytest.raises(
        ValueError, match=r'not allow collate_fn=no\.such:function .* functions = \["no\.such:function"\]'
    ):
        named(dataset, "no.such:function")


@pytest.mark.parametrize("argument", ["collate_fn", "worker_init_fn"])
@pytest.mark.parametrize("function", [5, "mean", [statistics.mean]], ids=label)
def test_what_cannot_be_called_is_refused(dataset: RemoteDataset, argument: str, function: Any) -> None:
    """Values other than callables and names are rejected."""
    with pytest.raises(
        TypeError, match=f"{argument} must be a function, or the name of a function on the server.*got "
    ):
        named(dataset, function, argument)


# --- In the same process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["collate_fn", "worker_init_fn"])
@pytest.mark.parametrize(
    "function",
    [statistics.variance, lambda samples: samples, Made(), functools.partial(max), Made().collate],
    ids=label,
)
def test_a_server_of_this_process_is_lent_the_function(
    served_here: RemoteDataset, argument: str, function: Callable[..., Any]
) -> None:
    """A server in this process receives the callable itself, for map-style and iterable-style datasets."""
    owner = Loader()
    setattr(owner, argument, function)
    name = name_on_server(owner, argument, function, served_here)
    assert name is not None
    assert name.startswith(local.PREFIX)
    assert local.registered_function(name) is function


def test_a_function_is_lent_for_as_long_as_its_loader_lives(served_here: RemoteDataset) -> None:
    """A lent function is found until its loader is deleted; functions of other loaders stay."""
    owner, other = Loader(), Loader()
    owner.collate_fn = other.collate_fn = max
    names = [name_on_server(whose, "collate_fn", max, served_here) for whose in (owner, other)]
    assert len(set(names)) == 2
    del owner
    gc.collect()
    assert [name is not None and local.registered_function(name) for name in names] == [None, max]


def test_a_server_of_this_process_takes_no_names(served_here: RemoteDataset) -> None:
    """A server in this process has no configuration with names."""
    with pytest.raises(TypeError, match="collate_fn must be a function; got 'statistics:mean'"):
        named(served_here, "statistics:mean")
