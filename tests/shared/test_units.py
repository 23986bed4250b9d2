"""Formatting of numbers for people."""

from __future__ import annotations

import pytest

from teleloader_shared import units


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (512, "512 B"), (1023, "1,023 B"), (1023.9, "1 KiB"),
        (1536, "1.5 KiB"), (120 * 2**20, "120 MiB"), (2**31, "2 GiB"),
        (10**15, "909 TiB"), (2**70, "1,048,576 PiB"),
    ],
)  # fmt: skip
def test_sizes_are_in_powers_of_1024(nbytes: float, text: str) -> None:
    """Sizes are in the largest fitting power of 1024; fractions have three significant digits."""
    assert units.size(nbytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (1.5, "1.5"), (99.94, "99.9"), (99.96, "100"), (12345.6, "12,346")],
)
def test_numbers_have_three_digits_or_none_after_the_point(value: float, text: str) -> None:
    """Whole numbers keep all digits; fractions have three significant digits."""
    assert units.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"), (12e-6, "12 us"), (9.996e-4, "1 ms"), (3.4e-3, "3.4 ms"), (1.2, "1.2 s"), (59.94, "59.9 s"),
        (59.96, "1 min 0 s"), (312, "5 min 12 s"), (11220, "3 h 7 min"), (187200, "2 d 4 h"),
    ],
)  # fmt: skip
def test_times_are_in_the_unit_that_fits(value: float, text: str) -> None:
    """Times are in a fitting unit; long ones in two units."""
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("count", "names", "text"),
    [
        (0, ("worker",), "0 workers"), (1, ("worker",), "1 worker"), (12345, ("worker",), "12,345 workers"),
        (1, ("batch", "batches"), "1 batch"), (2, ("batch", "batches"), "2 batches"),
    ],
)  # fmt: skip
def test_one_thing_is_no_plural(count: int, names: tuple[str, ...], text: str) -> None:
    """A count of one has a singular noun; plurals have an s, or their own form."""
    assert units.counted(count, *names) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 %"), (0.003, "0.3 %"), (0.07, "7 %"), (1, "100 %")])
def test_shares_are_in_percent(value: float, text: str) -> None:
    """Fractions are printed in percent; small ones are not rounded to 0 %."""
    assert units.share(value) == text
