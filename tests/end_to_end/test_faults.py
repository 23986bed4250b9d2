"""Faults: every batch arrives once, and all resources are released."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from teleloader import DataLoader, LoaderTimeout, RemoteDataset, ServerUnavailable, WorkerDied
from teleloader_server import serve
from tests.conftest import StartServer, eventually
from tests.end_to_end import hosted
from tests.end_to_end.terminal import SERVER, piped

TARGET = "tests.end_to_end.hosted:"


def test_an_error_of_the_dataset_arrives_at_its_batch() -> None:
    """The error has its type, the remote traceback and the indices; the iteration continues."""
    with serve(hosted.failing(), num_workers=2) as url:
        batches = iter(DataLoader(RemoteDataset(url), 4, output="numpy"))
        before = [next(batches).tolist() for _ in range(4)]
        with pytest.raises(ValueError, match="sample 17 is damaged") as caught:
            next(batches)
        after = [batch.tolist() for batch in batches]
    assert [i for batch in before + after for i in batch] == [i for i in range(40) if not 16 <= i < 20]
    text = str(caught.value)
    assert text.startswith("Caught ValueError in DataLoader worker process ")
    assert "Original Traceback (most recent call last):" in text
    assert "hosted.py" in text, "the user's own file must be in the traceback"
    assert f"batch 4 of epoch 0, with the indices [16, 17, 18, 19], on {url}" in text


def test_a_worker_killed_in_the_middle_of_a_batch_is_replaced(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGKILL in __getitem__, the epoch is exact, and log and /stats have the duration of the restart."""
    monkeypatch.setenv("KILL_MARKER", str(tmp_path / "killed"))
    server = start_server(f"kills={TARGET}kills_once", "--num-workers", "2")
    seen = [i for batch in DataLoader(RemoteDataset(server.url, "kills"), 3, output="numpy") for i in batch.tolist()]
    assert seen == list(range(60))
    killed = int((tmp_path / "killed").read_text())
    assert not psutil.pid_exists(killed)
    server.await_line(rf"worker \d \(pid {killed}\) was killed by signal SIGKILL")
    took = float(server.await_line(r"restarted as pid \d+ after ([\d.]+) s")[1])
    (replaced,) = [worker for worker in server.stats()["workers"] if worker["restarts"]]
    assert replaced["restarts"] == server.stats()["server"]["worker_restarts"] == 1
    assert "SIGKILL" in replaced["last_exit"]
    assert replaced["last_restart"] == pytest.approx(took, abs=1e-3)
    assert replaced["pid"] != killed


def test_a_batch_that_ends_every_worker_becomes_an_error(start_server: StartServer) -> None:
    """After three exits an error with their reasons takes the batch's place; other batches arrive."""
    server = start_server(f"poisoned={TARGET}poisoned", "--num-workers", "2")
    batches = iter(DataLoader(RemoteDataset(server.url, "poisoned"), 2, output="numpy"))
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(WorkerDied, match=r"exited with code 3; every worker that loaded the batch exited") as caught:
        next(batches)
    assert "batch 2 of epoch 0, with the indices [4, 5]" in str(caught.value)
    assert [batch.tolist() for batch in batches] == [[6, 7], [8, 9], [10, 11]]


class Fatal:
    """Iterable-style dataset whose third sample exits the worker."""

    def __iter__(self) -> Iterator[int]:
        yield from (0, 1)
        os._exit(3)


class FatalWithLength(Fatal):
    """Dataset like `Fatal`, with fewer samples than its length."""

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize(
    "kind",
    [Fatal, FatalWithLength],
)
def test_a_sample_of_a_stream_that_ends_every_worker_becomes_an_error(kind: type[Fatal]) -> None:
    """Each worker iterates again from the beginning; the batches before the sample arrive once."""
    with serve(kind(), num_workers=1) as url:
        batches = iter(DataLoader(RemoteDataset(url), 1, num_workers=1, timeout=10, output="numpy"))
        assert [next(batches).tolist() for _ in range(2)] == [[0], [1]]
        with pytest.raises(
            WorkerDied, match=r"exited with code 3; every worker that loaded the batch exited"
        ) as caught:
            next(batches)
    assert "The error occurred in batch 2 of epoch 0, on http" in str(caught.value)


def test_a_killed_and_restarted_server_continues_the_epoch(start_server: StartServer, free_port: int) -> None:
    """After SIGKILL and a restart on the same port, the client continues with the next batch."""
    first = start_server(f"{TARGET}numbers", "--num-workers", "1", port=free_port)
    batches = iter(DataLoader(RemoteDataset(first.url, "numbers"), 5, output="numpy"))
    seen = [next(batches)[0].tolist() for _ in range(3)]
    first.kill()
    start_server(f"{TARGET}numbers", "--num-workers", "2", port=free_port)
    seen += [batch[0].tolist() for batch in batches]
    assert [i for batch in seen for i in batch] == list(range(100))


def test_a_server_that_stays_away_is_an_error_in_bounded_time(start_server: StartServer) -> None:
    """The error names server, epoch and batch, and the state resumes elsewhere."""
    server = start_server(f"{TARGET}numbers", "--num-workers", "1")
    loader = DataLoader(RemoteDataset(server.url, "numbers", reconnect_timeout=0.5), 5, output="numpy")
    batches = iter(loader)
    seen = [next(batches)[0].tolist()]
    server.kill()
    with pytest.raises(ServerUnavailable, match=r"did not send batch \d+ of epoch 0"):
        seen.extend(batch[0].tolist() for batch in batches)
    elsewhere = start_server(f"{TARGET}numbers", "--num-workers", "1")
    again = DataLoader(RemoteDataset(elsewhere.url, "numbers"), 5, output="numpy")
    again.load_state_dict(loader.state_dict())
    seen += [batch[0].tolist() for batch in again]
    assert [i for batch in seen for i in batch] == list(range(100))


def test_a_batch_that_takes_too_long_is_a_timeout_and_comes_later(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has torch's text; the iterator stays usable, and the batch arrives later."""
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    server = start_server(f"slow={TARGET}slow", "--num-workers", "1")
    batches = iter(DataLoader(RemoteDataset(server.url, "slow"), 2, num_workers=1, timeout=0.2, output="numpy"))
    with pytest.raises(LoaderTimeout, match=r"^DataLoader timed out after 0\.2 seconds$"):
        next(batches)
    gate.touch()
    got: list[int] = []
    while len(got) < 8:
        try:
            got += next(batches).tolist()
        except LoaderTimeout:
            continue
    assert got == list(range(8))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_server(start_server: StartServer, how: signal.Signals) -> None:
    """After a stop or kill, no process, no file in /dev/shm and no listening socket remains."""
    shm_before = set(os.listdir("/dev/shm"))
    server = start_server("--demo", "--num-workers", "3")
    batches = iter(DataLoader(RemoteDataset(server.url, "digits-train", reconnect_timeout=0), 32, output="numpy"))
    next(batches)
    eventually(lambda: len(psutil.Process(server.pid).children(recursive=True)) == 4)  # fork server and three workers
    family = psutil.Process(server.pid).children(recursive=True)
    code = server.end(how)
    assert code == (-signal.SIGKILL if how is signal.SIGKILL else 0), "".join(server.log)
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert len(gone) == 4
    assert set(os.listdir("/dev/shm")) <= shm_before
    host, port = server.url.removeprefix("http://").split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


def test_a_connection_ends_with_the_server_at_once(start_server: StartServer) -> None:
    """Workers do not inherit client connections, so that a SIGKILL closes them."""
    server = start_server("--demo", "--num-workers", "2")
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b'"}'):
            answer += client.recv(4096)
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        server.await_line("restarted as pid")
        server.kill()
        client.settimeout(30)
        assert client.recv(1) == b""


@pytest.mark.parametrize("leave", ["break", "exception", "delete"])
def test_a_loop_that_is_left_leaves_nothing(leave: str) -> None:
    """After break, an exception or del, the receiving thread ends and its sockets are closed."""
    before = set(threading.enumerate())
    with serve(hosted.Samples(lambda i: i, 1000), num_workers=1) as url:
        loader = DataLoader(RemoteDataset(url), 2, output="numpy")
        batches = iter(loader)
        next(batches)
        # the server starts threads, too
        (receiver,) = (each for each in set(threading.enumerate()) - before if each.name == "teleloader-receiver")
        if leave == "exception":
            with pytest.raises(ZeroDivisionError):
                _loop_that_fails(loader)
        del batches
        receiver.join(30)
        assert not receiver.is_alive()
        assert loader.state_dict()["samples"] == 2


def _loop_that_fails(loader: DataLoader) -> None:
    for _ in loader:
        raise ZeroDivisionError


def test_a_changed_dataset_is_refused_in_mid_run(start_server: StartServer, tmp_path: Path, free_port: int) -> None:
    """If the server restarts with another version of the data, the error has both versions."""
    config = tmp_path / "loader.toml"

    def write(version: str) -> None:
        config.write_text(f'[datasets.numbers]\nfactory = "{TARGET}numbers"\nversion = "{version}"\n')

    write("1")
    first = start_server("--config", str(config), "--num-workers", "1", port=free_port)
    batches = iter(DataLoader(RemoteDataset(first.url, "numbers"), 1, output="numpy"))
    next(batches)
    first.kill()
    write("2")
    start_server("--config", str(config), "--num-workers", "1", port=free_port)
    with pytest.raises(ValueError, match=r"fingerprint .* version '2'"):
        list(batches)


def test_a_batch_over_the_limit_is_an_error_that_says_so() -> None:
    """The error has the size, the limit and what to do; other batches arrive."""
    dataset = hosted.Samples(lambda i: np.zeros(2**20 if i == 1 else 1, np.uint8), 3)
    with serve(dataset, num_workers=1, max_batch_bytes=2**18) as url:
        batches = iter(DataLoader(RemoteDataset(url), 1, output="numpy"))
        assert next(batches).shape == (1, 1)
        with pytest.raises(ValueError, match=r"1,048,\d+ bytes, and the limit is 262,144: use a smaller batch_size"):
            next(batches)
        assert next(batches).shape == (1, 1)


def test_a_server_starts_although_the_process_that_builds_its_datasets_is_killed(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Datasets are built again after two kills, for example by the kernel for lack of memory."""
    monkeypatch.setenv("KILL_MARKER", str(tmp_path / "builds"))
    monkeypatch.setenv("KILLS", "2")
    server = start_server(f"{TARGET}killed_while_built", "--num-workers", "1")
    assert (tmp_path / "builds").read_text() == "xxx"
    server.await_line(r"builds the datasets was killed by signal SIGKILL \(Killed\).*retrying with a new fork server")


def test_a_server_whose_datasets_kill_their_process_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three attempts the error states how the process ended."""
    monkeypatch.setenv("KILL_MARKER", str(tmp_path / "builds"))
    monkeypatch.setenv("KILLS", "9")
    done = piped(SERVER, f"{TARGET}killed_while_built", "--port", "0")
    assert done.code == 2
    assert (tmp_path / "builds").read_text() == "xxx"
    assert (
        "builds the datasets was killed by signal SIGKILL (Killed): see the log of the server"
        in done.err.splitlines()[-1]
    )
