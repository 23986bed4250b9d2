"""Batches of a request as ranges."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from teleloader_shared.errors import InvalidSpec
from teleloader_shared.ranges import MAX_RANGES, BatchRanges
from teleloader_shared.spec import MAX_EPOCH

numbers = st.sets(st.integers(0, 60)).map(sorted)


@given(numbers)
def test_a_request_is_the_sequence_of_its_numbers(numbers: list[int]) -> None:
    """A request is the sequence of its batch numbers, adjacent or not."""
    batches = BatchRanges.of(numbers)
    assert list(batches) == numbers
    assert len(batches) == len(numbers)
    assert [batches[place] for place in range(len(batches))] == numbers
    assert [batches.place(k) for k in range(61)] == [numbers.index(k) if k in numbers else None for k in range(61)]
    if numbers:
        assert (batches.start, batches.stop) == (numbers[0], numbers[-1] + 1)


@given(numbers, st.slices(61))
def test_a_slice_of_a_request_has_the_numbers_at_its_places(numbers: list[int], places: slice) -> None:
    """A slice of a request is the same as that of its sequence of numbers."""
    assert list(BatchRanges.of(numbers)[places]) == numbers[places]


@given(numbers.filter(bool))
def test_the_text_of_a_request_has_one_form(numbers: list[int]) -> None:
    """Equal batch numbers have the same text, in which adjacent ranges are joined."""
    batches = BatchRanges.of(numbers)
    assert BatchRanges.parse(str(batches)) == batches
    assert str(batches).count(",") == sum(k + 1 not in numbers for k in numbers) - 1
    assert BatchRanges.between([bound for each in batches.ranges for bound in (each.start, each.stop)]) == batches
    assert hash(BatchRanges(*batches.ranges)) == hash(batches)


@example(list(range(20)), 10, 5)
@given(numbers, st.integers(0, 61), st.integers(0, 61))
def test_a_part_of_a_request_has_the_numbers_within(numbers: list[int], start: int, stop: int) -> None:
    """The part of a request between two bounds contains exactly the numbers between them."""
    assert BatchRanges.of(numbers).within(start, stop) == BatchRanges.of(k for k in numbers if start <= k < stop)


def test_the_largest_request_needs_no_memory_for_its_numbers() -> None:
    """A range is stored by its bounds, so that the largest request takes little memory."""
    batches = BatchRanges.parse(f"0:{2**61},{2**61 + 1}:{MAX_EPOCH}")
    assert len(batches) == MAX_EPOCH - 1
    assert batches[2**61] == 2**61 + 1
    assert batches.place(MAX_EPOCH - 1) == MAX_EPOCH - 2
    assert len(BatchRanges.parse(",".join(f"{2 * k}:{2 * k + 1}" for k in range(MAX_RANGES)))) == MAX_RANGES


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "START:STOP"), ("0", "START:STOP"), ("0:", "START:STOP"), ("0:1,", "START:STOP"), (",0:1", "START:STOP"),
        ("0:1:2", "START:STOP"), ("0:1,2", "START:STOP"), ("-1:1", "START:STOP"), ("0:+1", "START:STOP"),
        (" 0:1", "START:STOP"), ("0:1\n", "START:STOP"), ("0:1_0", "START:STOP"), ("0:\u0661", "START:STOP"),
        ("0:1e3", "START:STOP"), ("0:" + "9" * 5000, "START:STOP"), ("3:3", "3 after 3"), ("3:2", "2 after 3"),
        ("0:8,4:12", "4 after 8"), ("8:12,0:4", "0 after 12"), ("0:8,8:9", "Join adjacent ranges"),
        (f"0:{MAX_EPOCH + 1}", "ascending numbers from 0 to"),
        (",".join(f"{2 * k}:{2 * k + 1}" for k in range(MAX_RANGES + 1)), "129 ranges in a request: expected 1 to 128"),
    ],
)  # fmt: skip
def test_invalid_ranges_are_refused(text: str, said: str) -> None:
    """The error for invalid ranges states the reason, and is short even if the text is long."""
    with pytest.raises(InvalidSpec, match=said) as raised:
        BatchRanges.parse(text)
    assert len(str(raised.value)) < 250
