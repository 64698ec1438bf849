"""Moves tensors to an accelerator while others are still arriving.

Bytes go through two page-locked buffers of bounded size: while one is on its way over the bus, on a stream
of its own, the other is being filled. A tensor handed out is of the memory of the stream that was the
caller's current one when it asked, is complete for every kernel queued there afterwards, and shares no memory
with the buffers; for use on another stream, torch's usual rules hold (``wait_stream``, ``record_stream``).
A full device is torch's own ``OutOfMemoryError``.

Ownership: a `DeviceWriter` belongs to one thread, its two buffers to it alone; each has an event that says
when the copy out of it is over. The two streams wait for each other on the device; this thread waits only for
a buffer to be free.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from loadstone.errors import SettingsError
from loadstone.loader.ranges import ByteRange, split

STAGING = 16 * 1024 * 1024
"""Bytes of each of the two page-locked buffers."""


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor
    free: torch.cuda.Event


class DeviceWriter:
    """Copies host tensors to one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        if (
            device.type == "cuda" and device.index is None
        ):  # the current one may be another at the next tensor
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
        self._buffers = [_Buffer(_page_locked(STAGING), _event()) for _ in range(2)]
        self._turn = 0

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a contiguous host tensor on the device."""
        if tensor.numel() == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source = tensor.reshape(-1).view(torch.uint8)
        target = torch.empty(source.numel(), dtype=torch.uint8, device=self._device)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # the target's memory may still be in use by work queued there
        try:
            for part in split(ByteRange(0, source.numel()), STAGING):
                self._send(source[part.start : part.stop], target[part.start : part.stop])
        finally:  # also when cut short: the target's memory goes back to that stream, with copies under way
            current.wait_stream(self._stream)
        return target.view(tensor.dtype).view(tensor.shape)

    def close(self) -> None:
        """Wait until nothing is on its way out of the buffers."""
        self._stream.synchronize()

    def _send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        buffer = self._buffers[self._turn]
        self._turn = 1 - self._turn
        buffer.free.synchronize()
        staged = buffer.memory[: source.numel()]
        staged.copy_(source)
        with torch.cuda.stream(self._stream):
            target.copy_(staged, non_blocking=True)
            buffer.free.record(self._stream)


def parse_device(device: str | int | torch.device) -> torch.device:
    """Return a torch device; a plain number is that CUDA device.

    Raises
    ------
    SettingsError
        Torch knows no such device, or it is not on this machine.
    """
    try:
        parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SettingsError(f"device {device!r} is not one that torch knows: {_first_line(error)}") from None
    if parsed.type == "cuda":
        _check_cuda(parsed)
    elif parsed.type not in ("cpu", "meta"):
        try:
            torch.empty(0, device=parsed)
        except (RuntimeError, AssertionError, ImportError) as error:
            raise SettingsError(
                f"device {device!r} cannot be used: {_first_line(error)}; use 'cpu'"
            ) from None
    return parsed


def to_device(
    tensors: Iterable[tuple[str, torch.Tensor]], device: str | int | torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Return named tensors on ``device``, in the order in which they come; on the CPU, as they are."""
    place = parse_device(device)
    return _written(tensors, place) if place.type == "cuda" else _moved(tensors, place)


def _written(
    tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    writer = DeviceWriter(device)
    try:
        for name, tensor in tensors:
            yield name, writer.put(tensor)
    finally:
        writer.close()


def _moved(
    tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield name, tensor.to(device)


def _check_cuda(device: torch.device) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise SettingsError(f"device '{device}' is not there: this torch sees no CUDA device; use 'cpu'")
    if device.index is not None and device.index >= count:
        raise SettingsError(f"device '{device}' is not there: this torch sees {count}, numbered from 0")


def _page_locked(size: int) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # no more memory may be locked: slower, and as right, since CUDA then copies at once
        return torch.empty(size, dtype=torch.uint8, device="cpu")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
