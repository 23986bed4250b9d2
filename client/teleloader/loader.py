"""`DataLoader`: torch's, with its workers on a loader server."""

from __future__ import annotations

import itertools
import operator
import secrets
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context
from types import GenericAlias
from typing import Any, ClassVar, Final, Literal, SupportsIndex

from teleloader import state
from teleloader.arguments import Arguments, check, check_iteration, warn_of_pinning, warn_of_too_many_workers
from teleloader.dataset import RemoteDataset
from teleloader.fetch.direct import DirectDataset, DirectReceiver, DirectStager
from teleloader.fetch.fetcher import FetchOptions
from teleloader.fetch.iteration import AsyncLoaderIterator, Iteration, LoaderIterator, Progress
from teleloader.fetch.length_check import LengthCheck
from teleloader.fetch.receiver import Receiver
from teleloader.fetch.scheduler import RangeScheduler
from teleloader.fetch.stager import Stager
from teleloader.frameworks import SkippedBatches, integrate_accelerate
from teleloader.functions import name_on_server
from teleloader.hosting import find_dataset
from teleloader.sampling import (
    PROCESS_GENERATORS,
    Batches,
    IndexLists,
    RandomState,
    ShownSamplers,
    draw_base_seed,
    end_epoch,
    initial_state,
    is_torchs_own,
    make_samplers,
    torchs_collate,
)
from teleloader.state import Position
from teleloader.stats import LoaderStats, Measures
from teleloader.tensors.devices import (
    Device,
    JaxDevice,
    TorchDevice,
    check_sharding,
    current_accelerator,
    parse_device,
    warn_of_shared_device,
    with_index,
)
from teleloader.tensors.memory import HostBuffers
from teleloader.tensors.output import Output, choose_output
from teleloader.tensors.pinned import process_budget
from teleloader.transport.tracing import IterationTrace
from teleloader_shared import local, tracing
from teleloader_shared.buffers import BufferPool
from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES
from teleloader_shared.errors import ProtocolError, TeleloaderError
from teleloader_shared.messages import Registration
from teleloader_shared.orders.plan import Plan
from teleloader_shared.orders.seeding import derive_seed
from teleloader_shared.spec import MAX_EPOCH, Compression, LoaderSpec, Tail

DEFAULT_PREFETCH_FACTOR: Final = 2
DEFAULT_DEVICE_AHEAD: Final = 2
_FIXED: Final = ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers")
"""What torch does not let be set after construction."""

_Order = Literal["plan", "client", "iterable"]
_numbers = itertools.count()
"""Loaders of this process, for servers to tell their training loops apart."""


class DataLoader:
    """Iterates over the batches of a remote dataset, as ``torch.utils.data.DataLoader`` does over a local one.

    The arguments up to `in_order` are torch's (2.13), with its defaults, exclusions and error texts; what differs is
    listed in docs/differences.md. Each ``iter()`` is the next epoch, beginning with 0; `set_epoch` chooses it.

    Who decides the order, and so what can be done with it:

    - With `seed`, or where there is nothing to shuffle: the plan, a function of (seed, epoch) that every server knows.
      Batches can be shared between trainers, nothing is computed beforehand however long the dataset is, and a state
      fits another number of ranks.
    - With `sampler`, `batch_sampler` or `generator`, or ``shuffle=True`` without `seed`: torch's samplers or your own,
      on this side, bit for bit as in torch under the same ``torch.manual_seed``. Index lists are sent to the server.
      (Without torch, for other outputs than torch's, and for several ranks, ``shuffle=True`` is the plan with seed 0.)
    - An iterable-style dataset itself: `num_workers` shards, batch j from shard j mod `num_workers`.

    Args:
        dataset: What to load: a `RemoteDataset`, or an object of this process, which is loaded or served here for as
            long as it is used.
        batch_size: Samples in a batch of this rank; None for single samples, not collated.
        shuffle: Whether each epoch has an order of its own. None is False.
        sampler: Gives the indices, in place of `shuffle`.
        batch_sampler: Gives index lists, in place of `batch_size`, `shuffle`, `sampler` and `drop_last`.
        num_workers: Workers to ask the server for: shards of an iterable-style dataset (0: one pass, and
            ``get_worker_info()`` is None), or the workers of an object that this process serves (0: as many as
            ``serve`` was told). A configured server shares its workers among the loaders of a map-style dataset,
            whatever is asked for. An object passed as `dataset` is loaded with 0 in the thread that calls ``next()``.
        collate_fn: Makes a batch of a list of samples, on the server; None is the server's usual function, else one
            that it allows by name, or any one for a server in this process.
        pin_memory: Whether to receive into page-locked memory, from which copies to an accelerator are fastest.
        drop_last: Whether an incomplete last batch is left out.
        timeout: Seconds to wait for a batch; 0 waits for as long as the server is there.
        worker_init_fn: Called in each worker of this loader's own with its number; found like `collate_fn`.
        multiprocessing_context: Checked as torch does, and without effect: no process is started here.
        generator: torch.Generator that the order and the base seed are drawn from.
        prefetch_factor: Batches to hold ready for each worker of the server; None is 2. A loop that takes many small
            batches a second is given more, so that it does not feel the network's delay, unless the order is that of
            a sampler of your own, which may look at how training goes on.
        persistent_workers: Whether workers of this loader's own stay from one epoch to the next.
        pin_memory_device: Without effect, as in torch.
        in_order: Without effect: batches always come in order.
        seed: In [0, 2**64). Decides order and augmentation by the plan; the same on all ranks. None is torch's way.
        rank: Position among `world_size` data-parallel processes. When neither is given they are those of
            torch.distributed where it is initialised, also for loaders of validation data; else 0 of 1. A sampler
            divides the epoch itself.
        world_size: How many processes share the epoch.
        tail: When the dataset's length is no multiple of `world_size`: ``"pad"`` repeats samples (as torch's
            DistributedSampler does), ``"drop"`` leaves the rest out, ``"uneven"`` gives some ranks one more.
        output: ``"torch"``, ``"numpy"`` or ``"jax"``; None is torch where it is installed, else NumPy.
        checksum: Whether each batch carries a checksum, so that what the network damaged is asked for again.
        compression: ``"zstd"`` or ``"lz4"``: the workers compress arrays, for slow networks.
        max_batch_bytes: The largest batch that is accepted from the server, in bytes.
        device: Accelerator to copy the tensors of batches to: a torch.device, a string such as ``"cuda"`` or
            ``"cuda:1"``, or an index; None (the default) leaves them in main memory. ``"cuda"`` is the device that is
            current when ``iter()`` is called. Batches are received into page-locked memory and copied by a thread, on a
            stream of their own, when they arrive. The current stream of the thread that calls ``next()`` waits for the
            copy: a batch can be used at once, and kept. See docs/accelerators.md.
        device_transform: Called with each batch where it is (on `device`, if one is given), in the thread and on the
            stream that call ``next()``; its result is the batch. For example a cast: ``uint8`` travels, and becomes
            floating-point there. An exception takes the place of the batch, except that after running out of device
            memory, or an interruption such as Ctrl-C, the next ``next()`` copies and transforms the same batch anew.
        device_ahead: Batches to copy to a device before the training loop requests them, from 0 on; 2 by default. Each
            takes device memory.
        sharding: With ``output="jax"``, a jax.sharding.Sharding that lays the arrays out over devices; each process
            gives its own part (``jax.make_array_from_process_local_data``). None (the default) is JAX's default device.

    Raises:
        ValueError: For arguments that exclude each other or are out of range, and functions that the server does not
            allow.
        TypeError: When `dataset` is no dataset, or has no length and one is needed.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        tail: Tail = "pad",
        output: Output | None = None,
        checksum: bool = True,
        compression: Compression | None = None,
        max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
        device: Any = None,
        device_transform: Callable[[Any], Any] | None = None,
        device_ahead: int = DEFAULT_DEVICE_AHEAD,
        sharding: Any = None,
    ) -> None:
        remote = find_dataset(dataset, num_workers)
        check(
            Arguments(
                dataset=dataset, batch_size=batch_size, shuffle=shuffle, sampler=sampler, batch_sampler=batch_sampler,
                num_workers=num_workers, drop_last=drop_last, timeout=timeout,
                multiprocessing_context=multiprocessing_context, prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers, iterable=remote.iterable, cpus=remote.cpus,
            )
        )  # fmt: skip
        brings_order = sampler is not None or batch_sampler is not None
        _check_ours(seed, rank, world_size, brings_order=brings_order, generator=generator)
        self.dataset = dataset
        self._remote = remote
        self.num_workers = num_workers
        self.collate_fn = collate_fn
        self.pin_memory_device = pin_memory_device
        self.timeout = timeout
        self.worker_init_fn = worker_init_fn
        self.generator = generator
        self.prefetch_factor = DEFAULT_PREFETCH_FACTOR if num_workers and prefetch_factor is None else prefetch_factor
        self.persistent_workers = persistent_workers
        self.in_order = in_order
        self.multiprocessing_context = (
            get_context(multiprocessing_context)
            if isinstance(multiprocessing_context, str)
            else multiprocessing_context
        )
        self.batch_size = None if batch_sampler is not None else batch_size
        self.drop_last = False if batch_sampler is not None else drop_last
        self._output: Output = choose_output(output)
        self.pin_memory = pin_memory
        self.device = device
        self.device_transform = device_transform
        self.device_ahead = device_ahead
        self.sharding = sharding
        self._own_sampler = sampler if batch_sampler is None else batch_sampler
        self._shuffle = bool(shuffle)
        self.sampler, self.batch_sampler = sampler, batch_sampler
        if not remote.iterable and (self._output == "torch" or generator is not None):
            self.sampler, made = make_samplers(dataset, self.batch_size, self._shuffle, drop_last, sampler, generator)
            self.batch_sampler = made if batch_sampler is None else batch_sampler
        elif sampler is not None and batch_size is not None:
            self.batch_sampler = Batches(sampler, batch_size, drop_last)
        self._shown = ShownSamplers() if brings_order else ShownSamplers(self.sampler, self.batch_sampler)
        self._seed = seed
        self._spec = LoaderSpec(
            dataset=remote.name,
            batch_size=batch_size,
            shuffle=self._shuffle,
            drop_last=bool(self.drop_last),
            seed=seed or 0,
            rank=rank or 0,
            world_size=1 if world_size is None else world_size,
            tail=tail,
            checksum=checksum,
            compression=compression,
            collate=name_on_server(self, "collate_fn", collate_fn, remote, batched=self._batched),
            worker_init=name_on_server(self, "worker_init_fn", worker_init_fn, remote),
        )
        # looked up when it is needed: the loader may be made before the process group
        self._distributed = rank is None and world_size is None and not brings_order
        self._pool = BufferPool()
        self._number = next(_numbers)
        self._measures = Measures()
        self._max_batch_bytes = max_batch_bytes
        self._next = Position()
        """Where the next iter() begins."""
        self._progress: Progress | None = None
        """Of the last iterator."""
        self._last: Callable[[], LoaderIterator | None] = lambda: None
        """That iterator, as long as somebody has it."""
        self._iterator: LoaderIterator | None = None
        """With persistent workers, the one and only."""
        self._length_asked: int | None = None
        self._may_repeat = worker_init_fn is None
        if self._order == "plan":
            len(dataset)
        if collate_fn is None and self._output == "torch":
            self.collate_fn = torchs_collate(batched=self._batched)
        self._initialised = True
        integrate_accelerate(DataLoader, DataLoader._skip_first_batches)

    _is_accelerate_prepared: ClassVar[bool] = True
    """accelerate's `prepare_data_loader` keeps such loaders as they are: ranks and devices are arguments here."""

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # torch's DataLoader is generic in what it gives

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and getattr(self, "_initialised", False):
            raise ValueError(f"{name} attribute should not be set after {type(self).__name__} is initialized")
        if name in ("device", "device_ahead", "sharding", "pin_memory"):
            self._check_device(name, value)
        super().__setattr__(name, value)
        if not getattr(self, "_initialised", False):
            return
        if name == "num_workers" and self._owns_dataset and (value == 0) != isinstance(self._remote, DirectDataset):
            self._remote = find_dataset(self.dataset, value)
        if name in ("collate_fn", "worker_init_fn"):
            found = name_on_server(self, name, value, self._remote, batched=self._batched)
            functions: dict[str, Any] = {name.removesuffix("_fn"): found}
            self._spec = replace(self._spec, **functions)

    # -- what there is to load

    @property
    def spec(self) -> LoaderSpec:
        """What decides the plan; rank and world size are those of torch.distributed by now, unless given."""
        rank, world_size = self._place
        return replace(self._spec, fingerprint=self._remote.info.fingerprint, rank=rank, world_size=world_size)

    @property
    def _place(self) -> tuple[int, int]:
        """(rank, world size)."""
        return _distributed() if self._distributed else (self._spec.rank, self._spec.world_size)

    @property
    def _order(self) -> _Order:
        if self._remote.iterable:
            return "iterable"
        if self._own_sampler is not None:
            return "client"
        torchs = self.generator is not None or (self._output == "torch" and self._place[1] == 1)
        if self._seed is None and torchs:
            return "client" if self._shuffle or self._shown.change else "plan"
        if self._shown.change:
            raise ValueError(
                f"{self._shown.change} was changed, but the order is that of seed={self._seed}, rank={self._place[0]}, "
                f"world_size={self._place[1]}: make another loader with the arguments that it is to have"
            )
        return "plan"

    def __len__(self) -> int:
        match self._order:
            case "plan":
                return len(self.plan(0))
            case "client":
                return len(self._index_sampler)
            case "iterable":
                length = self._length_asked = len(self.dataset)
                size = self.batch_size
                return length if size is None else length // size if self.drop_last else -(-length // size)

    @property
    def _batched(self) -> bool:
        """Whether samples are collated."""
        return self.batch_size is not None or self.batch_sampler is not None

    @property
    def _index_sampler(self) -> Any:
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    def plan(self, epoch: int) -> Plan:
        """Which samples the batches of an epoch hold: ``plan[k]`` are the int64 indices of batch k.

        Raises:
            TypeError: When the order is not the plan's, but that of a sampler or of an iterable-style dataset.
        """
        if self._order != "plan":
            what = "a sampler's" if self._order == "client" else "that of an iterable-style dataset"
            raise TypeError(f"the order of {self!r} is {what}, so there is no plan; with seed= there is one")
        return Plan(self.spec, len(self.dataset), epoch)

    # -- iterating

    def __iter__(self) -> Iterator[Any]:
        return self._begun(self._accelerator())

    def _skip_first_batches(self, num_batches: int) -> SkippedBatches:
        return SkippedBatches(self, num_batches, lambda first: self._begun(self._accelerator(), first))

    def _begun(self, device: Device | None, first_batch: int = 0) -> LoaderIterator:
        """Return an iterator of the next epoch that begins with `first_batch`, or later in an epoch that resumes."""
        if self.num_workers > 0:
            warn_of_too_many_workers(self.num_workers, self._remote.cpus, stacklevel=4)
        if self.pin_memory:
            warn_of_pinning(self.pin_memory_device, current_accelerator(), stacklevel=4)
        if not self._keeps_workers:
            self._begin(iterator := LoaderIterator(), device, first_batch)
            return iterator
        if self._iterator is None or self._iterator.is_copy:
            self._iterator = LoaderIterator()
        self._begin(self._iterator, device, first_batch)
        return self._iterator

    def __aiter__(self) -> AsyncIterator[Any]:
        """The same batches for asyncio: waiting for one does not hold up the event loop."""
        device = self._accelerator()  # here: the current device is that of a thread, and iter() runs in another one
        return AsyncLoaderIterator(lambda: self._begun(device))

    def _begin(self, iterator: LoaderIterator, device: Device | None, first_batch: int) -> None:
        """Make `iterator` go through the next epoch."""
        order = self._order
        if order == "plan" and self._progress is not None and self._progress.is_unused and self._last() is None:
            # frameworks try whether there is an iterator, and drop it: that was no epoch
            self._next = self._progress.next
        elif self._progress is not None and self._progress.following.epoch == self._next.epoch:
            self._next = self._progress.following
        begun = self._next = self._next._replace(batch=max(self._next.batch, first_batch))
        if order == "client" and begun.sampler is None:
            begun = self._next = begun._replace(sampler=initial_state(self._index_sampler))
        random_state = self._random_state
        draws = self._seed is None and iterator.base_seed is None and begun.base_seed is None
        if order == "client" and begun.random is None:
            # before anything is drawn
            drawn = {"draws_base_seed": draws, "drawn": self.num_workers > 0}
            self._next = begun._replace(random={**random_state.save(), **drawn})
        with random_state.as_saved(begun.random) if begun.random else nullcontext():
            lists = IndexLists(self._index_sampler, begun.batch, begun.sampler) if order == "client" else None
            if begun.random and begun.random["draws_base_seed"]:
                self._draw_base_seed()  # it is known; what is drawn next is the order
            elif begun.base_seed is None and self._seed is None:
                self._next = self._next._replace(base_seed=self._draw_base_seed() if draws else iterator.base_seed)
            check_iteration(self.num_workers, self.timeout, self.prefetch_factor)
            iteration = self._iteration(order, lists, iterator.spec, device)
            iterator.begin(iteration)
            if begun.random and begun.random["drawn"]:
                iteration.feed()
        # torch without workers draws nothing before the first batch is requested
        if self.num_workers > 0:
            iteration.feed()
        if self._keeps_workers:
            iterator.base_seed, iterator.spec = self._next.base_seed, iteration.spec
        self._progress, self._last = iteration.progress, weakref.ref(iterator)
        self._measures = iteration.measures
        self._next = Position(begun.epoch + 1)

    def _iteration(
        self, order: _Order, lists: IndexLists | None, before: LoaderSpec | None, device: Device | None
    ) -> Iteration:
        """The pass that begins now."""
        remote, spec = self._remote, self._spec_of_pass(order, before)
        receiver: Receiver | DirectReceiver
        stager: Stager | DirectStager | None = None
        to = device if self._copies else None
        if isinstance(remote, DirectDataset):
            progress, receiver = self._load_here(remote, order, spec, device)
            stager = None if to is None else DirectStager(to, receiver.measures)
        else:
            server, registered = remote.register(spec)
            spec = replace(spec, fingerprint=registered.fingerprint)
            progress, receiver = self._receive(remote, server, order, spec, registered, device)
            stager = None if to is None else Stager(receiver.reorder_buffer, to, self.device_ahead)
        progress.sampler_states = None if lists is None else lists.states
        return Iteration(
            dataset=remote,
            spec=spec,
            progress=progress,
            batches={"plan": range(receiver.reorder_buffer.scheduler.stop), "client": self._index_sampler}.get(order),
            receiver=receiver,
            lists=lists,
            timeout=self.timeout,
            stays=self._keeps_workers and spec.session is not None,
            length_check=self._length_check() if order == "iterable" else None,
            stager=stager,
            transform=self.device_transform,
        )

    def _progress_of(
        self, order: _Order, spec: LoaderSpec, length: int | None, *, keeps_dataset: bool
    ) -> tuple[Progress, int]:
        """Return where the pass begins, and the end of its batches as far as it is known."""
        stop, longest = self._extent(order, spec, length)
        begins = self._next if stop is None else self._next._replace(batch=min(self._next.batch, stop))
        progress = Progress((begins, None), longest, keeps_base_seed=self._keeps_workers, keeps_dataset=keeps_dataset)
        return progress, progress.batch if stop is None else stop

    def _load_here(
        self, dataset: DirectDataset, order: _Order, spec: LoaderSpec, device: Device | None
    ) -> tuple[Progress, DirectReceiver]:
        """Return where the pass begins, and what loads its batches in the thread that calls ``next()``."""
        epoch, length = self._next.epoch, dataset.info.length
        progress, stop = self._progress_of(order, spec, length, keeps_dataset=True)
        progress.state = (dataset.at_beginning(progress.next), None)
        pins = device is not None and device.pins and not self._copies
        buffers = HostBuffers(self._output, self._pool, process_budget()) if pins else None
        receiver = dataset.begin(
            spec,
            epoch,
            RangeScheduler(progress.batch, stop, 1, adaptive=False),
            Plan(spec, length or 0, epoch) if order == "plan" else None,
            Measures(epoch, buffers),
            self._output,
            seeded=self._seed is not None,
            pinned=buffers,
        )
        return progress, receiver

    def _receive(
        self,
        dataset: RemoteDataset,
        server: int,
        order: _Order,
        spec: LoaderSpec,
        registered: Registration,
        device: Device | None,
    ) -> tuple[Progress, Receiver]:
        """Return where the pass begins, and what receives its batches."""
        progress, stop = self._progress_of(
            order, spec, registered.length, keeps_dataset=self._keeps_workers or registered.num_workers == 0
        )
        if order == "plan" and stop != registered.batches:
            raise ProtocolError(
                f"{dataset.url} has {registered.batches} batches for this loader, and its plan has {stop}"
            )
        scheduler = RangeScheduler(
            progress.batch,
            stop,
            self.prefetch_factor or DEFAULT_PREFETCH_FACTOR,
            registered.num_workers,
            adaptive=order == "plan" or (order == "client" and is_torchs_own(self._index_sampler)),
            shards=spec.shards if order == "iterable" else 0,
            # shards stand at a place in the stream: they are on one server at a time
            servers=1 if order == "iterable" else len(dataset.servers),
        )
        pinned = process_budget() if device is not None and device.pins else None
        buffers = HostBuffers(self._output, self._pool, pinned)
        options = FetchOptions(
            spec=spec,
            key=registered.key,
            epoch=self._next.epoch,
            consumer=LoaderIterator.consumer_name(spec.rank, self._number),
            buffers=buffers,
            device=device,
            max_batch_bytes=self._max_batch_bytes,
            reconnect_timeout=dataset.reconnect_timeout,
            trace=IterationTrace(registered.key, self._next.epoch) if tracing.is_on() else None,
        )
        measures = Measures(self._next.epoch, buffers, self._measures.report())
        stays = self._keeps_workers and spec.session is not None
        return progress, Receiver(dataset, server, options, scheduler, measures, stays=stays)

    def _check_device(self, name: str, value: Any) -> None:
        """Raise if an argument that says where batches go is invalid, or does not fit `output`."""
        if name == "pin_memory" and value and self._output != "torch":
            raise TeleloaderError(_needs_torch("pin_memory", value))
        if name == "device_ahead" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ValueError(f"device_ahead must be a whole number from 0, was {value!r}")
        if name == "sharding" and value is not None:
            if self._output != "jax":
                raise ValueError(f"sharding needs JAX arrays: pass output='jax', was output={self._output!r}")
            check_sharding(value)
        if name == "device" and value is not None:
            if self._output != "torch":
                hint = "; for JAX, pass sharding= instead" if self._output == "jax" else ""
                raise TeleloaderError(_needs_torch("device", value) + hint)
            parse_device(value)

    @property
    def _copies(self) -> bool:
        """Whether batches are copied to a device."""
        return self._output == "jax" or parse_device(self.device) is not None

    def _accelerator(self) -> Device | None:
        """Return the accelerator to copy to or, with `pin_memory` alone, the one that page-locked memory is for."""
        if self._output == "jax":
            return JaxDevice(self.sharding)
        if self.device is not None:
            warn_of_shared_device(self.device, stacklevel=3)
        named = parse_device(self.device)
        if named is None and self.pin_memory:
            named = current_accelerator()
        return None if named is None else TorchDevice(with_index(named))

    @property
    def _random_state(self) -> RandomState:
        sampler = self._own_sampler
        return RandomState(self.generator, sampler, getattr(sampler, "sampler", None), process=self._process_generators)

    @property
    def _process_generators(self) -> Iterable[str]:
        """Libraries whose global generators decide what the batches of later epochs are."""
        order = self._order
        if self._seed is not None or (order == "plan" and not self._remote.is_here):
            return ()
        users = self._own_sampler is not None and not is_torchs_own(self._own_sampler)
        if users or isinstance(self._remote, DirectDataset):
            return PROCESS_GENERATORS
        draws = self._own_sampler is not None or (self.generator is None and self._output == "torch")
        return ("torch",) if draws else ()

    @property
    def _keeps_workers(self) -> bool:
        return self.persistent_workers and self.num_workers > 0

    def _draw_base_seed(self) -> int:
        """torch's, where torch decides; else a function of the epoch."""
        if self.generator is not None or self._output == "torch":
            return draw_base_seed(self.generator)
        return derive_seed("base", 0, self._next.epoch)

    def _spec_of_pass(self, order: _Order, before: LoaderSpec | None) -> LoaderSpec:
        """Return what the server is asked for in this epoch.

        Args:
            order: Who decides the order.
            before: What it was asked for in the last epoch, if the loader keeps its workers.
        """
        spec, base_seed = self.spec, self._next.base_seed
        if base_seed is None:
            base_seed = derive_seed("base", spec.seed, self._next.epoch)
        lends = any(name is not None and name.startswith(local.PREFIX) for name in (spec.collate, spec.worker_init))
        # an object of this process is loaded as torch would, by workers that see it as it is now
        live = self._owns_dataset or (self._remote.is_here and (self._seed is None or lends))
        if order == "plan" and not live:
            return replace(spec, worker_init=None)
        # replicas that this loader has iterated stand where they are
        shard_states = self._next.shard_states if self._progress is None else None
        resumed_epoch = 0 if shard_states is None else self._next.epoch
        if before is not None:  # another spec would start other workers
            shard_states, resumed_epoch = before.shard_states, before.resumed_epoch  # type: ignore[assignment]
        own = replace(
            spec,
            session=(before and before.session) or secrets.token_hex(16),
            # a shuffled plan is that of all ranks, which need not have drawn the same base seed
            seed=spec.seed if order == "plan" and (self._seed is not None or spec.shuffle) else base_seed,
            num_workers=operator.index(self.num_workers) if live or order == "iterable" else 0,
            shard_states=shard_states,
            resumed_epoch=resumed_epoch,
        )
        if order != "client":
            return own
        size = None if self.batch_sampler is None else 1
        return replace(own, order="client", shuffle=False, drop_last=False, batch_size=size)

    @property
    def _owns_dataset(self) -> bool:
        """Whether the loader was given an object of this process, not the name of one that a server hosts."""
        return self._remote is not self.dataset

    def _extent(self, order: _Order, spec: LoaderSpec, length: int | None) -> tuple[int | None, int | None]:
        """How many batches the epoch has for this rank, and for the one that has the most; None when it will show."""
        if order != "plan":
            return MAX_EPOCH if order == "iterable" else None, None
        if length is None:
            raise TypeError(f"object of type {self._remote.info.type!r} has no len()")
        # under tail="uneven" rank 0 has the most
        ranks = spec, replace(spec, rank=0)
        mine, most = (len(Plan(each, length, self._next.epoch)) for each in ranks)
        return mine, most

    def _length_check(self) -> LengthCheck:
        samples = self._remote.info.length if self._place[1] == 1 else None
        may_repeat, self._may_repeat = self._may_repeat, False
        return LengthCheck(self.dataset, self.num_workers, self._length_asked, samples, may_repeat=may_repeat)

    # -- where it stands

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Make the next ``iter()`` that epoch, as ``DistributedSampler.set_epoch`` does; a sampler is told too.

        After `load_state_dict`, the epoch that was interrupted still goes on where it was.
        """
        if not isinstance(epoch, SupportsIndex) or isinstance(epoch, bool) or operator.index(epoch) < 0:
            raise ValueError(f"epoch must be a whole number from 0, was {epoch!r}")
        if epoch != self._next.epoch:
            self._next = Position(operator.index(epoch))
        if self._progress is not None and self._progress.position.epoch != epoch:
            self._next = self._next._replace(sampler=self._progress.following.sampler)
            self._progress = None
        tell = getattr(self._own_sampler, "set_epoch", None)
        if tell is not None:
            tell(operator.index(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Where the last iterator stands, or the next one will begin, as JSON can hold it.

        For the plan it has about 120 bytes as JSON. It counts the samples that all ranks together have been given, so
        it is the same on each rank, and fits another number of ranks when ``batch_size * world_size`` divides it. For a
        sampler it holds the random state that the epoch's order was drawn with besides, 10 KB; for an iterable-style
        dataset the batches that its shards gave.

        Raises:
            StateMismatch: If an iterable-style dataset's own state cannot be saved; the message names the value.
        """
        position = self._next if self._progress is None else self._progress.position
        if self._order == "client" and position == Position():
            position = Position(sampler=initial_state(self._index_sampler))
        if self._progress is None and isinstance(self._remote, DirectDataset):
            position = self._remote.at_beginning(position)
        position.check()
        return state.save(position, self._identity, self._global_batch_size, self._random_state.save())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: with the next ``iter()``, at exactly the next batch.

        Raises:
            StateMismatch: When it belongs to another dataset, seed or order, or its position lies within a
                global batch of this loader.
        """
        position, generators = state.load(state_dict, self._identity, self._global_batch_size)
        if position.sampler is not None:
            end_epoch(self._index_sampler, position.sampler)
        self._random_state.restore(generators)
        self._next = position
        self._progress = self._iterator = None

    @property
    def _identity(self) -> dict[str, Any]:
        """What a loader that goes on must have in common with this one."""
        order = self._order
        identity = {"dataset": self._remote.info.fingerprint, "order": order}
        if order == "plan":
            return {**identity, "seed": self._spec.seed, "shuffle": self._shuffle}
        if order == "iterable":
            return {**identity, "batch_size": self.batch_size, "num_workers": operator.index(self.num_workers)}
        return {**identity, "batch_size": self.batch_size}

    @property
    def _global_batch_size(self) -> int | None:
        """Samples in a batch of all ranks; None where the order is not the plan's."""
        return (self.batch_size or 1) * self._place[1] if self._order == "plan" else None

    def stats(self) -> LoaderStats:
        """How the last ``iter()`` fares, or did: how long the training loop waits for data, what arrives and so on.

        The server has the rest of the story (``teleloader stats URL``): whether it is late itself, and how many workers
        would not be.
        """
        return self._measures.stats()

    def __repr__(self) -> str:
        spec = self.spec
        ranks = f", rank={spec.rank}, world_size={spec.world_size}, tail={spec.tail!r}" if spec.world_size > 1 else ""
        return (
            f"DataLoader({self.dataset!r}, batch_size={self.batch_size}, shuffle={spec.shuffle}, "
            f"drop_last={spec.drop_last}, seed={self._seed}{ranks})"
        )


def _needs_torch(option: str, value: object) -> str:
    return f"{option}={value!r} needs torch tensors: pip install 'teleloader[torch]' or output='torch'"


def _distributed() -> tuple[int, int]:
    """(rank, world size) of torch.distributed where it is initialised, without loading torch for it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _check_ours(
    seed: int | None, rank: int | None, world_size: int | None, *, brings_order: bool, generator: object
) -> None:
    if rank and world_size is None:
        raise ValueError(f"rank={rank} needs world_size: among how many ranks the epoch is divided")
    if seed is not None and (brings_order or generator is not None):
        raise ValueError(
            "seed option is mutually exclusive with sampler, batch_sampler and generator: it chooses the plan's order"
        )
    if (brings_order or generator is not None) and (rank is not None or world_size is not None):
        raise ValueError(
            "rank and world_size options are mutually exclusive with sampler, batch_sampler and generator: a sampler "
            "divides the epoch among ranks itself, as DistributedSampler does"
        )
