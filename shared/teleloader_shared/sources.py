"""Sources of a mixture: several map-style datasets in succession, as one dataset."""

from __future__ import annotations

import hashlib
import json
import operator
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, SupportsIndex

from teleloader_shared.errors import InvalidSpec
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.protocols import accepts
from teleloader_shared.text import short


class Sources:
    """Map-style dataset whose samples are those of the first source, then those of the second, and so on.

    Args:
        sources: Map-style datasets with lengths, by name. The lengths are read once.

    Raises:
        TypeError: If a source has no ``__getitem__``, or no length.
    """

    def __init__(self, sources: Mapping[str, Any]) -> None:
        for name, source in sources.items():
            if not hasattr(source, "__getitem__"):
                raise TypeError(
                    f"source {name!r} of a mixture must be a map-style dataset with __getitem__ and __len__, got "
                    f"{type(source).__qualname__}"
                )
        self.sources = dict(sources)
        """Sources by name, in the order of the indices."""
        self.lengths = {name: len(source) for name, source in sources.items()}
        """Length of each source by name."""
        self._names = tuple(self.sources)
        self._starts = list(accumulate(self.lengths.values(), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: SupportsIndex) -> Any:
        """Return the sample at an index in [0, len(self))."""
        name, within = self._locate(index)
        try:
            return self.sources[name][within]
        except Exception as error:
            note = f"The sample is number {within} of source {name!r}."
            if note not in getattr(error, "__notes__", ()):  # the dataset may raise the same object again
                error.add_note(note)
            raise

    @property
    def __getitems__(self) -> Any:
        """Function that returns several samples, if a source defines ``__getitems__``; otherwise not an attribute.

        Each source is called once per batch with the indices of its samples, in the order of the batch. Sources without
        ``__getitems__`` return their samples one by one.
        """
        if any(getattr(source, "__getitems__", None) is not None for source in self.sources.values()):
            return self._together
        raise AttributeError("no source defines __getitems__")

    def _together(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        places: dict[str, list[tuple[int, int]]] = {}
        count = 0
        for place, index in enumerate(indices):
            name, within = self._locate(index)
            places.setdefault(name, []).append((place, within))
            count = place + 1
        samples: list[Any] = [None] * count
        for name, pairs in places.items():
            source, own = self.sources[name], [within for _, within in pairs]
            together = getattr(source, "__getitems__", None)
            found = [source[within] for within in own] if together is None else together(own)
            if len(found) != len(own):
                raise ValueError(
                    f"__getitems__ of source {name!r} returned {len(found)} samples for {len(own)} indices: return one "
                    "sample per index, in the same order"
                )
            for (place, _), sample in zip(pairs, found, strict=True):
                samples[place] = sample
        return samples

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of each source that defines it."""
        for source in self.sources.values():
            if accepts(source, "set_epoch", epoch):
                source.set_epoch(epoch)

    def _locate(self, index: SupportsIndex) -> tuple[str, int]:
        """Return the name of the source of a sample, and the index in the source."""
        number = operator.index(index)
        if not 0 <= number < len(self):
            raise IndexError(f"index {number} is out of range: the mixture has {len(self)} samples")
        place = bisect_right(self._starts, number) - 1
        return self._names[place], number - self._starts[place]


def describe(infos: Sequence[DatasetInfo]) -> DatasetInfo:
    """Return the description of several hosted datasets as the sources of one mixture.

    Raises:
        InvalidSpec: If a dataset is iterable-style or has no length, or collate function or seeding differ.
    """
    first = infos[0]
    for info in infos:
        if info.kind != "map" or info.length is None:
            raise InvalidSpec(f"source {info.name!r} of a mixture must be a map-style dataset with a length")
        for field in ("collate", "seeding"):
            expected, found = getattr(first, field), getattr(info, field)
            if found != expected:
                raise InvalidSpec(
                    f"the sources of a mixture must have the same {field}: {first.name!r} has {expected!r}, and "
                    f"{info.name!r} has {found!r}. Change {field} in the server's configuration"
                )
    facts = [[info.name, info.fingerprint] for info in infos]
    return replace(
        first,
        name=f"mixture of {short([info.name for info in infos])}",
        type="Mixture",
        length=sum(info.length or 0 for info in infos),
        version="",
        lengths=None,
        longest=None,
        longest_sample=None,
        fingerprint=hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest(),
        worker_init=None,
        functions=[name for name in first.functions if all(name in info.functions for info in infos)],
    )
