"""Request IDs: their source, and the outputs that contain them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from teleloader_server import request_ids
from teleloader_server.request_ids import HEADER, Identified


async def answer(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str | None, list[tuple[bytes, bytes]]]:
    """Return the request ID that an application sees, and the headers of the response."""
    sent: list[Message] = []
    seen: list[str | None] = []

    async def app(_scope: Scope, _receive: Receive, send: Send) -> None:
        await asyncio.sleep(0)
        seen.append(request_ids.current())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"etag", b"a")]})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await asyncio.create_task(Identified(app)({"type": "http", "headers": list(headers)}, receive, send))
    return seen[0], list(sent[0]["headers"])


@pytest.mark.parametrize("given_id", ["7", "3f9a1c2e-1a2b", "Root=1-67891233-abc", "a" * 128, "job/7:step@9+x._"])
async def test_a_clients_id_is_taken(given_id: str) -> None:
    """The application logs the client's ID, and the response has it."""
    seen, headers = await answer([(b"host", b"a"), (HEADER, given_id.encode())])
    assert seen == given_id
    assert headers == [(b"etag", b"a"), (HEADER, given_id.encode())]


@pytest.mark.parametrize(
    "bad", [b"", b"a" * 129, b"a b", b"a\nb", b"a\x1b[2J", b"\xc3\xa4", b"a;b", b'"', b"[x]", b"a\n"]
)
async def test_an_id_that_could_do_harm_is_not_taken(bad: bytes) -> None:
    """An ID with unsafe characters is replaced by a new one, and the request is processed."""
    seen, headers = await answer([(HEADER, bad)])
    assert seen is not None
    assert headers[-1] == (HEADER, seen.encode())
    assert bad not in headers[-1]


@given(st.binary(max_size=200))
def test_whatever_comes_as_an_id_the_one_in_use_is_harmless(raw: bytes) -> None:
    """The ID in use is one word of printable ASCII of limited length."""
    seen, _ = asyncio.run(answer([(HEADER, raw)]))
    assert seen is not None
    assert seen.isascii()
    assert seen.isprintable()
    assert " " not in seen
    assert 1 <= len(seen) <= 128


async def test_ids_that_are_made_differ() -> None:
    """Concurrent requests have different IDs."""
    found = await asyncio.gather(*(answer([]) for _ in range(50)))
    assert len({seen for seen, _ in found}) == 50
    assert request_ids.current() is None, "outside of them there is none"


def test_what_is_done_on_behalf_of_a_request_has_its_id() -> None:
    """Code on behalf of a request has its ID, and subsequent code has none."""
    with request_ids.on_behalf_of("a"):
        assert request_ids.current() == "a"
        with request_ids.on_behalf_of(None):
            assert request_ids.current() is None
        assert request_ids.current() == "a"
    assert request_ids.current() is None
