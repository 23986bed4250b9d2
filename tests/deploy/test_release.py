""".ci/release.py: what must hold before a release, and the files that it writes."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

TODAY = datetime.date(2026, 11, 26)
SECTION = """# Changelog

## 0.2.0 - 2026-11-26

### Added

- A [page](docs/page.md), a [site](https://a.b), an [anchor](#x).
"""


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Import the module, in an empty working directory with one page."""
    monkeypatch.syspath_prepend(ROOT / ".ci")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").touch()
    return importlib.import_module("release")


def committed(tmp_path: Path) -> None:
    """Commit all files of the working directory to a new repository."""
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "first"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *command], check=True, cwd=tmp_path)


def test_the_section_of_the_changelog_is_returned(release: Any) -> None:
    """The section without its heading is the text of the release notes."""
    changes = release.changes_of("0.2.0", SECTION + "\n## 0.1.0 - 2026-01-01\n\n- Old.\n", TODAY)
    assert (changes[:9], changes[-16:]) == ("### Added", "an [anchor](#x).")


@pytest.mark.parametrize(
    ("changelog", "reason"),
    [
        ("# Changelog\n", "begins with 'no section'"),
        (SECTION.replace("0.2.0 - 2026-11-26", "Unreleased"), "begins with '## Unreleased', expected '## 0.2.0 - 2026"),
        (SECTION.replace("11-26", "11-25"), "expected '## 0.2.0 - 2026-11-26'"),
        (SECTION.replace("0.2.0", "0.2.1"), "begins with '## 0.2.1"),
        (SECTION[: SECTION.index("- A")], "lists no change"),
        (SECTION.replace("page.md", "other.md"), "links to 'docs/other.md', which does not exist"),
    ],
)
def test_a_changelog_without_the_release_is_refused(release: Any, changelog: str, reason: str) -> None:
    """The first section must have the version and today's date, at least one change, and no broken link."""
    with pytest.raises(SystemExit, match=reason):
        release.changes_of("0.2.0", changelog, TODAY)


def test_only_a_committed_new_version_is_released(release: Any, tmp_path: Path) -> None:
    """Changes in the tree, another version in pyproject.toml, and an existing tag are refused."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.2.0"\n')
    committed(tmp_path)
    release.check_tree()
    release.check_version("0.2.0")
    with pytest.raises(SystemExit, match=r"differs from '0.2.0' in pyproject"):
        release.check_version("0.3.0")
    with pytest.raises(SystemExit, match=r"invalid version 'v0.2.0'"):
        release.check_version("v0.2.0")
    subprocess.run(["git", "tag", "v0.2.0"], check=True)
    with pytest.raises(SystemExit, match=r"the tag v0.2.0 exists"):
        release.check_version("0.2.0")
    (tmp_path / "new").touch()
    with pytest.raises(SystemExit, match="uncommitted changes"):
        release.check_tree()


def test_images_without_a_digest_are_named(release: Any, tmp_path: Path) -> None:
    """The notes list each base image once, with its digest or "not pinned"."""
    digest = "sha256:" + "0123456789abcdef" * 4
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "a.Dockerfile").write_text(f"ARG PYTHON=python:3.12@{digest}\nFROM ${{PYTHON}}\n")
    (tmp_path / "docker-compose.yml").write_text("    image: grafana/grafana:12.1.1\n    image: teleloader-server\n")
    assert dict(release.images()) == {"python:3.12": digest, "grafana/grafana:12.1.1": ""}
    text = release.notes("0.2.0", "- A change.", "0  a.whl\n")
    assert f"| `python:3.12` | `{digest}` |" in text
    assert "| `grafana/grafana:12.1.1` | not pinned |" in text


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")
def test_checksums_are_signed(release: Any, tmp_path: Path) -> None:
    """The checksums are those of the files; a changed file of checksums does not verify."""
    wheel, key, sums = tmp_path / "a.whl", tmp_path / "key", tmp_path / "SHA256SUMS"
    wheel.write_bytes(b"wheel")
    sums.write_text(release.sums_of([wheel]))
    assert sums.read_text() == f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl\n"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    release.sign(sums, key)
    verify = ["ssh-keygen", "-q", "-Y", "verify", "-f", tmp_path / "allowed_signers", "-I", release.IDENTITY,
              "-n", release.NAMESPACE, "-s", f"{sums}.sig"]  # fmt: skip
    assert subprocess.run(verify, input=sums.read_bytes(), capture_output=True).returncode == 0
    assert subprocess.run(verify, input=sums.read_bytes() + b" ", capture_output=True).returncode != 0
