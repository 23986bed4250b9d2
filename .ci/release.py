"""Prepare a release: `release.py VERSION [--key SSH_KEY] [--skip-tests]`; writes build/release.

Checks the tree, the version and the changelog, runs the checks of .ci/run, builds wheel and sdist twice from the
commit, checks their metadata, and writes an SBOM, checksums, a signature and release notes. Publishes nothing, and
creates no tag: the last line of the output has the remaining commands. The newest tag is the release that
tests/deploy/test_versions.py compares with, so the tag is the only place that names it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import check_wheel

OUT: Final = Path("build/release")
SBOM_OF: Final = Path("docker/requirements/server.txt")
"""Pinned packages of the server's container image: the SBOM lists these, as the wheel itself pins none."""
NAMESPACE: Final = "teleloader-release"
"""Namespace of signatures: a signature of another namespace does not verify as that of a release."""
IDENTITY: Final = "release@teleloader"


class Refused(SystemExit):
    """The release cannot be prepared; the message says why and what to do."""


def git(*arguments: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(["git", *arguments], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def check_tree() -> None:
    """Refuse a tree with changes: only what is committed is released."""
    if changed := git("status", "--porcelain"):
        raise Refused(f"the tree has uncommitted changes:\n{changed}\nCommit or remove them")


def check_version(version: str) -> None:
    """Refuse a version that pyproject.toml does not have, or that has a tag."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise Refused(f"invalid version {version!r}: expected MAJOR.MINOR.PATCH, such as 0.2.0 or 0.2.0rc1")
    found = tomllib.loads(Path("pyproject.toml").read_text())["project"]["version"]
    if found != version:
        raise Refused(f"version {version!r} differs from {found!r} in pyproject.toml: change one of them")
    if git("tag", "--list", f"v{version}"):
        raise Refused(f"the tag v{version} exists: choose a later version")


def changes_of(version: str, changelog: str, today: datetime.date) -> str:
    """Return the section of a version in the changelog.

    Raises:
        Refused: If the section is missing, empty, of another day, or not the first one, or one of its links leads to no
            file of the tree.
    """
    heading = f"## {version} - {today.isoformat()}"
    sections = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)[1:]
    if not sections or sections[0].splitlines()[0].strip() != heading:
        first = sections[0].splitlines()[0] if sections else "no section"
        raise Refused(f"CHANGELOG.md begins with {first!r}, expected {heading!r}: name the section of the release")
    body = sections[0].partition("\n")[2].strip()
    if not re.search(r"^[-*] ", body, re.MULTILINE):
        raise Refused(f"the section {heading!r} of CHANGELOG.md lists no change: describe at least one")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", body):
        if not target.startswith(("http://", "https://")) and not Path(target).exists():
            raise Refused(f"the section {heading!r} of CHANGELOG.md links to {target!r}, which does not exist: fix it")
    return body


def images() -> Iterator[tuple[str, str]]:
    """Yield the image names in the Dockerfiles and the compose file, with the digest that pins them or ""."""
    files = [*sorted(Path("docker").glob("*.Dockerfile")), Path("docker-compose.yml")]
    found = re.findall(
        r"^\s*(?:ARG PYTHON=|FROM |image: )([a-z0-9./_-]+:[\w.-]+)(?:@(sha256:[0-9a-f]{64}))?",
        "\n".join(file.read_text() for file in files), re.MULTILINE,
    )  # fmt: skip
    yield from dict(found).items()


def notes(version: str, changes: str, sums: str) -> str:
    """Return the release notes: changes, container images, checksums."""
    rows = [f"| `{name}` | {f'`{digest}`' if digest else 'not pinned'} |" for name, digest in images()]
    table = ["## Container images", "", "| image | digest |", "|---|---|", *rows]
    checksums = ["## SHA-256", "", "```none", sums.rstrip(), "```"]
    return "\n".join([f"# teleloader {version}", "", changes, "", *table, "", *checksums, ""])


def build(folder: Path) -> list[Path]:
    """Build wheel and sdist of the commit in two places, and return those of the first place.

    Raises:
        Refused: If the files are not identical.
    """
    epoch = git("log", "-1", "--format=%ct")
    archive = subprocess.run(["git", "archive", "HEAD"], check=True, stdout=subprocess.PIPE).stdout
    built = []
    for place, umask, zone in (("here", 0o022, "UTC"), ("another place", 0o077, "Asia/Tokyo")):
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder / place, filter="data")
        built.append(check_wheel.built(folder / place, folder / f"dist of {place}", umask, zone, epoch))
    for name, file in built[0].items():
        if file.read_bytes() != built[1][name].read_bytes():
            raise Refused(f"{name} differs when it is built in another place: compare both in {folder}")
    return sorted(built[0].values())


def write_sbom(file: Path) -> None:
    """Write the software bill of materials, CycloneDX in JSON."""
    subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", "requirements", SBOM_OF, "--pyproject", "pyproject.toml",
         "--output-reproducible", "--output-format", "JSON", "--output-file", file],
        check=True,
    )  # fmt: skip


def sums_of(files: list[Path]) -> str:
    """Return the content of SHA256SUMS, as `sha256sum --check` reads it."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)


def sign(file: Path, key: Path) -> None:
    """Sign a file with an SSH key, and verify the signature with its public half; both need OpenSSH 8.2."""
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-n", NAMESPACE, "-f", key, file], check=True)
    public = subprocess.run(["ssh-keygen", "-y", "-f", key], check=True, text=True, stdout=subprocess.PIPE).stdout
    signers = file.with_name("allowed_signers")
    signers.write_text(f'{IDENTITY} namespaces="{NAMESPACE}" {public}')
    with file.open("rb") as content:
        subprocess.run(
            ["ssh-keygen", "-q", "-Y", "verify", "-f", signers, "-I", IDENTITY, "-n", NAMESPACE,
             "-s", f"{file}.sig"],
            check=True, stdin=content,
        )  # fmt: skip


def main() -> None:
    """Prepare the release, or end with the first reason against it."""
    parser = argparse.ArgumentParser(description="Prepare a release.")
    parser.add_argument("version")
    parser.add_argument("--key", type=Path, help="private SSH key that signs the checksums")
    parser.add_argument("--skip-tests", action="store_true", help="for a trial: leave out the checks of .ci/run")
    options = parser.parse_args()
    os.chdir(check_wheel.ROOT)
    check_tree()
    check_version(options.version)
    changes = changes_of(options.version, Path("CHANGELOG.md").read_text(), datetime.datetime.now(datetime.UTC).date())
    if not options.skip_tests:
        subprocess.run([".ci/run"], check=True)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(shutil.copy(file, OUT)) for file in build(Path(folder))]
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    check_wheel.check_description(next(file for file in files if file.suffix == ".whl"))
    files.append(OUT / f"teleloader-{options.version}.cdx.json")
    write_sbom(files[-1])
    sums = OUT / "SHA256SUMS"
    sums.write_text(sums_of(files))
    (OUT / "NOTES.md").write_text(notes(options.version, changes, sums.read_text()))
    if options.key:
        sign(sums, options.key)
    print(f"\nrelease files of commit {git('rev-parse', 'HEAD')} in {OUT}:", *sorted(OUT.iterdir()), sep="\n  ")
    print(f"signature: {f'{sums}.sig' if options.key else 'NOT SIGNED, no --key was given'}")
    print(f"tests: {'NOT RUN (--skip-tests): do not publish these files' if options.skip_tests else 'passed'}")
    print(f"next: git tag --sign v{options.version} && git push --tags, which starts .github/workflows/release.yml")


if __name__ == "__main__":
    main()
