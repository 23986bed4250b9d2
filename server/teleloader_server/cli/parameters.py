"""Types of command-line parameters, and the conversion of configuration errors to usage errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from teleloader_server.config import ConfigError, parse_size


class Limit(click.ParamType):  # type: ignore[type-arg] # generic since click 8.4, and older versions are supported
    """click parameter type of the ``--limit`` option: ``NAME=VALUE``, the name and value of a limit."""

    name = "limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Parse ``NAME=VALUE`` to a (name, value) pair."""
        name, equals, stated = str(value).partition("=")
        if not equals:
            self.fail(f"expected NAME=VALUE, got {value!r}", param, ctx)
        return name.strip(), stated.strip()


class Size(click.ParamType):  # type: ignore[type-arg] # as above
    """click parameter type of sizes: bytes, or a number with a unit such as ``512MiB`` or ``2GiB``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse a size such as ``512MiB`` to bytes."""
        if isinstance(value, int):
            return value
        try:
            return parse_size(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


@contextmanager
def usage_errors() -> Iterator[None]:
    """Convert `ConfigError` to click's usage error, which exits with code 2."""
    try:
        yield
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
