"""Hooks of schemathesis, which replace the keys of unknown loaders by those of registered ones in some requests."""

from __future__ import annotations

import json
import os
from random import Random
from typing import Any, Final

import schemathesis

from teleloader_shared.messages import FRAME_MEDIA_TYPE
from tests.fuzz import frames

KEYS: Final = os.environ["FUZZ_KEYS"].split(",")
"""Keys of registered loaders: one in seeded order, one with a client-side sampler."""
KNOWN_SHARE: Final = 0.75
"""Fraction of keys and names that are replaced by existing ones."""


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: dict[str, Any]) -> dict[str, Any]:
    """Use known loaders, and small numbers of epochs and batches, in three of four requests."""
    random = Random(repr(path_parameters))
    known = {"key": random.choice(KEYS), "epoch": random.choice((0, 0, 1)), "k": random.randrange(20), "name": "rows"}
    for name in path_parameters or {}:
        if random.random() < KNOWN_SHARE:
            path_parameters[name] = known.get(name, path_parameters[name])
    return path_parameters


@schemathesis.hook
def map_query(context: Any, query: dict[str, Any] | None) -> dict[str, Any] | None:
    """Use small ranges in half of the requests."""
    random = Random(repr(query))
    if query and "ranges" in query and random.random() < 0.5:
        bounds = sorted(random.sample(range(20), random.choice((2, 2, 4, 6))))
        query["ranges"] = ",".join(f"{start}:{stop}" for start, stop in zip(bounds[::2], bounds[1::2], strict=True))
    return query


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Use the hosted dataset in most specs."""
    if isinstance(body, dict) and "dataset" in body and Random(repr(body)).random() < KNOWN_SHARE:
        body["dataset"] = "rows"
        if Random(repr(body)).random() < KNOWN_SHARE:
            body.pop("fingerprint", None)
    return body


@schemathesis.serializer(FRAME_MEDIA_TYPE)
def frames_of(context: Any, value: Any) -> bytes:
    """Return index lists, most of them invalid."""
    return frames.mutate_list(Random(json.dumps(value, default=repr)), KEYS[-1])
