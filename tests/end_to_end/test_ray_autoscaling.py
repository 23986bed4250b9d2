"""Autoscaling of a fleet on a Ray cluster that adds and removes nodes.

With TELELOADER_TEST_FRAMEWORKS=1, Ray must be installed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from teleloader import DataLoader, RemoteDataset
from teleloader_server.config import ConfigError
from tests.conftest import StartServer, eventually
from tests.end_to_end.terminal import SERVER, piped
from tests.end_to_end.test_ray import FOLDER, MODULE, free_port_now
from tests.examples.running import need_framework

HEAD_ID = "f" * 51 + "00000"
"""ID of the head node."""
MARK = "TELELOADER_TEST_CLUSTER"
"""Environment variable of all processes of the cluster."""
pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("default")]  # Ray's own warnings


CONFIG: dict[str, Any] = {
    "cluster_name": "tests",
    "max_workers": 4,
    "provider": {
        "type": "external", "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "use_node_id_as_ip": True, "disable_node_updaters": True,
        "disable_launch_config_check": True, "launch_multiple": True, "head_node_id": HEAD_ID,
    },
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "worker": {
            "resources": {"CPU": 1, "object_store_memory": 80 * 2**20}, "node_config": {}, "min_workers": 0,
            "max_workers": 4,
        },
    },
    "head_node_type": "ray.head.default", "auth": {}, "upscaling_speed": 1.0, "idle_timeout_minutes": 0.3, "docker": {},
    "initialization_commands": [], "setup_commands": [], "head_setup_commands": [], "worker_setup_commands": [],
    "head_start_ray_commands": [], "worker_start_ray_commands": [], "file_mounts": {}, "cluster_synced_files": [],
    "file_mounts_sync_continuously": False, "rsync_exclude": [], "rsync_filter": [],
}  # fmt: skip
"""Cluster whose nodes are processes of this machine; each node has room for one server."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """Start a Ray cluster without worker nodes, and return its address.

    ray.cluster_utils.AutoscalingCluster would stop all Ray processes of this machine, also those of other clusters.
    """
    need_framework("ray")
    import ray
    from ray.util import get_node_ip_address

    port = free_port_now()
    address = f"{get_node_ip_address()}:{port}"
    config = tmp_path / "cluster.json"
    provider = {**CONFIG["provider"], "gcs_address": address}
    config.write_text(json.dumps({**CONFIG, "provider": provider}))
    # no runtime environment: nodes that start at once would overwrite its folder, which they share on this machine
    code = tmp_path / "code"
    code.mkdir()
    shutil.copy(FOLDER / f"{MODULE}.py", code)
    mark = str(uuid.uuid4())
    environment = {
        **os.environ, MARK: mark, "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1",
        "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(code),
        "RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
        "RAY_raylet_start_wait_time_s": "60",
    }  # fmt: skip
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", "--num-cpus=0",
        f"--object-store-memory={80 * 2**20}", f"--autoscaling-config={config}", "--include-dashboard=false",
        f"--ray-client-server-port={free_port_now()}", "--disable-usage-stats",
    ]  # fmt: skip
    try:
        started = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert started.returncode == 0, started.stdout + started.stderr
        ray.init(address, log_to_driver=False)
        yield address
    finally:
        ray.shutdown()
        _kill_marked(mark)


def _kill_marked(mark: str) -> None:
    """End all processes of a cluster; those of Ray that change their titles overwrite their environment."""
    family: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                family.update((process, *process.children(recursive=True)))
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()


class Training:
    """Training loop in a thread, with a step time that can change."""

    def __init__(self, dataset: RemoteDataset) -> None:
        self.step = 0.015
        self.batches: list[list[int]] = []
        self._ended = threading.Event()
        self._loader = DataLoader(dataset, batch_size=2, shuffle=True, seed=3)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            for batch in self._loader:
                self.batches.append(batch.tolist())
                if self._ended.wait(self.step):
                    return

    def end(self) -> list[list[int]]:
        """Stop the loop, and return its batches."""
        self._ended.set()
        self._thread.join()
        return self.batches


def test_servers_follow_the_demand(cluster: str, start_server: StartServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Servers, and nodes for them, are added while the loop waits for data, and removed when it does not.

    A batch takes a worker 40 ms, and each server has one worker. The loop wants a batch every 15 ms, then every 200 ms.
    """
    import ray

    from teleloader_server.ray import up

    def servers() -> int:
        return len(fleet.status().servers)

    def nodes() -> int:
        return sum(bool(node["Alive"]) for node in ray.nodes()) - 1

    def report(event: str) -> None:
        with capsys.disabled():
            print(
                f"\n{time.monotonic() - began:5.1f} s, batch {len(training.batches)}: {event}: {servers()} servers, "
                f"{nodes()} nodes", end="",
            )  # fmt: skip

    with pytest.raises(ConfigError, match=r"invalid number of servers \(3, 2\): expected"):
        up("wrong", f"{MODULE}:Slow", servers=(3, 2), num_workers=1)
    fleet: Any = up(
        "scaled", f"{MODULE}:Slow", servers=(1, 3), num_workers=1, registry_port=free_port_now(), downscale_delay=20,
    )  # fmt: skip
    assert fleet.status().limits == (1, 3)
    dataset = fleet.dataset()
    began = time.monotonic()
    training = Training(dataset)
    try:
        report("start")
        eventually(lambda: servers() == 3, 120)
        report("servers were started")
        eventually(lambda: len(dataset.servers.known) == 3, 180)
        report("servers have joined")
        assert nodes() == 3
        time.sleep(15)
        assert servers() == 3
        training.step = 0.2
        report("the loop becomes slow")
        eventually(lambda: servers() == 1, 240)
        report("servers were drained")
        eventually(lambda: len(dataset.servers.known) == 1)
        eventually(lambda: nodes() == 1, 120)
        report("nodes were removed")
    finally:
        batches = training.end()
    single = DataLoader(
        RemoteDataset(start_server(f"tests.end_to_end.{MODULE}:Numbers").url), batch_size=2, shuffle=True, seed=3
    )
    expected: list[list[int]] = []
    while len(expected) < len(batches):
        expected += [batch.tolist() for batch in single]
    assert batches == expected[: len(batches)]
    changed = piped(SERVER, "ray", "scale", "2-4", "--name", "scaled", RAY_ADDRESS=cluster)
    assert changed.code == 0, changed.err
    assert fleet.status().limits == (2, 4)
    assert servers() == 2
    fleet.scale(1)
    assert fleet.status().limits is None
    time.sleep(12)  # two decisions
    assert servers() == 1
    fleet.down()


def test_servers_are_not_started_on_avoided_nodes(cluster: str) -> None:
    """Ray adds a node for a server, although the node to avoid has room for it."""
    import ray

    from teleloader_server.ray import control, up

    def nodes() -> set[str]:
        return {ray.get(actor.report.remote()).node for actor in control.servers("avoiding").values()}

    port = free_port_now()
    fleet = up("avoiding", f"{MODULE}:Slow", servers=1, num_workers=1, num_cpus=0.5, registry_port=port)
    saturated = nodes()
    assert control.start("avoiding", 1, [0], saturated) == [1]
    eventually(lambda: [server.state for server in fleet.status().servers.values()] == ["ready"] * 2, 180)
    assert len(nodes()) == 2
    fleet.down()


class Simulated:
    """Fleet without Ray: states, reports and starts of servers by number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from teleloader_server.ray import autoscaler, control
        from teleloader_server.ray.process import ServerStatus

        monkeypatch.setattr(autoscaler.Autoscaler, "_run", lambda self: None)
        monkeypatch.setattr(
            autoscaler, "_reports", lambda ready: {str(number): self.reports[number] for number in ready}
        )
        monkeypatch.setattr(control, "servers", lambda fleet: {number: number for number in self.states})
        monkeypatch.setattr(control, "statuses", lambda actors: [ServerStatus(self.states[actor]) for actor in actors])
        monkeypatch.setattr(control, "start", self._start)
        monkeypatch.setattr(control, "stop", lambda actors: [self.states.pop(actor) for actor in actors])
        self.states: dict[int, Any] = {}
        self.reports: dict[int, Any] = {}
        self.avoid: list[Any] = []
        """Nodes to avoid at each start."""
        self._autoscaler = autoscaler.Autoscaler("simulated", 1, 4, 20)

    def look(self, now: float) -> dict[int, Any]:
        """Let the autoscaler look, and return the states of the servers."""
        self._autoscaler._reconcile(now)
        eventually(lambda: not self._autoscaler._draining)
        return self.states

    def _start(self, fleet: str, count: int, used: Any, avoid: Any = ()) -> list[int]:
        started = [number for number in range(9) if number not in used][: max(0, count)]
        self.states.update(dict.fromkeys(started, "pending"))
        self.avoid += [avoid] * bool(started)
        return started


def test_servers_that_are_not_ready_are_removed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then those that the scaler selects."""
    need_framework("ray")
    from teleloader_server.fleet.scaler import Report

    fleet = Simulated(monkeypatch)
    assert fleet.look(0) == {0: "pending"}
    fleet.states[0] = "ready"
    fleet.reports[0] = Report("a", 2, 6.0, 0.0, 2.0, 2.0, saturated=False)
    assert fleet.look(5) == {0: "ready", 1: "pending", 2: "pending"}
    fleet.states[2] = "ready"
    fleet.reports[0] = fleet.reports[2] = Report("a", 2, 0.5, 0.0, 0.5, 0.5, saturated=False)
    assert fleet.look(15) == {0: "ready", 1: "pending", 2: "ready"}
    assert fleet.look(40) == {0: "ready", 2: "ready"}
    fleet.reports[2] = fleet.reports[0]._replace(demand=0.1)
    assert fleet.look(100) == {0: "ready"}
    del fleet.states[0]  # drained by an operator
    assert fleet.look(105) == {0: "pending"}


def test_a_server_that_ray_cannot_place_is_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes to avoid may be others by then. A server that Ray has placed stays."""
    need_framework("ray")
    from teleloader_server.fleet.scaler import Report

    fleet = Simulated(monkeypatch)
    fleet.states[0] = "ready"
    fleet.reports[0] = Report("a", 2, 6.0, 0.0, 2.0, 2.0, saturated=True)
    assert fleet.look(0) == {0: "ready", 1: "pending", 2: "pending"}
    assert fleet.avoid == [{"a"}]
    fleet.states[1] = "starting"
    fleet.look(5)
    fleet.states[1] = "pending"  # restarted by Ray
    fleet.reports[0] = fleet.reports[0]._replace(saturated=False)
    fleet.look(295)
    assert fleet.avoid == [{"a"}]
    assert fleet.look(301) == {0: "ready", 1: "pending", 3: "pending"}
    assert fleet.avoid == [{"a"}, set()]
    assert fleet.look(900) == {0: "ready", 1: "pending", 3: "pending"}


def test_failed_and_stopped_servers_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not compute batches. A failed server is replaced after a delay, because its successor may fail too."""
    need_framework("ray")
    from teleloader_server.fleet.scaler import Report

    fleet = Simulated(monkeypatch)
    fleet.states |= {0: "ready", 1: "failed", 2: "stopped"}
    fleet.reports[0] = Report("a", 2, 5.0, 0.0, 2.0, 2.0, saturated=False)
    assert fleet.look(0) == {0: "ready", 1: "failed", 2: "stopped", 3: "pending"}
    assert fleet.look(59) == {0: "ready", 1: "failed", 2: "stopped", 3: "pending"}
    assert fleet.look(60) == {0: "ready", 2: "stopped", 3: "pending", 4: "pending"}
    fleet.states[3] = "failed"
    fleet.reports[0] = fleet.reports[0]._replace(demand=3.0)
    fleet.look(65)
    assert fleet.look(120) == {0: "ready", 2: "stopped", 4: "pending"}


def test_scale_removes_servers_that_are_not_ready_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed and stopped servers are replaced."""
    need_framework("ray")
    from teleloader_server.ray import control
    from teleloader_server.ray.fleet import Fleet

    fleet = Simulated(monkeypatch)
    monkeypatch.setattr(control, "registry", lambda name: None)
    monkeypatch.setattr(Fleet, "_stop_autoscaler", lambda self: None)
    fleet.states |= {0: "failed", 1: "pending", 2: "ready", 3: "starting", 4: "draining"}
    Fleet("simulated").scale(1)
    assert fleet.states == {2: "ready", 4: "draining"}
    fleet.states |= {5: "stopped"}
    Fleet("simulated").scale(2)
    assert fleet.states == {0: "pending", 2: "ready", 4: "draining"}
