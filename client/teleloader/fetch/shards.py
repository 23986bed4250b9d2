"""Client-side record of delivered batches of an iterable-style dataset, to register evicted sessions again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from teleloader_shared import delivered
from teleloader_shared.codec import End, Failure, Frame
from teleloader_shared.delivered import Delivered
from teleloader_shared.spec import MAX_STATES, LoaderSpec


class DeliveredShards:
    """Record of the batches delivered in an epoch, from which a server can restore an evicted session.

    Args:
        spec: Spec of the session.
        epoch: Epoch number.
    """

    def __init__(self, spec: LoaderSpec, epoch: int) -> None:
        self._spec = spec
        self._epoch = epoch
        self._shards: list[Delivered | None] = [None] * spec.shards

    def add(self, frames: Iterable[Frame], raw: NDArray[np.uint8]) -> None:
        """Record received frames as delivered.

        Args:
            frames: Decoded frames of one response.
            raw: Bytes of the response.
        """
        start = 0
        for frame in frames:
            if not isinstance(frame.content, Failure | End):
                number, shard = divmod(frame.address.batch, self._spec.shards)
                before = self._shards[shard] or Delivered(number, number, 0, None)
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
