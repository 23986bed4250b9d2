"""Execution of the code on a documentation page, from top to bottom.

- A block that begins with a comment with a file name (``# my_package/data.py``) is written to that file.
- TOML is read by the server's own reader: as tokens if it contains a ``sha256``, as identities if it contains
  ``match``, otherwise as a configuration.
- Shell commands run in the page's folder. A server runs until the page ends; SIGINT ends ``--watch`` and ``top``.
  Commands that install or build are not run, but the extras and targets that they name must exist.
- ``export NAME=value`` applies to the machine that trains: to all subsequent commands except servers.
- ``tl_...`` represents the token that was printed last.
- A ``text`` block is the output of the last command, except for numbers; ``...`` represents other varying parts.
- Python runs in one namespace; ``>>>`` shows its output. ``<!-- skip: next -->`` before a block skips the block.

The addresses 10.0.0.x of a page are replaced by addresses of the loopback network that are unique to the page, and port
8000 by a free one. A server on 10.0.0.x would not start without tokens, so one without tokens is an error here, too.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from typing import Final

import pytest
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

from teleloader_server.auth.identity_config import parse_identity
from teleloader_server.auth.tokens import parse_tokens
from teleloader_server.config import read_toml
from tests.conftest import ROOT, ServerProcess

PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE: Final = (ROOT / "Makefile").read_text()
NOT_RUN: Final = ("docker", "podman", "sudo", "systemctl", "kubectl", "git", "ulimit")

_FILE = re.compile(r"# ([\w./-]+\.(?:py|toml|json))\n")
_VARIES = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_NUMBER = re.compile(r"\b\d[\d.,:-]*(?: ?(?:[numkKMGT]?s|[KMGT]?i?B))?\b")
"""Number with its unit, which may differ on another machine."""
_TOKEN = re.compile(r"\btl_[\w-]{40,}")
_ANY_TOKEN: Final = "tl_..."
_networks = cycle(range(0, 240, 10))


def same_but(expected: str, got: str) -> bool:
    """Return True if `got` equals `expected` except for numbers and text that `expected` replaces by ``...``.

    A line with nothing else stands for any number of lines, also for none.
    """
    wanted, found = (_NUMBER.sub("#", text.strip()) + "\n" for text in (expected, got))
    return any(
        doctest.OutputChecker().check_output(lines, found, _VARIES)
        for lines in (wanted, wanted.replace("\n...\n", "\n"))
    )


class Page:
    """One page with its folder and running processes.

    Args:
        path: The Markdown file.
        folder: An empty folder; ``my_package`` is already in it.
        port: A free one.
        stack: Ends the servers.
    """

    def __init__(self, path: Path, folder: Path, port: int, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._network = f"127.{os.getpid() // 254 % 254 + 1}.{os.getpid() % 254 + 1}.{next(_networks)}"
        self._port = port
        self._printed = ""
        self._token = _ANY_TOKEN
        self._exported = pytest.MonkeyPatch()
        stack.callback(self._exported.undo)
        for name in [name for name in os.environ if name.startswith("TELELOADER_")]:
            self._exported.delenv(name)
        self._environment = {
            **os.environ,
            "PATH": f"{_commands(folder)}:{os.environ['PATH']}",
            "TELELOADER_PORT": str(port),
        }
        self._on_the_trainer: dict[str, str] = {}
        # the code keeps its line numbers
        self._text = folder / path.name
        self._text.write_text(self.here(path.read_text(encoding="utf-8")), encoding="utf-8")

    def here(self, text: str) -> str:
        """Return a text of the page with its addresses and port replaced."""
        head, _, last = self._network.rpartition(".")
        text = re.sub(r"\b10\.0\.0\.(\d)\b", lambda found: f"{head}.{int(last) + int(found[1])}", text)
        return re.sub(r"(?<=[: ])8000\b", str(self._port), text)

    def run(self) -> None:
        """Run all code of the page."""
        parsers = (
            SkipParser(),
            PythonCodeBlockParser(doctest_optionflags=_VARIES),
            CodeBlockParser("sh", self._shell),
            CodeBlockParser("toml", self._toml),
            CodeBlockParser("text", self._output),
        )
        for example in Sybil(parsers).parse(self._text):
            if isinstance(example.parsed, str) and (named := _FILE.match(example.parsed)) and named[1].endswith(".py"):
                self._write(named[1], example.parsed)
            else:
                example.evaluate()

    def _write(self, name: str, content: str) -> Path:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        return path

    def _toml(self, example: Example) -> str | None:
        text = example.parsed.replace(_ANY_TOKEN, self._token)
        if "sha256" in text:
            parse_tokens(text, "the page")
            return None
        named = _FILE.match(text)
        path = self._write(named[1] if named else "nameless.toml", text)
        if "match = " in text:
            parse_identity(text, "the page", self._folder)
        else:
            read_toml(path)
        return None

    def _output(self, example: Example) -> str | None:
        return None if same_but(example.parsed, self._printed) else f"it prints something else:\n{self._printed}"

    def _shell(self, example: Example) -> str | None:
        for line in example.parsed.replace("\\\n", " ").splitlines():
            command = line.replace(_ANY_TOKEN, self._token)
            words = shlex.split(command, comments=True)
            if words and (complaint := self._command(command, words)):
                return complaint
        return None

    def _command(self, command: str, words: list[str]) -> str | None:
        if words[0] in NOT_RUN or (words[0] == "curl" and not shutil.which("curl")):
            return None
        if words[0] == "make":
            missing = [name for name in words[1:] if "=" not in name and not re.search(rf"^{name}:", MAKEFILE, re.M)]
            return f"no target {missing}" if missing else None
        if words[:2] == ["pip", "install"]:
            extras = re.findall(r"[\w-]+", " ".join(re.findall(r"\[([^]]*)\]", command)))
            missing = [extra for extra in extras if extra not in PROJECT["optional-dependencies"]]
            return f"no extra {missing}" if missing else None
        if words[0] == "export":
            for assignment in words[1:]:
                name, _, value = assignment.partition("=")
                self._exported.setenv(name, value)
                self._on_the_trainer[name] = value
            return None
        if words[0] == "teleloader-server" and not {"check", "ray", "token", "--help", "--version"} & set(words):
            return self._serve(words[1:])
        return self._run(command, is_endless="--watch" in words or words[:2] == ["teleloader", "top"])

    def _serve(self, arguments: list[str]) -> str | None:
        server = ServerProcess(*arguments, folder=self._folder, environment=self._environment)
        self._stack.callback(server.end)
        server.await_line("dashboard: ")  # the banner's last line
        self._printed = "".join(server.log)
        reached = self._network.rpartition(".")[0] in server.url
        if reached and "access: without authentication" in self._printed:
            return "it refuses to start: others reach it, and it has no tokens"
        return None

    def _run(self, command: str, *, is_endless: bool) -> str | None:
        running = subprocess.Popen(
            ["bash", "-c", command], cwd=self._folder, env={**self._environment, **self._on_the_trainer},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert running.stdout is not None
        with running:
            first = running.stdout.readline()
            if is_endless:
                os.killpg(running.pid, signal.SIGINT)
            self._printed = first + running.stdout.read()
        if shown := _TOKEN.search(self._printed):
            self._token = shown[0]
        good = (0, 130) if is_endless else (0,)
        return None if running.wait() in good else f"{command!r} ends with {running.returncode}:\n{self._printed}"


def _commands(folder: Path) -> Path:
    """Create a folder with the commands of this checkout, independent of installed ones."""
    commands = folder / ".bin"
    commands.mkdir()
    programs = {
        "python": '"$@"',
        "teleloader": '-c "from teleloader.cli import main; main()" "$@"',
        "teleloader-server": '-c "from teleloader_server.cli import main; main()" "$@"',
    }
    for name, arguments in programs.items():
        path = commands / name
        path.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}\n")
        path.chmod(0o755)
    return commands
