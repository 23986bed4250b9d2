"""docs/deploy/slurm.sh: a job of loader servers and training, with a stand-in for Slurm and on a real Slurm cluster."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, eventually
from tests.deploy.slurm import PROGRAMS, Slurm, await_state, cluster

SCRIPT = ROOT / "docs" / "deploy" / "slurm.sh"
SRUN = """#!/bin/bash
# runs one task, on this machine
echo "srun $1"
while [[ $1 == --* ]]; do shift; done
SLURMD_NODENAME=localhost exec "$@"
"""
SCONTROL = "#!/bin/sh\necho localhost\n"
TRAINING = """
import os, sys, time
from teleloader import DataLoader, RemoteDataset

loader = DataLoader(RemoteDataset(os.environ["LOADER_SERVERS"], "train"), batch_size=2, seed=7)
for number, batch in enumerate(loader):
    if number == 5:
        print("training", flush=True)
        {act}
print("received", number + 1, "batches on", os.uname().nodename)
"""


class Job:
    """Folder from which jobs are submitted.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)  # clients reject a list of servers in a folder that others can write
        shutil.copytree(ROOT / "tests" / "docs" / "my_package", folder / "my_package")
        self.train("pass")
        self.before = set(folder.iterdir())
        self.environment = {
            **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(folder),
            "SLURM_SUBMIT_DIR": str(folder),
        }  # fmt: skip

    def train(self, act: str) -> None:
        """Write the training script, with a statement that it executes after a few batches."""
        (self.folder / "train.py").write_text(TRAINING.format(act=act))

    @property
    def output(self) -> str:
        """Return the output of the job so far."""
        file = self.folder / "output"
        return file.read_text() if file.exists() else ""

    def await_training(self) -> None:
        """Wait until the training process has received some batches."""
        eventually(lambda: "\ntraining\n" in self.output, timeout=100)

    def check_nothing_remains(self) -> None:
        """Fail if a process or a file of the job remains."""
        assert set(self.folder.iterdir()) - self.before == {self.folder / "output"}
        eventually(lambda: not list(self.processes()))

    def processes(self) -> Iterator[tuple[int, bytes]]:
        """Yield the ID and the environment of each process of the job."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes()
            except OSError:  # it has exited
                continue
            if str(self.folder).encode() in environment:
                yield int(process.name), environment


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Return a job; its processes are killed after the test."""
    made = Job(tmp_path)
    yield made
    for pid, _ in made.processes():
        os.kill(pid, signal.SIGKILL)


# -- stand-in


def started(job: Job, free_port: int) -> subprocess.Popen[bytes]:
    """Run the script with stand-ins for Slurm's commands, in a process group of its own."""
    commands = job.folder / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    job.before.add(commands)
    environment = {
        **job.environment, "PATH": f"{commands}:{job.environment['PATH']}", "SLURM_JOB_ID": str(free_port - 20000),
        "SLURM_JOB_NODELIST_HET_GROUP_0": "localhost", "SLURM_CPUS_PER_TASK_HET_GROUP_0": "1",
        "SLURM_CPUS_PER_TASK_HET_GROUP_1": "1",
    }  # fmt: skip
    with (job.folder / "output").open("w") as output:
        return subprocess.Popen(
            ["bash", SCRIPT], cwd=job.folder, env=environment, stdout=output, stderr=output, start_new_session=True
        )


@pytest.fixture
def free_port() -> int:
    """Return a free port of those that the script uses."""
    for port in range(20000 + os.getpid() % 5000, 30000):
        with socket.socket() as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    pytest.skip("needs a free port")


def test_a_job_starts_servers_and_training(job: Job, free_port: int) -> None:
    """Servers run in the first component and training in the second one; the job leaves nothing behind."""
    assert started(job, free_port).wait(100) == 0, job.output
    assert "srun --het-group=0\n" in job.output
    assert "srun --het-group=1\n" in job.output
    assert "received 320 batches" in job.output
    job.check_nothing_remains()


def test_a_job_fails_with_its_training(job: Job, free_port: int) -> None:
    """The job has the exit status of the training process, and its servers end."""
    job.train("sys.exit(3)")
    assert started(job, free_port).wait(100) == 3, job.output
    job.check_nothing_remains()


def test_a_cancelled_job_leaves_nothing_behind(job: Job, free_port: int) -> None:
    """After SIGTERM, the servers end and the job's token is deleted."""
    job.train("time.sleep(1000)")
    process = started(job, free_port)
    job.await_training()
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(100) != 0
    job.check_nothing_remains()


# -- Slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Return a real cluster of three nodes; requires root."""
    if not os.environ.get("TELELOADER_TEST_SLURM"):
        pytest.skip("takes a minute: set TELELOADER_TEST_SLURM=1")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    assert not missing, f"install {', '.join(missing)}"
    with cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def submitted(slurm: Slurm, job: Job) -> str:
    """Submit the script, and return the job's ID."""
    return slurm.command(
        "sbatch", "--parsable", f"--output={job.folder}/output", str(SCRIPT), folder=job.folder,
        environment=job.environment,
    )  # fmt: skip


def test_slurm_runs_servers_and_training(slurm: Slurm, job: Job) -> None:
    """Both servers of the CPU nodes are listed, the training process on the GPU node receives the epoch."""
    job.train("print('servers', *sorted(open(os.environ['LOADER_SERVERS'][7:]).read().split()))")
    number = submitted(slurm, job)
    assert await_state(slurm, number, "COMPLETED", "FAILED") == "COMPLETED", job.output
    port = 20000 + int(number)
    assert f"servers https://n1:{port} https://n2:{port}\n" in job.output
    assert "received 320 batches on n3\n" in job.output
    job.check_nothing_remains()


def test_slurm_reports_failed_training(slurm: Slurm, job: Job) -> None:
    """The job has the exit status of the training process, and its servers end."""
    job.train("sys.exit(3)")
    number = submitted(slurm, job)
    assert await_state(slurm, number, "COMPLETED", "FAILED") == "FAILED", job.output
    assert " ExitCode=3:0" in slurm.command("scontrol", "show", "job", number)
    job.check_nothing_remains()


def test_slurm_cancels_a_job(slurm: Slurm, job: Job) -> None:
    """After `scancel`, the servers end and the job's token is deleted."""
    job.train("time.sleep(1000)")
    number = submitted(slurm, job)
    job.await_training()
    slurm.command("scancel", number)
    assert await_state(slurm, number, "CANCELLED") == "CANCELLED"
    job.check_nothing_remains()


def test_slurm_continues_after_a_server_failed(slurm: Slurm, job: Job) -> None:
    """A server that exits with an error ends neither the other server nor the training."""
    job.train("time.sleep(5)")
    number = submitted(slurm, job)
    job.await_training()
    assert len((job.folder / f"teleloader-{number}" / "servers").read_text().split()) == 2
    servers = [pid for pid, environment in job.processes() if b"\0SLURMD_NODENAME=n2\0" in environment]
    assert servers
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    assert await_state(slurm, number, "COMPLETED", "FAILED") == "COMPLETED", job.output
    assert "received 320 batches on n3\n" in job.output
    job.check_nothing_remains()
