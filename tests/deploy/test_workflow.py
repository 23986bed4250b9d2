"""The workflow for hosted runners names files and commands of this checkout."""

from __future__ import annotations

import re

from tests.conftest import ROOT

WORKFLOW = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")


def test_the_workflow_names_existing_tests() -> None:
    """Each folder and module of tests exists: pytest ignores unknown paths of --ignore silently."""
    paths = re.findall(r"\btests/[\w/]+(?:\.py)?", WORKFLOW)
    assert "tests/client/test_loader.py" in paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_workflow_runs_the_command_of_the_readme() -> None:
    """On Linux, the workflow runs the command that the README gives to developers."""
    commands = re.findall(r"- run: (make .*)", WORKFLOW)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert commands
    assert [command for command in commands if not re.search(rf"^{command}\b", readme, re.MULTILINE)] == []
