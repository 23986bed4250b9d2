"""Hostile JSON as a client's spec, a loader's state or a server's response: it must be read or rejected clearly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Final, get_type_hints

from pydantic import TypeAdapter, ValidationError

from teleloader import state
from teleloader.api.control import Server
from teleloader.api.responses import error_of
from teleloader_shared.errors import InvalidSpec, ProtocolError, StateMismatch, TeleloaderError
from teleloader_shared.messages import DatasetInfo, Registration
from teleloader_shared.spec import LoaderSpec
from tests.fuzz.mutation import MOST_BYTES, mutate_bytes, mutate_tree

MOST_TEXT: Final = 2_000
"""Maximum length of an error's text, which must name the value without repeating a megabyte of it."""


class Unclear(Exception):
    """Unclear outcome: an error that is too long, or a record that differs from its input."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Reader of JSON from another process."""

    name: str
    read: Callable[[Any], str]
    refusals: tuple[type[Exception], ...]
    seeds: Sequence[Any]


def read(data: bytes) -> str:
    """Pass JSON to its reader; return the outcome."""
    name, _, text = data.partition(b" ")
    if name == b"problem":
        return _read_problem(text)
    reader = next(reader for reader in READERS if reader.name == name.decode())
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return "no JSON"
    try:
        return f"{reader.name}: {reader.read(fields)}"
    except reader.refusals as refusal:
        if len(str(refusal)) > MOST_TEXT:
            raise Unclear(f"a refusal of {len(str(refusal)):,} characters: {str(refusal)[:200]}") from refusal
        raise


REFUSALS: Final = (TeleloaderError,)


def mutate(random: Random) -> bytes:
    """Return mutated valid JSON, preceded by the name of its reader."""
    reader = random.choice(READERS)
    tree = mutate_tree(random, random.choice(reader.seeds), [seed for r in READERS for seed in r.seeds], _HOSTILE)
    text = text_of(tree)
    if random.random() < 0.2:
        text = mutate_bytes(random, text, _NESTED)
    elif random.random() < 0.05:
        text = random.choice(_NESTED)
    return reader.name.encode() + b" " + text[:MOST_BYTES]


def text_of(tree: Any) -> bytes:
    """Return a tree as JSON, or null if it has no JSON form."""
    with suppress(ValueError, RecursionError, TypeError):
        return json.dumps(tree).encode()
    return b"null"


# -- the readers


def _read_spec(fields: Any) -> str:
    spec = LoaderSpec.from_json(fields)
    again = LoaderSpec.from_json(json.loads(spec.canonical()))
    if again != spec or again.key != spec.key:
        raise AssertionError(f"{spec} reads as {again} when it is written")
    return "spec"


def _read_state(fields: Any) -> str:
    identity, size = _identity_of(fields)
    position, generators = state.load(fields, identity, size)
    saved = state.save(position, identity, size, generators)
    again, _ = state.load(json.loads(json.dumps(saved)), identity, size)
    # two NaNs in a random state are not equal, but are the same when written
    if json.dumps(again.random) != json.dumps(position.random) or (again.epoch, again.batch) != (
        *(position.epoch, position.batch),
    ):
        raise AssertionError(f"{position} reads as {again} when it is written")
    if not isinstance(position.random, dict | None) or not isinstance(position.base_seed, int | None):
        raise AssertionError(f"a position cannot be {position}")
    return "position"


class _Hostile(Server):
    """Server connection whose every response is `answer`."""

    answer: Any = None

    def _request(self, method: str, path: str, **options: Any) -> Any:
        return self.answer


def _read_answer(fields: Any) -> str:
    server = _Hostile("http://fuzz", 1)
    server.answer = fields
    if isinstance(fields, list):
        for info in server.datasets():
            _check_types(info)
        return "datasets"
    if isinstance(fields, dict) and "key" in fields:
        _check_types(server.register(_DIGITS, 0))
        return "registration"
    with suppress(ProtocolError):
        server.datasets()
    _check_types(server.dataset("digits"))
    return "dataset"


def _check_types(record: DatasetInfo | Registration) -> None:
    for name, hint in get_type_hints(type(record)).items():
        try:
            TypeAdapter(hint).validate_python(getattr(record, name), strict=True)
        except ValidationError:
            raise Unclear(f"{name} of {type(record).__name__} is {getattr(record, name)!r:.80}, not {hint}") from None


def _read_problem(body: bytes) -> str:
    return f"problem: {type(error_of(404, body, 'http://fuzz')).__name__}"


def _identity_of(fields: Any) -> tuple[dict[str, Any], int | None]:
    """Return the identity of a loader to which the state may belong."""
    order = fields.get("order") if isinstance(fields, dict) else None
    if order == "client":
        return _CLIENT, None
    return (_ITERABLE, None) if order == "iterable" else (_PLAN, 64)


_PLAN: Final = {"dataset": "f", "order": "plan", "seed": 7, "shuffle": True}
_CLIENT: Final = {"dataset": "f", "order": "client", "batch_size": 8}
_ITERABLE: Final = {"dataset": "f", "order": "iterable", "batch_size": 8, "num_workers": 2}
_DIGITS: Final = LoaderSpec(dataset="digits", fingerprint="f")
_SPEC: Final = dataclasses.asdict(LoaderSpec(dataset="digits", fingerprint="f", seed=7, shuffle=True))
_SESSION: Final = {**_SPEC, "session": "s", "num_workers": 2, "shard_states": [None, "5"], "resumed_epoch": 3}
_INFO: Final = dataclasses.asdict(
    DatasetInfo("digits", "map", "Digits", 500, "", "f", "default", None, ["m:f"], "batch", 2)
)
_REGISTRATION: Final = dataclasses.asdict(Registration(_DIGITS.key, 63, 500, "f", 2, 2**30))

READERS: Final = [
    Reader("spec", _read_spec, (InvalidSpec,), [_SPEC, _SESSION, {"dataset": "digits"}]),
    Reader(
        "state",
        _read_state,
        (StateMismatch,),
        [
            {"version": 2, "epoch": 3, **_PLAN, "samples": 640},
            {"version": 2, "epoch": 3, **_CLIENT, "base_seed": 5, "batch": 17, "random": {"python": [3, "AA==", None]}},
            {"version": 2, "epoch": 3, **_ITERABLE, "shard_states": [None, "5"], "batch": 17, "random": None},
        ],
    ),
    Reader("answer", _read_answer, (TeleloaderError,), [[_INFO], _INFO, _REGISTRATION]),
    Reader(
        "problem",
        _read_problem,
        (),
        [{"status": 404, "code": "UnknownLoader", "detail": "no loader"}, {"code": "RemoteError", "detail": [1]}],
    ),
]
# nested so deep that Python's JSON reads it just so, or not
_NESTED: Final = [
    begin + b"[" * depth + b"]" * depth + end
    for begin, end in ((b"", b""), (b'{"dataset": ', b"}"), (b'{"version": ', b"}"), (b'{"code": ', b"}"))
    for depth in (100, 300, 480, 900, 960, 980, 990, 5000)
]
_HOSTILE: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1.5, 1e308, float("nan"), float("inf"), 2**20 + 1, 2**62, 2**63, 2**64, -(2**64)),
    *(10**4000, "", "0", "plan", "\0", "\ud800", "x" * 513, "x" * 10_000, "é" * 513, [], {}, [None], [[]], {"": {}}),
    *(["x"] * 300, [[1]] * 300, {"a": [1, "x" * 3_000]}, {f"k{i}": i for i in range(300)}),
)
