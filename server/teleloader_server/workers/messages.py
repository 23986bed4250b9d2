"""Messages between the server, its fork server and its workers.

A message is encoded as a list of its type code and its fields. All processes run the same code, so types are not
checked. File descriptors are sent together with a message (`Channel`). A worker publishes some state in its status
file, a file in shared memory, because it must do so even if it cannot send messages; the end of this module defines
the fields of this file.
"""

from __future__ import annotations

import signal
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

from teleloader_server.loading.tasks import CacheCounts, GroupReport

# -- server to fork server


class Build(NamedTuple):
    """Message to the fork server: construct the datasets."""

    configs: Sequence[Mapping[str, Any]]
    """Fields of each `DatasetConfig`."""
    path: Sequence[str]
    """``sys.path`` of the server."""


class ForkWorker(NamedTuple):
    """Message to the fork server: fork a worker; sent with the worker's end of a channel (file descriptor)."""

    worker: int
    """Worker ID."""
    num_workers: int
    max_batch_bytes: int
    free_limit: int
    """Maximum free shared memory that the worker keeps, in bytes."""
    session: Mapping[str, Any] | None
    """Spec of the loader to which a private worker belongs, as JSON; None for a shared worker."""
    began: Sequence[Any] | None
    """Last `Began` of the worker that this one replaces; None if there was none."""
    reached: Sequence[Any] | None
    """Last `Reached` of the worker that this one replaces; None if there was none."""
    max_replay: int
    """Maximum number of batches of a shard to iterate again; 0 for no limit."""
    max_memory: int
    """Resident memory in bytes above which the shard with a shuffle buffer fails; 0 for no limit."""


class Split(NamedTuple):
    """Message to the fork server: fork another fork server; sent with its end of a channel (file descriptor)."""


# -- fork server to server


class Built(NamedTuple):
    """Message from the fork server: the datasets are constructed."""

    pid: int
    datasets: Sequence[Mapping[str, Any]]
    """Fields of each `DatasetInfo`."""
    code: Sequence[Any]
    """`SourceFiles` of the datasets that the fork server constructed."""


class BuildFailed(NamedTuple):
    """Message from the fork server: a dataset cannot be constructed."""

    reason: str


class Forked(NamedTuple):
    """Message from the fork server: a worker was forked."""

    worker: int
    pid: int


class ForkFailed(NamedTuple):
    """Message from the fork server: a worker cannot be forked, because a resource is unavailable."""

    worker: int
    reason: str


class Exited(NamedTuple):
    """Message from the fork server: a worker process exited."""

    pid: int
    status: int
    """Exit status in the format of ``os.waitpid``."""


# -- server to worker


class AddLoader(NamedTuple):
    """Message to a worker: definition of a loader, sent before the loader's first task."""

    loader: str
    """Key of the loader."""
    spec: Mapping[str, Any]
    length: int
    """Length of the dataset; 0 if unknown."""


class Load(NamedTuple):
    """Message to a worker: load a group of batches of an epoch, in ascending order; most groups have one batch."""

    task_id: int
    """ID of the first batch's task. IDs ascend within the pool, and are consecutive within the group."""
    loader: str
    epoch: int
    batch: int
    """Number of the first batch."""
    batches: int
    """Number of batches."""
    step: int
    """Difference between the numbers of successive batches."""
    owner: int
    """Owner of the batches (`Task.owner`)."""
    substituted: Sequence[tuple[int, Sequence[Any]]]
    """`Substituted` record of each batch that has one (`Task.substituted`), with the place of the batch in the group.
    """
    indices: bytes | None
    """Concatenated frames with the index list of each batch, for a client-side sampler; None in seeded order. `Channel`
    does not copy the last field."""


class ForgetLoader(NamedTuple):
    """Message to a worker: release the state of a loader."""

    loader: str


class PoolResized(NamedTuple):
    """Message to a worker: the number of workers has changed."""

    num_workers: int
    free_limit: int
    """See `ForkWorker`."""


class FreeSlots(NamedTuple):
    """Message to a worker: shared-memory slots are free for reuse, because the server has released their frames."""

    slots: Sequence[int]
    owners: Sequence[int]
    """Owner of each slot (`LendableSlot.owner`)."""


# -- worker to server


class Started(NamedTuple):
    """Message from a worker whose process has started to initialize; sent with the status file's descriptor."""

    pid: int


class Ready(NamedTuple):
    """Message from a worker: it is initialized and accepts tasks."""


class Progress(NamedTuple):
    """Message from a worker: progress without a result, while the worker skips batches or fills a shuffle buffer."""

    replayed: Sequence[Any] | None = None
    """`Replayed` record while the worker skips batches; None otherwise."""


class PassStarted(NamedTuple):
    """Message from a worker: a pass over its shard of an iterable-style dataset has started."""

    began: Sequence[Any]
    """`Began` record of the pass; the server sends the record to the worker's replacement."""


class SlotCreated(NamedTuple):
    """Message from a worker: a shared-memory slot was created; sent with the slot's file descriptor."""

    slot: int
    nbytes: int


class SlotRemoved(NamedTuple):
    """Message from a worker: a free slot was returned to the system, and the server must unmap it."""

    slot: int


class Done(NamedTuple):
    """Message from a worker: one completed task, or several successive ones of a group."""

    task_id: int
    """ID of the first task; the others follow consecutively."""
    frames: bytes | int
    """Content of small frames, one after the other, or number of the slot that contains the frames."""
    sizes: Sequence[int]
    """Size of each frame in bytes."""
    report: GroupReport
    reached: Sequence[Any] | None
    """`Reached` record of the pass, for a replacement of the worker; None for a map-style dataset."""


Message = (
    Load | Done | FreeSlots | AddLoader | ForgetLoader | Progress | SlotCreated | SlotRemoved | PassStarted | Started
    | Ready | PoolResized | Build | ForkWorker | Split | Built | BuildFailed | Forked | ForkFailed | Exited
)  # fmt: skip
_TYPES: Final = get_args(Message)
_CODES: Final = {kind: code for code, kind in enumerate(_TYPES)}


def encode(message: Message) -> list[Any]:
    """Encode a message as a list that a `Channel` can send."""
    return [_CODES[type(message)], *message]


def decode(encoded: Sequence[Any]) -> Message:
    """Decode a message from a list that a `Channel` received."""
    code, *fields = encoded
    kind = _TYPES[code]
    if kind is not Done:
        message: Message = kind(*fields)
        return message
    task_id, frames, sizes, report, reached = fields
    lengths, counts = tuple(report[-2]), CacheCounts(*report[-1])
    return Done(task_id, frames, sizes, GroupReport(*report)._replace(lengths=lengths, cache=counts), reached)


# -- status file of a worker, in shared memory

STACK_SIGNAL: Final = signal.SIGRTMIN + 13
"""Signal that makes a worker append the stacks of its threads to its status file, even while the worker hangs.

A real-time signal, because the standard ones have other uses: dataset code may use SIGUSR1 and SIGUSR2. If dataset code
has set a handler of its own for this signal, the worker does not replace the handler, and the server sends no signal.
"""

CURRENT_TASK: Final = struct.Struct("<q")
"""First field, written by the worker: ID of the task that it started last, or -1.

Not a message, because a worker that hangs sends none, results are sent in groups, and no message is sent while C code
holds the GIL.
"""
REVOKED: Final = struct.Struct("<q")
"""Second field, written by the server: the worker skips tasks up to this ID, unless it has already started them.

If both sides write at the same time, a batch may be computed twice; the server ignores the result of a revoked task.
"""
STACK_READY: Final = struct.Struct("<q")
"""Third field, written by the worker: 1 while `STACK_SIGNAL` writes its stacks, 0 if dataset code handles it."""
CURRENT_SAMPLE: Final = struct.Struct("<q")
"""Fourth field, written by the worker: index of the sample that it fetches, or `NO_SAMPLE` (`Context.sample`)."""
STATUS_BYTES: Final = CURRENT_TASK.size + REVOKED.size + STACK_READY.size + CURRENT_SAMPLE.size
"""Size of the fields; stacks follow."""
