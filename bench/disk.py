"""Cold and warm, proved; and how fast the disk itself is.

A benchmark that says "cold" must show it: files are dropped from the page cache by ``posix_fadvise``, which
silently keeps pages that are dirty or mapped by anyone, and then ``mincore`` counts what is still there.

The disk's own limit is the best of raw reads of the very files, which make nothing usable: past the page
cache (``O_DIRECT``), and by plain reads, both into memory that is used again and again. Beside it, what
reading past the page cache takes when each byte gets memory of its own, as those of a loaded checkpoint do.
"""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from loadstone.bench.runner import CannotRun
from loadstone.display import human_bytes
from loadstone.errors import BenchError

PIECE = 16 * 1024 * 1024
"""Bytes of one raw read."""
THREADS = 4
"""Raw reads under way at a time."""

_PAGE = mmap.PAGESIZE
_STRAY = 0.001  # share of a dropped file that other readers of the machine may have brought back at once
_TRIES = 5
_RESIDENT = bytes(
    value & 1 for value in range(256)
)  # of a byte of mincore's answer, only the lowest bit counts

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident_bytes(files: Iterable[Path]) -> int:
    """Return how many bytes of ``files`` are in the page cache, as ``mincore`` says.

    Of a file that one may not write ``mincore`` says that all of it is: only one's own files can be judged.
    """
    return sum(_resident(path) for path in files)


def make_cold(files: Sequence[Path]) -> str:
    """Drop ``files`` from the page cache; return the proof in words.

    Raises
    ------
    BenchError
        They stay: the pages are in use by another process, or the file system keeps them.
    """
    total = sum(path.stat().st_size for path in files)
    left = total
    for attempt in range(_TRIES):
        time.sleep(0.1 * attempt)
        for path in files:
            _drop(path)
        left = resident_bytes(files)
        if left <= total * _STRAY:
            return f"page cache: {human_bytes(left)} of {human_bytes(total)} there"
    raise BenchError(
        f"{human_bytes(left)} of {files[0].parent} stay in the page cache, so nothing cold can be measured; "
        "let nobody else use the folder, or choose one on a disk with --work"
    )


def make_warm(files: Sequence[Path]) -> str:
    """Bring ``files`` into the page cache; return the proof in words.

    Raises
    ------
    BenchError
        They do not fit into memory.
    """
    scratch = bytearray(PIECE)
    total, there = sum(path.stat().st_size for path in files), 0
    for _ in range(_TRIES):  # the kernel may take pages back meanwhile, for others or ahead of need
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(scratch):
                    pass
        there = resident_bytes(files)
        if there >= total:
            return f"page cache: {human_bytes(there)} of {human_bytes(total)} there"
    raise BenchError(
        f"only {human_bytes(there)} of {human_bytes(total)} stay in the page cache; "
        "free memory, or choose a smaller --size"
    )


def read_direct(files: Sequence[Path]) -> int:
    """Read ``files`` past the page cache, into memory that is used again; return the bytes read.

    Raises
    ------
    CannotRun
        The file system knows no ``O_DIRECT``.
    """
    return _read_all(files, _direct(files), touched_buffers())


def read_plainly(files: Sequence[Path]) -> int:
    """Read ``files`` through the page cache, into memory that is used again; return the bytes read."""
    return _read_all(files, os.O_RDONLY, touched_buffers())


def read_and_keep(files: Sequence[Path]) -> int:
    """Read ``files`` past the page cache, each byte into memory of its own; return the bytes read.

    What a loader has to do at least: new memory costs time too, on virtual machines more than the disk.

    Raises
    ------
    CannotRun
        The file system knows no ``O_DIRECT``.
    """
    flags = _direct(files)
    kept = _buffer(sum(-(-path.stat().st_size // PIECE) * PIECE for path in files))
    return _read_all(files, flags, [kept], keep=True)


def _direct(files: Sequence[Path]) -> int:
    flags = os.O_RDONLY | os.O_DIRECT
    try:
        os.close(os.open(files[0], flags))
    except OSError as error:
        raise CannotRun(f"{files[0].parent} has no O_DIRECT: {error.strerror}") from None
    return flags


def touched_buffers() -> list[mmap.mmap]:
    """Return one aligned buffer for each thread, in huge pages if possible, with every page there already."""
    buffers = [_buffer(PIECE) for _ in range(THREADS)]
    for buffer in buffers:
        buffer.write(b"\1" * PIECE)
    return buffers


def _buffer(size: int) -> mmap.mmap:
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def _read_all(files: Sequence[Path], flags: int, buffers: Sequence[mmap.mmap], *, keep: bool = False) -> int:
    """Read in threads, into a buffer for each, or everything side by side into one that keeps it."""
    starts = ((path, start) for path in files for start in range(0, path.stat().st_size, PIECE))
    pieces = list(enumerate(starts))
    handles = {path: os.open(path, flags) for path in files}
    lock, counts, failures = threading.Lock(), [0], list[OSError]()

    def work(buffer: memoryview) -> None:
        try:
            while True:
                with lock:
                    if not pieces:
                        return
                    number, (path, start) = pieces.pop(0)
                at = number * PIECE if keep else 0
                count = os.preadv(handles[path], [buffer[at : at + PIECE]], start)
                with lock:
                    counts[0] += count
        except OSError as error:
            failures.append(error)

    views = [memoryview(buffer) for buffer in buffers]
    try:
        _in_threads(work, views * THREADS if keep else views)
    finally:
        for handle in handles.values():
            os.close(handle)
    if failures:
        raise BenchError(f"{files[0].parent} cannot be read: {failures[0].strerror}; see the system's log")
    return counts[0]


def _in_threads(work: Callable[[memoryview], None], buffers: Sequence[memoryview]) -> None:
    threads = [threading.Thread(target=work, args=(buffer,)) for buffer in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _resident(path: Path) -> int:
    size = path.stat().st_size
    if size == 0:
        return 0
    fd = os.open(path, os.O_RDONLY)
    try:
        window = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)  # its address can only be had of a writable one
    finally:
        os.close(fd)
    with window:
        pages = -(-size // _PAGE)
        answer = ctypes.create_string_buffer(pages)
        first = ctypes.c_char.from_buffer(window)
        failed = _mincore(ctypes.addressof(first), size, answer)
        del first  # the map cannot be closed while something points into it
    if failed:
        raise BenchError(f"mincore does not answer for {path}: {os.strerror(ctypes.get_errno())}")
    return min(size, answer.raw[:pages].translate(_RESIDENT).count(1) * _PAGE)
