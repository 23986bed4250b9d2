"""`DataLoader`: counterpart of torch's DataLoader with workers on a loader server."""

from __future__ import annotations

import itertools
import operator
import secrets
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Generic, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from teleloader import state
from teleloader.arguments import (
    Arguments,
    as_context,
    check,
    check_errors,
    check_iteration,
    check_lengths_order,
    check_mesh,
    check_mixture,
    check_ranks,
    check_shuffle_buffer,
    check_token_batches,
    run_name,
    warn_of_pinning,
    warn_of_too_many_workers,
)
from teleloader.balance import LengthBalance
from teleloader.construction import Construction
from teleloader.dataset import RemoteDataset
from teleloader.fetch.channel import Channel
from teleloader.fetch.direct import DirectDataset
from teleloader.fetch.iteration import AsyncLoaderIterator, LoaderIterator, Progress
from teleloader.frameworks import SkippedBatches, integrate_accelerate, is_lightnings_seeding
from teleloader.functions import name_on_server
from teleloader.hosting import find_dataset
from teleloader.iterations import NextEpoch, Start
from teleloader.mesh import locate_process
from teleloader.mixture import Mixture
from teleloader.orders import Order, Orders, distributed_rank
from teleloader.packing import Packing
from teleloader.sampling import (
    PROCESS_GENERATORS,
    IndexLists,
    RandomState,
    draw_base_seed,
    is_torchs_own,
    make_samplers,
    nested_samplers,
    torchs_collate,
)
from teleloader.state import Position
from teleloader.stats import LoaderStats, Measures
from teleloader.tensors.devices import current_accelerator
from teleloader.tensors.output import Output, choose_output
from teleloader.tensors.placement import Placement, check_placement, initializes_device, place
from teleloader_shared import local
from teleloader_shared.buffers import BufferPool
from teleloader_shared.codec import DEFAULT_MAX_BATCH_BYTES
from teleloader_shared.orders.plan import Plan, count_visits
from teleloader_shared.orders.seeding import derive_seed
from teleloader_shared.spec import Compression, LoaderSpec, OnError, Tail

DEFAULT_PREFETCH_FACTOR: Final = 2
DEFAULT_DEVICE_AHEAD: Final = 2
_ORDERING: Final = (
    "batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "generator", "seed", "rank", "world_size", "tail",
    "balance", "packing", "mesh", "data_dims", "shuffle_buffer_size",
)  # fmt: skip
"""Arguments that determine the order of the samples."""
_FIXED: Final = (
    "batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers", "balance", "packing",
)  # fmt: skip
"""Attributes that are read-only after construction, most of them as in torch."""

_numbers = itertools.count()
"""Sequence numbers of the loaders in this process, part of their consumer names."""
_loaders: weakref.WeakValueDictionary[int, DataLoader[Any]] = weakref.WeakValueDictionary()
"""Loaders of this process, by sequence number."""

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Batch = TypeVar("Batch", default=Any, covariant=True)
else:
    from typing import TypeVar

    Batch = TypeVar("Batch", covariant=True)


class DataLoader(Generic[Batch]):
    """Replacement for ``torch.utils.data.DataLoader`` that loads batches from a remote dataset.

    The arguments up to `in_order` are those of torch 2.13, with its defaults, exclusions and error messages;
    docs/differences.md lists the differences. As in torch, the class is generic in its batches, such as
    ``DataLoader[tuple[torch.Tensor, torch.Tensor]]``; their type is that of the result of `device_transform`, or the
    declared one. The first ``iter()`` yields epoch 0, each further one the next epoch;
    `set_epoch` selects an epoch. Batches are yielded in order. A copy (`copy`, pickle) is a new loader with the current
    arguments, which starts with epoch 0.

    The arguments select the order of the samples:

    - Seeded order, with `seed` or without shuffling: a function of (seed, epoch) that every server can compute.
      Servers share batches between training processes, the first batch does not wait for a permutation of the whole
      dataset, and a saved state can be loaded with another number of ranks.
    - Client-side sampler, with `sampler`, `batch_sampler` or `generator`, or with ``shuffle=True`` and no `seed`: the
      sampler, torch's or the user's, runs in this process and yields the same indices as in torch after the same
      ``torch.manual_seed``. The client sends index lists to the server. (Without torch, with ``output="numpy"`` or
      ``"jax"``, and with several ranks, ``shuffle=True`` is the seeded order of seed 0.)
    - Order of an iterable-style dataset: it is divided into `num_workers` shards, and batch j comes from shard
      j mod `num_workers`.

    Args:
        dataset: A `RemoteDataset`, a `Mixture`, or an object of this process: a dataset as torch accepts it, which this
            process loads or serves while the loader exists.
        batch_size: Samples in a batch of this rank; 1 by default. None yields single samples without collation.
        shuffle: Whether to shuffle the samples in each epoch. None (the default) is False.
        sampler: Yields indices; excludes `shuffle`. None by default.
        batch_sampler: Yields index lists; excludes `batch_size`, `shuffle`, `sampler` and `drop_last`. None by default.
        num_workers: Number of shards of an iterable-style dataset; 0 (the default) is one shard in which
            ``get_worker_info()`` is None. For an object of this process, number of workers; 0 loads it in the thread
            that calls ``next()`` or, if `serve` hosts the object, in the workers of `serve`. Other servers ignore the
            value for map-style datasets, because all loaders share the workers.
        collate_fn: Builds a batch from a list of samples, on the server, which must allow the function by name: a
            function of a module, another callable that is a variable of a module, or the name, as ``"module:name"``.
            For an object of this process any callable. None (the default) uses the server's collate function.
        pin_memory: Whether to receive batches into page-locked memory, for fast copies to an accelerator; False by
            default.
        drop_last: Whether to omit an incomplete last batch; False by default.
        timeout: Seconds to wait for a batch; 0 (the default) has no limit while the server is available.
        worker_init_fn: Called with the worker ID in each worker that serves only this loader; the server must allow
            the function, as for `collate_fn`. None by default.
        multiprocessing_context: Checked as in torch, otherwise ignored: the client starts no processes.
        generator: A torch.Generator from which the order and the base seed are drawn. None (the default) draws them
            from torch's global generator.
        prefetch_factor: Batches to prefetch for each worker of the server. None (the default) is 2. A training loop
            that consumes many small batches per second gets a larger prefetch window, except with a user's sampler,
            whose order may depend on the progress of training.
        persistent_workers: Whether workers that serve only this loader are kept between epochs; False by default.
        pin_memory_device: Ignored, as in torch.
        in_order: Ignored: batches are always yielded in order.
        seed: Seed of the seeded order and of random augmentation, in [0, 2**64); the same on all ranks. None (the
            default) draws both as torch does.
        rank: Rank of this process among `world_size` data-parallel processes. If neither argument is given (the
            default), torch.distributed provides both if it is initialised, for training and validation data alike;
            otherwise they are 0 and 1. Not permitted with a sampler, because a sampler divides the epoch itself.
        world_size: Number of processes that share the epoch.
        mesh: A torch.distributed.device_mesh.DeviceMesh that contains this process. Its data-parallel dims determine
            rank and world size. The ranks of the other dims (tensor, context and pipeline parallel) receive the same
            batches, which one of them fetches from the server and broadcasts. The first ``iter()`` of the loader is a
            collective call of these ranks. Excludes `rank`, `world_size`, samplers and `generator`; `seed` is then 0 by
            default. None (the default) uses `rank` and `world_size`. See docs/device_mesh.md.
        data_dims: Names of the dims of `mesh` whose ranks receive different batches. None (the default) recognizes
            the usual names, such as ``"dp"``, ``"dp_replicate"``, ``"dp_shard"`` and ``"fsdp"``.
        tail: Division of a dataset whose length is not a multiple of `world_size`: ``"pad"`` (the default) repeats
            samples as torch's DistributedSampler does, ``"drop"`` omits the remainder, ``"uneven"`` gives some ranks
            one more sample.
        balance: A `LengthBalance` for batches of samples of similar length, or of a limited number of tokens; requires
            `seed`, and a dataset that states `sample_lengths`. With `max_tokens`, it excludes `batch_size` and
            `drop_last`. None (the default) does not use lengths.
        packing: A `Packing` for batches of token sequences that are packed from documents, the samples of the dataset;
            requires `seed`, and a dataset that states `sample_lengths`. `batch_size`, `drop_last` and `tail` then
            count sequences. Excludes `balance`, `collate_fn` and `on_error`. None (the default) does not pack.
        shuffle_buffer_size: For an iterable-style dataset, number of samples that each shard shuffles together: the
            worker of the shard keeps them in a buffer, and yields each sample of the dataset once. The order is a
            function of `seed`, the epoch and the number of shards. The memory of the buffer is that of the samples
            before collation, for each shard. None (the default) keeps the order of the dataset.
        output: Library of the arrays: ``"torch"``, ``"numpy"`` or ``"jax"``. None (the default) is torch if it is
            installed, otherwise NumPy.
        checksum: Whether each batch has a checksum, by which damaged responses are detected and retried; True by
            default.
        compression: ``"zstd"`` or ``"lz4"`` lets the workers compress arrays, for slow networks. None (the default)
            does not compress.
        max_batch_bytes: Maximum size of a batch, in bytes; 1 GiB by default.
        device: Accelerator to copy the tensors of batches to: a torch.device, a string such as ``"cuda"`` or
            ``"cuda:1"``, or an index. None (the default) leaves them in host memory. ``"cuda"`` is the current device
            when ``iter()`` is called. Batches are received into page-locked memory, and a thread copies each on a
            separate stream when it has arrived. The current stream of the thread that calls ``next()`` waits for the
            copy, so a batch can be used immediately, and kept. See docs/accelerators.md.
        device_transform: Called with each batch (on `device`, if given), in the thread that calls ``next()`` and on its
            stream; returns the batch to yield. An example is a cast: ``uint8`` is transferred, and converted to
            floating-point on the device. An exception is raised in place of the batch; after running out of device
            memory, or an interruption such as Ctrl-C, the next ``next()`` copies and transforms the same batch again.
            None by default.
        device_ahead: Batches to copy to the device before the training loop requests them, at least 0; 2 by default.
            Each occupies device memory.
        prefetch_next_epoch: Whether to prefetch the first batches of the next epoch at the end of an epoch, so that
            they are ready when the next epoch starts. None (the default) prefetches once a second epoch has started,
            or after `set_epoch` or `load_state_dict`, so that a single pass computes nothing in vain; with
            iterable-style datasets, whose next epoch requires further workers, only True prefetches. Servers compute
            these batches with the lowest priority. The loader keeps them in memory until the next epoch, and discards
            up to one prefetch window after the last one. See docs/next_epoch.md for the orders to which it applies.
        on_error: What to do if the dataset raises an exception for a sample. ``"raise"`` (the default) raises it in
            ``next()``, as torch. ``"skip"`` omits the sample, so that the batch is shorter, and ``"replace"`` uses
            another sample of the dataset, chosen by seed, epoch, batch and position; both retry the sample first.
            Requires a map-style dataset.
        error_retries: Number of retries before a sample is skipped or replaced; 2 by default.
        max_errors: Fraction of the samples of an epoch that may be skipped or replaced, at least one sample; 0.01 by
            default. If more fail, ``next()`` raises `TooManyErrors`.
        name: Name of the training run in ``/stats``, on the dashboard and in logs of servers: 1 to 64 letters, digits,
            spaces and ``._:/@+-``. None (the default) is the file name of the script.
        sharding: With ``output="jax"``, a jax.sharding.Sharding that distributes the arrays over devices; each process
            provides its part (``jax.make_array_from_process_local_data``). None (the default) is JAX's default device.

    Raises:
        ValueError: If arguments exclude each other or are out of range, or the server does not allow a function.
        TypeError: If `dataset` is not a dataset, or has no length although the order requires one.

    Example:
        >>> loader = DataLoader(dataset, batch_size=256, shuffle=True, num_workers=8)  # doctest: +SKIP
        >>> for images, labels in loader: ...  # doctest: +SKIP
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | str | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | str | None = None,
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
        shuffle_buffer_size: int | None = None,
        output: Output | None = None,
        checksum: bool = True,
        compression: Compression | None = None,
        max_batch_bytes: int = DEFAULT_MAX_BATCH_BYTES,
        device: Any = None,
        device_transform: Callable[[Any], Batch] | None = None,
        device_ahead: int = DEFAULT_DEVICE_AHEAD,
        prefetch_next_epoch: bool | None = None,
        sharding: Any = None,
        on_error: OnError = "raise",
        error_retries: int = 2,
        max_errors: float = 0.01,
        mesh: Any = None,
        data_dims: Sequence[str] | None = None,
        balance: LengthBalance | None = None,
        packing: Packing | None = None,
        name: str | None = None,
    ) -> None:
        self._construction = Construction(self, locals())
        self._run_name = run_name(name)
        self._remote = remote = find_dataset(dataset, num_workers)
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
        in_process = isinstance(remote, DirectDataset)
        check_mesh(mesh, data_dims, rank, world_size, in_process=in_process, sampler=user_sampler, generator=generator)
        self._channel: Channel | None = None
        if mesh is not None:
            position = locate_process(mesh, data_dims)
            rank, world_size = position.rank, position.world_size
            seed = seed or 0  # random seeds would differ between the ranks that receive the same batches
            self._channel = Channel(position) if len(position.members) > 1 else None
        mixture = dataset.spec if isinstance(dataset, Mixture) else None
        if mixture is not None:
            check_mixture(seed, sampler=user_sampler)
        self.balance, self.packing = balance, packing
        for name, given in (("balance", balance), ("packing", packing)):
            if given is not None:
                has_mixture = mixture is not None
                check_lengths_order(name, seed, sampler=user_sampler, iterable=remote.iterable, mixture=has_mixture)
        if balance is not None and balance.max_tokens is not None:
            check_token_batches(batch_size, drop_last=drop_last)
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
        self.prefetch_next_epoch = prefetch_next_epoch
        check_errors(on_error, max_errors, iterable=remote.iterable)
        check_shuffle_buffer(shuffle_buffer_size, iterable=remote.iterable)
        self.max_errors = max_errors
        self.batch_size, self.drop_last = (batch_size, drop_last) if batch_sampler is None else (None, False)
        self.sampler, self.batch_sampler = sampler, batch_sampler
        self._seed, self._max_batch_bytes = seed, max_batch_bytes
        self._spec = LoaderSpec(
            dataset=remote.name, batch_size=batch_size, shuffle=bool(shuffle), drop_last=bool(self.drop_last),
            seed=seed or 0, rank=rank or 0, world_size=1 if world_size is None else world_size, tail=tail,
            shuffle_buffer_size=shuffle_buffer_size, mixture=mixture, checksum=checksum, compression=compression,
            on_error=on_error, error_retries=error_retries,
            collate=self._name_on_server("collate_fn"), worker_init=self._name_on_server("worker_init_fn"),
        )  # fmt: skip
        # torch's rank is read at each use, because the loader may be created before the process group
        self._distributed = rank is None and world_size is None and user_sampler is None
        self._user_sampler = user_sampler
        self._orders = self._make_orders(shuffle=bool(shuffle))
        if balance is not None and balance.max_tokens is not None:
            self.batch_size = None
        self._init_state()
        self._construction.end(self)

    def _make_orders(self, *, shuffle: bool) -> Orders:
        """Create the samplers that torch's DataLoader would create, and return the loader's orders."""
        iterable = self._remote.iterable
        if not iterable:
            self.sampler, self.batch_sampler = self._make_samplers(shuffle=shuffle)
        return Orders(
            self.dataset, (self.sampler, self.batch_sampler), self._user_sampler,
            iterable=iterable, seeded=self._seed is not None, may_repeat=self.worker_init_fn is None,
            lengths=self._remote.lengths,
        )  # fmt: skip

    def _make_samplers(self, *, shuffle: bool) -> tuple[Any, Any]:
        return make_samplers(
            self.dataset, self.batch_size, shuffle, self.drop_last, self.sampler, self.batch_sampler,
            self.generator, as_torch=self._output == "torch" or self.generator is not None,
        )  # fmt: skip

    def _init_state(self) -> None:
        """Initialize the state that iterations change; raise if the order requires a length that the dataset lacks."""
        self._pool = BufferPool()
        self._number = next(_numbers)
        _loaders[self._number] = self
        self._measures = Measures()
        self._next = Position()
        """Position at which the next iterator starts."""
        self._progress: Progress | None = None
        """Progress of the last iterator; None if the next position does not depend on it."""
        self._last: Callable[[], LoaderIterator | None] = lambda: None
        """Weak reference to the last iterator; returns None once the iterator was deleted."""
        self._has_further_epochs = False
        """True if the user has started a second epoch, or selected or restored one."""
        self._next_epoch: NextEpoch | None = None
        """Prefetched batches of the epoch that probably starts next; None if it cannot be prefetched."""
        self._iterator: LoaderIterator | None = None
        """With persistent workers, the iterator that every ``iter()`` returns, as in torch."""
        if self._order.has_plan:
            len(self.dataset)
        if self.collate_fn is None and self._output == "torch":
            self.collate_fn = torchs_collate(batched=self._batched)
        self._initialised = True
        integrate_accelerate(DataLoader, DataLoader._skip_first_batches)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and getattr(self, "_initialised", False):
            raise ValueError(f"{name} attribute should not be set after {type(self).__name__} is initialized")
        if name in ("device", "device_ahead", "sharding", "pin_memory"):
            check_placement(self._output, name, value)
        if name == "worker_init_fn" and is_lightnings_seeding(value):
            return
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

    # -- order of an epoch

    @property
    def spec(self) -> LoaderSpec:
        """Parameters sent to servers; rank and world size default to those of torch.distributed."""
        return replace(self._spec_of_rank, fingerprint=self._remote.info.fingerprint)

    @property
    def _spec_of_rank(self) -> LoaderSpec:
        spec = self._spec
        if self._distributed:
            rank, world_size = distributed_rank()
            spec = replace(spec, rank=rank, world_size=world_size)
        if self.balance is not None:
            balance = self.balance.spec(self._remote.info, spec.batch_size or 1, spec.world_size)
            spec = replace(spec, balance=balance)
        return spec if self.packing is None else replace(spec, packing=self.packing.spec(self._remote.info))

    @property
    def _rank(self) -> int:
        """Rank of this process, without a request to a server."""
        return distributed_rank()[0] if self._distributed else self._spec.rank

    @property
    def _order(self) -> Order:
        spec = self._spec_of_rank
        as_torch = self.generator is not None or (self._output == "torch" and spec.world_size == 1)
        return self._orders.choose(spec, as_torch=as_torch and self._seed is None)

    def __len__(self) -> int:
        position = self._next if self._progress is None else self._progress.next
        return self._order.length(self._spec_of_rank, position.epoch)

    @property
    def _divides_epoch(self) -> bool:
        """True if the loader itself divides the epoch among processes: by its ranks, or by the shards of a stream."""
        return self._remote.iterable or not (self._distributed or self._user_sampler is not None)

    @property
    def _batched(self) -> bool:
        """True if samples are collated into batches."""
        if self.balance is not None:
            return True
        return self.batch_size is not None or self.batch_sampler is not None

    def plan(self, epoch: int) -> Plan:
        """Return the sample indices of an epoch in seeded order: ``plan[k]`` is the 1-D int64 array of batch k.

        Args:
            epoch: Epoch number, from 0.

        Raises:
            TypeError: If a client-side sampler or an iterable-style dataset determines the order.
        """
        order = self._order
        plan = order.plan(self.spec, epoch)
        if plan is None:
            raise TypeError(
                f"{self!r} has no plan: the order is {order.description}. Use a map-style dataset with seed="
            )
        return plan

    def visits(self) -> NDArray[np.int64]:
        """Count how often each sample was in a batch of the current epoch, as far as the loop has received it.

        Skipped samples are not counted, and replacements are (``on_error``). Batches are not counted if ``next()``
        raised an exception in their place. If the dataset's ``__getitems__`` returns fewer samples than indices, all
        indices are counted. With `packing`, the batches that contain tokens of a sample are counted.

        Batches before a restored position are counted as planned, without the failed samples and batches in this rank's
        state. After a resume, the counts are therefore only exact if each rank has restored its own state, with the
        same number of ranks and the same batch size. The sum over all ranks shows whether each sample was visited once
        (``teleloader audit --visits``).

        Returns:
            Numbers of visits by this rank in the epoch that the last ``iter()`` started, also if that epoch has ended,
            as an int64 array of shape (samples in the dataset,). Before ``iter()``, the visits before the position at
            which it will start: zeros, unless `load_state_dict` has restored a position.

        Raises:
            TypeError: If a client-side sampler or an iterable-style dataset determines the order.
        """
        position = self._next if self._progress is None else self._progress.next
        plan = self.plan(position.epoch)
        failed = set(position.failed_batches)
        visits = count_visits((plan[k] for k in range(position.batch) if k not in failed), plan.length)
        for sample, replacement in position.errors:
            # all ranks may have restored the state of one of them
            if isinstance(sample, int) and 0 <= sample < plan.length and visits[sample]:
                visits[sample] -= 1
                if isinstance(replacement, int) and 0 <= replacement < plan.length:
                    visits[replacement] += 1
        return visits

    # -- iteration

    def __iter__(self) -> Iterator[Batch]:
        return self._new_iterator(self._placement())

    def _skip_first_batches(self, num_batches: int) -> SkippedBatches:
        return SkippedBatches(self, num_batches, self._begin_at)

    def _begin_at(self, first_batch: int) -> LoaderIterator:
        return self._new_iterator(self._placement(), first_batch)

    def _with_sampler(self, sampler: Any, batch_sampler: Any, generator: Any) -> DataLoader:
        """Return a loader with the same arguments, but with another sampler or, if not None, batch sampler."""
        samplers = {"batch_sampler": batch_sampler}
        if batch_sampler is None:
            samplers = {"sampler": sampler, "batch_size": None}
        return type(self)(**self._other_arguments, **samplers, generator=generator)

    @property
    def _other_arguments(self) -> dict[str, Any]:
        """Current arguments, without those that determine the order."""
        arguments = self._construction.arguments(self)
        arguments["name"] = self._run_name  # a subclass may have an attribute of this name
        return {name: value for name, value in arguments.items() if name not in _ORDERING}

    def __aiter__(self) -> AsyncIterator[Batch]:
        """Return an asynchronous iterator of the next epoch; waiting for a batch does not block the event loop."""
        placement = self._placement()  # in this thread: the current device is per thread, and iter() runs in another
        return AsyncLoaderIterator(lambda: self._new_iterator(placement))

    def _placement(self) -> Placement:
        return place(self._output, self._pool, self.device, self.sharding, pin_memory=self.pin_memory)

    def _new_iterator(self, placement: Placement, first_batch: int = 0) -> LoaderIterator:
        """Return an iterator of the next epoch, from `first_batch` or from a later position to resume."""
        if self.num_workers > 0:
            warn_of_too_many_workers(self.num_workers, self._remote.cpus, stacklevel=4)
        if self.pin_memory:
            warn_of_pinning(self.pin_memory_device, current_accelerator(), stacklevel=4)
        if not self._keeps_workers:
            self._start_epoch(iterator := LoaderIterator(), placement, first_batch)
            return iterator
        if self._iterator is None or self._iterator.is_copy:
            self._iterator = LoaderIterator()
        self._start_epoch(self._iterator, placement, first_batch)
        return self._iterator

    def _start_epoch(self, iterator: LoaderIterator, placement: Placement, first_batch: int) -> None:
        """Start the next epoch with `iterator`."""
        order = self._order
        self._has_further_epochs |= self._progress is not None and not self._progress.is_unused
        begun = self._next = order.initial(self._initial_position(order, first_batch))
        resumed = begun.random
        random_state = self._random_state(order)
        draws = self._seed is None and iterator.base_seed is None and begun.base_seed is None
        if order.is_drawn and resumed is None:  # before anything is drawn
            drawn = {"draws_base_seed": draws, "drawn": self.num_workers > 0}
            self._next = begun._replace(random={**random_state.save(), **drawn})
        with random_state.as_saved(resumed) if resumed else nullcontext():
            lists = order.index_lists(begun)
            if resumed and resumed["draws_base_seed"]:
                self._draw_base_seed()  # advances the generator to the draws of the order; the value is already known
            elif begun.base_seed is None and self._seed is None:
                self._next = self._next._replace(base_seed=self._draw_base_seed() if draws else iterator.base_seed)
            check_iteration(self.num_workers, self.timeout, self.prefetch_factor)
            start = self._start(order, lists, iterator.spec, placement)
            iteration = start.open(self._remote, self._next_epoch)
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
        following = replace(
            start,
            spec=replace(iteration.spec, shard_states=None, resumed_epoch=0, delivered=None),
            position=self._next._replace(base_seed=iterator.base_seed if self._keeps_workers else None),
            lists=None,
            before=iteration.measures,
        )
        self._next_epoch = self._prefetchable(following)
        if self._next_epoch is not None:
            # weak: without the loader, no other epoch can start
            iteration.next_epoch = weakref.WeakMethod(self._next_epoch.prefetch)

    @property
    def _prefetches_next_epoch(self) -> bool:
        return self._has_further_epochs if self.prefetch_next_epoch is None else self.prefetch_next_epoch

    def _prefetchable(self, start: Start) -> NextEpoch | None:
        """Return the object that prefetches an epoch, or None if the batches depend on when the epoch starts."""
        order = start.order
        if not self._prefetches_next_epoch or not (order.has_plan or order.can_forecast):
            return None
        if isinstance(self._remote, DirectDataset) or (start.channel is not None and not start.channel.is_leader):
            return None
        if self._is_live or (order.has_plan and start.spec.session is not None):
            return None  # private workers copy the dataset when the epoch starts
        if order.has_shards:
            # by default not: further private workers would wait for an epoch after the last one
            restarts = self.prefetch_next_epoch and self.num_workers > 0 and not self.persistent_workers
            if start.channel is not None or not restarts or len(self._remote.servers.known) > 1:
                return None
        return NextEpoch(start, self._remote)

    def _initial_position(self, order: Order, first_batch: int) -> Position:
        position, progress = self._next, self._progress
        if order.has_plan and progress is not None and progress.is_unused and self._last() is None:
            # frameworks create an iterator to check the loader and discard it, which must not count as an epoch
            position = progress.next
        elif progress is not None and progress.following.epoch == position.epoch:
            position = progress.following
        return position._replace(batch=max(position.batch, first_batch))

    def _start(self, order: Order, lists: IndexLists | None, before: LoaderSpec | None, placement: Placement) -> Start:
        spec = self._spec_of_iteration(order, before)
        has_other_workers = spec != before if before is not None else self._progress is None
        states = None if self._progress is None else self._progress.next.shard_states
        draws_base_seeds = self.generator is not None or self._output == "torch"
        return Start(
            spec=spec,
            order=order,
            position=self._next,
            previous_states=None if has_other_workers else states or (None,) * spec.shards,
            lists=lists,
            placement=placement,
            loader=self._number,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor or DEFAULT_PREFETCH_FACTOR,
            timeout=self.timeout,
            keeps_workers=self._keeps_workers,
            seeded=self._seed is not None,
            base_seeds=self._seed if draws_base_seeds or self._seed is not None else 0,
            generator=self.generator,
            max_batch_bytes=self._max_batch_bytes,
            transform=self.device_transform,
            device_ahead=self.device_ahead,
            max_errors=self.max_errors,
            before=self._measures,
            run=self._run_name,
            channel=self._channel,
        )

    def _random_state(self, order: Order) -> RandomState:
        """Return the random generators that determine the batches of later epochs."""
        sampler = order.user_sampler
        process: Iterable[str] = ()
        if self._seed is None and (self._remote.is_here or not order.has_plan):
            if isinstance(self._remote, DirectDataset) or not (sampler is None or is_torchs_own(sampler)):
                process = PROCESS_GENERATORS
            elif sampler is not None or (self.generator is None and self._output == "torch"):
                process = ("torch",)
        return RandomState(self.generator, *nested_samplers(sampler), process=process)

    @property
    def _keeps_workers(self) -> bool:
        return self.persistent_workers and self.num_workers > 0

    def _draw_base_seed(self) -> int:
        """Return the base seed that torch would draw; without torch, derive it from the epoch."""
        if self.generator is not None or self._output == "torch":
            return draw_base_seed(self.generator)
        return derive_seed("base", 0, self._next.epoch)

    def _spec_of_iteration(self, order: Order, before: LoaderSpec | None) -> LoaderSpec:
        """Return the spec of the next epoch.

        Args:
            order: Order of the epoch.
            before: Spec of the previous epoch; None if the loader starts new workers.
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
        if before is not None:  # the server keeps the workers if the spec is equal
            return replace(own, shard_states=before.shard_states, resumed_epoch=before.resumed_epoch)
        # dataset replicas that this loader has already iterated keep their positions
        if self._progress is None and position.shard_states is not None:
            return replace(own, shard_states=position.shard_states, resumed_epoch=position.epoch)
        return own

    @property
    def _is_live(self) -> bool:
        """True if private workers start from the current state of a dataset object of this process."""
        functions = (self._spec.collate, self._spec.worker_init)
        has_functions = any(name is not None and name.startswith(local.PREFIX) for name in functions)
        return self._owns_dataset or (self._remote.is_here and (self._seed is None or has_functions))

    @property
    def _owns_dataset(self) -> bool:
        """True if `dataset` is an object of this process, not a `RemoteDataset` or a mixture of them."""
        return self._remote is not self.dataset and not (isinstance(self.dataset, Mixture) and self.dataset.is_remote)

    # -- position

    def set_epoch(self, epoch: SupportsIndex) -> None:
        """Select the epoch of the next ``iter()``; also calls ``set_epoch`` of the user's sampler, if available.

        After `load_state_dict`, selecting the interrupted epoch continues it at the saved position.

        Args:
            epoch: Epoch number, from 0.

        Raises:
            ValueError: If `epoch` is not a non-negative integer.
        """
        if not isinstance(epoch, SupportsIndex) or isinstance(epoch, bool) or operator.index(epoch) < 0:
            raise ValueError(f"epoch must be a non-negative integer, got {epoch!r}")
        self._has_further_epochs = True
        if epoch != self._next.epoch:
            self._next = Position(operator.index(epoch))
        if self._next_epoch is not None:
            self._next_epoch.expect(operator.index(epoch))
        if self._progress is not None and self._progress.position.epoch != epoch:
            self._next = self._next._replace(sampler=self._progress.following.sampler)
            self._progress = None
        self._orders.set_epoch(operator.index(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the random state to resume from, as JSON values.

        The position is that of the last iterator. If ``iter()`` was not called since the construction of the loader,
        `load_state_dict` or a change of the epoch with `set_epoch`, the position is the start of the next iterator.

        In seeded order, the state is about 120 bytes of JSON and counts the samples of all ranks. It is therefore the
        same on all ranks, except for the failed samples (``on_error``) and batches of each rank, and can be loaded with
        another number of ranks, see `load_state_dict`. With a client-side sampler it also has the random state from
        which the epoch's order was drawn (10 KB); with an iterable-style dataset, the position and the state of each
        shard. With persistent workers, if the training loop ended the previous epoch early (with ``break``), this
        method waits for the first batch of each shard. The frame of this batch contains the state of the shard.

        Raises:
            StateMismatch: If the state of an iterable-style dataset cannot be saved; the message names the value.
            Exception: If this method has to wait and the iteration has failed; the exception that `next()` raises.
        """
        return self._state_at(self._position())

    def _position(self) -> Position:
        """Return the position to resume from."""
        position, iterator = self._next, self._last()
        if self._progress is not None:
            position = (None if iterator is None else iterator.position) or self._progress.position
        if position == Position():
            position = self._order.initial(position)
        if self._progress is None and isinstance(self._remote, DirectDataset):
            position = self._remote.at_beginning(position)
        return position

    def _state_at(self, position: Position) -> dict[str, Any]:
        """Return `state_dict` for a position of this loader."""
        order, spec = self._order, self.spec
        position.check()
        identity, generators = self._identity(order, spec), self._random_state(order).save()
        return state.save(
            position, identity, order.global_batch_size(spec), generators, _unit(spec), order.algorithms(spec)
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a saved position: the next ``iter()`` begins with the batch after this position.

        In seeded order, the state of a loader with another number of ranks can be loaded if ``batch_size * world_size``
        divides its count: of samples, or of sequences with `packing`. With `balance`, this product and `window` must be
        the same in both loaders; with `max_tokens`, `group` must be the same, and ``world_size`` must divide the count
        of batches of all ranks.

        Unless `prefetch_next_epoch` is False, prefetching starts immediately, for the current rank. With `device` or
        `pin_memory`, this requires that the process already uses the accelerator.

        If the state belongs to another version of the dataset than the newest one, the `RemoteDataset` selects this
        version, unless its argument `version` was given, or another loader uses it.

        Args:
            state_dict: A state that `state_dict` returned, in this or another process.

        Raises:
            StateMismatch: If the state belongs to another dataset, seed or order, or its position is not at the start
                of a global batch of this loader; if no server has its version of the dataset.
        """
        saved = state_dict.get("dataset") if isinstance(state_dict, dict) else None
        if isinstance(saved, str) and isinstance(self._remote, RemoteDataset) and saved != self.spec.fingerprint:
            self._remote.select_version(saved)
        order, spec = self._order, self.spec
        position, generators = state.load(
            state_dict, self._identity(order, spec), order.global_batch_size(spec), _unit(spec), order.algorithms(spec)
        )
        order.resume(position)
        self._random_state(order).restore(generators)
        self._next = position
        self._progress = self._iterator = self._next_epoch = None
        # before its first use of an accelerator, the process may still select a device, or fork
        self._has_further_epochs = True
        if self._prefetches_next_epoch and not initializes_device(self.device, pin_memory=self.pin_memory):
            start = self._start(order, None, None, self._placement())
            self._next_epoch = self._prefetchable(start)
            if self._next_epoch is not None:
                with self._random_state(order).forecasting(position.random):
                    window = start.prefetch_factor * max(1, self.num_workers)
                    self._next_epoch.prefetch(0, 0.0, window)

    def _identity(self, order: Order, spec: LoaderSpec) -> dict[str, Any]:
        """Return the values that must be equal in a loader that resumes from this loader's state."""
        values: dict[str, Any] = {
            "seed": spec.seed if order.has_plan else self._seed, "shuffle": spec.shuffle,
            "batch_size": self.batch_size, "num_workers": int(self.num_workers),
            "shuffle_buffer_size": spec.shuffle_buffer_size,
        }  # fmt: skip
        common = {name: values[name] for name in order.identity}
        if spec.mixture is not None:
            common["mixture"] = spec.mixture.digest
        if spec.balance is not None:
            common["balance"] = spec.balance.identity
        if spec.packing is not None:
            common["packing"] = spec.packing.identity
        if spec.shuffle_buffer_size is not None:
            common["seed"] = values["seed"]
        return {"dataset": spec.fingerprint, "order": order.name, **common}

    def stats(self) -> LoaderStats:
        """Return statistics of the last ``iter()``: data wait of the training loop, batches, bytes and copies.

        The server reports the bottleneck, and the number of workers needed: ``teleloader stats URL``.
        """
        return self._measures.stats()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._construction.reduce(self, DataLoader.__init__)

    def __repr__(self) -> str:
        spec = self.spec
        ranks = f", rank={spec.rank}, world_size={spec.world_size}, tail={spec.tail!r}" if spec.world_size > 1 else ""
        given = [f", {name}={value!r}" for name in ("balance", "packing") if (value := getattr(self, name)) is not None]
        return (
            f"DataLoader({self.dataset!r}, batch_size={self.batch_size}, shuffle={spec.shuffle}, "
            f"drop_last={spec.drop_last}, seed={self._seed}{ranks}{''.join(given)})"
        )


def live_loaders() -> list[tuple[int, DataLoader[Any]]]:
    """Return the loaders of this process that exist, with their sequence numbers; may be called in any thread."""
    found = ((reference.key, reference()) for reference in _loaders.valuerefs())
    return [(number, loader) for number, loader in found if loader is not None]


def _unit(spec: LoaderSpec) -> str:
    """Return the unit in which states count the position of all ranks."""
    if spec.packing is not None:
        return "sequences"
    return "batches" if spec.has_token_batches else "samples"
