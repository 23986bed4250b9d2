"""How Sphinx makes the documentation's site of the Markdown here, of the README, and of docstrings: ``make docs``."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Final

from docutils.nodes import document
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

from teleloader_shared.version import VERSION

project = "teleloader"
release = version = VERSION
html_title = f"teleloader {VERSION}"
html_theme = "furo"
html_show_copyright = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

# Headings have the anchors that GitHub gives them, so that a link works in both places
myst_heading_anchors = 4

# A link that leads nowhere is an error, but for what is documented elsewhere: whoever builds this may be offline
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|contextlib|fractions|numpy|np|ray|torch|typing|datetime|pathlib)\..*"),
    # described with the argument
    (r"py:class", "Batch|Compression|NDArray|OnError|Output|StoppingStrategy|Tail|Transform|Weights"),
]

default_role = "literal"
smartquotes = False  # it makes a dash of the two hyphens of an option
autodoc_member_order = "bysource"
autodoc_mock_imports = ["cryptography", "ray"]
maximum_signature_line_length = 100
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
python_use_unqualified_type_names = True
napoleon_use_ivar = True

PAGES: Final = {
    "../README.md": "index.md",
    "../CHANGELOG.md": "changelog.md",
    "../SECURITY.md": "threats.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../benchmarks/README.md": "benchmarks.md",
}
"""Files that stand outside this folder, and the pages that include them."""

_HIDDEN: Final = "\ue000"
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def with_links_of_the_site(text: str, folder: str) -> str:
    """The Markdown with links to files, as GitHub needs them, made links between pages.

    Args:
        text: What stands in a file.
        folder: Where that is, seen from here.
    """

    def to_page(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        return f"]({PAGES.get(target, target)}"

    return _LINK.sub(to_page, text)


def _read_page(app: Sphinx, name: str, content: list[str]) -> None:
    content[0] = with_links_of_the_site(content[0], "")


def _read_part(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    content[0] = with_links_of_the_site(content[0], path.parent.as_posix())


def _hide_colons(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Keep napoleon from what it does to a field's docstring: to take what stands before a colon for the type."""
    if what in ("attribute", "property"):
        lines[:] = [line.replace(": ", _HIDDEN) for line in lines]


def _show_colons(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    lines[:] = [line.replace(_HIDDEN, ": ") for line in lines]


def _look_everywhere(app: Sphinx, doctree: document) -> None:
    """Let a docstring name a class without its module."""
    for reference in doctree.findall(pending_xref):
        if reference.get("refdomain") == "py":
            reference["refspecific"] = True


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.connect("source-read", _read_page)
    app.connect("include-read", _read_part)
    napoleon = 500
    app.connect("autodoc-process-docstring", _hide_colons, priority=napoleon - 1)
    app.connect("autodoc-process-docstring", _show_colons, priority=napoleon + 1)
    app.connect("doctree-read", _look_everywhere)
