"""Configuration in TOML and on the command line; invalid values are rejected at start with an error."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.config import ConfigError, DatasetConfig, parse_size, read_toml
from teleloader_server.limits import MAX_DEFAULT_MEMORY_BUDGET, Limits, default_memory_budget, default_num_workers

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a configuration file."""

    def write(text: str) -> Path:
        path = tmp_path / "loader.toml"
        path.write_text(text)
        return path

    return write


def refusal(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """Return the error's text."""
    with pytest.raises(ConfigError) as refused:
        function(*arguments, **named)
    return str(refused.value)


# --- A file -------------------------------------------------------------------------------------------------------


def test_a_file_names_datasets_and_the_servers_settings(write: Write) -> None:
    """Each table of datasets is one dataset with its name and all settings."""
    path = write("""
        [server]
        port = 9000
        memory_budget = "4GiB"

        [limits]
        max_consumers = 8
        max_body_bytes = "1MiB"

        [datasets.train]
        factory = "my_package.data:make"
        kwargs = { root = "/data", sizes = [1, 2] }
        collate = "my_package.data:collate"
        worker_init = "my_package.data:Init.run"
        functions = ["my_package.data:pad", "my_package.data:Init.seed"]
        version = "2024-05"
        seeding = "sample"

        [datasets."val.2"]
        factory = "my_package.data:validation"
    """)
    server, limits, datasets = read_toml(path)
    assert limits == {"max_consumers": 8, "max_body_bytes": "1MiB"}
    assert server == {"port": 9000, "memory_budget": "4GiB"}
    assert datasets == [
        DatasetConfig(
            name="train",
            factory="my_package.data:make",
            kwargs={"root": "/data", "sizes": [1, 2]},
            collate="my_package.data:collate",
            worker_init="my_package.data:Init.run",
            functions=["my_package.data:pad", "my_package.data:Init.seed"],
            version="2024-05",
            seeding="sample",
        ),
        DatasetConfig(name="val.2", factory="my_package.data:validation"),
    ]


def test_a_file_may_say_nothing(write: Write) -> None:
    """Both tables are optional: the command line can contain all settings."""
    assert read_toml(write("")) == ({}, {}, [])


def test_what_is_left_out_has_its_default(write: Write) -> None:
    """Only the factory is required; other settings have defaults."""
    _, _, (dataset,) = read_toml(write('[datasets.train]\nfactory = "a:b"'))
    assert dataset == DatasetConfig(name="train", factory="a:b")
    assert (dataset.kwargs, dataset.collate, dataset.worker_init) == ({}, None, None)
    assert (dataset.functions, dataset.version, dataset.seeding) == ((), "", "batch")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The error has the path and the system's reason."""
    path = tmp_path / "nothing.toml"
    assert refusal(read_toml, path) == f"cannot read {path}: No such file or directory"
    assert refusal(read_toml, tmp_path) == f"cannot read {tmp_path}: Is a directory"


def test_a_file_that_is_no_toml_is_refused(write: Write, tmp_path: Path) -> None:
    """The error has the position."""
    path = write("[datasets.train\n")
    assert refusal(read_toml, path).startswith(f"{path} is not valid TOML: Expected ']'")
    path.write_bytes(b"\xff\xfe")
    assert refusal(read_toml, path).startswith(f"{path} is not valid TOML: ")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '[dataset.train]\nfactory = "a:b"',
            "unknown key 'dataset' in {path}: expected one of server, limits, datasets",
        ),
        (
            '[datasets.train]\nfactory = "a:b"\ncolate = "a:c"',
            "unknown key 'colate' in [datasets.train] of {path}: expected one of factory, kwargs, collate, "
            "worker_init, functions, version, seeding, indices, start_method",
        ),
        (
            '[datasets.train]\nfactory = "a:b"\nname = "other"',
            "unknown key 'name' in [datasets.train] of {path}: expected one of factory, kwargs, collate, "
            "worker_init, functions, version, seeding, indices, start_method",
        ),
        (
            '[datasets.train]\nversion = "1"',
            'invalid entry [datasets.train] in {path}: expected a table with factory = "module:function"',
        ),
        (
            '[datasets]\ntrain = "a:b"',
            'invalid entry [datasets.train] in {path}: expected a table with factory = "module:function"',
        ),
        (
            '[datasets."my data"]\nfactory = "a:b"',
            "invalid dataset name 'my data': expected letters, digits, '.', '_' and '-'",
        ),
        (
            '[datasets.train]\nfactory = "a:b"\nstart_method = "forkserver"',
            "invalid start_method of dataset 'train': expected 'fork' or 'spawn', got 'forkserver'",
        ),
        ("[datasets.train]\nfactory = 5", "invalid factory of dataset 'train': expected 'module:name', got 5"),
    ],
)
def test_what_is_not_understood_is_refused(write: Write, text: str, sentence: str) -> None:
    """The error states the position and the valid entries."""
    path = write(text)
    assert refusal(read_toml, path) == sentence.format(path=path)


@pytest.mark.parametrize("text", ['[[datasets]]\nfactory = "a:b"', 'datasets = "a:b"', "server = 8000", "[[server]]"])
def test_a_table_that_is_none_is_refused(write: Write, text: str) -> None:
    """An array of tables, a likely mistake, raises a ConfigError that names the file."""
    path = write(text)
    assert str(path) in refusal(read_toml, path)


# --- Datasets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train", "0", "a.b_c-D", "x" * 128])
def test_a_name_is_letters_digits_and_some_signs(name: str) -> None:
    """Names may contain characters that are safe in a path and on a command line."""
    assert DatasetConfig(name=name, factory="a:b").name == name


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../a", "-a", ".a", "a\n", "x" * 129, "é", "a:b", "a=b"])
def test_other_names_are_refused(name: str) -> None:
    """The error has the name."""
    sentence = f"invalid dataset name {name!r}: expected letters, digits, '.', '_' and '-'"
    assert refusal(DatasetConfig, name=name, factory="a:b") == sentence


@pytest.mark.parametrize("target", ["a:b", "a.b.c:d.e", "_a:_b", "a1:B2"])
@pytest.mark.parametrize("field", ["factory", "collate", "worker_init"])
def test_code_is_named_as_module_and_name(field: str, target: str) -> None:
    """Modules and names may be nested."""
    stated: dict[str, Any] = {"name": "n", "factory": "a:b", field: target}
    assert getattr(DatasetConfig(**stated), field) == target


@pytest.mark.parametrize(
    "target", ["", "a", "a:", ":b", "a:b:c", "a b:c", "1:b", "a-b:c", "a/b.py:c", "a:b()", 5, ["a:b"]]
)
@pytest.mark.parametrize("field", ["factory", "collate", "worker_init"])
def test_code_that_is_named_otherwise_is_refused(field: str, target: Any) -> None:
    """The error has field, dataset and value."""
    sentence = f"invalid {field} of dataset 'n': expected 'module:name', got {target!r}"
    assert refusal(DatasetConfig, **{"name": "n", "factory": "a:b", field: target}) == sentence


@pytest.mark.parametrize(
    "functions",
    ["a:b", {"pad": "a:b"}, ["a:b", "a"], ["a.b"], ["a:b", 5], ["a:<lambda>"], ["a:f.<locals>.g"], [None], {"a:b"}],
    ids=repr,
)
def test_functions_are_a_list_of_such_names(functions: Any) -> None:
    """Clients can select only listed functions; the error has dataset and value."""
    sentence = f"invalid functions of dataset 'n': expected a list of 'module:name', got {functions!r}"
    assert refusal(DatasetConfig, name="n", factory="a:b", functions=functions) == sentence


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("seeding", "epoch", "invalid seeding of dataset 'n': expected 'batch' or 'sample', got 'epoch'"),
        ("seeding", None, "invalid seeding of dataset 'n': expected 'batch' or 'sample', got None"),
        ("version", 2, "invalid version of dataset 'n': expected a string, got 2"),
        ("kwargs", [1], "invalid kwargs of dataset 'n': expected a table, got [1]"),
    ],
)
def test_other_fields_are_refused_with_their_value(field: str, value: Any, sentence: str) -> None:
    """The error states the field's valid values."""
    assert refusal(DatasetConfig, **{"name": "n", "factory": "a:b", field: value}) == sentence


def test_a_config_does_not_change() -> None:
    """A configuration is immutable."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        DatasetConfig(name="n", factory="a:b").name = "m"  # type: ignore[misc]


# --- The command line ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "factory"),
    [
        ("my_package.data:train", "train", "my_package.data:train"),
        ("imagenet=my_package.data:train", "imagenet", "my_package.data:train"),
        ("data:Sets.train", "Sets-train", "data:Sets.train"),
        ("a.b-c=m:x", "a.b-c", "m:x"),
    ],
)
def test_a_dataset_is_named_on_the_command_line(text: str, name: str, factory: str) -> None:
    """An argument has module and object, and optionally a dataset name, which defaults to the object's."""
    assert DatasetConfig.parse(text) == DatasetConfig(name=name, factory=factory)


@pytest.mark.parametrize("text", ["", "1", ":train", "a=", "data:train()", "../data.py:train", "my-data.py:train"])
def test_what_names_no_dataset_is_refused(text: str) -> None:
    """The error states the expected form."""
    assert refusal(DatasetConfig.parse, text) == (
        f"invalid dataset {text!r}: expected module:name (the module must be importable from the current folder), "
        "or chosen-name=module:name"
    )


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("my_package.data", "my_package.data:NAME"),
        ("my_package.data:", "my_package.data:NAME"),
        ("data.py", "data:NAME"),
        ("my_package/data.py:train", "my_package.data:train"),
        ("./data.py:train", "data:train"),
        (f"{Path.cwd()}/my_package/data.py:train", "my_package.data:train"),
        ("a=my_package/data:Sets.train", "a=my_package.data:Sets.train"),
        ("a=data", "a=data:NAME"),
    ],
)
def test_the_error_for_a_module_or_file_states_what_to_write(text: str, meant: str) -> None:
    """The error states the module as importable from the current folder, and a name in it."""
    which = ", where NAME is a dataset in that module, or a function that returns one" if "NAME" in meant else ""
    assert refusal(DatasetConfig.parse, text) == f"invalid dataset {text!r}: expected {meant}{which}"


@pytest.mark.parametrize(("text", "name"), [("=m:x", ""), ("a b=m:x", "a b"), ("a=b=m:x", "a=b")])
def test_a_chosen_name_must_be_one(text: str, name: str) -> None:
    """Names on the command line follow the same rule as in a file."""
    assert refusal(DatasetConfig.parse, text).startswith(f"invalid dataset name {name!r}")


# --- Limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("num_workers", -1, "num_workers must be in [0, 1024], got -1"),
        ("num_workers", 1025, "num_workers must be in [0, 1024], got 1025"),
        ("memory_budget", 2**20 - 1, "memory_budget must be at least 1 MiB, got 1048575 bytes"),
        ("max_batch_bytes", 1023, "max_batch_bytes must be at least 1 KiB, got 1023 bytes"),
        ("max_batches_per_worker", -1, "max_batches_per_worker must be at least 0, got -1"),
        ("max_worker_memory", -1, "max_worker_memory must be at least 0, got -1"),
        ("batch_timeout", -0.5, "batch_timeout must be a number of seconds, at least 0, got -0.5"),
        ("batch_timeout", float("inf"), "batch_timeout must be a number of seconds, at least 0, got inf"),
        ("batch_timeout", float("nan"), "batch_timeout must be a number of seconds, at least 0, got nan"),
        ("batch_timeout", "60", "batch_timeout must be a number of seconds, at least 0, got '60'"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(field: str, value: int, sentence: str) -> None:
    """The error has the range and the value."""
    assert refusal(Limits, **{field: value}) == sentence


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_workers", 0),
        ("num_workers", 1024),
        ("memory_budget", 2**20),
        ("max_batch_bytes", 2**10),
        ("batch_timeout", 0),
        ("max_batches_per_worker", 0),
        ("max_worker_memory", 0),
    ],
)  # fmt: skip
def test_the_ends_of_a_range_belong_to_it(field: str, value: int) -> None:
    """The ends are valid, including 0 workers, with which the server's own process loads."""
    stated: dict[str, Any] = {field: value}
    assert getattr(Limits(**stated), field) == value


def test_in_process_loading_is_off_by_default() -> None:
    """In-process loading is off by default, because it would block all other requests."""
    assert not Limits().debug


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_workers", 1.5),
        ("num_workers", "2"),
        ("memory_budget", "1GiB"),
        ("max_batch_bytes", 2e9),
        ("max_batches_per_worker", 0.5),
        ("max_worker_memory", "1GiB"),
    ],
)  # fmt: skip
def test_a_limit_is_a_whole_number(field: str, value: Any) -> None:
    """An invalid limit is rejected where it is set, not where it is used, for example in `serve(num_workers=1.5)`."""
    assert field in refusal(Limits, **{field: value})


def test_there_is_a_worker_for_each_cpu_by_default() -> None:
    """The default is the number of CPUs that this process may use."""
    assert default_num_workers() == len(os.sched_getaffinity(0))


def test_the_default_budget_leaves_most_of_the_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is a quarter of the machine's memory, and at most 2 GiB."""
    assert 2**20 <= default_memory_budget() <= 2 * 2**30
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**14}[name])
    assert default_memory_budget() == 2**24


def test_the_default_budget_keeps_to_a_containers_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default depends on the container's limit if that is smaller; "max" means no limit."""
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**28}[name])
    said = {"/sys/fs/cgroup/memory.max": f"{2**26}\n"}
    monkeypatch.setattr(Path, "read_text", lambda self: said[str(self)] if str(self) in said else _absent())
    assert default_memory_budget() == 2**24
    said["/sys/fs/cgroup/memory.max"] = "max\n"
    assert default_memory_budget() == MAX_DEFAULT_MEMORY_BUDGET


def _absent() -> str:
    raise FileNotFoundError


# --- Sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1B", 1),
        ("1K", 2**10),
        ("1KB", 2**10),
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("3T", 3 * 2**40),
        (" 2 gib ", 2 * 2**30),
        ("7mb", 7 * 2**20),
    ],
)
def test_sizes_are_written_with_units(text: str, size: int) -> None:
    """Units are powers of 1024, with or without the i, in any case."""
    assert parse_size(text) == size


@given(st.integers(0, 2**70))
def test_a_number_is_a_size(number: int) -> None:
    """A number without a unit is a size in bytes."""
    assert parse_size(str(number)) == number


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5GiB", "1 2", "5X", "5MiBs", "1e9", "0x10", "five"])
def test_what_is_no_size_is_refused(text: str) -> None:
    """The error shows an example of a size."""
    sentence = f"invalid size {text!r}: expected a number of bytes, or a size such as 512MiB or 2GiB"
    assert refusal(parse_size, text) == sentence
