"""What the server says when it is ready: where it is, what it hosts, how to connect, where to look."""

from __future__ import annotations

import logging
import sys

import click

from teleloader_server import logs
from teleloader_server.auth.token_file import said_tokens
from teleloader_server.config import default_num_workers
from teleloader_server.dispatch.service import LoaderService
from teleloader_server.web.app import Server
from teleloader_shared.units import counted, size
from teleloader_shared.version import VERSION

logger = logging.getLogger("teleloader_server")


async def announce(web: Server, service: LoaderService, url: str) -> None:
    """Say where the server is, and how to use it: in a terminal at a glance, else in lines of the log."""
    await web.listening.wait()
    heading = f"teleloader-server {VERSION} is ready at {url} (Ctrl-C stops it)"
    if _is_for_people():
        click.secho(f"\n{heading}\n", bold=True, err=True)
        for label, text in _facts(web, service, url):
            click.echo(f"  {click.style(f'{label:<10}', dim=True)} {text}", err=True)
        click.echo(err=True)
        return
    logger.info(heading)
    for label, text in _facts(web, service, url):
        logger.info("%s: %s", label, text)


def _is_for_people() -> bool:
    """Whether what is logged goes to a terminal, as text, and is not for warnings only."""
    json_lines = any(isinstance(handler.formatter, logs.JsonFormatter) for handler in logging.getLogger().handlers)
    return sys.stderr.isatty() and logger.isEnabledFor(logging.INFO) and not json_lines


def _facts(web: Server, service: LoaderService, url: str) -> list[tuple[str, str]]:
    """What the start banner says: labels and texts."""
    facts = []
    for info in service.datasets.values():
        length = "no stated length" if info.length is None else counted(info.length, "sample")
        facts.append(("dataset", f"{info.name}, {info.kind}-style, {length}"))
    count = service.limits.num_workers
    workers = "none: this process loads" if count == 0 else counted(count, "process", "processes")
    facts.append(("workers", f"{workers}; this machine has {counted(default_num_workers(), 'CPU')} for them"))
    facts.append(("memory", f"at most {size(service.limits.memory_budget)} for batches that are made ahead"))
    if web.config.host in ("0.0.0.0", "::"):  # noqa: S104 - a comparison, not a bind
        facts.append(("address", "all addresses of this machine"))
    facts.append(
        (
            "access",
            f"by {said_tokens(web.authenticator.tokens)}" if web.authenticator.has_tokens else "whoever reaches it",
        )
    )
    first = next(iter(service.datasets))
    facts.append(("connect", f'DataLoader(RemoteDataset("{url}", "{first}"), batch_size=32)'))
    facts.append(("watch", f"teleloader stats {url} --watch"))
    facts.append(("dashboard", f"{url}/"))
    return facts
