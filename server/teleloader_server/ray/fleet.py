"""Functions ``up`` and ``connect``, and the fleet that they return."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple

import ray
from ray.exceptions import RayError

from teleloader import RemoteDataset
from teleloader_server.config import ConfigError
from teleloader_server.fleet.scaler import WINDOW_S
from teleloader_server.ray import control
from teleloader_server.ray.actors import HEAD, NAMESPACE, Access, Registry, autoscaler_name, create
from teleloader_server.ray.autoscaler import Autoscaler
from teleloader_server.ray.process import ServerStatus
from teleloader_server.ray.settings import DEFAULT_REGISTRY_PORT, FleetSettings

POLL_S: Final = 0.5
PATIENCE_S: Final = 10.0
"""Seconds after which `up` logs the states of servers that are not ready."""
DEFAULT_TIMEOUT_S: Final = 600.0
REMOVAL_TIMEOUT_S: Final = 30.0
"""Seconds for which Ray may take to release the name of a killed actor."""


logger = logging.getLogger("teleloader")


class FleetStatus(NamedTuple):
    """Status of a fleet."""

    registry: ServerStatus
    servers: dict[int, ServerStatus]
    """By number of the server."""
    limits: tuple[int, int] | None
    """Minimum and maximum number of servers; None without autoscaling."""


class Fleet:
    """Fleet of servers on a Ray cluster. Can be pickled.

    Args:
        name: Name of the fleet.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def dataset(self, name: str | None = None, **options: Any) -> RemoteDataset:
        """Connect to a dataset of the fleet.

        The dataset itself does not use Ray, so training continues while Ray's head node is unavailable.

        Args:
            name: Name of the dataset; None for the only one.
            options: Further arguments of `RemoteDataset`.

        Raises:
            LookupError: If the cluster has no fleet of this name.
            TimeoutError: If the actor of the registry does not run.
            ServerUnavailable: If no server responded within `reconnect_timeout`.
        """
        access = self.access()
        return RemoteDataset(f"registry+{access.registry}", name, token=access.token, ca=access.ca, **options)

    def access(self) -> Access:
        """Return the URL of the registry, and the credentials of clients.

        Raises:
            LookupError: If the cluster has no fleet of this name.
            TimeoutError: If the actor of the registry does not run.
        """
        access: Access = control.call_registry(self.name, "access")
        return access

    def status(self) -> FleetStatus:
        """Return the status of the registry and of each server."""
        found = control.servers(self.name)
        registry, *servers = control.statuses([control.registry(self.name), *found.values()])
        return FleetStatus(registry, dict(zip(found, servers, strict=True)), self._limits())

    def scale(self, servers: int | tuple[int, int], downscale_delay: float = WINDOW_S) -> None:
        """Change the number of servers; surplus servers are drained.

        Servers that are not ready are removed first, then those with the highest numbers. Failed servers are replaced.
        Servers that Ray cannot place yet are started as soon as a node has room.

        Args:
            servers: Number of servers, or its minimum and maximum: the fleet then starts and drains servers with the
                demand of the training processes.
            downscale_delay: Seconds for which a server must not have been needed before autoscaling removes it.

        Raises:
            ConfigError: If `servers` is invalid.
            LookupError: If the cluster has no fleet of this name.
            TimeoutError: If the actor of the registry does not run.
        """
        minimum, maximum = _limits_of(servers)
        control.registry(self.name)
        self._stop_autoscaler()
        found = control.servers(self.name)
        statuses = control.statuses(list(found.values()))
        states = {number: status.state for number, status in zip(found, statuses, strict=True)}
        ended = [number for number, state in states.items() if state in {"failed", "stopped"}]
        active = [number for number in states if number not in ended and states[number] != "draining"]
        active.sort(key=lambda number: (states[number] != "ready", number))
        control.stop([found[number] for number in (*ended, *active[maximum:])])
        control.start(self.name, minimum - len(active), found)
        if isinstance(servers, tuple):
            options = {"num_cpus": 0, "resources": HEAD}
            create(Autoscaler, autoscaler_name(self.name), options, self.name, minimum, maximum, downscale_delay)

    def drain(self, number: int) -> None:
        """Remove a server after it has completed its pending requests; return when it has exited.

        With autoscaling, a server that is still needed is replaced.

        Raises:
            LookupError: If the fleet has no server of this number.
        """
        found = control.servers(self.name)
        if number not in found:
            raise LookupError(f"fleet {self.name!r} has no server {number}: its servers are {list(found)}")
        control.stop([found[number]])

    def down(self) -> None:
        """Drain all servers, and remove the fleet.

        Raises:
            LookupError: If the cluster has no fleet of this name.
        """
        self._stop_autoscaler()
        servers = list(control.servers(self.name).values())
        control.stop(servers)
        try:
            registry = control.registry(self.name)
        except LookupError:
            if not servers:  # otherwise, the actor of the registry was removed by other means
                raise
        else:
            control.stop([registry])

    def __repr__(self) -> str:
        return f"Fleet({self.name!r})"

    def _limits(self) -> tuple[int, int] | None:
        try:
            autoscaler = ray.get_actor(autoscaler_name(self.name), namespace=NAMESPACE)
            limits: tuple[int, int] = ray.get(autoscaler.limits.remote(), timeout=control.RESPONSE_TIMEOUT_S)
        except (ValueError, RayError):
            return None
        return limits

    def _stop_autoscaler(self) -> None:
        deadline = time.monotonic() + REMOVAL_TIMEOUT_S
        with suppress(ValueError):
            while time.monotonic() < deadline:
                ray.kill(ray.get_actor(autoscaler_name(self.name), namespace=NAMESPACE))
                time.sleep(0.1)

    def _await_first(self, timeout: float) -> None:
        """Wait until a server is ready.

        Raises:
            ConfigError: If a server or the registry cannot start with these arguments.
            TimeoutError: If no server is ready within `timeout` seconds.
        """
        began = time.monotonic()
        is_told = False
        while True:
            registry, servers, _ = self.status()
            states = [server.state for server in servers.values()]
            invalid = [server.problem for server in servers.values() if server.state == "failed"]
            if problem := registry.problem or "".join(invalid[:1]):
                raise ConfigError(f"cannot start fleet {self.name!r}: {problem}")
            if registry.state == "ready" and "ready" in states:
                return
            waited = time.monotonic() - began
            if waited > PATIENCE_S and not is_told:
                is_told = True
                logger.warning(
                    "no server of fleet %r is ready yet (%s); waiting for up to %g s, see also: ray status",
                    self.name, ", ".join(states), timeout,
                )  # fmt: skip
            if waited > timeout:
                problems = "".join(f"\n{server.problem}" for server in servers.values() if server.problem)
                raise TimeoutError(
                    f"no server of fleet {self.name!r} is ready after {timeout:g} s: their states are "
                    f"{', '.join(states)}. Servers remain pending while no node has enough free CPUs and memory. Check "
                    f"the cluster with: ray status{problems}"
                )
            time.sleep(POLL_S)


def up(
    name: str,
    *arguments: str,
    servers: int | tuple[int, int],
    num_workers: int,
    num_cpus: float | None = None,
    memory: int | None = None,
    registry_port: int = DEFAULT_REGISTRY_PORT,
    downscale_delay: float = WINDOW_S,
    timeout: float = DEFAULT_TIMEOUT_S,
) -> Fleet:
    """Start servers on the Ray cluster to which this process is connected, and wait until the first one is ready.

    The fleet remains after the driver exits. Ray restarts servers on other nodes if their nodes fail. The code of the
    datasets comes from the runtime environment of the driver: ``ray.init(runtime_env={"working_dir": "."})``.

    Args:
        name: Name of the fleet.
        arguments: Arguments of the command ``teleloader-server``: datasets as ``module:name``, and options. The fleet
            itself sets addresses, tokens and certificates.
        servers: Number of servers, or its minimum and maximum, see `Fleet.scale`.
        num_workers: Worker processes of each server.
        num_cpus: CPUs that Ray reserves for each server; None for one per worker.
        memory: Bytes of memory that Ray reserves for each server; None for no reservation.
        registry_port: Port of the registry on the head node.
        downscale_delay: Seconds for which a server must not have been needed before autoscaling removes it.
        timeout: Maximum wait in seconds. Include the time in which an autoscaler adds nodes.

    Raises:
        ConfigError: If the cluster already has a fleet of this name, an argument is invalid, or the datasets cannot be
            built. No fleet remains.
        ray.exceptions.RuntimeEnvSetupError: If Ray cannot create the runtime environment of the driver.
        TimeoutError: If no server is ready within `timeout`. The fleet remains, and continues to start.
    """
    if _limits_of(servers)[0] < 1:
        raise ConfigError(f"invalid number of servers {servers!r}: expected at least 1")
    settings = FleetSettings(
        name=name, arguments=arguments, num_workers=num_workers, registry_port=registry_port,
        num_cpus=max(1, num_workers) if num_cpus is None else num_cpus, memory=memory,
    )  # fmt: skip
    try:
        create(Registry, name, {"num_cpus": 0, "resources": HEAD}, settings)
    except ValueError:
        raise ConfigError(
            f"fleet {name!r} exists: stop it with teleloader-server ray down --name {name}, or change the number of "
            f"servers with connect({name!r}).scale()"
        ) from None
    fleet = Fleet(name)
    # the registry of an earlier fleet was removed by other means: its servers have another CA
    control.stop(list(control.servers(name).values()))
    try:
        fleet.scale(servers, downscale_delay)
        fleet._await_first(timeout)
    except ConfigError:
        fleet.down()
        raise
    return fleet


def connect(name: str) -> Fleet:
    """Return a fleet of the Ray cluster to which this process is connected.

    Args:
        name: Name of the fleet.

    Raises:
        LookupError: If the cluster has no fleet of this name.
    """
    control.registry(name)
    return Fleet(name)


def _limits_of(servers: int | tuple[int, int]) -> tuple[int, int]:
    """Return the minimum and the maximum number of servers."""
    minimum, maximum = servers if isinstance(servers, tuple) else (servers, servers)
    if not (1 if isinstance(servers, tuple) else 0) <= minimum <= maximum:
        raise ConfigError(
            f"invalid number of servers {servers!r}: expected a number, or (minimum, maximum) with a minimum of at "
            f"least 1"
        )
    return minimum, maximum
