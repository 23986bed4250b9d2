"""Moderation of responses under load."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from teleloader_server.web.moderation import LINGER, MAX_LINGER, RESPONSE_SECONDS, RESPONSE_SHARE, linger_for

requests = st.integers(1, 10_000)
rates = st.floats(0, 1e6)


@given(requests, rates)
def test_the_wait_is_bounded(open_requests: int, batch_rate: float) -> None:
    """A response waits for at least one further batch, and no longer than `MAX_LINGER`."""
    count, seconds = linger_for(open_requests, batch_rate)
    assert LINGER <= seconds <= MAX_LINGER
    assert count is None or count >= 1


@given(st.integers(1, int(MAX_LINGER / LINGER)), rates)
def test_responses_take_a_limited_share_of_the_event_loop(open_requests: int, batch_rate: float) -> None:
    """Responses with enough batches take at most `RESPONSE_SHARE`; smaller ones are at most ``1 / LINGER`` a second."""
    count, seconds = linger_for(open_requests, batch_rate)
    if count is None:
        assert open_requests == 1 or batch_rate * RESPONSE_SECONDS <= RESPONSE_SHARE
        return
    assert batch_rate / (count + 1) * RESPONSE_SECONDS <= RESPONSE_SHARE * (1 + 1e-9)
    assert open_requests / seconds <= 1 / LINGER * (1 + 1e-9)


@given(requests, rates, requests, rates)
def test_the_wait_grows_with_the_load(open_requests: int, rate: float, more_requests: int, more_rate: float) -> None:
    """More open requests or faster workers never shorten the wait."""
    before = linger_for(open_requests, rate)[1]
    assert linger_for(open_requests + more_requests, rate + more_rate)[1] >= before


@given(requests, st.floats(0, RESPONSE_SHARE / RESPONSE_SECONDS * 0.999))
def test_slow_batches_are_not_delayed(open_requests: int, batch_rate: float) -> None:
    """If a response per batch is cheap enough, only the minimum wait applies."""
    assert linger_for(open_requests, batch_rate) == (None, LINGER)


def test_the_wait_of_one_request_and_of_many() -> None:
    """A client that is alone gets all batches that are ready soon, and one of many gets enough of them."""
    assert linger_for(1, 25_000) == (None, LINGER)
    count, seconds = linger_for(100, 25_000)
    assert (count, round(seconds, 6)) == (math.ceil(25_000 * RESPONSE_SECONDS / RESPONSE_SHARE) - 1, 0.5)
