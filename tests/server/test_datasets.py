"""Creation of a dataset from a configured name, and errors for invalid ones."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from teleloader_server.config import ConfigError, DatasetConfig
from teleloader_server.limits import default_num_workers
from teleloader_server.loading.collate import Stack
from teleloader_server.loading.datasets import HostedDataset, host, is_factory, open_dataset, open_datasets, resolve
from tests.conftest import label, need

Module = Callable[[str, str], None]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """Write modules that can be imported in this test."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, text: str) -> None:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return write


class Squares:
    """Map-style dataset."""

    def __init__(self, length: int = 10) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index * index


class Stream:
    """Iterable-style dataset."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class WithoutLength:
    """Map-style dataset without a length."""

    def __getitem__(self, index: int) -> int:
        return index


def refusal(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """Return the error's text."""
    with pytest.raises(ConfigError) as refused:
        function(*arguments, **named)
    return str(refused.value)


# --- Finding code by its name -------------------------------------------------------------------------------------


def test_code_is_found_by_module_and_name(module: Module) -> None:
    """Names may refer to modules in packages, and to attributes of attributes."""
    module("found_here.data", "class Sets:\n    train = [1, 2]\n")
    assert resolve("found_here.data:Sets.train", "factory") == [1, 2]


def test_a_module_that_is_not_there_is_refused() -> None:
    """The error states what the module is for, and the searched folders."""
    assert refusal(resolve, "no_such_module:x", "factory of dataset 'train'") == (
        "factory of dataset 'train': module 'no_such_module' not found in the current folder ("
        f"{Path.cwd()}) or in the Python environment {sys.prefix}. Check the name, or install the module"
    )


@pytest.mark.parametrize(
    "name", ["json.no_such_module", "no_such_package.module", "json.decoder.deeper", "json..decoder"]
)
def test_a_module_inside_a_package_that_is_not_there_is_refused(name: str) -> None:
    """The error has the whole name, whichever part of it is wrong."""
    assert refusal(resolve, f"{name}:x", "collate of 'train'").startswith(
        f"collate of 'train': module {name!r} not found"
    )


@pytest.mark.parametrize("path", ["nothing", "nothing.more", "JSONDecoder.nothing", "JSONDecoder."])
def test_a_name_that_the_module_has_not_is_refused(path: str) -> None:
    """The error contains the whole path."""
    assert (
        refusal(resolve, f"json:{path}", "factory of 'a'") == f"factory of 'a': module 'json' has no attribute {path!r}"
    )


def test_a_module_that_misses_another_one_says_so_itself(module: Module) -> None:
    """A missing dependency of the user's module raises its own error, not that of a wrong name."""
    module("needs_more", "import not_installed_anywhere")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        resolve("needs_more:x", "factory")


def test_an_error_in_the_users_module_comes_as_it_is(module: Module) -> None:
    """The error is raised with its own traceback."""
    module("is_broken", "1 / 0")
    with pytest.raises(ZeroDivisionError):
        resolve("is_broken:x", "factory")


# --- Building -----------------------------------------------------------------------------------------------------


def test_a_class_or_a_function_makes_the_dataset_and_an_object_is_it() -> None:
    """Classes and functions are called to create the dataset; a callable dataset is used itself."""

    class CalledToo(Squares):
        def __call__(self) -> None:
            raise AssertionError

    assert is_factory(Squares)
    assert is_factory(Stream)
    assert is_factory(lambda: Squares())
    assert is_factory(functools.partial(Squares, 3))
    assert not is_factory(Squares())
    assert not is_factory(CalledToo())
    assert not is_factory([1, 2, 3])


def test_an_iterable_dataset_that_can_be_called_besides_is_a_dataset() -> None:
    """A callable iterable-style dataset is not taken for a factory, like a map-style one."""

    class CalledToo(Stream):
        def __call__(self) -> None:
            raise AssertionError

    assert not is_factory(CalledToo())


def test_a_dataset_is_built_as_its_configuration_says(module: Module) -> None:
    """The factory gets its arguments; collate and worker_init are found."""
    module(
        "builds_one",
        "def make(length, step=1): return range(0, length * step, step)\n"
        "def collate(samples): return sum(samples)\n"
        "class Init:\n    @staticmethod\n    def run(number): pass\n",
    )
    hosted = open_dataset(
        DatasetConfig(
            name="train",
            factory="builds_one:make",
            kwargs={"length": 5, "step": 2},
            collate="builds_one:collate",
            worker_init="builds_one:Init.run",
            version="7",
            seeding="sample",
        )
    )
    assert list(hosted.dataset) == [0, 2, 4, 6, 8]
    assert hosted.collate_batch([1, 2, 3]) == 6
    assert hosted.worker_init is not None
    info = hosted.info
    assert (info.name, info.kind, info.length, info.version) == ("train", "map", 5, "7")
    assert (info.collate, info.worker_init, info.seeding) == ("builds_one:collate", "builds_one:Init.run", "sample")
    assert (info.type, info.functions, info.cpus) == ("range", [], default_num_workers())


def test_an_object_of_a_module_is_hosted_as_it_is(module: Module) -> None:
    """An object needs no factory."""
    module("has_one", "numbers = [3, 4, 5]")
    hosted = open_dataset(DatasetConfig(name="n", factory="has_one:numbers"))
    assert hosted.dataset == [3, 4, 5]
    assert hosted.info.length == 3


def test_arguments_for_what_takes_none_are_refused(module: Module) -> None:
    """Arguments for an object that is not called are an error."""
    module("takes_none", "numbers = [3, 4, 5]")
    assert "kwargs" in refusal(
        open_dataset, DatasetConfig(name="n", factory="takes_none:numbers", kwargs={"root": "/data"})
    )


@pytest.mark.parametrize("field", ["collate", "worker_init"])
def test_a_function_that_is_none_is_refused(module: Module, field: str) -> None:
    """An invalid function is rejected when the server starts, not when the first batch fails."""
    module("no_function", "numbers = [3, 4, 5]\nsetting = 'fast'\n")
    stated: dict[str, Any] = {"name": "n", "factory": "no_function:numbers", field: "no_function:setting"}
    assert field in refusal(open_dataset, DatasetConfig(**stated))


def test_the_default_collates_as_torch_does() -> None:
    """Without a collate function batches are stacked, and single samples converted."""
    hosted = host(Squares(), name="n")
    assert isinstance(hosted.collate_batch([np.zeros(2), np.ones(2)]), Stack)
    assert hosted.convert_sample(5) == 5


def test_a_collate_function_also_converts_single_samples() -> None:
    """Without batches, the collate function is called with the sample itself, as in torch."""
    hosted = host(Squares(), name="n", collate=lambda samples: ("collated", samples))
    assert hosted.collate_batch([1, 2]) == ("collated", [1, 2])
    assert hosted.convert_sample(5) == ("collated", 5)


def test_functions_that_clients_may_choose_are_found_by_their_names(module: Module) -> None:
    """Clients get the list of functions, which replace the default for batches, single samples and workers."""
    module(
        "offers_some",
        "numbers = [3, 4, 5]\ndef usual(samples): return 'usual'\ndef other(samples): return ['other', samples]\n",
    )
    names = ["offers_some:other", "builtins:print"]
    hosted = open_dataset(
        DatasetConfig(name="n", factory="offers_some:numbers", collate="offers_some:usual", functions=names)
    )
    assert hosted.info.functions == names
    assert (hosted.collate_batch([1]), hosted.convert_sample(1)) == ("usual", "usual")
    assert hosted.collate_batch([1], "offers_some:other") == ["other", [1]]
    assert hosted.convert_sample(1, "offers_some:other") == ["other", 1]
    assert hosted.worker_init_of(None) is None
    assert hosted.worker_init_of("builtins:print") is print
    assert hosted.info.worker_init is None


def test_a_function_that_clients_may_choose_must_be_there(module: Module) -> None:
    """A missing function is rejected when the server starts, not when a client selects it."""
    module("offers_none", "numbers = [3, 4, 5]\nsetting = 'fast'\n")
    stated: dict[str, Any] = {"name": "n", "factory": "offers_none:numbers"}
    assert refusal(open_dataset, DatasetConfig(**stated, functions=["offers_none:gone"])) == (
        "functions of dataset 'n': module 'offers_none' has no attribute 'gone'"
    )
    assert "invalid offers_none:setting of dataset 'n': expected a callable" in refusal(
        open_dataset, DatasetConfig(**stated, functions=["offers_none:setting"])
    )


def test_all_datasets_are_built_or_none(module: Module) -> None:
    """Datasets are returned by name; the first one that cannot be built raises the error."""
    module("builds_two", "a = [1]\nb = [1, 2]\n")
    configs = [DatasetConfig(name=name, factory=f"builds_two:{name}") for name in ("a", "b")]
    assert {name: hosted.info.length for name, hosted in open_datasets(configs).items()} == {"a": 1, "b": 2}
    assert "module 'no_such_module' not found" in refusal(
        open_datasets, [*configs, DatasetConfig(name="c", factory="no_such_module:c")]
    )


def test_an_error_in_a_factory_has_its_traceback(module: Module) -> None:
    """The error contains the traceback of the user's code, without teleloader's frames."""
    module("fails_to_build", "def make():\n    raise ValueError('no data in /data')\n")
    sentence = refusal(open_datasets, [DatasetConfig(name="train", factory="fails_to_build:make")])
    assert sentence.startswith("cannot build dataset 'train':\nTraceback (most recent call last):\n")
    assert "fails_to_build.py" in sentence
    assert sentence.endswith("ValueError: no data in /data\n")
    assert "open_datasets" not in sentence


@pytest.mark.parametrize(
    ("name", "code"),
    [("wrongly_called", "def make(split): ...\n"), ("calls_wrongly", "def inner(split): ...\ndef make(): inner()\n")],
)
def test_only_a_missing_argument_of_the_factory_has_advice_on_kwargs(name: str, code: str, module: Module) -> None:
    """A TypeError that the factory's own code raises has nothing to do with its arguments."""
    module(name, code)
    sentence = refusal(open_datasets, [DatasetConfig(name="train", factory=f"{name}:make")])
    assert "missing 1 required positional argument: 'split'" in sentence
    assert ("kwargs" in sentence) is (name == "wrongly_called")


# --- Types of datasets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", [[1, 2, 3], (1, 2, 3), range(3), np.arange(3), Squares(3), "abc"], ids=label)
def test_anything_with_samples_and_a_length_is_a_dataset(dataset: Any) -> None:
    """Lists and arrays are datasets, too."""
    assert host(dataset, name="n").info.length == 3


@pytest.mark.parametrize(
    ("dataset", "length"),
    [(Stream(), None), (iter([1]), None), ({1, 2}, 2), ((i for i in range(3)), None)],
    ids=["class", "iterator", "set", "generator"],
)
def test_what_can_only_be_iterated_over_is_iterable_style(dataset: Any, length: int | None) -> None:
    """An iterable is an iterable-style dataset, with or without a length."""
    info = host(dataset, name="train").info
    assert (info.kind, info.type, info.length) == ("iterable", type(dataset).__qualname__, length)


@pytest.mark.parametrize("length", [None, 10])
def test_torchs_iterable_dataset_is_iterable_style(length: int | None) -> None:
    """A torch IterableDataset is iterable-style, although it inherits a __getitem__ that only raises."""
    need("torch")
    from torch.utils.data import IterableDataset

    class Numbers(IterableDataset):  # type: ignore[misc, unused-ignore]
        def __iter__(self) -> Iterator[int]:
            return iter(range(10))

    if length is not None:
        Numbers.__len__ = lambda self: length  # type: ignore[attr-defined, unused-ignore]
    info = host(Numbers(), name="train").info
    assert (info.kind, info.length) == ("iterable", length)


def test_torchs_map_style_dataset_is_map_style() -> None:
    """A torch Dataset is map-style even if it is also iterable or has no length."""
    need("torch")
    from torch.utils.data import Dataset, TensorDataset

    class Numbers(Dataset):  # type: ignore[misc, unused-ignore]
        def __getitem__(self, index: int) -> int:
            return index

    import torch

    assert (host(Numbers(), name="n").info.kind, host(Numbers(), name="n").info.length) == ("map", None)
    assert host(TensorDataset(torch.zeros(3, 2)), name="n").info.length == 3


def test_what_is_no_dataset_is_refused() -> None:
    """An object that supports neither indexing nor iteration is rejected."""
    assert refusal(host, 5, name="train") == (
        "dataset 'train' must define __getitem__ and __len__, or __iter__; got int"
    )


class Forgetful(Squares):
    """Dataset whose __len__ raises NotImplementedError, as in old versions of torch."""

    def __len__(self) -> int:
        raise NotImplementedError


class Pretending(Squares):
    """Dataset with an invalid length."""

    def __len__(self) -> int:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [WithoutLength, Forgetful, Pretending])
def test_a_dataset_need_not_have_a_length(kind: Callable[[], Any]) -> None:
    """A client-side sampler can index a dataset without a length."""
    info = host(kind(), name="train").info
    assert (info.kind, info.length) == ("map", None)


def test_another_error_of_its_length_is_the_datasets_own() -> None:
    """Other errors of __len__ are raised, and do not mean that a dataset has no length."""

    class Unmounted(Squares):
        def __len__(self) -> int:
            raise OSError("the disk is not mounted")

    with pytest.raises(OSError, match="the disk is not mounted"):
        host(Unmounted(), name="train")


def test_an_empty_dataset_may_be_hosted() -> None:
    """A dataset of length 0 is valid."""
    assert host([], name="n").info.length == 0


# --- The fingerprint ----------------------------------------------------------------------------------------------


def fingerprint(length: int | None = 10, **changed: Any) -> str:
    """Return the fingerprint of a dataset with these properties changed."""
    facts: dict[str, Any] = {"name": "train", "version": "1", "collate_name": "default", "seeding": "batch"}
    dataset = WithoutLength() if length is None else Squares(length)
    return host(dataset, **{**facts, **changed}).info.fingerprint


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "other"},
        {"length": 11},
        {"length": None},
        {"version": "2"},
        {"collate_name": "data:pad"},
        {"seeding": "sample"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_fingerprint_identifies_a_dataset(changed: dict[str, Any]) -> None:
    """The fingerprint depends on all known properties that determine a batch's content."""
    assert fingerprint(**changed) != fingerprint()


def test_a_fingerprint_is_the_same_everywhere_and_for_ever() -> None:
    """Servers with the same dataset, and later releases, compute the same fingerprint, as saved states contain it."""
    assert fingerprint() == "aa0817ac061a1ed2"


def test_no_two_sets_of_facts_run_together() -> None:
    """The fingerprint depends on the boundaries between properties."""
    assert fingerprint(name="a", version="bc") != fingerprint(name="ab", version="c")


def test_what_does_not_decide_a_batch_is_not_in_the_fingerprint() -> None:
    """The object, the worker_init function and the functions for clients do not change the fingerprint."""

    def init(worker: int) -> None:
        raise AssertionError

    first: HostedDataset = host([0] * 10, name="n")
    second: Sequence[int] = range(10)
    other = host(second, name="n", worker_init=init, functions={"builtins:print": print})
    assert other.info.fingerprint == first.info.fingerprint
