"""`DataLoader`: torch's, with its workers on a loader server."""

from __future__ import annotations

import itertools
import operator
import os
import socket
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, SupportsIndex

from teleloader.buffers import BufferPool, allocate
from teleloader.failures import exception_of
from teleloader.output import Output, array_maker, choose_output, pinned_memory
from teleloader.receiver import Receiver
from teleloader.remote import RemoteDataset
from teleloader.session import Session
from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES, Failure
from teleloader_shared.errors import StateMismatch
from teleloader_shared.plan import Plan
from teleloader_shared.spec import Compression, LoaderSpec, Tail

DEFAULT_PREFETCH_FACTOR: Final = 2
_STATE_VERSION: Final = 1


class DataLoader:
    """Iterates over the batches of a remote dataset, as ``torch.utils.data.DataLoader`` does over a local one.

    Each ``iter()`` is the next epoch, beginning with 0; `set_epoch` chooses it. What a batch holds depends on the
    arguments and the epoch only: not on workers, servers, or what happened before.

    Args:
        dataset: What to load.
        batch_size: Samples in a batch of this rank; None for single samples, not collated.
        shuffle: Whether each epoch has an order of its own, drawn from (seed, epoch). None is False.
        drop_last: Whether an incomplete last batch is left out.
        pin_memory: Whether to receive into page-locked memory, from which copies to an accelerator are fastest.
        timeout: Seconds to wait for a batch; 0 waits for as long as the server is there.
        prefetch_factor: Batches to hold ready for each worker of the server; None is 2. A loop that takes many small
            batches a second is given more, so that it does not feel the network's delay.
        seed: In [0, 2**64). Decides the order and the randomness of augmentation; the same on all ranks.
        rank: Position among `world_size` data-parallel processes. When neither is given they are those of
            torch.distributed where it is initialised, also for loaders of validation data; else 0 of 1.
        world_size: How many processes share the epoch.
        tail: When the dataset's length is no multiple of `world_size`: ``"pad"`` repeats samples (as torch's
            DistributedSampler does), ``"drop"`` leaves the rest out, ``"uneven"`` gives some ranks one more.
        output: ``"torch"`` or ``"numpy"``; None is torch where it is installed.
        checksum: Whether each batch carries a checksum, so that what the network damaged is asked for again.
        compression: ``"zstd"`` or ``"lz4"``: the workers compress arrays, for slow networks.
        max_batch_bytes: The largest batch that is accepted from the server, in bytes.

    Raises:
        ValueError: For arguments that exclude each other or are out of range; the texts are torch's where torch has
            the argument.
        TypeError: When `dataset` is no `RemoteDataset`.
    """

    def __init__(
        self,
        dataset: RemoteDataset,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        *,
        drop_last: bool = False,
        pin_memory: bool = False,
        timeout: float = 0,
        prefetch_factor: int | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail = "pad",
        output: Output | None = None,
        checksum: bool = True,
        compression: Compression | None = None,
        max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
    ) -> None:
        if not isinstance(dataset, RemoteDataset):
            raise TypeError(
                f"dataset must be a RemoteDataset, was {type(dataset).__qualname__}. To host a local object: "
                "with teleloader_server.serve(dataset) as url: DataLoader(RemoteDataset(url), ...)"
            )
        _check_as_torch_does(dataset, batch_size, shuffle, drop_last, timeout, prefetch_factor)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.timeout = timeout
        self.pin_memory = pin_memory
        self.prefetch_factor = DEFAULT_PREFETCH_FACTOR if prefetch_factor is None else prefetch_factor
        self._spec = LoaderSpec(
            dataset=dataset.name,
            fingerprint=dataset.info.fingerprint,
            batch_size=batch_size,
            shuffle=bool(shuffle),
            drop_last=drop_last,
            seed=seed,
            rank=rank or 0,
            world_size=1 if world_size is None else world_size,
            tail=tail,
            checksum=checksum,
            compression=compression,
        )
        # looked up when it is needed: the loader may be made before the process group
        self._distributed = rank is None and world_size is None
        kind = choose_output(output)
        make_buffer = pinned_memory(kind) if pin_memory else None
        self._make_array = array_maker(kind, pin_memory=make_buffer is not None)
        self._pool = BufferPool(make_buffer or allocate)
        self._max_batch_bytes = max_batch_bytes
        self._epoch = 0
        """Of the next iter()."""
        self._start = 0
        """First batch of the next iter()."""
        self._progress: _Progress | None = None
        """Of the last iterator."""

    @property
    def spec(self) -> LoaderSpec:
        """What is asked of the server; rank and world size are those of torch.distributed by now, unless given."""
        if self._distributed:
            rank, world_size = _distributed()
            return replace(self._spec, rank=rank, world_size=world_size)
        return self._spec

    def __len__(self) -> int:
        return len(self.plan(0))

    def __iter__(self) -> Iterator[Any]:
        if self.prefetch_factor < 1:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        batches = len(self.plan(self._epoch))
        # under tail="uneven" rank 0 has the most
        longest = len(Plan(replace(self.spec, rank=0), len(self.dataset), self._epoch))
        self._progress = _Progress(self._epoch, min(self._start, batches), batches, longest)
        self._epoch, self._start = self._epoch + 1, 0
        return _Iterator(self, self._progress)

    def plan(self, epoch: int) -> Plan:
        """Which samples the batches of an epoch hold: ``plan[k]`` are the int64 indices of batch k."""
        return Plan(self.spec, len(self.dataset), epoch)

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Make the next ``iter()`` that epoch, as ``DistributedSampler.set_epoch`` does.

        After `load_state_dict`, the epoch that was interrupted still goes on where it was.
        """
        if not isinstance(epoch, SupportsIndex) or isinstance(epoch, bool) or operator.index(epoch) < 0:
            raise ValueError(f"epoch must be a whole number from 0, was {epoch!r}")
        if epoch != self._epoch:
            self._epoch, self._start = operator.index(epoch), 0
        if self._progress is not None and self._progress.position[0] != epoch:
            self._progress = None

    def state_dict(self) -> dict[str, Any]:
        """Where the last iterator stands, or the next one will begin: about 100 bytes that JSON can hold.

        It counts the samples that all ranks together have been given, so it is the same on each rank, and fits
        another number of ranks when ``batch_size * world_size`` divides it.
        """
        epoch, batch = (self._epoch, self._start) if self._progress is None else self._progress.position
        return {
            "version": _STATE_VERSION,
            "epoch": epoch,
            "samples": batch * self._global_batch_size,
            "dataset": self.dataset.info.fingerprint,
            "seed": self.spec.seed,
            "shuffle": self.spec.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: with the next ``iter()``, at exactly the next batch.

        Raises:
            StateMismatch: When `state` belongs to another dataset, seed or order, or its position lies within a
                global batch of this loader.
        """
        if not isinstance(state, dict) or "epoch" not in state:
            raise StateMismatch(f"a state is what state_dict() of a loader returned, was {state!r:.200}")
        expected = {**self.state_dict(), "epoch": state.get("epoch"), "samples": state.get("samples")}
        for name, value in expected.items():
            if state.get(name) != value:
                raise StateMismatch(
                    f"the state was saved with {name} = {state.get(name)!r}, and this loader has {value!r}: "
                    "resume with the loader's old arguments and data, or begin a new run"
                )
        epoch, samples = state.get("epoch"), state.get("samples")
        if not isinstance(epoch, int) or not isinstance(samples, int) or epoch < 0 or samples < 0:
            raise StateMismatch(f"a state's epoch and samples must be numbers from 0, were {epoch!r} and {samples!r}")
        batch, rest = divmod(samples, self._global_batch_size)
        if rest:
            raise StateMismatch(
                f"the state stands after {samples} samples, which is no multiple of this loader's batch_size * "
                f"world_size = {self._global_batch_size}: choose them so that they divide it"
            )
        self._epoch, self._start = epoch, batch
        self._progress = None

    @property
    def _global_batch_size(self) -> int:
        return (self.batch_size or 1) * self.spec.world_size

    def __repr__(self) -> str:
        spec = self.spec
        ranks = f", rank={spec.rank}, world_size={spec.world_size}, tail={spec.tail!r}" if spec.world_size > 1 else ""
        return (
            f"DataLoader({self.dataset!r}, batch_size={spec.batch_size}, shuffle={spec.shuffle}, "
            f"drop_last={spec.drop_last}, seed={spec.seed}{ranks})"
        )


@dataclass(slots=True)
class _Progress:
    """How far a pass through an epoch is; outlives its iterator, so that a loop that was left can be resumed."""

    epoch: int
    batch: int
    """The next one."""
    batches: int
    longest: int
    """Batches of the rank that has the most."""
    finished: bool = False
    """Whether the loop was told that there are no more."""

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, batch) that comes next; after the last batch, the beginning of the next epoch."""
        over = self.finished or self.batch >= self.longest
        return (self.epoch + 1, 0) if over else (self.epoch, self.batch)


class _Iterator:
    """One pass through an epoch; its thread and connections end when it ends, or is not referred to any more."""

    _numbers = itertools.count()

    def __init__(self, loader: DataLoader, progress: _Progress) -> None:
        self._timeout = loader.timeout
        self._url = loader.dataset.url
        self._progress = progress
        self._receiver = Receiver(
            dataset=loader.dataset,
            spec=loader.spec,
            epoch=progress.epoch,
            session=Session(progress.batch, progress.batches, loader.prefetch_factor),
            consumer=f"{socket.gethostname()}:{os.getpid()}/rank{loader.spec.rank}#{next(self._numbers)}",
            make_array=loader._make_array,
            pool=loader._pool,
            max_batch_bytes=loader._max_batch_bytes,
        )
        self._close = weakref.finalize(self, self._receiver.close)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._progress.batch >= self._progress.batches:
            self._progress.finished = True
            self._close()
            raise StopIteration
        frame = self._receiver.take(self._timeout)
        self._progress.batch += 1
        if isinstance(frame.content, Failure):
            raise exception_of(frame.content, frame.address, self._url)
        return frame.content


def _distributed() -> tuple[int, int]:
    """(rank, world size) of torch.distributed where it is initialised, without loading torch for it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _check_as_torch_does(
    dataset: RemoteDataset,
    batch_size: Any,
    shuffle: bool | None,
    drop_last: Any,
    timeout: float,
    prefetch_factor: int | None,
) -> None:
    """The checks, and their words, of ``torch.utils.data.DataLoader`` 2.13."""
    if timeout < 0:
        raise ValueError("timeout option should be non-negative")
    if prefetch_factor is not None and prefetch_factor < 0:
        raise ValueError("prefetch_factor option should be non-negative")
    if batch_size is None and drop_last:
        raise ValueError("batch_size=None option disables auto-batching and is mutually exclusive with drop_last")
    if shuffle and len(dataset) == 0:
        raise ValueError("num_samples should be a positive integer value, but got num_samples=0")
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size <= 0):
        raise ValueError(f"batch_size should be a positive integer value, but got batch_size={batch_size}")
    if not isinstance(drop_last, bool):
        raise ValueError(f"drop_last should be a boolean value, but got drop_last={drop_last}")
