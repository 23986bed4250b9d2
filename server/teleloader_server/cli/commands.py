"""Definitions of the commands ``teleloader-server`` and ``teleloader-server check``."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, get_args

import click
import uvloop

from teleloader_server import audit, logs
from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.auth.identity_file import IdentityFile
from teleloader_server.auth.tls import ClientCertificates, TlsFiles
from teleloader_server.auth.token_file import TOKENS_VARIABLE, TokenFile
from teleloader_server.cli import check as checking
from teleloader_server.cli.banner import log_start, show_banner
from teleloader_server.cli.fleet import advertised_url, announcer, fleet_of, fleet_options
from teleloader_server.cli.hosting import HostingCommand, complete_command
from teleloader_server.cli.isolation import isolation_options, pop_isolation, protect_process, secret_files
from teleloader_server.cli.listener import Listener, bind_consecutive
from teleloader_server.cli.parameters import Limit, Size, usage_errors
from teleloader_server.cli.reload import Reloader
from teleloader_server.cli.several import run_several
from teleloader_server.config import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    DEFAULT_SHUTDOWN_GRACE,
    ConfigError,
    DatasetConfig,
    read_toml,
)
from teleloader_server.dispatch.publishing import ConfigSource
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.fleet.supervisor import STOP_SIGNAL
from teleloader_server.limits import (
    DEFAULT_BATCH_TIMEOUT,
    DEFAULT_LIMITS,
    DEFAULT_RETIRE_AFTER,
    ClientLimits,
    Limits,
    default_memory_budget,
    default_num_workers,
)
from teleloader_server.web.app import Server, url_of
from teleloader_server.web.guard_manager import raise_file_limit
from teleloader_server.workers.factory import ConfiguredPools
from teleloader_server.workers.isolation import Isolation, ServerProcess
from teleloader_server.workers.procfs import shortage
from teleloader_server.workers.shared import SharedForkServer
from teleloader_shared.command_line import CONTEXT, as_json, version_option
from teleloader_shared.directory import MAX_PER_MACHINE, DirectoryAddress
from teleloader_shared.exit_codes import EXIT_FAILED, EXIT_USAGE
from teleloader_shared.version import VERSION

DEMO: Final = (
    DatasetConfig(name="digits-train", factory="teleloader_server.demo:digits_train", version="1"),
    DatasetConfig(name="digits-test", factory="teleloader_server.demo:digits_test", version="1"),
)
REPEAT_S: Final = 0.5
"""Seconds after the first signal in which further ones do not abort pending requests.

timeout(1) sends each signal twice: to its child process, and to the process group.
"""

logger = logging.getLogger("teleloader_server")

_Command = TypeVar("_Command", bound=Callable[..., Any])


class ConfigFile(NamedTuple):
    """Path and content of a configuration file."""

    path: Path
    limits: dict[str, Any]
    datasets: list[DatasetConfig]


def _from_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> ConfigFile | None:
    """Read a configuration file, and use its ``[server]`` table as defaults of the command-line options."""
    if path is None:
        return None
    with usage_errors():
        defaults, limits, datasets = read_toml(path)
    not_in_file = {"config", "demo", "datasets", "version", "limits", "exit_with_parent"}
    known = {option.name for option in server.params} - not_in_file
    for name in defaults:
        if name not in known:
            raise click.UsageError(
                f"unknown key {name!r} in [server] of {path}: expected one of {', '.join(sorted(map(str, known)))}"
            )
    context.default_map = defaults
    return ConfigFile(path, limits, datasets)


def _dataset_arguments(command: _Command) -> _Command:
    """Add the arguments that select the datasets."""
    for option in (
        click.option(
            "-c", "--config", type=click.Path(path_type=Path), is_eager=True, expose_value=True, callback=_from_file,
            help="TOML file with a [server] table (the options of teleloader-server) and a [datasets.NAME] table for "
            "each dataset.",
        ),
        click.option("--demo", is_flag=True, help="Host the embedded dataset of handwritten digits."),
        click.argument("datasets", nargs=-1, metavar="[DATASET]...", shell_complete=complete_command),
    ):  # fmt: skip
        command = option(command)
    return command


_FILE: Final = click.Path(path_type=Path, dir_okay=False)


def _listener_options(command: _Command) -> _Command:
    """Add the options for authentication and TLS."""
    for option in reversed((
        # without the environment variables that click derives: TELELOADER_TOKEN_FILE is the client's credential, and a
        # server that starts in an environment with this variable must not accept it
        click.option(
            "--tokens", type=_FILE, envvar=TOKENS_VARIABLE, allow_from_autoenv=False, help="TOML file with a table per "
            "token: see teleloader-server token --help. Reloaded when it changes. "
            f"Environment variable: {TOKENS_VARIABLE}.",
        ),
        click.option(
            "--token-file", type=_FILE, allow_from_autoenv=False, help="File that contains one token and nothing "
            "else, such as a container's secret. Reloaded when it changes.",
        ),
        click.option(
            "--identity", type=_FILE, help="TOML file with issuers of JWTs (OpenID Connect, Kubernetes service "
            "accounts), and rules that map claims and client certificates to scopes: see docs/identity.md. Reloaded "
            "when it changes.",
        ),
        click.option("--insecure", is_flag=True, help="Disable authentication."),
        click.option(
            "--allowed-host", multiple=True, metavar="NAME", help="Host name to accept in the Host header, besides "
            "IP addresses, localhost and the machine's own name; *.example.com includes subdomains. Repeatable.",
        ),
        click.option("--ssl-certfile", type=_FILE, help="Certificate (PEM) for HTTPS. Reloaded when renewed."),
        click.option("--ssl-keyfile", type=_FILE, help="Private key, if it is not in --ssl-certfile."),
        click.option(
            "--ssl-keyfile-password", help="Password of the private key. Prefer TELELOADER_SSL_KEYFILE_PASSWORD, "
            "because other users can read command lines.",
        ),
        click.option(
            "--ssl-ca-certs", type=_FILE, help="CA certificates (PEM). Clients must present a certificate from one of "
            "these CAs."
        ),
        click.option(
            "--ssl-cert-reqs", type=click.Choice(get_args(ClientCertificates)), default="required", show_default=True,
            help="With --ssl-ca-certs: whether clients without a certificate may connect.",
        ),
    )):  # fmt: skip
        command = option(command)
    return command


def _listener(
    host: str,
    port: int,
    *,
    tokens: Path | None,
    token_file: Path | None,
    identity: Path | None,
    insecure: bool,
    allowed_host: Sequence[str],
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
    ssl_keyfile_password: str | None,
    ssl_ca_certs: Path | None,
    ssl_cert_reqs: ClientCertificates,
    announce: Sequence[DirectoryAddress],
    announce_token_file: Path | None,
    advertise_url: str | None,
    fleet_ca: Path | None,
) -> Listener:
    tls = None
    if ssl_certfile is not None:
        tls = TlsFiles(
            certfile=ssl_certfile, keyfile=ssl_keyfile, keyfile_password=ssl_keyfile_password, ca_certs=ssl_ca_certs,
            cert_reqs=ssl_cert_reqs,
        )  # fmt: skip
    elif ssl_keyfile is not None or ssl_ca_certs is not None:
        raise ConfigError("--ssl-keyfile and --ssl-ca-certs require --ssl-certfile, the server's certificate")
    sources = [] if tokens is None else [TokenFile.table(tokens)]
    if token_file is not None:
        sources.append(TokenFile.single(token_file))
    identities = None if identity is None else IdentityFile(identity)
    if identities is not None and identities.config.certificate_rules and ssl_ca_certs is None:
        raise ConfigError(f"[certificates] in {identity} requires --ssl-ca-certs, the CAs of the clients' certificates")
    authenticator = Authenticator(sources, host=host, allowed_hosts=allowed_host, identities=identities)
    fleet = fleet_of(announce, announce_token_file, advertise_url, fleet_ca, tls)
    return Listener(host, port, insecure, authenticator, tls, fleet)


def _configs(named: Sequence[str], config: ConfigFile | None, *, demo: bool) -> list[DatasetConfig]:
    """Return the datasets of the command line and the configuration file; add the current folder to `sys.path`."""
    # users keep their datasets in the folder where they start the server
    sys.path.insert(0, str(Path.cwd()))
    from_file = [] if config is None else config.datasets
    with usage_errors():
        configs = _merged(from_file, named, demo=demo)
    if not configs:
        raise click.UsageError("no dataset: pass at least one as module:name, or --demo for the embedded dataset")
    return configs


def _read_again(path: Path, named: Sequence[str], *, demo: bool) -> list[DatasetConfig]:
    """Return the datasets of the command line and of the current content of the configuration file.

    Raises:
        ConfigError: If the file is invalid.
    """
    _, _, from_file = read_toml(path)
    return _merged(from_file, named, demo=demo)


def _merged(from_file: Sequence[DatasetConfig], named: Sequence[str], *, demo: bool) -> list[DatasetConfig]:
    """Return the datasets of the configuration file and the command line.

    Raises:
        ConfigError: If an argument is invalid, or two datasets have the same name.
    """
    configs = [*from_file, *map(DatasetConfig.parse, named), *(DEMO if demo else ())]
    names = [config.name for config in configs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"duplicate dataset name {name!r}: rename one dataset with NAME=module:name")
    return configs


def _config_source(
    read: Callable[[], Sequence[DatasetConfig]] | None, limits: Limits, isolation: Isolation
) -> ConfigSource | None:
    """Return the source of the versions that the server publishes; None if it cannot publish."""
    if read is None or limits.num_workers == 0:  # without workers, this process has imported the previous code
        return None

    def pools(configs: Sequence[DatasetConfig], num_workers: int) -> ConfiguredPools:
        return ConfiguredPools(configs, replace(limits, num_workers=num_workers), isolation, is_reloaded=True)

    return ConfigSource(read, pools)


_CONTEXT: Final = {**CONTEXT, "auto_envvar_prefix": "TELELOADER"}


@click.command(cls=HostingCommand, context_settings=_CONTEXT)
@_dataset_arguments
@_listener_options
@isolation_options
@click.option("--host", default=DEFAULT_HOST, show_default=True, help="IP address to listen on.")
@click.option(
    "-p", "--port", default=DEFAULT_PORT, show_default=True, type=click.IntRange(0, 65535),
    help="Port to listen on; 0 selects a free one.",
)  # fmt: skip
@click.option(
    "--servers", default=1, show_default=True, type=click.IntRange(1, MAX_PER_MACHINE), metavar="N",
    help="Number of servers to start on this machine, on N consecutive ports from --port. A client with the URL of one "
    "of them uses all. --num-workers and --memory-budget are divided among the servers; each --limit applies "
    "to each server.",
)  # fmt: skip
@click.option(
    "-n", "--num-workers", default=default_num_workers, show_default="number of CPUs", type=click.IntRange(0, 1024),
    help="Worker processes; 0 loads in the server's own process, for debugging.",
)  # fmt: skip
@click.option(
    "--memory-budget", default=default_memory_budget, show_default="2GiB, or a quarter of the memory if that is less",
    type=Size(), help="Memory for computed batches; prefetching stops when it is full.",
)  # fmt: skip
@click.option("--max-batch-bytes", default="1GiB", show_default=True, type=Size(), help="Maximum size of a batch.")
@click.option(
    "--batch-timeout", default=DEFAULT_BATCH_TIMEOUT, show_default=True, type=click.FloatRange(0),
    help="Timeout in seconds for computing a batch, and for starting a worker. The server kills a worker that exceeds "
    "the timeout; the batch fails with the worker's stack trace. 0 disables the timeout.",
)  # fmt: skip
@click.option(
    "--max-replay", default=0, show_default="no limit", type=click.IntRange(0),
    help="Maximum number of batches that a worker iterates again to restore its shard of an iterable-style dataset "
    "without a state. Beyond it, the shard fails.",
)  # fmt: skip
@click.option(
    "--max-batches-per-worker", default=0, show_default="never", type=click.IntRange(0),
    help="Replace a worker by a new process after this number of batches, for datasets that leak memory. Workers of "
    "iterable-style datasets are never replaced, because their position in the stream would be lost.",
)  # fmt: skip
@click.option(
    "--max-worker-memory", default=0, show_default="never", type=Size(),
    help="Replace a worker when its resident memory, including shared pages, exceeds this size. A shard of an "
    "iterable-style dataset with a shuffle buffer fails instead.",
)  # fmt: skip
@click.option(
    "--retire-after", default=DEFAULT_RETIRE_AFTER, show_default=True, type=click.FloatRange(0),
    help="Retire a version of a dataset after this time in seconds without a request, if it is not the newest version.",
)  # fmt: skip
@click.option(
    "--limit", "limits", multiple=True, type=Limit(), metavar="NAME=VALUE",
    help="Limit for clients: see docs/limits.md. Repeatable. In a configuration file: the table [limits]. "
    f"Limits and defaults: {DEFAULT_LIMITS.stated()}.",
)  # fmt: skip
@click.option(
    "--shutdown-grace", default=DEFAULT_SHUTDOWN_GRACE, show_default=True, type=click.FloatRange(0),
    help="Maximum time in seconds to complete pending requests after SIGTERM or Ctrl-C.",
)  # fmt: skip
@fleet_options
@click.option(
    "--debug",
    is_flag=True,
    help="Permit clients with the scope admin to load batches in the server process (teleloader peek --debug).",
)
@click.option(
    "--reload/--no-reload", help="For development: restart the server when Python files of the datasets or the "
    "configuration file change. Connected clients wait and continue.",
)  # fmt: skip
@click.option(
    "--log-level", default="info", show_default=True, type=click.Choice(["debug", "info", "warning", "error"]),
    help="Minimum level of log lines on stderr.",
)  # fmt: skip
@click.option(
    "--log-format", default="text", show_default=True, type=click.Choice(get_args(logs.Format)),
    help="Text lines, or one JSON object per line.",
)  # fmt: skip
@click.option(
    "--audit-log", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write who reads which dataset, administrative actions and refused requests to this file, as JSON lines. See "
    "docs/security.md.",
)  # fmt: skip
@version_option("teleloader-server")
def server(
    datasets: tuple[str, ...],
    demo: bool,
    config: ConfigFile | None,
    host: str,
    port: int,
    servers: int,
    limits: tuple[tuple[str, str], ...],
    shutdown_grace: float,
    reload: bool,
    log_level: str,
    log_format: logs.Format,
    audit_log: Path | None,
    **options: Any,
) -> None:
    """Host datasets and the worker processes that compute their batches.

    A DATASET is module:name, where name is a dataset or a function that returns one. The module must be installed or
    importable from the current folder. Clients select the dataset by name; NAME=module:name specifies another name.

    \b
      teleloader-server --demo
      teleloader-server my_package.data:train my_package.data:validation
      teleloader-server imagenet=my_package.data:make_imagenet --num-workers 16
      teleloader-server --config loader.toml --host 10.0.0.5 --tokens tokens.toml

    Check a dataset before use, and generate a token for clients on other machines:

    \b
      teleloader-server check my_package.data:train
      teleloader-server token add trainer --file tokens.toml

    On the training machine:

    \b
      from teleloader import DataLoader, RemoteDataset
      dataset = RemoteDataset("http://cpu-box:8000", "train")
      loader = DataLoader(dataset, batch_size=256, shuffle=True)

    A fleet of servers, which clients find in a registry or in a file:

    \b
      teleloader-server my_package.data:train --port 8000
      teleloader-server my_package.data:train --port 8001 \\
          --announce registry+http://127.0.0.1:8000

    Each option has an environment variable, such as TELELOADER_PORT=8000. The variable of --tokens is
    TELELOADER_SERVER_TOKENS; --token-file and --exit-with-parent have none. Only clients read TELELOADER_TOKEN and
    TELELOADER_TOKEN_FILE.
    """  # noqa: D301 - the escapes are click's
    logs.configure(log_level, log_format)
    configs = _configs(datasets, config, demo=demo)
    with usage_errors():
        client_limits = ClientLimits.parse({**({} if config is None else config.limits), **dict(limits)})
        worker_limits = Limits(**{field.name: options.pop(field.name) for field in fields(Limits)})
        isolation = pop_isolation(options, worker_limits)
        secrets = secret_files(None if config is None else config.path, isolation, **options)
    protect_process(secrets, isolation, worker_limits)
    if reload:
        sys.exit(_reload(configs, config, host, port, servers))
    with usage_errors():
        listener = _listener(host, port, **options)
        isolation.check(ServerProcess.current(), [*secrets, *([] if audit_log is None else [audit_log])])

    read = None if config is None else partial(_read_again, config.path, datasets, demo=demo)
    if servers == 1:
        pools = ConfiguredPools(configs, worker_limits, isolation)
        sys.exit(_run(pools, worker_limits, client_limits, listener, shutdown_grace, audit_log, read))
    forkserver = SharedForkServer(configs, isolation)

    def run(limits: Limits, listener: Listener, listens: Callable[[], object]) -> int:
        pools = ConfiguredPools(configs, limits, isolation, forkserver.split)
        return _run(pools, limits, client_limits, listener, shutdown_grace, audit_log, read, listens)

    try:
        sys.exit(run_several(servers, worker_limits, listener, shutdown_grace, forkserver, run))
    except ConfigError as error:
        logger.error("%s", error)
        sys.exit(EXIT_USAGE)
    except OSError as error:
        logger.error("cannot start the servers: %s", shortage(error))
        sys.exit(EXIT_FAILED)


@click.command(context_settings=_CONTEXT)
@_dataset_arguments
@click.option(
    "-b", "--batch-size", default=32, show_default=True, type=click.IntRange(1), metavar="B", help="Samples per batch."
)
@click.option(
    "--batches", default=8, show_default=True, type=click.IntRange(1), metavar="N",
    help="Number of batches to compute, up to four times: as single samples, in batches, again for comparison, and "
    "with several workers. Each run stops after 10 seconds.",
)  # fmt: skip
@click.option("--max-batch-bytes", default="1GiB", show_default=True, type=Size(), help="Maximum size of a batch.")
@isolation_options
@click.option(
    "--batch-timeout", default=60.0, show_default=True, type=click.FloatRange(0),
    help="Timeout of a batch in seconds; 0 disables the timeout.",
)  # fmt: skip
@as_json
def check(
    datasets: tuple[str, ...],
    demo: bool,
    config: ConfigFile | None,
    batch_size: int,
    batches: int,
    max_batch_bytes: int,
    batch_timeout: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Check datasets before use.

    Builds each dataset in a process of its own and computes batches with real workers. Reports kind, length, content
    of a batch, time per sample and memory, whether batches are reproducible with one and with several workers, and
    problems with advice.

    The exit code is 0 if batches of all datasets can be computed, even with warnings; 1 if not; 2 for invalid
    arguments.
    """
    configs = _configs(datasets, config, demo=demo)
    logs.configure("warning", "text")
    limits = Limits(max_batch_bytes=max_batch_bytes, batch_timeout=batch_timeout)
    with usage_errors():
        isolation = pop_isolation(options, limits)
        isolation.check(ServerProcess.current())
    found = []
    for dataset in configs:
        progress = checking.progress_of(dataset.name)
        found.append(checking.check(dataset, limits, isolation, batch_size, batches, progress))
        if not as_json:
            checking.show(found[-1])
    if as_json:
        click.echo(json.dumps({"datasets": [asdict(one) for one in found]}))
    sys.exit(EXIT_FAILED if any(one.failed for one in found) else 0)


def _reload(configs: list[DatasetConfig], config: ConfigFile | None, host: str, port: int, servers: int) -> int:
    """Run the server as a child process, restart it after file changes, and return its exit code.

    A free port for port 0 is selected only once, so that clients can reconnect.
    """
    arguments = [*sys.argv[1:], "--no-reload", "--exit-with-parent", str(os.getpid())]
    if port == 0:
        free = bind_consecutive(host, 0, servers)
        arguments += ["--port", str(free[0].getsockname()[1])]
        for each in free:
            each.close()
    return Reloader(arguments, configs, None if config is None else config.path).run()


def _run(
    pools: ConfiguredPools,
    limits: Limits,
    client_limits: ClientLimits,
    listener: Listener,
    grace: float,
    audit_log: Path | None,
    read: Callable[[], Sequence[DatasetConfig]] | None,
    listens: Callable[[], object] | None = None,
) -> int:
    """Run a server until it is stopped, and return the exit code.

    Args:
        pools: Pools of the datasets that the server hosts.
        limits: Limits of workers.
        client_limits: Limits of clients.
        listener: Settings of the listening socket.
        grace: Seconds to complete pending requests.
        audit_log: File of the audit log; None for none.
        read: Function that reads the datasets of the configuration file again; None without a file.
        listens: Function to call when the server listens; None to print the banner.
    """
    try:
        with audit.written_to(audit_log), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(pools, limits, client_limits, listener, grace, read, listens))
    except ConfigError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    return 0


async def _serve(
    pools: ConfiguredPools,
    limits: Limits,
    client_limits: ClientLimits,
    listener: Listener,
    grace: float,
    read: Callable[[], Sequence[DatasetConfig]] | None,
    listens: Callable[[], object] | None,
) -> None:
    host, port = listener.host, listener.port
    listening = listener.bind()
    if listens is None:
        listener.check_protection(listening)
    service = LoaderService(pools, limits, client_limits)
    service.ports = None if listener.ports is None else list(listener.ports)
    service.publisher.source = _config_source(read, limits, pools.isolation)
    raise_file_limit()
    web = Server(service, host, port, grace, listener.authenticator, listener.tls, listener.fleet.client_tls)
    url = advertised_url(listener.fleet, url_of(listening, web.scheme), listening.getsockname()[0])
    if listens is None:
        log_start(pools.configs)
    starting = asyncio.create_task(service.start())

    first_signal = math.inf
    supervisor = None if listens is None else os.getppid()

    def drain() -> None:
        if not web.should_exit:
            logger.info("stopping: completing pending requests for up to %g s; a second signal aborts them", grace)
        web.should_exit = True
        starting.cancel()

    def stop() -> None:
        nonlocal first_signal
        now = time.monotonic()
        first_signal = min(first_signal, now)
        web.force_exit = now - first_signal > REPEAT_S
        if supervisor is not None and os.getppid() != supervisor:  # it was killed, and all workers with it
            web.give_up()
        drain()

    web.lifecycle.drain = drain
    for number in (signal.SIGINT, signal.SIGTERM) if listens is None else (STOP_SIGNAL,):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    try:
        await starting
    except asyncio.CancelledError:
        logger.info("stopped during start-up")
        return
    try:
        listening.listen()  # another process may have taken the port while the datasets were built
    except OSError as error:
        await service.close()
        raise listener.cannot_listen(error) from None
    audit.record("server_started", version=VERSION, pid=os.getpid(), url=url)
    shown = url_of(listening, web.scheme)
    banner = asyncio.create_task(
        show_banner(web, service, pools.isolation, shown) if listens is None else _report(web, shown, listens)
    )
    announced = announcer(listener.fleet, url, web.instance_key, lambda: web.started and service.ready, web.summary)
    web.before_drain = announced.leave
    try:
        await web.serve([listening])
    finally:
        banner.cancel()
        await announced.withdraw()
        await service.close()
        audit.record("server_stopped")
        logger.info("stopped")


async def _report(web: Server, url: str, listens: Callable[[], object]) -> None:
    await web.listening.wait()
    logger.info("listening at %s", url)
    listens()
