"""Start-up check for the undocumented members of uvicorn and websockets that the server overrides or uses.

Another version of these packages may rename a member. An override would then never be called, and a limit would be
disabled without an error. (`guard` overrides no member: it calls methods that asyncio defines, and `shutdown`; if one
is missing, the first request raises an error.)
"""

from __future__ import annotations

import dis
from collections.abc import Mapping
from types import FunctionType
from typing import Final

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.server import ServerProtocol

from teleloader_server.config import ConfigError

TESTED: Final = {"uvicorn": "0.54.0", "websockets": "17.4"}
"""Versions that the container images and the tests use."""

MEMBERS: Final[Mapping[type, tuple[str, ...]]] = {
    WebSocketsSansIOProtocol: (
        "client", "close_sent", "conn", "connection_lost", "connection_made", "curr_msg_data_type", "data_received",
        "default_headers", "frames", "handle_bytes", "handle_cont", "handle_parser_exception", "handle_ping",
        "handle_text", "handshake_complete", "handshake_initiated", "loop", "pause_writing", "queue", "read_paused",
        "receive", "resume_writing", "scope", "send", "shutdown", "transport",
    ),
    ServerProtocol: ("data_to_send", "debug", "fail", "handshake_exc", "reader"),
    uvicorn.Server: (
        "capture_signals", "config", "force_exit", "lifespan", "main_loop", "on_tick", "server_state", "servers",
        "should_exit", "shutdown", "started", "startup",
    ),
}  # fmt: skip


def check_members() -> None:
    """Check that all `MEMBERS` exist in the installed versions of uvicorn and websockets.

    Raises:
        ConfigError: If a member is missing; the message names the member.
    """
    for owner, names in MEMBERS.items():
        known = members_of(owner)
        for name in names:
            if name not in known:
                package = owner.__module__.partition(".")[0]
                raise ConfigError(
                    f"{package} has no {owner.__name__}.{name}: the connection limits of the server require it. "
                    f"Install the tested version: pip install {package}=={TESTED[package]}"
                )


def members_of(owner: type) -> set[str]:
    """Return the names of a class's members, and of attributes assigned in the class's methods."""
    members = [item for base in owner.__mro__[:-1] for item in vars(base).items()]
    found = {name for name, _ in members}
    for _, member in members:
        if isinstance(member, FunctionType):
            found |= {step.argval for step in dis.get_instructions(member) if step.opname == "STORE_ATTR"}
    return found
