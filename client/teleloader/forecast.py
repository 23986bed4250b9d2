"""Forecast of the index lists that torch's samplers yield in the next epoch, to prefetch their batches.

The order of an epoch depends on the random generators at ``iter()``. A forecast draws from copies of samplers and
generators, so that it changes nothing that the training loop can observe. When the epoch starts, the loader draws from
the samplers as without a forecast, and discards the prefetched batches if a list or the base seed differs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Final

from teleloader.sampling import IndexLists, draw_base_seed, index_frame
from teleloader_shared.codec import BatchId

MAX_MISSES: Final = 2
"""Consecutive wrong forecasts after which a loader makes no further ones: the training loop draws from the same
generator, or changes the samplers."""

MAX_SAMPLES: Final = 250_000
"""Maximum number of samples of an epoch that is forecast: drawing more takes the training loop over 50 ms, and the draw
at the start of the epoch then determines the wait for its first batch."""


class Forecast:
    """Base seed and index lists that torch's samplers will yield if nothing changes before the epoch starts.

    Args:
        sampler: One of torch's samplers (`sampling.is_torchs_own`), with the present state of its generators.
        generator: The loader's generator; None for torch's global generator.
        draws_base_seed: Whether the base seed is drawn from `generator` before the lists.
        skip: Number of lists to skip, because they belong to batches before the resumed position.
        epochs: Expected `epoch` attribute of each sampler that has one (DistributedSampler), by ``id()``.
        ended: Function to call with the result of the comparison, once the epoch has started.
    """

    def __init__(
        self,
        sampler: Any,
        generator: Any,
        *,
        draws_base_seed: bool,
        skip: int,
        epochs: Mapping[int, int],
        ended: Callable[[bool], object],
    ) -> None:
        self.ended = ended
        copies = _Copies(epochs)
        self.base_seed = draw_base_seed(copies.generator(generator)) if draws_base_seed else None
        """Drawn base seed of the workers; None if it is not drawn."""
        self.lists = IndexLists(copies.sampler(sampler), skip)
        self.expected: dict[int, Any] = {}
        """Drawn index lists, by batch number."""

    def draw(self, key: str, epoch: int, stop: int) -> None:
        """Draw and encode the lists of all batches before batch `stop`, for the loader with a key."""

        def encode(k: int, indices: Any) -> bytes:
            frame = index_frame(BatchId(key, epoch, k), indices)
            self.expected[k] = indices
            return frame

        self.lists.draw(stop, encode)

    def matches(self, drawn: Mapping[int, Any]) -> bool:
        """Return True if the samplers have yielded the expected lists; `drawn` has their lists by batch number."""
        return all(k in drawn and drawn[k] == indices for k, indices in self.expected.items())


def copied(generator: Any) -> Any:
    """Return a copy of a torch.Generator; None copies torch's global generator."""
    import torch

    original = torch.default_generator if generator is None else generator
    made = torch.Generator(device=original.device)
    made.set_state(original.get_state())
    return made


class _Copies:
    """Copies of samplers and generators; equal objects have one copy, so that draws keep their sequence."""

    def __init__(self, epochs: Mapping[int, int]) -> None:
        self._epochs = epochs
        self._generators: dict[int, Any] = {}

    def generator(self, generator: Any) -> Any:
        import torch

        original = torch.default_generator if generator is None else generator
        if id(original) not in self._generators:
            self._generators[id(original)] = copied(original)
        return self._generators[id(original)]

    def sampler(self, sampler: Any) -> Any:
        import torch

        made = copy.copy(sampler)
        if getattr(sampler, "sampler", None) is not None:
            made.sampler = self.sampler(sampler.sampler)
        if "generator" in vars(sampler):
            made.generator = self.generator(sampler.generator)
            if sampler.generator is None and isinstance(sampler, torch.utils.data.RandomSampler):
                # as RandomSampler without a generator: only the seed comes from the global generator
                made.generator = torch.Generator().manual_seed(draw_base_seed(made.generator))
        if id(sampler) in self._epochs:
            made.epoch = self._epochs[id(sampler)]
        return made
