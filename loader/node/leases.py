"""Who uses which blob of the node cache, told by locks and therefore never out of date.

One file holds them all. A process that uses a blob has a shared lock on one byte of it: the blob's number
times 2**22, plus its process id. Evicting takes the blob's whole range exclusively, which fails while
anyone uses it; listing asks the kernel which bytes are locked, and so learns the ids. A process needs a
single descriptor for all its leases. Two blobs that share a number are never evicted wrongly, only late.

One more range of that kind says which processes have a thread that is blocked on bytes.

Ownership: `Leases` is used by all threads of a process; ``_lock`` guards its counts and descriptor, and is
never waited for when a lease ends, because finalisers end leases. A forked child takes its own leases on
first use, through a description of its own.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loadstone.loader.node.forks import renew_in_child
from loadstone.loader.node.locks import close_own, conflict, open_own, pauses, try_lock, unlock
from loadstone.loader.ranges import ByteRange

_SPAN = 1 << 22  # more than any process id
_DEMAND = 1 << 62


class Leases:
    """The leases of one cache folder.

    Parameters
    ----------
    reopen : Callable
        Opens the file that carries the locks, by `open_own`; nothing is written to it.
    """

    def __init__(self, reopen: Callable[[], int]) -> None:
        self._open = reopen
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}
        self._dropped: deque[int] = deque()
        self._own: list[int] = []  # the descriptor, once there is one
        close_own(self._open())
        weakref.finalize(self, _close_all, self._own)
        renew_in_child(self)

    def current(self) -> bool:
        """Say whether other processes that begin now use the same file."""
        with self._lock:
            fd = self._open()
            try:
                return os.path.sameopenfile(self._description(), fd)
            finally:
                close_own(fd)

    def take(self, key: str, seconds: float) -> bool:
        """Use the blob ``key``; ``False`` when it was being evicted for longer than ``seconds``."""
        return self._share(_base(key), seconds)

    def drop(self, key: str) -> None:
        """Use it no longer, as often as it was taken."""
        self._unshare(_base(key))

    @contextmanager
    def alone(self, key: str) -> Iterator[bool]:
        """Give ``True`` while nobody uses the blob ``key``, nor can begin to."""
        with self._lock:
            self._settle()
        fd = self._open()
        try:
            yield try_lock(fd, _base(key), _SPAN)
        finally:
            close_own(fd)

    def users(self, key: str) -> list[int]:
        """Return the ids of the processes that use the blob ``key``."""
        with self._lock:
            self._settle()
        fd = self._open()
        try:
            found: list[int] = []
            ranges = [ByteRange(_base(key), _base(key) + _SPAN)]
            while ranges:
                asked = ranges.pop()
                # The kernel names any one lock, not the first: what lies on both sides of it is left to ask.
                lock = conflict(fd, asked.start, asked.nbytes) if asked.nbytes else None
                if lock is not None:
                    ranges += [ByteRange(asked.start, lock.start), ByteRange(lock.stop, asked.stop)]
                    if lock.nbytes == 1:
                        found.append(lock.start - _base(key))
            return sorted(found)
        finally:
            close_own(fd)

    def begin_demand(self) -> None:
        """Tell other processes that a thread of this one is blocked on bytes, if the file is still there."""
        with suppress(OSError):
            self._share(_DEMAND, 0)

    def end_demand(self) -> None:
        """Undo one `begin_demand`."""
        self._unshare(_DEMAND)

    def foreign_demand(self) -> bool:
        """Say whether a thread of another process is blocked on bytes."""
        with self._lock, suppress(OSError):
            self._settle()
            return conflict(self._description(), _DEMAND, _SPAN) is not None
        return False  # the file is gone, and the others with it

    def _description(self) -> int:
        if not self._own:
            self._own.append(self._open())
            for base in self._counts:
                try_lock(self._own[0], base + os.getpid(), 1, shared=True)
        return self._own[0]

    def _share(self, base: int, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        for pause in pauses():
            with self._lock:
                self._settle()
                fd = self._description()
                if base in self._counts or try_lock(fd, base + os.getpid(), 1, shared=True):
                    self._counts[base] = self._counts.get(base, 0) + 1
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
        return False

    def _unshare(self, base: int) -> None:
        # A finaliser may come here while its own thread, or another, is in the middle of something: then the
        # next to use the lock does it.
        self._dropped.append(base)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._dropped:
            base = self._dropped.popleft()
            left = self._counts.pop(base, 0) - 1
            if left > 0:
                self._counts[base] = left
            elif left == 0 and self._own:
                unlock(self._own[0], base + os.getpid(), 1)

    def reset_in_child(self) -> None:
        """Forget the parent's description; the child's own leases follow on first use."""
        self._lock = threading.Lock()
        self._own.clear()


def _close_all(fds: list[int]) -> None:
    while fds:
        close_own(fds.pop())


def _base(key: str) -> int:
    return int(key[:10], 16) * _SPAN


_shared: dict[tuple[Path, int], Leases] = {}


def shared_leases(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Leases:
    """Return this process's leases at ``path``: one descriptor serves all who use that cache.

    With ``os.O_RDONLY`` as ``flags`` they can be taken, which needs no right to write, and seen.
    """
    key = path.absolute(), flags
    found = _shared.get(key)
    if found is None or not found.current():
        found = _shared[key] = Leases(lambda: open_own(key[0], flags | os.O_NOFOLLOW))
    return found
