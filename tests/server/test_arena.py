"""Memory shared between worker and server: reused, valid as long as it is read, and released at the end."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from teleloader_server.workers.arena import Arena, Mapping, Slot
from teleloader_server.workers.channel import Channel
from teleloader_server.workers.lendable import SEALS
from tests.conftest import examples

PAGE = 4096


class Server:
    """Server side of an arena, which maps announced slots and records messages."""

    def __init__(self, free_limit: int = 2**30) -> None:
        self.arena = Arena(free_limit, self._announce, self._retract)
        self.mappings: dict[int, Mapping] = {}
        self.retracted: list[int] = []

    def _announce(self, number: int, fd: int, size: int) -> None:
        assert number not in self.mappings, "a number is given once"
        assert os.fstat(fd).st_size == size
        self.mappings[number] = Mapping(os.dup(fd), size)

    def _retract(self, number: int) -> None:
        del self.mappings[number]
        self.retracted.append(number)


def open_descriptors() -> int:
    """Return the number of this process's open descriptors."""
    return len(list(Path("/proc/self/fd").iterdir()))


# --- The worker's side --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 100_000, 2**20, 2**20 + 1, 5_000_000])
def test_a_slot_has_the_requested_size(nbytes: int) -> None:
    """A slot is writable, has at least the requested size, and exceeds it by at most a quarter or a page."""
    slot = Server().arena.take(nbytes)
    assert nbytes <= len(slot.memory) <= max(nbytes + PAGE, nbytes * 5 // 4)
    slot.memory[:nbytes] = 1


def test_memory_begins_where_arrays_must() -> None:
    """Slots start at a multiple of 64, as a frame's alignment requires."""
    assert Server().arena.take(100).memory.ctypes.data % 64 == 0


def test_sizes_are_few_and_close() -> None:
    """Sizes are multiples of an eighth of a power of two, so that at most an eighth of the memory is unused."""
    arena = Server(free_limit=0).arena
    sizes = set()
    for nbytes in range(2**20 + 1, 2**21 + 1, 2**14):
        slot = arena.take(nbytes)
        sizes.add(len(slot.memory))
        arena.give_back(slot.number)
    assert len(sizes) == 8


def test_a_slot_that_was_given_back_is_used_again() -> None:
    """Batches of similar sizes need no new memory."""
    server = Server()
    first = server.arena.take(1_000_000)
    server.arena.give_back(first.number)
    again = server.arena.take(999_000)
    assert again is first
    assert list(server.mappings) == [first.number]


def test_a_slot_in_use_is_not_reused() -> None:
    """Two concurrent batches have two slots."""
    server = Server()
    first, second = server.arena.take(PAGE), server.arena.take(PAGE)
    assert first.number != second.number
    first.memory[:] = 1
    second.memory[:] = 2
    assert set(first.memory) == {1}


def test_the_smallest_fitting_slot_is_used() -> None:
    """Large slots are reserved for large batches."""
    server = Server()
    large, small = server.arena.take(100 * PAGE), server.arena.take(60 * PAGE)
    for slot in (large, small):
        server.arena.give_back(slot.number)
    assert server.arena.take(55 * PAGE) is small
    assert server.arena.take(60 * PAGE) is large


def test_a_slot_that_is_far_too_large_is_not_used() -> None:
    """A small batch does not occupy a slot of more than twice its size."""
    server = Server()
    large = server.arena.take(100 * PAGE)
    server.arena.give_back(large.number)
    assert server.arena.take(10 * PAGE) is not large
    assert server.arena.take(50 * PAGE) is large


def test_free_memory_beyond_the_limit_is_given_to_the_system() -> None:
    """The slot that was free for longest is released first, and the server is informed."""
    server = Server(free_limit=2 * PAGE)
    slots = [server.arena.take(PAGE) for _ in range(4)]
    for slot in slots[:2]:
        server.arena.give_back(slot.number)
    assert server.retracted == []
    for slot in slots[2:]:
        server.arena.give_back(slot.number)
    assert server.retracted == [slots[0].number, slots[1].number]
    assert {server.arena.take(PAGE).number for _ in range(2)} == {slot.number for slot in slots[2:]}


def test_a_slot_larger_than_the_limit_is_not_kept() -> None:
    """A slot larger than the limit is released as soon as it is free, with all other free slots."""
    server = Server(free_limit=PAGE)
    slot = server.arena.take(2 * PAGE)
    assert server.retracted == []
    server.arena.give_back(slot.number)
    assert server.retracted == [slot.number]
    assert server.mappings == {}


def test_memory_in_use_does_not_count_as_free() -> None:
    """The limit applies to free memory: leased slots do not count."""
    server = Server(free_limit=PAGE)
    first = server.arena.take(PAGE)
    server.arena.give_back(first.number)
    assert server.arena.take(PAGE) is first
    second = server.arena.take(PAGE)
    server.arena.give_back(second.number)
    assert server.retracted == []


def test_a_slot_keeps_no_descriptor_open() -> None:
    """The mapping alone keeps the memory, so that thousands of slots need no descriptors."""
    arena = Arena(2**30, lambda number, fd, size: None, lambda number: None)
    before = open_descriptors()
    slots = [arena.take(PAGE) for _ in range(10)]
    assert open_descriptors() == before
    assert len({slot.number for slot in slots}) == 10


def test_a_full_system_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is allocated when a slot is created, not when it is written; a failed attempt leaves nothing."""
    server = Server()

    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            server.arena.take(PAGE)
    assert open_descriptors() == before
    assert server.mappings == {}
    slot = server.arena.take(PAGE)
    assert list(server.mappings) == [slot.number]


@settings(max_examples=examples(60))
@given(
    limit=st.integers(0, 40 * PAGE),
    moves=st.lists(st.integers(1, 20 * PAGE) | st.integers(-10, -1), max_size=40),
)
def test_any_sequence_of_taking_and_giving_back(limit: int, moves: list[int]) -> None:
    """Slots in use are distinct and large enough, free memory is limited, and the server knows all slots."""
    server = Server(limit)
    used: list[Slot] = []
    free = 0
    for move in moves:
        if move > 0:
            known = set(server.mappings)
            slot = server.arena.take(move)
            assert len(slot.memory) >= move
            assert slot.number not in {other.number for other in used}
            free -= len(slot.memory) if slot.number in known else 0
            used.append(slot)
        elif used:
            slot = used.pop(move % len(used))
            before = {number: mapping.size for number, mapping in server.mappings.items()}
            server.arena.give_back(slot.number)
            free += len(slot.memory) - sum(before[number] for number in before.keys() - server.mappings.keys())
        assert 0 <= free <= limit
        assert {slot.number for slot in used} <= set(server.mappings)
        sizes = sum(mapping.size for mapping in server.mappings.values())
        assert sizes == free + sum(len(slot.memory) for slot in used)


# --- The server's side --------------------------------------------------------------------------------------------


servers: list[Server] = []
"""References that keep servers alive as long as leases on their slots."""


def lease_of(content: bytes) -> tuple[NDArray[np.uint8], list[str]]:
    """Return a lease on a slot with this content, and the messages of its release."""
    server = Server()
    servers.append(server)
    slot = server.arena.take(len(content))
    slot.memory[: len(content)] = np.frombuffer(content, np.uint8)
    said: list[str] = []
    return server.mappings[slot.number].lease(len(content), lambda: said.append("released")), said


def test_the_server_sees_what_the_worker_wrote() -> None:
    """Worker and server share the memory; the server's lease has the length of the frame."""
    lease, _ = lease_of(b"a frame")
    assert lease.tobytes() == b"a frame"


def test_a_lease_is_read_only() -> None:
    """The server never writes to a worker's memory."""
    lease, _ = lease_of(b"a frame")
    with pytest.raises(ValueError, match="read-only"):
        lease[0] = 1
    assert lease.data.readonly


def test_a_lease_is_released_when_it_is_dropped() -> None:
    """The lease is released immediately, and only once."""
    lease, said = lease_of(b"a frame")
    assert said == []
    del lease
    assert said == ["released"]


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(look, id=name)
        for name, look in {
            "slice": lambda lease: lease[8:16],
            "slice of a slice": lambda lease: lease[8:40][4:8],
            "memoryview": lambda lease: lease[8:16].data,
            "other type": lambda lease: lease.view(np.uint64),
            "cast memoryview": lambda lease: memoryview(lease).cast("B")[3:],
            "in a list": lambda lease: [lease[i : i + 1] for i in range(3)],
        }.items()
    ],
)
def test_a_slot_is_kept_until_the_last_view_is_dropped(look: Callable[[Any], Any]) -> None:
    """Each view keeps the whole lease, such as unsent data in the event loop's transport."""
    lease, said = lease_of(bytes(range(64)))
    view = look(lease)
    del lease
    assert said == []
    del view
    assert said == ["released"]


def test_a_slot_may_be_leased_again() -> None:
    """Each use of a slot is a separate lease with its own length."""
    server = Server()
    slot = server.arena.take(PAGE)
    mapping = server.mappings[slot.number]
    said: list[int] = []
    for length in (10, 4000):
        slot.memory[:length] = length % 251
        lease = mapping.lease(length, lambda length=length: said.append(length))  # type: ignore[misc]
        assert len(lease) == length
        assert set(lease.tolist()) == {length % 251}
        del lease
    assert said == [10, 4000]


def test_a_lease_outlives_the_mapping_and_the_slot() -> None:
    """A lease stays readable after its worker has exited or its slot was retracted."""
    server = Server(free_limit=0)
    slot = server.arena.take(PAGE)
    slot.memory[:] = 7
    lease = server.mappings[slot.number].lease(PAGE, lambda: None)
    server.arena.give_back(slot.number)
    assert server.retracted == [slot.number]
    del server, slot
    assert set(lease.tolist()) == {7}


def test_a_mapping_closes_the_descriptor_that_it_was_given() -> None:
    """The server has one mapping for each slot, and no open descriptor."""
    slot = os.memfd_create("test")
    os.truncate(slot, PAGE)
    before = open_descriptors()
    mapping = Mapping(slot, PAGE)
    assert open_descriptors() == before - 1
    assert mapping.size == PAGE


def test_more_than_the_slot_cannot_be_leased() -> None:
    """A size that a broken worker states does not read beyond its memory."""
    server = Server()
    slot = server.arena.take(PAGE)
    with pytest.raises(ValueError, match="buffer is smaller"):
        server.mappings[slot.number].lease(len(slot.memory) + 1, lambda: None)


def test_a_lease_that_lives_to_the_end_is_not_released_by_the_end() -> None:
    """At the process's end a lease sends no release, since the event loop is closed."""
    program = """
import os
from teleloader_server.workers.arena import Arena, Mapping
mappings = []
arena = Arena(0, lambda number, fd, size: mappings.append(Mapping(os.dup(fd), size)), print)
arena.take(1)
lease = mappings[0].lease(1, lambda: print("released"))
"""
    ended = subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, stdout=subprocess.PIPE)
    assert ended.stdout == b""


# --- Two processes ------------------------------------------------------------------------------------------------

WORKER = """
import socket, sys
from teleloader_server.workers.arena import Arena
from teleloader_server.workers.channel import Channel
channel = Channel(socket.socket(fileno=int(sys.argv[1])))
arena = Arena(2**20, lambda number, fd, size: channel.send(["slot", number, size], [fd]), print)
for value in range(3):
    slot = arena.take(100_000)
    slot.memory[:100_000] = value
    channel.send(["done", slot.number])
    if value < 2:
        while not (messages := channel.receive()):
            pass
        arena.give_back(messages[0])
channel.receive()
"""


class RealWorker:
    """Process that fills slots."""

    def __init__(self) -> None:
        ours, theirs = Channel.pair()
        self.channel = ours
        self.messages: list[Any] = []
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    def next(self) -> Any:
        """Return the next message."""
        while not self.messages:
            select.select([self.channel], [], [])
            self.messages += self.channel.receive()
        return self.messages.pop(0)

    def kill(self) -> None:
        """Send SIGKILL, and wait for the process."""
        self.process.kill()
        self.process.wait()
        self.channel.close()


def test_one_slot_serves_a_worker_process_for_all_its_batches() -> None:
    """The server maps the memory once; then only messages are sent, and each batch is read in place."""
    worker = RealWorker()
    try:
        said, number, size = worker.next()
        assert said == "slot"
        mapping = Mapping(worker.channel.take_fd(), size)
        for value in range(3):
            assert worker.next() == ["done", number]
            lease = mapping.lease(100_000, lambda: worker.channel.send(number))
            assert set(lease.tolist()) == {value}
            del lease
    finally:
        worker.kill()


def test_what_a_killed_worker_made_can_still_be_read_and_nothing_is_left_of_it() -> None:
    """The memory has no name and no file: it exists as long as it is mapped."""
    gc.collect()  # reference cycles of earlier tests would be collected during this one
    names, mapped = set(os.listdir("/dev/shm")), memfds_mapped()
    worker = RealWorker()
    try:
        _, number, size = worker.next()
        mapping = Mapping(worker.channel.take_fd(), size)
        assert worker.next() == ["done", number]
        lease = mapping.lease(100_000, lambda: None)
    finally:
        worker.kill()
    assert set(lease.tolist()) == {0}
    assert memfds_mapped() == mapped + 1
    del lease, mapping
    assert memfds_mapped() == mapped
    assert set(os.listdir("/dev/shm")) <= names


def memfds_mapped() -> int:
    """Return the number of teleloader's anonymous memory files that this process maps."""
    return Path("/proc/self/maps").read_text().count("memfd:teleloader")


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, SEALS & ~fcntl.F_SEAL_SHRINK])
def test_memory_that_an_untrusted_worker_could_shrink_is_not_mapped(seals: int) -> None:
    """Reading it after it was shrunk would end the server by SIGBUS."""
    fd = os.memfd_create("teleloader-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(PermissionError, match="without seals"):
        Mapping.checked(fd, PAGE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_untrusted_worker_cannot_announce_a_slot_that_is_larger_than_its_memory() -> None:
    """The same holds for bytes after the end of the file."""
    for size, is_mapped in ((PAGE, True), (PAGE + 1, False)):
        fd = os.memfd_create("teleloader-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, PAGE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        try:
            Mapping.checked(fd, size)
            assert is_mapped
        except PermissionError:
            assert not is_mapped
