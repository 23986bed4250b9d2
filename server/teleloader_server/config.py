"""Server configuration: hosted datasets, validated at construction, and the configuration file."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
DEFAULT_SHUTDOWN_GRACE: Final = 10.0

IndexKind = Literal["integers", "any"]
StartMethod = Literal["fork", "spawn"]

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(i?B)?", re.IGNORECASE)


class ConfigError(Exception):
    """Exception for an invalid server configuration; the message names the invalid entry and the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    """Configuration of one hosted dataset.

    Raises:
        ConfigError: If a field is invalid; raised at construction, with the field and its value.
    """

    name: str
    """Name for clients: letters, digits, ``.``, ``_`` and ``-``."""
    factory: str
    """``module:name`` of a dataset, or of a class or function that returns one."""
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of the factory."""
    collate: str | None = None
    """``module:function`` that collates a list of samples to a batch; None for torch's default_collate."""
    worker_init: str | None = None
    """``module:function`` that each worker calls with its worker ID before its first batch; None calls no function."""
    functions: Sequence[str] = ()
    """Further functions (``module:function``) that clients may specify as ``collate_fn`` or ``worker_init_fn``."""
    version: str = ""
    """Version of the data. Change it whenever the data change: clients never mix batches of different versions."""
    seeding: Literal["batch", "sample"] = "batch"
    """Unit for which random generators are seeded. With ``sample``, augmentation is independent of the batch size."""

    indices: IndexKind = "integers"
    """Indices that client-side samplers may send: ``integers`` in [0, length), or ``any`` value.

    With ``any``, clients can pass strings, tuples, negative integers and any other serializable value to
    ``__getitem__``: the dataset must validate them.
    """
    start_method: StartMethod = "fork"
    """Process that constructs the dataset: with ``fork``, the fork server, whose memory all workers share; with
    ``spawn``, each worker, before its first batch of this dataset.

    Use ``spawn`` for a dataset that does not work in a forked process, because it has threads, gRPC connections or an
    open lmdb environment.
    """

    def __post_init__(self) -> None:
        """Validate the fields."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"invalid dataset name {self.name!r}: expected letters, digits, '.', '_' and '-'")
        for field in ("factory", "collate", "worker_init"):
            target = getattr(self, field)
            if target is not None and not _is_target(target):
                raise ConfigError(f"invalid {field} of dataset {self.name!r}: expected 'module:name', got {target!r}")
        if not isinstance(self.functions, list | tuple) or not all(map(_is_target, self.functions)):
            raise ConfigError(
                f"invalid functions of dataset {self.name!r}: expected a list of 'module:name', got {self.functions!r}"
            )
        for field, choices in (
            ("seeding", ("batch", "sample")),
            ("indices", get_args(IndexKind)),
            ("start_method", get_args(StartMethod)),
        ):
            if (value := getattr(self, field)) not in choices:
                expected = " or ".join(map(repr, choices))
                raise ConfigError(f"invalid {field} of dataset {self.name!r}: expected {expected}, got {value!r}")
        if not isinstance(self.version, str):
            raise ConfigError(f"invalid version of dataset {self.name!r}: expected a string, got {self.version!r}")
        if not isinstance(self.kwargs, Mapping):
            raise ConfigError(f"invalid kwargs of dataset {self.name!r}: expected a table, got {self.kwargs!r}")

    @classmethod
    def parse(cls, text: str) -> DatasetConfig:
        """Parse a command-line argument: ``module:name`` or ``name=module:name``."""
        name, equals, target = text.rpartition("=")
        if not _TARGET.fullmatch(target):
            raise ConfigError(f"invalid dataset {text!r}: expected {_meant(name + equals, target)}")
        return cls(name=name if equals else target.partition(":")[2].replace(".", "-"), factory=target)


def read_toml(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[DatasetConfig]]:
    """Read a configuration file; return the ``[server]`` table, the ``[limits]`` table and the datasets.

    Raises:
        ConfigError: If the file cannot be read, or an entry is unknown or invalid.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    check_keys(f"{path}", tables, ("server", "limits", "datasets"))
    for name in ("server", "limits", "datasets"):
        if not isinstance(tables.get(name, {}), dict):
            raise ConfigError(f"invalid entry {name!r} in {path}: expected a table [{name}], got {tables[name]!r:.80}")
    fields = [field.name for field in dataclasses.fields(DatasetConfig) if field.name != "name"]
    datasets = []
    for name, table in tables.get("datasets", {}).items():
        if not isinstance(table, dict) or "factory" not in table:
            raise ConfigError(
                f'invalid entry [datasets.{name}] in {path}: expected a table with factory = "module:function"'
            )
        check_keys(f"[datasets.{name}] of {path}", table, fields)
        datasets.append(DatasetConfig(name=name, **table))
    return tables.get("server", {}), tables.get("limits", {}), datasets


def parse_size(text: str) -> int:
    """Parse a size such as ``"512MiB"`` or ``"4096"`` to bytes; the units K, M, G and T are powers of 1024.

    Raises:
        ConfigError: If the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"invalid size {text!r}: expected a number of bytes, or a size such as 512MiB or 2GiB")
    return int(match[1]) << (10 * " KMGT".index(match[2].upper() or " "))


def check_keys(where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise `ConfigError` if a table has an unknown key."""
    for name in table:
        if name not in known:
            raise ConfigError(f"unknown key {name!r} in {where}: expected one of {', '.join(known)}")


def _meant(chosen: str, target: str) -> str:
    """Suggest a valid form of an invalid dataset argument, such as a module without a name or a file path."""
    module, _, name = target.partition(":")
    dotted = ".".join(Path(os.path.relpath(module.removesuffix(".py") or ".")).parts)
    meant = f"{dotted}:{name or 'NAME'}"
    if not _is_target(meant):
        return "module:name (the module must be importable from the current folder), or chosen-name=module:name"
    which = "" if name else ", where NAME is a dataset in that module, or a function that returns one"
    return f"{chosen}{meant}{which}"


def _is_target(target: object) -> bool:
    return isinstance(target, str) and _TARGET.fullmatch(target) is not None
