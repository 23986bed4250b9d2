"""Public docstrings begin with what the object is or does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import ROOT

CONVERTED: Final = (
    "client/teleloader/__init__.py",
    "client/teleloader/api",
    "client/teleloader/arguments.py",
    "client/teleloader/cli",
    "client/teleloader/dataset.py",
    "client/teleloader/errors.py",
    "client/teleloader/fetch/__init__.py",
    "client/teleloader/fetch/direct.py",
    "client/teleloader/fetch/fetcher.py",
    "client/teleloader/fetch/length_check.py",
    "client/teleloader/fetch/shards.py",
    "client/teleloader/fetch/stager.py",
    "client/teleloader/frameworks.py",
    "client/teleloader/functions.py",
    "client/teleloader/hosting.py",
    "client/teleloader/iterations.py",
    "client/teleloader/loader.py",
    "client/teleloader/orders.py",
    "client/teleloader/sampling.py",
    "client/teleloader/state.py",
    "client/teleloader/stats.py",
    "client/teleloader/tensors",
    "client/teleloader/transport",
    "server",
    "shared",
)
"""Packages and modules whose docstrings hold the rule. Missing: four modules of client/teleloader/fetch."""

OPENINGS: Final = re.compile(r"(What|Whether|How|Who|Whose|Which|It|Those|That)\b")


def public_docstrings(file: Path) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of the module, and of its public classes, functions and methods."""

    def visit(
        node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str
    ) -> Iterator[tuple[str, str]]:
        if docstring := ast.get_docstring(node):
            yield name, docstring
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in node.body:
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name[0] != "_":
                    yield from visit(child, f"{name}:{child.name}")

    yield from visit(ast.parse(file.read_text()), str(file.relative_to(ROOT)))


def files(place: str) -> list[Path]:
    """Return the Python files of a package, or a single module."""
    path = ROOT / place
    return [path] if path.suffix else sorted(path.rglob("*.py"))


@pytest.mark.parametrize("place", CONVERTED)
def test_public_docstrings_name_their_subject(place: str) -> None:
    """A docstring that begins with What, Whether, How, Who, Whose, Which, It, Those or That names none."""
    found = files(place)
    assert found
    assert [
        f"{name}: {docstring.splitlines()[0]}"
        for file in found
        for name, docstring in public_docstrings(file)
        if OPENINGS.match(docstring)
    ] == []
