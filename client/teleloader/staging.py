"""Batches on an accelerator: copied on a stream of their own, ahead of use, so that training does not wait for a copy.

The host never waits either: the loop's stream is told to wait for the copy's event. A batch in main memory is kept
until its copy is done, for its memory is used again when nobody refers to it; the memory on the device is marked as
used by the loop's stream, so a tensor may be kept for as long as one likes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, Final, NamedTuple, Protocol

from numpy.typing import NDArray

from teleloader.output import array_maker, remade
from teleloader_shared.codec import End, Failure, Frame
from teleloader_shared.errors import TeleloaderError

AHEAD: Final = 2
"""Batches that are on the device, or on their way there, before the loop asks for them."""

Transform = Callable[[Any], Any]


class Copy(NamedTuple):
    """A batch on its way to the device."""

    source: Any
    target: Any
    done: Any
    """What tells when it is there."""


class Accelerator(Protocol):
    """A device, and the stream on which batches are copied to it."""

    def begin(self, batch: Any) -> Copy:
        """Have a batch copied, and return at once."""

    def use(self, copy: Copy) -> None:
        """Have the loop's stream wait for a copy, and keep the memory for as long as that stream uses it."""

    def is_done(self, copy: Copy) -> bool:
        """Whether it is there."""

    def wait(self, copy: Copy) -> None:
        """Wait until it is there."""


class Staging:
    """The batches of a pass that are on the device before the loop asks for them.

    Args:
        accelerator: Where to.
        ahead: How many.
    """

    def __init__(self, accelerator: Accelerator, ahead: int = AHEAD) -> None:
        self._accelerator = accelerator
        self._ahead = ahead
        self._begun: dict[int, Copy] = {}
        self._unfinished: deque[Copy] = deque()

    def take(self, frame: Frame, coming: Iterable[Frame]) -> Any:
        """The batch on the device.

        Args:
            frame: The batch.
            coming: Those after it that have arrived.
        """
        k = frame.address.batch
        copy = self._begun.pop(k) if k in self._begun else self._begin(frame)
        self._accelerator.use(copy)
        for later in coming:
            if len(self._begun) >= self._ahead:
                break
            if later.address.batch not in self._begun and not isinstance(later.content, Failure | End):
                with suppress(Exception):  # a transform that fails does so again, at that batch's place
                    self._begun[later.address.batch] = self._begin(later)
        while self._unfinished and self._accelerator.is_done(self._unfinished[0]):
            self._unfinished.popleft()
        return copy.target

    def close(self) -> None:
        """Wait for what is on its way, whose memory is about to be used for something else."""
        while self._unfinished:
            self._accelerator.wait(self._unfinished.popleft())
        self._begun.clear()

    def _begin(self, frame: Frame) -> Copy:
        copy = self._accelerator.begin(frame.content)
        self._unfinished.append(copy)
        return copy


def accelerator_of(device: Any, transform: Transform | None) -> Accelerator | None:
    """The accelerator that `device` names; None for main memory.

    Raises:
        TeleloaderError: When there is no such device.
        ValueError: When there is a transform, and no device.
    """
    if device is None or str(device) == "cpu":
        if transform is not None:
            raise ValueError(f"device_transform needs a device, e.g. device='cuda', was device={device!r}")
        return None
    return TorchAccelerator(device, transform)


class TorchAccelerator:
    """A device of torch's.

    Args:
        device: Which, e.g. ``"cuda:0"``.
        transform: Called with each batch there, on the copies' stream; its result is the batch.

    Raises:
        TeleloaderError: When there is no such device.
    """

    def __init__(self, device: Any, transform: Transform | None) -> None:
        import torch

        self._device = torch.device(device)
        self._transform = transform
        self._module: Any = vars(torch).get(self._device.type)
        if not hasattr(self._module, "Stream") or not self._module.is_available():
            raise TeleloaderError(
                f"device={str(device)!r} needs an accelerator of that type, with streams, and torch finds none here"
            )
        self._stream = self._module.Stream(self._device)
        self._make = array_maker("torch", pin_memory=False)

    def begin(self, batch: Any) -> Copy:
        """Have a batch copied, and return at once."""
        with self._module.stream(self._stream):
            target = remade(batch, self._put)
            if self._transform is not None:
                target = self._transform(target)
            done = self._module.Event()
            done.record(self._stream)
        return Copy(batch, target, done)

    def use(self, copy: Copy) -> None:
        """Have the loop's stream wait for a copy, and keep the memory for as long as that stream uses it."""
        current = self._module.current_stream(self._device)
        current.wait_event(copy.done)
        for tensor in _tensors(copy.target):
            if tensor.device.type == self._device.type:
                tensor.record_stream(current)

    def is_done(self, copy: Copy) -> bool:
        """Whether it is there."""
        done: bool = copy.done.query()
        return done

    def wait(self, copy: Copy) -> None:
        """Wait until it is there."""
        copy.done.synchronize()

    def _put(self, bits: NDArray[Any], dtype_name: str, kind: str) -> Any:
        made = self._make(bits, dtype_name, kind)
        return made.to(self._device, non_blocking=True) if kind == "tensor" else made


def _tensors(batch: Any) -> Iterator[Any]:
    """The tensors of a nested batch."""
    if hasattr(batch, "record_stream"):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple | deque):
        for value in batch:
            yield from _tensors(value)
    elif is_dataclass(batch):
        for field in fields(batch):
            yield from _tensors(getattr(batch, field.name))
