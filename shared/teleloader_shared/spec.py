"""Validated loader parameters (`LoaderSpec`), and the key that identifies a loader on the server."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

from teleloader_shared import algorithms
from teleloader_shared.balance import BalanceSpec
from teleloader_shared.checks import check_whole
from teleloader_shared.errors import InvalidSpec
from teleloader_shared.packing import PackingSpec
from teleloader_shared.text import short
from teleloader_shared.units import counted
from teleloader_shared.weights import MixtureSpec

Tail = Literal["pad", "drop", "uneven"]
Compression = Literal["zstd", "lz4"]
Order = Literal["plan", "client"]
OnError = Literal["raise", "skip", "replace"]
BatchOf = Literal["samples", "lengths"]

DEFAULT_COLLATE: Final = "default"
"""Name of the built-in collate function: torch's ``default_collate``, and ``default_convert`` for single samples."""
MAX_BATCH_SIZE: Final = 2**20
MAX_WORLD_SIZE: Final = 2**20
MAX_EPOCH: Final = 2**62
MAX_PRIVATE_WORKERS: Final = 1024
MAX_NAME: Final = 512
MAX_ERROR_RETRIES: Final = 100
MAX_PACKED_TOKENS: Final = 2**31 - 1
"""Maximum tokens in a batch of packed sequences: offsets are int32, as kernels for variable lengths require."""
MAX_SHUFFLE_BUFFER: Final = 2**24
MAX_STATES: Final = 768 * 1024
"""Maximum total length of the states of all shards, in characters, divided equally among the shards: the states are
part of the registration request, which is limited to `max_spec_bytes` (1 MiB by default)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSpec:
    """Validated loader parameters, which together with the epoch determine the batches.

    With ``order="client"`` the client also sends the sample indices of each batch.

    Raises:
        InvalidSpec: If a field is invalid; the message contains the field's name, value and valid values.
    """

    dataset: str
    """Name under which the server hosts the dataset; of a mixture, that of the first source."""
    fingerprint: str | None = None
    """Required fingerprint of the dataset; None accepts any."""
    batch_size: int | None = 1
    """Samples per batch and rank; None for single samples without collation."""
    shuffle: bool = False
    """True if each epoch has its own random order, derived from (seed, epoch)."""
    shuffle_buffer_size: int | None = None
    """Number of samples of each shard of an iterable-style dataset that are shuffled together; None for the order of
    the dataset."""
    drop_last: bool = False
    """True to omit an incomplete last batch."""
    order: Order = "plan"
    """``plan``: the server computes the indices of each batch. ``client``: the client sends them with each request."""
    seed: int = 0
    """In [0, 2**64). Determines the sample order and the random numbers in the dataset's code."""
    rank: int = 0
    """Rank of this consumer in its data-parallel group."""
    world_size: int = 1
    """Number of data-parallel consumers that share the epoch."""
    tail: Tail = "pad"
    """Distribution of the samples if the dataset's length is not a multiple of `world_size`.

    ``pad`` repeats samples from the start of the order (like torch's DistributedSampler), ``drop`` omits the remainder
    (like DistributedSampler with drop_last=True), ``uneven`` assigns one sample more to some ranks.
    """
    mixture: MixtureSpec | None = None
    """Hosted datasets from which the samples of each batch come, and their weights; None for a single dataset. In JSON
    an object (`MixtureSpec.to_json`)."""
    balance: BalanceSpec | None = None
    """Parameters of length-balanced batches; None for batches of the epoch's order. In JSON an object
    (`BalanceSpec.to_json`)."""
    packing: PackingSpec | None = None
    """Parameters of packed sequences, of which batches then consist; None for batches of samples. In JSON an object
    (`PackingSpec.to_json`)."""
    batch_of: BatchOf = "samples"
    """Content of the batches: ``samples``, or the ``lengths`` of the samples as an int64 array."""
    checksum: bool = True
    """True to send a checksum of the content in each frame."""
    compression: Compression | None = None
    """Compression that workers apply to arrays; None for no compression."""
    collate: str | None = None
    """Name of one of the dataset's collate functions, or `DEFAULT_COLLATE`; None for the dataset's default."""
    worker_init: str | None = None
    """Name of one of the dataset's worker-init functions, for a private worker pool; None for the dataset's default."""
    on_error: OnError = "raise"
    """Reaction to an exception of a map-style dataset for a sample: ``raise`` fails the batch; after `error_retries`
    retries, ``skip`` omits the sample, and ``replace`` uses another sample (`orders.replacement`)."""
    error_retries: int = 2
    """Number of retries of a failed sample before it is skipped or replaced."""
    session: str | None = None
    """Unique ID of a private session, whose batches only one client reads; None if equal specs share their batches.

    Required if the batches depend on more than the spec: with a client-side sampler, or an iterable-style dataset.
    """
    num_workers: int = 0
    """Size of the session's private worker pool; each worker iterates over one shard of an iterable-style dataset.

    0 lets the server select the workers; an iterable-style dataset then has one shard, without worker information.
    """
    shard_states: Sequence[str | None] | None = None
    """Shard states from which `resumed_epoch` resumes, as received in frames; None to start from the beginning."""
    resumed_epoch: int = 0
    """Epoch that `shard_states` belong to."""
    in_process: bool = False
    """True to load the session in the server's own process, for debugging; the server must allow it."""
    delivered: str | None = dataclasses.field(default=None, compare=False)
    """Progress in an earlier session (`delivered.pack`) or None; the only field that `key` does not include."""

    def __post_init__(self) -> None:
        """Validate all fields."""
        if not isinstance(self.dataset, str) or not self.dataset:
            raise InvalidSpec(f"dataset must be the name of a hosted dataset, got {short(self.dataset)}")
        if self.fingerprint is not None and not isinstance(self.fingerprint, str):
            raise InvalidSpec(f"fingerprint must be a string or null, got {short(self.fingerprint)}")
        _optional("batch_size", self.batch_size, 1, MAX_BATCH_SIZE)
        _optional("shuffle_buffer_size", self.shuffle_buffer_size, 1, MAX_SHUFFLE_BUFFER)
        check_whole("seed", self.seed, 0, 2**64 - 1)
        check_whole("world_size", self.world_size, 1, MAX_WORLD_SIZE)
        check_whole("rank", self.rank, 0, self.world_size - 1)
        for name in ("shuffle", "drop_last", "checksum", "in_process"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidSpec(f"{name} must be true or false, got {short(getattr(self, name))}")
        if self.batch_size is None and self.drop_last:
            raise InvalidSpec("drop_last requires batch_size: set batch_size, or drop_last=False")
        _choice("order", self.order, get_args(Order))
        check_whole("num_workers", self.num_workers, 0, MAX_PRIVATE_WORKERS)
        check_whole("resumed_epoch", self.resumed_epoch, 0, MAX_EPOCH - 1)
        if self.shard_states is not None:
            object.__setattr__(self, "shard_states", _states(self.shard_states, self.shards))
        if self.delivered is not None and not (isinstance(self.delivered, str) and len(self.delivered) <= MAX_STATES):
            raise InvalidSpec(
                f"delivered must be null or a string of up to {MAX_STATES:,} characters, got {short(self.delivered)}"
            )
        self._check_mixture()
        self._check_balance()
        self._check_packing()
        self._check_session()
        _choice("tail", self.tail, get_args(Tail))
        _choice("compression", self.compression, (None, *get_args(Compression)))
        _choice("on_error", self.on_error, get_args(OnError))
        _choice("batch_of", self.batch_of, get_args(BatchOf))
        check_whole("error_retries", self.error_retries, 0, MAX_ERROR_RETRIES)
        if self.on_error == "skip" and self.batch_size is None:
            raise InvalidSpec('on_error="skip" requires batch_size: set batch_size, or on_error="replace"')

    def _check_mixture(self) -> None:
        given: Any = self.mixture
        if given is not None and not isinstance(given, MixtureSpec):
            object.__setattr__(self, "mixture", MixtureSpec.from_json(given))
        if given is not None and self.order == "client":
            raise InvalidSpec("mixture excludes order=client: the weights determine the order. Remove either of them")
        if given is not None and self.worker_init is not None:
            raise InvalidSpec("mixture excludes worker_init: each source has its own. Remove worker_init")

    def _check_balance(self) -> None:
        given: Any = self.balance
        if given is None:
            return
        if not isinstance(given, BalanceSpec):
            object.__setattr__(self, "balance", given := BalanceSpec.from_json(given))
        if self.order == "client" or self.mixture is not None:
            other = "order=client" if self.order == "client" else "mixture"
            raise InvalidSpec(f"balance excludes {other}, which determines the batches. Remove either of them")
        if self.batch_size is None:
            raise InvalidSpec("balance requires batches, got batch_size=null: set batch_size or max_tokens")
        if given.max_tokens is not None and (self.batch_size != 1 or self.drop_last):
            raise InvalidSpec(
                f"max_tokens of balance excludes batch_size and drop_last, got batch_size={self.batch_size} and "
                f"drop_last={json.dumps(self.drop_last)}: max_tokens determines the sizes of the batches"
            )
        if given.max_tokens is None and given.group != self.batch_size * self.world_size:
            raise InvalidSpec(
                f"group of balance must be batch_size * world_size = {self.batch_size * self.world_size} without "
                f"max_tokens, got {given.group}"
            )

    def _check_packing(self) -> None:
        given: Any = self.packing
        if given is None:
            return
        if not isinstance(given, PackingSpec):
            object.__setattr__(self, "packing", given := PackingSpec.from_json(given))
        excluded = {
            "order=client": self.order == "client", "mixture": self.mixture is not None,
            "balance": self.balance is not None, "collate": self.collate is not None,
            f"on_error={self.on_error}": self.on_error != "raise",
        }  # fmt: skip
        for name, is_given in excluded.items():
            if is_given:
                raise InvalidSpec(f"packing excludes {name}: {_EXCLUDED_BY_PACKING[name.partition('=')[0]]}")
        if self.batch_size is None or self.batch_size * given.sequence_length > MAX_PACKED_TOKENS:
            raise InvalidSpec(
                f"packing requires batch_size * sequence_length in [1, {MAX_PACKED_TOKENS}], got "
                f"batch_size={json.dumps(self.batch_size)} and sequence_length={given.sequence_length}"
            )

    @property
    def required_lengths(self) -> str | None:
        """Digest of the lengths of the samples that determine the batches; None if lengths do not determine them."""
        of_lengths = self.balance or self.packing
        return None if of_lengths is None else of_lengths.lengths

    @property
    def is_prepared(self) -> bool:
        """True if the number of batches depends on the lengths of the samples, so that each epoch is prepared."""
        return self.packing is not None or self.has_token_batches

    @property
    def has_token_batches(self) -> bool:
        """True if batches have a limit of tokens, and not a fixed number of samples."""
        return self.balance is not None and self.balance.max_tokens is not None

    def _check_session(self) -> None:
        for name in ("collate", "worker_init", "session"):
            _name(name, getattr(self, name))
        if self.session is None and (self.order == "client" or self.num_workers or self.in_process):
            raise InvalidSpec(
                f"order=client, num_workers > 0 and in_process=true require a session: got order={self.order}, "
                f"num_workers={self.num_workers}, in_process={json.dumps(self.in_process)}, session=null"
            )

    @property
    def datasets(self) -> tuple[str, ...]:
        """Names of the hosted datasets from which the samples come: the sources of the mixture, or `dataset`."""
        return (self.dataset,) if self.mixture is None else tuple(name for name, _ in self.mixture.sources)

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the dataset's functions that the spec selects."""
        selected = (None if self.collate == DEFAULT_COLLATE else self.collate, self.worker_init)
        return tuple(name for name in selected if name is not None)

    @property
    def algorithms(self) -> frozenset[str]:
        """Names of the `algorithms` with which the server determines the content of the batches."""
        used = {
            "permutation": self.order == "plan" and self.shuffle, "partition": self.order == "plan",
            "collate": self.packing is None, "mixture": self.mixture is not None,
            "balance": self.balance is not None, "packing": self.packing is not None,
            "shuffle_buffer": self.shuffle_buffer_size is not None, "replacement": self.on_error == "replace",
        }  # fmt: skip
        return frozenset({"seeding", *(name for name, is_used in used.items() if is_used)})

    @property
    def content(self) -> str:
        """Name of what frames can contain: clients with access to it may see stale bytes in memory that is reused."""
        return self.dataset if self.mixture is None else json.dumps(self.datasets)

    @property
    def memory(self) -> int:
        """Estimated memory of the spec and of the server's record of the loader, in bytes."""
        texts = (self.dataset, self.fingerprint, self.collate, self.worker_init, self.session, self.delivered)
        size = _RECORD_BYTES + (0 if self.mixture is None else self.mixture.memory)
        return size + sum(sys.getsizeof(text) for text in (*texts, *(self.shard_states or ())) if text)

    @property
    def shards(self) -> int:
        """Number of shards of an iterable-style dataset: one per worker, and at least one."""
        return max(1, self.num_workers)

    @classmethod
    def from_json(cls, fields: object) -> LoaderSpec:
        """Create a spec from a JSON object; omitted fields get default values.

        Raises:
            InvalidSpec: If a field is unknown or invalid, or no dataset is named.
            VersionMismatch: If this release computes another version of an algorithm than the client.
        """
        if not isinstance(fields, Mapping):
            raise InvalidSpec(f"a loader spec must be a JSON object, got {type(fields).__name__}")
        known = [*(field.name for field in dataclasses.fields(cls)), _ALGORITHMS]
        unknown = next((name for name in fields if name not in known), None)
        if unknown is not None:
            raise InvalidSpec(
                f"unknown field {short(unknown)} in the loader spec: expected one of {', '.join(known)}. If the client "
                "is of a later release than the server, update the server, or omit the argument"
            )
        if "dataset" not in fields:
            raise InvalidSpec("missing field 'dataset' in the loader spec: GET /v1/datasets lists the hosted datasets")
        spec = cls(**{name: value for name, value in fields.items() if name != _ALGORITHMS})
        algorithms.check_spec(fields.get(_ALGORITHMS, {}), spec.algorithms)
        return spec

    def to_json(self) -> dict[str, Any]:
        """Return the spec as a JSON object without the fields that have default values.

        A server of an earlier release, which does not know a field, can therefore serve specs that do not use it.
        """
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        fields = {name: value for name, (value, default) in values.items() if value != default}
        for name in ("mixture", "balance", "packing"):
            if name in fields:
                fields[name] = fields[name].to_json()
        if versions := algorithms.current(self.algorithms):
            fields[_ALGORITHMS] = versions
        return fields

    def canonical(self) -> bytes:
        """Return the canonical JSON encoding: sorted names, no whitespace, without default values and `delivered`."""
        fields = self.to_json()
        fields.pop("delivered", None)
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @property
    def key(self) -> str:
        """Digest of `canonical` as 32 hexadecimal digits; equal specs have equal keys on every server."""
        return hashlib.blake2b(self.canonical(), digest_size=16).hexdigest()


_ALGORITHMS: Final = "algorithms"
"""Field of JSON specs with the versions of the algorithms that the client expects; see `algorithms`."""
_RECORD_BYTES: Final = 2048
"""Estimated memory of a spec without its strings, and of the server's record of the loader, in bytes."""
_EXCLUDED_BY_PACKING: Final = {
    "order": "the lengths determine the batches. Remove the sampler",
    "mixture": "the weights determine the batches. Remove either of them",
    "balance": "both determine the batches. Remove either of them",
    "collate": "the documents are packed in its place. Remove collate_fn, and tokenize the documents in the dataset",
    "on_error": 'another document has another length. Use on_error="raise", and handle the exception in the dataset',
}


def _optional(name: str, value: object, low: int, high: int) -> None:
    if value is not None:
        check_whole(name, value, low, high)


def _name(field: str, value: object) -> None:
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= MAX_NAME):
        raise InvalidSpec(f"{field} must be null or a string of 1 to {MAX_NAME} characters, got {short(value)}")


def _states(value: object, count: int) -> tuple[str | None, ...]:
    """Return validated shard states as a tuple, so that the spec is hashable."""
    if not isinstance(value, list | tuple) or len(value) != count:
        raise InvalidSpec(f"shard_states must be null or a list of length {count}, got {short(value)}")
    limit = MAX_STATES // count
    if not all(state is None or (isinstance(state, str) and len(state) <= limit) for state in value):
        raise InvalidSpec(
            f"shard_states must contain nulls or strings of up to {limit:,} characters ({MAX_STATES:,} for all "
            f"{counted(count, 'shard')}), got {short(value)}"
        )
    return tuple(value)


def _choice(name: str, value: object, choices: tuple[str | None, ...]) -> None:
    if value not in choices:
        known = ", ".join(json.dumps(choice) for choice in choices)
        raise InvalidSpec(f"{name} must be one of {known}, got {short(value)}")
