"""The code in the README and in the documentation runs."""

from __future__ import annotations

import re
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import ROOT, need

PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.stem != "ray")]
"""Pages whose code blocks run; a page may have none. tests/end_to_end/test_ray.py runs the one on Ray."""


@pytest.mark.timeout(600)  # a page has a dozen commands, and each is another Python that starts
@pytest.mark.parametrize("page", PAGES, ids=[path.stem for path in PAGES])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of each page runs against real servers (see pages.py)."""
    need("sybil")
    if re.search(r"^```python\n(?:(?!```).*\n)*.*\b(?:torch|pin_memory)\b", page.read_text(), re.MULTILINE):
        need("torch")
    if "\nopenssl " in page.read_text() and not shutil.which("openssl"):
        pytest.skip("needs openssl")
    from tests.docs.pages import Page

    shutil.copytree(Path(__file__).parent / "my_package", tmp_path / "my_package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with ExitStack() as stack:
        stack.callback(_forget, "my_package")
        Page(page, tmp_path, free_port, stack).run()


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
