"""Packages that ``make gpu`` needs, and a check for missing ones.

Uses only the standard library and pip, because any other package may be missing: ``python -m
benchmarks.gpu.requirements [PIP ARGUMENTS]`` lists the packages that pip cannot find.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from pip._vendor.packaging.requirements import Requirement

PYPROJECT: Final = Path(__file__).resolve().parents[2] / "pyproject.toml"
GROUP: Final = "gpu"
EDITABLE: Final = "editables>=0.3"
"""Requirement of hatchling for editable installations, in addition to those in pyproject.toml."""


def required() -> list[Requirement]:
    """Return the requirements of the client and of the dependency group ``gpu``."""
    pyproject: dict[str, Any] = tomllib.loads(PYPROJECT.read_text())
    project = pyproject["project"]
    texts = (*project["dependencies"], *_expanded(project, pyproject["dependency-groups"][GROUP]))
    found = [Requirement(text) for text in texts]
    return [each for each in found if each.marker is None or each.marker.evaluate()]


def unmet() -> list[str]:
    """Return a line for each requirement that is missing or installed in an incompatible version."""
    lines = []
    for each in required():
        try:
            installed = version(each.name)
        except PackageNotFoundError:
            lines.append(f"{each.name}{each.specifier}: not installed")
            continue
        if not each.specifier.contains(installed, prereleases=True):
            lines.append(f"{each.name}{each.specifier}: version {installed} is installed")
    return lines


def unavailable(pip_arguments: Sequence[str]) -> list[str]:
    """Return a line for each package, including dependencies, that pip cannot find.

    Args:
        pip_arguments: Options of ``pip install``, such as ``--no-index --find-links wheels``.
    """
    build: list[str] = tomllib.loads(PYPROJECT.read_text())["build-system"]["requires"]
    lines: dict[str, None] = {}
    for text in (*build, EDITABLE, *map(str, required())):
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", *pip_arguments, text]
        outcome = subprocess.run(command, capture_output=True, text=True)
        for name in re.findall(r"No matching distribution found for (\S+)", outcome.stderr):
            lines[f"{name}: not found by pip" + ("" if text.startswith(name) else f" (needed for {text})")] = None
    return list(lines)


def message(lines: Sequence[str]) -> str:
    """Return an error message for packages that are missing."""
    return "\n  ".join(["make gpu cannot start, these packages are missing:", *lines]) + (
        "\nInstall them with one of\n"
        "  make gpu TORCH=torch                                          torch for the GPUs of this machine\n"
        "  make gpu VENV_ARGS=--system-site-packages                     packages of this Python's environment\n"
        "  make gpu PIP_ARGS='--no-index --find-links DIR'               a folder of wheels. To fill it elsewhere:\n"
        f"    pip download --dest DIR 'pip>=25.1' hatchling hatch-fancy-pypi-readme '{EDITABLE}' . --group {GROUP}\n"
        "after `rm -rf .venv` where the environment exists already."
    )


def _expanded(project: dict[str, Any], texts: Sequence[str]) -> Iterator[str]:
    """Yield requirements, with the project's extras replaced by their requirements."""
    for text in texts:
        requirement = Requirement(text)
        if requirement.name != project["name"]:
            yield text
        for inner in sorted(requirement.extras) if requirement.name == project["name"] else ():
            yield from _expanded(project, project["optional-dependencies"][inner])


if __name__ == "__main__":
    found = unavailable(sys.argv[1:]) or unmet()
    sys.exit(message(found) if found else None)
