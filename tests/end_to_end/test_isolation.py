"""Servers with isolated workers: everything works as without isolation, and what is not permitted is an error at start.

`tests.attacks.test_isolation` has the attacks that isolation prevents.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from teleloader import DataLoader, LoaderTimeout, RemoteDataset
from tests.conftest import ROOT, eventually
from tests.isolated import (
    AS_WORKER_USER,
    SERVER_USER,
    WORKER_USER,
    isolated_server,
    needs_root,
    open_folder,
    readable_interpreter,
)

IMAGES = "tests.end_to_end.hosted:images"
NUMBERS = "tests.end_to_end.hosted:numbers"
PROGRAM = "from teleloader_server.cli import main; main()"

CACHED = """
import numpy as np
from teleloader_server import CachedDataset

class Zeros:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return np.zeros(1000)

def cached():
    return CachedDataset(Zeros(), "{folder}", version="1", max_bytes=2**24)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Create a folder that all users can read."""
    with open_folder() as found:
        yield found


def user_of(pid: int) -> int:
    """Return the effective user ID of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[2] for line in status.splitlines() if line.startswith("Uid:")))


def run_command(*arguments: str, prefix: Sequence[str] = (), folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``teleloader-server`` until it exits."""
    command = [*prefix, sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110, check=False)


@needs_root
@pytest.mark.parametrize("server_options", [(), ("--servers", "2")])
def test_batches_of_another_users_workers_are_lent_in_shared_memory(server_options: tuple[str, ...]) -> None:
    """Server and client map the memory of workers that run as another user."""
    with isolated_server(IMAGES, "--num-workers", "2", *AS_WORKER_USER, *server_options) as server:
        assert {user_of(pid) for pid in server.worker_pids()} == {WORKER_USER}
        loader = DataLoader(RemoteDataset(server.url, "images"), batch_size=2, output="numpy")
        first, second = ([batch[:, 0].tolist() for batch in loader] for _ in range(2))
        assert first == second == [[1 + k, 2 + k] for k in range(0, 60, 2)]
        stats = httpx.get(f"{server.url}/stats").json()
        assert sum(consumer["batches_lent"] for consumer in stats["consumers"]) > 0


@needs_root
def test_workers_of_another_user_are_measured_replaced_and_stopped() -> None:
    """The memory of workers is in /stats; a killed worker is replaced; at the end, all processes exit."""
    with isolated_server(NUMBERS, "--num-workers", "1", *AS_WORKER_USER) as server:
        (worker,) = server.stats()["workers"]
        assert 0 < worker["pss"] <= worker["rss"]
        os.kill(worker["pid"], signal.SIGKILL)
        replaced = eventually(lambda: set(server.worker_pids()) - {worker["pid"], None})
        assert RemoteDataset(server.url, "numbers")[3] is not None
        forkserver = parent_of(*replaced)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (*replaced, forkserver)))


@needs_root
def test_the_end_of_the_server_ends_workers_of_another_user() -> None:
    """The kernel kills the fork server and the workers if the server is killed."""
    with isolated_server(NUMBERS, "--num-workers", "1", *AS_WORKER_USER) as server:
        (worker,) = server.worker_pids()
        forkserver = parent_of(worker)
        server.kill()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (worker, forkserver)))


@needs_root
def test_a_worker_of_another_user_that_hangs_is_killed_with_its_stack(folder: Path) -> None:
    """The signals of the server reach the worker, which writes its stack to memory that the server reads."""
    (folder / "hanging.py").write_text(
        "import time\nclass Hanging:\n    def __len__(self): return 1\n"
        "    def __getitem__(self, index): time.sleep(600)\n"
    )
    with isolated_server(
        "hanging:Hanging", "--num-workers", "1", "--batch-timeout", "1", *AS_WORKER_USER, folder=folder
    ) as server:
        (before,) = server.worker_pids()
        with pytest.raises(LoaderTimeout, match=r"hanging\.py"):
            RemoteDataset(server.url, "Hanging")[0]
        eventually(lambda: not Path(f"/proc/{before}").exists())


@needs_root
def test_a_sample_cache_belongs_to_the_workers_user(folder: Path) -> None:
    """Workers write the cache in a folder of their user; in a folder of root, they compute samples without it."""
    (folder / "mine").mkdir()
    os.chown(folder / "mine", WORKER_USER, WORKER_USER)
    (folder / "roots").mkdir()
    for name in ("mine", "roots"):
        (folder / f"{name}_data.py").write_text(CACHED.format(folder=folder / name))
    with isolated_server(
        "mine=mine_data:cached", "roots=roots_data:cached", "--num-workers", "1", *AS_WORKER_USER, folder=folder
    ) as server:
        for name in ("mine", "roots"):
            dataset = RemoteDataset(server.url, name)
            assert [dataset[0].sum() for _ in range(2)] == [0, 0]
        server.await_line(r"the cache .*/roots ")
    assert {path.stat().st_uid for path in (folder / "mine").iterdir()} == {WORKER_USER}
    assert not list((folder / "roots").iterdir())


@needs_root
def test_reload_works_with_another_users_workers(folder: Path) -> None:
    """After a change of the dataset's file, workers that run as the user return new samples."""
    module = folder / "reloaded.py"
    module.write_text("data = [1, 2]")
    with isolated_server("reloaded:data", "--num-workers", "1", "--reload", *AS_WORKER_USER, folder=folder) as server:
        dataset = RemoteDataset(server.url, "data")
        assert dataset[0] == 1
        module.write_text("data = [7, 8]")
        server.await_line(r"changed: restarting")

        def new_sample() -> bool:
            return bool(RemoteDataset(server.url, "data")[0] == 7)

        eventually(new_sample)


@needs_root
def test_a_server_without_root_isolates_the_network_of_workers() -> None:
    """Where users may create user namespaces, --worker-network requires no privileges."""
    prefix = ["setpriv", f"--reuid={SERVER_USER}", f"--regid={SERVER_USER}", "--clear-groups", "--"]
    probe = subprocess.run([*prefix, "unshare", "--user", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("this system permits no user namespaces to unprivileged users")
    with isolated_server(
        "interfaces=tests.end_to_end.hosted:interfaces", "--num-workers", "1", "--worker-network", "none",
        server_user=SERVER_USER,
    ) as server:  # fmt: skip
        assert RemoteDataset(server.url, "interfaces")[0] == "lo"
        assert {user_of(pid) for pid in server.worker_pids()} == {SERVER_USER}


@needs_root
def test_the_start_message_states_the_isolation() -> None:
    """One line lists the user and the limits."""
    options = ("--worker-network", "none", "--worker-memory-limit", "1GiB", "--worker-process-limit", "64")
    with isolated_server(NUMBERS, "--num-workers", "1", *AS_WORKER_USER, *options) as server:
        server.await_line(
            rf"isolation: workers run as user {WORKER_USER}:{WORKER_USER}, without network, with up to 1 GiB of "
            r"private memory per process, with up to 64 processes and threads in total"
        )


@needs_root
def test_a_folder_that_the_workers_user_cannot_read_is_named() -> None:
    """Python skips such folders, so that the module seems to be missing."""
    with open_folder() as outer:
        closed = outer / "closed"
        closed.mkdir(mode=0o700)
        (closed / "hidden_module.py").write_text("data = [1]")
        with open_folder() as place:
            found = run_command(
                "hidden_module:data", "--port", "0", "--num-workers", "1", *AS_WORKER_USER,
                prefix=readable_interpreter(place), folder=closed,
            )  # fmt: skip
    assert found.returncode == 2
    assert f"User ID {WORKER_USER} cannot read {closed}" in found.stderr


@needs_root
def test_check_isolates_the_dataset_too(folder: Path) -> None:
    """Missing permissions of the workers' user are found before the server starts."""
    (folder / "secret").write_text("1")
    (folder / "secret").chmod(0o600)
    (folder / "reading.py").write_text(f"data = [open({str(folder / 'secret')!r}).read()]")
    with open_folder() as place:
        prefix = readable_interpreter(place)
        allowed = run_command("check", "reading:data", prefix=prefix, folder=folder)
        refused = run_command("check", "reading:data", *AS_WORKER_USER, prefix=prefix, folder=folder)
    assert allowed.returncode == 0, allowed.stdout + allowed.stderr
    assert refused.returncode == 1
    assert "PermissionError" in refused.stdout


@needs_root
@pytest.mark.parametrize(("mode", "verb"), [(0o644, "read or write"), (0o602, "read or write"), (None, "replace")])
def test_a_token_file_that_workers_could_access_is_refused(folder: Path, mode: int | None, verb: str) -> None:
    """The server does not start if the workers' user can read or write its token file, or replace it in its folder."""
    tokens = folder / "tokens.toml"
    tokens.write_text('[trainer]\ntoken = "the-token-of-this-test"\nscopes = ["read"]\n')
    tokens.chmod(mode or 0o600)
    if mode is None:
        folder.chmod(0o777)
    with open_folder() as place:
        found = run_command(
            NUMBERS, "--port", "0", "--num-workers", "1", "--tokens", str(tokens), *AS_WORKER_USER,
            prefix=readable_interpreter(place),
        )  # fmt: skip
    assert found.returncode == 2
    assert f"user '{WORKER_USER}:{WORKER_USER}' can {verb} {tokens}" in found.stderr


@needs_root
def test_a_password_in_the_command_line_is_refused() -> None:
    """All users can read command lines."""
    found = run_command(NUMBERS, "--port", "0", "--ssl-keyfile-password", "x", *AS_WORKER_USER)
    assert found.returncode == 2
    assert "Set TELELOADER_SSL_KEYFILE_PASSWORD instead" in found.stderr


@needs_root
def test_capabilities_are_sufficient_to_run_workers_as_another_user() -> None:
    """The server needs not be root; its workers have none of its capabilities."""
    granted = "+setuid,+setgid,+kill"
    with isolated_server(
        NUMBERS, "--num-workers", "1", *AS_WORKER_USER, server_user=SERVER_USER,
        server_privileges=[f"--inh-caps={granted}", f"--ambient-caps={granted}"],
    ) as server:  # fmt: skip
        assert user_of(server.pid) == SERVER_USER
        (worker,) = server.stats()["workers"]
        assert user_of(worker["pid"]) == WORKER_USER
        assert worker["rss"] > 0
        status = Path(f"/proc/{worker['pid']}/status").read_text()
        assert re.findall(r"^Cap(?:Prm|Eff|Amb):\s+(\w+)$", status, re.MULTILINE) == 3 * [16 * "0"]
        os.kill(worker["pid"], signal.SIGKILL)
        eventually(lambda: set(server.worker_pids()) - {worker["pid"], None})


@needs_root
def test_without_further_capabilities_batches_are_sent_over_http() -> None:
    """Root in a container with CAP_SETUID, CAP_SETGID and CAP_KILL can neither lend memory nor measure its PSS."""
    container = ["--bounding-set=-all,+setuid,+setgid,+kill", "--inh-caps=-all"]
    with isolated_server(IMAGES, "--num-workers", "1", *AS_WORKER_USER, server_privileges=container) as server:
        loader = DataLoader(RemoteDataset(server.url, "images"), batch_size=2, output="numpy")
        assert [batch[:, 0].tolist() for batch in loader] == [[1 + k, 2 + k] for k in range(0, 60, 2)]
        stats = server.stats()
        assert sum(consumer["batches_lent"] for consumer in stats["consumers"]) == 0
        (worker,) = stats["workers"]
        assert worker["pss"] == worker["rss"] > 0


@needs_root
def test_a_server_without_privileges_refuses_another_user() -> None:
    """The message names the missing capabilities."""
    with open_folder() as place:
        prefix = [*readable_interpreter(place), "setpriv", f"--reuid={SERVER_USER}", "--clear-groups", "--"]
        found = run_command(NUMBERS, "--port", "0", "--num-workers", "1", *AS_WORKER_USER, prefix=prefix)
    assert found.returncode == 2
    assert "lacks CAP_SETUID, CAP_SETGID, CAP_KILL" in found.stderr


@needs_root
def test_a_network_namespace_that_the_system_refuses_is_an_error() -> None:
    """A server whose user namespace permits no network namespaces does not start."""
    refuse = 'echo 0 > /proc/sys/user/max_net_namespaces; exec "$@"'
    prefix = ["unshare", "--user", "--map-root-user", "sh", "-ec", refuse, "sh"]
    found = run_command(NUMBERS, "--port", "0", "--num-workers", "1", "--worker-network", "none", prefix=prefix)
    assert found.returncode == 2
    assert "cannot isolate workers (--worker-network none): cannot create a network namespace" in found.stderr


@needs_root
def test_an_interpreter_that_the_workers_user_cannot_execute_is_an_error(folder: Path) -> None:
    """The message names the program."""
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    python = closed / "python"
    python.symlink_to(sys.executable)
    code = f"import sys; sys.executable = {str(python)!r}; {PROGRAM}"
    arguments = (NUMBERS, "--port", "0", "--num-workers", "1", *AS_WORKER_USER)
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert found.returncode == 2
    assert f"cannot execute {python}: Permission denied" in found.stderr


def parent_of(pid: int) -> int:
    """Return the PID of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
