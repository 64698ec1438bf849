"""Brings local files into memory ahead of use, at the disk's own speed.

A page fault reads one page and waits for it. Here a file is taken in windows of 16 MiB by four threads:
``WILLNEED`` starts the whole window's reads, ``POPULATE_READ`` waits for them and maps the pages. On network
file systems, and where the first window turns out slow, windows are read by large sequential ``read`` calls
instead, which such file systems serve best. A prefetch stops at four fifths of the memory that is free for
this process: more would only push out what it brought first. What it leaves stays readable, lazily.

Ownership: a `Residency` owns its threads; the first starts the others and ends after them. They share a
cursor into the list of windows under one lock; each window is worked on by one thread. A forked child has
none of the threads: there, the handle is done. Where no thread can be started, whoever asks does the work.
"""

import contextlib
import ctypes
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loadstone.errors import LoadstoneError
from loadstone.loader.files import memory
from loadstone.loader.node.filesystem import filesystem_type
from loadstone.loader.ranges import ByteRange, split
from loadstone.loader.source import Progress

WINDOW = 16 * 1024 * 1024
"""Bytes that one thread asks for at a time."""
THREADS = 4
SLOW = 64 * 1024 * 1024
"""Bytes per second under which the first window counts as slow."""
NETWORK_TYPES = {
    0x6969: "nfs",
    0x517B: "smb",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x65735546: "fuse",
    0x01021997: "9p",
    0x5346414F: "afs",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
    0x20030528: "orangefs",
}
"""File systems served over a network, or by a process, by their magic number in ``statfs(2)``."""

_WILLNEED = 3
_POPULATE_READ = 22
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ADVISED = 256 * 1024  # one call starts at most the device's read-ahead, and drops the rest of the advice
_SAMPLE = 8 * 1024 * 1024
_SPARSE = 4 * _SAMPLE  # between the samples of a whole file
_MOST_SAMPLED = 1024 * _SPARSE  # of a larger file, only what is asked for is looked at
_SCRATCH = 4 * 1024 * 1024
_BUDGET = 0.8
_PAUSE = 0.001  # seconds in which whoever asked can go on, before threads compete with it

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # called through ctypes: that lets other threads run
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MappedFile(Protocol):
    """What is needed of a file to bring it in."""

    @property
    def name(self) -> str:
        """Its path."""
        ...

    def buffer(self) -> memoryview:
        """Return its map."""
        ...

    def check(self) -> None:
        """Raise unless it is still the file that was mapped."""
        ...

    def read_into(self, offset: int, into: memoryview) -> None:
        """Read its bytes by system calls, not through the map."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """A range of one mapped file."""

    file: MappedFile
    range: ByteRange


class Residency:
    """Spans of local files on their way into memory; see `loadstone.loader.source.Prefetch`."""

    def __init__(self, spans: Sequence[Window]) -> None:
        self._windows = [Window(span.file, part) for span in spans for part in split(span.range, WINDOW)]
        self._total = sum(window.range.nbytes for window in self._windows)
        self._budget = 0
        self._lock = threading.Lock()
        self._next = 0
        self._ready = 0
        self._started = time.monotonic()
        self._ended: float | None = None
        self._error: LoadstoneError | None = None
        self._cancelled = threading.Event()
        self._sequential = any(map(on_network, {span.file.name for span in spans}))
        self._pid = os.getpid()
        # It starts the others: here, starting each would wait for the ones before it to let go of the map.
        self._first = self._thread(0, self._lead)
        try:
            self._first.start()
        except RuntimeError:  # no thread is to be had
            self._lead()

    def progress(self) -> Progress:
        """Return how far it has come."""
        end = self._ended or time.monotonic()
        return Progress(self._total, self._ready, 0, end - self._started)

    def done(self) -> bool:
        """Say whether no thread of it works any more."""
        return os.getpid() != self._pid or not self._first.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has ended; ``False`` when ``timeout`` seconds went by first."""
        if os.getpid() == self._pid and self._first.ident is not None:
            self._first.join(timeout)
        if not self.done():
            return False
        if self._error is not None:
            raise self._error
        return True

    def cancel(self) -> None:
        """Stop it; each thread first finishes the system call it is in."""
        self._cancelled.set()
        if os.getpid() == self._pid and self._first.ident is not None:
            self._first.join()

    def _thread(self, number: int, work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=work, name=f"loadstone-resident-{number}", daemon=True)

    def _lead(self) -> None:
        others = [self._thread(number, self._work) for number in range(1, min(THREADS, len(self._windows)))]
        started = []
        self._cancelled.wait(_PAUSE)
        self._budget = int(memory.available() * _BUDGET)
        with contextlib.suppress(RuntimeError):  # no more threads are to be had: fewer will do
            for thread in others:
                thread.start()
                started.append(thread)
        self._work()
        for thread in started:
            thread.join()

    def _work(self) -> None:
        scratch = bytearray()
        try:
            while (window := self._take()) is not None:
                began = time.monotonic()
                if self._sequential:
                    scratch = scratch or bytearray(_SCRATCH)
                    _read_through(window, scratch, self._cancelled)
                else:
                    _populate(window)
                self._finish(window, time.monotonic() - began)
        except LoadstoneError as error:
            self._error = error
            self._cancelled.set()
        finally:
            self._ended = time.monotonic()

    def _take(self) -> Window | None:
        with self._lock:
            if self._cancelled.is_set() or self._next == len(self._windows):
                return None
            window = self._windows[self._next]
            self._next += 1
            if window.range.nbytes <= self._budget:
                self._budget -= window.range.nbytes
                return window
            # Past the budget: usable as ever, read when used.
            self._ready += sum(rest.range.nbytes for rest in self._windows[self._next - 1 :])
            self._next = len(self._windows)
            return None

    def _finish(self, window: Window, seconds: float) -> None:
        with self._lock:
            first = self._ready == 0
            self._ready += window.range.nbytes
            if first and window.range.nbytes == WINDOW and seconds > WINDOW * THREADS / SLOW:
                self._sequential = True


def begin_reading(
    path: str, buffer: memoryview, spans: Sequence[ByteRange], sequential: bool = False
) -> None:
    """Have the kernel read ``spans`` of a mapped file, where they are not in memory already.

    Returns without waiting for data, but where ``sequential`` says that the file lies on a network: then the
    spans are read here, in large pieces. Where it cannot be done it is left: it changes no result.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # a sample brings its own page only
        for span in spans:
            if _is_cached(fd, span):
                continue
            if sequential:
                _read_ahead(fd, span)
            else:
                for piece in split(span, _ADVISED):
                    _advise(buffer, piece, _WILLNEED)
    finally:
        os.close(fd)


def is_cached(path: str, size: int) -> bool:
    """Say whether samples of a whole file can all be read without waiting for a disk."""
    if size > _MOST_SAMPLED:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        # From another place each time: a sample that finds nothing brings its own page in, and the next look
        # would find that, and nothing beside it.
        first = random.randrange(min(_SPARSE, max(1, size)))  # noqa: S311  nothing secret
        return _is_cached(fd, ByteRange(min(first, size), size), _SPARSE)
    finally:
        os.close(fd)


def _read_ahead(fd: int, span: ByteRange) -> None:
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    scratch = memoryview(bytearray(min(_SCRATCH, span.nbytes)))
    with contextlib.suppress(OSError):  # reading the tensor itself tells what is wrong
        for piece in split(span, len(scratch)):
            os.preadv(fd, [scratch[: piece.nbytes]], piece.start)


def _is_cached(fd: int, span: ByteRange, stride: int = _SAMPLE) -> bool:
    """Say whether samples of ``span`` can all be read without waiting for a disk.

    Cheap where everything is in memory, unlike advice, which walks all pages. Not by ``mincore``: that
    answers yes to whoever may not write the file.
    """
    one = bytearray(1)
    try:
        for start in range(span.start, span.stop, stride):
            os.preadv(fd, [one], start, os.RWF_NOWAIT)
        os.preadv(fd, [one], span.stop - 1, os.RWF_NOWAIT)
    except OSError:  # EAGAIN: it would wait; EOPNOTSUPP: it cannot be told here
        return False
    return True


def on_network(path: str) -> bool:
    """Say whether ``path`` lies on a file system that is served over a network, or by a process (FUSE)."""
    return filesystem_type(Path(path)) in NETWORK_TYPES


def _populate(window: Window) -> None:
    window.file.check()
    buffer = window.file.buffer()
    begin_reading(window.file.name, buffer, [window.range])
    if _advise(buffer, window.range, _POPULATE_READ) != 0:
        # The file was cut just now, which the check tells, or the kernel is older than 5.14 and does not know
        # the advice: then the reads under way go on, and the first use of each page maps it.
        window.file.check()


def _read_through(window: Window, scratch: bytearray, cancelled: threading.Event) -> None:
    for part in split(window.range, len(scratch)):
        if cancelled.is_set():
            return
        window.file.read_into(part.start, memoryview(scratch)[: part.nbytes])


def _advise(buffer: memoryview, span: ByteRange, advice: int) -> int:
    start = span.start // _PAGE * _PAGE
    stop = min(span.stop, len(buffer))
    if start >= stop:
        return 0
    base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return int(_madvise(base + start, stop - start, advice))


def populate(address: int, nbytes: int) -> None:
    """Map the pages of ``nbytes`` of this process's memory, reading those that are not here, in one call.

    Where the kernel cannot, their first use does it.
    """
    start = address // _PAGE * _PAGE
    _madvise(start, address + nbytes - start, _POPULATE_READ)
