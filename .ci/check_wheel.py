"""Build the wheel and try it as users get it: the client alone, then with the server."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

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


def run(*command: str | Path) -> str:
    """Run a command outside the checkout, so that what is imported is what was installed."""
    return subprocess.run(command, check=True, cwd=tempfile.gettempdir(), text=True, stdout=subprocess.PIPE).stdout


def main() -> None:
    """Fail with the first thing that is not right."""
    with tempfile.TemporaryDirectory() as folder:
        dist, environment = Path(folder) / "dist", Path(folder) / "environment"
        run(sys.executable, "-m", "build", "--outdir", dist, ROOT)
        (wheel,) = dist.glob("*.whl")
        venv.create(environment, with_pip=True)
        python = environment / "bin" / "python"
        install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*install, wheel)
        print(run(python, "-W", "error", "-c", CLIENT_ALONE), end="")
        for command, extra in (("teleloader-server", "server"), ("teleloader", "cli")):
            without = subprocess.run([environment / "bin" / command], text=True, stderr=subprocess.PIPE)
            if f"pip install 'teleloader[{extra}]'" not in without.stderr:
                raise SystemExit(f"without its extra, {command} must say what to install, said: {without.stderr}")
        run(*install, f"{wheel}[server]")
        print(run(environment / "bin" / "teleloader-server", "--version"), end="")
        print(run(python, "-W", "error", "-c", WITH_SERVER), end="")


if __name__ == "__main__":
    main()
