"""Conventions of both commands: help, typos, versions, output formats, pipes, Ctrl-C, colors and completion."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click
import pytest

from teleloader.cli.commands import teleloader
from teleloader_server.cli.group import commands
from teleloader_server.cli.hosting import COMMANDS
from tests.conftest import ROOT, ServerProcess
from tests.end_to_end.made_up import MadeUpServer, serving
from tests.end_to_end.terminal import SERVER, TOOLS, Done, piped, terminal

HOSTED = "tests.end_to_end.hosted:"
STATISTICS = (["stats"], ["datasets"], ["workers"])
"""Commands that print the statistics of a server."""


@pytest.fixture(autouse=True)
def _without_default_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TELELOADER_URL", raising=False)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Run a server with fabricated statistics; return its URL."""
    with serving(MadeUpServer()) as server:
        yield server.url


@pytest.fixture(scope="module")
def hosting() -> Iterator[ServerProcess]:
    """Run a server with two datasets."""
    server = ServerProcess("--port", "0", "--num-workers", "1", HOSTED + "numbers", HOSTED + "failing")
    yield server
    server.end()


# -- help


def test_the_help_lists_all_commands() -> None:
    """The sections of both commands contain each subcommand once, with a help of its own."""
    shown = piped(TOOLS, "--help").out
    for name in teleloader.commands:
        assert len(re.findall(rf"^  {name} ", shown, re.MULTILINE)) == 1, name
        assert f"Usage: teleloader {name} [OPTIONS]" in piped(TOOLS, name, "--help").out
    shown = piped(SERVER, "--help").out
    for name, text in COMMANDS.items():
        assert re.search(rf"^  {name} +{text}$", shown, re.MULTILINE), name


@pytest.mark.parametrize("name", ["check", "token"])
def test_the_list_of_the_servers_commands_has_their_descriptions(name: str) -> None:
    """The list is written without importing the commands, so it repeats their descriptions."""
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    assert command.get_short_help_str(1000) == COMMANDS[name]


@pytest.mark.parametrize("program", [TOOLS, SERVER], ids=["teleloader", "teleloader-server"])
def test_examples_in_the_help_fit_80_columns(program: str) -> None:
    """Examples are not wrapped, so their lines must be short enough."""
    assert max(map(len, piped(program, "--help", COLUMNS="80").out.splitlines())) <= 80


# -- typos


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        (TOOLS, ["wrkers"], "unknown command 'wrkers'. Did you mean 'workers'?"),
        (
            TOOLS,
            ["xyz"],
            "unknown command 'xyz'. Available: stats, top, datasets, workers, errors, trace, peek, bench, audit",
        ),
        (TOOLS, ["stats", "--watc"], "--watch"),
        (SERVER, ["chek", "my_package.data:train"], "unknown command 'chek'. Did you mean 'check'?"),
        (SERVER, ["tokens"], "unknown command 'tokens'. Did you mean 'token'?"),
        (SERVER, ["token", "lst"], "unknown command 'lst'. Did you mean 'list'?"),
        (SERVER, ["--num-worker", "1"], "--num-workers"),
        (SERVER, ["numbers"], "invalid dataset 'numbers': expected numbers:NAME"),
    ],
)
def test_a_typo_is_an_error_with_a_suggestion(program: str, arguments: list[str], said: str) -> None:
    """The exit code is 2, and only stderr has output."""
    done = piped(program, *arguments)
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_a_misspelled_dataset_is_an_error_with_a_suggestion(hosting: ServerProcess) -> None:
    """The name is an argument, so the exit code is 2."""
    done = piped(TOOLS, "peek", hosting.url, "nubmers")
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith("hosts 'numbers', 'failing'. Did you mean 'numbers'?\n")


def test_a_misspelled_token_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    """Tokens whose names are not similar are listed, too."""
    file = str(tmp_path / "tokens.toml")
    for name in ("trainer", "prometheus"):
        piped(SERVER, "token", "add", name, "-f", file)
    done = piped(SERVER, "token", "revoke", "trainr", "-f", file)
    assert (done.code, done.err.splitlines()[-1]) == (
        2, f"Error: unknown token 'trainr': {file} contains trainer, prometheus. Did you mean 'trainer'?"
    )  # fmt: skip


# -- the default server


def test_the_variable_contains_the_default_server(hosting: ServerProcess) -> None:
    """The first argument is then the dataset, unless it is a URL, which has precedence."""
    shown = "batch 3 of epoch 0 of numbers on "
    done = piped(TOOLS, "peek", "numbers", "3", TELELOADER_URL=hosting.url)
    assert done.out.startswith(f"{shown}{hosting.url},")
    assert piped(TOOLS, "peek", "-b", "2", "--", "numbers", "3", TELELOADER_URL=hosting.url).code == 0
    nowhere = "http://127.0.0.1:9"
    assert piped(TOOLS, "peek", hosting.url, "numbers", "3", TELELOADER_URL=nowhere).out == done.out
    assert piped(TOOLS, "audit", "numbers", TELELOADER_URL=f"{hosting.url},{hosting.url}/").code == 0
    assert piped(TOOLS, "workers", TELELOADER_URL=hosting.url).code == 0


@pytest.mark.parametrize("arguments", [["stats"], ["peek", "numbers"], ["bench", "numbers", "--seconds", "1"]])
def test_a_missing_server_is_an_error_that_states_what_to_set(arguments: list[str]) -> None:
    """The exit code is 2, as for any invalid argument."""
    done = piped(TOOLS, *arguments)
    assert (done.code, done.out) == (2, "")
    assert "pass http://host:port as the first argument, or set TELELOADER_URL" in done.err
    assert ("got 'numbers'" in done.err) == ("numbers" in arguments)


# -- versions


@pytest.mark.parametrize(("program", "name"), [(TOOLS, "teleloader"), (SERVER, "teleloader-server")])
@pytest.mark.parametrize("option", ["-V", "--version"])
def test_versions_of_python_and_dependencies_are_shown(program: str, name: str, option: str) -> None:
    """The first line is the program's version; packages that are not installed are omitted."""
    done = piped(program, option)
    found = dict(line.split(maxsplit=1) for line in done.out.splitlines())
    assert (done.code, next(iter(found))) == (0, name)
    assert found[name] == version("teleloader")
    assert found["Python"] == sys.version.split()[0]
    assert "platform" in found
    for package in ("click", "httpx", "msgpack", "numpy", "rich", "xxhash"):
        assert found[package] == version(package)


# -- the output format


def test_tokens_as_json(tmp_path: Path) -> None:
    """The output is one line with names, scopes and expiry, and without secrets."""
    file = tmp_path / "tokens.toml"
    secret = piped(SERVER, "token", "add", "trainer", "-f", str(file), "--days", "30").out.strip()
    piped(SERVER, "token", "add", "ops", "-f", str(file), "--scope", "admin")
    done = piped(SERVER, "token", "list", "-f", str(file), "-o", "json")
    first, second = json.loads(done.out)
    assert (first["name"], first["scopes"], first["expired"]) == ("trainer", ["read", "stats"], False)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first["expires"])
    assert second == {"name": "ops", "scopes": ["admin"], "expires": None, "expired": False}
    assert secret not in done.out
    assert done.out.count("\n") == 1


@pytest.mark.parametrize("command", [*STATISTICS, ["stats", "--watch"]], ids=" ".join)
def test_an_unknown_format_is_an_error(command: list[str], url: str) -> None:
    """The formats are table and json."""
    done = piped(TOOLS, *command, url, "-o", "yaml")
    assert (done.code, done.out) == (2, "")
    assert "'yaml' is not one of 'table', 'json'" in done.err


# -- pipes, Ctrl-C and colors


def in_bash(script: str, folder: Path, **environment: str) -> Done:
    """Run a script whose commands ``teleloader`` and ``teleloader-server`` are those of this checkout."""
    for name, program in (("teleloader", TOOLS), ("teleloader-server", SERVER)):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(program)} "$@"\n')
        path.chmod(0o755)
    done = subprocess.run(
        ["bash", "--norc", "-c", script], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **environment},
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    "command",
    [
        "teleloader stats", "teleloader stats --watch", "teleloader stats --watch -o json", "teleloader top",
        "teleloader top -o json", "teleloader datasets", "teleloader workers", "teleloader --help",
        "teleloader --version", "teleloader-server --help", "teleloader-server check --demo",
    ],
)  # fmt: skip
def test_a_pipe_that_is_closed_ends_a_command_quietly(command: str, url: str, tmp_path: Path) -> None:
    """The exit code is that of SIGPIPE, and stderr is empty."""
    script = f"{command} | true; echo ${{PIPESTATUS[0]}}"
    done = in_bash(script, tmp_path, TELELOADER_URL=url)
    assert (done.out, done.err) == ("141\n", "")


def test_the_first_line_of_a_long_output_can_be_read(url: str, tmp_path: Path) -> None:
    """`head -1` ends commands that would otherwise continue."""
    done = in_bash("teleloader stats --watch | head -1", tmp_path, TELELOADER_URL=url)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("teleloader-server 1.2.3 on cpu-box")


@pytest.mark.parametrize("command", [*STATISTICS, ["top"], ["peek"], ["bench"]], ids=" ".join)
def test_ctrl_c_interrupts_a_request(command: list[str]) -> None:
    """The exit code is 130 without a traceback, although the server never responds."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with terminal(TOOLS, *command, address) as screen:
            connection, _ = silent.accept()
            screen.press_ctrl_c()
            assert screen.wait() == 130
            connection.close()
    assert "Traceback" not in screen.text
    assert "Aborted" not in screen.text


def test_ctrl_c_interrupts_a_check() -> None:
    """The exit code is 130 without a traceback, while a dataset is constructed."""
    with terminal(SERVER, "check", HOSTED + "numbers", "--batches", "100000000") as screen:
        screen.await_text(r"numbers: \w+")
        screen.press_ctrl_c()
        assert screen.wait() == 130
    assert "Traceback" not in screen.text


@pytest.mark.parametrize("value", ["1", ""])
def test_no_color_disables_colors(value: str, url: str) -> None:
    """Terminals receive no colors if NO_COLOR is set and not empty (https://no-color.org)."""
    if not value and int(importlib.metadata.version("rich").partition(".")[0]) < 14:
        pytest.skip("older versions of rich also heed an empty NO_COLOR")
    color = re.compile(r"\x1b\[[\d;]*3[0-7][\d;]*m")
    for program, arguments in ((TOOLS, ["stats", url]), (SERVER, ["check", "--demo", "--batches", "1"])):
        with terminal(program, *arguments, NO_COLOR=value) as screen:
            assert screen.wait() == 0
        assert bool(color.search(screen.raw)) == (not value), program


# -- completion


def completed(line: str, folder: Path, **environment: str) -> list[str]:
    """Return the completions of a command line in bash, whose last word is incomplete."""
    words = line.split(" ")
    program = words[0]
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    script = (
        f'eval "$({variable}=bash_source {program})"\n'
        f"COMP_WORDS=({' '.join(shlex.quote(word) for word in words)})\n"
        f"COMP_CWORD={len(words) - 1}\n"
        f"$(complete -p {program} | sed 's/.*-F \\([^ ]*\\).*/\\1/') {program}\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = in_bash(script, folder, **environment)
    assert done.code == 0, done.err
    return done.out.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("teleloader wo", {"workers"}),
        ("teleloader-server ch", {"check"}),
        ("teleloader-server token re", {"revoke"}),
        ("teleloader stats --wat", {"--watch"}),
        ("teleloader stats -o j", {"json"}),
        ("teleloader-server --num", {"--num-workers"}),
        ("teleloader-server check --batch-s", {"--batch-size"}),
        ("teleloader-server my_package.data:train ", set()),
    ],
)
def test_bash_completes_commands_and_options(line: str, found: set[str], tmp_path: Path) -> None:
    """The script that the documentation describes completes subcommands, options and their values."""
    assert set(completed(line, tmp_path)) == found


def test_bash_completes_names_of_datasets(hosting: ServerProcess, tmp_path: Path) -> None:
    """The default server lists its datasets; without one, and if it does not respond, there are no completions."""
    assert completed("teleloader peek nu", tmp_path, TELELOADER_URL=hosting.url) == ["numbers"]
    assert completed("teleloader audit -b 2 ", tmp_path, TELELOADER_URL=hosting.url) == ["numbers", "failing"]
    assert completed("teleloader peek nu", tmp_path, TELELOADER_URL="http://127.0.0.1:9") == []
    assert completed("teleloader peek nu", tmp_path) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("program", [TOOLS, SERVER], ids=["teleloader", "teleloader-server"])
def test_scripts_for_all_documented_shells(program: str, shell: str) -> None:
    """The documentation has the variables and the names of the scripts."""
    name = "teleloader" if program == TOOLS else "teleloader-server"
    variable = f"_{name.upper().replace('-', '_')}_COMPLETE"
    assert f"{variable}={shell}_source {name}" in (ROOT / "docs" / "tools.md").read_text()
    done = piped(program, **{variable: f"{shell}_source"})
    assert (done.code, f"{variable}={shell}_complete" in done.out) == (0, True), done
