"""First use: each common mistake of a new user results in an error with the next step."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from teleloader import DataLoader, RemoteDataset, ServerUnavailable
from teleloader_shared.errors import ProtocolError, TeleloaderError, Unauthorized, UnknownDataset, VersionMismatch
from teleloader_shared.messages import DATASETS_PATH, PROTOCOL_VERSIONS
from tests.conftest import ROOT, StartServer
from tests.end_to_end.terminal import SERVER, TOOLS

DATA = """
import sys

train = [(i, i * i) for i in range(100)]

class FromFolder:
    def __init__(self, folder):
        raise AssertionError("is not called")

class Missing:
    def __init__(self):
        open("/nowhere/train.csv")

class Broken:
    def __init__(self):
        raise RuntimeError("the licence has run out")

def with_library():
    import no_such_library
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a user's folder: a module with datasets, and one with a missing dependency."""
    (tmp_path / "my_data.py").write_text(DATA)
    (tmp_path / "my_torch_data.py").write_text("from torch.utils.data import Dataset\n")
    return tmp_path


def said(folder: Path, program: str, *arguments: str, **environment: str) -> str:
    """Run a command that must fail; return its stderr as one line."""
    path = os.pathsep.join(str(ROOT / side) for side in ("client", "server", "shared"))
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": path, **environment}, check=False,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    return " ".join(done.stderr.split())


# -- on the server


@pytest.mark.parametrize(
    ("dataset", "next_step"),
    [
        ("my_data", "invalid dataset 'my_data': expected my_data:NAME, where NAME is a dataset in that module"),
        ("./my_data.py:train", "invalid dataset './my_data.py:train': expected my_data:train"),
        ("my_data.py:train", "expected a module, got a file. Use my_data:train"),
        (
            "my_dta:train",
            "module 'my_dta' not found in the current folder ({folder}) or in the Python environment {environment}. "
            "Check the name",
        ),
        ("my_data:trian", "module 'my_data' has no attribute 'trian'. Did you mean 'train'?"),
        ("my_data:sys", "must define __getitem__ and __len__, or __iter__; got module"),
        ("my_data:FromFolder", '[datasets.FromFolder], factory = "my_data:FromFolder" and kwargs = {{'),
        (
            "my_data:Missing",
            "builds the dataset: /nowhere/train.csv must exist on the server (current folder: {folder})",
        ),
        ("my_data:Broken", "RuntimeError: the licence has run out"),
        (
            "my_data:with_library",
            "builds the dataset: install no_such_library on the server, in the Python environment {environment}",
        ),
    ],
)
def test_a_dataset_that_cannot_be_hosted(folder: Path, dataset: str, next_step: str) -> None:
    """The error has the reason, and where to look or what to write."""
    text = said(folder, SERVER, dataset, "--port", "0", "--num-workers", "1")
    assert next_step.format(folder=folder, environment=sys.prefix) in text


def test_a_dataset_that_fails_shows_the_lines_of_its_own_code(folder: Path) -> None:
    """The traceback has no lines of the server or of the import system."""
    text = said(folder, SERVER, "my_data:Broken", "--port", "0")
    assert f'File "{folder / "my_data.py"}", line 16, in __init__' in text
    assert text.count('File "') == 1


def test_a_server_without_torch(folder: Path) -> None:
    """The error for a dataset that imports torch states to install torch on the server."""
    without_torch = "import sys; sys.modules['torch'] = None\n"
    (folder / "sitecustomize.py").write_text(without_torch)
    path = os.pathsep.join(map(str, (folder, ROOT / "client", ROOT / "server", ROOT / "shared")))
    text = said(folder, SERVER, "my_torch_data:Dataset", "--port", "0", PYTHONPATH=path)
    assert f"install torch on the server, in the Python environment {sys.prefix}" in text


def test_a_server_that_others_reach_needs_tokens(folder: Path) -> None:
    """The error states how to create a token, and how to disable authentication."""
    text = said(folder, SERVER, "my_data:train", "--host", "0.0.0.0", "--port", "0")
    assert "teleloader-server token add trainer --file tokens.toml" in text
    assert "--insecure" in text


@pytest.mark.parametrize(
    ("program", "module", "extra"), [(SERVER, "click", "server"), (SERVER, "uvloop", "server"), (TOOLS, "click", "cli")]
)
def test_an_extra_that_is_not_installed(folder: Path, program: str, module: str, extra: str) -> None:
    """The error has the installation command."""
    text = said(folder, f"import sys; sys.modules[{module!r}] = None; {program}", "--version")
    assert text.endswith(f"pip install 'teleloader[{extra}]'")
    assert "Traceback" not in text


def test_ray_that_is_not_installed(folder: Path) -> None:
    """Its extra is another one."""
    text = said(folder, f"import sys; sys.modules['ray'] = None; {SERVER}", "ray", "status")
    assert text.endswith("requires ray, which is not installed: pip install 'teleloader[ray]'")
    assert "Traceback" not in text


@pytest.mark.parametrize("module", ["uvloop", "fastapi", "uvicorn", "websockets"])
def test_an_object_that_cannot_be_hosted_for_want_of_a_package(folder: Path, module: str) -> None:
    """The local process raises the same error, without waiting for a server."""
    text = said(
        folder,
        f"import sys; sys.modules[{module!r}] = None; import teleloader; teleloader.DataLoader([1], num_workers=1)",
    )
    assert text.endswith(f"{module}, which is not installed: pip install 'teleloader[server]'")


# -- on the client


def refusal(kind: type[Exception], *arguments: str) -> str:
    """Return the error for a dataset, without waiting for a server."""
    with pytest.raises(kind) as caught:
        RemoteDataset(*arguments, reconnect_timeout=0)
    return str(caught.value)


def test_no_server(free_port: int) -> None:
    """The error has the URL and what to check."""
    text = refusal(ServerUnavailable, f"http://127.0.0.1:{free_port}")
    assert f"cannot connect to http://127.0.0.1:{free_port}: " in text
    assert text.endswith("Check that teleloader-server is running, and that the URL is correct.")


def test_no_server_on_another_machine() -> None:
    """The error states that the server may listen on its loopback address only."""
    text = refusal(ServerUnavailable, "http://no-such-machine.invalid:8000")
    assert text.endswith("A server without --host accepts only local connections.")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "cpu-box", "tcp://cpu-box:8000"])
def test_an_invalid_server_url(url: str) -> None:
    """The error has the expected form."""
    assert refusal(ValueError, url) == f"invalid server URL {url!r}: expected http://host:port"


@contextmanager
def elsewhere(**answers: object) -> Iterator[str]:
    """Run a server other than a loader server of this version, with responses by the last part of the path."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0].removeprefix("/v1/"))
            body = json.dumps(found or "no such page").encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_the_port_of_some_other_web_server() -> None:
    """The error has its response, and states that this is not a loader server."""
    with elsewhere() as url:
        text = refusal(ProtocolError, url)
    assert text.startswith(f"{url}{DATASETS_PATH} responded with 404")
    assert text.endswith(f"Check that {url} is the URL of a loader server")


def test_the_port_of_something_that_speaks_no_http() -> None:
    """The error states that the port accepts connections, and does not ask whether a server runs."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                while connection.recv(1024):
                    pass

        threading.Thread(target=answer, daemon=True).start()
        text = refusal(ServerUnavailable, f"http://127.0.0.1:{listening.getsockname()[1]}")
    assert "accepted the connection" in text
    assert "teleloader-server is running" not in text


def test_a_name_that_is_not_hosted(start_server: StartServer) -> None:
    """The error has the hosted names, and where to specify one."""
    server = start_server("--demo", "--num-workers", "1")
    hosted, hint = f"{server.url} hosts 'digits-train', 'digits-test'.", "Pass the name of a hosted dataset"
    assert refusal(UnknownDataset, server.url, "mnist") == f"unknown dataset 'mnist': {hosted} {hint}"
    assert refusal(UnknownDataset, server.url) == f"no dataset name was given: {hosted} {hint}"
    misspelled = refusal(UnknownDataset, server.url, "digit-train")
    assert misspelled == f"unknown dataset 'digit-train': {hosted} Did you mean 'digits-train' or 'digits-test'?"


def test_a_token_that_is_missing(start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error states where to set the token; with it the first batch arrives."""
    token = "a-token-that-is-long-enough"
    (tmp_path / "token").write_text(token)
    server = start_server("--demo", "--num-workers", "1", "--token-file", str(tmp_path / "token"))
    assert "Set TELELOADER_TOKEN or pass RemoteDataset(..., token=...)" in refusal(
        Unauthorized, server.url, "digits-test"
    )
    monkeypatch.setenv("TELELOADER_TOKEN_FILE", str(tmp_path / "token"))
    images, labels = next(iter(DataLoader(RemoteDataset(server.url, "digits-test"), batch_size=4, output="numpy")))
    assert images.shape == (4, 8, 8)
    assert len(labels) == 4


def test_a_server_of_another_release() -> None:
    """The error has both versions and the side to update, also if the list of datasets has another form."""
    info = {
        "name": "train", "kind": "map", "type": "list", "length": 3, "version": "", "fingerprint": "f", "cpus": 2,
        "collate": "default", "worker_init": None, "functions": [], "seeding": "batch",
    }  # fmt: skip
    registered = {
        "key": "0" * 32, "protocol": PROTOCOL_VERSIONS[-1] + 1, "batches": 3, "length": 3, "fingerprint": "f",
        "num_workers": 1, "max_batch_bytes": 2**20,
    }  # fmt: skip
    with elsewhere(datasets=[info], loaders=registered) as url, pytest.raises(VersionMismatch) as caught:
        next(iter(DataLoader(RemoteDataset(url, reconnect_timeout=0), output="numpy")))
    assert "uses protocol version 2, and this client supports 1. Update the client" in str(caught.value)
    with elsewhere(datasets=[{"name": "train"}]) as url:
        assert "install the same release of teleloader on both sides" in refusal(ProtocolError, url)


def test_an_output_that_is_not_installed(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the installation command."""
    server = start_server("--demo", "--num-workers", "1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TeleloaderError, match=r"pip install 'teleloader\[torch\]'"):
        DataLoader(RemoteDataset(server.url, "digits-test"), output="torch")
