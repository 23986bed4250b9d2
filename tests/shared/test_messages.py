"""A client's report is accepted unchanged, or ignored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teleloader_shared.messages import MAX_REPORT, RUN_NAME, ConsumerReport

COUNTS = st.integers(0, 10**9 - 1)
REPORTS = st.builds(
    lambda elapsed, share, *counts: ConsumerReport(elapsed, elapsed * share, *counts),
    st.floats(0, 999_999_998), st.floats(0, 1), COUNTS, COUNTS, COUNTS,
    st.none() | st.integers(0, 10**18 - 1), st.booleans(), st.none() | st.from_regex(RUN_NAME, fullmatch=True),
)  # fmt: skip


@given(REPORTS)
def test_a_report_arrives(report: ConsumerReport) -> None:
    """Reports arrive with a precision of a millisecond."""
    said = report.to_header()
    assert len(said) <= MAX_REPORT
    found = ConsumerReport.from_header(said)
    assert found is not None
    assert found.elapsed == pytest.approx(report.elapsed, abs=0.001)
    assert found.waited == pytest.approx(report.waited, abs=0.002)
    assert found.waited <= found.elapsed
    for name in ("taken", "reconnects", "hedges", "position", "finished", "run"):
        assert getattr(found, name) == getattr(report, name)


def test_entries_that_come_later_are_ignored() -> None:
    """Unknown entries of a newer client's report are ignored."""
    known = "elapsed=2.500,waited=1.250,taken=7,reconnects=1,hedges=2"
    assert ConsumerReport.from_header(f"{known},colour=red") == ConsumerReport(2.5, 1.25, 7, 1, 2)
    found = ConsumerReport.from_header(f"{known},position=3,run=train.py,colour=red")
    assert found == ConsumerReport(2.5, 1.25, 7, 1, 2, position=3, run="train.py")


@pytest.mark.parametrize(
    "wrong", ["position=-1", "position=x", "finished=2", "run=", "run=<b>", "run=a\nb", "run=" + "x" * 65, "run= x"]
)
def test_an_optional_entry_that_is_invalid_is_ignored(wrong: str) -> None:
    """Names are limited in length and characters, and no invalid entry affects the others."""
    known = "elapsed=2.500,waited=1.250,taken=7,reconnects=1,hedges=2"
    assert ConsumerReport.from_header(f"{known},{wrong}") == ConsumerReport(2.5, 1.25, 7, 1, 2)


@pytest.mark.parametrize(
    "said",
    [
        "",
        "nonsense",
        "elapsed=2.5,waited=1.25,taken=7,reconnects=1",
        "elapsed=nan,waited=1.25,taken=7,reconnects=1,hedges=2",
        "elapsed=-2.5,waited=1.25,taken=7,reconnects=1,hedges=2",
        "elapsed=2.5,waited=1e9,taken=7,reconnects=1,hedges=2",
        "elapsed=2.5,waited=1.25,taken=seven,reconnects=1,hedges=2",
        "elapsed=2.5,waited=1.25,taken=7,reconnects=1,hedges=2garbage",
        "elapsed=2.5,waited=1.25,taken=7,reconnects=1,hedges=" + "9" * 10,
        "elapsed=" + "9" * 10 + ".0,waited=1.25,taken=7,reconnects=1,hedges=2",
        "elapsed=\N{ARABIC-INDIC DIGIT TWO}.5,waited=1.25,taken=7,reconnects=1,hedges=2",
        "x" * 1_000_000,
    ],
    ids=lambda said: said[:40],
)
def test_what_is_no_report_is_none(said: str) -> None:
    """An invalid report is ignored: it is neither corrected nor rejected."""
    assert ConsumerReport.from_header(said) is None


@given(st.text(max_size=300))
def test_no_text_breaks_it(said: str) -> None:
    """Any text is parsed without an exception, and waits never exceed the elapsed time."""
    found = ConsumerReport.from_header(said)
    assert found is None or 0 <= found.waited <= found.elapsed
