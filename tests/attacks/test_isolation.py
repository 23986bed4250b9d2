"""Attacks of dataset code on its server: with isolation each one is refused, and without isolation it succeeds.

The second half of this sentence shows that the attacks work, and that the options cause the refusals.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from teleloader import LoaderTimeout, RemoteDataset
from tests.attacks import intruder
from tests.attacks.intruder import REFUSED, run_attack
from tests.conftest import ROOT, ServerProcess
from tests.end_to_end.certificates import Files
from tests.isolated import AS_WORKER_USER, SERVER_USER, WORKER_USER, isolated_server, needs_root, open_folder

pytestmark = needs_root

TOKEN: Final = "the-token-of-tests-on-isolation"
PASSWORD: Final = "the-password-in-the-environment"
LIMITS: Final = ("--worker-network", "none", "--worker-memory-limit", "512MiB", "--worker-process-limit", "40")


class Attacked(NamedTuple):
    """Server with secrets, and its hostile dataset."""

    server: ServerProcess
    dataset: Any

    def run(self, attack: Callable[[], str]) -> str:
        """Return the result of an attack."""
        return run_attack(self.dataset, attack)


@contextmanager
def attacked(*options: str, **settings: Any) -> Iterator[Attacked]:
    """Run a server with tokens, a TLS key and secrets in the environment; `settings` as for `isolated_server`."""
    server_user = settings.get("server_user", 0)
    with open_folder() as folder, socket.create_server(("127.0.0.1", 0)) as listening:
        files = Files(folder)
        cert, key = files.make("server", "127.0.0.1")
        tokens = folder / "tokens.toml"
        tokens.write_text(f'[trainer]\ntoken = "{TOKEN}"\nscopes = ["read", "stats"]\n')
        for secret in (tokens, key):
            os.chmod(secret, 0o600)
            os.chown(secret, server_user, server_user)
        setuid = folder / "id"
        shutil.copy("/usr/bin/id", setuid)
        setuid.chmod(0o4755)
        environment = {
            **os.environ, "TELELOADER_SSL_KEYFILE_PASSWORD": PASSWORD, "OTEL_EXPORTER_OTLP_HEADERS": PASSWORD,
            "INTRUDER_SETUID_ID": str(setuid), "INTRUDER_PORT": str(listening.getsockname()[1]),
        }  # fmt: skip
        with isolated_server(
            "intruder=tests.attacks.intruder:Intruder", "--num-workers", "1", "--tokens", str(tokens),
            "--ssl-certfile", cert, "--ssl-keyfile", key, *options, environment=environment, **settings,
        ) as server:  # fmt: skip
            yield Attacked(server, RemoteDataset(server.url, "intruder", token=TOKEN, ca=files.ca))


@pytest.fixture(scope="module")
def isolated() -> Iterator[Attacked]:
    """Run a server as root, with supplementary groups, and with all restrictions of its workers."""
    with attacked(*AS_WORKER_USER, *LIMITS, server_privileges=["--groups=4,27"]) as found:
        yield found


@pytest.fixture(scope="module")
def unprivileged() -> Iterator[Attacked]:
    """Run a server that is not root, without isolation options: its workers run as the same user."""
    with attacked(server_user=SERVER_USER) as found:
        yield found


@pytest.fixture(scope="module")
def trusting() -> Iterator[Attacked]:
    """Run a server as root without isolation options."""
    with attacked() as found:
        yield found


BY_USER: Final = (
    intruder.token_file, intruder.tls_key, intruder.server_environment, intruder.server_memory, intruder.ptrace,
    intruder.server_descriptors, intruder.signal_server,
)  # fmt: skip
BY_DUMPABLE: Final = (
    intruder.server_environment, intruder.server_memory, intruder.ptrace, intruder.server_descriptors,
)  # fmt: skip
BY_LIMITS: Final = (intruder.fork_bomb, intruder.much_memory, intruder.network)


@pytest.mark.parametrize("attack", BY_USER)
def test_another_user_cannot_reach_the_server(isolated: Attacked, attack: Callable[[], str]) -> None:
    """Token files, keys, environment, memory and descriptors of the server are inaccessible to --worker-user."""
    assert isolated.run(attack).startswith(f"{REFUSED}PermissionError")


@pytest.mark.parametrize("attack", BY_LIMITS)
def test_limits_of_processes_memory_and_network_hold(isolated: Attacked, attack: Callable[[], str]) -> None:
    """An attack fails, and the worker continues with the next batch."""
    assert isolated.run(attack).startswith(REFUSED)
    assert isolated.run(intruder.loopback) == "connected"


@pytest.mark.parametrize("attack", [*BY_USER, *BY_LIMITS])
def test_workers_of_root_without_isolation_can_do_everything(trusting: Attacked, attack: Callable[[], str]) -> None:
    """Each attack succeeds without the restriction that prevents it."""
    assert not trusting.run(attack).startswith(REFUSED)


@pytest.mark.parametrize("attack", BY_DUMPABLE)
def test_workers_of_the_same_user_cannot_inspect_the_server(unprivileged: Attacked, attack: Callable[[], str]) -> None:
    """A server with secrets is not dumpable: without a second user, its memory and its environment are protected."""
    assert unprivileged.run(attack).startswith(f"{REFUSED}PermissionError")


def test_workers_of_the_same_user_can_read_token_files(unprivileged: Attacked) -> None:
    """Only another user is a protection of files."""
    assert TOKEN in unprivileged.run(intruder.token_file)
    assert "PRIVATE KEY" in unprivileged.run(intruder.tls_key)


def test_a_server_in_debug_mode_can_be_inspected() -> None:
    """With --debug, profilers and debuggers of the same user work."""
    with attacked("--debug", server_user=SERVER_USER) as found:
        for attack in BY_DUMPABLE:
            assert not found.run(attack).startswith(REFUSED), attack


@pytest.mark.parametrize("fixture", ["isolated", "unprivileged", "trusting"])
def test_the_environment_of_workers_has_no_secrets(fixture: str, request: pytest.FixtureRequest) -> None:
    """Options, tokens and passwords of the server are removed; the variables of datasets remain."""
    found: Attacked = request.getfixturevalue(fixture)
    for attack in (intruder.own_environment, intruder.forkserver_environment):
        environment = found.run(attack)
        assert PASSWORD not in environment
        assert "INTRUDER_PORT" in environment


@pytest.mark.parametrize("fixture", ["isolated", "unprivileged", "trusting"])
def test_workers_have_no_descriptors_of_the_server(fixture: str, request: pytest.FixtureRequest) -> None:
    """A worker has its standard streams, its channel and memory files; the fork server has a pidfd per worker, too."""
    found: Attacked = request.getfixturevalue(fixture)
    ours = found.server.pid
    files = {os.readlink(f"/proc/{ours}/fd/{name}") for name in os.listdir(f"/proc/{ours}/fd")}
    sockets = {name for name in files if name.startswith("socket:")}
    assert len(sockets) >= 2, "the server has a listening socket and channels"
    for attack, others in (
        (intruder.own_descriptors, ("/memfd:teleloader", "/proc/")),
        (intruder.forkserver_descriptors, ("/memfd:teleloader", "anon_inode:")),
    ):
        held: dict[str, str] = json.loads(found.run(attack))
        streams = {held.pop(name) for name in ("0", "1", "2")}
        assert not sockets & streams
        channels = [target for target in held.values() if target.startswith("socket:")]
        assert len(channels) == 1
        assert not sockets & set(channels), "the other end of a channel, and no socket of the server"
        assert all(target.startswith(others) for target in held.values() if target not in channels), held


@pytest.mark.parametrize("fixture", ["isolated", "unprivileged", "trusting"])
def test_setuid_programs_do_not_raise_privileges(fixture: str, request: pytest.FixtureRequest) -> None:
    """`no_new_privs` holds for the workers of all servers."""
    found: Attacked = request.getfixturevalue(fixture)
    user = {"isolated": WORKER_USER, "unprivileged": SERVER_USER, "trusting": 0}[fixture]
    assert found.run(intruder.setuid_program) == str(user)
    assert json.loads(found.run(intruder.identity))["NoNewPrivs"] == ["1"]


def test_workers_have_the_ids_of_their_user_and_no_capabilities(isolated: Attacked) -> None:
    """Real, effective, saved and file system IDs are those of the user; the groups of the server are dropped."""
    identity = json.loads(isolated.run(intruder.identity))
    assert identity["Uid"] == identity["Gid"] == 4 * [str(WORKER_USER)]
    assert identity["Groups"] == []
    assert {identity[name][0].strip("0") for name in ("CapEff", "CapPrm", "CapAmb")} == {""}


def test_workers_have_a_session_without_a_controlling_terminal(isolated: Attacked, trusting: Attacked) -> None:
    """A process in the session of the server could enter commands in its terminal."""
    for found, is_equal in ((isolated, False), (trusting, True)):
        (session,) = json.loads(found.run(intruder.identity))["NSsid"]
        assert (int(session) == os.getsid(found.server.pid)) == is_equal


@pytest.mark.parametrize(("options", "is_refused"), [(AS_WORKER_USER, True), ((), False)])
def test_relative_paths_do_not_bypass_the_mode_of_a_parent_folder(options: tuple[str, ...], is_refused: bool) -> None:
    """A server that starts in a subfolder of /root does not give its workers access to this subfolder."""
    with open_folder() as folder:
        inner = folder / "inner"
        inner.mkdir()
        (inner / "closed-secret").write_text("secret")
        folder.chmod(0o700)
        command = ("tests.attacks.intruder:Intruder", "--num-workers", "1", *options)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with isolated_server(*command, folder=inner, environment=environment) as server:
            dataset = RemoteDataset(server.url, "Intruder")
            assert run_attack(dataset, intruder.file_in_current_folder).startswith(REFUSED) == is_refused


def copies(pid: int, wanted: bytes) -> int:
    """Count the copies of a text in the private memory of a process."""
    found = 0
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, mode, *_ = line.split()
            start, end = (int(one, 16) for one in place.split("-"))
            if mode.startswith("rw") and end - start < 2**28:
                memory.seek(start)
                found += memory.read(end - start).count(wanted)
    return found


def test_the_memory_of_workers_and_fork_server_has_no_secrets(isolated: Attacked) -> None:
    """The fork server is a new interpreter and no fork of the server, in which the same search finds the token."""
    identity = json.loads(isolated.run(intruder.identity))
    worker, forkserver = int(identity["Pid"][0]), int(identity["PPid"][0])
    for secret in (TOKEN, PASSWORD):
        assert copies(isolated.server.pid, secret.encode()) > 0
        assert copies(worker, secret.encode()) == 0
        assert copies(forkserver, secret.encode()) == 0


@pytest.mark.parametrize(("options", "is_killed"), [(AS_WORKER_USER, False), ((), True)])
def test_a_false_pid_does_not_make_the_server_kill_another_process(options: tuple[str, ...], is_killed: bool) -> None:
    """The server kills a worker that hangs, but with --worker-user no process of another user."""
    with subprocess.Popen(["sleep", "600"]) as victim:
        try:
            with isolated_server(
                "tests.attacks.intruder:Impostor", "--num-workers", "1", "--batch-timeout", "1", *options,
                environment={**os.environ, "INTRUDER_VICTIM": str(victim.pid)},
            ) as server:  # fmt: skip
                with pytest.raises(LoaderTimeout):
                    RemoteDataset(server.url, "Impostor")[0]
                if is_killed:
                    assert victim.wait() == -signal.SIGKILL
                assert (victim.poll() is not None) == is_killed
        finally:
            victim.kill()
