"""Reading ahead of use: whether a file's bytes are in memory, and how to have the kernel bring them.

Nothing here waits for data, but where a file lies on a network, and nothing changes a result: what cannot be
asked for is read when it is used.
"""

import contextlib
import ctypes
import os
import random
from collections.abc import Sequence
from pathlib import Path

from loadstone.loader.node.filesystem import filesystem_type
from loadstone.loader.ranges import ByteRange, split

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

POPULATE_READ = 22
"""Advice of Linux 5.14 and later: read what is not in memory, wait for it, and map it."""

_WILLNEED = 3
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ADVISED = 256 * 1024  # one call starts at most the device's read-ahead, and drops the rest of the advice
_SAMPLE = 8 * 1024 * 1024
_SPARSE = 4 * _SAMPLE  # between the samples of a whole file
_MOST_SAMPLED = 1024 * _SPARSE  # of a larger file, only what is asked for is looked at
_SCRATCH = 4 * 1024 * 1024

_madvise = ctypes.CDLL(None, use_errno=True).madvise  # called through ctypes: that lets other threads run
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def begin_reading(
    path: str, buffer: memoryview, spans: Sequence[ByteRange], sequential: bool = False
) -> None:
    """Have the kernel read ``spans`` of a mapped file, where they are not in memory already.

    Returns without waiting for data, but where ``sequential`` says that the file lies on a network: then the
    spans are read here, in large pieces. Where it cannot be done it is left: it changes no result.
    """
    fd = _open(path)
    try:
        for span in spans:
            if fd is not None and _is_cached(fd, span):
                continue
            if fd is not None and sequential:
                _read_ahead(fd, span)
            else:  # the map takes advice also where the file was deleted, or no descriptor is left
                for piece in split(span, _ADVISED):
                    advise(buffer, piece, _WILLNEED)
    finally:
        if fd is not None:
            os.close(fd)


def is_cached(path: str, size: int) -> bool:
    """Say whether samples of a whole file can all be read without waiting for a disk."""
    if size > _MOST_SAMPLED:
        return False
    fd = _open(path)
    if fd is None:
        return False
    try:
        # From another place each time: a sample that finds nothing brings its own page in, and the next look
        # would find that, and nothing beside it.
        first = random.randrange(min(_SPARSE, max(1, size)))  # noqa: S311  nothing secret
        return _is_cached(fd, ByteRange(min(first, size), size), _SPARSE)
    finally:
        os.close(fd)


def _open(path: str) -> int | None:
    """Open a file to look at samples of it, each of which brings in its own page only."""
    try:
        # Non-blocking, so that a pipe that took the file's place is not waited for.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    except OSError:  # a pipe
        os.close(fd)
        return None
    return fd


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


def advise(buffer: memoryview, span: ByteRange, advice: int) -> bool:
    """Give ``advice`` on the pages of ``span`` of a map; say whether the kernel could take it."""
    start = span.start // _PAGE * _PAGE
    stop = min(span.stop, len(buffer))
    if start >= stop:
        return True
    base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return bool(_madvise(base + start, stop - start, advice) == 0)


def populate(address: int, nbytes: int) -> None:
    """Map the pages of ``nbytes`` of this process's memory, reading those that are not here, in one call.

    Where the kernel cannot, their first use does it.
    """
    start = address // _PAGE * _PAGE
    _madvise(start, address + nbytes - start, POPULATE_READ)
