"""Creation of an iteration over an epoch, with batches from servers or from an in-process dataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from teleloader.dataset import RemoteDataset
from teleloader.fetch.direct import DirectDataset, DirectReceiver, DirectStager
from teleloader.fetch.fetcher import FetchOptions
from teleloader.fetch.iteration import Iteration, LoaderIterator, Progress
from teleloader.fetch.receiver import Receiver, groups_of
from teleloader.fetch.scheduler import RangeScheduler
from teleloader.fetch.shards import DeliveredShards, group_spec
from teleloader.fetch.stager import Stager
from teleloader.orders import Order
from teleloader.sampling import IndexLists
from teleloader.state import Position
from teleloader.stats import Measures
from teleloader.tensors.placement import Placement
from teleloader.transport.request import BatchRequest
from teleloader.transport.tracing import IterationTrace
from teleloader_shared import tracing
from teleloader_shared.errors import ProtocolError
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
    max_batch_bytes: int
    transform: Callable[[Any], Any] | None
    """Applied to each batch in the training loop's thread; None for no transform."""
    max_errors: float
    """Fraction of the samples of the epoch that may be skipped or replaced."""
    device_ahead: int
    """Batches to copy to the device before the training loop requests them."""
    before: Measures
    """Measurements of the loader's previous iteration."""

    def open(self, dataset: RemoteDataset | DirectDataset) -> Iteration:
        """Create the iteration and start fetching batches.

        Raises:
            ServerUnavailable: If no server responds.
            DatasetChanged: If the servers host data with another fingerprint than that of `spec`.
            ProtocolError: If the server reports another number of batches than the client computed.
        """
        return self._open_here(dataset) if isinstance(dataset, DirectDataset) else self._open_remote(dataset)

    def _open_here(self, dataset: DirectDataset) -> Iteration:
        spec, epoch, placement = self.spec, self.position.epoch, self.placement
        length = dataset.info.length
        progress, stop = self._progress(spec, length, keeps_dataset=True)
        progress.state = (dataset.at_beginning(progress.next), None)
        buffers = placement.buffers() if placement.pins and not placement.copies else None
        measures = Measures(epoch, buffers)
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

    def _open_remote(self, dataset: RemoteDataset) -> Iteration:
        order, epoch = self.order, self.position.epoch
        groups = groups_of(dataset.servers.known, self.spec) if order.has_shards else 1
        server, registered = dataset.register(group_spec(self._spec_to_register, 0, groups), epoch)
        spec = replace(self.spec, fingerprint=registered.fingerprint)
        keeps_dataset = self.keeps_workers or registered.num_workers == 0
        progress, stop = self._progress(spec, registered.length, keeps_dataset=keeps_dataset)
        previous_states = self.previous_states if keeps_dataset and order.has_shards else None
        progress.continues_dataset = previous_states is not None
        if order.has_plan and stop != registered.batches:
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
        buffers = self.placement.buffers()
        options = FetchOptions(
            spec=spec,
            first_spec=replace(self._spec_to_register, fingerprint=registered.fingerprint),
            previous_states=previous_states,
            key=registered.key,
            epoch=epoch,
            consumer=LoaderIterator.consumer_name(spec.rank, self.loader),
            buffers=buffers,
            device=self.placement.device,
            max_batch_bytes=self.max_batch_bytes,
            reconnect_timeout=dataset.reconnect_timeout,
            environment=dataset.environment,
            trace=IterationTrace(registered.key, epoch) if tracing.is_on() else None,
        )
        measures = Measures(epoch, buffers, self.before.report())
        receiver = Receiver(dataset, server, options, scheduler, measures, groups=groups, stays=self._stays)
        target = self.placement.target
        stager = None if target is None else Stager(receiver.reorder_buffer, target, self.device_ahead)
        return self._iteration(dataset, spec, progress, receiver, stager, registered.length)

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

    def _progress(self, spec: LoaderSpec, length: int | None, *, keeps_dataset: bool) -> tuple[Progress, int]:
        """Return the initial progress, and the number of batches of the epoch as far as it is known."""
        position = self.position
        stop, longest = self.order.extent(spec, position.epoch, length)
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
        receiver: Receiver | DirectReceiver,
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
            length_check=self.order.length_check(self.num_workers, length if spec.world_size == 1 else None),
            stager=stager,
            transform=self.transform,
            max_errors=self.max_errors,
        )
