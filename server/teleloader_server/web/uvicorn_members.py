"""Members of uvicorn and websockets that the server overrides or uses, although they are not documented for that.

Another version may rename one: the override would then never be called, and a limit would hold no more, without an
error. So each is looked up by its name when the server starts.
"""

from __future__ import annotations

import dis
from collections.abc import Mapping
from types import FunctionType
from typing import Final

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.server import ServerProtocol

from teleloader_server.config import ConfigError

TESTED: Final = {"uvicorn": "0.54.0", "websockets": "17.4"}
"""Versions that the container images have and the tests run with."""

MEMBERS: Final[Mapping[type, tuple[str, ...]]] = {
    HttpToolsProtocol: (
        "_should_upgrade", "_unset_keepalive_if_required", "client", "connection_lost", "connection_made", "cycle",
        "data_received", "expect_100_continue", "flow", "handle_websocket_upgrade", "headers", "loop", "on_body",
        "on_header", "on_headers_complete", "on_message_begin", "on_message_complete", "on_response_complete", "on_url",
        "parser", "pause_writing", "resume_writing", "server_state", "shutdown", "transport", "url",
    ),
    RequestResponseCycle: (
        "disconnected", "keep_alive", "message_event", "response_complete", "response_started", "scope",
    ),
    FlowControl: ("read_paused", "resume_reading"),
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
    """Check that the installed versions have all `MEMBERS`.

    Raises:
        ConfigError: One is missing; the message names it.
    """
    for owner, names in MEMBERS.items():
        known = members_of(owner)
        for name in names:
            if name not in known:
                package = owner.__module__.partition(".")[0]
                raise ConfigError(
                    f"{package} has no {owner.__name__}.{name}: the server's limits of connections depend on it. "
                    f"Install the tested version: pip install {package}=={TESTED[package]}"
                )


def members_of(owner: type) -> set[str]:
    """Return the names of a class' members, and of the attributes that its methods assign."""
    members = [item for base in owner.__mro__[:-1] for item in vars(base).items()]
    found = {name for name, _ in members}
    for _, member in members:
        if isinstance(member, FunctionType):
            found |= {step.argval for step in dis.get_instructions(member) if step.opname == "STORE_ATTR"}
    return found
