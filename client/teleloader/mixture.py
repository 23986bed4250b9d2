"""`Mixture`: several datasets from which each batch takes samples in given proportions."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, cast, get_args

from teleloader.dataset import RemoteDataset
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.orders.mixture import StoppingStrategy, epoch_samples
from teleloader_shared.sources import Sources, describe
from teleloader_shared.text import short
from teleloader_shared.weights import MixtureSpec, Weights, whole_weights


class Mixture(Sources):
    """Map-style datasets from which each batch of a `DataLoader` takes samples in given proportions.

    After any number of samples, the count of each source differs from its weight times this number by less than 1; with
    a schedule, from the sum of its weights. In any window of the order, such as a batch, it differs by less than 2.

    The samples of a source are used pass by pass: no sample is repeated before all others of the source have been used,
    also across epochs. With ``shuffle=True``, each pass has its own order, derived from the loader's seed, the name of
    the source and the number of the pass.

    The loader requires `seed`. All sources require the same collate function and the same seeding. As an object, the
    mixture is the concatenation of its sources: index 0 is the first sample of the first source. Its ``len()`` is the
    number of samples of all sources, whereas an epoch has `samples` samples.

    Args:
        sources: Datasets by name. Either each is a `RemoteDataset` of the same servers, under its name on the servers;
            or each is an object of this process.
        weights: Weight of each source by name, as numbers whose ratios matter; sources without a weight are not used.
            A schedule maps numbers of samples, counted over all ranks and epochs, to the weights from there on:
            ``{0: {"web": 3, "code": 1}, 1_000_000: {"web": 1, "code": 1}}``.
        samples: Samples in an epoch, over all ranks. ``"first_exhausted"`` (the default) is the largest number with
            which the first epoch repeats no sample, ``"all_exhausted"`` the smallest with which it contains all samples
            of all sources, and repeats those of the smaller ones.

    Raises:
        ValueError: If a weight is invalid, a `RemoteDataset` has another name, or a source is never exhausted.
        TypeError: If `sources` is not a mapping, a source is not a map-style dataset with a length, or only some are
            `RemoteDataset`.
        InvalidSpec: If the sources cannot be mixed, or the schedule is too long.

    Example:
        >>> mixture = Mixture({"web": [1, 2, 3, 4], "code": [5, 6]}, {"web": 2, "code": 1})
        >>> loader = DataLoader(mixture, batch_size=3, shuffle=True, seed=7)  # doctest: +SKIP
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Weights | Mapping[int, Weights],
        *,
        samples: SupportsIndex | StoppingStrategy = "first_exhausted",
    ) -> None:
        if not isinstance(sources, Mapping):
            raise TypeError(
                "sources of a mixture must be a mapping from names to datasets, such as "
                f'{{"web": dataset, "code": other}}, got {type(sources).__qualname__}'
            )
        remotes = {name: source for name, source in sources.items() if isinstance(source, RemoteDataset)}
        if remotes and len(remotes) < len(sources):
            raise TypeError(
                f"the sources of a mixture must be either all RemoteDataset or all objects of this process: "
                f"{short(list(remotes))} are RemoteDataset, and the others are not"
            )
        for name, remote in remotes.items():
            if remote.name != name:
                raise ValueError(
                    f"source {name!r} is dataset {remote.name!r} on the server: use the same name in the mixture"
                )
        self.is_remote = bool(remotes)
        """True if the sources are hosted by servers."""
        if remotes:
            describe([remote.info for remote in remotes.values()])
        super().__init__(sources)
        if isinstance(samples, str) and samples not in get_args(StoppingStrategy):
            raise ValueError(
                f"samples must be a number of samples, 'first_exhausted' or 'all_exhausted', got {samples!r}"
            )
        self.weights = weights
        names, pairs = list(sources), tuple(self.lengths.items())
        is_schedule = isinstance(weights, Mapping) and bool(weights) and all(isinstance(key, int) for key in weights)
        schedule: Mapping[int, Any] = cast("Any", weights) if is_schedule else {0: weights}
        stages = whole_weights(names, schedule)
        number = 0 if isinstance(samples, str) else operator.index(samples)
        spec = MixtureSpec(pairs, stages, number)
        if isinstance(samples, str):
            spec = MixtureSpec(pairs, stages, epoch_samples(pairs, stages, samples))
        self.spec = spec
        """Parameters sent to servers: names, lengths and whole weights."""

    def __repr__(self) -> str:
        return f"Mixture({self.sources!r}, {self.weights!r}, samples={self.spec.samples})"


class RemoteMixture(RemoteDataset):
    """Hosted sources of a mixture as one dataset; requests use the servers and connections of the first source.

    Args:
        sources: The sources, in the order of the mixture.
    """

    def __init__(self, sources: Sequence[RemoteDataset]) -> None:
        # without the constructor of RemoteDataset, which would connect to the servers again
        first = sources[0]
        self._sources = sources
        self.servers, self.environment, self.reconnect_timeout = (
            first.servers,
            first.environment,
            first.reconnect_timeout,
        )
        self._info = self.info
        self._lengths = None
        self._is_used = False

    @property
    def info(self) -> DatasetInfo:
        """Description of the sources as one dataset."""
        return describe([source.info for source in self._sources])

    @property
    def name(self) -> str:
        """Name of the first source, under which loaders are registered."""
        return self._sources[0].name

    def select_version(self, fingerprint: str) -> bool:
        """Return False: the versions of the sources are selected when they are created."""
        return False

    def __repr__(self) -> str:
        return f"RemoteMixture({list(self._sources)!r})"
