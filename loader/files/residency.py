"""Brings local files into memory ahead of use, at the disk's own speed.

A page fault reads one page and waits for it. Here a file is taken in windows of 4 MiB by sixteen threads.
Of each, blocks of 2 MiB are read as large pages (`loadstone.loader.files.blocks`); ``WILLNEED`` starts the
reads of what is left, which is all of it where the kernel knows no such blocks; ``POPULATE_READ`` waits for
them and maps the pages. On network file systems, and where the first window turns out slow, windows are read
by large sequential ``read`` calls instead, which such file systems serve best; and so is a window that could
not be populated, since these calls say what is wrong with the file or the disk. A prefetch stops at four
fifths of the memory that is free for this process: more would only push out what it brought first. What it
leaves stays readable, lazily.

Ownership: a `Residency` owns its threads; the first starts the others and ends after them. They share a
cursor into the list of windows and the readers of blocks under one lock; each window is worked on by one
thread. A forked child has none of the threads: there, the handle is done. Where no thread can be started,
whoever asks does the work.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from loadstone.errors import AccessError, LoadstoneError, NotFoundError
from loadstone.loader.files import blocks, memory
from loadstone.loader.files.blocks import BlockReader
from loadstone.loader.files.readahead import POPULATE_READ, advise, begin_reading, is_cached, on_network
from loadstone.loader.ranges import ByteRange, split, split_at
from loadstone.loader.source import Progress

WINDOW = 2 * blocks.BLOCK
"""Bytes that one thread asks for at a time."""
THREADS = 16
SLOW = 64 * 1024 * 1024
"""Bytes per second under which the first window counts as slow."""
_SCRATCH = 4 * 1024 * 1024
_BUDGET = 0.8
_PAUSE = 0.001  # seconds in which whoever asked can go on, before threads compete with it


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
        self._windows = [Window(span.file, part) for span in spans for part in split_at(span.range, WINDOW)]
        self._total = sum(window.range.nbytes for window in self._windows)
        self._wanted: dict[str, list[ByteRange]] = {}
        for span in spans:
            self._wanted.setdefault(span.file.name, []).append(span.range)
        self._budget = 0
        self._lock = threading.Lock()
        self._readers: dict[str, BlockReader | None] = {}
        self._next = 0
        self._ready = 0
        self._started = time.monotonic()
        self._ended: float | None = None
        self._error: LoadstoneError | None = None
        self._cancelled = threading.Event()
        self._sequential = any(map(on_network, self._wanted))
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
        self._readers.clear()
        self._ended = time.monotonic()

    def _work(self) -> None:
        scratch = bytearray()
        try:
            while (window := self._take()) is not None:
                began = time.monotonic()
                if self._sequential or not self._populate(window):
                    scratch = scratch or bytearray(_SCRATCH)
                    _read_through(window, scratch, self._cancelled)
                self._finish(window, time.monotonic() - began)
        except LoadstoneError as error:
            self._fail(error)
        except Exception as problem:  # noqa: BLE001  a thread's failure must reach those who wait for it
            self._fail(AccessError(f"reading ahead failed unexpectedly: {problem!r}; try again"))

    def _fail(self, error: LoadstoneError) -> None:
        self._error = error.with_traceback(None)  # which would lead back here
        self._cancelled.set()

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

    def _populate(self, window: Window) -> bool:
        """Bring in and map a window; ``False``: some of it is cut or unreadable, or Linux older than 5.14."""
        window.file.check()
        buffer = window.file.buffer()
        reader = self._reader(window.file)
        left = reader.read(window.range) if reader else [window.range]
        if left:
            begin_reading(window.file.name, buffer, left)
        return advise(buffer, window.range, POPULATE_READ)

    def _reader(self, file: MappedFile) -> BlockReader | None:
        with self._lock:
            name = file.name
            if name not in self._readers:
                cold = blocks.are_known() and not is_cached(name, len(file.buffer()))
                self._readers[name] = BlockReader(name, self._wanted[name]) if cold else None
            return self._readers[name]

    def _finish(self, window: Window, seconds: float) -> None:
        with self._lock:
            first = self._ready == 0
            self._ready += window.range.nbytes
            if first and window.range.nbytes == WINDOW and seconds > WINDOW * THREADS / SLOW:
                self._sequential = True


def _read_through(window: Window, scratch: bytearray, cancelled: threading.Event) -> None:
    for part in split(window.range, len(scratch)):
        if cancelled.is_set():
            return
        with contextlib.suppress(NotFoundError):  # deleted: its map can be used all the same
            window.file.read_into(part.start, memoryview(scratch)[: part.nbytes])
