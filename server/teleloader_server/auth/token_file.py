"""Token files of a server: loaded at start-up, and reloaded after changes."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from teleloader_server.auth.file_watch import FileWatch
from teleloader_server.auth.tokens import Tokens, parse_tokens, single_token
from teleloader_server.config import ConfigError
from teleloader_shared.secret import Secret
from teleloader_shared.units import counted

TOKENS_VARIABLE: Final = "TELELOADER_SERVER_TOKENS"
"""Environment variable with the path of the server's token table (``--tokens``)."""
MAX_TOKENS_BYTES: Final = 2**20

logger = logging.getLogger(__name__)


class TokenFile:
    """Token file that is reloaded when it changes.

    Args:
        path: Path of the file.
        parse: Function that parses the file's content (first argument); the second argument is the file's name, for
            error messages.

    Raises:
        ConfigError: If the file is missing, unreadable or invalid, or lists no tokens.
    """

    def __init__(self, path: Path, parse: Callable[[str, str], Tokens]) -> None:
        self._path = path
        self._parse = parse
        self._watch = FileWatch(path)
        self.tokens = self._load()
        if not self.tokens.entries:
            raise ConfigError(
                f"no token in {path}: the file is missing or empty, so no client could authenticate. Write a token to "
                f"the file; for --tokens, run: teleloader-server token add NAME --file {path}"
            )

    @classmethod
    def table(cls, path: Path) -> TokenFile:
        """Open a file with one TOML table per token (``--tokens``)."""
        return cls(path, parse_tokens)

    @classmethod
    def single(cls, path: Path) -> TokenFile:
        """Open a file that contains a single token (``--token-file``)."""
        return cls(path, _parse_single)

    def reload_if_changed(self) -> bool:
        """Reload the tokens if the file changed; return True if the tokens were replaced.

        An empty or missing file revokes all tokens of the file. If the file is invalid or unreadable, the previous
        tokens stay valid, so that a typing error does not stop training.
        """
        if not self._watch.poll():
            return False
        try:
            tokens = self._load()
        except ConfigError as error:
            logger.error("token reload failed, keeping the previous tokens: %s", error)
            return False
        if self._watch.has_changed():
            return False
        self.tokens = tokens
        if tokens.entries:
            logger.info("reloaded %s: %s", self._path, format_tokens(tokens))
        else:
            logger.warning("%s is empty or missing: clients cannot authenticate. Add a token to the file", self._path)
        return True

    def _load(self) -> Tokens:
        found = read_text(self._path)
        tokens = self._parse(found.text, str(self._path))
        if found.is_public and tokens.holds_secrets:
            logger.warning("every user of this machine can read tokens in %s: run chmod 600 on the file", self._path)
        return tokens


class TokenText(NamedTuple):
    """Content of a token file, and a flag for files that every user of the machine can read."""

    text: Secret
    is_public: bool
    """True if every user of the machine can read the file."""


def read_text(path: Path, kind: str = "token file") -> TokenText:
    """Read a token file or identity file; a missing file is treated as empty.

    Args:
        path: Path of the file.
        kind: Kind of the file, for error messages.

    Raises:
        ConfigError: If the file is unreadable, is not UTF-8 text, or exceeds `MAX_TOKENS_BYTES`.
    """
    try:
        with path.open("rb") as file:
            content = Secret(file.read(MAX_TOKENS_BYTES + 1).decode())
            is_public = bool(stat.S_IMODE(os.fstat(file.fileno()).st_mode) & stat.S_IROTH)
    except (FileNotFoundError, NotADirectoryError):
        return TokenText(Secret(), is_public=False)
    except OSError as error:
        raise ConfigError(f"cannot read {kind} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"invalid {kind} {path}: expected UTF-8 text") from None
    if len(content) > MAX_TOKENS_BYTES:
        raise ConfigError(f"invalid {kind} {path}: expected at most {MAX_TOKENS_BYTES:,} bytes")
    return TokenText(content, is_public)


def format_tokens(tokens: Tokens) -> str:
    """Format the token count and the first five token names for log lines."""
    names = [entry.principal.name for entry in tokens.entries]
    more = "" if len(names) <= 5 else f" and {len(names) - 5} more"
    return f"{counted(len(names), 'token')} ({', '.join(names[:5])}{more})"


def _parse_single(text: str, where: str) -> Tokens:
    token = Secret(text.strip())
    return single_token(token, where) if token else Tokens(())
