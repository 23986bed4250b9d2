"""The checker finds every violation in a history, and none in a correct one."""

from __future__ import annotations

import random

import pytest

from tests.chaos.history import Verdict, check

BATCHES = 6
EPOCHS = 3


def expected(epoch: int) -> list[int]:
    """Return the checksums of an epoch's batches."""
    return [1000 * epoch + k for k in range(BATCHES)]


def history(*orders: list[int], epoch: int = 0) -> list[str]:
    """Return the history of a consumer whose epochs brought these batches."""
    lines = [f"begin {epoch} 0"]
    for number, order in enumerate(orders, epoch):
        for k, batch in enumerate(order):
            lines += [f"batch {number} {k} {expected(number)[batch]} 0.1", f"saved {number} {k + 1}"]
        lines.append(f"end {number}")
    return lines


WHOLE = list(range(BATCHES))


def summary(verdict: Verdict) -> tuple[int, int, int, int]:
    """Return the numbers of lost, doubled, wrong and misplaced batches."""
    return verdict.lost, verdict.doubled, verdict.wrong, verdict.misplaced


def test_a_right_history_has_nothing_wrong() -> None:
    """A history with every batch once, in order, to the end has no violations."""
    verdict = check([*history(WHOLE, WHOLE), "left 0 0"], expected)
    assert verdict == Verdict(batches=2 * BATCHES, epochs=2, worst_wait=0.1)
    assert verdict.violations == 0


@pytest.mark.parametrize(
    ("orders", "found"),
    [
        ([[0, 1, 3, 4, 5]], (1, 0, 0, 0)),
        ([[1, 2, 3, 4, 5]], (1, 0, 0, 0)),
        ([[0, 1, 2, 3, 4]], (1, 0, 0, 0)),
        ([[0, 1, 1, 2, 3, 4, 5]], (0, 1, 0, 0)),
        ([[0, 1, 2, 3, 4, 5, 0]], (0, 1, 0, 0)),
        ([[0, 2, 1, 3, 4, 5]], (1, 1, 0, 0)),
        ([WHOLE, [0, 1, 2]], (3, 0, 0, 0)),
        ([[]], (6, 0, 0, 0)),
    ],
    ids=["lost", "first lost", "last lost", "doubled", "first at the end", "swapped", "half an epoch", "nothing"],
)
def test_what_is_lost_doubled_or_swapped_is_found(orders: list[list[int]], found: tuple[int, int, int, int]) -> None:
    """The checker finds lost, repeated and swapped batches, and accepts the batches after them."""
    verdict = check(history(*orders), expected)
    assert summary(verdict) == found
    assert verdict.violations
    assert verdict.told


def test_a_wrong_byte_is_found() -> None:
    """A CRC that belongs to no batch of the epoch is a violation."""
    lines = [line.replace("batch 0 3 3 ", "batch 0 3 77 ") for line in history(WHOLE)]
    assert summary(check(lines, expected)) == (0, 0, 1, 0)


def test_a_batch_of_another_epoch_is_a_wrong_one() -> None:
    """A batch of another epoch is a violation, even if its line names the right epoch."""
    lines = ["batch 0 2 1002 0.1" if line.startswith("batch 0 2 ") else line for line in history(WHOLE)]
    assert summary(check(lines, expected)) == (0, 0, 1, 0)


@pytest.mark.parametrize("saved", [True, False])
def test_a_resumed_consumer_may_repeat_what_came_after_its_last_state(saved: bool) -> None:
    """A resumed consumer may repeat the one batch that arrived after its last saved state, and must reach the end."""
    whole = history(WHOLE)
    before = whole.index("saved 0 3")
    cut, place = (whole[: before + 1], 3) if saved else (whole[:before], 2)
    verdict = check([*cut, f"begin 0 {place}", *whole[1 + 2 * place :]], expected)
    assert verdict.violations == 0
    assert (verdict.resumed, verdict.repeated) == (1, 0 if saved else 1)


@pytest.mark.parametrize("place", ["0 0", "0 1", "0 4", "1 0"])
def test_a_resume_elsewhere_is_found(place: str) -> None:
    """A resume before the saved state, or beyond the last batch, is a violation."""
    assert check([*history(WHOLE)[:7], f"begin {place}"], expected).misplaced


def test_an_epoch_may_end_before_its_end_is_recorded() -> None:
    """A state after the last batch may refer to the start of the next epoch."""
    lines = [*history(WHOLE)[:-2], "saved 1 0", *history(WHOLE, epoch=1)]
    verdict = check(lines, expected)
    assert verdict.violations == 0
    assert verdict.epochs == 2


def test_an_end_in_mid_epoch_is_found() -> None:
    """Batches that are missing at a normal end of the epoch are violations."""
    assert check(history(WHOLE)[:-1], expected).violations
    assert check(history(WHOLE)[:5], expected).violations


def test_what_a_consumer_leaves_is_found() -> None:
    """Descriptors and threads that a consumer does not release are violations."""
    assert check([*history(WHOLE), "left 2 1"], expected).left == 3


def test_any_change_of_a_history_is_found() -> None:
    """A batch that is dropped, repeated, moved or changed is a violation at any position."""
    rng = random.Random(1)
    right = history(*[WHOLE] * EPOCHS)
    places = [number for number, line in enumerate(right) if line.startswith("batch")]
    for _ in range(300):
        lines, place, other = list(right), rng.choice(places), rng.choice(places)
        match rng.randrange(4):
            case 0:
                del lines[place]
            case 1:
                lines.insert(other, lines[place])
            case 2 if place != other:
                lines[place], lines[other] = lines[other], lines[place]
            case _:
                words = lines[place].split()
                lines[place] = " ".join([*words[:3], str(int(words[3]) ^ 1 << 20), *words[4:]])
        assert check(lines, expected).violations, lines
