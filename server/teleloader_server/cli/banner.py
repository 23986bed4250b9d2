"""Start-up banner of the server: URL, datasets, resources, authentication, and example commands."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

import click

from teleloader_server import logs
from teleloader_server.auth.authenticator import Authenticator
from teleloader_server.auth.token_file import format_tokens
from teleloader_server.config import DatasetConfig
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.limits import Limits, default_num_workers
from teleloader_server.web.app import Server
from teleloader_server.workers.isolation import Isolation, user_name
from teleloader_shared.messages import DatasetInfo
from teleloader_shared.units import counted, size
from teleloader_shared.version import VERSION

logger = logging.getLogger("teleloader_server")


def log_start(configs: Iterable[DatasetConfig]) -> None:
    """Log the datasets that are constructed next, which may take long."""
    logger.info("building %s", ", ".join(f"{config.name} ({config.factory})" for config in configs))


async def show_banner(web: Server, service: LoaderService, isolation: Isolation, url: str) -> None:
    """Print the start-up banner once the server listens, or log its lines if stderr is not an interactive terminal."""
    await web.listening.wait()
    datasets = list(service.datasets.values())
    show(url, facts(datasets, service.limits, isolation, web.authenticator, web.config.host, url))


def show(url: str, labelled: Iterable[tuple[str, str]]) -> None:
    """Print the start-up banner of a server with a URL, given labels and texts of its lines."""
    heading = f"teleloader-server {VERSION} is ready at {url} (Ctrl-C stops it)"
    if _is_interactive():
        click.secho(f"\n{heading}\n", bold=True, err=True)
        for label, text in labelled:
            click.echo(f"  {click.style(f'{label:<10}', dim=True)} {text}", err=True)
        click.echo(err=True)
        return
    logger.info(heading)
    for label, text in labelled:
        logger.info("%s: %s", label, text)


def _is_interactive() -> bool:
    """Return True if stderr is a terminal, and log lines of level info appear there as text."""
    json_lines = any(isinstance(handler.formatter, logs.JsonFormatter) for handler in logging.getLogger().handlers)
    return sys.stderr.isatty() and logger.isEnabledFor(logging.INFO) and not json_lines


def _access(authenticator: Authenticator) -> str:
    """Return the tokens, issuers and certificates that identify clients."""
    if authenticator.identities is None:
        return format_tokens(authenticator.tokens) if authenticator.has_tokens else "without authentication"
    tokens = [format_tokens(authenticator.tokens)] if authenticator.tokens.entries else []
    return ", ".join([*tokens, str(authenticator.identities)])


def facts(
    datasets: Sequence[DatasetInfo],
    limits: Limits,
    isolation: Isolation,
    authenticator: Authenticator,
    host: str,
    url: str,
) -> Iterator[tuple[str, str]]:
    """Yield the labels and texts of the banner's lines."""
    for info in datasets:
        length = "unknown length" if info.length is None else counted(info.length, "sample")
        yield "dataset", f"{info.name}, {info.kind}-style, {length}"
    count = limits.num_workers
    workers = "none (the server process computes the batches)" if count == 0 else counted(count, "process", "processes")
    yield "workers", f"{workers}; {counted(default_num_workers(), 'CPU')} available"
    if count:
        yield "isolation", isolation.describe(user_name(os.geteuid()))
    yield "memory", f"up to {size(limits.memory_budget)} of prefetched batches"
    if host in ("0.0.0.0", "::"):  # noqa: S104 - a comparison, not a bind
        yield "listening", "on all IP addresses of this machine"
    yield "access", _access(authenticator)
    yield "connect", f'DataLoader(RemoteDataset("{url}", "{datasets[0].name}"), batch_size=32)'
    yield "watch", f"teleloader stats {url} --watch"
    yield "dashboard", f"{url}/"
