"""A Slurm cluster on this machine: three nodes, each a slurmd with its own network namespace and host name."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from tests.conftest import eventually

NODES: Final = {"n1": "cpu", "n2": "cpu", "n3": "gpu"}
"""Partition of each node."""
NETWORK: Final = f"10.{os.getpid() // 254 % 254 + 1}.{os.getpid() % 254 + 1}"
PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "ip", "nsenter", "unshare")

CONFIGURATION: Final = """
ClusterName=test
SlurmctldHost=controller({network}.254)
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1
KillOnBadExit=1
KillWait=5
SelectType=select/cons_tres
GresTypes=gpu
"""


class Slurm:
    """Commands of the cluster.

    Args:
        folder: Folder of the cluster's configuration, logs and state.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}

    def command(self, *command: str, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
        """Run a command that must succeed, and return its output."""
        done = subprocess.run(
            command, cwd=folder, env={**self.environment, **(environment or {})}, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job's first component, such as ``RUNNING``."""
        return self.command("scontrol", "show", "job", job).partition("JobState=")[2].split()[0]

    def logs(self) -> str:
        """Return the logs of all daemons, for a failed test."""
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in self.folder.glob("*.log"))


@contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Run a cluster in an empty folder; requires root."""
    slurm = Slurm(folder)
    addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(NODES, 1)}
    _write_configuration(folder, addresses)
    with ExitStack() as stack:
        bridge = f"slurm{os.getpid()}"
        _run("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(_run, "ip", "link", "del", bridge)
        _run("ip", "address", "add", f"{NETWORK}.254/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")
        socket, key = f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key"
        files = [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        _daemon(stack, slurm, "munged", "--foreground", "--force", socket, key, *files)
        eventually((folder / "munge.socket").exists)
        _daemon(stack, slurm, *_namespace(folder, "controller"), "slurmctld", "-D")
        for name, address in addresses.items():
            _node(stack, slurm, bridge, name, address)
        try:
            eventually(lambda: slurm.command("sinfo", "--noheader", "--format=%T %D") == "idle 3")
        except AssertionError as error:
            raise AssertionError(slurm.logs()) from error
        yield slurm


def _write_configuration(folder: Path, addresses: Mapping[str, str]) -> None:
    lines = [CONFIGURATION.format(folder=folder, network=NETWORK)]
    for name, address in addresses.items():
        gpus = " Gres=gpu:1" if NODES[name] == "gpu" else ""
        lines.append(f"NodeName={name} NodeAddr={address} CPUs=2{gpus} State=UNKNOWN\n")
    lines += [
        f"PartitionName={partition} Nodes={','.join(name for name in NODES if NODES[name] == partition)}\n"
        for partition in dict.fromkeys(NODES.values())
    ]
    (folder / "slurm.conf").write_text("".join(lines))
    (folder / "gres.conf").write_text("NodeName=n3 Name=gpu File=/dev/null\n")
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)


def _node(stack: ExitStack, slurm: Slurm, bridge: str, name: str, address: str) -> None:
    namespace, link = f"{bridge}{name}", f"sl{os.getpid()}{name}"
    _run("ip", "netns", "add", namespace)
    stack.callback(_run, "ip", "netns", "del", namespace)
    _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _run("ip", "link", "set", link, "master", bridge, "up")
    inside = ("nsenter", f"--net=/run/netns/{namespace}")  # `ip netns exec` would hide the control groups
    _run(*inside, "ip", "link", "set", "lo", "up")
    _run(*inside, "ip", "address", "add", f"{address}/24", "dev", "eth0")
    _run(*inside, "ip", "link", "set", "eth0", "up")
    _daemon(stack, slurm, *inside, *_namespace(slurm.folder, name), "slurmd", "-D", "-N", name)


def _namespace(folder: Path, name: str) -> tuple[str, ...]:
    """Return the command that runs a program with a host name, and with the addresses of the nodes."""
    script = 'mount --bind "$0" /etc/hosts; hostname "$1"; shift; exec "$@"'
    return "unshare", "--mount", "--uts", "bash", "-c", script, f"{folder}/hosts", name


def _daemon(stack: ExitStack, slurm: Slurm, *command: str) -> None:
    with (slurm.folder / "daemons.log").open("a") as log:
        process = subprocess.Popen(command, env=slurm.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def end() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def await_state(slurm: Slurm, job: str, *states: str, timeout: float = 90) -> str:
    """Wait until a job is in one of several states, and return it."""
    deadline = time.monotonic() + timeout
    while (state := slurm.state(job)) not in states:
        assert time.monotonic() < deadline, f"job {job} is {state}, expected {states}:\n{slurm.logs()}"
        time.sleep(0.1)
    return state
