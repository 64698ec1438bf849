"""Locks that vanish with their holder: open-file-description locks, and the descriptors that carry them.

A lock belongs to one *description*, which is why every holder opens its own: a duplicate would share the
lock, and an inherited one would keep it alive in a forked child. `open_own` therefore opens close-on-exec
and remembers the descriptor, and a forked child closes all it inherited, without ever unlocking (an unlock
through the shared description would drop the parent's lock). Fork waits while a descriptor is between its
opening and its being remembered, or being closed; nothing else is serialised here.

No call blocks. Whoever waits for a lock polls at the intervals of `pauses`, so that waiting can be
cancelled, and so that the death of the holder ends it.
"""

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator

from loadstone.errors import CacheError
from loadstone.loader.ranges import ByteRange

_FLOCK = struct.Struct("hhqqi4x")
_SHORTEST, _LONGEST = 0.001, 0.02

_guard = threading.RLock()  # a finaliser may close descriptors while its thread opens one
_own: set[int] = set()


def open_own(path: str | os.PathLike[str], flags: int = os.O_RDWR) -> int:
    """Open a file as a new description of this process alone; forked children close it."""
    with _guard:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        _own.add(fd)
    return fd


def close_own(fd: int) -> None:
    """Close what `open_own` opened, releasing its locks; nothing happens when a fork closed it already."""
    with _guard:
        if fd in _own:
            _own.remove(fd)
            os.close(fd)


def _close_in_child() -> None:
    while _own:
        os.close(_own.pop())
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_in_child)


def try_lock(fd: int, start: int, length: int, *, shared: bool = False) -> bool:
    """Lock ``length`` bytes from ``start`` through the description ``fd``; ``False`` when another has them.

    Raises
    ------
    CacheError
        The file system has no such locks.
    """
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            return False
        raise CacheError(f"the cache's file system cannot lock files: {error}; use a local disk") from error
    return True


def unlock(fd: int, start: int, length: int) -> None:
    """Give up a part of what the description ``fd`` has locked."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, length, 0))


def conflict(fd: int, start: int, length: int) -> ByteRange | None:
    """Return one range, within the bytes asked about, that another description has locked in any way."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind, _, found, count, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    if kind == fcntl.F_UNLCK:
        return None
    stop = found + count if count else start + length
    return ByteRange(max(start, found), min(start + length, stop))


def pauses() -> Iterator[float]:
    """Yield the seconds to sleep between polls: 1 ms at first, 20 ms in the long run."""
    pause = _SHORTEST
    while True:
        yield pause
        pause = min(pause * 1.5, _LONGEST)


def wait_for_turn(fd: int, start: int, seconds: float) -> bool:
    """Lock one byte through the description ``fd``; ``False`` when another had it for all of ``seconds``."""
    deadline = time.monotonic() + seconds
    for pause in pauses():
        if try_lock(fd, start, 1):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return False
