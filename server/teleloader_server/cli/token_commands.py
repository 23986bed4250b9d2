"""Definition of ``teleloader-server token``: generate, list, revoke and rotate the tokens of a server."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import click
import tomlkit

from teleloader_server.auth.identity_file import IdentityFile, is_jwt
from teleloader_server.auth.outcomes import Refusal
from teleloader_server.auth.token_file import TOKENS_VARIABLE, read_text
from teleloader_server.auth.tokens import (
    DEFAULT_SCOPES,
    SCOPE,
    SCOPE_RULE,
    TOKEN_NAME,
    TOKEN_NAME_RULE,
    Token,
    Tokens,
    parse_tokens,
)
from teleloader_server.config import ConfigError
from teleloader_shared.command_line import CommandGroup, as_json
from teleloader_shared.exit_codes import EXIT_FAILED
from teleloader_shared.secret import Secret
from teleloader_shared.text import did_you_mean

MAX_DAYS: Final = 36_500
MAX_TOKEN_BYTES: Final = 64 * 1024

_PATH: Final = click.Path(path_type=Path, dir_okay=False)


class Matching(click.ParamType):  # type: ignore[type-arg] # generic since click 8.4
    """click parameter type for text that matches a regular expression.

    Args:
        name: Name of the type, for usage messages.
        pattern: Regular expression for the whole text.
        rule: Description of valid text, for error messages.
    """

    def __init__(self, name: str, pattern: re.Pattern[str], rule: str) -> None:
        self.name = name
        self._pattern = pattern
        self._rule = rule

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Validate a command-line argument against the pattern, and return it.

        Raises:
            click.BadParameter: If the value does not match.
        """
        if not self._pattern.fullmatch(str(value)):
            self.fail(f"{value!r}: expected {self._rule}", param, ctx)
        return str(value)


_name = click.argument("name", type=Matching("name", TOKEN_NAME, TOKEN_NAME_RULE))
_file = click.option(
    "-f", "--file", "path", type=_PATH, required=True, envvar=TOKENS_VARIABLE, show_envvar=True,
    help="The server's token file (--tokens).",
)  # fmt: skip
_days = click.option(
    "--days",
    type=click.FloatRange(0, MAX_DAYS, min_open=True),
    metavar="N",
    help="Days until the token expires. By default, a new token never expires, and rotate keeps the expiry.",
)


@click.group(cls=CommandGroup)
def token() -> None:
    """Manage the tokens of clients.

    \b
      teleloader-server token add trainer --file tokens.toml
      teleloader-server my_package.data:train --host 10.0.0.5 --tokens tokens.toml

    A client reads its token from TELELOADER_TOKEN, or from the file named by TELELOADER_TOKEN_FILE. The server's token
    file contains only the SHA-256 of each token, which cannot be used to authenticate. Running servers apply changes
    within two seconds.

    Commands that change the file replace it atomically, with mode 0600 (readable by its owner only). They keep comments
    and other entries.
    """  # noqa: D301 - the escapes are click's


@token.command()
@_name
@_file
@click.option(
    "--scope", "scopes", multiple=True, default=DEFAULT_SCOPES, show_default=True,
    type=Matching("scope", SCOPE, SCOPE_RULE),
    help="Scope: read (all datasets), read:DATASET, stats, announce (servers that announce themselves) or admin. "
    "Repeatable.",
)  # fmt: skip
@_days
@click.option("--out", type=_PATH, help="Write the token to this new file (mode 0600) instead of stdout.")
def add(name: str, path: Path, scopes: tuple[str, ...], days: float | None, out: Path | None) -> None:
    """Generate a token and add it to the token file.

    A missing file is created. The token is printed to stdout and cannot be displayed again; all other output goes to
    stderr.
    """
    if out is not None and out.exists():
        raise click.UsageError(f"cannot write the token to {out}: the file exists. Choose another file")
    made = _generated()
    with _editing(path, made, out) as (document, tokens):
        if name in document:
            raise click.UsageError(
                f"cannot add token {name!r}: {path} already has an entry of that name. Choose another name, or replace "
                f"the token with: teleloader-server token rotate {name} --file {path}"
            )
        entry = tomlkit.table()
        entry["sha256"] = _digest_of(made)
        if days is not None:
            entry["expires"] = _expiry(days)
        entry["scopes"] = list(scopes)  # last: an entry that is cut off anywhere lacks its scopes, which are required
        if tokens.entries:
            document.add(tomlkit.nl())
        document[name] = entry
    _report(f"token {name!r} added to {path}", made, out)


@token.command("list")
@_file
@as_json
def list_(path: Path, as_json: bool) -> None:
    """List the names, scopes and expiry of all tokens."""
    if not path.exists():
        raise click.UsageError(f"cannot read token file {path}: no such file")
    try:
        entries = parse_tokens(read_text(path).text, str(path)).entries
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    rows = [_row(entry) for entry in entries]
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows]))
        return
    lines = [("NAME", "SCOPES", "EXPIRES"), *((row.name, ", ".join(row.scopes), _expires(row)) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    for name, scopes, expires in lines:
        click.echo(f"{name:{widths[0]}}  {scopes:{widths[1]}}  {expires}")


@token.command()
@_name
@_file
def revoke(name: str, path: Path) -> None:
    """Remove a token from the token file.

    Servers then reject the token. After the last token is removed, servers reject all clients.
    """
    with _editing(path) as (document, tokens):
        _entry(tokens, name, path)
        _remove(document, name)
    click.echo(f"token {name!r} removed from {path}", err=True)


@token.command()
@_name
@_file
@_days
@click.option(
    "--out",
    type=_PATH,
    help="Write the token to this file (mode 0600) instead of stdout; an existing file is replaced.",
)
def rotate(name: str, path: Path, days: float | None, out: Path | None) -> None:
    """Replace a token by a new one with the same name and scopes.

    Servers then reject the old token, and clients that use it fail. To replace a token without interruption, add a
    token with another name, configure the clients to use it, then revoke the old token.
    """
    made = _generated()
    with _editing(path, made, out) as (document, tokens):
        if _entry(tokens, name, path).expires <= time.time() and days is None:
            raise click.UsageError(f"cannot rotate token {name!r}: it has expired. Specify a new expiry with --days")
        entry = document[name]
        entry.pop("token", None)
        entry["sha256"] = _digest_of(made)
        if days is not None:
            entry["expires"] = _expiry(days)
    _report(f"token {name!r} replaced in {path}", made, out)


@token.command()
@click.option(
    "--identity", "path", type=_PATH, required=True, envvar="TELELOADER_IDENTITY", show_envvar=True,
    help="The server's identity file.",
)  # fmt: skip
@click.option(
    "--token-file", "token_file", type=click.File("rb"), required=True, help="File with the JWT; - reads it from stdin."
)
@as_json
def check(path: Path, token_file: BinaryIO, as_json: bool) -> None:
    """Verify a JWT by the rules of an identity file.

    Prints the principal and its permissions, or the reason why a server would refuse the token, and the claims. Fetches
    the keys of all issuers. The exit code is 1 for a refused token.

    \b
      kubectl create token trainer --audience teleloader | \\
          teleloader-server token check --identity identity.toml --token-file -
    """  # noqa: D301 - the escapes are click's
    token = Secret(token_file.read(MAX_TOKEN_BYTES).decode(errors="replace").strip())
    if not is_jwt(token.encode()):
        raise click.UsageError("the token is not a JWT: expected three parts in base64url, separated by dots")
    try:
        identities = IdentityFile(path)
        identities.load_keys()
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    found = identities.of_token(token.encode())
    record = {**_verdict(found), "claims": _claims_in(token)}
    if as_json:
        click.echo(json.dumps(record))
    else:
        for name, value in record.items():
            click.echo(f"{name:<12}  {value if isinstance(value, str) else json.dumps(value)}")
    if isinstance(found, Refusal):
        sys.exit(EXIT_FAILED)


def _verdict(found: Token | Refusal) -> dict[str, Any]:
    """Return the result of ``check`` for a token."""
    if isinstance(found, Refusal):
        return {"refused": found.message, "principal": found.principal}
    principal = found.principal
    return {
        "principal": principal.name,
        "scopes": sorted(principal.scopes),
        "memory_share": principal.memory_share,
        "weight": principal.weight,
        "expires": _time(found.expires),
    }


def _claims_in(token: str) -> Any:
    """Return the claims of a JWT without verification; None if they cannot be decoded."""
    payload = token.split(".")[1]
    try:
        return json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (ValueError, RecursionError):
        return None


def _generated() -> Secret:
    return Secret(f"tl_{secrets.token_urlsafe(32)}")


def _digest_of(made: Secret) -> str:
    return hashlib.sha256(made.encode()).hexdigest()


def _expiry(days: float) -> datetime:
    return datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)


def _entry(tokens: Tokens, name: str, path: Path) -> Token:
    found = {entry.principal.name: entry for entry in tokens.entries}
    if name not in found:
        hint = did_you_mean(name, found)
        raise click.UsageError(
            f"unknown token {name!r}: {path} contains {', '.join(found) or 'no tokens'}{f'. {hint}' if hint else ''}"
        )
    return found[name]


def _remove(document: tomlkit.TOMLDocument, name: str) -> None:
    place = next(i for i, (key, _) in enumerate(document.body) if key is not None and key.key == name)
    # tomlkit attributes the comments above the next entry to this entry
    lines = document.body[place][1].as_string().splitlines(keepends=True)
    kept = list(takewhile(lambda line: not line.strip() or line.lstrip().startswith("#"), reversed(lines)))
    del document[name]
    document.body[place] = (None, tomlkit.ws("".join(reversed(kept))))


class _Row(NamedTuple):
    """Token in the output of ``list``."""

    name: str
    scopes: list[str]
    expires: str | None
    """Time in the ISO 8601 format, in UTC; None if the token does not expire."""
    expired: bool


def _row(entry: Token) -> _Row:
    has_expiry = entry.expires < float("inf")
    return _Row(
        entry.principal.name,
        sorted(entry.principal.scopes),
        _time(entry.expires) if has_expiry else None,
        entry.expires <= time.time(),
    )


def _time(timestamp: float) -> str:
    return f"{datetime.fromtimestamp(timestamp, UTC):%Y-%m-%dT%H:%M:%SZ}"


def _expires(row: _Row) -> str:
    return f"{row.expires or 'never'}{' (expired)' if row.expired else ''}"


def _report(done: str, made: Secret, out: Path | None) -> None:
    if out is None:
        click.echo(f"{done}. Save the token, which cannot be shown again:", err=True)
        click.echo(made)
    else:
        click.echo(f"{done}. The token was written to {out}", err=True)


@contextmanager
def _editing(path: Path, made: str = "", out: Path | None = None) -> Iterator[tuple[tomlkit.TOMLDocument, Tokens]]:
    """Yield the content of a token file; write it back atomically when the ``with`` block ends without an error.

    A lock on the folder makes concurrent commands wait, so that no command overwrites the changes of another.

    Args:
        path: Path of the token file.
        made: Generated token, if any.
        out: File to which the generated token is written.

    Raises:
        click.UsageError: If the file is invalid, or cannot be read.
        click.ClickException: If a file cannot be written.
    """
    path = path.resolve()
    if out is not None and out.resolve() == path:
        raise click.UsageError(f"cannot write the token to {out}: the file is the token file. Choose another file")
    try:
        with _locked(path.parent) as folder:
            text = read_text(path).text
            tokens = parse_tokens(text, str(path))
            document = tomlkit.parse(text if text.endswith("\n") or not text else f"{text}\n")
            yield document, tokens
            edited = tomlkit.dumps(document)
            parse_tokens(edited, str(path))
            # both files are written completely before either is renamed: a full disk changes neither
            with ExitStack() as written:
                written.enter_context(_replacing(path, edited))
                if out is not None:
                    written.enter_context(_replacing(out.resolve(), f"{made}\n"))
            os.fsync(folder)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"cannot write {error.filename or path}: {error.strerror}") from None


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    # not the token file itself: an edit replaces it, and the next command would lock the new one
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _replacing(path: Path, text: str) -> Iterator[None]:
    """Write a temporary file with mode 0600, and rename it to `path` when the ``with`` block ends without an error."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            if path.exists():
                _keep_owner(path, file.fileno())
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _keep_owner(path: Path, descriptor: int) -> None:
    found = path.stat()
    if found.st_uid != os.geteuid():  # root edits the file of a server that runs as another user
        os.fchown(descriptor, found.st_uid, found.st_gid)
