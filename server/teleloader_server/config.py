"""Server configuration: datasets and limits, validated at construction."""

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
    """Exception for an invalid server configuration; the message names the invalid entry and the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    """Configuration of one hosted dataset.

    Raises:
        ConfigError: At construction, naming the field and its value.
    """

    name: str
    """Name for clients: letters, digits, ``.``, ``_`` and ``-``."""
    factory: str
    """``module:name`` of a dataset, or of a class or function that returns one."""
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of the factory."""
    collate: str | None = None
    """``module:function`` that collates a list of samples to a batch; None is torch's default_collate."""
    worker_init: str | None = None
    """``module:function`` that each worker calls with its worker ID before its first batch."""
    functions: Sequence[str] = ()
    """Further ``module:function`` that clients may specify as ``collate_fn`` or ``worker_init_fn``."""
    version: str = ""
    """Version of the data. Change it whenever the data change: clients never mix batches of different versions."""
    seeding: Literal["batch", "sample"] = "batch"
    """Granularity of seeding random generators. With ``sample``, augmentation is independent of the batch size."""

    indices: IndexKind = "integers"
    """Indices that client-side samplers may send: ``integers`` in [0, length), or ``any`` value.

    With ``any``, clients can pass strings, tuples, negative integers and any other serializable value to
    ``__getitem__``: the dataset must validate them.
    """

    def __post_init__(self) -> None:
        """Validate the fields."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"invalid dataset name {self.name!r}: expected letters, digits, '.', '_' and '-'")
        for field in ("factory", "collate", "worker_init"):
            target = getattr(self, field)
            if target is not None and not _is_target(target):
                raise ConfigError(f"{field} of dataset {self.name!r} must be 'module:name', got {target!r}")
        if not isinstance(self.functions, list | tuple) or not all(map(_is_target, self.functions)):
            raise ConfigError(
                f"functions of dataset {self.name!r} must be a list of 'module:name', got {self.functions!r}"
            )
        if self.seeding not in ("batch", "sample"):
            raise ConfigError(f"seeding of dataset {self.name!r} must be 'batch' or 'sample', got {self.seeding!r}")
        if self.indices not in get_args(IndexKind):
            raise ConfigError(f"indices of dataset {self.name!r} must be 'integers' or 'any', got {self.indices!r}")
        if not isinstance(self.version, str):
            raise ConfigError(f"version of dataset {self.name!r} must be a string, got {self.version!r}")
        if not isinstance(self.kwargs, Mapping):
            raise ConfigError(f"kwargs of dataset {self.name!r} must be a table, got {self.kwargs!r}")

    @classmethod
    def parse(cls, text: str) -> DatasetConfig:
        """Parse a command-line argument: ``module:name`` or ``name=module:name``."""
        name, equals, target = text.rpartition("=")
        if not _TARGET.fullmatch(target):
            raise ConfigError(f"invalid dataset {text!r}: expected {_meant(name + equals, target)}")
        return cls(name=name if equals else target.partition(":")[2].replace(".", "-"), factory=target)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Resource limits of a worker pool."""

    num_workers: int = 2
    """Worker processes; 0 loads in the server's own process, for debugging."""
    memory_budget: int = MAX_DEFAULT_MEMORY_BUDGET
    """Memory for computed batches, in bytes; prefetching pauses while it is full."""
    max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES
    """Maximum size of an encoded batch, in bytes."""
    batch_timeout: float = DEFAULT_BATCH_TIMEOUT
    """Timeout in seconds for computing a batch, and for starting a worker. A worker that exceeds it is killed; 0
    disables the timeout.
    """
    max_batches_per_worker: int = 0
    """Number of batches after which a worker process is replaced, for datasets that leak memory; 0 disables this."""
    max_worker_memory: int = 0
    """Resident memory in bytes at which a worker process is replaced; 0 disables this."""
    debug: bool = False
    """Allow clients to load batches in the server process itself, where loading blocks all other requests."""

    def __post_init__(self) -> None:
        """Validate the fields."""
        whole = ("num_workers", "memory_budget", "max_batch_bytes", "max_batches_per_worker", "max_worker_memory")
        for name in whole:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name} must be an integer, got {value!r}")
        if not 0 <= self.num_workers <= 1024:
            raise ConfigError(f"num_workers must be in [0, 1024], got {self.num_workers}")
        if self.memory_budget < 2**20:
            raise ConfigError(f"memory_budget must be at least 1 MiB, got {self.memory_budget} bytes")
        if self.max_batch_bytes < 2**10:
            raise ConfigError(f"max_batch_bytes must be at least 1 KiB, got {self.max_batch_bytes} bytes")
        for name in ("max_batches_per_worker", "max_worker_memory"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        timeout = self.batch_timeout
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 <= timeout < math.inf:
            raise ConfigError(f"batch_timeout must be a number of seconds, at least 0, got {timeout!r}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClientLimits:
    """Resource limits for clients: the ``[limits]`` table of the configuration file, documented in docs/limits.md.

    All clients with the same token form one principal. On a server without tokens, all clients form one principal.

    Raises:
        ConfigError: At construction, naming the field and its value.
    """

    max_connections: int = 10_000
    """Maximum open connections, reduced if the limit of open files (``RLIMIT_NOFILE``) requires it."""
    max_connections_per_address: int = 4096
    """Maximum open connections from one IP address."""
    max_header_bytes: int = 64 * 2**10
    """Maximum size of a request line with its headers, in bytes."""
    max_headers: int = 128
    """Maximum number of header fields of a request."""
    max_unauthenticated_bytes: int = 128 * 2**20
    """Maximum memory of all unauthenticated connections together, in bytes; beyond it the oldest of them is closed."""
    header_timeout: float = 10.0
    """Timeout in seconds for receiving a request line and its headers."""
    max_body_bytes: int = 64 * 2**20
    """Maximum size of a request body, in bytes; the index list of a batch of 2**20 samples takes 9 MB."""
    max_spec_bytes: int = 2**20
    """Maximum size of the body that registers a loader, in bytes; shard states take up to 768 KiB of it."""
    max_total_spec_bytes: int = 64 * 2**20
    """Maximum memory of the specs of all registered loaders, in bytes."""
    max_buffered_request_bytes: int = 256 * 2**20
    """Maximum memory of all request bodies together, in bytes."""
    min_body_rate: float = 10 * 2**10
    """Minimum rate at which a body or a WebSocket message must arrive, in bytes/s."""
    body_timeout: float = 10.0
    """Interval in seconds over which `min_body_rate` is measured."""
    max_pipelined: int = 16
    """Maximum number of requests of one connection that are queued or being processed."""
    max_requests_per_second: float = 5000.0
    """Maximum request rate of one principal, in requests/s."""
    max_unauthenticated_requests_per_second: float = 100.0
    """Maximum rate of requests without a valid token from one IP address, in requests/s."""
    max_batches_per_request: int = 4096
    """Maximum number of batches whose indices a request lists, or that it prefetches."""
    max_consumers: int = 4096
    """Maximum number of consumers of one principal with an open request; idle consumers beyond it are forgotten."""
    max_loaders: int = 4096
    """Maximum number of registered loaders of one principal; the least recently used ones are evicted."""
    max_sessions: int = 256
    """Maximum number of sessions (loaders with private workers)."""
    max_sessions_per_principal: int = 128
    """Maximum number of sessions of one principal."""
    max_session_workers: int = 1024
    """Maximum number of worker processes of all sessions together."""
    max_session_workers_per_principal: int = 512
    """Maximum number of worker processes of one principal's sessions."""
    send_timeout: float = 60.0
    """Time in seconds within which a client must read at least one byte of its response."""
    pressure_send_timeout: float = 2.0
    """Value of `send_timeout` while the principal's unread responses exceed its memory share, in seconds."""
    pressure_min_send_rate: float = 64 * 2**10
    """Minimum rate at which a client must read while `pressure_send_timeout` applies, in bytes/s."""
    lingering_time: float = 2.0
    """Time in seconds for which a connection stays open after an error response, so that the client can read it."""

    def __post_init__(self) -> None:
        """Validate the fields."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kinds = (int,) if field.type == "int" else (int, float)
            if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
                what = "an integer" if field.type == "int" else "a number"
                raise ConfigError(f"{field.name} of [limits] must be {what} greater than 0, got {value!r}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} of [limits] must be at least {least}, got {getattr(self, name)}")

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> ClientLimits:
        """Parse a ``[limits]`` table, in which sizes may be strings such as ``64MiB``; missing limits get defaults.

        Raises:
            ConfigError: An entry is unknown or a value invalid.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        _only_known("[limits]", table, names)
        texts = {name: value for name, value in table.items() if isinstance(value, str)}
        return cls(**{**table, **{name: _number(name, text) for name, text in texts.items()}})

    def stated(self) -> str:
        """Format all limits as comma-separated ``name=value`` pairs."""
        return ", ".join(
            f"{field.name}={getattr(self, field.name):g}"
            if field.type == "float"
            else f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
        )


DEFAULT_LIMITS: Final = ClientLimits()


def default_num_workers() -> int:
    """Return the number of CPUs in this process's affinity mask."""
    return len(os.sched_getaffinity(0))


def default_memory_budget() -> int:
    """Return the default memory budget in bytes: a quarter of the machine's or container's memory, at most 2 GiB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            total = min(total, int(Path(limit).read_text()))
    return min(MAX_DEFAULT_MEMORY_BUDGET, total // 4)


def read_toml(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[DatasetConfig]]:
    """Read the ``[server]`` and ``[limits]`` tables and the datasets of a configuration file.

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
            raise ConfigError(f"{name} of {path} must be a table, [{name}], got {tables[name]!r:.80}")
    fields = [field.name for field in dataclasses.fields(DatasetConfig) if field.name != "name"]
    datasets = []
    for name, table in tables.get("datasets", {}).items():
        if not isinstance(table, dict) or "factory" not in table:
            raise ConfigError(f'[datasets.{name}] of {path} must be a table with factory = "module:function"')
        _only_known(f"[datasets.{name}] of {path}", table, fields)
        datasets.append(DatasetConfig(name=name, **table))
    return tables.get("server", {}), tables.get("limits", {}), datasets


def parse_size(text: str) -> int:
    """Parse a size such as ``"512MiB"`` or ``"4096"`` to bytes; the units K, M, G and T are powers of 1024.

    Raises:
        ConfigError: The text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"invalid size {text!r}: expected a number of bytes, or a size such as 512MiB or 2GiB")
    return int(match[1]) << (10 * " KMGT".index(match[2].upper() or " "))


def _number(name: str, text: str) -> float:
    """Parse the value of a limit: a number, or a size such as 64MiB."""
    try:
        return parse_size(text)
    except ConfigError:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"invalid limit {name}={text!r}: expected a number, or a size such as 64MiB") from None


def _meant(chosen: str, target: str) -> str:
    """Return the corrected form of an invalid dataset argument: a module without a name, or a file path."""
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
