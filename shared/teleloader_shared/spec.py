"""`LoaderSpec`, the validated description of a loader, and the key that identifies it on the server."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

from teleloader_shared.errors import InvalidSpec
from teleloader_shared.units import counted

Tail = Literal["pad", "drop", "uneven"]
Compression = Literal["zstd", "lz4"]
Order = Literal["plan", "client"]

MAX_BATCH_SIZE: Final = 2**20
MAX_WORLD_SIZE: Final = 2**20
MAX_EPOCH: Final = 2**62
MAX_OWN_WORKERS: Final = 1024
MAX_NAME: Final = 512
MAX_STATES: Final = 768 * 1024
"""Characters of the states of all shards together, each of which may have an equal part: the body that registers a spec
holds them (`max_spec_bytes`, 1 MiB by default)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSpec:
    """All that decides the batches of a loader, apart from the epoch (and from index lists that its client sends).

    Raises:
        InvalidSpec: At construction, naming the field, its value and what it may be.
    """

    dataset: str
    """Name under which the server hosts the dataset."""
    fingerprint: str | None = None
    """The dataset's fingerprint that the client insists on; None takes the one that is hosted."""
    batch_size: int | None = 1
    """Samples in a batch of this rank; None for single samples that are not collated."""
    shuffle: bool = False
    """Whether each epoch has an order of its own, drawn from (seed, epoch)."""
    drop_last: bool = False
    """Whether an incomplete last batch is left out."""
    order: Order = "plan"
    """Who says what a batch holds: the plan, or the client, which sends an index list with each ask."""
    seed: int = 0
    """In [0, 2**64). Decides the order and the randomness of augmentation."""
    rank: int = 0
    """Position of this consumer among `world_size` data-parallel ones."""
    world_size: int = 1
    """How many data-parallel consumers share the epoch."""
    tail: Tail = "pad"
    """What happens when the dataset's length is no multiple of `world_size`.

    ``pad`` repeats samples from the head of the order (as torch's DistributedSampler), ``drop`` leaves the rest
    out (as it does with drop_last=True), ``uneven`` gives some ranks one sample more than others.
    """
    checksum: bool = True
    """Whether each frame carries a checksum of its content."""
    compression: Compression | None = None
    """How the workers compress arrays before they travel."""
    collate: str | None = None
    """Which of the dataset's collate functions makes the batches; None is its usual one."""
    worker_init: str | None = None
    """Which of the dataset's worker-init functions is called in workers of its own; None is its usual one."""
    session: str | None = None
    """Names the one iteration that these batches are for; None when all who ask for the same may share them.

    What is not a function of the spec needs one: a client's own order, and the position of an iterable-style dataset.
    """
    num_workers: int = 0
    """Workers of its own that a session asks for; each iterates over a shard of an iterable-style dataset."""
    shard_states: Sequence[str | None] | None = None
    """Where the shards of an iterable-style dataset begin in `resumed_epoch`: what frames said of them, or null."""
    resumed_epoch: int = 0
    """The epoch that `shard_states` belong to."""
    in_process: bool = False
    """Whether a session is loaded in the server's own process, for debugging; the server must allow it."""
    delivered: str | None = dataclasses.field(default=None, compare=False)
    """`delivered.pack` of what an earlier session of this spec delivered; the one field that is not part of the key."""

    def __post_init__(self) -> None:
        """Refuse what no loader can be."""
        if not isinstance(self.dataset, str) or not self.dataset:
            raise InvalidSpec(f"dataset must be the name of a hosted dataset, was {_shown(self.dataset)}")
        if self.fingerprint is not None and not isinstance(self.fingerprint, str):
            raise InvalidSpec(f"fingerprint must be a string or null, was {_shown(self.fingerprint)}")
        if self.batch_size is not None:
            _whole("batch_size", self.batch_size, 1, MAX_BATCH_SIZE)
        _whole("seed", self.seed, 0, 2**64 - 1)
        _whole("world_size", self.world_size, 1, MAX_WORLD_SIZE)
        _whole("rank", self.rank, 0, self.world_size - 1)
        for name in ("shuffle", "drop_last", "checksum", "in_process"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidSpec(f"{name} must be true or false, was {_shown(getattr(self, name))}")
        if self.batch_size is None and self.drop_last:
            raise InvalidSpec("drop_last needs batches to drop: it excludes batch_size=None")
        _choice("order", self.order, get_args(Order))
        _whole("num_workers", self.num_workers, 0, MAX_OWN_WORKERS)
        _whole("resumed_epoch", self.resumed_epoch, 0, MAX_EPOCH - 1)
        if self.shard_states is not None:
            object.__setattr__(self, "shard_states", _states(self.shard_states, self.shards))
        if self.delivered is not None and not (isinstance(self.delivered, str) and len(self.delivered) <= MAX_STATES):
            raise InvalidSpec(
                f"delivered must be null or a string of up to {MAX_STATES:,} characters, was {_shown(self.delivered)}"
            )
        self._check_session()
        _choice("tail", self.tail, get_args(Tail))
        _choice("compression", self.compression, (None, *get_args(Compression)))

    def _check_session(self) -> None:
        for name in ("collate", "worker_init", "session"):
            _name(name, getattr(self, name))
        if self.session is None and (self.order == "client" or self.num_workers or self.in_process):
            raise InvalidSpec(
                "an order of the client's own, workers of its own and in_process need a session, which was null"
            )

    @property
    def memory(self) -> int:
        """Bytes of memory that the spec takes, and what a server keeps with it."""
        texts = (self.dataset, self.fingerprint, self.collate, self.worker_init, self.session, self.delivered)
        return _RECORD_BYTES + sum(sys.getsizeof(text) for text in (*texts, *(self.shard_states or ())) if text)

    @property
    def shards(self) -> int:
        """Into how many shards an iterable-style dataset is divided: without workers it is one pass."""
        return max(1, self.num_workers)

    @classmethod
    def from_json(cls, fields: object) -> LoaderSpec:
        """The spec that a JSON object states; fields it leaves out have their defaults."""
        if not isinstance(fields, Mapping):
            raise InvalidSpec(f"a loader spec must be a JSON object, was {type(fields).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = next((name for name in fields if name not in known), None)
        if unknown is not None:
            raise InvalidSpec(f"unknown field {_shown(unknown)} in the loader spec; the fields are {', '.join(known)}")
        if "dataset" not in fields:
            raise InvalidSpec("the loader spec must name a dataset; GET /v1/datasets lists those that are hosted")
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """The spec as a JSON object with every field."""
        return dataclasses.asdict(self)

    def canonical(self) -> bytes:
        """The one byte string that states this spec: JSON with sorted names and no spaces, without `delivered`."""
        fields = self.to_json()
        del fields["delivered"]
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @property
    def key(self) -> str:
        """The digest of `canonical`, 32 hexadecimal digits: equal specs have equal keys on every server."""
        return hashlib.blake2b(self.canonical(), digest_size=16).hexdigest()


_RECORD_BYTES: Final = 2048
"""What a spec takes besides its strings."""
_REPR: Final = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def _shown(value: object) -> str:
    """A value in an error, whatever a client sent: a megabyte of it is cut, and so is what is nested deeply."""
    return _REPR.repr(value)


def _whole(name: str, value: object, low: int, high: int) -> None:
    # bool is an int to Python, but a batch size of True is a mistake
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidSpec(f"{name} must be a whole number in [{low}, {high}], was {_shown(value)}")


def _name(field: str, value: object) -> None:
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= MAX_NAME):
        raise InvalidSpec(f"{field} must be null or a string of 1 to {MAX_NAME} characters, was {_shown(value)}")


def _states(value: object, count: int) -> tuple[str | None, ...]:
    """As a tuple, because a spec can be a key."""
    if not isinstance(value, list | tuple) or len(value) != count:
        raise InvalidSpec(f"shard_states must be null or a list of {count}, was {_shown(value)}")
    limit = MAX_STATES // count
    if not all(state is None or (isinstance(state, str) and len(state) <= limit) for state in value):
        raise InvalidSpec(
            f"shard_states must hold nulls and strings of up to {limit:,} characters ({MAX_STATES:,} for all "
            f"{counted(count, 'shard')}), was {_shown(value)}"
        )
    return tuple(value)


def _choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        known = ", ".join(json.dumps(choice) for choice in choices)
        raise InvalidSpec(f"{name} must be one of {known}, was {_shown(value)}")
