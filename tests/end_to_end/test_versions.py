"""Versions of datasets that are published while the server runs: which one a run gets, retirement and rollback."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from teleloader import (
    DataLoader,
    DatasetChanged,
    Forbidden,
    RemoteDataset,
    StateMismatch,
    TeleloaderError,
    UnknownDataset,
)
from tests.conftest import ROOT, ServerProcess, eventually
from tests.end_to_end.test_access import TokenTable

CODE = """
import time


class Numbers:
    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def __len__(self):
        return {length}

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return index * 1000 + {code}


def make(seconds=0.0):
    {statement}
    return Numbers(seconds)


def other():
    return list(range(32))
"""


STREAM = """
class Stream:
    def __iter__(self):
        return (index * 1000 + {code} for index in range(32))
"""


class Site:
    """A server's folder with the code and the configuration of its datasets.

    Args:
        folder: Folder, which is the server's current folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("v1", 1)

    def write(self, version: str, code: int, *, statement: str = "pass", seconds: float = 0, length: int = 64) -> None:
        """Write the code and the configuration of a version.

        Args:
            version: Version of dataset ``train``.
            code: Last digits of all samples.
            statement: Statement that constructs the dataset.
            seconds: Time for each sample.
            length: Number of samples.
        """
        # the comment changes the size: a cached module of the same second and size would not be compiled again
        padding = "#" * (2 + len(list(self.folder.glob("*.saved"))))
        text = CODE.format(code=code, statement=statement, length=length) + padding
        (self.folder / "numbers_of_site.py").write_text(text)
        (self.folder / f"{version}.saved").write_text(text)
        kwargs = f"kwargs = {{ seconds = {seconds} }}\n" if seconds else ""
        self.config.write_text(
            f'[datasets.train]\nfactory = "numbers_of_site:make"\nversion = "{version}"\n{kwargs}'
            '[datasets.other]\nfactory = "numbers_of_site:other"\n'
        )

    @property
    def config(self) -> Path:
        """The configuration file."""
        return self.folder / "loader.toml"

    def start(self, *arguments: str) -> ServerProcess:
        """Start a server."""
        return ServerProcess("--config", str(self.config), "--port", "0", "-n", "2", *arguments, folder=self.folder)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Return the folder of a server that hosts version v1."""
    return Site(tmp_path)


@pytest.fixture
def start(site: Site) -> Iterator[Callable[..., ServerProcess]]:
    """Start servers of the site; they are ended with the test."""
    servers = []

    def started(*arguments: str) -> ServerProcess:
        servers.append(site.start(*arguments))
        return servers[-1]

    yield started
    for server in servers:
        server.end()


def publish(server: ServerProcess) -> dict[str, str]:
    """Publish the configuration, and return the change of each dataset."""
    response = httpx.post(f"{server.url}/v1/versions", timeout=60).raise_for_status().json()
    return {version["dataset"]: version["change"] for version in response["versions"]}


def retire(server: ServerProcess, version: str) -> httpx.Response:
    """Retire a version of dataset ``train``."""
    return httpx.delete(f"{server.url}/v1/versions/train", params={"version": version})


def versions(server: ServerProcess) -> dict[str, dict[str, Any]]:
    """Return the versions of dataset ``train`` in /stats, by version."""
    (found,) = (dataset for dataset in server.stats()["datasets"] if dataset["dataset"] == "train")
    return {version["version"]: version for version in found["versions"]}


def codes(loader: DataLoader) -> set[int]:
    """Iterate an epoch, and return the codes of its samples."""
    return {int(sample) % 1000 for batch in loader for sample in batch}


def loader_of(server: ServerProcess, version: str | None = None, **arguments: Any) -> DataLoader:
    """Return a loader of dataset ``train`` in seeded order."""
    dataset = RemoteDataset(server.url, "train", version=version, reconnect_timeout=5)
    return DataLoader(dataset, batch_size=4, shuffle=True, seed=7, **arguments)


def workers_of(server: ServerProcess, pool: str | None) -> list[dict[str, Any]]:
    """Return the workers of a pool, all of which are ready."""
    found = [worker for worker in server.stats()["workers"] if worker["loader"] == pool]
    return found if found and all(worker["state"] != "starting" for worker in found) else []


# -- which version a run gets


def test_a_session_stays_on_its_version(site: Site, start: Callable[..., ServerProcess]) -> None:
    """Private workers of an iterable-style dataset are forked from the fork server of their version."""

    def configure(version: str, code: int) -> None:
        (site.folder / "streams.py").write_text(f"def make():\n    return Stream()\n{STREAM.format(code=code)}")
        site.config.write_text(f'[datasets.stream]\nfactory = "streams:make"\nversion = "{version}"\n')

    configure("v1", 1)
    server = start()
    loader = DataLoader(RemoteDataset(server.url, "stream"), batch_size=4, num_workers=1)
    iterator = iter(loader)
    received = [int(sample) for sample in next(iterator)]
    configure("v2", 22)
    assert publish(server) == {"stream": "added"}
    received += [int(sample) for batch in iterator for sample in batch]
    assert (len(received), {sample % 1000 for sample in received}) == (32, {1})
    assert {int(sample) % 1000 for batch in loader for sample in batch} == {1}, "the next epoch"
    other = DataLoader(RemoteDataset(server.url, "stream"), batch_size=4, num_workers=1)
    assert {int(sample) % 1000 for batch in other for sample in batch} == {22}


def test_a_running_loader_stays_on_its_version_and_a_new_one_gets_the_new_one(
    site: Site, start: Callable[..., ServerProcess]
) -> None:
    """The epoch is bit-identical to one without a publication, and later epochs use the same version."""
    server = start()
    expected = [batch.tolist() for batch in loader_of(server)]
    running = loader_of(server)
    iterator = iter(running)
    received = [next(iterator).tolist() for _ in range(3)]
    site.write("v2", 2)
    assert publish(server) == {"train": "added", "other": "unchanged"}
    received += [batch.tolist() for batch in iterator]
    assert received == expected
    assert codes(loader_of(server)) == {2}, "a new run executes the code on disk"
    assert codes(running) == {1}, "the next epoch of the loader"
    assert codes(loader_of(server, "v1")) == {1}, "a new run that selects the version"
    found = versions(server)
    assert {name: version["newest"] for name, version in found.items()} == {"v2": True, "v1": False}
    assert {consumer["version"] for consumer in server.stats()["consumers"]} == {"v1", "v2"}


def test_a_copy_of_a_dataset_keeps_the_version(site: Site, start: Callable[..., ServerProcess]) -> None:
    """A process that receives the dataset as an argument joins the run, although another version is the newest one."""
    server = start()
    dataset = RemoteDataset(server.url, "train")
    site.write("v2", 2)
    publish(server)
    copy = pickle.loads(pickle.dumps(dataset))
    assert (copy.version, dataset.version, RemoteDataset(server.url, "train").version) == ("v1", "v1", "v2")


def test_a_version_that_no_server_has_is_refused(start: Callable[..., ServerProcess]) -> None:
    """The error lists the available versions."""
    server = start()
    with pytest.raises(UnknownDataset, match=r"'train' has no version 'v3': available versions are 'v1'"):
        loader_of(server, "v3")


def test_a_state_of_a_previous_version_resumes_on_this_version(site: Site, start: Callable[..., ServerProcess]) -> None:
    """Resumed with the unchanged script, a run continues with its data."""
    server = start()
    expected = [batch.tolist() for batch in loader_of(server)]
    first = loader_of(server)
    iterator = iter(first)
    received = [next(iterator).tolist() for _ in range(5)]
    state = json.loads(json.dumps(first.state_dict()))
    site.write("v2", 2, length=80)
    publish(server)
    resumed = loader_of(server)
    assert len(resumed.dataset) == 80
    resumed.load_state_dict(state)
    assert len(resumed.dataset) == 64
    assert received + [batch.tolist() for batch in resumed] == expected
    with pytest.raises(StateMismatch, match="publish that version of the dataset again"):
        loader_of(server, "v2").load_state_dict(state)


def test_servers_with_different_newest_versions_give_the_common_one(
    site: Site, start: Callable[..., ServerProcess]
) -> None:
    """While an operator publishes on one server after the other, a new run gets the version that all have."""
    servers = [start(), start()]
    urls = [server.url for server in servers]
    running = DataLoader(RemoteDataset(urls, "train"), batch_size=4, shuffle=True, seed=7)
    site.write("v2", 2)
    publish(servers[0])
    assert RemoteDataset(urls, "train").version == "v1"
    assert codes(running) == {1}
    publish(servers[1])
    assert RemoteDataset(urls, "train").version == "v2"
    assert RemoteDataset(urls[::-1], "train", version="v1").version == "v1"
    assert codes(running) == {1}
    # one server does not have the version any more: the run continues with the other
    assert retire(servers[0], "v1").status_code == 200
    assert codes(DataLoader(RemoteDataset(urls, "train", version="v1"), batch_size=4)) == {1}
    assert codes(running) == {1}


# -- publication


def test_nothing_is_published_if_nothing_changed(site: Site, start: Callable[..., ServerProcess]) -> None:
    """Neither a repeated publication nor changed code without another version starts workers."""
    server = start()
    assert publish(server) == {"train": "unchanged", "other": "unchanged"}
    site.write("v1", 2)
    assert publish(server) == {"train": "unchanged", "other": "unchanged"}
    assert not workers_of(server, "revision 2")
    assert codes(loader_of(server)) == {1}


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("raise ValueError('no such bucket')", "ValueError: no such bucket"),
        ("import missing_package", "No module named 'missing_package'"),
        ("import os; os._exit(3)", "exited with code 3"),
    ],
)
def test_a_version_that_does_not_start_changes_nothing(
    site: Site, start: Callable[..., ServerProcess], statement: str, reason: str
) -> None:
    """The command prints the traceback, /stats keeps it, and the previous version stays the newest one."""
    server = start()
    site.write("v2", 2, statement=statement)
    result = command("publish", server.url)
    assert result.returncode == 1
    assert reason in result.stderr
    assert reason in server.stats()["server"]["publication_error"]
    assert reason in "".join(server.log)
    assert codes(loader_of(server)) == {1}
    assert list(versions(server)) == ["v1"]
    eventually(lambda: not workers_of(server, "revision 2"))
    site.write("v3", 3)
    assert publish(server)["train"] == "added"
    assert server.stats()["server"]["publication_error"] is None
    assert codes(loader_of(server)) == {3}


def test_a_version_is_not_published_with_another_configuration(site: Site, start: Callable[..., ServerProcess]) -> None:
    """Its fingerprint would be equal, so that clients could mix the data."""
    server = start()
    site.write("v1", 1, seconds=0.001)
    response = httpx.post(f"{server.url}/v1/versions")
    assert response.status_code == 409
    assert "version 'v1' was published with another configuration. Change version" in response.json()["detail"]


def test_a_server_without_a_configuration_file_cannot_publish(start_server: Callable[..., ServerProcess]) -> None:
    """The error says what is missing."""
    server = start_server("tests.end_to_end.hosted:images")
    response = httpx.post(f"{server.url}/v1/versions")
    assert (response.status_code, response.json()["code"]) == (409, "CannotPublish")
    assert "--config" in response.json()["detail"]


def test_a_roll_back_starts_no_process(site: Site, start: Callable[..., ServerProcess]) -> None:
    """The workers of the previous version continue, and new runs get it again."""
    server = start()
    before = server.worker_pids()
    site.write("v2", 2)
    publish(server)
    on_v2 = loader_of(server)
    assert codes(on_v2) == {2}
    site.write("v1", 1)
    assert publish(server)["train"] == "restored"
    assert [worker["pid"] for worker in workers_of(server, None)] == before
    assert codes(loader_of(server)) == {1}
    assert codes(on_v2) == {2}, "a run on the version that was rolled back continues"


def test_the_commands_print_what_happened(site: Site, start: Callable[..., ServerProcess]) -> None:
    """``publish``, ``versions`` and ``retire`` name dataset and version."""
    server = start()
    site.write("v2", 2)
    published = command("publish", server.url)
    assert "train 'v2'" in published.stdout, published
    assert "published, and new runs get it" in published.stdout
    result = command("versions", server.url, "--output", "json")
    assert result.returncode == 0, result.stderr
    listed = json.loads(result.stdout)
    assert [(row["version"], row["newest"]) for row in listed if row["dataset"] == "train"] == [
        ("v2", True), ("v1", False),
    ]  # fmt: skip
    assert "previous" in command("versions", server.url).stdout
    assert "retired version 'v1'" in command("retire", server.url, "train", "v1").stdout
    refused = command("retire", server.url, "train", "v2")
    assert refused.returncode == 2
    assert "publish another version first" in refused.stderr


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ``teleloader``."""
    program = "from teleloader.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )


# -- retirement


def test_a_version_retires_when_no_loader_uses_it(site: Site, start: Callable[..., ServerProcess]) -> None:
    """Its workers end with the last version of their revision; a state of the version is refused with advice."""
    server = start("--retire-after", "2")
    site.write("v2", 2, seconds=0.25)
    publish(server)
    running = loader_of(server)
    iterator = iter(running)
    next(iterator)
    pids = [worker["pid"] for worker in workers_of(server, "revision 2")]
    site.write("v3", 3)
    publish(server)
    assert {sample % 1000 for batch in iterator for sample in batch.tolist()} == {2}
    state = running.state_dict()
    server.await_line(r"retired version 'v1' of dataset 'train' because no loader used it")
    assert workers_of(server, None), "the workers still have dataset 'other'"
    server.await_line(r"retired version 'v2' of dataset 'train'")
    eventually(lambda: not workers_of(server, "revision 2"))
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert list(versions(server)) == ["v3"]
    with pytest.raises(DatasetChanged, match="version 'v2' was retired"):
        codes(running)
    with pytest.raises(StateMismatch, match="publish that version of the dataset again"):
        loader_of(server).load_state_dict(state)
    site.write("v2", 2)
    assert publish(server)["train"] == "added", "its processes had ended"
    resumed = loader_of(server)
    resumed.load_state_dict(state)
    assert codes(resumed) == {2}


def test_an_operator_retires_a_version_in_use(site: Site, start: Callable[..., ServerProcess]) -> None:
    """The training loop raises an error that says why and what to do."""
    server = start()
    site.write("v2", 2, seconds=0.2)
    publish(server)
    iterator = iter(loader_of(server, "v2"))
    next(iterator)
    site.write("v3", 3)
    publish(server)
    response = retire(server, "v2")
    assert (response.status_code, response.json()) == (200, {"loaders": 1})
    with pytest.raises(TeleloaderError, match=r"version 'v2' was retired.*") as caught:
        list(iterator)
    assert isinstance(caught.value, DatasetChanged)
    assert retire(server, "v3").status_code == 422
    assert retire(server, "v2").status_code == 404


def test_the_number_of_revisions_is_limited(site: Site, start: Callable[..., ServerProcess]) -> None:
    """A publication beyond the limit names a version that could be retired."""
    server = start()
    for number in (2, 3, 4):
        site.write(f"v{number}", number)
        publish(server)
    site.write("v5", 5)
    response = httpx.post(f"{server.url}/v1/versions")
    assert response.status_code == 409
    assert "4 revisions run, and the limit is 4" in response.json()["detail"]
    assert retire(server, "v2").status_code == 200
    assert publish(server)["train"] == "added"
    assert codes(loader_of(server)) == {5}


# -- faults


def test_a_worker_that_dies_restarts_with_the_code_of_its_version(
    site: Site, start: Callable[..., ServerProcess]
) -> None:
    """The fork server of the version forks the replacement, whatever the files contain now."""
    server = start()
    running = loader_of(server)
    site.write("v2", 2)
    publish(server)
    killed = workers_of(server, None)
    for worker in killed:
        os.kill(worker["pid"], signal.SIGKILL)
    assert codes(running) == {1}
    assert {worker["pid"] for worker in eventually(lambda: workers_of(server, None))}.isdisjoint(
        worker["pid"] for worker in killed
    )


def test_a_fork_server_that_dies_after_its_code_changed_is_not_replaced(
    site: Site, start: Callable[..., ServerProcess]
) -> None:
    """A new one would import other code: requests fail with the reason until the files are restored."""
    server = start()
    running = loader_of(server)
    site.write("v2", 2)
    publish(server)
    fork_server = psutil.Process(workers_of(server, None)[0]["pid"]).parent()
    assert fork_server is not None
    fork_server.kill()
    with pytest.raises(TeleloaderError, match="the code of the datasets changed on disk"):
        codes(running)
    assert codes(loader_of(server)) == {2}, "the other version is not affected"
    (site.folder / "numbers_of_site.py").write_text((site.folder / "v1.saved").read_text())
    server.await_line("exited; starting a new one")
    eventually(lambda: workers_of(server, None))
    assert codes(loader_of(server, "v1")) == {1}


def test_a_dataset_that_workers_construct_is_not_mixed(site: Site, start: Callable[..., ServerProcess]) -> None:
    """With ``start_method="spawn"``, a new worker of the previous version would import the new code."""

    def configure(version: str, code: int) -> None:
        site.write(version, code)
        site.config.write_text(site.config.read_text().replace("[datasets.other]", f"{method}[datasets.other]"))

    method = 'start_method = "spawn"\n'
    configure("v1", 1)
    server = start("-n", "1")
    running = loader_of(server)
    assert codes(running) == {1}
    configure("v2", 2)
    publish(server)
    assert codes(running) == {1}, "the worker has the dataset already"
    assert codes(loader_of(server)) == {2}
    os.kill(workers_of(server, None)[0]["pid"], signal.SIGKILL)
    with pytest.raises(TeleloaderError, match="the code of dataset 'train' changed after version 'v1' was published"):
        codes(running)


def test_a_server_stops_while_a_version_is_constructed(site: Site, start: Callable[..., ServerProcess]) -> None:
    """It does not wait for the dataset, whose construction takes ten minutes."""
    server = start()
    reached = site.folder / "reached"
    site.write("v2", 2, statement=f"open({str(reached)!r}, 'w'); time.sleep(600)")
    client = subprocess.Popen(
        [sys.executable, "-c", "import httpx, sys; httpx.post(sys.argv[1], timeout=300)", f"{server.url}/v1/versions"],
        stderr=subprocess.DEVNULL,
    )
    eventually(reached.exists)
    children = psutil.Process(server.pid).children(recursive=True)
    response = httpx.post(f"{server.url}/v1/versions")
    assert (response.status_code, "another publication is in progress" in response.text) == (409, True)
    assert server.end() == 0
    eventually(lambda: not any(child.is_running() for child in children))
    client.wait(60)


def test_several_servers_of_a_machine_publish_together(site: Site, start: Callable[..., ServerProcess]) -> None:
    """The command finds the servers of the supervisor, and publishes at each of them."""
    server = start("--servers", "2")
    running = loader_of(server)
    assert codes(running) == {1}
    site.write("v2", 2)
    published = command("publish", server.url, "--output", "json")
    assert published.returncode == 0, published.stderr
    found = [row["version"] for row in json.loads(published.stdout) if row["change"] == "added"]
    assert found == ["v2", "v2"]
    assert codes(running) == {1}
    assert codes(loader_of(server)) == {2}


# -- audit log and permissions


def test_a_token_of_a_dataset_is_valid_for_all_of_its_versions(site: Site, start: Callable[..., ServerProcess]) -> None:
    """It permits neither another dataset nor a publication."""
    table = TokenTable(site.folder / "tokens.toml")
    reader, operator = table.add("reader", "read:train"), table.add("operator", "admin")
    server = start("--tokens", table.write())
    site.write("v2", 2)
    for token, expected in ((reader, 403), (operator, 200), (operator, 200)):
        response = httpx.post(f"{server.url}/v1/versions", headers={"authorization": f"Bearer {token}"}, timeout=60)
        assert response.status_code == expected
    for version, code in (("v1", 1), ("v2", 2), (None, 2)):
        dataset = RemoteDataset(server.url, "train", version=version, token=reader)
        assert codes(DataLoader(dataset, batch_size=4)) == {code}
    with pytest.raises(Forbidden):
        RemoteDataset(server.url, "other", version="", token=reader)


def test_publications_are_in_the_audit_log(site: Site, start: Callable[..., ServerProcess]) -> None:
    """Each line names dataset, version and fingerprint."""
    log = site.folder / "audit.jsonl"
    server = start("--audit-log", str(log))
    site.write("v2", 2)
    publish(server)
    site.write("v1", 1)
    publish(server)
    retire(server, "v2")
    site.write("v3", 3, statement="raise ValueError('broken')")
    httpx.post(f"{server.url}/v1/versions")
    assert server.end() == 0
    events = [json.loads(line) for line in log.read_text().splitlines()]
    found = [(event["event"], event.get("version"), event.get("reason")) for event in events]
    for expected in (
        ("published", "v2", None), ("rolled_back", "v1", None), ("retired", "v2", None),
        ("publication_failed", None, "ValueError: broken"),
    ):  # fmt: skip
        assert expected in found
