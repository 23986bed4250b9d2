"""Measurements of the TCP connections to clients (``TCP_INFO``), read only when statistics are requested."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Final, NamedTuple

from teleloader_server.dispatch.rates import RateWindow, as_share
from teleloader_server.stats.evidence import Link
from teleloader_shared.stats import WINDOW

_TCP_INFO: Final = struct.Struct("=8B24I4Q6I4Q")
"""``struct tcp_info`` of Linux 4.9 and later, up to ``tcpi_sndbuf_limited``."""
_RTT, _RETRANSMITTED, _SEGMENTS, _DELIVERY_RATE, _BUSY, _UNREAD = 23, 31, 41, 42, 43, 44
"""Positions of fields in `_TCP_INFO`."""
_MICROSECONDS: Final = 1e6


class _State(NamedTuple):
    """State of a TCP connection; times in seconds."""

    rtt: float
    delivery_rate: float
    segments: float
    retransmitted: float
    busy: float
    unread: float


def measure(connections: MutableMapping[asyncio.BaseTransport, RateWindow | None], now: float) -> Link | None:
    """Return the state of a client's connections together; None if none is open.

    Fractions of time are known from the second measurement of a connection on.

    Args:
        connections: Transports, each with the window of its last measurements, which this function updates.
        now: Current time in seconds.
    """
    found = [link for transport in connections if (link := _link(connections, transport, now)) is not None]
    known = [link for link in found if link.busy is not None]
    if not found:
        return None
    return Link(
        rtt=max(link.rtt for link in found),
        delivery_rate=sum(link.delivery_rate for link in found),
        retransmitted=max((link.retransmitted or 0.0 for link in known), default=None),
        busy=max((link.busy or 0.0 for link in known), default=None),
        unread=max((link.unread or 0.0 for link in known), default=None),
    )


def _link(
    connections: MutableMapping[asyncio.BaseTransport, RateWindow | None], transport: asyncio.BaseTransport, now: float
) -> Link | None:
    state = None if transport.is_closing() else _state_of(transport.get_extra_info("socket"))
    if state is None:
        return None
    totals, window = state[2:], connections[transport]
    if window is None or window.span(now) > 2 * WINDOW:
        connections[transport] = RateWindow(now, *totals)
        return Link(state.rtt, state.delivery_rate)
    segments, retransmitted, busy, unread = window.rates(now, *totals)
    window.mark(now, *totals)
    return Link(
        state.rtt,
        state.delivery_rate,
        as_share(retransmitted / segments) if segments else 0.0,
        as_share(busy),
        as_share(unread),
    )


def _state_of(connected: socket.socket | None) -> _State | None:
    """Return the state of a socket; None if it is closed, or the system does not report it."""
    if connected is None:
        return None
    with suppress(OSError, struct.error, ValueError):
        found = _TCP_INFO.unpack_from(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
        return _State(
            found[_RTT] / _MICROSECONDS, found[_DELIVERY_RATE], found[_SEGMENTS], found[_RETRANSMITTED],
            found[_BUSY] / _MICROSECONDS, found[_UNREAD] / _MICROSECONDS,
        )  # fmt: skip
    return None
