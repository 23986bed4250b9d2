"""Configurable limits of the server: for worker pools (`Limits`) and for clients (`ClientLimits`).

The constructors validate the values. Fixed limits are constants of the modules that enforce them: `web.guard_rules` and
`web.authentication` (requests), `dispatch.quotas` (resources per principal), and `loading.index_lists`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from teleloader_server.config import ConfigError, check_keys, parse_size
from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES

MAX_DEFAULT_MEMORY_BUDGET: Final = 2 * 2**30
DEFAULT_BATCH_TIMEOUT: Final = 600.0
DEFAULT_RETIRE_AFTER: Final = 3600.0
_LEAST: Final = {"max_header_bytes": 1024, "max_headers": 32, "max_unauthenticated_bytes": 2**20}
"""Minimum values of limits: with smaller ones the server would reject the requests of its own clients."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Resource limits of a worker pool.

    Raises:
        ConfigError: If a field is invalid; raised at construction, with the field and its value.
    """

    num_workers: int = 2
    """Worker processes; 0 loads in the server's own process, for debugging."""
    memory_budget: int = MAX_DEFAULT_MEMORY_BUDGET
    """Memory for computed batches, in bytes; prefetching pauses while it is full."""
    max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES
    """Maximum size of an encoded batch, in bytes."""
    batch_timeout: float = DEFAULT_BATCH_TIMEOUT
    """Timeout in seconds for computing a batch, and for starting a worker. A worker that exceeds the timeout is killed;
    0 disables the timeout.
    """
    max_batches_per_worker: int = 0
    """Number of batches after which a worker process is replaced, for datasets that leak memory; 0 disables this."""
    max_worker_memory: int = 0
    """Resident memory in bytes above which a worker process is replaced, or a shard with a shuffle buffer fails; 0
    disables this."""
    max_replay: int = 0
    """Maximum number of batches that a worker iterates again to restore its shard of an iterable-style dataset without
    a state; beyond it, the shard fails. 0 for no limit."""
    retire_after: float = DEFAULT_RETIRE_AFTER
    """Time in seconds without a request after which a version of a dataset that is not the newest one is retired."""
    debug: bool = False
    """True to permit loading batches in the server process itself, which blocks all other requests meanwhile."""

    def __post_init__(self) -> None:
        """Validate the fields."""
        for name in (
            "num_workers", "memory_budget", "max_batch_bytes", "max_batches_per_worker", "max_worker_memory",
            "max_replay",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ConfigError(f"{name} must be an integer, got {value!r}")
        if not 0 <= self.num_workers <= 1024:
            raise ConfigError(f"num_workers must be in [0, 1024], got {self.num_workers}")
        if self.memory_budget < 2**20:
            raise ConfigError(f"memory_budget must be at least 1 MiB, got {self.memory_budget} bytes")
        if self.max_batch_bytes < 2**10:
            raise ConfigError(f"max_batch_bytes must be at least 1 KiB, got {self.max_batch_bytes} bytes")
        for name in ("max_batches_per_worker", "max_worker_memory", "max_replay"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("batch_timeout", "retire_after"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < math.inf:
                raise ConfigError(f"{name} must be a number of seconds, at least 0, got {seconds!r}")

    def divided(self, count: int) -> list[Limits]:
        """Divide the workers and the memory budget among several servers; the first servers have the odd workers.

        Raises:
            ConfigError: If there are fewer workers than servers, or too little memory.
        """
        if self.num_workers < count:
            raise ConfigError(
                f"cannot divide {self.num_workers} workers among {count} servers: each server needs at least one. "
                f"Start with --num-workers {count} or more, or with fewer --servers"
            )
        least, odd = divmod(self.num_workers, count)
        return [
            dataclasses.replace(self, num_workers=least + (number < odd), memory_budget=self.memory_budget // count)
            for number in range(count)
        ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClientLimits:
    """Resource limits for clients: the ``[limits]`` table of the configuration file, documented in docs/limits.md.

    All clients with the same token form one principal. On a server without tokens, all clients form one principal.

    Raises:
        ConfigError: If a field is invalid; raised at construction, with the field and its value.
    """

    max_connections: int = 10_000
    """Maximum number of open connections; reduced if the limit on open files (``RLIMIT_NOFILE``) is too low."""
    max_connections_per_address: int = 4096
    """Maximum number of open connections from one IP address."""
    max_header_bytes: int = 64 * 2**10
    """Maximum size of a request line with its headers, in bytes."""
    max_headers: int = 128
    """Maximum number of header fields of a request."""
    max_unauthenticated_bytes: int = 128 * 2**20
    """Maximum memory of all unauthenticated connections, in bytes; above it, the oldest of them are closed."""
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
    """Maximum number of batches that a request may prefetch or list by index, or that a WebSocket has outstanding."""
    max_consumers: int = 4096
    """Maximum number of one principal's consumers with open requests; idle consumers above this number are removed."""
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
    """Minimum rate in bytes/s at which a client must read its response while `pressure_send_timeout` applies."""
    max_lent_slots: int = 256
    """Maximum number of shared-memory slots that are lent to one principal's clients; 0 disables shared memory."""
    max_lent_bytes: int = 2 * 2**30
    """Maximum size of the shared-memory slots that are lent to one principal's clients, in bytes."""
    max_lent_time: float = 600.0
    """Time in seconds for which a slot may be lent; then the server closes the channel, and discards its slots."""
    lingering_time: float = 2.0
    """Time in seconds for which a connection stays open after an error response, so that the client can read it."""

    def __post_init__(self) -> None:
        """Validate the fields."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kinds = (int,) if field.type == "int" else (int, float)
            least = 0 if field.name == "max_lent_slots" else math.ulp(0.0)
            if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value < math.inf:
                what = "an integer" if field.type == "int" else "a number"
                bound = "greater than 0" if least else "at least 0"
                raise ConfigError(f"invalid limit {field.name}={value!r}: expected {what} {bound}")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"invalid limit {name}={getattr(self, name)}: expected at least {least}")

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> ClientLimits:
        """Parse a ``[limits]`` table, in which sizes may be strings such as ``64MiB``; missing limits get defaults.

        Raises:
            ConfigError: If an entry is unknown, or a value is invalid.
        """
        check_keys("[limits]", table, [field.name for field in dataclasses.fields(cls)])
        return cls(**{name: _number(name, value) if isinstance(value, str) else value for name, value in table.items()})

    def stated(self) -> str:
        """Format all limits as comma-separated ``name=value`` pairs."""
        values = dataclasses.asdict(self).items()
        return ", ".join(f"{name}={value:g}" if type(value) is float else f"{name}={value}" for name, value in values)


DEFAULT_LIMITS: Final = ClientLimits()


def default_num_workers() -> int:
    """Return the number of CPUs in this process's affinity mask."""
    if sys.platform != "linux":  # in-process loading; other systems have no affinity mask
        count = os.cpu_count() or 1
    else:
        count = len(os.sched_getaffinity(0))
    return count


def default_memory_budget() -> int:
    """Return the default memory budget in bytes: a quarter of the machine's or container's memory, at most 2 GiB."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            total = min(total, int(Path(limit).read_text()))
    return min(MAX_DEFAULT_MEMORY_BUDGET, total // 4)


def _number(name: str, text: str) -> Any:
    """Parse the value of a limit: a number, or a size such as 64MiB."""
    try:
        return parse_size(text)
    except ConfigError:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"invalid limit {name}={text!r}: expected a number, or a size such as 64MiB") from None
