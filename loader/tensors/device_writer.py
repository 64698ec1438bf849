"""Copies host tensors to a CUDA device, many in one go.

Bytes go through page-locked buffers of bounded size: while some are on their way over the bus, on a stream of
its own, a crew of threads fills others. A buffer takes what comes in a row, several tensors or a part of one:
fewer, larger pieces cost less of this thread, which is what limits the rate. A tensor is of the memory of the
stream that was the caller's current one when the writer was made; once it is finished, it is complete for
every kernel that this stream gets afterwards, and shares no memory with the buffers. For use on another
stream, torch's usual rules hold (``wait_stream``, ``record_stream``). A full device is torch's own
``OutOfMemoryError``.

Ownership: a `DeviceWriter` belongs to one thread, which alone speaks to CUDA. A buffer is packed by that
thread; it is then one crew thread's until that has filled it, and the bus's until the buffer's event. The two
streams wait for each other on the device; this thread waits only for a buffer.
"""

import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from loadstone.loader.tensors.crew import Crew, Run

PIECE = 8 * 1024 * 1024
"""Bytes of each page-locked buffer; there are two more than threads, which are at most six."""


@dataclass(slots=True)
class _Buffer:
    """Page-locked memory, and what is packed into it.

    Attributes
    ----------
    runs : list of Run
        What to copy into it, neighbours as one.
    parts : list of tuple
        First and last byte of each piece of a tensor, and its place on the device.
    owners : list
        Whose memory the runs read.
    """

    memory: torch.Tensor
    free: torch.cuda.Event
    filled: threading.Lock = field(default_factory=threading.Lock)
    used: int = 0
    runs: list[Run] = field(default_factory=list)
    parts: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    owners: list[torch.Tensor] = field(default_factory=list)

    def add(self, source: torch.Tensor, address: int, there: torch.Tensor) -> None:
        """Take the bytes at ``address``, of ``source``, for ``there``."""
        nbytes, to = there.numel(), self.memory.data_ptr() + self.used
        last = self.runs[-1] if self.runs else (0, 0, 0)
        if (last[0] + last[2], last[1] + last[2]) == (to, address):
            self.runs[-1] = (last[0], last[1], last[2] + nbytes)
        else:
            self.runs.append((to, address, nbytes))
        self.parts.append((self.used, self.used + nbytes, there))
        self.owners.append(source)
        self.used += nbytes


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
        self._open: _Buffer | None = None  # being packed
        self._filling: deque[_Buffer] = deque()
        self._closed = self._sent = 0  # how many buffers were packed, and are on the bus or were
        self._news = False  # whether the caller's stream does not wait for all of them yet

    def begin(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Begin to copy a contiguous tensor; return what will be the copy, and the turn to finish it at."""
        with torch.cuda.stream(self._caller):  # whose memory it is
            target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if tensor.numel():
            source, there = (flat.reshape(-1).view(torch.uint8) for flat in (tensor, target))
            address, size, at = source.data_ptr(), source.numel(), 0
            while at < size:
                buffer = self._open = self._open or self._free_buffer()
                stop = min(size, at + PIECE - buffer.used)
                buffer.add(source, address + at, there[at:stop])
                at = stop
                if buffer.used == PIECE:
                    self._fill()
        return target, self._closed + (self._open is not None)

    def finished(self, turn: int) -> bool:
        """Say whether `finish` would not have to wait."""
        return self._sent >= turn

    def finish(self, turn: int) -> None:
        """Queue the rest of the copy with this turn, and let the caller's stream wait for it."""
        if self._closed < turn:
            self._fill()
        while self._sent < turn:
            self._send()
        if self._news:
            self._caller.wait_stream(self._stream)
            self._news = False

    def close(self) -> None:
        """Wait until nothing is on its way; what was begun and not finished holds no sensible bytes."""
        try:
            self._crew.close()
        finally:  # whoever is interrupted again and again must not get memory that the bus still writes to
            self._filling.clear()
            self._open = None
            self._caller.wait_stream(self._stream)  # which gets the memory of unfinished copies back
            self._stream.synchronize()

    def _fill(self) -> None:
        """Let the crew fill the buffer that is packed, and put onto the bus what it has filled by now."""
        buffer, self._open = self._open, None
        assert buffer is not None
        buffer.filled = self._crew.copy(buffer.runs, (buffer.owners, buffer.memory))
        self._filling.append(buffer)
        self._closed += 1
        while self._filling and not self._filling[0].filled.locked():
            self._send()

    def _free_buffer(self) -> _Buffer:
        ready = self._idle and self._idle[0].free.query()  # type: ignore[no-untyped-call]  # likewise
        if self._made < self._crew.size + 2 and not ready:
            self._made += 1
            return _Buffer(_page_locked(PIECE), _event())
        if not self._idle:
            self._send()
        buffer = self._idle.popleft()
        buffer.free.synchronize()
        return buffer

    def _send(self) -> None:
        """Put the buffer whose turn it is onto the bus, as soon as it is filled."""
        buffer = self._filling[0]
        with buffer.filled:
            self._filling.popleft()
        self._stream.wait_stream(self._caller)  # new tensors' memory may still be in use by work queued there
        with torch.cuda.stream(self._stream):
            for start, stop, there in buffer.parts:
                there.copy_(buffer.memory[start:stop], non_blocking=True)
            buffer.free.record(self._stream)
        self._sent += 1
        self._news = True
        buffer.used, buffer.runs, buffer.parts, buffer.owners = 0, [], [], []
        self._idle.append(buffer)


def _page_locked(size: int) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:  # no more memory may be locked: slower, and as right, since CUDA then copies at once
        return torch.empty(size, dtype=torch.uint8, device="cpu")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch gives it no types
