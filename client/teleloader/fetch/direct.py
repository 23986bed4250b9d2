"""In-process loading of a dataset object in the thread that calls ``next()`` (``num_workers=0``).

Replaces server, receiver and reorder buffer: the server package loads each batch when the training loop waits for it,
so the settings of the training loop's thread apply in the dataset, as in torch. Batches are never encoded.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from teleloader.fetch.reorder import Arrived
from teleloader.fetch.scheduler import RangeScheduler
from teleloader.state import Position
from teleloader.stats import Measures
from teleloader.tensors.devices import CopyTimes, Device
from teleloader.tensors.memory import HostBuffers, pageable_memory
from teleloader.tensors.output import Output, has_leaves, map_leaves
from teleloader_shared import dtypes
from teleloader_shared.codec import BatchId, End, Frame, Substituted
from teleloader_shared.errors import InvalidSpec, TeleloaderError
from teleloader_shared.lengths import Lengths
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.orders.plan import Plan
from teleloader_shared.spec import LoaderSpec
from teleloader_shared.tree import Tensor, flatten

_HERE: Final = "this process"
"""Used in messages in place of a server's URL."""


class Epoch(Protocol):
    """Interface of one iteration over a dataset object; implemented by the server package."""

    def batch(self, number: int, indices: Any) -> tuple[Any, str | None, Substituted | None]:
        """Load batch `number`.

        Args:
            number: Batch number.
            indices: Sample indices of the batch, a single index with ``batch_size=None`` and a sampler, or () for an
                iterable-style dataset.

        Returns:
            A tuple of the batch, or of `End` after the last batch, the shard state, and the skipped and replaced
            samples. The shard state is None if the dataset is map-style or not stateful.

        Raises:
            BaseException: If the dataset or the collate function raises an exception; it is raised unchanged.
        """

    def close(self) -> None:
        """Release the dataset's iterator."""


class Workers(Protocol):
    """Interface of workers that load a loader's batches in the calling thread; used by `teleloader.testing`."""

    def frame(self, batch_id: BatchId, indices: bytes | None, error: BaseException | None) -> NDArray[np.uint8]:
        """Load a batch and encode it as a frame; if loading raises an exception, encode a failure frame.

        Args:
            batch_id: Identifier of the batch.
            indices: Encoded sample indices of the batch; None if the workers compute the indices.
            error: Exception to encode in place of the batch; None to load the batch.
        """

    def close(self) -> None:
        """Release the dataset's iterators."""


class Loader(Protocol):
    """Interface of the in-process loader in the server package (entry point ``teleloader.load``)."""

    @property
    def info(self) -> DatasetInfo:
        """Current dataset description."""

    @property
    def lengths(self) -> Lengths | None:
        """Current lengths of the samples; None if the dataset states none."""

    def beginning(self, epoch: int) -> str | None:
        """Return the dataset's state for resuming at the start of `epoch`, or None if the dataset has no state."""

    def begin(self, spec: LoaderSpec, epoch: int, *, seeded: bool, torch: bool) -> Epoch:
        """Start an iteration over the dataset.

        Args:
            spec: Parameters of the loader.
            epoch: Epoch number.
            seeded: Whether the `seed` argument was given.
            torch: Whether batches consist of torch tensors.
        """

    def workers(self, spec: LoaderSpec, functions: Mapping[str, Callable[..., Any]]) -> Workers:
        """Create workers that load the batches of a loader in the calling thread.

        Args:
            spec: Parameters of the loader.
            functions: Collate and worker-init functions, by the names that specs use.
        """


class DirectDataset:
    """Dataset object that is loaded in the calling thread; counterpart of `RemoteDataset`.

    Args:
        loader: In-process loader of the object.
    """

    is_here: Final = True

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        info = loader.info
        self.name = info.name
        self.iterable = info.kind == "iterable"
        self.cpus = info.cpus

    @property
    def info(self) -> DatasetInfo:
        """Current dataset description."""
        return self.loader.info

    def lengths(self) -> Lengths:
        """Return the lengths of the samples.

        Raises:
            InvalidSpec: If the dataset states no lengths.
        """
        found = self.loader.lengths
        if found is None:
            raise InvalidSpec(f"dataset {self.name!r} states no lengths: define its attribute sample_lengths")
        return found

    def at_beginning(self, position: Position) -> Position:
        """Add the current state of a stateful dataset to a start-of-epoch position; return others unchanged."""
        if position.batch or position.shard_states is not None:
            return position
        state = self.loader.beginning(position.epoch)
        return position if state is None else position._replace(shard_states=(state,))


class Raised:
    """Exception to raise in place of a batch.

    The exception must be removed from this object before it is raised: its traceback refers to frames that refer to
    this object, and the reference cycle would keep the dataset in memory until the garbage collector runs.
    """

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class DirectReceiver:
    """In-process counterpart of `Receiver` and `ReorderBuffer`: loads each batch when the training loop waits for it.

    Args:
        dataset: Dataset to load.
        spec: Parameters of the loader.
        epoch: Epoch number.
        scheduler: Holds the position of the training loop; schedules no requests.
        plan: Indices of all batches; None for an iterable-style dataset, and for a client-side sampler.
        measures: Counters of loaded batches.
        output: Array library of the batches.
        seeded: Whether the `seed` argument was given.
        pinned: Allocator of page-locked memory to copy tensors into; None for no copy.
    """

    loads_ahead: Final = False

    def __init__(
        self,
        dataset: DirectDataset,
        spec: LoaderSpec,
        epoch: int,
        scheduler: RangeScheduler,
        plan: Plan | None,
        measures: Measures,
        output: Output,
        *,
        seeded: bool,
        pinned: HostBuffers | None,
    ) -> None:
        self.scheduler = self.requests = scheduler
        self.measures = measures
        self._epoch = dataset.loader.begin(spec, epoch, seeded=seeded, torch=output == "torch")
        self._batch_id = BatchId(spec.key, epoch, 0)
        self._plan = plan
        is_torchs = output == "torch" and spec.collate is None and spec.packing is None
        self._convert = _converter(output, walk=not is_torchs, pinned=pinned)
        self._packs = spec.packing is not None
        self._iterable = dataset.iterable
        self._lists: dict[int, Any] = {}
        """Index lists of a client-side sampler for batches that the training loop has not received, by batch number."""
        self._lock = threading.RLock()
        """Held while a batch is loaded: with asyncio, each batch may be loaded in another thread."""
        self._arrived: Arrived | None = None
        self._interruption: str | None = None
        """Class name of the exception that interrupted an iterable-style dataset within a batch, or None."""

    @property
    def reorder_buffer(self) -> DirectReceiver:
        """This object: an in-process receiver is also the reorder buffer of its iteration."""
        return self

    @property
    def key(self) -> str:
        """Key of the loader."""
        return self._batch_id.loader

    def peek(self) -> Arrived | None:
        """Return the next batch, or the exception or end of shard in its place, or None if the batch is not loaded."""
        return self._arrived

    def wait(self, timeout: float = 0) -> None:
        """Load the next batch in this thread, unless it is loaded already; `timeout` is ignored.

        Raises:
            BaseException: If loading is interrupted, for example by Ctrl-C; for a map-style dataset, the next call
                loads the batch again.
            TeleloaderError: If an earlier call was interrupted while it loaded a batch of an iterable-style dataset.
        """
        with self._lock:
            if self._arrived is not None:
                return
            if self._interruption is not None:
                raise _interrupted(self.scheduler.taken, self._interruption)
            try:
                self._arrived = Arrived(self._frame(), _HERE, 0)
            except BaseException as error:
                if self._iterable and self._arrived is None:  # the samples yielded so far for this batch are lost
                    self._interruption = type(error).__name__
                raise

    async def arrival(self) -> None:
        """Load the next batch in another thread, so that the event loop is not blocked."""
        await asyncio.to_thread(self.wait)

    def take(self, number: int) -> None:
        """Remove the batch that `peek` returned, unless it was already removed."""
        if self._arrived is not None and self._arrived.frame.batch_id.batch == number:
            self.scheduler.taken = number + 1
            self._lists.pop(number, None)
            self._arrived = None

    @staticmethod
    def index_list(batch_id: BatchId, indices: Any) -> Any:
        """Return the indices from a sampler unchanged, because in-process loading does not encode them."""
        return indices

    def feed(self, indices: dict[int, Any]) -> None:
        """Queue further index lists from a client-side sampler, by batch number."""
        if indices:
            self._lists.update(indices)
            self.scheduler.extend(max(indices) + 1)

    def complete(self) -> None:
        """Do nothing: no requests wait for index lists."""

    def close(self, why: BaseException | None = None) -> None:
        """Release the dataset's iterator; `why` is ignored, because no thread waits for a batch."""
        self._epoch.close()

    def end_session(self) -> None:
        """Do nothing: in-process loading uses no workers."""

    def _frame(self) -> Frame:
        batch_id = self._batch_id._replace(batch=self.scheduler.taken)
        state = substituted = None
        try:
            content, state, substituted = self._epoch.batch(batch_id.batch, self._indices(batch_id.batch))
            if isinstance(content, End):
                self.scheduler.stop = batch_id.batch + 1
            else:
                content = self._convert(content)
                self.measures.batches += 1
        except StopIteration as stop:  # torch would end the epoch silently, and samples would be lost
            return Frame(batch_id, _stopped(stop), 0, 0, state)
        except Exception as error:  # noqa: BLE001 - raised in place of the batch
            return Frame(batch_id, Raised(error), 0, 0, state)
        return Frame(batch_id, content, 0, 0, state, substituted=substituted)

    def _indices(self, number: int) -> Any:
        if self._iterable or self._packs:  # packing determines the indices, which are no samples of the batch
            return ()
        return self._lists[number] if self._plan is None else self._plan[number]


def _stopped(stop: StopIteration) -> Raised:
    error = RuntimeError(
        "the dataset or the collate function raised StopIteration, which would end the epoch early: raise a different "
        "exception type, or catch StopIteration from next()"
    )
    error.__cause__ = stop
    return Raised(error)


def _interrupted(number: int, kind: str) -> TeleloaderError:
    return TeleloaderError(
        f"{kind} interrupted the iterable-style dataset in batch {number}, so the next samples are unknown. To "
        "continue with that batch, pass loader.state_dict() to loader.load_state_dict(), then call iter(loader)"
    )


class DirectStager:
    """In-process counterpart of `Stager`: copies each batch to a device when ``next()`` returns it.

    Args:
        device: Destination of the copies.
        measures: Collects the duration of the copies.
    """

    def __init__(self, device: Device, measures: Measures) -> None:
        self._device = device
        self._times = CopyTimes(device)
        self._measures = measures

    def use(self, frame: Frame) -> Any:
        """Copy a batch to the device and return the copy, for use on the current stream."""
        copy = self._device.copy(frame.content)
        self._times.add(copy)
        self._measures.copy += self._times.collect()
        return self._device.use(copy)

    def warn(self) -> None:
        """Do nothing: only a copying thread defers its warnings."""

    def discard(self, frame: Frame) -> None:
        """Do nothing: copies are not stored."""

    def close(self) -> None:
        """Do nothing: copies are made in the calling thread."""


def _converter(output: Output, *, walk: bool, pinned: HostBuffers | None) -> Callable[[Any], Any]:
    """Return a function that converts the arrays of a collated batch to the library `output`.

    Args:
        output: Array library of the batches.
        walk: Whether to search batches for arrays of other libraries; torch's own collate functions return none.
        pinned: Allocator of page-locked memory to copy tensors into; None for no copy.
    """

    def convert(batch: Any) -> Any:
        if walk:
            torch = None if output == "torch" else sys.modules.get("torch")
            kinds = (Tensor,) if torch is None else (Tensor, torch.Tensor)
            if has_leaves(batch, kinds):  # other batches are returned unchanged
                batch = map_leaves(batch, kinds, lambda leaf: _array_of(output, leaf))
        return batch if pinned is None else _pinned(batch, pinned)

    return convert


def _pinned(batch: Any, buffers: HostBuffers) -> Any:
    """Copy the tensors of a batch to page-locked memory; as in torch, a batch may define its own ``pin_memory()``."""
    import torch

    def pin(tensor: Any) -> Any:
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or name not in dtypes.NAMES:
            return tensor
        leaf = buffers.allocate(tensor.nbytes).leaf(0, name, tuple(tensor.shape), "tensor")
        return leaf.copy_(tensor.detach())

    if hasattr(batch, "pin_memory") and not isinstance(batch, torch.Tensor):
        return batch.pin_memory()
    return map_leaves(batch, torch.Tensor, pin)


def _array_of(output: Output, value: Any) -> Any:
    """Convert a torch tensor, or an array of type `Tensor`, to an array of the library `output`."""
    _, (leaf,) = flatten(value)
    bits = np.empty(leaf.shape, dtypes.storage(leaf.dtype_name))
    leaf.write(bits)
    return pageable_memory(output, bits.reshape(-1).view(np.uint8)).leaf(0, leaf.dtype_name, leaf.shape, "tensor")
