"""Frames in shared memory, as the client receives and gives them back."""

from __future__ import annotations

import gc
import mmap
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

if sys.platform != "linux":
    pytest.skip("requires memfd", allow_module_level=True)

import fcntl

from teleloader.tensors.memory import HostBuffers
from teleloader.transport.handoff import LoanChannel
from teleloader_shared.buffers import BufferPool
from teleloader_shared.errors import CorruptFrame
from teleloader_shared.handoff import GIVE_BACK, LOAN
from tests.conftest import need

SIZE = 2**20 + 64
SLOT = 2**20 + 4096
SEALS = 0x17


class Lending:
    """Server side of a channel, with one slot that it can still write."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(10)
        self.channel = LoanChannel(theirs, "0" * 32)
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, SLOT)
        self.memory = mmap.mmap(descriptor, SLOT)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        os.close(descriptor)
        self.fill(1)

    def fill(self, value: int) -> None:
        """Write the slot, as a worker does with the next batch."""
        self.memory[:] = bytes([value]) * len(self.memory)

    def lend(self, number: int) -> bytes:
        """Send a loan; return the body of the response."""
        socket.send_fds(self.socket, [LOAN.pack(number, SIZE)], [self._descriptor])
        return GIVE_BACK.pack(number)

    def given_back(self) -> list[int]:
        """Return the loans that the client has given back."""
        self.socket.setblocking(False)
        numbers = []
        try:
            while message := self.socket.recv(100):
                numbers.append(GIVE_BACK.unpack(message)[0])
        except BlockingIOError:
            pass
        return numbers

    def close(self) -> None:
        """Release everything."""
        self.channel.close()
        self.socket.close()
        os.close(self._descriptor)


@pytest.fixture
def lending() -> Iterator[Lending]:
    """Return a channel."""
    found = Lending()
    yield found
    found.close()


def buffers_of(pinned: Any = None) -> HostBuffers:
    """Return an allocator of memory."""
    return HostBuffers("numpy", BufferPool(), pinned)


def test_a_slot_is_given_back_with_its_last_array(lending: Lending) -> None:
    """Views keep the loan; each loan is given back once."""
    memory = lending.channel.receive(lending.lend(7), buffers_of(), SIZE)
    view = memory.data[100:200]
    assert (memory.data == 1).all()
    assert len(memory.data) == SIZE
    del memory
    gc.collect()
    assert lending.given_back() == []
    del view
    gc.collect()
    assert lending.given_back() == [7]
    lending.channel.close()
    assert lending.given_back() == []


def test_a_damaged_response_is_a_corrupt_frame(lending: Lending) -> None:
    """The slot is given back, and the batch is requested again."""
    lending.lend(7)
    with pytest.raises(CorruptFrame, match="does not name loan 7"):
        lending.channel.receive(GIVE_BACK.pack(5), buffers_of(), SIZE)
    assert lending.given_back() == [7]


def test_changes_are_private(lending: Lending) -> None:
    """An array is writable, and its changes appear neither in the slot nor in the next loan of the slot."""
    memory = lending.channel.receive(lending.lend(1), buffers_of(), SIZE)
    memory.data[:] = 5
    again = lending.channel.receive(lending.lend(2), buffers_of(), SIZE)
    assert (again.data == 1).all()
    assert set(lending.memory[:]) == {1}


def test_a_closed_connection_keeps_its_arrays(lending: Lending) -> None:
    """The channel stays open until the last array is deleted, and lends nothing more."""
    memory = lending.channel.receive(lending.lend(1), buffers_of(), SIZE)
    lending.lend(2)
    lending.channel.close()
    assert lending.given_back() == [2], "the loan that was not received"
    with pytest.raises(BrokenPipeError):
        lending.lend(3)
    assert (memory.data == 1).all()
    del memory
    gc.collect()
    assert lending.given_back() == [1]
    assert lending.socket.recv(1) == b"", "the channel is closed"


def test_arrays_outlive_the_server(lending: Lending) -> None:
    """After the server's end, arrays are valid, and deleting them is no error."""
    memory = lending.channel.receive(lending.lend(1), buffers_of(), SIZE)
    before = lending.channel.is_open
    lending.socket.close()
    assert before > lending.channel.is_open
    assert (memory.data == 1).all()
    del memory
    gc.collect()


def test_a_forked_child_gives_nothing_back(lending: Lending) -> None:
    """The channel belongs to the parent."""
    memory = lending.channel.receive(lending.lend(1), buffers_of(), SIZE)
    child = os.fork()
    if child == 0:
        del memory
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert lending.given_back() == []
    assert (memory.data == 1).all()


def test_page_locked_memory_receives_a_copy(lending: Lending) -> None:
    """A slot is given back after its copy is complete, and later batches do not appear in the copy."""
    need("torch")
    import torch

    class Budget:
        """Allocator whose memory is pageable, because page-locked memory requires an accelerator."""

        blocks: list[Any] = []  # noqa: RUF012

        def allocate(self, nbytes: int) -> Any:
            """Return a block, as `PinnedBudget` does."""
            self.blocks.append(torch.zeros(nbytes, dtype=torch.uint8))
            return self.blocks[-1]

    memory = lending.channel.receive(lending.lend(1), buffers_of(Budget()), SIZE)
    assert lending.given_back() == [1]
    lending.fill(2)
    assert (memory.data == 1).all()
    (block,) = Budget.blocks
    assert memory.data.ctypes.data == block.data_ptr(), "the batch lives in memory of torch's allocator"
    tensor: Any = memory.leaf(64, "uint8", (SIZE - 64,), "tensor")
    assert tensor.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
    assert np.array_equal(tensor.numpy(), np.ones(SIZE - 64, np.uint8))


def test_all_pages_are_mapped_at_once(lending: Lending) -> None:
    """Reading a batch causes far fewer page faults than it has pages: those of Python itself."""
    import resource

    memory = lending.channel.receive(lending.lend(1), buffers_of(), SIZE)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for start in range(0, SIZE, 4096):
        assert memory.data[start] == 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < SIZE // 4096 // 10
