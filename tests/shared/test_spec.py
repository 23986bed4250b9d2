"""Validation of a loader's spec, and its key, a digest that servers and clients compute alike."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader_shared.errors import InvalidSpec, TeleloaderError
from teleloader_shared.spec import MAX_BATCH_SIZE, MAX_EPOCH, MAX_STATES, MAX_WORLD_SIZE, LoaderSpec
from tests.conftest import examples

fixed = settings(max_examples=examples(100))

NAMES = st.none() | st.text(min_size=1, max_size=20)
STATES = st.none() | st.text(max_size=20)
MIXTURE = {"sources": [["web", 10], ["code", 4]], "stages": [[0, [7, 3]]], "samples": 14}


@st.composite
def _fields(draw: st.DrawFn) -> dict[str, Any]:
    """Return the fields of any valid spec."""
    world_size = draw(st.integers(1, MAX_WORLD_SIZE))
    session = draw(NAMES)
    num_workers = 0 if session is None else draw(st.integers(0, 5))
    batch_size = draw(st.none() | st.integers(1, MAX_BATCH_SIZE))
    mixture = draw(st.none() | st.just(MIXTURE))
    client_side = session is not None and mixture is None
    return {
        "dataset": draw(st.text(min_size=1, max_size=20)),
        "fingerprint": draw(st.none() | st.text(max_size=20)),
        "batch_size": batch_size,
        "shuffle": draw(st.booleans()),
        "drop_last": batch_size is not None and draw(st.booleans()),
        "shuffle_buffer_size": draw(st.none() | st.integers(1, 2**24)),
        "order": draw(st.sampled_from(["plan", "client"])) if client_side else "plan",
        "seed": draw(st.integers(0, 2**64 - 1)),
        "rank": draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
        "tail": draw(st.sampled_from(["pad", "drop", "uneven"])),
        "mixture": mixture,
        "checksum": draw(st.booleans()),
        "compression": draw(st.sampled_from([None, "zstd", "lz4"])),
        "collate": draw(NAMES),
        "worker_init": draw(NAMES) if mixture is None else None,
        "session": session,
        "num_workers": num_workers,
        "shard_states": draw(st.none() | st.tuples(*[STATES] * max(1, num_workers)).map(list)),
        "resumed_epoch": draw(st.integers(0, MAX_EPOCH - 1)),
        "in_process": session is not None and draw(st.booleans()),
        "delivered": draw(st.none() | st.text(max_size=20)),
    }


fields = _fields()

# --- The key ------------------------------------------------------------------------------------------------------

PLAIN = b'{"dataset":"train"}'
FULL = (
    b'{"batch_size":256,"checksum":false,"collate":"my.data:pad","compression":"zstd",'
    b'"dataset":"d\\u00e9j\\u00e0 \\"vu\\"","drop_last":true,"fingerprint":"0123456789abcdef","in_process":true,'
    b'"num_workers":2,"order":"client","rank":3,"resumed_epoch":4611686018427387903,"seed":18446744073709551615,'
    b'"session":"5e55","shard_states":["{}",null],"shuffle":true,"tail":"uneven","worker_init":"my.data:seed",'
    b'"world_size":4}'
)


def test_the_key_never_changes() -> None:
    """Golden values: the canonical form is sorted ASCII JSON without spaces and defaults, the key its BLAKE2b."""
    plain = LoaderSpec(dataset="train")
    assert plain.canonical() == PLAIN
    assert plain.key == "0d7ef83c2ed1a1f90460b479c77cce6f"
    full = LoaderSpec(
        dataset='déjà "vu"',
        fingerprint="0123456789abcdef",
        batch_size=256,
        shuffle=True,
        drop_last=True,
        seed=2**64 - 1,
        rank=3,
        world_size=4,
        tail="uneven",
        checksum=False,
        compression="zstd",
        order="client",
        collate="my.data:pad",
        worker_init="my.data:seed",
        session="5e55",
        num_workers=2,
        shard_states=["{}", None],
        resumed_epoch=2**62 - 1,
        in_process=True,
    )
    assert full.canonical() == FULL
    assert full.key == "684086b86b329c8b466999dbc5c58078"


@fixed
@given(fields, fields)
def test_equal_specs_have_equal_keys_and_others_have_not(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The key depends only on the fields' values, not on their order in the JSON, or on `delivered`."""
    spec = LoaderSpec.from_json(one)
    assert LoaderSpec.from_json(dict(reversed(one.items()))).key == spec.key
    same = {**one, "delivered": None} == {**other, "delivered": None}
    assert (LoaderSpec.from_json(other).key == spec.key) == same
    assert (LoaderSpec.from_json(other) == spec) == same


@pytest.mark.parametrize(
    "change",
    [
        {"dataset": "other"},
        {"fingerprint": "f"},
        {"batch_size": 2},
        {"batch_size": None},
        {"shuffle": True},
        {"drop_last": True},
        {"seed": 1},
        {"world_size": 2},
        {"rank": 1, "world_size": 2},
        {"tail": "drop"},
        {"tail": "uneven"},
        {"checksum": False},
        {"compression": "zstd"},
        {"compression": "lz4"},
        {"collate": "m:f"},
        {"worker_init": "m:f"},
        {"session": "s"},
        {"session": "s", "order": "client"},
        {"session": "s", "num_workers": 1},
        {"session": "s", "in_process": True},
        {"shard_states": ["x"]},
        {"resumed_epoch": 1},
    ],
    ids=str,
)
def test_every_field_is_in_the_key(change: dict[str, Any]) -> None:
    """Loaders that differ in one field have different keys, since their batches or frames differ."""
    changed = LoaderSpec(**{"dataset": "d", **change})
    others = [LoaderSpec(dataset="d", session=session) for session in (None, "s")]
    assert changed.key not in [other.key for other in others if other != changed]
    assert LoaderSpec(dataset="d") != changed


# --- JSON ---------------------------------------------------------------------------------------------------------

DEFAULTS = {field.name: field.default for field in dataclasses.fields(LoaderSpec) if field.name != "dataset"}


@fixed
@given(fields)
def test_a_spec_survives_json(values: dict[str, Any]) -> None:
    """The server's spec equals the client's in every field, with the same key."""
    spec = LoaderSpec(**values)
    sent = json.loads(json.dumps(spec.to_json()))
    assert sent == {name: value for name, value in values.items() if value != DEFAULTS.get(name, ...)}
    again = LoaderSpec.from_json(sent)
    assert again == spec
    assert again.key == spec.key
    assert again.delivered == spec.delivered
    assert json.loads(spec.canonical()) == {name: value for name, value in sent.items() if name != "delivered"}


def test_a_field_left_out_has_its_default() -> None:
    """Only the dataset is required."""
    assert LoaderSpec.from_json({"dataset": "d"}) == LoaderSpec(dataset="d")
    assert LoaderSpec.from_json({"dataset": "d", "seed": 4, "shuffle": True}) == LoaderSpec(
        dataset="d", seed=4, shuffle=True
    )


def test_an_unknown_field_is_refused() -> None:
    """An unknown field raises an error that lists the known ones, instead of being ignored."""
    with pytest.raises(InvalidSpec) as caught:
        LoaderSpec.from_json({"dataset": "d", "batchsize": 4})
    known = ", ".join([field.name for field in dataclasses.fields(LoaderSpec)] + ["algorithms"])
    assert str(caught.value) == (
        f"unknown field 'batchsize' in the loader spec: expected one of {known}. If the client is of a later release "
        "than the server, update the server, or omit the argument"
    )


def test_a_spec_without_a_dataset_is_refused() -> None:
    """The error states where to find the datasets."""
    with pytest.raises(InvalidSpec, match="missing field 'dataset' in the loader spec: GET /v1/datasets lists"):
        LoaderSpec.from_json({"batch_size": 4})


@pytest.mark.parametrize(
    ("body", "name"), [(None, "NoneType"), ([], "list"), ("dataset", "str"), (4, "int"), (True, "bool")]
)
def test_a_spec_that_is_no_object_is_refused(body: object, name: str) -> None:
    """The error has the value that was received instead."""
    with pytest.raises(InvalidSpec, match=f"a loader spec must be a JSON object, got {name}"):
        LoaderSpec.from_json(body)


# --- Values -------------------------------------------------------------------------------------------------------

NOT_NUMBERS: tuple[object, ...] = (-1, 0.5, 1.0, "1", True, [1], float("nan"), 2**64)
NOT_FLAGS: tuple[object, ...] = (0, 1, "true", None, [])
NOT_NAMES: tuple[object, ...] = ("", 4, b"f", ["f"], True)
NEEDED: dict[str, dict[str, Any]] = {"rank": {"world_size": 4}, "shard_states": {"session": "s", "num_workers": 2}}
"""Required values of other fields for the ranges below."""

BALANCES = "null or an object with lengths, window, group and max_tokens"
PACKINGS = "null or an object with lengths, sequence_length, window and pad_token_id"
MIXTURES = "null or an object with sources [[name, length], ...], stages [[start, weights], ...] and samples"
REFUSED: list[tuple[str, str, tuple[object, ...]]] = [
    ("dataset", "the name of a hosted dataset", ("", None, 4, b"train", ["train"])),
    ("fingerprint", "a string or null", (4, b"f", ["f"], True)),
    ("batch_size", "an integer in [1, 1048576]", (*NOT_NUMBERS, 0, 2**20 + 1)),
    ("shuffle", "true or false", NOT_FLAGS),
    ("shuffle_buffer_size", "an integer in [1, 16777216]", (0, -1, 2**24 + 1, 1.0, True, "2")),
    ("drop_last", "true or false", NOT_FLAGS),
    ("order", 'one of "plan", "client"', ("", "Plan", None, 0, ["plan"], {"client": 1})),
    ("seed", "an integer in [0, 18446744073709551615]", (*NOT_NUMBERS, None)),
    ("rank", "an integer in [0, 3]", (*NOT_NUMBERS, None, 4)),
    ("world_size", "an integer in [1, 1048576]", (*NOT_NUMBERS, None, 0, 2**20 + 1)),
    ("tail", 'one of "pad", "drop", "uneven"', ("", "Pad", None, 0, True, ["pad"], {"pad": 1})),
    ("mixture", MIXTURES, ("", 4, [], {}, {"sources": [], "stages": []}, {"samples": 4, "sources": [], "stages": [0]})),
    ("balance", BALANCES, ("", 4, [], {}, {"window": 4})),
    ("packing", PACKINGS, ("", 4, [], {}, {"window": 4})),
    ("batch_of", 'one of "samples", "lengths"', ("", "sizes", None, 0, ["samples"])),
    ("checksum", "true or false", (*NOT_FLAGS, "xxh3")),
    ("compression", 'one of null, "zstd", "lz4"', ("", "gzip", 0, False, ["zstd"], {})),
    ("collate", "null or a string of 1 to 512 characters", NOT_NAMES),
    ("worker_init", "null or a string of 1 to 512 characters", NOT_NAMES),
    ("on_error", 'one of "raise", "skip", "replace"', ("", "ignore", None, 0, ["skip"])),
    ("error_retries", "an integer in [0, 100]", (-1, 101, None, 1.0, True, "2")),
    ("session", "null or a string of 1 to 512 characters", NOT_NAMES),
    ("num_workers", "an integer in [0, 1024]", (*NOT_NUMBERS, None, 1025)),
    ("shard_states", "null or a list of length 2", ("", "ab", 4, [], ["a"], ["a", "b", "c"], {"a": 1, "b": 2}, True)),
    ("resumed_epoch", "an integer in [0, 4611686018427387903]", (*NOT_NUMBERS, None, 2**62)),
    ("in_process", "true or false", NOT_FLAGS),
    ("delivered", "null or a string of up to 786,432 characters", (4, b"f", ["f"], True)),
]


@pytest.mark.parametrize(
    ("name", "expected", "value"), [(name, expected, value) for name, expected, values in REFUSED for value in values]
)
def test_a_value_that_no_loader_can_have_is_refused(name: str, expected: str, value: object) -> None:
    """The error has the field, its valid range and its value, for specs from Python and from JSON."""
    values: dict[str, Any] = {"dataset": "d", **NEEDED.get(name, {}), name: value}
    for make in (lambda fields: LoaderSpec(**fields), LoaderSpec.from_json):
        with pytest.raises(InvalidSpec) as caught:
            make(values)
        shown = f"<bytes of length {len(value)}>" if isinstance(value, bytes) else repr(value)
        assert str(caught.value) == f"{name} must be {expected}, got {shown}"
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, TeleloaderError)


def test_every_field_has_values_that_are_refused() -> None:
    """The rule above covers every field."""
    assert [name for name, _, _ in REFUSED] == [field.name for field in dataclasses.fields(LoaderSpec)]


def test_a_record_of_deliveries_is_no_longer_than_states() -> None:
    """A registration has room for both."""
    assert LoaderSpec(dataset="d", delivered="x" * MAX_STATES).delivered
    with pytest.raises(InvalidSpec, match="delivered must be null or a string of up to 786,432 characters"):
        LoaderSpec(dataset="d", delivered="x" * (MAX_STATES + 1))


def test_weights_exclude_the_order_of_a_sampler() -> None:
    """A spec has either a mixture, or index lists that the client sends."""
    with pytest.raises(InvalidSpec, match="mixture excludes order=client"):
        LoaderSpec.from_json({"dataset": "d", "order": "client", "session": "s", "mixture": MIXTURE})


def test_weights_exclude_worker_init() -> None:
    """Each source of a mixture has its own worker-init function."""
    with pytest.raises(InvalidSpec, match="mixture excludes worker_init"):
        LoaderSpec.from_json({"dataset": "web", "worker_init": "m:f", "mixture": MIXTURE})


def test_the_datasets_of_a_mixture_are_its_sources() -> None:
    """Access to a loader requires access to each of these datasets."""
    spec = LoaderSpec.from_json({"dataset": "web", "mixture": MIXTURE})
    assert spec.datasets == ("web", "code")
    assert spec.content != LoaderSpec(dataset="web").content == "web"
    assert LoaderSpec(dataset="web").datasets == ("web",)


def test_a_mixture_counts_as_memory_of_the_spec() -> None:
    """A schedule of 1,000 stages is part of the memory that the server limits per client."""
    stages = [[stage, [7, 3]] for stage in range(1000)]
    spec = LoaderSpec.from_json({"dataset": "d", "mixture": {**MIXTURE, "stages": stages}})
    assert spec.memory > LoaderSpec(dataset="d").memory + 100_000


def test_single_samples_have_no_last_batch_to_drop() -> None:
    """``batch_size=None`` excludes ``drop_last``, as in torch."""
    with pytest.raises(InvalidSpec, match=r"drop_last requires batch_size"):
        LoaderSpec(dataset="d", batch_size=None, drop_last=True)


@pytest.mark.parametrize("field", ["collate", "worker_init", "session"])
def test_a_name_that_is_too_long_is_not_repeated_at_length(field: str) -> None:
    """The error truncates a long name."""
    assert getattr(LoaderSpec.from_json({"dataset": "d", field: "x" * 512}), field) == "x" * 512
    with pytest.raises(InvalidSpec, match=f"{field} must be null or a string of 1 to 512 characters, got 'xxx") as no:
        LoaderSpec.from_json({"dataset": "d", field: "x" * 10**6})
    assert len(str(no.value)) < 200


@pytest.mark.parametrize(
    "field", ["dataset", "fingerprint", "batch_size", "shuffle", "tail", "compression", "seed", "x"]
)
def test_a_value_is_not_repeated_at_length(field: str) -> None:
    """The error truncates long values, and does not traverse nested ones, which would raise RecursionError."""
    nested: list[Any] = []
    for _ in range(sys.getrecursionlimit()):
        nested = [nested]
    for value in (["x" * 100] * 1000, {"a": "x" * 10**6}, nested):
        with pytest.raises(InvalidSpec) as caught:
            LoaderSpec.from_json({"dataset": "d", field: value})
        assert len(str(caught.value)) < 1000


def test_the_name_of_a_field_is_not_repeated_at_length() -> None:
    """The error truncates the name of an unknown field."""
    with pytest.raises(InvalidSpec, match="unknown field 'xxx") as caught:
        LoaderSpec.from_json({"dataset": "d", "x" * 10**6: 0})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("own", [{"order": "client"}, {"num_workers": 1}, {"in_process": True}], ids=str)
def test_what_is_ones_own_needs_a_session(own: dict[str, Any]) -> None:
    """Fields that make batches depend on more than the spec require a session, so that loaders do not share them."""
    with pytest.raises(InvalidSpec, match=r"require a session: got .*session=null"):
        LoaderSpec.from_json({"dataset": "d", **own})
    mine = LoaderSpec.from_json({"dataset": "d", "session": "mine", **own})
    assert mine.key != LoaderSpec(dataset="d", session="mine").key


@pytest.mark.parametrize("states", [[1], [b"x"], [["a"]], [{}], [True]], ids=repr)
def test_a_shards_state_is_text_or_nothing(states: list[Any]) -> None:
    """A shard's state is null or a string of limited length."""
    with pytest.raises(InvalidSpec, match="shard_states must contain nulls or strings of up to 786,432 characters"):
        LoaderSpec(dataset="d", shard_states=states)


def test_there_is_a_state_for_each_shard() -> None:
    """Without workers there is one shard; a list and a tuple of states make equal, hashable specs."""
    assert LoaderSpec(dataset="d", shard_states=["x"]).shard_states == ("x",)
    three: dict[str, Any] = {"dataset": "d", "session": "s", "num_workers": 3}
    assert LoaderSpec(**three, shard_states=["x", None, "y"]) == LoaderSpec(**three, shard_states=("x", None, "y"))
    assert hash(LoaderSpec(**three, shard_states=["x", None, "y"]))


def test_the_ends_of_the_ranges_are_valid() -> None:
    """The ends of the ranges in the errors are valid values."""
    largest = LoaderSpec(
        dataset="d", batch_size=MAX_BATCH_SIZE, seed=2**64 - 1, world_size=MAX_WORLD_SIZE, rank=MAX_WORLD_SIZE - 1
    )
    assert largest.rank == 2**20 - 1
    assert LoaderSpec(dataset="d", session="s", num_workers=1024, resumed_epoch=2**62 - 1).num_workers == 1024
    assert LoaderSpec(dataset="d", batch_size=1, seed=0, world_size=1, rank=0) == LoaderSpec(dataset="d")


def test_a_spec_cannot_be_changed() -> None:
    """Specs are immutable, so that keys stay valid."""
    spec = LoaderSpec(dataset="d")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.seed = 1  # type: ignore[misc]
    assert hash(spec) == hash(LoaderSpec(dataset="d"))


def test_states_of_all_shards_fit_in_one_spec_together() -> None:
    """Each shard has an equal part of the limit, so that states that servers accept can be registered together."""
    shards: dict[str, Any] = {"dataset": "d", "session": "s", "num_workers": 4}
    part = MAX_STATES // 4
    full = LoaderSpec(**shards, shard_states=["x" * part] * 4)
    assert len(full.canonical()) < 1000 * 2**10  # of the 1 MiB that a registration may have
    with pytest.raises(InvalidSpec, match=r"strings of up to 196,608 characters \(786,432 for all 4 shards\)"):
        LoaderSpec(**shards, shard_states=["x" * (part + 1), None, None, None])
