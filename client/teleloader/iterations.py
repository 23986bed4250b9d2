"""Creation of an iteration over an epoch, with batches from servers or from an in-process dataset."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from teleloader.dataset import RemoteDataset
from teleloader.fetch.channel import Announcement, Channel
from teleloader.fetch.direct import DirectDataset, DirectReceiver, DirectStager
from teleloader.fetch.fetcher import FetchOptions
from teleloader.fetch.group import GroupReceiver, LeaderReceiver, MemberReceiver
from teleloader.fetch.iteration import Iteration, LoaderIterator, Progress
from teleloader.fetch.receiver import Receiver, groups_of
from teleloader.fetch.scheduler import RangeScheduler
from teleloader.fetch.shards import DeliveredShards, group_spec
from teleloader.fetch.stager import Stager
from teleloader.forecast import Forecast, copied
from teleloader.orders import Order
from teleloader.sampling import IndexLists, draw_base_seed
from teleloader.state import Position
from teleloader.stats import Measures
from teleloader.tensors.placement import Placement
from teleloader.transport.interface import BatchServer
from teleloader.transport.request import BatchRequest
from teleloader.transport.tracing import IterationTrace
from teleloader_shared import tracing
from teleloader_shared.errors import InvalidSpec, ProtocolError
from teleloader_shared.orders.seeding import derive_seed
from teleloader_shared.ranges import BatchRanges
from teleloader_shared.spec import LoaderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Parameters of one iteration over an epoch: a snapshot of the loader's arguments and position."""

    spec: LoaderSpec
    order: Order
    position: Position
    previous_states: tuple[str | None, ...] | None
    """Last state of each shard in the previous epoch (None if unknown); None if other workers iterated that epoch."""
    lists: IndexLists | None
    """Index lists of a client-side sampler, from `position` on; None if servers compute the indices."""
    placement: Placement
    loader: int
    """Sequence number of the loader in this process."""
    num_workers: int
    prefetch_factor: int
    """Batches to prefetch per worker."""
    timeout: float
    """Seconds to wait for a batch; 0 for no limit."""
    keeps_workers: bool
    """True if the next epoch uses the same (persistent) workers."""
    seeded: bool
    """True if the `seed` argument was given."""
    base_seeds: int | None
    """Seed from which the base seed of each epoch is derived; None to draw base seeds from `generator`."""
    generator: Any
    """The loader's torch.Generator; None for torch's global generator."""
    max_batch_bytes: int
    transform: Callable[[Any], Any] | None
    """Applied to each batch in the training loop's thread; None for no transform."""
    max_errors: float
    """Fraction of the samples of the epoch that may be skipped or replaced."""
    device_ahead: int
    """Batches to copy to the device before the training loop requests them."""
    before: Measures
    """Measurements of the loader's previous iteration."""
    run: str | None
    """Name of the training run, for servers; None for no name."""
    channel: Channel | None
    """Broadcasts in the model-parallel group; None if this process fetches batches only for itself."""

    def open(self, dataset: RemoteDataset | DirectDataset, ahead: NextEpoch | None = None) -> Iteration:
        """Create the iteration and start fetching batches.

        Args:
            dataset: Dataset to load from.
            ahead: Prefetched batches; they are used if they are those of this iteration.

        Raises:
            ServerUnavailable: If no server responds.
            DatasetChanged: If the servers host data with another fingerprint than that of `spec`.
            ProtocolError: If the server reports another number of batches than the client computed.
            TeleloaderError: If a rank of the model-parallel group exits, or its leader has another position or other
                arguments.
        """
        if isinstance(dataset, DirectDataset):
            return self._open_here(dataset)
        if self.channel is None:
            iteration = self._staged(dataset, *self._fetch(dataset, ahead))
            if ahead is not None and ahead.forecast is not None:
                iteration.forecast = ahead.forecast
                iteration.reopen = partial(self._reopen, dataset, iteration.measures)
            return iteration
        self.channel.open()
        if self.channel.is_leader:
            return self._lead(dataset, self.channel, ahead)
        return self._follow(dataset, self.channel)

    def _reopen(self, dataset: RemoteDataset, measures: Measures) -> Iteration:
        """Create another iteration in place of one whose forecast was wrong, with the same measurements."""
        # another session: servers may have batches of the wrong lists
        start = replace(self, spec=replace(self.spec, session=secrets.token_hex(16)))
        return start._staged(dataset, *start._fetch(dataset, None, measures))

    def forecast(self) -> tuple[Start, Forecast | None]:
        """Return the parameters for fetching an epoch before it starts, and a forecast of its index lists.

        The random generators must have the states from which the epoch will be drawn. The forecast is None without a
        client-side sampler.
        """
        position, resumed = self.position, self.position.random
        draws = self.base_seeds is None and position.base_seed is None
        if resumed is not None:
            draws = bool(resumed["draws_base_seed"])
        forecast, seed = None, position.base_seed
        if self.order.is_drawn:
            forecast = self.order.forecast(self.generator, draws_base_seed=draws, skip=position.batch)
            seed = forecast.base_seed if seed is None else seed
        elif draws:
            seed = draw_base_seed(copied(self.generator))
        if seed is None:
            seed = derive_seed("base", self.base_seeds or 0, position.epoch)
        return replace(self, spec=replace(self.spec, session=secrets.token_hex(16), seed=seed)), forecast

    def prefetch(self, dataset: RemoteDataset, iterator: LoaderIterator) -> Receiver:
        """Return a receiver that prefetches batches in the background, before the training loop starts the epoch.

        Args:
            dataset: Dataset to load from.
            iterator: Iterator that closes the receiver when it is deleted.
        """
        key, length = self.spec.key, dataset.info.length
        compute = partial(self._progress, self.spec, length, keeps_dataset=self.keeps_workers)
        is_prepared = self.spec.is_prepared
        progress, stop = (Progress((self.position, None)), self.position.batch) if is_prepared else compute()
        scheduler = RangeScheduler(
            progress.batch,
            stop,
            self.prefetch_factor,
            adaptive=self.order.adaptive,
            shards=self.spec.shards if self.order.has_shards else 0,
            loader=key,
            epoch=self.position.epoch,
            is_background=True,
            has_lists=self.order.is_drawn,
        )
        compute_stop = None
        if is_prepared:  # in the receiving thread, because this can take seconds
            compute_stop = lambda: compute()[1]  # noqa: E731
            scheduler.needed = stop + 1  # to compute the first batch, a server prepares the epoch, too
        receiver = self._receiver(dataset, None, self.spec, key, scheduler, None, compute_stop=compute_stop)
        iterator.begin(self._iteration(dataset, self.spec, progress, receiver, None, length))
        return receiver

    def _open_here(self, dataset: DirectDataset) -> Iteration:
        spec, epoch, placement = self.spec, self.position.epoch, self.placement
        length = dataset.info.length
        progress, stop = self._progress(spec, length, keeps_dataset=True)
        progress.state = (dataset.at_beginning(progress.next), None)
        buffers = placement.buffers() if placement.pins and not placement.copies else None
        measures = Measures(epoch, buffers, self.before)
        receiver = DirectReceiver(
            dataset,
            spec,
            epoch,
            RangeScheduler(progress.batch, stop, 1, adaptive=False),
            self.order.plan(spec, epoch, length),
            measures,
            placement.output,
            seeded=self.seeded,
            pinned=buffers,
        )
        stager = None if placement.target is None else DirectStager(placement.target, measures)
        return self._iteration(dataset, spec, progress, receiver, stager, length)

    def _lead(self, dataset: RemoteDataset, channel: Channel, ahead: NextEpoch | None) -> Iteration:
        """Create the iteration of the leader of a model-parallel group."""
        channel.close_current()
        try:
            identity = self._identity(dataset)
            spec, progress, source, length = self._fetch(dataset, ahead)
        except BaseException as error:
            channel.submit(partial(channel.end, error, started=False))  # a lambda would refer to a deleted name
            raise
        announced = Announcement(
            source.key, identity, self.position.epoch, progress.batch, source.requests.stop, progress.longest,
            progress.keeps_dataset, progress.continues_dataset,
        )  # fmt: skip
        channel.submit(lambda: channel.start(announced))
        scheduler = self._group_scheduler(progress.batch, announced.stop)
        receiver = LeaderReceiver(channel, source, scheduler, self.max_batch_bytes)
        receiver.begin()
        return self._staged(dataset, spec, progress, receiver, length)

    def _follow(self, dataset: RemoteDataset, channel: Channel) -> Iteration:
        """Create the iteration of another member of a model-parallel group."""
        channel.close_current()
        announced = channel.submit(channel.await_start).result()
        length = dataset.info.length
        try:
            extent = (announced.stop, announced.longest)
            progress, stop = self._progress(self.spec, length, keeps_dataset=announced.keeps_dataset, extent=extent)
            progress.continues_dataset = announced.continues_dataset
            announced.check(self._identity(dataset), self.position.epoch, progress.batch, channel.leader)
        except BaseException:
            channel.submit(channel.discard)  # the other ranks must not wait for this one
            raise
        buffers = self.placement.buffers()
        receiver = MemberReceiver(
            channel, announced, self._group_scheduler(progress.batch, stop),
            Measures(self.position.epoch, buffers, self.before), buffers, self.max_batch_bytes,
            url=dataset.url if dataset.is_here else None,
        )  # fmt: skip
        receiver.begin()
        return self._staged(dataset, self.spec, progress, receiver, length)

    def _group_scheduler(self, first: int, stop: int) -> RangeScheduler:
        """Return the scheduler of the batches that a member of a model-parallel group receives."""
        shards = self.spec.shards if self.order.has_shards else 0
        return RangeScheduler(first, stop, self.prefetch_factor, shards, adaptive=self.order.adaptive, shards=shards)

    def _identity(self, dataset: RemoteDataset) -> str:
        """Return a digest of the arguments that must be equal in a model-parallel group."""
        own: dict[str, Any] = {}
        if self.spec.session is not None:  # random on each rank
            own["session"] = "group"
            if not self.order.has_shards:
                own["num_workers"] = 0
        if dataset.is_here:  # each rank hosts its own object
            own |= {"fingerprint": None, "collate": None, "worker_init": None, "in_process": False}
        return replace(self.spec, **own).key

    def _fetch(
        self, dataset: RemoteDataset, ahead: NextEpoch | None, measures: Measures | None = None
    ) -> tuple[LoaderSpec, Progress, Receiver, int | None]:
        """Return a receiver of batches from servers, and what it receives.

        Args:
            dataset: Dataset to load from.
            ahead: Prefetched batches; they are used if they are those of this iteration.
            measures: Measurements of the iteration; None for new ones.

        Returns:
            The spec, the initial progress, the receiver, and the number of samples in the dataset.
        """
        taken = None if ahead is None else ahead.take(self, dataset)
        if taken is not None:
            (spec, receiver), length = taken, dataset.info.length
            progress, _ = self._progress(spec, length, keeps_dataset=self.keeps_workers)
            return spec, progress, receiver, length
        order, epoch = self.order, self.position.epoch
        # all batches of a model-parallel group have the key of one loader
        divides = order.has_shards and self.channel is None
        groups = groups_of(dataset.servers.known, self.spec) if divides else 1
        server, registered = dataset.register(group_spec(self._spec_to_register, 0, groups), epoch)
        spec = replace(self.spec, fingerprint=registered.fingerprint)
        keeps_dataset = self.keeps_workers or registered.num_workers == 0
        progress, stop = self._progress(spec, registered.length, keeps_dataset=keeps_dataset)
        previous_states = self.previous_states if keeps_dataset and order.has_shards else None
        progress.continues_dataset = previous_states is not None
        if order.has_plan and not spec.is_prepared and stop != registered.batches:
            raise ProtocolError(
                f"{dataset.url} reports {registered.batches} batches per epoch, expected {stop}: install the same "
                "release of teleloader on both sides"
            )
        scheduler = RangeScheduler(
            progress.batch,
            stop,
            self.prefetch_factor,
            registered.num_workers,
            adaptive=order.adaptive,
            shards=spec.shards if order.has_shards else 0,
            name=server.url,
            batch_rate=registered.batch_rate,
            loader=registered.key,
            epoch=epoch,
        )
        receiver = self._receiver(
            dataset, server, spec, registered.key, scheduler, previous_states, groups, measures=measures
        )
        return spec, progress, receiver, registered.length

    def _receiver(
        self,
        dataset: RemoteDataset,
        server: BatchServer | None,
        spec: LoaderSpec,
        key: str,
        scheduler: RangeScheduler,
        previous_states: tuple[str | None, ...] | None,
        groups: int = 1,
        compute_stop: Callable[[], int] | None = None,
        measures: Measures | None = None,
    ) -> Receiver:
        epoch, buffers = self.position.epoch, self.placement.buffers()
        options = FetchOptions(
            spec=spec,
            first_spec=replace(self._spec_to_register, fingerprint=spec.fingerprint),
            previous_states=previous_states,
            key=key,
            epoch=epoch,
            consumer=LoaderIterator.consumer_name(spec.rank, self.loader),
            buffers=buffers,
            device=self.placement.device,
            max_batch_bytes=self.max_batch_bytes,
            reconnect_timeout=dataset.reconnect_timeout,
            environment=dataset.environment,
            trace=IterationTrace(key, epoch) if tracing.is_on() else None,
            keeps_bytes=self.channel is not None,
            compute_stop=compute_stop,
        )
        if measures is None:
            first, is_background = self.position.batch, scheduler.is_background
            measures = Measures(epoch, buffers, self.before, is_background=is_background, first=first, run=self.run)
        return Receiver(dataset, server, options, scheduler, measures, groups=groups, stays=self._stays)

    def _staged(
        self,
        dataset: RemoteDataset,
        spec: LoaderSpec,
        progress: Progress,
        receiver: Receiver | GroupReceiver,
        length: int | None,
    ) -> Iteration:
        """Create an iteration that copies the received batches to the device, if there is one."""
        target = self.placement.target
        stager = None if target is None else Stager(receiver.reorder_buffer, target, self.device_ahead)
        return self._iteration(dataset, spec, progress, receiver, stager, length)

    @property
    def _spec_to_register(self) -> LoaderSpec:
        """Spec with the last shard states of the previous epoch, in case the server no longer has the session."""
        if self.previous_states is None or not (self.keeps_workers and self.order.has_shards):
            return self.spec
        shards = DeliveredShards(self.spec, self.position.epoch - 1, self.previous_states)
        shards.request(BatchRequest(BatchRanges(range(self.spec.shards))))
        return shards.spec

    @property
    def _stays(self) -> bool:
        return self.keeps_workers and self.spec.session is not None

    def _progress(
        self,
        spec: LoaderSpec,
        length: int | None,
        *,
        keeps_dataset: bool,
        extent: tuple[int | None, int | None] | None = None,
    ) -> tuple[Progress, int]:
        """Return the initial progress, and the number of batches of the epoch as far as it is known.

        Args:
            spec: Parameters of the loader.
            length: Number of samples in the dataset; None if unknown.
            keeps_dataset: See `Progress.keeps_dataset`.
            extent: Result of `Order.extent`; None to compute it.
        """
        position = self.position
        stop, longest = extent or self.order.extent(spec, position.epoch, length)
        if stop is None:
            stop = position.batch
        position = position._replace(batch=min(position.batch, stop))
        if position.shard_states is not None and len(position.shard_states) != spec.shards:
            position = position._replace(shard_states=None)
        progress = Progress(
            (position, None),
            longest,
            None if self.lists is None else self.lists.states,
            keeps_base_seed=self.keeps_workers,
            keeps_dataset=keeps_dataset,
        )
        return progress, stop

    def _iteration(
        self,
        dataset: RemoteDataset | DirectDataset,
        spec: LoaderSpec,
        progress: Progress,
        receiver: Receiver | GroupReceiver | DirectReceiver,
        stager: Stager | DirectStager | None,
        length: int | None,
    ) -> Iteration:
        return Iteration(
            dataset=dataset,
            spec=spec,
            progress=progress,
            batches=self.order.batches(receiver.reorder_buffer.scheduler.stop),
            receiver=receiver,
            lists=self.lists,
            timeout=self.timeout,
            stays=self._stays,
            length_check=None
            if receiver.requests.is_background
            else self.order.length_check(self.num_workers, length if spec.world_size == 1 else None),
            stager=stager,
            transform=self.transform,
            max_errors=self.max_errors,
            samples=None if length is None or not spec.has_token_batches else length // spec.world_size,
        )

    def fetches_as(self, other: Start) -> bool:
        """Return True if an iteration with other parameters fetches the same batches in the same way."""
        spec = self.spec
        if None not in (spec.session, other.spec.session):  # the session has no effect on the batches
            spec = replace(spec, session=other.spec.session)
        mine, theirs = (
            (
                start.position.epoch, start.position.batch, start.placement.memory, start.prefetch_factor,
                start.max_batch_bytes,
            )
            for start in (self, other)
        )  # fmt: skip
        return spec == other.spec and mine == theirs


class NextEpoch:
    """Batches of the epoch that a loader will probably start next, which are prefetched in the background.

    The batches are in seeded order, those of a `Forecast`, or those of an iterable-style dataset. The training loop's
    thread calls all methods.

    Args:
        start: Parameters of that epoch.
        dataset: Dataset to load from.
    """

    def __init__(self, start: Start, dataset: RemoteDataset) -> None:
        self._start: Start | None = start
        self._dataset = dataset
        self._receiver: Receiver | None = None
        """Receiver of the batches; None before `prefetch`."""
        self._iterator: LoaderIterator | None = None
        """Iterator that closes the receiver when it is deleted, and at the end of the process."""
        self.forecast: Forecast | None = None
        """Forecast of the index lists; None in seeded order, before `prefetch`, and if `take` returned None."""

    def expect(self, epoch: int) -> None:
        """Replace the epoch by another one; do nothing if it is this one, or if it was already started."""
        if self._start is not None and self._start.position.epoch != epoch:
            self._start = replace(self._start, position=Position(epoch, base_seed=self._kept_base_seed))
            self._iterator = self._receiver = self.forecast = None

    @property
    def _kept_base_seed(self) -> int | None:
        """Base seed of persistent workers, which is the same in all epochs; None for other workers."""
        return self._start.position.base_seed if self._start is not None and self._start.keeps_workers else None

    def prefetch(self, preceding: int, nbytes: float, window: int) -> None:
        """Prefetch the batches that are in the prefetch window.

        Args:
            preceding: Number of batches that the training loop takes from the epoch before.
            nbytes: Memory of these batches in bytes.
            window: Size of the prefetch window in batches, for the index lists to draw.
        """
        if self._receiver is None and self._start is not None and self._can_prefetch:
            self._iterator = LoaderIterator()
            try:
                if not self._start.order.has_plan:
                    self._start, self.forecast = self._start.forecast()
                self._receiver = self._start.prefetch(self._dataset, self._iterator)
            except (RuntimeError, InvalidSpec):  # the process cannot start further threads, or no epoch follows
                self._start = None
        if self._receiver is not None:
            self._receiver.reorder_buffer.approach(preceding, nbytes)
            if self.forecast is not None and self._start is not None:
                position, lists = self._start.position, self.forecast.lists
                self.forecast.draw(self._receiver.key, position.epoch, position.batch + window - preceding)
                self._receiver.reorder_buffer.feed(lists.frames)
                lists.frames = {}

    @property
    def _can_prefetch(self) -> bool:
        known = self._dataset.servers.known
        return bool(known) and all(server.computes_in_background for server in known)

    def take(self, start: Start, dataset: RemoteDataset) -> tuple[LoaderSpec, Receiver] | None:
        """Return the receiver of the prefetched batches for an epoch that starts, and their spec.

        Args:
            start: Parameters of the epoch.
            dataset: Dataset to load from.

        Returns:
            The spec and the receiver; None if this epoch was not prefetched, or prefetching has failed.
        """
        expected, iterator, receiver, forecast = self._start, self._iterator, self._receiver, self.forecast
        self._start = self._iterator = self._receiver = self.forecast = None
        if expected is None or iterator is None or receiver is None or iterator.is_copy:
            return None
        if dataset is not self._dataset or not start.fetches_as(expected):
            start.order.forecast_ended(is_right=False)
            return None  # the iterator is deleted
        if not receiver.begin():
            return None
        iterator.release()
        self.forecast = forecast
        if forecast is None:
            start.order.forecast_ended(is_right=True)
        return expected.spec, receiver
