"""Fleets on a Ray cluster of three nodes on this machine, of which the head node has no CPUs.

The tests share the cluster and a fleet, because both take long to start. With TELELOADER_TEST_FRAMEWORKS=1, Ray must be
installed.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server.config import ConfigError
from tests.conftest import ROOT, StartServer, eventually
from tests.end_to_end.terminal import SERVER, piped
from tests.examples.running import need_framework

FOLDER = Path(__file__).parent
MODULE = "ray_datasets"
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]  # Ray's own warnings


def free_port_now() -> int:
    """Return a port that is free on all addresses."""
    with socket.create_server(("", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


class Cluster:
    """Ray cluster with a connected driver."""

    def __init__(self, code: Path) -> None:
        # before the import; the defaults are too short for a busy machine
        os.environ["RAY_raylet_start_wait_time_s"] = "60"  # noqa: SIM112
        os.environ["RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S"] = "180"
        import ray
        from ray.cluster_utils import Cluster as Nodes

        client_port = free_port_now()
        self.nodes = Nodes()
        self.add_node(num_cpus=0, ray_client_server_port=client_port, include_dashboard=False)
        self.client_address = f"ray://127.0.0.1:{client_port}"
        """Address for drivers outside of the cluster."""
        self.workers = [self.add_node(), self.add_node()]
        self.address: str = self.nodes.address
        ray.init(self.address, runtime_env={"working_dir": str(code)}, log_to_driver=False)

    def add_node(self, num_cpus: int = 2, **options: Any) -> Any:
        """Add a node, by default with room for two servers.

        On a busy machine, Ray ends a node whose agents have not started after 18 s: try again.
        """
        options = {"num_cpus": num_cpus, "object_store_memory": 80 * 2**20, **options}
        for _ in range(2):
            with suppress(Exception):
                return self.nodes.add_node(**options)
        return self.nodes.add_node(**options)

    def close(self) -> None:
        """Stop all nodes."""
        import ray

        ray.shutdown()
        self.nodes.shutdown()


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the code of the dataset."""
    folder = tmp_path_factory.mktemp("code")
    shutil.copy(FOLDER / f"{MODULE}.py", folder)
    return folder


@pytest.fixture(scope="module")
def cluster(code: Path) -> Iterator[Cluster]:
    """Start a cluster."""
    need_framework("ray")
    running = Cluster(code)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def fleet(cluster: Cluster) -> Iterator[Any]:
    """Start a fleet of two servers."""
    from teleloader_server.ray import up

    started = up("tests", f"{MODULE}:Slow", servers=2, num_workers=1, registry_port=free_port_now(), timeout=300)
    eventually(lambda: states(started) == ["ready", "ready"], 120)
    yield started
    started.down()


@pytest.fixture
def single(start_server: StartServer) -> RemoteDataset:
    """Return the dataset of a single server without Ray."""
    return RemoteDataset(start_server(f"tests.end_to_end.{MODULE}:Numbers").url)


@pytest.fixture
def expected(single: RemoteDataset) -> list[list[int]]:
    """Return the 2,000 batches of an epoch of a single server."""
    return received(single)


def received(
    dataset: RemoteDataset,
    at: Mapping[int, Callable[[], object]] | None = None,
    waits: list[float] | None = None,
    **options: Any,
) -> list[list[int]]:
    """Return the batches of an epoch.

    Args:
        dataset: The dataset.
        at: Functions to call after the batches with these numbers.
        waits: List to which the seconds are added for which the loop waited for each batch.
        options: Further arguments of `DataLoader`.
    """
    batches: list[list[int]] = []
    began = time.monotonic()
    for number, batch in enumerate(DataLoader(dataset, batch_size=2, shuffle=True, seed=3, **options)):
        if waits is not None:
            waits.append(time.monotonic() - began)
        batches.append(batch.tolist())
        if at and number in at:
            at[number]()
        began = time.monotonic()
    return batches


def states(fleet: Any) -> list[str]:
    """Return the states of a fleet's servers."""
    return [server.state for server in fleet.status().servers.values()]


def is_whole(fleet: Any, servers: int = 2) -> bool:
    """Return True if the registry and all servers are ready."""
    status = fleet.status()
    return [each.state for each in (status.registry, *status.servers.values())] == ["ready"] * (1 + servers)


def process_at(url: str) -> psutil.Process:
    """Return the process that listens at a URL."""
    port = int(url.rpartition(":")[2])
    (found,) = (
        psutil.Process(connection.pid)
        for connection in psutil.net_connections("tcp")
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN
    )
    return found


def test_an_epoch_has_the_order_of_one_server(fleet: Any, expected: list[list[int]]) -> None:
    """The code of the dataset comes from the runtime environment. Both servers compute batches."""
    from teleloader_server.ray import connect, control

    dataset = connect("tests").dataset("Slow")
    assert dataset.url.startswith("registry+https://")
    assert received(dataset) == expected
    urls = [url for server in fleet.status().servers.values() for url in server.urls]
    assert {server.url for server in dataset.servers.known} == set(urls)
    access = control.call_registry("tests", "access")
    for url in urls:
        stats = httpx.get(
            f"{url}/stats", verify=ssl.create_default_context(cadata=access.ca),
            headers={"Authorization": f"Bearer {access.token}"},
        )  # fmt: skip
        assert stats.json()["datasets"][0]["batches_sent"] > 0


def test_tasks_and_other_drivers_connect(cluster: Cluster, fleet: Any, expected: list[list[int]]) -> None:
    """A task in the cluster, a driver on a node, and a driver outside of the cluster."""
    import ray

    def in_task() -> list[int]:
        from teleloader import DataLoader
        from teleloader_server.ray import connect

        loader = DataLoader(connect("tests").dataset(), batch_size=2, shuffle=True, seed=3)
        batch: list[int] = next(iter(loader)).tolist()
        return batch

    assert ray.get(ray.remote(num_cpus=0)(in_task).remote()) == expected[0]
    program = (
        "import ray, sys\n"
        "from teleloader import DataLoader\n"
        "from teleloader_server.ray import connect\n"
        "ray.init(sys.argv[1])\n"
        "print(next(iter(DataLoader(connect('tests').dataset(), batch_size=2, shuffle=True, seed=3))).tolist())"
    )
    for address in (cluster.address, cluster.client_address):
        done = piped(program, address)
        assert done.out.strip() == str(expected[0]), done.err


def test_the_secrets_stay_in_actors_environments_and_unnamed_files(fleet: Any) -> None:
    """They are neither in the logs of Ray, nor in command lines, nor in files that have a name.

    Ray kills an actor with its child processes, which could then not remove files.
    """
    from teleloader_server.ray import control

    access = control.call_registry("tests", "access")
    assert access.token not in repr(access)
    process = process_at(fleet.status().registry.urls[0])
    arguments = process.cmdline()
    numbers = [word.removeprefix("/dev/fd/") for word in arguments if word.startswith("/dev/fd/")]
    assert len(numbers) == 4
    for file in (Path(f"/proc/{process.pid}/fd/{number}") for number in numbers):
        assert (file.stat().st_nlink, file.stat().st_mode & 0o777) == (0, 0o600)
        assert access.token not in file.read_text()
    (folder,) = {Path(word.removeprefix("file://")).parent for word in arguments if word.startswith("file://")}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in folder.iterdir()} == {"servers", "servers.lock"}
    announce = process.environ()["TELELOADER_ANNOUNCE_TOKEN"]
    for log in (Path(path) for path in Path("/tmp/ray/session_latest/logs").rglob("*")):
        content = log.read_bytes() if log.is_file() else b""
        assert access.token.encode() not in content, log
        assert announce.encode() not in content, log
    for other in psutil.process_iter(["cmdline"]):
        assert access.token not in " ".join(other.info["cmdline"] or ())
    assert fleet.access().token.encode() not in pickle.dumps(fleet.dataset())


def test_an_invalid_configuration_is_terminal(fleet: Any) -> None:
    """The error is that of the server or the registry, and no fleet remains."""
    from teleloader_server.ray import connect, up

    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"exited with code 2:[^$]*module 'no_such' not found"):
        up("wrong", "no_such:Slow", servers=1, num_workers=1, registry_port=free_port_now())
    assert time.monotonic() - began < 300
    with pytest.raises(LookupError, match="this Ray cluster has no fleet 'wrong'"):
        connect("wrong")
    with socket.create_server(("", 0)) as used, pytest.raises(ConfigError, match="Address already in use"):
        up("wrong", f"{MODULE}:Slow", servers=1, num_workers=1, registry_port=used.getsockname()[1])
    with pytest.raises(ConfigError, match="fleet 'tests' exists"):
        up("tests", f"{MODULE}:Slow", servers=1, num_workers=1)
    with pytest.raises(ConfigError, match="invalid argument '--host': a fleet on Ray sets this option itself"):
        up("wrong", f"{MODULE}:Slow", "--host", "0.0.0.0", servers=1, num_workers=1)
    with pytest.raises(ConfigError, match="invalid fleet name 'a/b'"):
        up("a/b", f"{MODULE}:Slow", servers=1, num_workers=1)
    with pytest.raises(ConfigError, match="invalid number of servers 0"):
        up("wrong", f"{MODULE}:Slow", servers=0, num_workers=1)
    with pytest.raises(ConfigError, match="invalid memory -1"):
        up("wrong", f"{MODULE}:Slow", servers=1, num_workers=1, memory=-1)
    with pytest.raises(ConfigError, match="invalid num_cpus 0"):
        up("wrong", f"{MODULE}:Slow", servers=1, num_workers=1, num_cpus=0)


def test_commands(cluster: Cluster, fleet: Any, tmp_path: Path) -> None:
    """The servers that are added have the runtime environment of the driver that started the fleet."""

    def run(*arguments: str) -> str:
        done = piped(SERVER, "ray", *arguments, "--name", "tests", RAY_ADDRESS=cluster.address)
        assert done.code == 0, done.err
        return done.out

    def status() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(run("status", "--output", "json"))
        return found

    before = status()["servers"]
    assert [server["state"] for server in before.values()] == ["ready", "ready"]
    run("scale", "3")
    assert list(status()["servers"]) == ["0", "1", "2"]
    eventually(lambda: status()["servers"]["2"]["state"] == "ready", 120)
    assert fleet.dataset().info.kind == "map"
    folder = tmp_path / "it's private"
    variables = run("credentials", str(folder))
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {"token": 0o600, "ca.pem": 0o600}
    tool = f'{sys.executable} -c "from teleloader.cli import main; main()"'
    script = f"export TELELOADER_TOKEN=other\n{variables}\n{tool} stats --output json"
    shown = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, check=True)
    assert len(json.loads(shown.stdout)["servers"]) == 3
    assert run("credentials", str(folder)) == variables
    old = process_at(status()["servers"]["1"]["urls"][0])
    run("drain", "1")
    assert not old.is_running()
    assert list(status()["servers"]) == ["0", "2"]
    run("scale", "1")
    assert list(status()["servers"]) == ["0"]
    text = run("status").splitlines()
    assert [line.split()[:2] for line in text] == [["registry", "ready"], ["0", "ready"]]
    wrong = piped(SERVER, "ray", "drain", "7", "--name", "tests", RAY_ADDRESS=cluster.address)
    assert (wrong.code, wrong.err) == (1, "Error: fleet 'tests' has no server 7: its servers are [0]\n")
    for servers, message in [("2-x", "expected a number such as 2, or a range such as 2-16"), ("3-2", "(3, 2)")]:
        wrong = piped(SERVER, "ray", "scale", servers, "--name", "tests", RAY_ADDRESS=cluster.address)
        assert wrong.code == 2
        assert message in wrong.err


def test_the_code_of_the_page_runs(
    cluster: Cluster, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page on Ray, including Ray Train, with a free port for the registry."""
    need_framework("sybil")
    from tests.docs.pages import Page

    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    shutil.copytree(ROOT / "tests" / "docs" / "my_package", tmp_path / "my_package")
    page = tmp_path / "ray.md"
    text = (ROOT / "docs" / "ray.md").read_text()
    page.write_text(text.replace("server ray up", f"server ray up --registry-port {free_port}"))
    with ExitStack() as stack:
        Page(page, tmp_path, free_port, stack).run()


def test_a_whole_life_on_the_command_line(cluster: Cluster, code: Path) -> None:
    """The drivers have exited; no process and no folder of the fleet remains."""
    fleet = ("--name", "short", "--address", cluster.address)
    done = piped(
        SERVER, "ray", "up", *fleet, "--servers", "1", "--num-workers", "1", "--registry-port", str(free_port_now()),
        "--working-dir", str(code), f"{MODULE}:Slow", "--", "--batch-timeout", "30",
    )  # fmt: skip
    assert done.code == 0, done.err
    words = [line.split() for line in done.out.splitlines()]
    assert [line[:2] for line in words] == [["registry", "ready"], ["0", "ready"]]
    running = [process_at(line[2]) for line in words]
    folders = [
        Path(word.removeprefix("file://")).parent
        for each in running
        for word in each.cmdline()
        if word.startswith("file://")
    ]
    assert len(folders) == 2
    again = piped(SERVER, "ray", "up", *fleet, "--servers", "1", "--num-workers", "1", f"{MODULE}:Slow")
    assert again.code == 2
    assert "fleet 'short' exists" in again.err
    assert piped(SERVER, "ray", "down", *fleet).code == 0
    assert not any(process.is_running() for process in running)
    assert not any(folder.exists() for folder in folders)
    broken = piped(
        SERVER, "ray", "up", *fleet, "--servers", "1", "--num-workers", "1", "--runtime-env-json",
        '{"conda": "no_such_environment"}', f"{MODULE}:Slow",
    )  # fmt: skip
    assert broken.code == 1
    assert broken.err.startswith("Error: Failed to set up runtime environment")
    gone = piped(SERVER, "ray", "status", *fleet)
    assert gone.code == 1
    assert "this Ray cluster has no fleet 'short'" in gone.err


def test_servers_without_a_registry_are_removed(cluster: Cluster) -> None:
    """Another program has removed the actor of the registry: the servers do not have the CA of a new fleet."""
    import ray

    from teleloader_server.ray import connect, up
    from teleloader_server.ray.actors import NAMESPACE

    def remove_registry() -> None:
        ray.kill(ray.get_actor("orphans", namespace=NAMESPACE))
        with pytest.raises(LookupError, match="this Ray cluster has no fleet 'orphans'"):
            eventually(lambda: not connect("orphans"))

    options: dict[str, Any] = {"servers": 1, "num_workers": 1, "registry_port": free_port_now()}
    fleet = up("orphans", f"{MODULE}:Slow", **options)
    before = process_at(fleet.status().servers[0].urls[0])
    remove_registry()
    fleet = up("orphans", f"{MODULE}:Slow", **options)
    assert not before.is_running()
    assert fleet.dataset().info.kind == "map"
    server = process_at(fleet.status().servers[0].urls[0])
    remove_registry()
    command = ("ray", "down", "--name", "orphans", "--address", cluster.address)
    assert piped(SERVER, *command).code == 0
    assert not server.is_running()
    again = piped(SERVER, *command)
    assert again.code == 1
    assert "this Ray cluster has no fleet 'orphans'" in again.err


def test_a_server_that_exits_without_being_drained_is_restarted(cluster: Cluster) -> None:
    """Also after exit code 0, for example if another program sends SIGTERM."""
    from teleloader_server.ray import up

    fleet = up("restarted", f"{MODULE}:Slow", servers=1, num_workers=1, registry_port=free_port_now())
    process_at(fleet.status().servers[0].urls[0]).terminate()
    eventually(lambda: fleet.status().servers[0].restarts == 1, 60)
    eventually(lambda: states(fleet) == ["ready"], 60)
    assert "exited with code 0" in fleet.status().servers[0].problem
    fleet.down()


def test_a_server_that_drains_is_not_killed(cluster: Cluster, code: Path) -> None:
    """A server that drains has this status, and further calls wait for it. Its actor then exits without a caller."""
    import ray

    from teleloader_server.ray import control, up

    fleet = up("draining", f"{MODULE}:Slow", servers=1, num_workers=1, registry_port=free_port_now())
    actor = control.servers("draining")[0]
    url = fleet.status().servers[0].urls[0]
    access = fleet.access()
    context = ssl.create_default_context(cadata=access.ca)
    headers = {"Authorization": f"Bearer {access.token}"}
    with httpx.Client(base_url=url, verify=context, headers=headers, timeout=60) as client:
        key = client.post("/v1/loaders", json={"dataset": "Slow"}).json()["key"]
        with client.stream("GET", f"/v1/loaders/{key}/epochs/0/batches?ranges=0:100") as response:
            batches = response.iter_raw()
            next(batches)
            drained = actor.drain.remote()
            eventually(lambda: states(fleet) == ["draining"])
            fleet.scale(1)
            assert not ray.wait([drained], timeout=0)[0]
            assert sum(map(len, batches)) > 0
    eventually(lambda: list(fleet.status().servers) == [1], 60)
    fleet.down()


def test_requests_to_an_actor_that_is_pending_do_not_accumulate(cluster: Cluster) -> None:
    """Ray does not execute them when it starts the actor."""
    import ray
    from ray.exceptions import TaskCancelledError

    from teleloader_server.ray import control

    class Pending:
        def status(self) -> None:
            """Never run, because no node has these resources."""

    actor = ray.remote(num_cpus=1000)(Pending).remote()
    assert [status.state for status in control.statuses([actor])] == ["pending"]
    (request,) = control.wait([actor.status.remote()])
    with pytest.raises(TaskCancelledError):
        ray.get(request, timeout=60)


def test_ray_train_resumes_after_a_killed_rank(
    cluster: Cluster, fleet: Any, single: RemoteDataset, tmp_path: Path
) -> None:
    """Ray Train restarts both ranks from their last checkpoint: each rank receives its batches once, in order."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def train(config: dict[str, str]) -> None:
        import json
        import os
        import signal
        from pathlib import Path

        from ray import train

        from teleloader import DataLoader
        from teleloader_server.ray import connect

        context, folder = train.get_context(), Path(config["folder"])
        rank, world_size = context.get_world_rank(), context.get_world_size()
        dataset = connect("tests").dataset()
        loader = DataLoader(dataset, batch_size=2, shuffle=True, seed=3, rank=rank, world_size=world_size)
        batches: list[list[int]] = []
        checkpoint = train.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as restored:
                state = json.loads((Path(restored) / f"{rank}.json").read_text())
            loader.load_state_dict(state["loader"])
            batches = state["batches"]
        (folder / f"{rank}-starts-at-{len(batches)}").touch()
        for batch in loader:
            batches.append(batch.tolist())
            if checkpoint is None and rank == 1 and len(batches) == 70:
                os.kill(os.getpid(), signal.SIGKILL)
            if len(batches) % 30 == 0:
                saved = folder / f"checkpoint-{rank}-{len(batches)}"
                saved.mkdir(exist_ok=True)
                (saved / f"{rank}.json").write_text(json.dumps({"loader": loader.state_dict(), "batches": batches}))
                train.report({}, checkpoint=train.Checkpoint(saved))
            if len(batches) == 150:
                break
        (folder / f"{rank}.json").write_text(json.dumps(batches))

    TorchTrainer(
        train, train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.1}),
        run_config=RunConfig(storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=1)),
    ).fit()  # fmt: skip
    starts = {path.name for path in tmp_path.glob("*-starts-at-*")}
    # Ray registers a checkpoint in the background: the last one may be missing
    assert any(starts == {f"{rank}-starts-at-{n}" for rank in range(2) for n in (0, last)} for last in (30, 60))
    for rank in range(2):
        batches = json.loads((tmp_path / f"{rank}.json").read_text())
        assert batches == received(single, rank=rank, world_size=2)[:150]


# -- last, because a node is lost


def test_an_epoch_while_servers_join_and_fail(
    cluster: Cluster, fleet: Any, expected: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A server joins, one is drained; a server, its actor, the registry and a node are killed.

    The training loop receives each batch once, in order, and never waits for more than 3 s. Lost servers return.
    """
    import ray

    from teleloader_server.ray import connect
    from teleloader_server.ray.actors import NAMESPACE

    fleet.scale(2)
    eventually(lambda: is_whole(fleet), 180)
    dataset = connect("tests").dataset()

    def recover(servers: int = 2) -> None:
        """Wait until the fleet is complete, and the client knows all servers."""
        eventually(lambda: is_whole(fleet, servers), 180)
        urls = {url for server in fleet.status().servers.values() for url in server.urls}
        eventually(lambda: {server.url for server in dataset.servers.known} == urls)

    def drain() -> None:
        recover(3)
        drained.append(background.submit(fleet.drain, 2))

    def kill_server() -> None:
        drained[0].result()
        recover()
        process_at(fleet.status().servers[0].urls[0]).kill()

    def kill_actor() -> None:
        recover()
        ray.kill(ray.get_actor("tests/1", namespace=NAMESPACE), no_restart=False)

    def kill_registry() -> None:
        recover()
        ray.kill(ray.get_actor("tests", namespace=NAMESPACE), no_restart=False)

    def kill_node() -> None:
        recover()
        parents = {each.pid: each for each in process_at(fleet.status().servers[0].urls[0]).parents()}
        (node,) = (node for node in cluster.workers if node.all_processes["raylet"][0].process.pid in parents)
        cluster.workers.remove(node)
        raylet = parents[node.all_processes["raylet"][0].process.pid]
        for process in (raylet, *raylet.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    events = {
        100: lambda: fleet.scale(3), 400: drain, 700: kill_server, 1000: kill_actor, 1300: kill_registry,
        1600: kill_node,
    }  # fmt: skip
    drained: list[Future[None]] = []
    waits: list[float] = []
    with ThreadPoolExecutor() as background:
        batches = received(dataset, events, waits)
    assert batches == expected
    with capsys.disabled():
        print()
        for first, last in itertools.pairwise((0, *events, len(waits))):
            longest = max(range(first, last), key=waits.__getitem__)
            print(f"batches {first} to {last}: longest wait {waits[longest]:.3f} s, for batch {longest}")
    assert max(waits) < 3
    eventually(lambda: is_whole(fleet), 180)
    again = connect("tests").dataset()
    assert received(again) == expected
    assert {server.url for server in again.servers.known} == {
        url for server in fleet.status().servers.values() for url in server.urls
    }
