"""Actors of a fleet: one registry on the head node, and the servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import ray
from ray.util import get_node_ip_address

from teleloader.api.control import Server
from teleloader.api.credentials import Credentials
from teleloader_server.fleet.scaler import Report, report_of
from teleloader_server.ray.process import ServerProcess, ServerStatus
from teleloader_server.ray.settings import FleetSettings
from teleloader_shared.secret import Secret

NAMESPACE: Final = "teleloader"
MAX_CALLS: Final = 4
"""Concurrent calls of an actor, so that it reports its status while it drains the server."""
HEAD: Final = {"node:__internal_head__": 0.001}
"""Ray's resource of the head node. If its IP address changes, running servers announce themselves to the former one."""
NODE_ID: Final = "ray.io/node-id"
"""Ray's label of each node."""
STATS_TIMEOUT_S: Final = 3.0


class Access(NamedTuple):
    """URL of a fleet's registry, and the credentials of clients."""

    registry: str
    ca: str
    """CA certificate in PEM format."""
    token: Secret


class _ServerActor:
    """Actor that runs a server in a child process."""

    _process: ServerProcess

    def status(self) -> ServerStatus:
        """Return the status of the server."""
        return self._process.status

    def drain(self) -> None:
        """Complete pending requests, stop the server, and end this actor, also if the caller has exited."""
        self._process.stop()
        ray.actor.exit_actor()


class Registry(_ServerActor):
    """Actor that holds the settings of a fleet, starts the actors of its servers, and runs their registry.

    The settings are an argument, so that Ray restarts the actor with the same secrets.

    Args:
        settings: Settings of the fleet.
    """

    def __init__(self, settings: FleetSettings) -> None:
        host = get_node_ip_address()
        self._settings = settings
        self._url = f"https://{f'[{host}]' if ':' in host else host}:{settings.registry_port}"
        self._process = settings.start_registry(host)

    def access(self) -> Access:
        """Return the URL of the registry, and the credentials of clients."""
        return Access(self._url, self._settings.authority.certificate, self._settings.client_token)

    def start(self, which: Sequence[int], avoid: Sequence[str]) -> None:
        """Create the actors of servers; their runtime environment is that of this actor.

        Args:
            which: Numbers of the servers.
            avoid: IDs of nodes on which Ray must not place them.
        """
        settings = self._settings
        where = {"label_selector": {NODE_ID: f"!in({','.join(avoid)})"}} if avoid else {}
        for name in (server_name(settings.name, number) for number in which):
            if not _exists(name):  # it does if Ray repeats this call after a restart of this actor
                create(LoaderServer, name, {**settings.resources, **where}, settings, self._url)


class LoaderServer(_ServerActor):
    """Actor that runs a server of a fleet.

    Args:
        settings: Settings of the fleet.
        registry: URL of the registry.
    """

    def __init__(self, settings: FleetSettings, registry: str) -> None:
        self._process = settings.start_server(get_node_ip_address(), registry)
        self._credentials = Credentials(settings.client_token, settings.authority.certificate)

    def report(self) -> Report:
        """Return the state of the server for the scaler.

        Raises:
            LookupError: If the server is not ready.
            TeleloaderError: If the server does not respond.
        """
        if not (urls := self.status().urls):
            raise LookupError("the server is not ready")
        stats = Server(urls[0], STATS_TIMEOUT_S, self._credentials).stats(0)
        return report_of(stats, ray.get_runtime_context().get_node_id())


def create(actor: type, name: str, options: dict[str, Any], *arguments: Any) -> None:
    """Create an actor that outlives the driver, and that Ray restarts on another node if its node fails.

    Raises:
        ValueError: If an actor of this name exists.
    """
    options = {
        "name": name, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1,
        "scheduling_strategy": "SPREAD", "max_concurrency": MAX_CALLS, **options,
    }  # fmt: skip
    ray.remote(**options)(actor).remote(*arguments)


def _exists(name: str) -> bool:
    try:
        ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def server_name(fleet: str, number: int) -> str:
    """Return the name of the actor of a server."""
    return f"{fleet}/{number}"


def autoscaler_name(fleet: str) -> str:
    """Return the name of the actor that scales a fleet."""
    return f"{fleet}/autoscaler"
