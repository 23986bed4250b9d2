"""Client-side record of delivered batches of an iterable-style dataset, to register evicted sessions again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from teleloader.transport.request import BatchRequest
from teleloader_shared import delivered
from teleloader_shared.codec import End, Failure, Frame
from teleloader_shared.delivered import Delivered
from teleloader_shared.spec import MAX_STATES, LoaderSpec


def group_spec(spec: LoaderSpec, number: int, groups: int) -> LoaderSpec:
    """Return the spec of group `number`: of divided shards, group i has each shard j with j mod `groups` = i.

    Each group has a session of its own. Two groups may use the same server after a failure, and a server restores the
    session of a group from the record of its shards. With another number of groups, sessions have other names: workers
    that are kept between epochs continue only the shards that they have iterated.
    """
    return spec if groups == 1 else replace(spec, session=f"{spec.session}/{number}/{groups}")


class DeliveredShards:
    """Record of the batches delivered in an epoch, from which a server can restore an evicted session.

    Args:
        spec: Spec of the session.
        epoch: Epoch number.
        previous: Last states of the shards in the previous epoch of the session, if known.
    """

    def __init__(self, spec: LoaderSpec, epoch: int, previous: Sequence[str | None] | None = None) -> None:
        self._spec = spec
        self._epoch = epoch
        self._previous = previous or (None,) * spec.shards
        self._shards: list[Delivered | None] = [None] * spec.shards
        self._unrequested = set(range(spec.shards))

    def request(self, wanted: BatchRequest) -> None:
        """Record that a server may start to iterate the shards of these batches."""
        if not self._unrequested:
            return
        for batch in chain(wanted.batches, range(wanted.batches.stop, wanted.batches.stop + wanted.ahead)):
            number, shard = divmod(batch, self._spec.shards)
            if shard in self._unrequested:
                self._unrequested.remove(shard)
                self._shards[shard] = Delivered(number, number, 0, self._previous[shard])

    def add(self, frames: Iterable[Frame], raw: NDArray[np.uint8]) -> None:
        """Record received frames as delivered.

        Args:
            frames: Decoded frames of one response.
            raw: Bytes of the response.
        """
        start = 0
        for frame in frames:
            number, shard = divmod(frame.batch_id.batch, self._spec.shards)
            before = self._shards[shard]
            if before is not None and before.is_empty:
                before = None
            if isinstance(frame.content, End):
                self._shards[shard] = before and before._replace(state=frame.shard_state or before.state)
            elif not isinstance(frame.content, Failure):
                before = before or Delivered(number, number, 0, None)
                digest = delivered.extended(
                    before.digest, raw[start : start + frame.nbytes], checksum=self._spec.checksum
                )
                self._shards[shard] = Delivered(before.first, number + 1, digest, frame.shard_state)
            start += frame.nbytes

    @property
    def spec(self) -> LoaderSpec:
        """Spec for registering the session again, with the progress of its shards.

        The states are omitted if they exceed `MAX_STATES`.
        """
        text = delivered.pack(self._epoch, self._shards)
        if len(text) + sum(map(len, filter(None, self._spec.shard_states or ()))) > MAX_STATES:
            stateless = [None if shard is None else shard._replace(state=None) for shard in self._shards]
            text = delivered.pack(self._epoch, stateless)
        return replace(self._spec, delivered=text)
