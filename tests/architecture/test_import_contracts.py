"""Each import contract of pyproject.toml fails when a forbidden import is added."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import ROOT

PACKAGES: Final = ("client/teleloader", "server/teleloader_server", "shared/teleloader_shared")
LINT: Final = "from importlinter.cli import lint_imports_command; lint_imports_command()"
CONTRACTS: Final = [
    contract["name"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
]

FORBIDDEN: Final = {
    "client and server know shared, and not each other": ("client/teleloader/errors.py", "teleloader_server"),
    "only teleloader_server.ray imports Ray": ("server/teleloader_server/cli/__init__.py", "ray"),
    "client: the loader iterates, fetch decides what to request, transports carry it": (
        "client/teleloader/errors.py",
        "teleloader.loader",
    ),
    "server: the path of a batch, from the endpoints down to the dataset": (
        "server/teleloader_server/request_ids.py",
        "teleloader_server.dispatch",
    ),
    "shared: messages and frames stand on plain records": (
        "shared/teleloader_shared/units.py",
        "teleloader_shared.codec",
    ),
    "decisions have no I/O, threads or processes, not even through what they import": (
        "server/teleloader_server/dispatch/quotas.py",
        "threading",
    ),
    "fetch knows the interface of transports, and neither HTTP nor sockets": (
        "client/teleloader/fetch/reorder.py",
        "http.client",
    ),
    "loading and workers know no web server and no authentication": (
        "server/teleloader_server/loading/worker_info.py",
        "fastapi",
    ),
    "nothing unpickles (probe only tries whether a dataset could be pickled)": (
        "client/teleloader/errors.py",
        "pickle",
    ),
}
"""Module and forbidden import for each contract."""

USER_MODULES: Final = {"server/teleloader_server/loading/datasets.py", "shared/teleloader_shared/codec.py"}
"""Modules that import users' modules and optional libraries by names known only at run time."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a copy of the three packages and of pyproject.toml."""
    folder = tmp_path_factory.mktemp("checkout")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "static"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def broken(checkout: Path) -> list[str]:
    """Return the names of the contracts that import-linter reports as broken."""
    paths = os.pathsep.join(str((checkout / package).parent) for package in PACKAGES)
    done = subprocess.run(
        [sys.executable, "-c", LINT], cwd=checkout, env={**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"},
        capture_output=True, text=True,
    )  # fmt: skip
    text = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
    found = [name for name in CONTRACTS if re.search(rf"^{re.escape(name)} BROKEN", text, re.MULTILINE)]
    assert bool(found) == (done.returncode == 1), done.stdout + done.stderr
    return found


def test_the_copy_keeps_all_contracts(checkout: Path) -> None:
    """Without an injected import, import-linter reports no broken contract."""
    assert broken(checkout) == []


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_forbidden_import_breaks_its_contract(checkout: Path, contract: str) -> None:
    """import-linter names the contract; a contract without an entry in FORBIDDEN fails, too."""
    file, module = FORBIDDEN[contract]
    source = (checkout / file).read_text()
    (checkout / file).write_text(f"{source}\nimport {module}\n")
    try:
        assert contract in broken(checkout)
    finally:
        (checkout / file).write_text(source)


def test_worker_health_is_one_of_the_decisions(checkout: Path) -> None:
    """The contract for pure decisions includes worker_health, like the dispatcher."""
    file = checkout / "server/teleloader_server/workers/health.py"
    source = file.read_text()
    file.write_text(f"{source}\nimport asyncio\n")
    try:
        assert "decisions have no I/O, threads or processes, not even through what they import" in broken(checkout)
    finally:
        file.write_text(source)


def dynamic_imports(source: str) -> Iterator[int]:
    """Yield the lines that import a module by a name that is a value: import-linter does not see these."""
    for node in ast.walk(ast.parse(source)):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        imported = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if {name, *imported} & {"import_module", "__import__"}:
            yield node.lineno  # type: ignore[attr-defined]


def test_modules_of_this_project_are_imported_by_statements_only() -> None:
    """Only listed modules use importlib.import_module or __import__, which bypass the contracts."""
    found = {
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        if any(dynamic_imports(file.read_text()))
    }
    assert found == USER_MODULES


@pytest.mark.parametrize(
    "source",
    ["import importlib\nimportlib.import_module('teleloader_server')", "__import__('teleloader_server')",
     "from importlib import import_module as load"],
)  # fmt: skip
def test_dynamic_imports_are_found(source: str) -> None:
    """Dynamic imports are found under any name of the function."""
    assert any(dynamic_imports(source))
