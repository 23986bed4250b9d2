"""`DataLoader`: torch's, with its workers on a loader server."""

from __future__ import annotations

import itertools
import operator
import secrets
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import GenericAlias
from typing import Any, ClassVar, Final, SupportsIndex

from teleloader import state
from teleloader.arguments import (
    Arguments,
    as_context,
    check,
    check_iteration,
    check_ranks,
    warn_of_pinning,
    warn_of_too_many_workers,
)
from teleloader.fetch.direct import DirectDataset
from teleloader.fetch.iteration import AsyncLoaderIterator, LoaderIterator, Progress
from teleloader.frameworks import SkippedBatches, integrate_accelerate
from teleloader.functions import name_on_server
from teleloader.hosting import find_dataset
from teleloader.iterations import Start
from teleloader.orders import Order, Orders, distributed_rank
from teleloader.sampling import (
    PROCESS_GENERATORS,
    IndexLists,
    RandomState,
    draw_base_seed,
    is_torchs_own,
    make_samplers,
    torchs_collate,
)
from teleloader.state import Position
from teleloader.stats import LoaderStats, Measures
from teleloader.tensors.devices import current_accelerator
from teleloader.tensors.output import Output, choose_output
from teleloader.tensors.placement import Placement, check_placement, place
from teleloader_shared import local
from teleloader_shared.buffers import BufferPool
from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES
from teleloader_shared.orders.plan import Plan
from teleloader_shared.orders.seeding import derive_seed
from teleloader_shared.spec import Compression, LoaderSpec, Tail

DEFAULT_PREFETCH_FACTOR: Final = 2
DEFAULT_DEVICE_AHEAD: Final = 2
_FIXED: Final = ("batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers")
"""What torch does not let be set after construction."""

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
        user_sampler = sampler if batch_sampler is None else batch_sampler
        check_ranks(seed, rank, world_size, sampler=user_sampler, generator=generator)
        self._remote = remote
        self._output: Output = choose_output(output)
        self.dataset, self.generator = dataset, generator
        self.num_workers, self.persistent_workers = num_workers, persistent_workers
        self.collate_fn, self.worker_init_fn = collate_fn, worker_init_fn
        self.timeout, self.in_order = timeout, in_order
        self.pin_memory, self.pin_memory_device = pin_memory, pin_memory_device
        self.prefetch_factor = DEFAULT_PREFETCH_FACTOR if num_workers and prefetch_factor is None else prefetch_factor
        self.multiprocessing_context = as_context(multiprocessing_context)
        self.device, self.device_transform, self.device_ahead = device, device_transform, device_ahead
        self.sharding = sharding
        self.batch_size = None if batch_sampler is not None else batch_size
        self.drop_last = False if batch_sampler is not None else drop_last
        self.sampler, self.batch_sampler = sampler, batch_sampler
        if not remote.iterable:
            self.sampler, self.batch_sampler = make_samplers(
                dataset, self.batch_size, bool(shuffle), drop_last, sampler, batch_sampler, generator,
                as_torch=self._output == "torch" or generator is not None,
            )  # fmt: skip
        self._orders = Orders(
            dataset, (self.sampler, self.batch_sampler), user_sampler,
            iterable=remote.iterable, seeded=seed is not None, may_repeat=worker_init_fn is None,
        )  # fmt: skip
        self._seed = seed
        self._max_batch_bytes = max_batch_bytes
        self._spec = LoaderSpec(
            dataset=remote.name, batch_size=batch_size, shuffle=bool(shuffle), drop_last=bool(self.drop_last),
            seed=seed or 0, rank=rank or 0, world_size=1 if world_size is None else world_size, tail=tail,
            checksum=checksum, compression=compression,
            collate=self._name_on_server("collate_fn"), worker_init=self._name_on_server("worker_init_fn"),
        )  # fmt: skip
        # looked up later: the loader may be created before the process group
        self._distributed = rank is None and world_size is None and user_sampler is None
        self._init_state()

    def _init_state(self) -> None:
        """Set what iterations change; raise if the order needs a length that the dataset does not have."""
        self._pool = BufferPool()
        self._number = next(_numbers)
        self._measures = Measures()
        self._next = Position()
        """Where the next iter() begins."""
        self._progress: Progress | None = None
        """Of the last iterator."""
        self._last: Callable[[], LoaderIterator | None] = lambda: None
        """That iterator, as long as it is referred to."""
        self._iterator: LoaderIterator | None = None
        """With persistent workers, the one and only."""
        if self._order.has_plan:
            len(self.dataset)
        if self.collate_fn is None and self._output == "torch":
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
            check_placement(self._output, name, value)
        super().__setattr__(name, value)
        if not getattr(self, "_initialised", False):
            return
        if name == "num_workers" and self._owns_dataset and (value == 0) != isinstance(self._remote, DirectDataset):
            self._remote = find_dataset(self.dataset, value)
        if name in ("collate_fn", "worker_init_fn"):
            functions: dict[str, Any] = {name.removesuffix("_fn"): self._name_on_server(name)}
            self._spec = replace(self._spec, **functions)

    def _name_on_server(self, argument: str) -> str | None:
        return name_on_server(self, argument, getattr(self, argument), self._remote, batched=self._batched)

    # -- the batches of an epoch

    @property
    def spec(self) -> LoaderSpec:
        """What decides the plan; rank and world size are those of torch.distributed by now, unless given."""
        return replace(self._spec_of_rank, fingerprint=self._remote.info.fingerprint)

    @property
    def _spec_of_rank(self) -> LoaderSpec:
        if not self._distributed:
            return self._spec
        rank, world_size = distributed_rank()
        return replace(self._spec, rank=rank, world_size=world_size)

    @property
    def _order(self) -> Order:
        spec = self._spec_of_rank
        as_torch = self.generator is not None or (self._output == "torch" and spec.world_size == 1)
        return self._orders.choose(spec, as_torch=as_torch and self._seed is None)

    def __len__(self) -> int:
        return self._order.length(self._spec_of_rank)

    @property
    def _batched(self) -> bool:
        """True if samples are collated."""
        return self.batch_size is not None or self.batch_sampler is not None

    def plan(self, epoch: int) -> Plan:
        """Which samples the batches of an epoch hold: ``plan[k]`` are the int64 indices of batch k.

        Raises:
            TypeError: When the order is not the plan's, but that of a sampler or of an iterable-style dataset.
        """
        order = self._order
        plan = order.plan(self.spec, epoch)
        if plan is None:
            raise TypeError(
                f"the order of {self!r} is {order.description}, so there is no plan; with seed= there is one"
            )
        return plan

    # -- iterating

    def __iter__(self) -> Iterator[Any]:
        return self._begun(self._placement())

    def _skip_first_batches(self, num_batches: int) -> SkippedBatches:
        return SkippedBatches(self, num_batches, lambda first: self._begun(self._placement(), first))

    def __aiter__(self) -> AsyncIterator[Any]:
        """Return an asynchronous iterator over the same batches; waiting for one does not block the event loop."""
        placement = self._placement()  # here: each thread has a current device, and iter() runs in another thread
        return AsyncLoaderIterator(lambda: self._begun(placement))

    def _placement(self) -> Placement:
        return place(self._output, self._pool, self.device, self.sharding, pin_memory=self.pin_memory)

    def _begun(self, placement: Placement, first_batch: int = 0) -> LoaderIterator:
        """Return an iterator of the next epoch that begins with `first_batch`, or later in an epoch that resumes."""
        if self.num_workers > 0:
            warn_of_too_many_workers(self.num_workers, self._remote.cpus, stacklevel=4)
        if self.pin_memory:
            warn_of_pinning(self.pin_memory_device, current_accelerator(), stacklevel=4)
        if not self._keeps_workers:
            self._begin(iterator := LoaderIterator(), placement, first_batch)
            return iterator
        if self._iterator is None or self._iterator.is_copy:
            self._iterator = LoaderIterator()
        self._begin(self._iterator, placement, first_batch)
        return self._iterator

    def _begin(self, iterator: LoaderIterator, placement: Placement, first_batch: int) -> None:
        """Make `iterator` go through the next epoch."""
        order = self._order
        begun = self._next = order.initial(self._beginning(order, first_batch))
        resumed = begun.random
        random_state = self._random_state(order)
        draws = self._seed is None and iterator.base_seed is None and begun.base_seed is None
        if order.is_drawn and resumed is None:  # before anything is drawn
            drawn = {"draws_base_seed": draws, "drawn": self.num_workers > 0}
            self._next = begun._replace(random={**random_state.save(), **drawn})
        with random_state.as_saved(resumed) if resumed else nullcontext():
            lists = order.index_lists(begun)
            if resumed and resumed["draws_base_seed"]:
                self._draw_base_seed()  # it is known; what is drawn next is the order
            elif begun.base_seed is None and self._seed is None:
                self._next = self._next._replace(base_seed=self._draw_base_seed() if draws else iterator.base_seed)
            check_iteration(self.num_workers, self.timeout, self.prefetch_factor)
            iteration = self._start(order, lists, iterator.spec, placement).open(self._remote)
            iterator.begin(iteration)
            if resumed and resumed["drawn"]:
                iteration.feed()
        # torch without workers draws nothing before the first batch is requested
        if self.num_workers > 0:
            iteration.feed()
        if self._keeps_workers:
            iterator.base_seed, iterator.spec = self._next.base_seed, iteration.spec
        self._progress, self._last = iteration.progress, weakref.ref(iterator)
        self._measures = iteration.measures
        self._next = Position(begun.epoch + 1)

    def _beginning(self, order: Order, first_batch: int) -> Position:
        position, progress = self._next, self._progress
        if order.has_plan and progress is not None and progress.is_unused and self._last() is None:
            # frameworks try whether there is an iterator, and drop it: that was no epoch
            position = progress.next
        elif progress is not None and progress.following.epoch == position.epoch:
            position = progress.following
        return position._replace(batch=max(position.batch, first_batch))

    def _start(self, order: Order, lists: IndexLists | None, before: LoaderSpec | None, placement: Placement) -> Start:
        return Start(
            spec=self._spec_of_iteration(order, before),
            order=order,
            position=self._next,
            lists=lists,
            placement=placement,
            loader=self._number,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor or DEFAULT_PREFETCH_FACTOR,
            timeout=self.timeout,
            keeps_workers=self._keeps_workers,
            seeded=self._seed is not None,
            max_batch_bytes=self._max_batch_bytes,
            transform=self.device_transform,
            device_ahead=self.device_ahead,
            before=self._measures,
        )

    def _random_state(self, order: Order) -> RandomState:
        """Return the generators that decide what the batches of later epochs are."""
        sampler = order.user_sampler
        process: Iterable[str] = ()
        if self._seed is None and (self._remote.is_here or not order.has_plan):
            if isinstance(self._remote, DirectDataset) or not (sampler is None or is_torchs_own(sampler)):
                process = PROCESS_GENERATORS
            elif sampler is not None or (self.generator is None and self._output == "torch"):
                process = ("torch",)
        return RandomState(self.generator, sampler, getattr(sampler, "sampler", None), process=process)

    @property
    def _keeps_workers(self) -> bool:
        return self.persistent_workers and self.num_workers > 0

    def _draw_base_seed(self) -> int:
        """torch's, where torch decides; else a function of the epoch."""
        if self.generator is not None or self._output == "torch":
            return draw_base_seed(self.generator)
        return derive_seed("base", 0, self._next.epoch)

    def _spec_of_iteration(self, order: Order, before: LoaderSpec | None) -> LoaderSpec:
        """Return the spec of the next epoch.

        Args:
            order: The order of the epoch.
            before: The spec of the last epoch, if the loader keeps its workers.
        """
        spec, position, live = self.spec, self._next, self._is_live
        if order.has_plan and not live:
            return replace(spec, worker_init=None)
        base_seed = position.base_seed
        if base_seed is None:
            base_seed = derive_seed("base", spec.seed, position.epoch)
        own = replace(
            spec,
            session=(before and before.session) or secrets.token_hex(16),
            num_workers=operator.index(self.num_workers) if live or order.has_shards else 0,
        )
        own = order.private_spec(own, base_seed)
        if before is not None:  # another spec would start other workers
            return replace(own, shard_states=before.shard_states, resumed_epoch=before.resumed_epoch)
        # replicas that this loader has iterated keep their positions
        if self._progress is None and position.shard_states is not None:
            return replace(own, shard_states=position.shard_states, resumed_epoch=position.epoch)
        return own

    @property
    def _is_live(self) -> bool:
        """True if workers of this loader load an object of this process as it is now, as in torch."""
        functions = (self._spec.collate, self._spec.worker_init)
        lends = any(name is not None and name.startswith(local.PREFIX) for name in functions)
        return self._owns_dataset or (self._remote.is_here and (self._seed is None or lends))

    @property
    def _owns_dataset(self) -> bool:
        """True if the loader was given an object of this process, not the name of one that a server hosts."""
        return self._remote is not self.dataset

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
        self._orders.set_epoch(operator.index(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Where the last iterator stands, or the next one will begin, as JSON can hold it.

        For the plan it has about 120 bytes as JSON. It counts the samples that all ranks together have been given, so
        it is the same on each rank, and fits another number of ranks when ``batch_size * world_size`` divides it. For a
        sampler it holds the random state that the epoch's order was drawn with besides, 10 KB; for an iterable-style
        dataset the batches that its shards gave.

        Raises:
            StateMismatch: If an iterable-style dataset's own state cannot be saved; the message names the value.
        """
        order, spec = self._order, self.spec
        position = self._next if self._progress is None else self._progress.position
        if position == Position():
            position = order.initial(position)
        if self._progress is None and isinstance(self._remote, DirectDataset):
            position = self._remote.at_beginning(position)
        position.check()
        identity, generators = self._identity(order, spec), self._random_state(order).save()
        return state.save(position, identity, order.global_batch_size(spec), generators)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: with the next ``iter()``, at exactly the next batch.

        Raises:
            StateMismatch: When it belongs to another dataset, seed or order, or its position lies within a
                global batch of this loader.
        """
        order, spec = self._order, self.spec
        position, generators = state.load(state_dict, self._identity(order, spec), order.global_batch_size(spec))
        order.resume(position)
        self._random_state(order).restore(generators)
        self._next = position
        self._progress = self._iterator = None

    def _identity(self, order: Order, spec: LoaderSpec) -> dict[str, Any]:
        """Return what a loader that resumes must have in common with this one."""
        values = {
            "seed": spec.seed, "shuffle": spec.shuffle, "batch_size": self.batch_size,
            "num_workers": int(self.num_workers),
        }  # fmt: skip
        common = {name: values[name] for name in order.identity}
        return {"dataset": spec.fingerprint, "order": order.name, **common}

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
