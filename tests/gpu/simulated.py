"""Simulated accelerator that does everything as late as possible, with streams, events and torch's caching allocators.

A copy runs when its stream reaches it, and reads the current content of its source: host memory by its address, as a
DMA engine does. Freed memory is overwritten as soon as the allocator may reuse it. A batch therefore arrives intact
only if events protect it, and not by chance. The device has the name ``simulated`` in torch; its tensors are in main
memory.

The behavior of the allocators is that of torch (c10/cuda/CUDACachingAllocator.cpp, ATen/core/CachingHostAllocator.h): a
pinned block is reused once the events of the copies from its storage are done; a device block belongs to the stream
that was current when it was allocated, and is reused in that stream's order once the events of other streams that were
recorded with ``record_stream`` are done.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from teleloader.tensors import devices

NAME: Final = "simulated"
GARBAGE: Final = 0xEE
DEVICES: Final = 2


class Moment:
    """One recording of an event."""

    def __init__(self) -> None:
        self.has_passed = False


class Queue:
    """Stream: operations in order."""

    def __init__(self, device: Any = None, machine: Machine | None = None) -> None:
        self.machine = machine or Machine.active
        self.device = device
        self.operations: deque[Callable[[], bool]] = deque()
        """Each returns True once it is done; a stream stops at one that is not."""

    def add(self, operation: Callable[[], object]) -> None:
        """Enqueue an operation that is done when it was called."""
        self.wait_for(lambda: (operation(), True)[1])

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Enqueue a wait."""
        with self.machine.lock:
            self.operations.append(condition)
            self.machine.run()

    def wait_event(self, event: Event) -> None:
        """Make subsequent work wait for the last recording of an event."""
        moment = event.moment
        if moment is not None:
            self.wait_for(lambda: moment.has_passed)


class Event:
    """Point in a stream."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.moment: Moment | None = None
        self.enable_timing = enable_timing

    def record(self, stream: Queue) -> None:
        """Enqueue the event."""
        moment = self.moment = Moment()
        stream.add(lambda: setattr(moment, "has_passed", True))

    def query(self) -> bool:
        """Return True if it has happened."""
        Machine.active.fail_if_broken()
        return self.moment is None or self.moment.has_passed

    def synchronize(self) -> None:
        """Fail: the host must wait for no copy."""
        raise AssertionError("the host waited for the device")

    def elapsed_time(self, other: Event) -> float:
        """Return a millisecond."""
        assert self.enable_timing
        assert other.query()
        return 1.0


class Block:
    """Memory that an allocator reuses and never returns to the system."""

    def __init__(self, nbytes: int, stream: Queue | None = None) -> None:
        self.data: NDArray[np.uint8] = np.full(nbytes, GARBAGE, np.uint8)
        self.stream = stream
        """Stream for which the block was allocated; None for pinned memory."""
        self.uses: list[Moment] = []
        """Recordings that must have passed before the block is reused."""
        self.users: set[Queue] = set()
        """Streams passed to ``record_stream``."""

    def overwrite(self) -> bool:
        """Overwrite the block's content."""
        self.data.fill(GARBAGE)
        return True

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return int(self.data.ctypes.data)


class Machine:
    """Host and its devices; `active` while a test runs on it."""

    active: Machine

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: list[Queue] = []
        self.defaults = {index: self.stream(index) for index in range(DEVICES)}
        self.local = threading.local()
        self.blocks: dict[int, Block] = {}
        """Blocks in use, by address."""
        self.free: dict[tuple[Queue | None, int], list[Block]] = defaultdict(list)
        self.freed: list[Block] = []
        """Blocks that are no longer in use, but whose uses have not passed."""
        self.contexts: set[int] = set()
        """Devices on which a thread allocated pinned memory or copied: each costs hundreds of megabytes."""
        self.pinned: list[Block] = []
        """All blocks of pinned memory allocated so far."""
        self.gates: list[Moment] = []
        self.memory_errors = 0
        """Number of next copies that run out of memory."""
        self.memory_errors_ahead = 0
        """The same, except for the copy of a first batch."""
        self.copies = 0
        self.broken = False
        """True to fail each call to the driver, as after a device-side assertion."""

    # -- streams

    def stream(self, device: Any) -> Queue:
        """Return a new stream."""
        stream = Queue(device, self)
        self.streams.append(stream)
        return stream

    def current_stream(self) -> Queue:
        """Return the current stream of this thread."""
        stream: Queue = getattr(self.local, "stream", None) or self.defaults[self.current_device()]
        return stream

    def current_device(self) -> int:
        """Return the current device of this thread, 0 in a new one."""
        index: int = getattr(self.local, "device", 0)
        return index

    def run(self) -> None:
        """Run all work that is ready."""
        progress = True
        while progress:
            progress = False
            for stream in self.streams:
                while stream.operations and stream.operations[0]():
                    stream.operations.popleft()
                    progress = True
            for block in self.freed.copy():
                progress |= self._reuse(block)

    def delay(self) -> None:
        """Delay the current stream until `finish`."""
        gate = Moment()
        self.gates.append(gate)
        self.current_stream().wait_for(lambda: gate.has_passed)

    def finish(self) -> None:
        """End all delays and run all work."""
        with self.lock:
            for gate in self.gates:
                gate.has_passed = True
            self.run()
            assert not any(stream.operations for stream in self.streams)

    def fail_if_broken(self) -> None:
        """Raise the driver's error after a device-side assertion."""
        if self.broken:
            raise RuntimeError("CUDA error: device-side assert triggered")

    # -- memory

    def allocate(self, nbytes: int, stream: Queue | None) -> Any:
        """Return a uint8 tensor of a new block."""
        with self.lock:
            self.fail_if_broken()
            self.contexts.add(self.current_device())
            self.run()
            size = 1 << max(6, (nbytes - 1).bit_length())
            free = self.free[stream, size]
            if not free:
                free.append(Block(size, stream))
                self.pinned += [free[-1]] if stream is None else []
            block = free.pop()
            self.blocks[block.address] = block
            tensor = torch.from_numpy(block.data)[:nbytes]
            weakref.finalize(tensor.untyped_storage(), self._dropped, block).atexit = False
            return tensor

    def _dropped(self, block: Block) -> None:
        """Free a block after its last tensor was dropped."""
        with self.lock:
            del self.blocks[block.address]
            for stream in block.users - {block.stream}:
                event = Event()
                event.record(stream)
                assert event.moment is not None
                block.uses.append(event.moment)
            block.users.clear()
            self.freed.append(block)
            self._reuse(block)

    def _reuse(self, block: Block) -> bool:
        """Return a block to its allocator if all uses have passed."""
        if not all(use.has_passed for use in block.uses):
            return False
        self.freed.remove(block)
        block.uses.clear()
        if block.stream is None:
            block.overwrite()  # as the next response would do
        else:
            block.stream.operations.append(block.overwrite)  # as the next kernel would do
        self.free[block.stream, len(block.data)].append(block)
        return True

    def copy(self, source: Any, device: Any) -> Any:
        """Copy a tensor to the device as ``tensor.to(device, non_blocking=True)`` does."""
        with self.lock:
            self.fail_if_broken()
            self.copies += 1
            if self.memory_errors_ahead and self.copies > 1:
                self.memory_errors_ahead -= 1
                raise torch.cuda.OutOfMemoryError("simulated: out of memory")
            if self.memory_errors:
                self.memory_errors -= 1
                raise torch.cuda.OutOfMemoryError("simulated: out of memory")
            stream = self.current_stream()
            nbytes = source.numel() * source.element_size()
            raw = self.allocate(max(1, nbytes), stream)
            target = self.blocks[raw.untyped_storage().data_ptr()].data[:nbytes]
            block = self.blocks.get(source.untyped_storage().data_ptr())
            source = source.contiguous()
            read = (ctypes.c_uint8 * nbytes).from_address(source.data_ptr()) if nbytes else b""
            if not self.is_pinned(source):
                read = bytes(read)  # pageable memory is staged before the call returns
            stream.add(lambda: target.__setitem__(slice(None), np.frombuffer(read, np.uint8)))
            if block is not None and block.stream is None:
                moment = Moment()
                block.uses.append(moment)
                stream.add(lambda: setattr(moment, "has_passed", True))
            copied = torch.empty(0, dtype=source.dtype).set_(
                raw.untyped_storage(), 0, source.shape, source.contiguous().stride()
            )
            copied.simulated_device = torch.device(NAME, device.index or 0)
            return copied

    def is_pinned(self, tensor: Any) -> bool:
        """Return True if a tensor is in pinned memory, whoever allocated its storage."""
        address = tensor.data_ptr()
        return any(block.address <= address < block.address + len(block.data) for block in self.pinned)

    def record_stream(self, tensor: Any, stream: Queue) -> None:
        """Keep the memory of a tensor until the work submitted to a stream before the tensor is dropped is done."""
        self.blocks[tensor.untyped_storage().data_ptr()].users.add(stream)

    def snapshot(self, tensor: Any) -> NDArray[np.uint8]:
        """Submit a kernel that copies the content of a tensor at the time it runs, without keeping the tensor."""
        nbytes = tensor.numel() * tensor.element_size()
        result = np.full(nbytes, GARBAGE, np.uint8)
        if nbytes:
            memory = (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())
            self.current_stream().add(lambda: result.__setitem__(slice(None), np.frombuffer(memory, np.uint8)))
        return result


class Module:
    """The module ``torch.simulated``."""

    Event = Event
    is_on = False

    @staticmethod
    def Stream(device: Any = None) -> Queue:  # noqa: N802 - torch's name
        """Return a new stream."""
        return Machine.active.stream(device)

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Do nothing: the device draws no random numbers."""

    @classmethod
    def is_available(cls) -> bool:
        """Return True while a test runs on the machine."""
        return cls.is_on

    @classmethod
    def device_count(cls) -> int:
        """Return the number of devices."""
        return DEVICES if cls.is_on else 0

    @staticmethod
    def current_device() -> int:
        """Return the current device of the calling thread."""
        return Machine.active.current_device()

    @staticmethod
    def set_device(index: int) -> None:
        """Make a device the calling thread's current one."""
        Machine.active.fail_if_broken()
        Machine.active.local.device = index

    @staticmethod
    def current_stream(device: Any = None) -> Queue:
        """Return the current stream of the calling thread."""
        return Machine.active.current_stream()

    @staticmethod
    @contextmanager
    def stream(stream: Queue) -> Iterator[None]:
        """Make a stream the current one."""
        local = Machine.active.local
        before = getattr(local, "stream", None)
        local.stream = stream
        try:
            yield
        finally:
            local.stream = before


def register() -> None:
    """Register the device with torch, which cannot be undone and requires a process without a GPU."""
    if not hasattr(torch, NAME):
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, Module)


@contextmanager
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Let torch allocate pinned memory, copy and record streams on a new machine."""
    register()
    empty, to = torch.empty, torch.Tensor.to

    def allocate(*size: Any, pin_memory: bool = False, **options: Any) -> Any:
        if not pin_memory:
            return empty(*size, **options)
        assert options == {"dtype": torch.uint8}
        return Machine.active.allocate(int(size[0]), None)

    def move(tensor: Any, *args: Any, **options: Any) -> Any:
        target = options.get("device", args[0] if args else None)
        if isinstance(target, str) and target.startswith(NAME):
            target = torch.device(target)
        if isinstance(target, torch.device) and target.type == NAME:
            return Machine.active.copy(tensor, target)
        return to(tensor, *args, **options)

    monkeypatch.setattr(Module, "is_on", True)
    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.Tensor, "to", move)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: Machine.active.record_stream(tensor, stream)
    )
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: Machine.active.is_pinned(tensor))
    monkeypatch.setattr("teleloader.tensors.pinned._budget", None)
    Machine.active = Machine()
    devices._copy_stream.cache_clear()
    yield Machine.active
    devices._copy_stream.cache_clear()
