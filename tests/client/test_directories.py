"""Directories: what a function, a file or a DNS name lists, and when servers join and leave."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from teleloader import DataLoader, ProtocolError, RemoteDataset, ServerUnavailable, TlsError
from teleloader.api.control import Server
from teleloader.fleet.directory import MAX_FILE_BYTES, Directory, RegistryDirectory, directory_of
from teleloader.fleet.servers import MAX_USED_SERVERS, READ_INTERVAL_S, nearest
from teleloader.transport.interface import BatchServer
from teleloader_shared.directory import Entry
from teleloader_shared.spec import LoaderSpec
from tests.client.fake_server import INFO, Request, fake_server
from tests.conftest import ROOT, eventually

RIGHT = [[k, k, k] for k in range(8)]


def directory(source: str | Callable[[], Iterable[str]]) -> Directory:
    """Return the directory of a source."""
    found = directory_of(source, Server)
    assert found is not None
    return found


def problem(source: str | Callable[[], Iterable[str]]) -> str:
    """Return the only problem of a directory that lists nothing."""
    found = directory(source).read()
    assert not found.entries
    assert not found.is_complete
    (only,) = found.problems
    return only


# --- Files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the path of a file that lists no servers."""
    if sys.platform == "win32":
        pytest.skip("the client does not read directory files on Windows")
    path = tmp_path / "job.servers"
    path.touch(0o644)
    return path


def test_a_file_lists_one_server_per_line(file: Path) -> None:
    """A file lists one URL per line; comments, empty lines, white space and a second word are ignored."""
    file.write_text("# servers of job 7\n\n  http://a:8000  \nhttps://b 7f3e\n")
    found = directory(f"file://{file}").read()
    assert found.entries == (Entry("http://a:8000"), Entry("https://b", "7f3e"))
    assert found.is_complete
    file.write_text("http://a:8000\nhttp://b 7f 3e")
    assert not directory(f"file://{file}").read().is_complete, "a line with three words is invalid"


def test_a_file_that_other_users_can_write_lists_nothing(file: Path) -> None:
    """A file that other users can write lists no servers: they could add a server, which would receive the token."""
    file.write_text("http://127.0.0.1:8000")
    file.chmod(0o664)
    assert problem(f"file://{file}") == (
        f"other users can write to {file}, and could add servers: run chmod go-w {file}"
    )


def test_a_folder_that_other_users_can_write_lists_nothing(file: Path) -> None:
    """A file is not read if other users can replace it; in a folder with the sticky bit, such as /tmp, they cannot."""
    file.write_text("http://127.0.0.1:8000")
    file.parent.chmod(0o777)
    assert f"other users can write to {file.parent}" in problem(f"file://{file}")
    file.parent.chmod(0o1777)
    assert directory(f"file://{file}").read().is_complete


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="only root can change the owner of a file")
def test_a_file_of_another_user_lists_nothing(file: Path) -> None:
    """A file that belongs to another user lists no servers, because its owner can write to it."""
    os.chown(file, 12345, 12345)
    assert "belongs to another user" in problem(f"file://{file}")


def test_unreadable_files_list_nothing(file: Path) -> None:
    """Missing files, folders, named pipes without a writer and files above the size limit list no servers."""
    assert problem(f"file://{file}.absent") == "No such file or directory"
    assert problem(f"file://{file.parent}") == "Is a directory"
    os.mkfifo(file.parent / "pipe", 0o600)
    assert directory(f"file://{file.parent / 'pipe'}").read().entries == ()
    os.truncate(file, MAX_FILE_BYTES + 1)
    assert problem(f"file://{file}") == "the file exceeds 1,048,576 bytes"


# --- Functions and DNS names -----------------------------------------------------------------------------------------


def test_a_function_lists_the_urls_that_it_returns() -> None:
    """A function lists the URLs that it returns; its exception is a problem that names the type of the exception."""
    assert directory(lambda: ["http://a", "http://b"]).read().entries == (Entry("http://a"), Entry("http://b"))

    def broken() -> list[str]:
        raise KeyError("fleet")

    assert problem(broken) == "KeyError: 'fleet'"
    assert directory(broken).address.endswith("broken()")


def test_a_dns_name_lists_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DNS name lists each of its IP addresses once, with the port and the path of the directory."""

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("loaders.example", 8000)
        kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kind, (address, port)) for address in ("10.0.0.2", "10.0.0.1", "10.0.0.1", "fd00::1")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    found = directory("dns+http://loaders.example:8000").read()
    assert [entry.url for entry in found.entries] == [
        "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000",
    ]  # fmt: skip


def test_an_unknown_dns_name_lists_nothing() -> None:
    """A name in the domain `invalid`, which RFC 6761 reserves, lists no servers."""
    assert problem("dns+http://loaders.invalid:8000")


def can_unshare() -> bool:
    """Return True if this process may create mount and network namespaces."""
    return (
        sys.platform == "linux"
        and os.geteuid() == 0
        and subprocess.run(["unshare", "-mn", "true"], check=False).returncode == 0
    )


@pytest.mark.skipif(not can_unshare(), reason="needs mount and network namespaces")
def test_a_dns_name_is_resolved_by_the_dns_server_of_the_system() -> None:
    """Each read resolves the DNS name again; unknown names and missing DNS servers are problems of the listing."""
    done = subprocess.run(
        ["unshare", "-mn", sys.executable, "-m", "tests.client.dns_namespace"],
        cwd=ROOT, stdout=subprocess.PIPE, timeout=60, check=True,
    )  # fmt: skip
    first, changed, unknown, unavailable = json.loads(done.stdout)
    assert first == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]
    assert changed == ["http://10.0.0.3:8000"]
    assert unknown == ["problem: Name or service not known"]
    assert unavailable == ["problem: Temporary failure in name resolution"]


# --- Registries ------------------------------------------------------------------------------------------------------


class FakeRegistry:
    """A registry that lists a server when `responds` is set."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.responds = threading.Event()
        self.requests = 0

    def servers(self) -> list[str]:
        """Return the list."""
        self.requests += 1
        assert self.responds.wait(60)
        return [f"{self.url}/listed"]


def test_a_slow_registry_does_not_delay_the_lists_of_others() -> None:
    """A later read uses the list of a slow registry, which gets no second request until it responds."""
    fast, slow = FakeRegistry("http://fast"), FakeRegistry("http://slow")
    fast.responds.set()
    both: Any = [slow, fast]
    registries = RegistryDirectory("registry", both)
    for _ in range(2):
        began = time.monotonic()
        found = registries.read()
        assert time.monotonic() - began < 10
        assert found.entries == (Entry("http://fast/listed"),)
        assert not found.is_complete
        assert found.problems == ("http://slow has not responded within 0.5 s",)
    assert (slow.requests, fast.requests) == (1, 2)
    slow.responds.set()
    eventually(lambda: registries.read().is_complete)
    assert slow.requests <= 2


def test_slow_registries_are_awaited_while_no_server_is_listed() -> None:
    """A read waits for slow registries, such as those on another continent, while no registry lists a server."""
    slow = FakeRegistry("http://slow"), FakeRegistry("http://slower")
    both: Any = slow
    threading.Timer(1, slow[1].responds.set).start()
    threading.Timer(2, slow[0].responds.set).start()
    assert RegistryDirectory("registry", both).read().entries


def test_threads_of_slow_registries_do_not_delay_the_exit() -> None:
    """A process exits although the response of a registry is pending."""
    fast, slow = FakeRegistry("http://fast"), FakeRegistry("http://slow")
    fast.responds.set()
    both: Any = [slow, fast]
    RegistryDirectory("registry", both).read()
    pending = [thread for thread in threading.enumerate() if thread.name == "teleloader-registry"]
    assert pending
    assert all(thread.daemon for thread in pending)
    slow.responds.set()


# --- Servers of a dataset --------------------------------------------------------------------------------------------


class Fleet:
    """Fake servers that a function lists."""

    def __init__(self, stack: ExitStack) -> None:
        self.listed: list[str] = []
        self.requests: dict[str, list[int]] = {}
        """First batch of each request, by server."""
        self._stack = stack

    def __call__(self) -> list[str]:
        """Return the listed servers."""
        return self.listed

    def start(
        self,
        respond: Callable[[Request], Any] = Request.right,
        environment: str | None = None,
        registering: Callable[[], int] = lambda: 200,
        **info: Any,
    ) -> str:
        """Start a server, which is not listed yet."""
        requests: list[int] = []

        def record(request: Request) -> Any:
            requests.append(request.start)
            return respond(request)

        url = self._stack.enter_context(
            fake_server(record, {**INFO, **info}, environment=environment, registering=registering)
        )
        self.requests[url] = requests
        return url


@pytest.fixture
def fleet() -> Iterable[Fleet]:
    """Return an empty fleet."""
    with ExitStack() as stack:
        yield Fleet(stack)


def loader(source: Any, **arguments: Any) -> DataLoader:
    """Return a loader with eight batches."""
    return DataLoader(RemoteDataset(source, stall_timeout=0.5, **arguments), output="numpy", num_workers=1)


def test_a_server_joins_in_mid_epoch(fleet: Fleet) -> None:
    """If the only server stops responding after two batches, a server that joins then sends the rest of the epoch."""
    stopped = threading.Event()

    def two(request: Request) -> Any:
        if request.start >= 2:
            stopped.set()
            return 503
        return request.frame(request.start)

    first = fleet.start(two)
    fleet.listed = [first]
    batches = iter(loader(fleet))
    assert [next(batches)[0].tolist() for _ in range(2)] == RIGHT[:2]
    assert stopped.wait(30)
    fleet.listed = [first, fleet.start()]
    assert [batch[0].tolist() for batch in batches] == RIGHT[2:]


def test_a_server_that_leaves_the_directory_gets_no_further_requests(fleet: Fleet) -> None:
    """The pending response of a server that leaves is received, and the epoch continues on the other server."""
    going_on = threading.Event()

    def slow(request: Request) -> bytes:
        if request.start:
            going_on.wait(30)
        return request.frame(request.start)

    leaving, staying = fleet.start(slow), fleet.start(slow)
    fleet.listed = [leaving, staying]
    remote = loader(fleet)
    batches = iter(remote)
    next(batches)
    eventually(lambda: len(fleet.requests[staying]) > 0)
    fleet.listed = [staying]
    eventually(lambda: len(remote.dataset.servers.known) == 1)
    before = len(fleet.requests[leaving])
    going_on.set()
    assert [batch[0].tolist() for batch in batches] == RIGHT[1:]
    assert len(fleet.requests[leaving]) <= before + 1


def test_the_rest_of_a_response_of_a_server_that_left_is_requested_elsewhere(fleet: Fleet) -> None:
    """If a server that left sends a part of its range, another server sends the rest, even during a training step."""
    requested, released = threading.Event(), threading.Event()

    def first_only(request: Request) -> bytes:
        requested.set()
        released.wait(30)
        return request.frame(request.start)

    def not_all(request: Request) -> Any:
        requested.wait(30)
        return request.right()

    leaving, staying = fleet.start(first_only), fleet.start(not_all)
    fleet.listed = [staying, leaving]
    remote = DataLoader(
        RemoteDataset(fleet, stall_timeout=30), output="numpy", num_workers=1, prefetch_factor=8, timeout=20
    )
    batches = iter(remote)
    assert requested.wait(30)
    fleet.listed = [staying]
    eventually(lambda: len(remote.dataset.servers.known) == 1)
    released.set()
    eventually(lambda: [thread.name for thread in threading.enumerate()].count("teleloader-receiver") <= 1)
    assert [batch[0].tolist() for batch in batches] == RIGHT


def test_servers_that_left_are_forgotten(fleet: Fleet) -> None:
    """The client forgets servers that left, so that memory does not grow in an epoch with a new server each minute."""
    released = threading.Event()

    def waiting(request: Request) -> bytes:
        if request.start:
            released.wait(60)
        return request.right()

    fleet.listed = [fleet.start(waiting), fleet.start(waiting)]
    remote = loader(fleet)
    batches: Any = iter(remote)
    next(batches)
    first, second = remote.dataset.servers.known
    receiver = batches._iteration.receiver
    for _ in range(100):
        receiver.follow([first])
        receiver.follow([first, second])
    released.set()
    buffer = receiver.reorder_buffer
    eventually(lambda: len(buffer.scheduler._servers) + len(buffer._on_end) <= 4)
    assert [batch[0].tolist() for batch in batches] == RIGHT[1:]


def test_private_workers_end_on_a_server_that_left() -> None:
    """A session ends when its server leaves the directory, not only at the end of the iterator."""
    ended: list[str] = []
    with fake_server(Request.right) as staying, fake_server(Request.right, session_ended=ended.append) as leaving:
        listed = [leaving]
        remote = DataLoader(
            RemoteDataset(lambda: listed), batch_sampler=[[k] for k in range(1000)], num_workers=1, output="numpy"
        )
        batches: Any = iter(remote)
        next(batches)
        listed = [staying]
        eventually(lambda: ended == [batches._iteration.receiver.key])


def test_a_failed_server_returns(fleet: Fleet) -> None:
    """A failed server that the directory lists is retried, in later epochs too."""
    is_broken = True

    def breaking(request: Request) -> Any:
        return 503 if is_broken else request.right()

    fleet.listed = [fleet.start(breaking), fleet.start()]
    remote = loader(fleet)
    assert [batch[0].tolist() for batch in remote] == RIGHT
    is_broken = False
    eventually(lambda: [batch[0].tolist() for batch in remote] == RIGHT and len(fleet.requests[fleet.listed[0]]) > 2)


def test_a_server_with_other_library_versions_is_refused_alone(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names the server and its library versions; `allow_mixed_environments` permits it."""
    first, other = fleet.start(environment="numpy 2"), fleet.start(environment="numpy 1")
    fleet.listed = [first, other]
    warning = f"({other} runs numpy 1, but most servers run numpy 2: batches could differ."
    remote = loader(fleet)
    eventually(lambda: [batch[0].tolist() for batch in remote] == RIGHT and warning in caplog.text)
    assert not fleet.requests[other]
    fleet.listed = [other]
    assert [batch[0].tolist() for batch in loader(fleet)] == RIGHT
    fleet.listed = [first, other]
    mixed = loader(fleet, allow_mixed_environments=True)
    eventually(lambda: [batch[0].tolist() for batch in mixed] == RIGHT and len(fleet.requests[other]) > 8)


@pytest.mark.parametrize("other", [{"name": "another"}, {"fingerprint": "other"}], ids=["another name", "other data"])
def test_a_server_without_the_dataset_is_refused_alone(
    fleet: Fleet, caplog: pytest.LogCaptureFixture, other: dict[str, Any]
) -> None:
    """A listed server without the dataset is refused with a warning; most servers determine the data of the dataset."""
    wrong = fleet.start(**other)
    fleet.listed = [wrong, fleet.start(), fleet.start()]
    remote = DataLoader(RemoteDataset(fleet, "fake", stall_timeout=0.5), output="numpy", num_workers=1)
    assert [batch[0].tolist() for batch in remote] == RIGHT
    assert not fleet.requests[wrong]
    assert wrong in caplog.text


def test_a_url_that_cannot_be_used_is_ignored(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """The client logs an unusable URL, and other servers join and leave as before."""
    first = fleet.start()
    fleet.listed = ["https://999.1.1.1:8000", "http://xn--a", first]
    remote = loader(fleet)
    assert [batch[0].tolist() for batch in remote] == RIGHT
    fleet.listed = [*fleet.listed, fleet.start()]
    batches = iter(remote)
    eventually(lambda: len(remote.dataset.servers.known) == 2)
    assert [batch[0].tolist() for batch in batches] == RIGHT
    assert "999.1.1.1" in caplog.text


def test_a_directory_that_lists_nothing_is_an_error_that_names_it(fleet: Fleet) -> None:
    """The client raises an error after `reconnect_timeout`, because the servers may still be starting."""
    with pytest.raises(ServerUnavailable, match=r"^no server found through .*Fleet.*\(\): it lists no servers"):
        RemoteDataset(fleet, reconnect_timeout=0.1)


def test_a_directory_may_list_its_first_server_later(fleet: Fleet) -> None:
    """The client reads an empty directory again until it lists a server."""
    url = fleet.start()
    threading.Timer(0.5, lambda: fleet.listed.append(url)).start()
    assert [batch[0].tolist() for batch in loader(fleet)] == RIGHT


def test_a_file_cannot_collect_tokens(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A remote server in a file gets no request without TLS, unless the user trusts the file."""
    file.write_text("http://fleet.invalid:8000")
    with pytest.raises(TlsError, match=r"found through file:.*: http://fleet\.invalid:8000 is not used: without TLS"):
        RemoteDataset(f"file://{file}", token="a-token-of-24-characters")
    with fake_server(Request.right) as url:
        file.write_text(f"http://fleet.invalid:8000\n{url}")
        remote = RemoteDataset(f"file://{file}")
        assert [server.url for server in remote.servers.known] == [url]
    assert "fleet.invalid" in caplog.text
    with pytest.raises(ServerUnavailable, match="cannot connect"):
        RemoteDataset(f"file://{file}", trust_directory=True, reconnect_timeout=0, stall_timeout=0.2)


def test_a_pickled_dataset_reads_its_directory(file: Path) -> None:
    """A pickled dataset reads its directory in the process that unpickles it, such as one that `spawn` starts."""
    with fake_server(Request.right) as url, fake_server(Request.right) as other:
        file.write_text(url)
        copy: RemoteDataset = pickle.loads(pickle.dumps(RemoteDataset(f"file://{file}")))
        file.write_text(f"{url}\n{other}")
        batches = iter(DataLoader(copy, output="numpy"))
        next(batches)
        eventually(lambda: len(copy.servers.known) == 2)


def test_the_thread_that_reads_a_directory_ends_with_the_last_iterator(fleet: Fleet) -> None:
    """No thread reads the directory of a dataset that is not iterated."""
    fleet.listed = [fleet.start()]
    remote = loader(fleet)

    def watching() -> bool:
        return any(thread.name == "teleloader-directory" for thread in threading.enumerate())

    batches = iter(remote)
    next(batches)
    assert watching()
    del batches
    eventually(lambda: not watching())
    assert [batch[0].tolist() for batch in remote] == RIGHT


def test_problems_of_a_directory_are_logged_once(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """A problem of a directory is logged once, and not at each read."""
    url = fleet.start()
    fleet.listed = [url, "garbage"]
    remote = RemoteDataset(fleet)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            remote.servers.read()
    assert caplog.text.count("invalid server URL 'garbage'") == 1


def test_problems_that_vary_are_not_logged_at_each_read(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """A problem whose text contains a port or a time is not logged at each read."""
    url = fleet.start()
    remote = RemoteDataset(lambda: [url, f"garbage-{time.monotonic_ns()}"])
    for _ in range(3):
        remote.servers.read()
    assert caplog.text.count("invalid server URL 'garbage-") == 1


def test_the_first_registration_uses_the_current_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is read before the first registration, because servers may change after the dataset is created."""
    monkeypatch.setattr("teleloader.fleet.servers.READ_INTERVAL_S", 0.01)
    registrations = []

    def registering() -> int:
        registrations.append(1)
        return 404

    with fake_server(Request.right, registering=registering) as old, fake_server(Request.right) as new:
        listed = [old]
        remote = loader(lambda: listed)
        time.sleep(0.02)
        listed = [new]
        assert [batch[0].tolist() for batch in remote] == RIGHT
        assert not registrations


def test_a_replaced_server_raises_no_error() -> None:
    """The client reads the directory again before it raises an error that a retry cannot resolve."""
    listed: list[str] = []

    def registering() -> int:
        listed[:] = [new]
        return 400

    with fake_server(Request.right, registering=registering) as old, fake_server(Request.right) as new:
        listed.append(old)
        assert [batch[0].tolist() for batch in loader(lambda: listed)] == RIGHT
    with fake_server(Request.right, registering=lambda: 400) as old:
        listed[:] = [old]
        with pytest.raises(ProtocolError, match="400"):
            list(loader(lambda: listed))


def test_a_directory_that_cannot_be_read_does_not_delay_an_iterator(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iterator starts although a read blocks, for example on a network file system or a DNS name."""
    monkeypatch.setattr("teleloader.fleet.servers.READ_INTERVAL_S", 0.01)
    released = threading.Event()
    released.set()

    def listed() -> list[str]:
        released.wait(60)
        return [url]

    with fake_server(Request.right) as url:
        remote = loader(listed)
        released.clear()
        time.sleep(0.02)
        began = time.monotonic()
        assert [batch[0].tolist() for batch in remote] == RIGHT
        assert time.monotonic() - began < 30
        released.set()


def test_a_loader_uses_some_servers_of_a_large_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients of a loader choose the same part of a large fleet, and a server that leaves changes one choice."""
    servers: list[Any] = [BatchServerOf(f"http://{number}") for number in range(200)]
    chosen = nearest(servers, "loader")
    assert len(chosen) == MAX_USED_SERVERS
    assert nearest(servers[::-1], "loader") == chosen
    assert nearest(servers, "another") != chosen
    rest = nearest([server for server in servers if server is not chosen[0]], "loader")
    assert set(chosen[1:]) < set(rest)
    assert nearest(servers[:5], "loader") == tuple(servers[:5])


class BatchServerOf(BatchServer):
    """A server that is not connected."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.last_error = None
        self._failed_at = 0.0

    def connect(self, *_: Any) -> Any:
        """Fail."""
        raise NotImplementedError


def test_ranks_use_servers_with_the_same_library_versions(fleet: Fleet) -> None:
    """Each rank registers at another server first. Versions are chosen by their number of servers, not by the order."""

    def spec(rank: int) -> LoaderSpec:
        return LoaderSpec(dataset="fake", rank=rank, world_size=2, fingerprint=str(INFO["fingerprint"]))

    old, new = fleet.start(environment="numpy 1"), fleet.start(environment="numpy 2")
    for rank, fleet.listed in itertools.product(range(2), ([old, new], [new, old])):
        server, registered = RemoteDataset(fleet).register(spec(rank), 0)
        assert (server.url, registered.environment) == (new, "numpy 2")
    fleet.listed = [new, old, fleet.start(environment="numpy 1")]
    assert RemoteDataset(fleet).environment == "numpy 1"


def test_processes_choose_among_the_same_servers_of_a_large_fleet(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, training processes could choose different data while servers are updated."""
    monkeypatch.setattr("teleloader.fleet.servers.MAX_USED_SERVERS", 1)
    fleet.listed = [fleet.start(environment=f"numpy {number}") for number in range(8)]
    found = set()
    for process in range(8):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        found.add(RemoteDataset(fleet).environment)
    assert len(found) == 1


def test_another_server_does_not_end_the_wait_for_one_that_restarts(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    """The iterator waits for the server with its data, although a server with other data responds."""
    restarts = itertools.count()
    fleet.listed = [fleet.start(), fleet.start()]
    with fake_server(Request.right, registering=lambda: 409) as other:
        fleet.listed = [fleet.start(registering=lambda: 503 if next(restarts) < 3 else 200), other]
        assert [batch[0].tolist() for batch in loader(fleet)] == RIGHT
    assert next(restarts) > 3
    assert f"{other}/" in caplog.text


def test_a_finalizer_in_the_thread_of_a_directory_does_not_block_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An iterator may be garbage-collected while its servers change, in the thread that changes them."""
    fleet.listed = [fleet.start()]
    remote = loader(fleet)
    batches = iter(remote)
    next(batches)
    receiver = batches._iteration.receiver  # type: ignore[attr-defined]
    monkeypatch.setattr("teleloader.fetch.receiver.nearest", lambda servers, *_: receiver.close() or tuple(servers))
    thread = threading.Thread(target=receiver.follow, args=(remote.dataset.servers.known,), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


def test_servers_that_never_responded_do_not_displace_others(fleet: Fleet) -> None:
    """A loader uses a limited number of servers: of those that a list contains, the ones that work."""
    fleet.listed = [fleet.start(), fleet.start()]
    remote = loader(fleet)
    batches = iter(remote)
    received = [next(batches)[0].tolist()]
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        fleet.listed = [f"http://127.0.0.1:{port}/{number}" for number in range(300)] + fleet.listed
        eventually(lambda: len(remote.dataset.servers.known) == 302)
        received += [batch[0].tolist() for batch in batches]
        assert received == RIGHT
        assert [batch[0].tolist() for batch in loader(fleet)] == RIGHT


def test_failed_servers_of_a_large_fleet_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers in use stay until they fail."""
    servers: list[Any] = [BatchServerOf(f"http://{number}") for number in range(200)]
    chosen, others = nearest(servers, "loader"), nearest(servers, "another")
    assert set(nearest(servers, "loader", {server.url for server in others})) == set(others)
    chosen[0].failed(ServerUnavailable())
    assert set(chosen[1:]) < set(nearest(servers, "loader", {server.url for server in chosen}))
    assert chosen[0] not in nearest(servers, "loader", {server.url for server in chosen})
    monkeypatch.setattr("teleloader.api.control.SUSPECT_S", 0.0)  # it is tried again later
    assert nearest(servers, "loader") == chosen


def test_a_function_that_exits_is_called_again(fleet: Fleet) -> None:
    """The thread that reads the directory goes on after SystemExit."""
    exits = False

    def listed() -> list[str]:
        if exits:
            raise SystemExit
        return fleet.listed

    fleet.listed = [fleet.start()]
    remote = loader(listed)
    batches = iter(remote)
    next(batches)
    exits = True
    time.sleep(2 * READ_INTERVAL_S)
    exits = False
    fleet.listed = [*fleet.listed, fleet.start()]
    eventually(lambda: len(remote.dataset.servers.known) == 2)
    assert [batch[0].tolist() for batch in batches] == RIGHT[1:]


def test_a_server_without_a_client_is_connected_again(fleet: Fleet) -> None:
    """A process may be forked between the two updates of a read."""
    fleet.listed = [fleet.start(), fleet.start()]
    found = RemoteDataset(fleet).servers
    known = found.known
    found.known = known[:1]
    found.read()
    assert [server.url for server in found.known] == [server.url for server in known]
