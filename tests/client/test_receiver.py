"""Damaged and wrong responses are requested again or raise an error, and never result in a wrong batch."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from teleloader import DataLoader, ProtocolError, RemoteDataset, ServerUnavailable
from teleloader.fetch.fetcher import Fetcher
from teleloader_shared import codec
from teleloader_shared.codec import BatchId
from teleloader_shared.messages import READY_BYTES
from tests.client.fake_server import INFO, ITERABLE, Answer, Request, fake_server

RIGHT = [[k, k, k] for k in range(8)]
LISTS = [[k, k + 1] for k in range(10, 2, -1)]
ORDERS: dict[str, tuple[dict[str, Any], dict[str, Any], list[list[int]]]] = {
    "plan": (INFO, {}, RIGHT),
    "sampler": (INFO, {"batch_sampler": LISTS}, LISTS),
    "shards": (ITERABLE, {"num_workers": 2}, RIGHT),
}
"""Sampling orders: description of the dataset, arguments of the loader, and expected batches."""


def load(
    answer: Answer, order: str = "plan", *, reconnect_timeout: float = 30, max_batch_bytes: int = 2**20
) -> list[list[int]]:
    """Load an epoch from a fake server."""
    info, arguments, _ = ORDERS[order]
    with fake_server(answer, info) as url:
        dataset = RemoteDataset(url, reconnect_timeout=reconnect_timeout)
        loader = DataLoader(dataset, output="numpy", max_batch_bytes=max_batch_bytes, **arguments)
        return [batch[0].tolist() for batch in loader]


def once(wrong: Callable[[Request], bytes | int]) -> Answer:
    """Return a wrong response to the third request, and correct ones otherwise."""
    return lambda request: wrong(request) if request.number == 2 else request.right()


@pytest.mark.timeout(60)
def test_a_failed_server_does_not_stop_a_client_at_its_memory_limit() -> None:
    """The other server receives the missing batch although the client may not request the batches after it."""
    failed = threading.Event()

    def sized(request: Request, k: int) -> bytes:
        return codec.to_bytes(BatchId(request.key, request.epoch, k), [np.full(60_000, k)])

    def slow(request: Request) -> Any:
        if not failed.wait(1):  # until the client has received as many later batches as it may
            failed.set()
        return lambda connection: None  # closes it

    info = {**INFO, "length": 200}
    with (
        fake_server(lambda request: sized(request, request.batches[0]), info, num_workers=8) as url,
        fake_server(slow, info, num_workers=8, registering=lambda: 503 if failed.is_set() else 200) as failing,
    ):
        dataset = RemoteDataset([url, failing], reconnect_timeout=5)
        loader = DataLoader(dataset, output="numpy", max_batch_bytes=10**6, num_workers=2)
        assert [int(batch[0][0]) for batch in loader] == list(range(200))


@pytest.mark.parametrize("order", ORDERS)
def test_batches_are_returned_in_order(order: str) -> None:
    """Without faults, batches arrive in order from the fake server."""
    assert load(Request.right, order) == ORDERS[order][2]


def flipped(request: Request) -> bytes:
    """Return a frame with one flipped bit in its content."""
    body = bytearray(request.right())
    body[-70] ^= 4
    return bytes(body)


@pytest.mark.parametrize("order", ORDERS)
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
def test_a_wrong_response_is_requested_again(wrong: Callable[[Request], bytes | int], order: str) -> None:
    """Damaged or unrequested batches are rejected and requested again, with seeded order and client-side samplers."""
    assert load(once(wrong), order) == ORDERS[order][2]


def test_a_server_that_is_always_wrong_is_an_error() -> None:
    """Three consecutive damaged responses raise an error."""
    with pytest.raises(ProtocolError, match="3 consecutive damaged responses"):
        load(lambda request: flipped(request) if request.stop > 4 else request.right())


def test_a_response_with_too_large_a_size_is_not_received() -> None:
    """A response whose declared size exceeds the limit is not received."""
    with pytest.raises(ProtocolError, match=r"invalid response from .*: Content-Length .*, expected 1 to"):
        load(lambda request: bytes(READY_BYTES + 2**12 + 1), max_batch_bytes=2**12)


def test_a_server_that_never_can_is_unavailable() -> None:
    """503 for longer than reconnect_timeout raises ServerUnavailable."""
    with pytest.raises(ServerUnavailable, match=r"did not send batch 0 of epoch 0: .*not now"):
        load(lambda request: 503, reconnect_timeout=0.3)


def test_an_error_stays() -> None:
    """After an error that ends the epoch, next() raises it again instead of hanging."""
    with fake_server(lambda request: 400) as url:
        batches = iter(DataLoader(RemoteDataset(url), output="numpy"))
        for _ in range(2):
            with pytest.raises(ProtocolError, match="responded with 400: not now"):
                next(batches)


@pytest.mark.parametrize("order", ORDERS)
def test_an_exhausted_iterator_stays_exhausted(order: str) -> None:
    """An exhausted iterator yields no further batches, as Python requires."""
    info, arguments, right = ORDERS[order]
    with fake_server(Request.right, info) as url:
        batches = iter(DataLoader(RemoteDataset(url), output="numpy", **arguments))
        assert len(list(batches)) == len(right)
        assert list(batches) == []


# --- Index lists --------------------------------------------------------------------------------------------------


def test_each_index_list_is_sent_with_its_batch() -> None:
    """Only the request for a batch contains its index list; the seeded order sends none."""
    seen: dict[int, Any] = {}

    def answer(request: Request) -> bytes:
        seen.update(request.listed or {})
        return request.right()

    load(answer)
    assert seen == {}
    load(answer, "sampler")
    assert seen == dict(enumerate(LISTS))


def test_a_response_may_have_fewer_batches_than_listed() -> None:
    """Batches that a response does not contain are requested again, with their indices."""
    asked: list[int] = []

    def answer(request: Request) -> bytes:
        asked.append(len(request.listed or {}))
        return request.frame(request.start)

    with fake_server(answer, INFO) as url:
        sampler = [[k] for k in range(300)]
        loader = DataLoader(
            RemoteDataset(url), batch_sampler=sampler, num_workers=1, prefetch_factor=50, output="numpy"
        )
        assert [batch[0].tolist() for batch in loader] == sampler
    assert max(asked) > 1, "small batches are asked for together"


# --- Shards that end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[0], [3], [2, 2], [0, 3], [3, 0], [1, 4, 2], [0, 0, 0]], ids=str)
def test_shards_end_one_after_another(sizes: list[int]) -> None:
    """The loop receives every batch of each shard in turn, and no end of a shard."""

    def answer(request: Request) -> bytes:
        frames = []
        for k in range(request.start, request.stop):
            position, shard = divmod(k, len(sizes))
            frames.append(request.frame(k) if position < sizes[shard] else request.end(k))
        return b"".join(frames)

    with fake_server(answer, ITERABLE) as url:
        loader = DataLoader(RemoteDataset(url), num_workers=len(sizes), output="numpy")
        got = [int(batch[0][0]) for batch in loader]
    assert got == sorted(position * len(sizes) + shard for shard, size in enumerate(sizes) for position in range(size))


# --- Sessions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("leave", ["exhaust", "drop"])
def test_a_session_is_ended_with_its_iteration(leave: str, order: str) -> None:
    """The end of an iteration ends its session, except with shared workers, where no request is needed."""
    info, arguments, right = ORDERS[order]
    ended: list[str] = []
    keys: set[str] = set()

    def answer(request: Request) -> bytes:
        keys.add(request.key)
        return request.right()

    with fake_server(answer, info, ended.append) as url:
        loader = DataLoader(RemoteDataset(url), output="numpy", **arguments)
        batches = iter(loader)
        next(batches)
        assert ended == []
        if leave == "exhaust":
            assert len(list(batches)) == len(right) - 1
        else:
            del batches
            gc.collect()
        assert ended == ([] if order == "plan" else list(keys))


@pytest.mark.parametrize("order", ["sampler", "shards"])
def test_persistent_workers_stay_from_one_epoch_to_the_next(order: str) -> None:
    """With persistent workers, all epochs use one session, which ends with the loader."""
    info, arguments, right = ORDERS[order]
    ended: list[str] = []
    keys: set[str] = set()

    def answer(request: Request) -> bytes:
        keys.add(request.key)
        return request.right()

    with fake_server(answer, info, ended.append) as url:
        loader = DataLoader(
            RemoteDataset(url), output="numpy", persistent_workers=True, **{"num_workers": 2, **arguments}
        )
        for _ in range(3):
            assert [batch[0].tolist() for batch in loader] == right
        assert ended == []
        assert len(keys) == 1
        del loader
        gc.collect()
        assert ended == list(keys)


def test_an_exit_in_the_receiving_thread_is_raised_in_the_training_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SystemExit in the receiving thread is raised by ``next()``, which would otherwise wait forever."""

    def leave(_: Fetcher) -> None:
        raise SystemExit("the thread ended")

    monkeypatch.setattr(Fetcher, "_receive_epoch", leave)
    with fake_server(Request.right, INFO) as url:
        batches = iter(DataLoader(RemoteDataset(url), output="numpy", num_workers=1, timeout=5))
        with pytest.raises(SystemExit, match="the thread ended"):
            next(batches)
