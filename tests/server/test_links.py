"""Measurements of the machine, of the main thread and of TCP connections for the diagnosis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from teleloader_server.dispatch.counters import LoopCounters
from teleloader_server.dispatch.rates import RateWindow
from teleloader_server.stats.links import measure
from teleloader_server.stats.machine import MachineUse, MainThread

PIECE = b"x" * 2**16


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a client's reader and the server's writer of a connection."""
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda _, writer: accepted.set_result(writer), "127.0.0.1")
    async with server:
        reader, mine = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer = await accepted
        yield reader, writer
        mine.close()
        writer.close()


def connections_of(writer: asyncio.StreamWriter) -> dict[asyncio.BaseTransport, RateWindow | None]:
    """Return the connections of a client that has one."""
    loop = LoopCounters(0.0)
    loop.add_connection(writer.transport)
    return loop.connections


async def test_a_connection_is_measured_from_the_second_time_on() -> None:
    """The round-trip time is known at once; fractions of time need two measurements."""
    async with connected() as (reader, writer):
        connections = connections_of(writer)
        writer.write(PIECE)
        await reader.readexactly(len(PIECE))
        first = measure(connections, 10.0)
        writer.write(PIECE)
        await reader.readexactly(len(PIECE))
        second = measure(connections, 12.0)
    assert first is not None
    assert second is not None
    assert 0 < first.rtt < 1
    assert (first.busy, first.retransmitted, first.unread) == (None, None, None)
    assert second.retransmitted == 0.0
    assert second.busy is not None
    assert 0 <= second.busy <= 1


async def test_an_old_measurement_is_not_recent() -> None:
    """If statistics were requested long ago, the fractions are unknown again."""
    async with connected() as (_, writer):
        connections = connections_of(writer)
        found = [measure(connections, now) for now in (10.0, 12.0, 60.0)]
    assert [link is not None and link.busy is not None for link in found] == [False, True, False]


async def test_a_client_that_does_not_read_has_a_full_window() -> None:
    """The fraction of time with a full window shows it."""
    async with connected() as (_, writer):
        connections = connections_of(writer)
        for _ in range(200):
            writer.write(PIECE)
        began = time.monotonic()
        measure(connections, began)
        await asyncio.sleep(1)
        found = measure(connections, time.monotonic())
    assert found is not None
    assert found.unread == pytest.approx(1.0, abs=0.3)


async def test_closed_connections_are_not_measured() -> None:
    """They are forgotten when another connection is added."""
    loop = LoopCounters(0.0)
    async with connected() as (_, first), connected() as (_, second):
        loop.add_connection(first.transport)
        assert measure(loop.connections, 10.0) is not None
        first.close()
        assert measure(loop.connections, 11.0) is None
        loop.add_connection(second.transport)
        assert list(loop.connections) == [second.transport]


def test_the_main_thread_is_measured_from_the_second_time_on() -> None:
    """Its CPU time and its time without a CPU are fractions of the time."""
    began = time.monotonic()
    thread = MainThread(began)
    assert thread.current(began, 0.002).cpu is None
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        pass
    now = time.monotonic()
    thread.mark(now)
    found = thread.current(now, 0.002)
    assert found.lag == 0.002
    assert found.cpu is not None
    assert found.cpu_wait is not None
    assert found.cpu == pytest.approx(0.2 / (now - began), rel=0.3)
    assert found.cpu + found.cpu_wait <= 1.1


def test_other_programs_use_the_cpus_that_are_neither_idle_nor_own() -> None:
    """Unknown idle time leaves the use of other programs unknown."""
    machine = MachineUse()
    machine.sample()
    assert machine.current(4, 1.0, 0.25).others == pytest.approx(2.0)
    assert machine.current(4, 4.0, 0.25).others == 0.0
    assert machine.current(4, 1.0, None).others is None
