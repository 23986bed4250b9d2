"""Messages between the server, its fork server and its workers.

A message travels as a list: its code, then its fields. All processes run the same code, so nothing checks the types.
File descriptors travel beside the message (`Channel`). What a worker must publish while it can send nothing is in its
notes: shared memory, at the end of this module.
"""

from __future__ import annotations

import signal
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

from teleloader_server.loading.tasks import Report

# -- server to fork server


class Build(NamedTuple):
    """Build the datasets."""

    configs: Sequence[Mapping[str, Any]]
    """Fields of each `DatasetConfig`."""
    path: Sequence[str]
    """``sys.path``."""


class ForkWorker(NamedTuple):
    """Fork a worker; its end of the channel travels with the message."""

    worker: int
    """Worker ID."""
    num_workers: int
    max_batch_bytes: int
    free_limit: int
    """Bytes of unused shared memory that the worker keeps."""
    session: Mapping[str, Any] | None
    """Spec, as JSON, of the loader whose private worker it is; None for a shared worker."""
    began: Sequence[Any] | None
    """`Began` of the worker that it replaces."""
    reached: Sequence[Any] | None
    """`Reached` of that worker."""


class Split(NamedTuple):
    """Fork another fork server; its end of the channel travels with the message."""


# -- fork server to server


class Built(NamedTuple):
    """The datasets are built."""

    pid: int
    datasets: Sequence[Mapping[str, Any]]
    """Fields of each `DatasetInfo`."""


class BuildFailed(NamedTuple):
    """The datasets cannot be built."""

    reason: str


class Forked(NamedTuple):
    """A worker was forked."""

    worker: int
    pid: int


class ForkFailed(NamedTuple):
    """The machine lacks a resource to fork a worker."""

    worker: int
    reason: str


class Exited(NamedTuple):
    """A worker ended."""

    pid: int
    status: int
    """As of ``os.waitpid``."""


# -- server to worker


class AddLoader(NamedTuple):
    """A loader whose tasks follow."""

    loader: str
    """Its key."""
    spec: Mapping[str, Any]
    length: int
    """Samples in the dataset; 0 if it has no length."""


class Load(NamedTuple):
    """Load a batch."""

    task_id: int
    """Ascending in each pool."""
    loader: str
    epoch: int
    batch: int
    indices: bytes | None
    """With a client-side sampler, the frame of the index list. Last, because `Channel` sends it without a copy."""


class ForgetLoader(NamedTuple):
    """Release the state of a loader."""

    loader: str


class FreeSlots(NamedTuple):
    """Slots that have no reader any more."""

    slots: Sequence[int]


# -- worker to server


class Started(NamedTuple):
    """Report that a worker process runs and begins its initialization; carries the descriptor of its notes."""

    pid: int


class Ready(NamedTuple):
    """The worker accepts tasks."""


class Progress(NamedTuple):
    """The worker is not unresponsive, although it has no result yet."""


class PassStarted(NamedTuple):
    """The worker iterates its shard of an iterable-style dataset from the beginning."""

    began: Sequence[Any]
    """`Began`, which the server returns with `ForkWorker`."""


class SlotCreated(NamedTuple):
    """The worker made shared memory; its descriptor travels with the message."""

    slot: int
    nbytes: int


class SlotRemoved(NamedTuple):
    """The worker released a free slot."""

    slot: int


class Result(NamedTuple):
    """A completed task."""

    task_id: int
    frame: bytes | int
    """The frame, or the slot that contains it."""
    nbytes: int
    report: Report
    reached: Sequence[Any] | None
    """`Reached`, which the server returns with `ForkWorker`."""


class Done(NamedTuple):
    """Results of completed tasks: several small ones in one message."""

    results: Sequence[Result]


Message = (
    Load | Done | FreeSlots | AddLoader | ForgetLoader | Progress | SlotCreated | SlotRemoved | PassStarted | Started
    | Ready | Build | ForkWorker | Split | Built | BuildFailed | Forked | ForkFailed | Exited
)  # fmt: skip
_TYPES: Final = get_args(Message)
_CODES: Final = {kind: code for code, kind in enumerate(_TYPES)}


def encode(message: Message) -> list[Any]:
    """Return a message as a list for `Channel`."""
    return [_CODES[type(message)], *message]


def decode(encoded: Sequence[Any]) -> Message:
    """Return the message that `encode` was given."""
    code, *fields = encoded
    kind = _TYPES[code]
    if kind is not Done:
        message: Message = kind(*fields)
        return message
    return Done([Result(id_, frame, n, Report(*report), reached) for id_, frame, n, report, reached in fields[0]])


# -- notes of a worker: a file in shared memory

STACK_SIGNAL: Final = signal.SIGRTMIN + 13
"""Signal upon which a worker appends the stacks of its threads to its notes, whatever it does."""

BEGUN: Final = struct.Struct("<q")
"""First field, written by the worker: the task that it started last, -1 for none.

A message cannot report it: a worker that hangs sends none, results are sent in groups, and none at all is sent while C
code holds the interpreter's lock.
"""
REVOKED: Final = struct.Struct("<q")
"""Second field, written by the server: the worker skips tasks up to this one, unless it has started them.

If both sides write at the same time, a batch may be computed twice; the server ignores the result of a revoked task.
"""
