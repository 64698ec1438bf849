"""Copies host tensors to a CUDA device, several at a time.

Bytes go through page-locked buffers of bounded size: while some are on their way over the bus, on a stream of
its own, a crew of threads fills others. A tensor is of the memory of the stream that was the caller's current
one when the writer was made; once it is finished, it is complete for every kernel that this stream gets
afterwards, and shares no memory with the buffers. For use on another stream, torch's usual rules hold
(``wait_stream``, ``record_stream``). A full device is torch's own ``OutOfMemoryError``.

Ownership: a `DeviceWriter` belongs to one thread, which alone speaks to CUDA. A buffer is taken in turn, by
that thread; it is then one crew thread's until that has filled it, and the bus's until the buffer's event.
The two streams wait for each other on the device; this thread waits only for a buffer.
"""

import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from loadstone.loader.ranges import ByteRange, split
from loadstone.loader.tensors.crew import Crew

PIECE = 4 * 1024 * 1024
"""Bytes of each page-locked buffer; there are two for each of at most eight threads."""


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor
    free: torch.cuda.Event
    filled: threading.Lock = field(default_factory=threading.Lock)


class DeviceWriter:
    """Copies host tensors to one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        if (
            device.type == "cuda" and device.index is None
        ):  # the current one may be another at the next tensor
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._caller = torch.cuda.current_stream(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
        self._crew = Crew()
        self._idle: deque[_Buffer] = deque()  # the one used longest ago first
        self._made = 0
        self._filling: deque[tuple[_Buffer, torch.Tensor]] = deque()  # and where its bytes belong
        self._begun = self._sent = 0  # pieces

    def begin(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Begin to copy a contiguous tensor; return what will be the copy, and the turn to finish it at."""
        with torch.cuda.stream(self._caller):  # whose memory it is
            target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if tensor.numel():
            source, there = (flat.reshape(-1).view(torch.uint8) for flat in (tensor, target))
            self._stream.wait_stream(self._caller)  # the memory may still be in use by work queued there
            for part in split(ByteRange(0, source.numel()), PIECE):
                self._fill(source[part.start : part.stop], there[part.start : part.stop])
        return target, self._begun

    def finished(self, turn: int) -> bool:
        """Say whether `finish` would not have to wait."""
        return self._sent >= turn

    def finish(self, turn: int) -> None:
        """Queue the rest of the copy with this turn, and let the caller's stream wait for it."""
        while self._sent < turn:
            self._send()
        self._caller.wait_stream(self._stream)

    def close(self) -> None:
        """Wait until nothing is on its way; what was begun and not finished holds no sensible bytes."""
        self._crew.close()
        self._filling.clear()
        self._caller.wait_stream(self._stream)  # which gets the memory of unfinished copies back
        self._stream.synchronize()

    def _fill(self, source: torch.Tensor, there: torch.Tensor) -> None:
        buffer = self._free_buffer()
        buffer.filled = self._crew.copy(buffer.memory[: source.numel()], source)
        self._filling.append((buffer, there))
        self._begun += 1
        while self._filling and not self._filling[0][0].filled.locked():
            self._send()

    def _free_buffer(self) -> _Buffer:
        another = self._idle and self._idle[0].free.query()
        if self._made < 2 * self._crew.size and not another:
            self._made += 1
            return _Buffer(_page_locked(PIECE), _event())
        if not self._idle:
            self._send()
        buffer = self._idle.popleft()
        buffer.free.synchronize()
        return buffer

    def _send(self) -> None:
        """Put the piece whose turn it is onto the bus, as soon as it is in its buffer."""
        buffer, there = self._filling[0]
        with buffer.filled:
            self._filling.popleft()
        with torch.cuda.stream(self._stream):
            there.copy_(buffer.memory[: there.numel()], non_blocking=True)
            buffer.free.record(self._stream)
        self._idle.append(buffer)
        self._sent += 1


def _page_locked(size: int) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # no more memory may be locked: slower, and as right, since CUDA then copies at once
        return torch.empty(size, dtype=torch.uint8, device="cpu")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
