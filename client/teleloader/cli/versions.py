"""Commands for versions of datasets: ``teleloader versions``, ``publish`` and ``retire``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final, NamedTuple

import click

from teleloader.cli.showing import Column, print_json, results_console, table
from teleloader.cli.stats import Source
from teleloader_shared.errors import UnknownDataset
from teleloader_shared.messages import PublishedVersion
from teleloader_shared.stats import Stats, VersionStats
from teleloader_shared.units import seconds


class _Row(NamedTuple):
    """Version of a dataset on one of several servers."""

    server: str
    """URL of the server."""
    dataset: str
    version: VersionStats


_COLUMNS: Final = [
    Column("server", lambda row: row.server, least=22, is_name=True),
    Column("dataset", lambda row: row.dataset, least=12, is_name=True),
    Column("version", lambda row: row.version.version or "(none)", least=8),
    Column("fingerprint", lambda row: row.version.fingerprint),
    Column("state", lambda row: "newest" if row.version.newest else "previous", least=8),
    Column("loaders", lambda row: f"{row.version.loaders:,}"),
    Column("idle", lambda row: seconds(row.version.idle)),
    Column("revision", lambda row: str(row.version.revision), rank=1),
]


def show(source: Source, *, as_json: bool) -> None:
    """Print the available versions of all datasets, and report the errors of the last publications to stderr."""
    readings = source.read()
    found = [(reading.url, reading.stats) for reading in readings if isinstance(reading.stats, Stats)]
    rows = [
        _Row(url, dataset.dataset, version)
        for url, stats in found
        for dataset in stats.datasets
        for version in dataset.versions
    ]
    if as_json:
        print_json([{"server": row.server, "dataset": row.dataset, **asdict(row.version)} for row in rows])
    else:
        console = results_console()
        console.print(table(_COLUMNS, rows, console.width))
    for url, stats in found:
        if stats.server.publication_error is not None:
            click.echo(f"teleloader: the last publication at {url} failed: {stats.server.publication_error}", err=True)


def publish(source: Source, *, as_json: bool) -> None:
    """Publish the configuration of all servers, one after the other, and print the result.

    Raises:
        TeleloaderError: If a server cannot publish; the following servers are not changed.
    """
    source.read()  # finds servers that run under the same supervisor
    rows: list[dict[str, Any]] = []
    try:
        for server in source.servers:
            published = server.publish()
            rows += [{"server": server.url, **asdict(version)} for version in published]
            if not as_json:
                click.echo(f"{server.url}:")
                for version in published:
                    click.echo(f"  {_described(version)}")
    finally:
        if as_json:
            print_json(rows)


def retire(source: Source, dataset: str, version: str) -> None:
    """Retire a version on all servers that have it, and print the number of loaders that used it.

    Raises:
        UnknownDataset: If no server has the version.
        InvalidSpec: If it is the newest version of the dataset.
    """
    source.read()  # finds servers that run under the same supervisor
    missing: list[UnknownDataset] = []
    for server in source.servers:
        try:
            count = server.retire(dataset, version)
        except UnknownDataset as error:
            missing.append(error)
            continue
        click.echo(f"{server.url}: retired version {version!r} of dataset {dataset!r}; it had {count:,} loaders")
    if len(missing) == len(source.servers):
        raise missing[0]


def _described(version: PublishedVersion) -> str:
    text = {
        "added": "published, and new runs get it",
        "restored": "rolled back to, and new runs get it",
        "unchanged": "unchanged: to publish changed data or code, change version in the configuration file",
    }[version.change]
    return f"{version.dataset} {version.version!r} (fingerprint {version.fingerprint}): {text}"
