"""Endpoints of the registry: the servers of a fleet announce themselves, and clients list them."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any, Final, cast
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from teleloader_server.fleet.registry import MAX_PENDING_PER_TOKEN, MAX_SERVERS_PER_TOKEN, Registry, instance_of
from teleloader_server.fleet.verification import Unverified, is_loopback, verify
from teleloader_server.permissions import ANNOUNCE, READ, STATS, needs
from teleloader_server.problems import HttpProblem
from teleloader_server.web.authentication import GuardedRoute, address_of, caller_of, refuse_remote_without_token
from teleloader_server.web.small_bodies import read_object
from teleloader_shared.directory import MAX_SERVERS, Entry, server_url
from teleloader_shared.errors import ServerUnavailable
from teleloader_shared.messages import SERVERS_PATH, STATS_PATH
from teleloader_shared.server_summary import ServerSummary, summary_of

MAX_ANNOUNCEMENT_BYTES: Final = 8192
MIN_KEY: Final = 32
"""Minimum length of the secret key in an announcement, in characters, against guessing."""
MAX_KEY: Final = 128

_EXPECTED: Final = 'invalid announcement: expected JSON {"url": "http://host:port", "instance_key": "..."}'


def make_servers_router() -> APIRouter:
    """Create the router with the endpoints of the registry.

    The endpoints use `registry` and `client_tls` of the application's state.
    """
    router = APIRouter(route_class=GuardedRoute)

    @router.get(SERVERS_PATH, summary="Servers that announced themselves to this registry")
    @needs(READ)
    async def servers(request: Request) -> dict[str, list[dict[str, str]]]:
        # on another machine, a loopback URL leads to a different server
        local = is_loopback(address_of(request))
        listed = _registry_of(request).servers(time.monotonic())
        return {"servers": [entry._asdict() for entry in listed if local or not is_loopback(_host_of(entry))]}

    @router.get(
        STATS_PATH + "/servers",
        summary="Announced servers with their figures, and servers whose announcements have ended",
    )
    @needs(STATS)
    async def statuses(request: Request) -> dict[str, Any]:
        local = is_loopback(address_of(request))
        found = _registry_of(request).statuses(time.monotonic())
        return {
            "instance": instance_of(request.app.state.instance_key),
            "servers": [
                {
                    **status.entry._asdict(),
                    "lost_for": status.lost_for,
                    "summary": None if status.summary is None else asdict(status.summary),
                }
                for status in found
                if local or not is_loopback(_host_of(status.entry))
            ],
        }

    @router.post(
        SERVERS_PATH,
        summary="Announce a server, or renew its announcement",
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {}}}},
    )
    @needs(ANNOUNCE)
    async def announce(request: Request) -> Response:
        refuse_remote_without_token(request)
        entry, summary = await _announced(request)
        owner, registry = caller_of(request).authorize(ANNOUNCE).name, _registry_of(request)
        outcome = registry.announce(entry, owner, time.monotonic(), summary)
        if outcome == "verify":
            outcome = "listed" if await _is_verified(request, entry, owner) else "full"
        if outcome == "full":
            raise ServerUnavailable(
                f"the registry cannot list {entry.url} now: the limits are {MAX_SERVERS:,} servers, of which "
                f"{MAX_SERVERS_PER_TOKEN:,} with one token, and {MAX_PENDING_PER_TOKEN} verifications of one token at "
                "the same time. Retry later, or announce a part of the servers with another token"
            )
        return JSONResponse({"instance": entry.instance, "state": outcome}, 200 if outcome == "listed" else 202)

    @router.delete(SERVERS_PATH + "/{instance}", status_code=204, summary="Withdraw a server that stops")
    @needs(ANNOUNCE)
    async def withdraw(request: Request, instance: str) -> None:
        refuse_remote_without_token(request)
        _registry_of(request).withdraw(instance, caller_of(request).authorize(ANNOUNCE).name)

    return router


async def _is_verified(request: Request, entry: Entry, owner: str) -> bool:
    """Verify a pending announcement, and list the server; return False if the registry is full, or it was withdrawn.

    Raises:
        HttpProblem: If the server does not respond at its URL (status 422).
        AccessDenied: If the token was revoked meanwhile.
    """
    registry = _registry_of(request)
    try:
        await verify(entry, address_of(request), request.app.state.client_tls.context, owner)
        caller_of(request).authorize(ANNOUNCE)
        return registry.verified(entry, time.monotonic())
    except Unverified as error:
        raise HttpProblem(422, "ServerNotVerified", str(error)) from None
    finally:
        registry.refuted(entry)  # no-op if it is listed


async def _announced(request: Request) -> tuple[Entry, ServerSummary | None]:
    """Return the server that the body of a request announces, and its figures if they are valid."""
    content = await read_object(request, MAX_ANNOUNCEMENT_BYTES)
    key = content.get("instance_key")
    if not isinstance(key, str) or not MIN_KEY <= len(key) <= MAX_KEY or not key.isascii():
        raise HttpProblem(422, "InvalidRequest", f"{_EXPECTED}, with a key of {MIN_KEY} to {MAX_KEY} ASCII characters")
    try:
        return Entry(server_url(content.get("url")), instance_of(key)), summary_of(content.get("summary"))
    except ValueError as error:
        raise HttpProblem(422, "InvalidRequest", str(error)) from None


def _host_of(entry: Entry) -> str:
    return urlsplit(entry.url).hostname or ""


def _registry_of(request: Request) -> Registry:
    return cast("Registry", request.app.state.registry)
