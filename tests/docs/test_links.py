"""Links between Markdown files lead somewhere on GitHub, as ``make docs`` shows that they do in the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

FILES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "docs").rglob("*.md"),
]


def links(path: Path) -> list[str]:
    """Return the targets of a file's links, except external ones and those in code."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\((?!https?:)([^)\s]+)\)", text)


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub generates for a file's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_links_lead_somewhere(path: Path) -> None:
    """Each link leads to an existing file and heading."""
    for link in links(path):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
