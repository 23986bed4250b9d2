"""Endpoints for the lifecycle of a server: drain it, and change the number of its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from fastapi import APIRouter, Request

from teleloader_server.config import ConfigError
from teleloader_server.permissions import ADMIN, needs
from teleloader_server.problems import HttpProblem
from teleloader_server.web.authentication import GuardedRoute, caller_of, refuse_remote_without_token
from teleloader_server.web.batches import service_of
from teleloader_server.web.guard_manager import ConnectionManager, limits_for
from teleloader_server.web.small_bodies import read_object
from teleloader_shared.errors import InvalidSpec
from teleloader_shared.messages import DRAIN_PATH, WORKERS_PATH

MAX_WORKERS: Final = 1024
MAX_BODY_BYTES: Final = 1024


@dataclass(eq=False)
class Lifecycle:
    """State and control of a server's shutdown."""

    exit_requested: asyncio.Event
    """Set when the shutdown begins."""
    connections: ConnectionManager
    drain: Callable[[], None] | None = None
    """Function that begins the shutdown; None if the server is embedded in a program, which shuts it down.

    Repeated calls have no effect.
    """


def make_lifecycle_router() -> APIRouter:
    """Create the router with the endpoints for the lifecycle.

    The endpoints use `service` and `lifecycle` of the application's state.
    """
    router = APIRouter(route_class=GuardedRoute)

    @router.get(DRAIN_PATH, summary="State of the shutdown, and number of requests in flight")
    @needs(ADMIN)
    async def status(request: Request) -> dict[str, Any]:
        return _status(_lifecycle_of(request))

    @router.post(DRAIN_PATH, status_code=202, summary="Withdraw from directories, complete pending requests, exit")
    @needs(ADMIN)
    async def drain(request: Request) -> dict[str, Any]:
        refuse_remote_without_token(request)
        lifecycle = _lifecycle_of(request)
        if lifecycle.drain is None:
            raise HttpProblem(409, "CannotDrain", "this server is embedded in another program: stop the program")
        lifecycle.drain()
        return _status(lifecycle)

    @router.put(
        WORKERS_PATH,
        summary="Change the number of shared workers while the server runs",
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {}}}},
    )
    @needs(ADMIN)
    async def workers(request: Request) -> dict[str, int]:
        refuse_remote_without_token(request)
        count = (await read_object(request, MAX_BODY_BYTES)).get("num_workers")
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_WORKERS:
            raise HttpProblem(
                422, "InvalidRequest", f'invalid body: expected JSON {{"num_workers": N}} with N in [1, {MAX_WORKERS}]'
            )
        caller_of(request).authorize(ADMIN)  # again: the token may have been revoked before the body arrived
        try:
            service = service_of(request)
            limits = limits_for(service.client_limits, count * len(service.engines.revisions))
            service.resize(count)
            _lifecycle_of(request).connections.limits = limits
        except (ConfigError, InvalidSpec) as error:
            raise HttpProblem(409, "CannotResize", str(error)) from None
        return {"num_workers": count}

    return router


def _status(lifecycle: Lifecycle) -> dict[str, Any]:
    state = "draining" if lifecycle.exit_requested.is_set() else "ready"
    return {"state": state, "in_flight": lifecycle.connections.in_flight - 1}  # without this request


def _lifecycle_of(request: Request) -> Lifecycle:
    return cast("Lifecycle", request.app.state.lifecycle)
