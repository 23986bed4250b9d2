"""Imports of each process: workers load no web server, the client no server, and none loads torch unless needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

WEB = ("fastapi", "starlette", "uvicorn")
TORCH = ("torch",)
SERVER = ("teleloader_server",)


def loaded(program: str) -> set[str]:
    """Return the packages that a new interpreter has imported after the program."""
    program += "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-W", "error", "-c", program]
    return set(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.split())


@pytest.mark.parametrize(
    ("program", "unwanted"),
    [
        ("import teleloader_server", WEB + TORCH),
        ("import teleloader_server.loading.direct", WEB + TORCH),
        ("from teleloader import DataLoader; list(DataLoader([1], output='numpy'))", WEB + TORCH),
        ("import teleloader_server.workers.worker", WEB + TORCH),
        ("import teleloader_server.workers.forkserver", WEB + TORCH),
        ("import teleloader", WEB + TORCH + SERVER),
        ("import teleloader_shared", WEB + TORCH + SERVER),
        ("import teleloader_server.cli", TORCH),
    ],
    ids=["server", "load", "loader without workers", "worker", "forkserver", "client", "shared", "command"],
)
def test_an_import_loads_no_more_than_it_needs(program: str, unwanted: tuple[str, ...]) -> None:
    """Each import loads only the required packages in a new interpreter."""
    assert not loaded(program) & set(unwanted)


def test_importing_all_of_the_client_loads_no_torch() -> None:
    """The client imports torch only when tensors are requested; the modules for frameworks require it."""
    program = """
import importlib, pkgutil
import teleloader
for module in pkgutil.walk_packages(teleloader.__path__, "teleloader."):
    if module.name != "teleloader.torch" and not module.name.startswith("teleloader.frameworks."):
        importlib.import_module(module.name)
"""
    assert not loaded(program) & {*WEB, *TORCH, *SERVER}


def test_the_check_sees_what_is_loaded() -> None:
    """The check detects loaded modules."""
    assert {"fastapi", "uvicorn"} <= loaded("import fastapi, uvicorn")


@pytest.mark.parametrize(
    "name", ["default_collate", "default_convert", "get_worker_info", "serve", "ConfigError", "WorkerInfo"]
)
def test_the_servers_public_names_are_there(name: str) -> None:
    """Public names are available without importing the web server."""
    assert not loaded(f"from teleloader_server import {name}") & {*WEB, *TORCH}
