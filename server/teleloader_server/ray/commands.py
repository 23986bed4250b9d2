"""Definition of ``teleloader-server ray``: start, show, scale and stop a fleet on a Ray cluster."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import ray
from ray.exceptions import RayError

from teleloader_server.config import ConfigError, parse_size
from teleloader_server.fleet.scaler import WINDOW_S
from teleloader_server.ray.fleet import DEFAULT_TIMEOUT_S, Fleet, FleetStatus, connect, up
from teleloader_server.ray.process import ServerStatus
from teleloader_server.ray.settings import DEFAULT_REGISTRY_PORT
from teleloader_shared.command_line import CommandGroup, as_json
from teleloader_shared.units import counted

DEFAULT_NAME: Final = "loaders"

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _of_fleet(command: _Command) -> _Command:
    """Add the options that select a fleet."""
    for option in (
        click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the fleet."),
        click.option(
            "--address", envvar="RAY_ADDRESS", default="auto", show_default="cluster of this machine",
            help="Address of the Ray cluster, as for ray.init(). Environment variable: RAY_ADDRESS.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@contextmanager
def _connected(address: str, runtime_env: dict[str, Any] | None = None) -> Iterator[None]:
    """Connect to a Ray cluster, and convert errors to those of click."""
    try:
        ray.init(address, runtime_env=runtime_env, log_to_driver=False, logging_level="warning")
    except ConnectionError as error:
        raise click.ClickException(f"cannot connect to the Ray cluster at {address!r}: {error}") from None
    except (ValueError, TypeError, RuntimeError, RayError) as error:  # other versions, or an invalid environment
        raise click.ClickException(f"cannot use the Ray cluster at {address!r}: {error}") from None
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    except LookupError as error:
        raise click.ClickException(error.args[0]) from None
    except (TimeoutError, RayError) as error:
        raise click.ClickException(str(error)) from None
    finally:
        ray.shutdown()


class _Servers(click.ParamType):  # type: ignore[type-arg] # generic since click 8.4; older versions are supported
    """Number of servers, such as 2, or its minimum and maximum, such as 2-16."""

    name = "N or MIN-MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | tuple[int, int]:
        """Parse the text."""
        first, is_range, last = str(value).partition("-")
        if not first.isdecimal() or (is_range and not last.isdecimal()):
            self.fail(f"expected a number such as 2, or a range such as 2-16, got {value!r}", param, ctx)
        return (int(first), int(last)) if is_range else int(first)


_downscale_delay = click.option(
    "--downscale-delay", default=WINDOW_S, show_default=True, type=click.FloatRange(0),
    help="Seconds for which a server must not have been needed before autoscaling removes it.",
)  # fmt: skip


def _object(context: click.Context, parameter: click.Parameter, text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise click.BadParameter(f"invalid JSON: {error}") from None
    if not isinstance(content, dict):
        raise click.BadParameter(f"expected a JSON object, got {text}")
    return content


@click.group(name="ray", cls=CommandGroup)
def commands() -> None:
    """Run a fleet of servers on a Ray cluster.

    \b
      teleloader-server ray up --servers 2 --num-workers 8 my_package.data:train
      teleloader-server ray status

    Training processes in the cluster find the servers with teleloader_server.ray.connect("loaders").
    """  # noqa: D301 - the escapes are click's


@commands.command("up")
@_of_fleet
@click.option(
    "--servers", required=True, type=_Servers(), help="Number of servers, or MIN-MAX to adapt it to the demand."
)
@click.option("-n", "--num-workers", required=True, type=click.IntRange(0), help="Worker processes of each server.")
@click.option(
    "--num-cpus", type=click.FloatRange(0, min_open=True), show_default="one per worker",
    help="CPUs that Ray reserves for each server.",
)  # fmt: skip
@click.option("--memory", metavar="SIZE", help="Memory that Ray reserves for each server, such as 16GiB.")
@click.option(
    "--registry-port", default=DEFAULT_REGISTRY_PORT, show_default=True, type=click.IntRange(1, 65535),
    help="Port of the fleet's registry on the head node.",
)  # fmt: skip
@_downscale_delay
@click.option(
    "--working-dir", metavar="DIR", help="Folder with the code of the datasets, which Ray copies to the nodes."
)
@click.option(
    "--runtime-env-json", "runtime_env", default="{}", metavar="JSON", callback=_object,
    help="Runtime environment of the servers, as for ray.init().",
)  # fmt: skip
@click.option(
    "--timeout", default=DEFAULT_TIMEOUT_S, show_default=True, type=click.FloatRange(0),
    help="Maximum wait in seconds for the first server.",
)  # fmt: skip
@click.argument("arguments", nargs=-1, required=True, metavar="DATASET... [-- OPTIONS]")
def up_(
    name: str,
    address: str,
    servers: int | tuple[int, int],
    num_workers: int,
    num_cpus: float | None,
    memory: str | None,
    registry_port: int,
    downscale_delay: float,
    working_dir: str | None,
    runtime_env: dict[str, Any],
    timeout: float,
    arguments: tuple[str, ...],
) -> None:
    """Start a fleet; return when the first server is ready.

    Each server runs teleloader-server with the datasets and the OPTIONS after --.
    """
    if working_dir is not None:
        runtime_env["working_dir"] = working_dir
    with _connected(address, runtime_env):
        fleet = up(
            name, *arguments, servers=servers, num_workers=num_workers, num_cpus=num_cpus,
            memory=None if memory is None else parse_size(memory), registry_port=registry_port,
            downscale_delay=downscale_delay, timeout=timeout,
        )  # fmt: skip
        _show(fleet.status())


@commands.command()
@_of_fleet
@as_json
def status(name: str, address: str, as_json: bool) -> None:
    """Show the servers of a fleet."""
    with _connected(address):
        found = connect(name).status()
        if as_json:
            servers = {number: server._asdict() for number, server in found.servers.items()}
            click.echo(json.dumps({"registry": found.registry._asdict(), "servers": servers, "limits": found.limits}))
        else:
            _show(found)


@commands.command()
@_of_fleet
@_downscale_delay
@click.argument("servers", type=_Servers())
def scale(name: str, address: str, servers: int | tuple[int, int], downscale_delay: float) -> None:
    """Change the number of servers; surplus servers are drained.

    With MIN-MAX, the fleet starts and drains servers with the demand of the training processes.
    """
    with _connected(address):
        connect(name).scale(servers, downscale_delay)
    count = counted(servers, "server") if isinstance(servers, int) else "{} to {} servers".format(*servers)
    click.echo(f"fleet {name!r} has {count}", err=True)


@commands.command()
@_of_fleet
@click.argument("which", type=click.IntRange(0))
def drain(name: str, address: str, which: int) -> None:
    """Remove the server with the number WHICH after it has completed its pending requests."""
    with _connected(address):
        connect(name).drain(which)
    click.echo(f"server {which} of fleet {name!r} was drained", err=True)


@commands.command()
@_of_fleet
@click.argument("folder", type=click.Path(path_type=Path))
def credentials(name: str, address: str, folder: Path) -> None:
    """Write the token and the CA for clients to FOLDER; print a shell command that sets variables for the tools.

    \b
      eval "$(teleloader-server ray credentials fleet)"
      teleloader stats
    """  # noqa: D301 - the escapes are click's
    with _connected(address):
        access = connect(name).access()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        for file, content in {"token": access.token, "ca.pem": access.ca}.items():
            with open(folder / file, "w", opener=_private) as written:
                written.write(content)
    except OSError as error:
        raise click.ClickException(f"cannot write to folder {str(folder)!r}: {error.strerror}") from None
    values = {
        "TELELOADER_TOKEN_FILE": str(folder.absolute() / "token"),
        "TELELOADER_CA": str(folder.absolute() / "ca.pem"),
        "TELELOADER_URL": f"registry+{access.registry}",
    }
    click.echo("unset TELELOADER_TOKEN")  # it would take precedence over the file
    click.echo(f"export {' '.join(f'{variable}={shlex.quote(value)}' for variable, value in values.items())}")


@commands.command()
@_of_fleet
def down(name: str, address: str) -> None:
    """Drain all servers, and remove the fleet."""
    with _connected(address):
        Fleet(name).down()
    click.echo(f"fleet {name!r} was removed", err=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _show(found: FleetStatus) -> None:
    rows = [("registry", found.registry), *((str(number), server) for number, server in found.servers.items())]
    for label, server in rows:
        click.echo(_line(label, server))
    if found.limits:
        click.echo("autoscaling from {} to {} servers".format(*found.limits))
    if any(server.state == "pending" for _, server in rows):
        click.echo(
            "pending: no node has enough free CPUs and memory, or only nodes whose CPUs are busy; see: ray status"
        )
    for label, server in rows:
        if server.problem:
            click.echo(f"\n{label}: {server.problem}")


def _line(label: str, server: ServerStatus) -> str:
    restarts = f"  {counted(server.restarts, 'restart')}" if server.restarts else ""
    return f"{label:<9} {server.state:<10} {' '.join(server.urls)}{restarts}".rstrip()
