"""What the network or a wrong server does to batches is mended or is an error, never a wrong batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from teleloader import DataLoader, ProtocolError, RemoteDataset, ServerUnavailable
from tests.client.fake_server import Answer, Request, fake_server

RIGHT = [[k, k, k] for k in range(8)]


def load(answer: Answer, *, reconnect_timeout: float = 30, max_batch_bytes: int = 2**20) -> list[list[int]]:
    """An epoch from a fake server."""
    with fake_server(answer) as url:
        dataset = RemoteDataset(url, reconnect_timeout=reconnect_timeout)
        loader = DataLoader(dataset, output="numpy", max_batch_bytes=max_batch_bytes)
        return [batch[0].tolist() for batch in loader]


def once(wrong: Callable[[Request], bytes | int]) -> Answer:
    """Answer the third request wrongly, the others rightly."""
    return lambda request: wrong(request) if request.number == 2 else request.right()


def test_answers_are_handed_over_in_order() -> None:
    """The fake server itself is right when nothing is done to it."""
    assert load(Request.right) == RIGHT


def flipped(request: Request) -> bytes:
    """One bit of an array's bytes."""
    body = bytearray(request.right())
    body[-70] ^= 4
    return bytes(body)


@pytest.mark.parametrize(
    "wrong",
    [
        flipped,
        lambda request: request.right()[:-64],
        lambda request: request.right()[:20],
        lambda request: b"x" * 640,
        lambda request: request.frame(request.start + 1),
        lambda request: request.frame(request.start, epoch=request.epoch + 1),
        lambda request: request.frame(request.start, key="0" * 32),
        lambda request: request.right() + request.right(),
        lambda request: request.right() + request.frame(request.stop),
        lambda request: 503,
    ],
    ids=[
        "bit flipped", "frame cut", "prologue cut", "garbage", "another batch", "another epoch", "another loader",
        "twice", "more than asked", "not now",
    ],
)  # fmt: skip
def test_a_wrong_answer_is_asked_for_again(wrong: Callable[[Request], bytes | int]) -> None:
    """What is damaged, or is not what was asked for, is refused; the epoch is exact."""
    assert load(once(wrong)) == RIGHT


def test_a_server_that_is_always_wrong_is_an_error() -> None:
    """Three damaged answers in a row are not chance."""
    with pytest.raises(ProtocolError, match="3 damaged answers in a row"):
        load(lambda request: flipped(request) if request.stop > 4 else request.right())


def test_an_answer_that_states_too_much_is_not_received() -> None:
    """A hostile server cannot make the client take more memory than it allows."""
    with pytest.raises(ProtocolError, match="must state its size in bytes, up to"):
        load(lambda request: bytes(2**20 + 2**12 + 1), max_batch_bytes=2**12)


def test_a_server_that_never_can_is_unavailable() -> None:
    """503 for longer than reconnect_timeout."""
    with pytest.raises(ServerUnavailable, match=r"did not send batch 0 of epoch 0: .*not now"):
        load(lambda request: 503, reconnect_timeout=0.3)


def test_an_error_stays() -> None:
    """After an error that ends the epoch, next() raises it again instead of hanging."""
    with fake_server(lambda request: 400) as url:
        batches = iter(DataLoader(RemoteDataset(url), output="numpy"))
        for _ in range(2):
            with pytest.raises(ProtocolError, match="answered 400: not now"):
                next(batches)


def test_an_exhausted_iterator_stays_exhausted() -> None:
    """As Python's iterators do."""
    with fake_server(Request.right) as url:
        batches = iter(DataLoader(RemoteDataset(url), output="numpy"))
        assert len(list(batches)) == 8
        assert list(batches) == []
