"""Calls of the actors of a fleet: status, start and end of servers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RuntimeEnvSetupError, TaskCancelledError
from ray.util import list_named_actors

from teleloader_server.ray.actors import NAMESPACE, server_name
from teleloader_server.ray.process import ServerStatus

RESPONSE_TIMEOUT_S: Final = 5.0
"""Seconds after which an actor that does not respond counts as not started."""
DRAIN_TIMEOUT_S: Final = 600.0
"""Seconds after which a server that does not exit is killed."""
REGISTRY_TIMEOUT_S: Final = 600.0
"""Seconds for which calls wait while Ray starts the actor of the registry, including its runtime environment."""


def registry(fleet: str) -> Any:
    """Return the actor of a fleet's registry.

    Raises:
        LookupError: If the cluster has no fleet of this name.
    """
    try:
        return ray.get_actor(fleet, namespace=NAMESPACE)
    except ValueError:
        fleets = ", ".join(sorted(name for name in _actor_names() if "/" not in name)) or "none"
        raise LookupError(
            f"this Ray cluster has no fleet {fleet!r} (its fleets: {fleets}). Start it with teleloader-server ray up "
            f"--name {fleet}"
        ) from None


def call_registry(fleet: str, method: str, *arguments: Any) -> Any:
    """Call a method of a fleet's registry, and wait while Ray starts or restarts it.

    Raises:
        LookupError: If the cluster has no fleet of this name.
        TimeoutError: If the actor of the registry does not run.
    """
    call = getattr(registry(fleet), method).options(max_task_retries=-1)
    try:
        return ray.get(call.remote(*arguments), timeout=REGISTRY_TIMEOUT_S)
    except GetTimeoutError:
        raise TimeoutError(
            f"the registry of fleet {fleet!r} did not respond within {REGISTRY_TIMEOUT_S:g} s. Check that the head "
            "node runs, and the state of the registry with: teleloader-server ray status"
        ) from None


def servers(fleet: str) -> dict[int, Any]:
    """Return the actors of a fleet's servers by number, also those that Ray has not placed yet."""
    prefix = server_name(fleet, 0)[:-1]
    names = _actor_names()
    numbers = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    actors = {}
    for number in sorted(int(number) for number in numbers if number.isdigit()):
        with suppress(ValueError):  # removed in the meantime
            actors[number] = ray.get_actor(server_name(fleet, number), namespace=NAMESPACE)
    return actors


def start(fleet: str, count: int, used: Collection[int], avoid: Collection[str] = ()) -> list[int]:
    """Create the actors of further servers; return their numbers.

    Args:
        fleet: Name of the fleet.
        count: Number of servers to start; none if it is negative.
        used: Numbers of the present servers.
        avoid: IDs of nodes on which Ray must not place the servers.
    """
    free = list(itertools.islice((number for number in itertools.count() if number not in used), max(0, count)))
    if free:
        call_registry(fleet, "start", free, sorted(avoid))
    return free


def stop(actors: Sequence[Any]) -> None:
    """Drain the servers of actors, and remove the actors, also those that Ray has not started."""
    running = [actor for actor, status in zip(actors, statuses(actors), strict=True) if status.state != "pending"]
    draining = [actor.drain.remote() for actor in running]
    if draining:
        ray.wait(draining, num_returns=len(draining), timeout=DRAIN_TIMEOUT_S)
    for actor in actors:
        ray.kill(actor)


def statuses(actors: Sequence[Any]) -> list[ServerStatus]:
    """Return the statuses of actors; pending for an actor that does not respond."""
    return [_status(request) for request in wait([actor.status.remote() for actor in actors])]


def wait(requests: list[Any]) -> list[Any]:
    """Wait for responses of actors, and cancel the requests of those that do not respond.

    Ray would keep the requests until the actors start.
    """
    if requests:
        _, pending = ray.wait(requests, num_returns=len(requests), timeout=RESPONSE_TIMEOUT_S)
        for request in pending:
            ray.cancel(request)
    return requests


def _status(request: Any) -> ServerStatus:
    try:
        status: ServerStatus = ray.get(request, timeout=0)
    except RuntimeEnvSetupError as error:
        return ServerStatus("failed", problem=str(error))
    except (GetTimeoutError, RayActorError, TaskCancelledError):
        return ServerStatus("pending")
    return status


def _actor_names() -> list[str]:
    """Return the names of the actors of all fleets; those of servers and autoscalers contain a slash."""
    return [actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
