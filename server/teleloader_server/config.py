"""What a server is told: the datasets that it hosts and the limits that it keeps. Refused at birth when impossible."""

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
"""Smallest values of limits: below them the server would refuse the requests of its own clients."""

IndexKind = Literal["integers", "any"]

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(i?B)?", re.IGNORECASE)


class ConfigError(Exception):
    """The configuration cannot be served; the message says which part and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DatasetConfig:
    """One hosted dataset.

    Raises:
        ConfigError: At construction, naming the field and its value.
    """

    name: str
    """What clients call it: letters, digits, ``.``, ``_`` and ``-``."""
    factory: str
    """``module:name`` of a dataset, or of a class or function that makes one."""
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments for the factory."""
    collate: str | None = None
    """``module:function`` that makes a batch of a list of samples; None is torch's default_collate."""
    worker_init: str | None = None
    """``module:function`` that each worker calls with its number before its first batch."""
    functions: Sequence[str] = ()
    """Further ``module:function`` that clients may name as ``collate_fn`` or ``worker_init_fn``; no others run here."""
    version: str = ""
    """What you call this state of the data. Change it when the data change: clients notice."""
    seeding: Literal["batch", "sample"] = "batch"
    """Seed random numbers once a batch, or anew for each sample: then augmentation is independent of batch size."""

    indices: IndexKind = "integers"
    """The indices that a client may send for an order of its own: ``integers`` in [0, length), or ``any`` value.

    With ``any``, strings, tuples, negative integers and whatever else a frame can hold reach ``__getitem__``: the
    dataset must check them.
    """

    def __post_init__(self) -> None:
        """Refuse what cannot be hosted."""
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"a dataset's name must be letters, digits, '.', '_' and '-', was {self.name!r}")
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
        """The dataset that a command line names: ``module:name`` or ``name=module:name``."""
        name, equals, target = text.rpartition("=")
        if not _TARGET.fullmatch(target):
            raise ConfigError(f"{text!r} names no dataset: write {_meant(name + equals, target)}")
        return cls(name=name if equals else target.partition(":")[2].replace(".", "-"), factory=target)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a pool of workers may take."""

    num_workers: int = 2
    """Worker processes; 0 loads in the server's own process, for debugging."""
    memory_budget: int = MAX_DEFAULT_MEMORY_BUDGET
    """Bytes that encoded batches may take together before work ahead waits."""
    max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES
    """Bytes of the largest batch that is sent."""
    batch_timeout: float = DEFAULT_BATCH_TIMEOUT
    """Seconds that a worker may take for one batch, or to start, before it is killed; 0 is no limit."""
    max_batches_per_worker: int = 0
    """After so many batches a worker is replaced by a fresh process, for datasets that leak; 0 is never."""
    max_worker_memory: int = 0
    """Bytes of resident memory at which a worker is replaced by a fresh process; 0 is never."""
    debug: bool = False
    """Whether clients may have batches made in the server's own process, where they hold up everything else."""

    def __post_init__(self) -> None:
        """Refuse what cannot be run."""
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
    """What clients may make a server do: the ``[limits]`` of its configuration. docs/limits.md says what is answered.

    A principal is whoever a token names; without tokens all clients together are one.

    Raises:
        ConfigError: At construction, naming the field and its value.
    """

    max_connections: int = 10_000
    """Connections that are open at a time; fewer where the limit of open files says so."""
    max_connections_per_address: int = 4096
    """Those of them that come from one network address."""
    max_header_bytes: int = 64 * 2**10
    """Bytes of a request line and its headers."""
    max_headers: int = 128
    """Header fields of a request."""
    max_unauthenticated_bytes: int = 128 * 2**20
    """Bytes of memory of all connections without an authenticated request; beyond it the oldest of them is closed."""
    header_timeout: float = 10.0
    """Seconds for a request line and its headers."""
    max_body_bytes: int = 64 * 2**20
    """Bytes of a body; the index lists of a batch of 2**20 samples take 9 MB."""
    max_spec_bytes: int = 2**20
    """Bytes of a body that registers a loader; the states of an iterable-style dataset's shards have up to 768 KiB."""
    max_total_spec_bytes: int = 64 * 2**20
    """Bytes of memory that all registered loaders take together."""
    max_buffered_request_bytes: int = 256 * 2**20
    """Bytes of all bodies that are held at a time."""
    min_body_rate: float = 10 * 2**10
    """Bytes a second that a body must have."""
    body_timeout: float = 10.0
    """Seconds over which the rate of a body is taken."""
    max_pipelined: int = 16
    """Requests of one connection that are answered or wait for it."""
    max_requests_per_second: float = 5000.0
    """Requests of one principal, each second; what is too many is held for a second before it is refused."""
    max_unauthenticated_requests_per_second: float = 100.0
    """Requests without a valid token from one network address, each second; those with one do not count."""
    max_batches_per_request: int = 4096
    """Batches for which a request may list indices, or that it may want to be made ahead."""
    max_consumers: int = 4096
    """Consumers of one principal that have an open request; idle ones are forgotten when there are more."""
    max_loaders: int = 4096
    """Loaders of one principal that are remembered; who asks for a forgotten one registers it again by itself."""
    max_sessions: int = 256
    """Sessions with workers of their own."""
    max_sessions_per_principal: int = 128
    """Those of one principal."""
    max_session_workers: int = 1024
    """Worker processes of all sessions together."""
    max_session_workers_per_principal: int = 512
    """Those of one principal's sessions."""
    send_timeout: float = 60.0
    """Seconds in which a client must take something of its answer."""
    pressure_send_timeout: float = 2.0
    """The same while its principal leaves more unread than its share of the memory."""
    pressure_min_send_rate: float = 64 * 2**10
    """Bytes a second that a client must take of its answer meanwhile."""
    lingering_time: float = 2.0
    """Seconds for a refused client to read why: a connection that is closed on what it still sends loses the answer."""

    def __post_init__(self) -> None:
        """Refuse what nobody could work with."""
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
        """The limits of a table, in which sizes may be written ``64MiB``; those that it leaves out have their defaults.

        Raises:
            ConfigError: When it has an entry that is none, or a value that cannot be.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        _only_known("[limits]", table, names)
        texts = {name: value for name, value in table.items() if isinstance(value, str)}
        return cls(**{**table, **{name: _number(name, text) for name, text in texts.items()}})

    def stated(self) -> str:
        """All of them, as one writes them."""
        return ", ".join(
            f"{field.name}={getattr(self, field.name):g}"
            if field.type == "float"
            else f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
        )


DEFAULT_LIMITS: Final = ClientLimits()


def default_num_workers() -> int:
    """One worker for each CPU that this process may use."""
    return len(os.sched_getaffinity(0))


def default_memory_budget() -> int:
    """2 GiB, or a quarter of the memory of this machine or container, if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            total = min(total, int(Path(limit).read_text()))
    return min(MAX_DEFAULT_MEMORY_BUDGET, total // 4)


def read_toml(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[DatasetConfig]]:
    """The ``[server]`` and ``[limits]`` tables and the datasets of a configuration file.

    Raises:
        ConfigError: When the file cannot be read, or says what is not understood.
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
    """Bytes from ``"512MiB"``, ``"2GiB"`` or a plain number; K, M, G and T are powers of 1024.

    Raises:
        ConfigError: When it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"a size must be a number of bytes or look like 512MiB or 2GiB, was {text!r}")
    return int(match[1]) << (10 * " KMGT".index(match[2].upper() or " "))


def _number(name: str, text: str) -> float:
    """What a limit is stated as, on a command line or as a size."""
    try:
        return parse_size(text)
    except ConfigError:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{name} of [limits] must be a number, or a size such as 64MiB, was {text!r}") from None


def _meant(chosen: str, target: str) -> str:
    """What to write in place of a module without a name, or of the path of its file."""
    module, _, name = target.partition(":")
    dotted = ".".join(Path(os.path.relpath(module.removesuffix(".py") or ".")).parts)
    meant = f"{dotted}:{name or 'NAME'}"
    if not _is_target(meant):
        return "module:name (the module must be importable from here), or chosen-name=module:name"
    which = "" if name else ", where NAME is a dataset in that module, or a function that makes one"
    return f"{chosen}{meant}{which}"


def _is_target(target: object) -> bool:
    return isinstance(target, str) and _TARGET.fullmatch(target) is not None


def _only_known(where: str, table: Mapping[str, Any], known: tuple[str, ...] | list[str]) -> None:
    for name in table:
        if name not in known:
            raise ConfigError(f"{where} has an unknown entry {name!r}; it may have {', '.join(known)}")
