"""Build wheel and sdist twice, and try them as users do: first the client alone, then with a server elsewhere."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "*_cache", ".hypothesis", "node_modules", "__pycache__", "dist", "build"
)

CLIENT_ALONE = """
import importlib.util, sys
import teleloader
for name in ("fastapi", "uvicorn", "torch", "click"):
    assert importlib.util.find_spec(name) is None, f"the client alone must not bring {name}"
assert "teleloader_server" not in sys.modules
try:
    teleloader.RemoteDataset("http://127.0.0.1:9", reconnect_timeout=0)
except teleloader.ServerUnavailable as error:
    print("no server:", error)
else:
    raise SystemExit("nothing listens on port 9, and yet a dataset was found")
"""

MY_DATA = """
train = [(float(i), i % 10) for i in range(1000)]
"""

FIRST_BATCH = """
import sys
from teleloader import DataLoader, RemoteDataset

dataset = RemoteDataset(sys.argv[1], "train")
loader = DataLoader(dataset, batch_size=256, shuffle=True, drop_last=True)
for values, labels in loader:
    assert values.shape == labels.shape == (256,), values.shape
print("the first batch:", values[:4], labels[:4])
"""

WITH_SERVER = """
import teleloader, teleloader_server

import httpx

with teleloader_server.serve([(i, i * i) for i in range(100)], num_workers=2) as url:
    for path in ("/", "/dashboard/uplot/uPlot.esm.js"):
        httpx.get(url + path).raise_for_status()
    loader = teleloader.DataLoader(teleloader.RemoteDataset(url), batch_size=8, shuffle=True, output="numpy")
    pairs = [pair for xs, ys in loader for pair in zip(xs.tolist(), ys.tolist(), strict=True)]
assert sorted(pairs) == [(i, i * i) for i in range(100)], pairs
print("100 samples came through")
"""


def run(*command: str | Path, **environment: str) -> str:
    """Run a command outside the checkout, so that what is imported is what was installed."""
    return subprocess.run(
        command, check=True, cwd=tempfile.gettempdir(), text=True, stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    ).stdout  # fmt: skip


def built(source: Path, out: Path, umask: int, zone: str, epoch: str = "1700000000") -> dict[str, Path]:
    """The wheel and the sdist that a machine of its own kind makes of the source, by name."""
    before = os.umask(umask)
    try:
        run(sys.executable, "-m", "build", "--outdir", out, source, SOURCE_DATE_EPOCH=epoch, TZ=zone)
    finally:
        os.umask(before)
    return {file.name: file for file in out.iterdir()}


def check_reproducible(folder: Path) -> Path:
    """Build in two places; the wheel. Whoever builds it again must get the same, to the last bit."""
    here = built(ROOT, folder / "dist", 0o022, "UTC")
    copy = shutil.copytree(ROOT, folder / "another place" / "checkout", ignore=LEFT_OUT)
    there = built(copy, folder / "dist-again", 0o077, "Asia/Tokyo")
    assert here.keys() == there.keys(), (here, there)
    for name, file in here.items():
        digests = [hashlib.sha256(found.read_bytes()).hexdigest() for found in (file, there[name])]
        assert digests[0] == digests[1], f"{name} is another one when it is built elsewhere: {digests}"
        print(f"{name}: {digests[0]} in both places, {file.stat().st_size:,} bytes")
    return next(file for name, file in here.items() if name.endswith(".whl"))


def check_description(wheel: Path) -> None:
    """Fail if the published description has a relative link, which leads nowhere on a package index."""
    with ZipFile(wheel) as files:
        name = next(name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        description = message_from_bytes(files.read(name)).get_payload()
    assert description, "the wheel has no long description"
    relative = re.findall(r"\]\((?!https?:)[^)]*\)", str(description))
    assert not relative, f"relative links in the long description: {relative}"


def installer(environment: Path) -> tuple[Path | str, ...]:
    """The command that installs into a new environment."""
    venv.create(environment, with_pip=True)
    return (environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def check_first_contact(server: Path, client: Path, folder: Path) -> None:
    """The way of a new user: a module with a dataset, a token, a server; elsewhere, the first batch."""
    program, tokens = server / "bin" / "teleloader-server", folder / "tokens.toml"
    token = run(program, "token", "add", "trainer", "--file", tokens).strip()
    (folder / "my_data.py").write_text(MY_DATA)
    command = (program, "my_data:train", "--port", "0", "--tokens", tokens)
    started = time.monotonic()
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stderr is not None
            ready = next(found for line in serving.stderr if (found := re.search(r"is ready at (\S+)", line)))
            python = client / "bin" / "python"
            print(run(python, "-W", "error", "-c", FIRST_BATCH, ready[1], TELELOADER_TOKEN=token), end="")
        finally:
            serving.terminate()
    print(f"from the command that serves to the end of the first epoch: {time.monotonic() - started:.1f} s")


def main() -> None:
    """Fail with the first thing that is not right."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        client, server = folder / "client", folder / "server"
        wheel = check_reproducible(folder)
        check_description(wheel)
        run(*installer(client), wheel)
        print(run(client / "bin" / "python", "-W", "error", "-c", CLIENT_ALONE), end="")
        for command, extra in (("teleloader-server", "server"), ("teleloader", "cli")):
            without = subprocess.run([client / "bin" / command], text=True, stderr=subprocess.PIPE)
            if f"pip install 'teleloader[{extra}]'" not in without.stderr:
                raise SystemExit(f"without its extra, {command} must say what to install, said: {without.stderr}")
        run(*installer(server), f"{wheel}[server]")
        print(run(server / "bin" / "teleloader-server", "--version"), end="")
        print(run(server / "bin" / "python", "-W", "error", "-c", WITH_SERVER), end="")
        check_first_contact(server, client, folder)


if __name__ == "__main__":
    main()
