"""A loader is checked at birth, and its key is a digest that every server and every client computes alike."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teleloader_shared.errors import InvalidSpec, TeleloaderError
from teleloader_shared.spec import MAX_BATCH_SIZE, MAX_WORLD_SIZE, LoaderSpec

fixed = settings(derandomize=True, deadline=None, max_examples=100)

# Any spec that can be made, as its fields.
fields = st.integers(1, MAX_WORLD_SIZE).flatmap(
    lambda world_size: st.fixed_dictionaries(
        {
            "dataset": st.text(min_size=1, max_size=20),
            "fingerprint": st.none() | st.text(max_size=20),
            "batch_size": st.integers(1, MAX_BATCH_SIZE),
            "shuffle": st.booleans(),
            "drop_last": st.booleans(),
            "seed": st.integers(0, 2**64 - 1),
            "rank": st.integers(0, world_size - 1),
            "world_size": st.just(world_size),
            "tail": st.sampled_from(["pad", "drop", "uneven"]),
            "checksum": st.booleans(),
            "compression": st.sampled_from([None, "zstd", "lz4"]),
        }
    )
)

# --- The key ------------------------------------------------------------------------------------------------------

PLAIN = (
    b'{"batch_size":1,"checksum":true,"compression":null,"dataset":"train","drop_last":false,"fingerprint":null,'
    + (b'"rank":0,"seed":0,"shuffle":false,"tail":"pad","world_size":1}')
)
FULL = (
    b'{"batch_size":256,"checksum":false,"compression":"zstd","dataset":"d\\u00e9j\\u00e0 \\"vu\\"","drop_last":true,'
    + (
        b'"fingerprint":"0123456789abcdef","rank":3,"seed":18446744073709551615,"shuffle":true,"tail":"uneven",'
        b'"world_size":4}'
    )
)


def test_the_key_never_changes() -> None:
    """Golden values: the canonical form is ASCII JSON, sorted, without spaces, and the key its BLAKE2b of 16 bytes."""
    plain = LoaderSpec(dataset="train")
    assert plain.canonical() == PLAIN
    assert plain.key == "17a631d94b648ee3543b258436d4137d"
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
    )
    assert full.canonical() == FULL
    assert full.key == "3a241c54b02e327af9be6c9204a5504e"


@fixed
@given(fields, fields)
def test_equal_specs_have_equal_keys_and_others_have_not(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The key depends on the fields' values and on nothing else, such as their order in the JSON."""
    spec = LoaderSpec.from_json(one)
    assert LoaderSpec.from_json(dict(reversed(one.items()))).key == spec.key
    assert (LoaderSpec.from_json(other).key == spec.key) == (one == other)


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
    ],
    ids=str,
)
def test_every_field_is_in_the_key(change: dict[str, Any]) -> None:
    """Loaders that differ in any one field have different keys, as their batches or frames differ."""
    assert LoaderSpec(**{"dataset": "d", **change}).key != LoaderSpec(dataset="d").key


# --- JSON ---------------------------------------------------------------------------------------------------------


@fixed
@given(fields)
def test_a_spec_survives_json(values: dict[str, Any]) -> None:
    """What a client sends is what the server has: every field, equal, with the same key."""
    spec = LoaderSpec(**values)
    assert spec.to_json() == values
    again = LoaderSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert again.key == spec.key
    assert json.loads(spec.canonical()) == values


def test_a_field_left_out_has_its_default() -> None:
    """Only the dataset must be named."""
    assert LoaderSpec.from_json({"dataset": "d"}) == LoaderSpec(dataset="d")
    assert LoaderSpec.from_json({"dataset": "d", "seed": 4, "shuffle": True}) == LoaderSpec(
        dataset="d", seed=4, shuffle=True
    )


def test_an_unknown_field_is_refused() -> None:
    """A misspelt field is an error that lists the fields that there are, not a default taken in silence."""
    with pytest.raises(InvalidSpec) as caught:
        LoaderSpec.from_json({"dataset": "d", "batchsize": 4})
    assert str(caught.value) == (
        "unknown field 'batchsize' in the loader spec; the fields are dataset, fingerprint, batch_size, shuffle, "
        "drop_last, seed, rank, world_size, tail, checksum, compression"
    )


def test_a_spec_without_a_dataset_is_refused() -> None:
    """The error says where to look for the datasets."""
    with pytest.raises(InvalidSpec, match="must name a dataset; GET /v1/datasets lists"):
        LoaderSpec.from_json({"batch_size": 4})


@pytest.mark.parametrize(
    ("body", "name"), [(None, "NoneType"), ([], "list"), ("dataset", "str"), (4, "int"), (True, "bool")]
)
def test_a_spec_that_is_no_object_is_refused(body: object, name: str) -> None:
    """The error says what came instead."""
    with pytest.raises(InvalidSpec, match=f"a loader spec must be a JSON object, was {name}"):
        LoaderSpec.from_json(body)


# --- Values -------------------------------------------------------------------------------------------------------

NOT_NUMBERS: tuple[object, ...] = (-1, 0.5, 1.0, "1", True, [1], float("nan"), 2**64)
NOT_FLAGS: tuple[object, ...] = (0, 1, "true", None, [])

REFUSED: list[tuple[str, str, tuple[object, ...]]] = [
    ("dataset", "the name of a hosted dataset", ("", None, 4, b"train", ["train"])),
    ("fingerprint", "a string or null", (4, b"f", ["f"], True)),
    ("batch_size", "a whole number in [1, 1048576]", (*NOT_NUMBERS, 0, 2**20 + 1)),
    ("shuffle", "true or false", NOT_FLAGS),
    ("drop_last", "true or false", NOT_FLAGS),
    ("seed", "a whole number in [0, 18446744073709551615]", (*NOT_NUMBERS, None)),
    ("rank", "a whole number in [0, 3]", (*NOT_NUMBERS, None, 4)),
    ("world_size", "a whole number in [1, 1048576]", (*NOT_NUMBERS, None, 0, 2**20 + 1)),
    ("tail", 'one of "pad", "drop", "uneven"', ("", "Pad", None, 0, True, ["pad"], {"pad": 1})),
    ("checksum", "true or false", (*NOT_FLAGS, "xxh3")),
    ("compression", 'one of null, "zstd", "lz4"', ("", "gzip", 0, False, ["zstd"], {})),
]


@pytest.mark.parametrize(
    ("name", "expected", "value"), [(name, expected, value) for name, expected, values in REFUSED for value in values]
)
def test_a_value_that_no_loader_can_have_is_refused(name: str, expected: str, value: object) -> None:
    """The sentence names the field, what it may be and what it was; whoever made the spec, Python or JSON."""
    values: dict[str, Any] = {"dataset": "d", **({"world_size": 4} if name == "rank" else {}), name: value}
    for make in (lambda fields: LoaderSpec(**fields), LoaderSpec.from_json):
        with pytest.raises(InvalidSpec) as caught:
            make(values)
        assert str(caught.value) == f"{name} must be {expected}, was {value!r}"
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, TeleloaderError)


def test_every_field_has_values_that_are_refused() -> None:
    """The rule above leaves no field out."""
    assert [name for name, _, _ in REFUSED] == [field.name for field in dataclasses.fields(LoaderSpec)]


def test_single_samples_have_no_last_batch_to_drop() -> None:
    """``batch_size=None`` excludes ``drop_last``, as in torch."""
    with pytest.raises(InvalidSpec, match=r"drop_last .* excludes batch_size=None"):
        LoaderSpec(dataset="d", batch_size=None, drop_last=True)


def test_the_ends_of_the_ranges_are_valid() -> None:
    """The ranges in the errors are the real ones."""
    largest = LoaderSpec(
        dataset="d", batch_size=MAX_BATCH_SIZE, seed=2**64 - 1, world_size=MAX_WORLD_SIZE, rank=MAX_WORLD_SIZE - 1
    )
    assert largest.rank == 2**20 - 1
    assert LoaderSpec(dataset="d", batch_size=1, seed=0, world_size=1, rank=0) == LoaderSpec(dataset="d")


def test_a_spec_cannot_be_changed() -> None:
    """A key that was handed out stays true."""
    spec = LoaderSpec(dataset="d")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.seed = 1  # type: ignore[misc]
    assert hash(spec) == hash(LoaderSpec(dataset="d"))
