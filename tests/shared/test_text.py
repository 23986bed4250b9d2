"""Received values and bytes in error messages: bounded, and harmless to a terminal."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest

from teleloader_shared.text import excerpt, short

MIB = 2**20


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"), (True, "True"), (1.5, "1.5"), (7, "7"), ("text", "'text'"), (b"\x1b[2J", "<bytes of length 4>"),
        ({"a": b"x"}, "{'a': <bytes of length 1>}"), ([1, [2, ()]], "[1, [2, ()]]"), (1j, "<complex>"),
        (msgpack.ExtType(5, b"x"), "<ExtType>"), (object(), "<object>"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_short_values_are_shown_as_they_are(value: Any, text: str) -> None:
    """JSON values are shown in Python's notation; bytes and objects of other types only by type and length."""
    assert short(value) == text


@pytest.mark.parametrize(
    "value",
    [b"\0" * 64 * MIB, [b"\xff" * 64 * MIB], "\U0010ffff" * 16 * MIB, {"k" * MIB: "v" * MIB}, [[0] * MIB] * 100,
     msgpack.ExtType(5, b"x" * 64 * MIB), 10**4000],
    ids=["bytes", "list", "text", "dict", "lists", "extension", "number"],
)  # fmt: skip
def test_long_values_are_cut_before_they_are_formatted(value: Any) -> None:
    """A description has less than 1,000 characters, and no more than 1 MiB is needed to make it."""
    tracemalloc.start()
    try:
        assert len(short(value)) < 1000
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_the_beginning_of_a_body_is_one_harmless_line() -> None:
    """Bytes that are not UTF-8, and characters that a terminal obeys, are replaced; at most 200 bytes are shown."""
    assert excerpt(b"<html>\r\n\x1b[2J\xff") == "<html>\N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}[2J\ufffd"
    assert len(excerpt(bytearray(b"x" * 10**6))) == 200
