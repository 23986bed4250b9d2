"""docs/errors.md: each of its texts is a real error message, and each error of these tests is listed in it."""

from __future__ import annotations

import datetime
import json
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import httpx
import numpy as np
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader.fetch.channel import Announcement
from teleloader.mesh import locate
from teleloader.tensors import devices, pinned
from teleloader.tensors.placement import Placement
from teleloader_server import serve
from teleloader_server.limits import ClientLimits
from teleloader_shared import messages
from tests.conftest import ROOT, ServerProcess, StartServer, need
from tests.end_to_end.certificates import Files
from tests.end_to_end.terminal import SERVER, TOOLS, piped
from tests.examples.running import need_framework
from tests.issuers import Issuer, issuer_table, write

BROKEN: Final = "tests.docs.my_package.broken:"
DATA: Final = "tests.docs.my_package.data:"
PAGE: Final = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SECRET: Final = "tl_a-token-of-the-tests"
TEXTS: Final = dict(re.findall(r"^### (.+)\n+```none\n((?s:.*?))```$", PAGE, re.MULTILINE))

Provoke = Callable[..., str]
provocations: Final[dict[str, Provoke]] = {}


def meets(heading: str) -> Callable[[Provoke], Provoke]:
    """Register a function that returns the text below this heading."""

    def note(provoke: Provoke) -> Provoke:
        provocations[heading] = provoke
        return provoke

    return note


def raised_by(cause: Callable[[], object]) -> str:
    """Return the last lines of the traceback, with the type's name without its module."""
    with pytest.raises(Exception) as error:
        cause()
    return f"{error.type.__name__}: {error.value}"


def logged_by(*arguments: str, **environment: str) -> str:
    """Return the last log entry of a server that fails to start."""
    done = piped(SERVER, "--port", "0", *arguments, **environment)
    assert done.code != 0
    return re.split(r" ERROR +", done.err)[-1]


def without(module: str, program: str) -> str:
    """Return the error message of a program if `module` is not installed."""
    blocked = f"import sys; sys.modules[{module!r}] = None; {program}"
    done = subprocess.run([sys.executable, "-c", blocked], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return re.sub(r"^\w+\.(?:\w+\.)*", "", done.stderr.strip().splitlines()[-1])


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings of the tests' own environment."""
    for name in ("TOKEN", "TOKEN_FILE", "CA", "CERT", "KEY"):
        monkeypatch.delenv(f"TELELOADER_{name}", raising=False)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """Run a server with invalid datasets."""
    names = ("raising", "raising_its_own", "uneven", "unsendable", "unknown", "deadly", "stuck", "large")
    running = ServerProcess(
        "--port", "0", "--num-workers", "2", "--batch-timeout", "1", "--max-batch-bytes", "1MiB", f"{DATA}train",
        f"{DATA}stream", *(f"{name.replace('_', '-')}={BROKEN}{name}" for name in names),
    )  # fmt: skip
    yield running
    running.end()


def epoch_of(server: ServerProcess, dataset: str, **options: Any) -> str:
    """Return the error of a loop over a dataset."""
    loader = DataLoader(RemoteDataset(server.url, dataset), batch_size=8, output="numpy", **options)
    return raised_by(lambda: list(loader))


# -- connection


@meets("Server unavailable")
def _(free_port: int) -> str:
    return raised_by(lambda: RemoteDataset(f"http://127.0.0.1:{free_port}", "train", reconnect_timeout=0.1))


@meets("Response not from a loader server")
def _() -> str:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>It works!</html>")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as other:
        thread = Thread(target=other.serve_forever)
        thread.start()
        said = raised_by(lambda: RemoteDataset(f"http://127.0.0.1:{other.server_port}", "train", reconnect_timeout=0))
        other.shutdown()
        thread.join()
    return said


@meets("Invalid server URL")
def _() -> str:
    return raised_by(lambda: RemoteDataset("10.0.0.5:8000", "train"))


@meets("Unknown dataset")
def _(server: ServerProcess) -> str:
    return raised_by(lambda: RemoteDataset(server.url, "trian"))


@meets("Dataset name missing")
def _(server: ServerProcess) -> str:
    return raised_by(lambda: RemoteDataset(server.url))


@meets("Protocol versions differ")
def _(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> str:
    dataset = RemoteDataset(server.url, "train")
    monkeypatch.setattr(messages, "PROTOCOL_VERSIONS", (2,))
    return raised_by(lambda: next(iter(DataLoader(dataset, output="numpy"))))


# -- authentication


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Run a server with tokens."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    tokens.write_text(
        f'[validation-only]\ntoken = "{SECRET}"\nscopes = ["read:validation"]\n'
        f'[trainer]\ntoken = "{SECRET}-old"\nscopes = ["read"]\nexpires = 2020-01-01T00:00:00Z\n'
    )
    tokens.chmod(0o600)
    running = ServerProcess(
        "--port", "0", "--num-workers", "1", "--tokens", str(tokens), f"{DATA}train", f"{DATA}validation"
    )
    yield running
    running.end()


@meets("Token missing")
def _(guarded: ServerProcess) -> str:
    return raised_by(lambda: RemoteDataset(guarded.url, "train"))


@meets("Token unknown")
def _(guarded: ServerProcess) -> str:
    return raised_by(lambda: RemoteDataset(guarded.url, "train", token="tl_of-another-server"))


@meets("Token expired")
def _(guarded: ServerProcess) -> str:
    return raised_by(lambda: RemoteDataset(guarded.url, "train", token=f"{SECRET}-old"))


@meets("Token without the required scope")
def _(guarded: ServerProcess) -> str:
    return raised_by(lambda: RemoteDataset(guarded.url, "train", token=SECRET))


def refused_jwt(start_server: StartServer, folder: Path, **claims: Any) -> str:
    """Return the error of a client whose token has these claims."""
    with Issuer() as issuer:
        identity = write(folder / "identity.toml", issuer_table(issuer))
        server = start_server(f"{DATA}train", "--num-workers", "1", "--identity", identity)
        return raised_by(lambda: RemoteDataset(server.url, "train", token=issuer.token(**claims)))


@meets("Identity without permissions")
def _(start_server: StartServer, tmp_path: Path) -> str:
    return refused_jwt(start_server, tmp_path, sub="system:serviceaccount:audio:trainer", namespace="audio")


@meets("Expired JWT")
def _(start_server: StartServer, tmp_path: Path) -> str:
    return refused_jwt(start_server, tmp_path, lifetime=-300)


@meets("Password in the server URL")
def _() -> str:
    return raised_by(lambda: RemoteDataset("http://trainer:password@10.0.0.5:8000", "train"))


@meets("Host header not allowed")
def _(server: ServerProcess) -> str:
    headers = {"Host": f"loader.example.com:{httpx.URL(server.url).port}"}
    detail: str = httpx.get(f"{server.url}/stats", headers=headers, trust_env=False).json()["detail"]
    return detail


# -- TLS


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Create certificates of a test CA."""
    return Files(tmp_path_factory.mktemp("certificates"))


def with_certificate(start_server: StartServer, files: Files, name: str, *hosts: str, **made: Any) -> str:
    """Run a server with a certificate; yield its URL."""
    cert, key = files.make(name, *hosts, **made)
    return start_server("--demo", "--num-workers", "1", "--ssl-certfile", cert, "--ssl-keyfile", key).url


@meets("Certificate of an unknown CA")
def _(start_server: StartServer, files: Files) -> str:
    url = with_certificate(start_server, files, "server", "127.0.0.1")
    return raised_by(lambda: RemoteDataset(url))


@meets("Certificate expired")
def _(start_server: StartServer, files: Files) -> str:
    until = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    url = with_certificate(start_server, files, "expired", "127.0.0.1", until=until)
    return raised_by(lambda: RemoteDataset(url, ca=files.ca))


@meets("Certificate for another name")
def _(start_server: StartServer, files: Files) -> str:
    url = with_certificate(start_server, files, "other", "loader.example.com")
    return raised_by(lambda: RemoteDataset(url, ca=files.ca))


@meets("`https://` URL of a server without TLS")
def _(server: ServerProcess, files: Files) -> str:
    return raised_by(lambda: RemoteDataset(server.url.replace("http:", "https:"), "train", ca=files.ca))


@meets("`http://` URL of a server with TLS")
def _(start_server: StartServer, files: Files) -> str:
    url = with_certificate(start_server, files, "server", "127.0.0.1")
    return raised_by(lambda: RemoteDataset(url.replace("https:", "http:"), reconnect_timeout=0))


# -- server limits


class Held:
    """Dataset whose samples wait until they are released."""

    def __init__(self) -> None:
        self.asked_for = Event()
        self.let_go = Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.asked_for.set()
        self.let_go.wait()
        return index


@meets("Too many loaders with private workers")
def _() -> str:
    limits = ClientLimits(max_sessions_per_principal=1)
    with serve([1, 2], num_workers=1, limits=limits, token=SECRET) as url:
        loader = DataLoader(RemoteDataset(url, token=SECRET, reconnect_timeout=0.1), num_workers=1, output="numpy")
        first = iter(loader)
        next(first)
        return raised_by(lambda: next(iter(loader)))


@meets("Too many consumers")
def _() -> str:
    held = Held()
    with serve(held, num_workers=0, limits=ClientLimits(max_consumers=1)) as url:
        dataset = RemoteDataset(url, reconnect_timeout=0.1)
        first = iter(DataLoader(dataset, seed=0, output="numpy"))
        waiting = Thread(target=lambda: next(first))
        waiting.start()
        try:
            assert held.asked_for.wait(60)
            return raised_by(lambda: next(iter(DataLoader(dataset, seed=1, output="numpy"))))
        finally:
            held.let_go.set()
            waiting.join()


@meets("Too many requests")
def _() -> str:
    with serve([1, 2], num_workers=1, limits=ClientLimits(max_requests_per_second=2)) as url:
        dataset = RemoteDataset(url, reconnect_timeout=0.1)
        with ThreadPoolExecutor(16) as several:
            asked = [several.submit(lambda: dataset[0]) for _ in range(16)]
        return raised_by(lambda: [one.result() for one in asked])


# -- missing packages


@meets("Server packages missing")
def _() -> str:
    return without("uvicorn", SERVER)


@meets("Packages of the `teleloader` command missing")
def _() -> str:
    return without("click", TOOLS)


@meets("Server packages missing for a dataset object")
def _() -> str:
    return without("uvloop", "from teleloader import DataLoader; DataLoader([1, 2], num_workers=1)")


@meets("torch missing")
def _(server: ServerProcess) -> str:
    made = f"DataLoader(RemoteDataset({server.url!r}, 'train'), output='torch')"
    unseen = "import importlib.util as i; find = i.find_spec; i.find_spec = lambda n: n != 'torch' and find(n) or None"
    return without("torch", f"{unseen}; from teleloader import *; {made}")


@meets("Pinned memory without torch")
def _(server: ServerProcess) -> str:
    dataset = RemoteDataset(server.url, "train")
    return raised_by(lambda: DataLoader(dataset, pin_memory=True, output="numpy"))


@meets("Compression library missing")
def _(server: ServerProcess) -> str:
    made = f"DataLoader(RemoteDataset({server.url!r}, 'train'), compression='zstd', output='numpy')"
    return without("zstandard", f"from teleloader import *; next(iter({made}))")


# -- server start


@meets("Authentication required")
def _() -> str:
    return logged_by("--demo", "--host", "0.0.0.0")


@meets("Token file missing or empty")
def _() -> str:
    return logged_by("--demo", "--tokens", "no-such.toml").splitlines()[-1]


@meets("Invalid entry in the token file")
def _(tmp_path: Path) -> str:
    file = tmp_path / "tokens.toml"
    file.write_text(f'[trainer]\ntoken = "{SECRET}"\n')
    return logged_by("--demo", "--tokens", str(file)).splitlines()[-1]


@meets("Module not found")
def _() -> str:
    return logged_by("my_pakage.data:train")


@meets("Name not found in the module")
def _() -> str:
    return logged_by(f"{DATA}trian")


@meets("Not a dataset")
def _() -> str:
    return logged_by(f"train={BROKEN}no_dataset")


@meets("Exception while building a dataset")
def _() -> str:
    return logged_by(f"train={BROKEN}cannot_be_built")


@meets("Address already in use")
def _() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return logged_by("--demo", "--port", str(taken.getsockname()[1]))


@meets("Limit on open files too low")
def _() -> str:
    program = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128)); {SERVER}"
    done = piped(program, "--demo", "--port", "0")
    return re.split(r" ERROR +", done.err)[-1]


@meets("Unknown key in the configuration file")
def _(tmp_path: Path) -> str:
    config = tmp_path / "loader.toml"
    config.write_text("[server]\nworkers = 16\n[datasets.train]\nfactory = 'my_package.data:train'\n")
    return piped(SERVER, "--config", str(config)).err.partition("\n\n")[2]


# -- loader construction


@meets("Function without an importable name")
def _(server: ServerProcess) -> str:
    return raised_by(lambda: DataLoader(RemoteDataset(server.url, "train"), collate_fn=lambda samples: samples))


@meets("Function not allowed by the server")
def _(server: ServerProcess) -> str:
    from tests.docs.my_package.data import pad_batch

    return raised_by(lambda: DataLoader(RemoteDataset(server.url, "train"), collate_fn=pad_batch))


@meets("Worker-init function for shared workers")
def _(server: ServerProcess) -> str:
    from tests.docs.my_package.data import open_files

    return raised_by(lambda: DataLoader(RemoteDataset(server.url, "train"), num_workers=1, worker_init_fn=open_files))


@meets("Dataset without a length")
def _(server: ServerProcess) -> str:
    return raised_by(lambda: len(RemoteDataset(server.url, "stream")))


@meets("`seed` together with a sampler")
def _(server: ServerProcess) -> str:
    return raised_by(lambda: DataLoader(RemoteDataset(server.url, "train"), sampler=[1, 2], seed=7))


def refused_by_accelerate(loader: DataLoader, **options: Any) -> str:
    """Return the error of ``Accelerator.prepare`` in one of two processes."""
    need_framework("accelerate")
    from teleloader.frameworks.accelerate import _check

    return raised_by(lambda: _check(loader, options, processes=2))


@meets("`dispatch_batches` of accelerate")
def _(server: ServerProcess) -> str:
    return refused_by_accelerate(DataLoader(RemoteDataset(server.url, "train")), dispatch_batches=True)


@meets("`split_batches` of accelerate")
def _(server: ServerProcess) -> str:
    return refused_by_accelerate(DataLoader(RemoteDataset(server.url, "stream"), num_workers=1), split_batches=True)


@meets("accelerate with an iterable-style dataset without workers")
def _(server: ServerProcess) -> str:
    return refused_by_accelerate(DataLoader(RemoteDataset(server.url, "stream")))


# -- accelerators


def warned_by(cause: Callable[[], object]) -> str:
    """Return the text of the only warning that `cause` gives, after its category."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cause()
    (warning,) = caught
    return f"{warning.category.__name__}: {warning.message}"


@pytest.fixture
def without_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the accelerators of this machine from torch."""
    need("torch")
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if hasattr(torch, "accelerator"):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch report a single GPU as the current one."""
    need("torch")
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@meets("Unknown device type")
def _(server: ServerProcess) -> str:
    need("torch")
    return raised_by(lambda: iter(DataLoader(RemoteDataset(server.url, "train"), device="gpu")))


@meets("Accelerator not available")
def _(server: ServerProcess, without_accelerators: None) -> str:
    return raised_by(lambda: iter(DataLoader(RemoteDataset(server.url, "train"), device="cuda")))


@meets("Device index without an accelerator")
def _(server: ServerProcess, without_accelerators: None) -> str:
    return raised_by(lambda: iter(DataLoader(RemoteDataset(server.url, "train"), device=0)))


@meets("Device index not visible to the process")
def _(server: ServerProcess, one_gpu: None) -> str:
    return raised_by(lambda: iter(DataLoader(RemoteDataset(server.url, "train"), device="cuda:7")))


@meets("Several ranks on one device")
def _(one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> str:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    return warned_by(lambda: devices.warn_of_shared_device("cuda", stacklevel=1))


@meets("Device without torch tensors")
def _(server: ServerProcess) -> str:
    return raised_by(lambda: DataLoader(RemoteDataset(server.url, "train"), device="cuda", output="numpy"))


@meets("Sharding with NumPy output")
def _(server: ServerProcess) -> str:
    return raised_by(lambda: DataLoader(RemoteDataset(server.url, "train"), output="numpy", sharding="data"))


@meets("Invalid `device_ahead`")
def _(server: ServerProcess) -> str:
    return raised_by(lambda: DataLoader(RemoteDataset(server.url, "train"), device_ahead=-1))


@meets("Sharding with torch output")
def _(server: ServerProcess) -> str:
    need("torch")
    return raised_by(lambda: DataLoader(RemoteDataset(server.url, "train"), sharding="data"))


@meets("Invalid limit on page-locked memory")
def _(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(pinned, "_budget", None)
    monkeypatch.setenv(pinned.MAX_PINNED_BYTES_VARIABLE, "4GiB")
    return raised_by(pinned.process_budget)


class FullDevice(devices.JaxDevice):
    """Device whose memory is exhausted when the second batch is copied."""

    def __init__(self) -> None:
        self._copies = 0

    def copy(self, batch: Any) -> devices.Copy:
        """Return the batch as it is; raise the second time."""
        import torch

        self._copies += 1
        if self._copies == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return devices.Copy(batch, [])


@meets("Device memory exhausted by prefetched batches")
def _(server: ServerProcess, one_gpu: None, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(
        DataLoader, "_placement", lambda loader: Placement("torch", loader._pool, FullDevice(), copies=True)
    )
    loader = DataLoader(RemoteDataset(server.url, "train"), batch_size=64, seed=7, device="cuda")
    return warned_by(lambda: list(loader))


# -- training loop


@meets("Exception in the dataset")
def _(server: ServerProcess) -> str:
    return epoch_of(server, "raising")


@meets("Exception of a type that is not builtin")
def _(server: ServerProcess) -> str:
    return epoch_of(server, "raising-its-own")


@meets("Samples of different shapes")
def _(server: ServerProcess) -> str:
    return epoch_of(server, "uneven")


@meets("Value that cannot be encoded")
def _(server: ServerProcess) -> str:
    loader = DataLoader(RemoteDataset(server.url, "unsendable"), batch_size=None, sampler=[17], output="numpy")
    return raised_by(lambda: list(loader))


@meets("Value that cannot be restored")
def _(server: ServerProcess) -> str:
    loader = DataLoader(RemoteDataset(server.url, "unknown"), batch_size=None, sampler=[17], output="numpy")
    return raised_by(lambda: list(loader))


@meets("Too many failed samples")
def _(server: ServerProcess) -> str:
    loader = DataLoader(
        RemoteDataset(server.url, "raising"), 8, sampler=[*range(62), 17, 62], on_error="skip", output="numpy"
    )
    return raised_by(lambda: list(loader))


@meets("Batch too large")
def _(server: ServerProcess) -> str:
    loader = DataLoader(RemoteDataset(server.url, "large"), sampler=[17], output="numpy")
    return raised_by(lambda: list(loader))


@meets("Shuffle buffer too large")
def _(start_server: StartServer) -> str:
    server = start_server(f"{DATA}stream", "--max-worker-memory", "1MiB")
    options: dict[str, Any] = {"shuffle_buffer_size": 10_000, "seed": 7, "output": "numpy"}
    return raised_by(lambda: list(DataLoader(RemoteDataset(server.url, "stream"), 8, num_workers=1, **options)))


@meets("Batch whose workers die")
def _(server: ServerProcess) -> str:
    return epoch_of(server, "deadly")


@meets("Batch timeout")
def _(server: ServerProcess) -> str:
    return epoch_of(server, "stuck")


@meets("Loader timeout")
def _() -> str:
    held = Held()
    with serve(held, num_workers=0) as url:
        loader = DataLoader(RemoteDataset(url), num_workers=1, timeout=0.2, seed=0, output="numpy")
        try:
            return raised_by(lambda: next(iter(loader)))
        finally:
            held.let_go.set()


@meets("Dataset changed during training")
def _(start_server: StartServer, free_port: int) -> str:
    server = start_server(f"train={DATA}train", port=free_port)
    loader = DataLoader(RemoteDataset(server.url, "train"), output="numpy")
    batches = iter(loader)
    next(batches)
    server.end()
    start_server(f"train={DATA}validation", port=free_port)
    return raised_by(lambda: list(batches))


@meets("Servers with different datasets")
def _(start_server: StartServer) -> str:
    urls = [start_server(f"train={DATA}{name}").url for name in ("train", "validation")]
    return raised_by(lambda: RemoteDataset(urls, "train"))


@meets("Servers with different library versions")
def _(server: ServerProcess) -> str:
    remote = RemoteDataset(server.url, "train", reconnect_timeout=0)
    remote.environment = "Python 3.11, numpy 1.26.4"
    return raised_by(lambda: list(DataLoader(remote)))


@meets("Directory without servers")
def _() -> str:
    return raised_by(lambda: RemoteDataset("file:///shared/job.servers", "train", reconnect_timeout=0.1))


def refusal(url: str, tmp_path: Path) -> str:
    """Return the error of a file that lists only this server."""
    (tmp_path / "job.servers").write_text(url)
    return raised_by(lambda: RemoteDataset(f"file://{tmp_path}/job.servers", "train")).replace(
        f"file://{tmp_path}", "file:///shared"
    )


@meets("Server from a directory without TLS")
def _(tmp_path: Path) -> str:
    return refusal("http://10.0.0.5:8000", tmp_path)


@meets("Server from a directory without a CA")
def _(tmp_path: Path) -> str:
    return refusal("https://10.0.0.5:8000", tmp_path)


@meets("Iterator in a forked process")
def _(server: ServerProcess) -> str:
    batches = iter(DataLoader(RemoteDataset(server.url, "train"), output="numpy"))
    next(batches)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(theirs, raised_by(lambda: next(batches)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(theirs)
    with os.fdopen(ours) as said:
        return said.read()


# -- resuming


@meets("State of a loader with other arguments")
def _(server: ServerProcess) -> str:
    dataset = RemoteDataset(server.url, "train")
    state = DataLoader(dataset, batch_size=64, shuffle=True, seed=7, output="numpy").state_dict()
    loader = DataLoader(dataset, batch_size=64, shuffle=True, seed=8, output="numpy")
    return raised_by(lambda: loader.load_state_dict(json.loads(json.dumps(state))))


@meets("State not divisible among the new number of ranks")
def _(server: ServerProcess) -> str:
    dataset = RemoteDataset(server.url, "train")
    loader = DataLoader(dataset, batch_size=64, seed=7, output="numpy")
    next(iter(loader))
    other = DataLoader(dataset, batch_size=48, seed=7, rank=0, world_size=2, output="numpy")
    return raised_by(lambda: other.load_state_dict(loader.state_dict()))


@meets("Unknown dim of a device mesh")
def _() -> str:
    return raised_by(lambda: locate(np.arange(4).reshape(2, 2), ("dp", "ep"), (0, 0)))


@meets("Ranks of a device mesh at different positions")
def _() -> str:
    announced = Announcement("key", "arguments", 2, 40, 80, 80, keeps_dataset=False, continues_dataset=False)
    return raised_by(lambda: announced.check("arguments", 0, 0, leader=0))


# -- the rules


@pytest.mark.parametrize("heading", provocations)
def test_the_page_has_the_text(heading: str, request: pytest.FixtureRequest) -> None:
    """The page has the text of the provoked error, except for numbers and parts written as ``...``."""
    need("sybil")
    from tests.docs.pages import same_but

    provoke = provocations[heading]
    names = [name for name in provoke.__annotations__ if name != "return"]
    said = provoke(**{name: request.getfixturevalue(name) for name in names})
    said = said.replace("tests.docs.my_package", "my_package")
    assert heading in TEXTS, f"docs/errors.md lacks, below '### {heading}':\n{said}"
    assert same_but(TEXTS[heading], said), f"docs/errors.md says\n{TEXTS[heading]}\nand it is\n{said}"


def test_each_text_of_the_page_is_provoked() -> None:
    """A test provokes each text of the page."""
    assert set(TEXTS) <= set(provocations)
