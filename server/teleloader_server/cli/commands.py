"""What ``teleloader-server`` does."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, get_args

import click
import uvloop

from teleloader_server import logs
from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.auth.origins import is_loopback, refuse_unprotected
from teleloader_server.auth.tls import TlsFiles
from teleloader_server.auth.token_file import TOKENS_VARIABLE, TokenFile
from teleloader_server.cli import check as checking
from teleloader_server.cli.banner import announce
from teleloader_server.cli.reload import Reloader
from teleloader_server.config import (
    DEFAULT_BATCH_TIMEOUT,
    DEFAULT_HOST,
    DEFAULT_LIMITS,
    DEFAULT_PORT,
    DEFAULT_SHUTDOWN_GRACE,
    ClientLimits,
    ConfigError,
    DatasetConfig,
    Limits,
    default_memory_budget,
    default_num_workers,
    parse_size,
    read_toml,
)
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.web.app import Server, bind, url_of
from teleloader_server.web.guard_manager import raise_file_limit
from teleloader_server.workers.factory import ConfiguredPools
from teleloader_shared.version import VERSION

DEMO: Final = (
    DatasetConfig(name="digits-train", factory="teleloader_server.demo:digits_train", version="1"),
    DatasetConfig(name="digits-test", factory="teleloader_server.demo:digits_test", version="1"),
)
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
"""What a shell reports of a program that Ctrl-C ended."""

logger = logging.getLogger("teleloader_server")

_Command = TypeVar("_Command", bound=Callable[..., Any])


class ConfigFile(NamedTuple):
    """What a configuration file says, and where it is."""

    path: Path
    limits: dict[str, Any]
    datasets: list[DatasetConfig]


class Listener(NamedTuple):
    """Where clients come in, and which."""

    host: str
    port: int
    insecure: bool
    """Whether everybody may come in, wherever that is."""
    authenticator: Authenticator
    tls: TlsFiles | None


class Limit(click.ParamType):  # type: ignore[type-arg] # generic since click 8.4, and older ones do
    """A limit and its value, written ``NAME=VALUE``."""

    name = "limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Read it."""
        name, equals, stated = str(value).partition("=")
        if not equals:
            self.fail(f"must be NAME=VALUE, was {value!r}", param, ctx)
        return name.strip(), stated.strip()


class Size(click.ParamType):  # type: ignore[type-arg] # the same
    """A number of bytes, written ``512MiB`` or ``2GiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read it."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def _from_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> ConfigFile | None:
    """Take the file's ``[server]`` table as defaults, below the command line and the environment."""
    if path is None:
        return None
    try:
        defaults, limits, datasets = read_toml(path)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    known = {option.name for option in server.params} - {"config", "demo", "datasets", "version", "limits"}
    for name in defaults:
        if name not in known:
            raise click.UsageError(
                f"[server] of {path} has an unknown entry {name!r}; it may have {', '.join(sorted(map(str, known)))}"
            )
    context.default_map = defaults
    return ConfigFile(path, limits, datasets)


def _naming_datasets(command: _Command) -> _Command:
    """Add the arguments that say which datasets there are."""
    for option in (
        click.option(
            "--config", type=click.Path(path_type=Path), is_eager=True, expose_value=True, callback=_from_file,
            help="TOML file with a [server] table (the options of teleloader-server) and a [datasets.NAME] table for "
            "each dataset.",
        ),
        click.option("--demo", is_flag=True, help="Host the handwritten digits that come with the package."),
        click.argument("datasets", nargs=-1, metavar="[DATASET]..."),
    ):  # fmt: skip
        command = option(command)
    return command


_FILE: Final = click.Path(path_type=Path, dir_okay=False)


def _saying_who_may_come_in(command: _Command) -> _Command:
    """Add the options that do."""
    for option in reversed((
        # without the variables that click derives: TELELOADER_TOKEN_FILE is the client's credential, and a server that
        # is started where it is set must not accept it
        click.option(
            "--tokens", type=_FILE, envvar=TOKENS_VARIABLE, allow_from_autoenv=False, help="TOML file with a table per "
            f"token: see teleloader-server token --help. Read again when it changes. Default: {TOKENS_VARIABLE}.",
        ),
        click.option(
            "--token-file", type=_FILE, allow_from_autoenv=False, help="File that holds one token and nothing else, "
            "such as a container's secret. Read again when it changes.",
        ),
        click.option("--insecure", is_flag=True, help="Let everybody in who reaches --host, with no token."),
        click.option(
            "--allowed-host", multiple=True, metavar="NAME", help="A name that this server is called by, beside "
            "addresses, localhost and that of the machine; *.example.com is all below it. Can be given several times.",
        ),
        click.option("--ssl-certfile", type=_FILE, help="Certificate (PEM): speak HTTPS. Read again when renewed."),
        click.option("--ssl-keyfile", type=_FILE, help="Its private key, if that is in another file."),
        click.option(
            "--ssl-keyfile-password", help="What the key is encrypted with; others see command lines, so give it as "
            "TELELOADER_SSL_KEYFILE_PASSWORD.",
        ),
        click.option(
            "--ssl-ca-certs", type=_FILE, help="CAs (PEM): clients must have a certificate of one of them."
        ),
    )):  # fmt: skip
        command = option(command)
    return command


def _door(
    host: str,
    port: int,
    *,
    tokens: Path | None,
    token_file: Path | None,
    insecure: bool,
    allowed_host: Sequence[str],
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
    ssl_keyfile_password: str | None,
    ssl_ca_certs: Path | None,
) -> Listener:
    tls = None
    if ssl_certfile is not None:
        tls = TlsFiles(
            certfile=ssl_certfile, keyfile=ssl_keyfile, keyfile_password=ssl_keyfile_password, ca_certs=ssl_ca_certs
        )
    elif ssl_keyfile is not None or ssl_ca_certs is not None:
        raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile, the server's certificate")
    sources = [] if tokens is None else [TokenFile.table(tokens)]
    if token_file is not None:
        sources.append(TokenFile.single(token_file))
    return Listener(host, port, insecure, Authenticator(sources, host=host, allowed_hosts=allowed_host), tls)


def _configs(named: Sequence[str], config: ConfigFile | None, *, demo: bool) -> list[DatasetConfig]:
    """The datasets that the command line and the configuration file name, importable from now on."""
    # a dataset of the user's stands in the folder from which the server is started
    sys.path.insert(0, str(Path.cwd()))
    try:
        from_file = [] if config is None else config.datasets
        configs = [*from_file, *(DatasetConfig.parse(text) for text in named), *(DEMO if demo else ())]
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if not configs:
        raise click.UsageError("name at least one dataset as module:name, or host the embedded one with --demo")
    names = [dataset.name for dataset in configs]
    for name in names:
        if names.count(name) > 1:
            raise click.UsageError(f"two datasets are called {name!r}: give one another name with NAME=module:name")
    return configs


_CONTEXT: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.command(context_settings=_CONTEXT)
@_naming_datasets
@_saying_who_may_come_in
@click.option("--host", default=DEFAULT_HOST, show_default=True, help="Address to listen on.")
@click.option(
    "--port", default=DEFAULT_PORT, show_default=True, type=click.IntRange(0, 65535),
    help="Port to listen on; 0 takes a free one.",
)  # fmt: skip
@click.option(
    "--num-workers", default=default_num_workers, show_default="number of CPUs", type=click.IntRange(0, 1024),
    help="Worker processes; 0 loads in the server's own process, for debugging.",
)  # fmt: skip
@click.option(
    "--memory-budget", default=default_memory_budget, show_default="2GiB, or a quarter of a smaller memory",
    type=Size(), help="What finished batches may take before work ahead waits.",
)  # fmt: skip
@click.option(
    "--max-batch-bytes", default="1GiB", show_default=True, type=Size(), help="The largest batch that is sent."
)
@click.option(
    "--batch-timeout", default=DEFAULT_BATCH_TIMEOUT, show_default=True, type=click.FloatRange(0),
    help="Seconds that a worker may take for one batch, or to start. Then it is killed, and the batch is an error that "
    "shows where it hung; 0 is no limit.",
)  # fmt: skip
@click.option(
    "--max-batches-per-worker", default=0, show_default="never", type=click.IntRange(0),
    help="Replace a worker by a fresh process after so many batches and those that it has by then, for datasets that "
    "leak. Workers of iterable-style datasets are never replaced: their place in the stream would be lost.",
)  # fmt: skip
@click.option(
    "--max-worker-memory", default=0, show_default="never", type=Size(),
    help="Replace a worker that has more resident memory, what it shares with others included, in the same way.",
)  # fmt: skip
@click.option(
    "--limit", "limits", multiple=True, type=Limit(), metavar="NAME=VALUE",
    help="What clients may make the server do; can be given several times. The limits and their defaults: "
    f"{DEFAULT_LIMITS.stated()}. docs/limits.md says what each is. In a file they are the table [limits].",
)  # fmt: skip
@click.option(
    "--shutdown-grace", default=DEFAULT_SHUTDOWN_GRACE, show_default=True, type=click.FloatRange(0),
    help="Seconds that answers have to be finished when the server is told to stop.",
)  # fmt: skip
@click.option("--debug", is_flag=True, help="Let clients have single batches made in this process (teleloader peek).")
@click.option(
    "--reload/--no-reload", help="For developing datasets: start the server anew when a .py file beside theirs, or the "
    "configuration, changes. Trainers that are connected wait, and go on.",
)  # fmt: skip
@click.option(
    "--log-level", default="info", show_default=True, type=click.Choice(["debug", "info", "warning", "error"]),
    help="How much to say on stderr.",
)  # fmt: skip
@click.option(
    "--log-format", default="text", show_default=True, type=click.Choice(get_args(logs.Format)),
    help="Lines for people, or a JSON object a line for programs.",
)  # fmt: skip
@click.version_option(VERSION, prog_name="teleloader-server", allow_from_autoenv=False)
def server(
    datasets: tuple[str, ...],
    demo: bool,
    config: ConfigFile | None,
    host: str,
    port: int,
    num_workers: int,
    memory_budget: int,
    max_batch_bytes: int,
    batch_timeout: float,
    max_batches_per_worker: int,
    max_worker_memory: int,
    limits: tuple[tuple[str, str], ...],
    shutdown_grace: float,
    debug: bool,
    reload: bool,
    log_level: str,
    log_format: logs.Format,
    **who: Any,
) -> None:
    """Host datasets, and worker processes that turn them into batches.

    A DATASET is module:name, where name is a dataset or a function that makes one, importable from the current folder
    or installed; clients call it by that name, or by another one that you choose.

    \b
      teleloader-server --demo
      teleloader-server my_package.data:train my_package.data:validation
      teleloader-server imagenet=my_package.data:make_imagenet --num-workers 16
      teleloader-server --config loader.toml --host 10.0.0.5 --tokens tokens.toml

    Clients on other machines authenticate with a token:

    \b
      teleloader-server token add trainer --file tokens.toml

    Before you depend on a dataset, have it tried: what it gives, how fast, and what is wrong with it.

    \b
      teleloader-server check my_package.data:train

    Then, on the machine that trains:

    \b
      from teleloader import DataLoader, RemoteDataset
      loader = DataLoader(RemoteDataset("http://cpu-box:8000", "train"), batch_size=256, shuffle=True)

    Each option can be set by an environment variable too: TELELOADER_PORT=8000, and so on. Exceptions are --tokens,
    which is TELELOADER_SERVER_TOKENS, and --token-file, which has none: TELELOADER_TOKEN and TELELOADER_TOKEN_FILE are
    read by clients only.
    """  # noqa: D301 - the escapes are click's
    logs.configure(log_level, log_format)
    configs = _configs(datasets, config, demo=demo)
    try:
        of_clients = ClientLimits.parse({**({} if config is None else config.limits), **dict(limits)})
        of_workers = Limits(
            num_workers=num_workers,
            memory_budget=memory_budget,
            max_batch_bytes=max_batch_bytes,
            batch_timeout=batch_timeout,
            max_batches_per_worker=max_batches_per_worker,
            max_worker_memory=max_worker_memory,
            debug=debug,
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    if reload:
        sys.exit(_reload(configs, config, host, port))
    try:
        door = _door(host, port, **who)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    sys.exit(_run(configs, of_workers, of_clients, door, shutdown_grace))


@click.command(context_settings=_CONTEXT)
@_naming_datasets
@click.option(
    "--batch-size", default=32, show_default=True, type=click.IntRange(1), metavar="B", help="Samples in a batch."
)
@click.option(
    "--batches", default=8, show_default=True, type=click.IntRange(1), metavar="N",
    help="Batches to make in a pass, of which there are four; each ends after 10 seconds at the latest.",
)  # fmt: skip
@click.option(
    "--max-batch-bytes", default="1GiB", show_default=True, type=Size(), help="The largest batch that is sent."
)
@click.option(
    "--batch-timeout", default=60.0, show_default=True, type=click.FloatRange(0),
    help="Seconds that a worker may take for one batch; 0 is no limit.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Write one line of JSON, for programs.")
def check(
    datasets: tuple[str, ...],
    demo: bool,
    config: ConfigFile | None,
    batch_size: int,
    batches: int,
    max_batch_bytes: int,
    batch_timeout: float,
    as_json: bool,
) -> None:
    """Try datasets before anyone depends on them.

    Each is built in a process of its own, and real workers make batches of it: its kind and length, what a batch holds,
    how long a sample takes, how much memory; whether batches are the same when they are made again, and by several
    workers at once; and what is wrong with it, with a sentence of advice.

    The exit code is 0 when batches can be had of all of them, though there may be warnings; 1 when not; 2 for wrong
    arguments.
    """
    configs = _configs(datasets, config, demo=demo)
    logs.configure("warning", "text")
    limits = Limits(max_batch_bytes=max_batch_bytes, batch_timeout=batch_timeout)
    found = []
    try:
        for dataset in configs:
            found.append(checking.check(dataset, limits, batch_size, batches, checking.progress_of(dataset.name)))
            if not as_json:
                checking.show(found[-1])
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    if as_json:
        click.echo(json.dumps({"datasets": [asdict(one) for one in found]}))
    sys.exit(EXIT_FAILED if any(one.failed for one in found) else 0)


def _reload(configs: list[DatasetConfig], config: ConfigFile | None, host: str, port: int) -> int:
    """Run the server as a child that is started anew; a free port is chosen once, so that clients find it again."""
    arguments = [*sys.argv[1:], "--no-reload"]
    if port == 0:
        with bind(host, 0) as free:
            arguments += ["--port", str(free.getsockname()[1])]
    return Reloader(arguments, configs, None if config is None else config.path).run()


def _run(configs: list[DatasetConfig], limits: Limits, of_clients: ClientLimits, door: Listener, grace: float) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(configs, limits, of_clients, door, grace))


def _bound(door: Listener) -> socket.socket:
    """A socket that is bound where others may come in, or only this machine."""
    try:
        bound = bind(door.host, door.port)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {door.host}:{door.port}: {error.strerror}. Choose another --host or --port"
        ) from None
    address = bound.getsockname()[0]
    try:
        refuse_unprotected(address, has_tokens=door.authenticator.has_tokens, insecure=door.insecure)
    except ConfigError:
        bound.close()
        raise
    if door.tls is None and not is_loopback(address):
        logger.warning(
            "%s, unencrypted: whoever is between here and a client can read and change them (see --ssl-certfile)",
            "tokens and batches travel"
            if door.authenticator.has_tokens
            else "everybody may come in, and batches travel",
        )
    return bound


async def _serve(
    configs: list[DatasetConfig], limits: Limits, of_clients: ClientLimits, door: Listener, grace: float
) -> int:
    host, port = door.host, door.port
    try:
        listening = _bound(door)
    except ConfigError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    service = LoaderService(ConfiguredPools(configs, limits), limits, of_clients)
    raise_file_limit()
    try:
        web = Server(service, host, port, grace, door.authenticator, door.tls)
    except ConfigError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    starting = asyncio.create_task(service.start())

    def stop() -> None:
        # the first signal lets answers be finished, the second does not
        if not web.should_exit:
            logger.info("told to stop: what was asked for is finished, for %g s at most; once more stops it now", grace)
        web.force_exit = web.should_exit
        web.should_exit = True
        starting.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    logger.info("building %s", ", ".join(f"{config.name} ({config.factory})" for config in configs))
    try:
        await starting
    except ConfigError as error:
        logger.error("%s", error)
        return EXIT_USAGE
    except asyncio.CancelledError:
        logger.info("stopped before it was ready")
        return 0
    try:
        listening.listen()  # another server may have begun to, while the datasets were built
    except OSError as error:
        logger.error("cannot listen on %s:%d: %s. Choose another --host or --port", host, port, error.strerror)
        await service.close()
        return EXIT_USAGE
    announced = asyncio.create_task(announce(web, service, url_of(listening, web.scheme)))
    try:
        await web.serve([listening])
    finally:
        announced.cancel()
        await service.close()
        logger.info("stopped")
    return 0
