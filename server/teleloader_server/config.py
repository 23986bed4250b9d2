"""Configuration of a server: datasets and limits, validated at construction."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, get_args

from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8000
MAX_DEFAULT_MEMORY_BUDGET: Final = 2 * 2**30
DEFAULT_SHUTDOWN_GRACE: Final = 10.0
DEFAULT_BATCH_TIMEOUT: Final = 600.0
_LEAST: Final = {"max_header_bytes": 1024, "max_headers": 32, "max_unauthenticated_bytes": 2**20}
"""Minimum values of limits: with smaller ones the server would reject the requests of its own clients."""

IndexKind = Literal["integers", "any"]

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(i?B)?", re.IGNORECASE)


class ConfigError(Exception):
    """An invalid configuration; the message names the invalid part and the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    """One hosted dataset.

    Raises:
        ConfigError: At construction, naming the field and its value.
    """

    name: str
    """Name for clients: letters, digits, ``.``, ``_`` and ``-``."""
    factory: str
    """``module:name`` of a dataset, or of a class or function that returns one."""
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments for the factory."""
    collate: str | None = None
    """``module:function`` that collates a list of samples to a batch; None is torch's default_collate."""
    worker_init: str | None = None
    """``module:function`` that each worker calls with its worker ID before its first batch."""
    functions: Sequence[str] = ()
    """Further ``module:function`` that clients may specify as ``collate_fn`` or ``worker_init_fn``."""
    version: str = ""
    """Version of the data. Change it when the data change: clients then refuse to mix versions."""
    seeding: Literal["batch", "sample"] = "batch"
    """Seed random generators per batch or per sample; per sample, augmentation is independent of the batch size."""

    indices: IndexKind = "integers"
    """Indices that client-side samplers may send: ``integers`` in [0, length), or ``any`` value.

    With ``any``, strings, tuples, negative integers and all other values of a frame reach ``__getitem__``: the dataset
    must validate them.
    """

    def __post_init__(self) -> None:
        """Validate the fields."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"invalid dataset name {self.name!r}: expected letters, digits, '.', '_' and '-'")
        for field in ("factory", "collate", "worker_init"):
            target = getattr(self, field)
            if target is not None and not _is_target(target):
                raise ConfigError(f"{field} of dataset {self.name!r} must be 'module:name', was {target!r}")
        if not isinstance(self.functions, list | tuple) or not all(map(_is_target, self.functions)):
            raise ConfigError(
                f"functions of dataset {self.name!r} must be a list of 'module:name', was {self.functions!r}"
            )
        if self.seeding not in ("batch", "sample"):
            raise ConfigError(f"seeding of dataset {self.name!r} must be 'batch' or 'sample', was {self.seeding!r}")
        if self.indices not in get_args(IndexKind):
            raise ConfigError(f"indices of dataset {self.name!r} must be 'integers' or 'any', was {self.indices!r}")
        if not isinstance(self.version, str):
            raise ConfigError(f"version of dataset {self.name!r} must be a string, was {self.version!r}")
        if not isinstance(self.kwargs, Mapping):
            raise ConfigError(f"kwargs of dataset {self.name!r} must be a table, was {self.kwargs!r}")

    @classmethod
    def parse(cls, text: str) -> DatasetConfig:
        """Parse a command-line argument: ``module:name`` or ``name=module:name``."""
        name, equals, target = text.rpartition("=")
        if not _TARGET.fullmatch(target):
            raise ConfigError(f"invalid dataset {text!r}: write {_meant(name + equals, target)}")
        return cls(name=name if equals else target.partition(":")[2].replace(".", "-"), factory=target)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a worker pool."""

    num_workers: int = 2
    """Worker processes; 0 loads in the server's own process, for debugging."""
    memory_budget: int = MAX_DEFAULT_MEMORY_BUDGET
    """Memory for computed batches in bytes; prefetching stops when it is full."""
    max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES
    """Maximum bytes of a batch."""
    batch_timeout: float = DEFAULT_BATCH_TIMEOUT
    """Seconds per batch, and for the start of a worker; then the worker is killed. 0 disables the limit."""
    max_batches_per_worker: int = 0
    """Batches after which a worker is replaced by a new process, for datasets that leak; 0 is never."""
    max_worker_memory: int = 0
    """Bytes of resident memory at which a worker is replaced by a new process; 0 is never."""
    debug: bool = False
    """Allow clients to load batches in the server's own process, where they block everything else."""

    def __post_init__(self) -> None:
        """Validate the fields."""
        whole = ("num_workers", "memory_budget", "max_batch_bytes", "max_batches_per_worker", "max_worker_memory")
        for name in whole:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name} must be a whole number, was {value!r}")
        if not 0 <= self.num_workers <= 1024:
            raise ConfigError(f"num_workers must be in [0, 1024], was {self.num_workers}")
        if self.memory_budget < 2**20:
            raise ConfigError(f"memory_budget must be at least 1 MiB, was {self.memory_budget} bytes")
        if self.max_batch_bytes < 2**10:
            raise ConfigError(f"max_batch_bytes must be at least 1 KiB, was {self.max_batch_bytes} bytes")
        for name in ("max_batches_per_worker", "max_worker_memory"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, was {getattr(self, name)}")
        timeout = self.batch_timeout
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 <= timeout < math.inf:
            raise ConfigError(f"batch_timeout must be a number of seconds, at least 0, was {timeout!r}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClientLimits:
    """Limits for clients: the ``[limits]`` table of the configuration; docs/limits.md describes the responses.

    A principal is all clients with the same token; without tokens all clients together are one.

    Raises:
        ConfigError: At construction, naming the field and its value.
    """

    max_connections: int = 10_000
    """Open connections; fewer if the limit of open files requires it."""
    max_connections_per_address: int = 4096
    """Open connections from one IP address."""
    max_header_bytes: int = 64 * 2**10
    """Bytes of a request line and its headers."""
    max_headers: int = 128
    """Header fields of a request."""
    max_unauthenticated_bytes: int = 128 * 2**20
    """Memory of all unauthenticated connections; beyond it the oldest of them is closed."""
    header_timeout: float = 10.0
    """Time to receive a request line and its headers (seconds)."""
    max_body_bytes: int = 64 * 2**20
    """Bytes of a body; the index list of a batch of 2**20 samples takes 9 MB."""
    max_spec_bytes: int = 2**20
    """Bytes of a loader registration; states of shards take up to 768 KiB of it."""
    max_total_spec_bytes: int = 64 * 2**20
    """Memory of all registered loaders."""
    max_buffered_request_bytes: int = 256 * 2**20
    """Bytes of all request bodies in memory."""
    min_body_rate: float = 10 * 2**10
    """Minimum receive rate of a body or of an unfinished WebSocket message, bytes/s."""
    body_timeout: float = 10.0
    """Period over which this rate is measured (seconds)."""
    max_pipelined: int = 16
    """Requests of one connection that are waiting or being processed."""
    max_requests_per_second: float = 5000.0
    """Request rate of one principal."""
    max_unauthenticated_requests_per_second: float = 100.0
    """Rate of requests without a valid token from one IP address."""
    max_batches_per_request: int = 4096
    """Batches whose indices a request may list, or that it may have prefetched."""
    max_consumers: int = 4096
    """Consumers of one principal that have an open request; idle ones beyond it are forgotten."""
    max_loaders: int = 4096
    """Registered loaders of one principal; the least recently used ones are evicted."""
    max_sessions: int = 256
    """Sessions (loaders with private workers)."""
    max_sessions_per_principal: int = 128
    """Sessions of one principal."""
    max_session_workers: int = 1024
    """Worker processes of all sessions."""
    max_session_workers_per_principal: int = 512
    """Worker processes of one principal's sessions."""
    send_timeout: float = 60.0
    """Time in which a client must read at least some bytes of its response (seconds)."""
    pressure_send_timeout: float = 2.0
    """The same, while the principal's unread responses exceed its memory share (seconds)."""
    pressure_min_send_rate: float = 64 * 2**10
    """Minimum read rate of the client in that state, bytes/s."""
    lingering_time: float = 2.0
    """Time to keep a connection open after a request was rejected, so that the client can read the reason (seconds)."""

    def __post_init__(self) -> None:
        """Validate the fields."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kinds = (int,) if field.type == "int" else (int, float)
            if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
                what = "a whole number" if field.type == "int" else "a number"
                raise ConfigError(f"{field.name} of [limits] must be {what} greater than 0, was {value!r}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} of [limits] must be at least {least}, was {getattr(self, name)}")

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> ClientLimits:
        """Return the limits of a table, whose sizes may be strings such as ``64MiB``; missing ones have their defaults.

        Raises:
            ConfigError: An entry is unknown or a value invalid.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        _only_known("[limits]", table, names)
        texts = {name: value for name, value in table.items() if isinstance(value, str)}
        return cls(**{**table, **{name: _number(name, text) for name, text in texts.items()}})

    def stated(self) -> str:
        """Return all limits as ``name=value``, separated by commas."""
        return ", ".join(
            f"{field.name}={getattr(self, field.name):g}"
            if field.type == "float"
            else f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
        )


DEFAULT_LIMITS: Final = ClientLimits()


def default_num_workers() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def default_memory_budget() -> int:
    """Return 2 GiB in bytes, or a quarter of the memory of this machine or container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            total = min(total, int(Path(limit).read_text()))
    return min(MAX_DEFAULT_MEMORY_BUDGET, total // 4)


def read_toml(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[DatasetConfig]]:
    """Return the ``[server]`` and ``[limits]`` tables and the datasets of a configuration file.

    Raises:
        ConfigError: The file cannot be read, or an entry is unknown or invalid.
    """
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    _only_known(f"{path}", tables, ("server", "limits", "datasets"))
    for name in ("server", "limits", "datasets"):
        if not isinstance(tables.get(name, {}), dict):
            raise ConfigError(f"{name} of {path} must be a table, [{name}], was {tables[name]!r:.80}")
    fields = [field.name for field in dataclasses.fields(DatasetConfig) if field.name != "name"]
    datasets = []
    for name, table in tables.get("datasets", {}).items():
        if not isinstance(table, dict) or "factory" not in table:
            raise ConfigError(f'[datasets.{name}] of {path} must be a table with factory = "module:function"')
        _only_known(f"[datasets.{name}] of {path}", table, fields)
        datasets.append(DatasetConfig(name=name, **table))
    return tables.get("server", {}), tables.get("limits", {}), datasets


def parse_size(text: str) -> int:
    """Return the bytes of ``"512MiB"``, ``"2GiB"`` or a plain number; K, M, G and T are powers of 1024.

    Raises:
        ConfigError: The text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"invalid size {text!r}: expected a number of bytes, or for example 512MiB or 2GiB")
    return int(match[1]) << (10 * " KMGT".index(match[2].upper() or " "))


def _number(name: str, text: str) -> float:
    """Return the value of a limit, from a command line or a size."""
    try:
        return parse_size(text)
    except ConfigError:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"invalid limit {name}={text!r}: expected a number, or a size such as 64MiB") from None


def _meant(chosen: str, target: str) -> str:
    """Return the correct form of a module without a name, or of a file path."""
    module, _, name = target.partition(":")
    dotted = ".".join(Path(os.path.relpath(module.removesuffix(".py") or ".")).parts)
    meant = f"{dotted}:{name or 'NAME'}"
    if not _is_target(meant):
        return "module:name (the module must be importable from here), or chosen-name=module:name"
    which = "" if name else ", where NAME is a dataset in that module, or a function that returns one"
    return f"{chosen}{meant}{which}"


def _is_target(target: object) -> bool:
    return isinstance(target, str) and _TARGET.fullmatch(target) is not None


def _only_known(where: str, table: Mapping[str, Any], known: tuple[str, ...] | list[str]) -> None:
    for name in table:
        if name not in known:
            raise ConfigError(f"unknown entry {name!r} in {where}: expected {', '.join(known)}")
