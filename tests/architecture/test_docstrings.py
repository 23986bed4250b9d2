"""Public docstrings begin with what the object is or does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import ROOT

PACKAGES: Final = ("client", "server", "shared")

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


@pytest.mark.parametrize("package", PACKAGES)
def test_public_docstrings_name_their_subject(package: str) -> None:
    """No public docstring begins with What, Whether, How, Who, Whose, Which, It, Those or That."""
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    assert [
        f"{name}: {docstring.splitlines()[0]}"
        for file in found
        for name, docstring in public_docstrings(file)
        if OPENINGS.match(docstring)
    ] == []
