"""One version of one object on this node: a sparse file, and a map that says which blocks have arrived.

The map has one byte for each block of 64 KiB: 1 once the block's bytes are in the data file. Whoever fills
blocks *claims* them first: a lock on their bytes of the map, then a second look at the map. Bytes are
written with ``pwrite``, then their blocks' map bytes, and the claim ends with its description, so that death
at any instant leaves complete blocks marked and all others free for the next process.

Where a block cannot go to the file (no room, the file is gone, or its holder in another process does not
move), it goes into this process's own pages of the map, and stays missing for everyone else.

Ownership: a blob is shared by all threads. ``_changed`` guards ``_have`` (blocks usable in this process),
``_claimed`` (blocks a thread of this process is filling) and ``_private`` (blocks whose pages were cut
loose from the file: once set, the file's map says nothing about them any more, not even if a fork or an
error comes before they are filled). A claim belongs to the thread that made it. No lock of another process
is ever waited for here.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator

from loadstone.loader.files.mapping import map_anonymous, map_private, replace_by_anonymous
from loadstone.loader.files.paging import Paging
from loadstone.loader.node.claims import DEMAND_AT, Claim, PrivateClaim, SharedClaim
from loadstone.loader.node.forks import renew_in_child
from loadstone.loader.node.locks import close_own, conflict, try_lock, unlock
from loadstone.loader.node.notices import warn_once
from loadstone.loader.node.places import GoneError, Place
from loadstone.loader.ranges import BLOCK, ByteRange, block_count, to_blocks

_ONES = bytes(1 if value == 1 else 0 for value in range(256))


class StoredBlob:
    """See the module's description.

    Parameters
    ----------
    name : str
        For messages.
    size : int
        Length of the object.
    place : Place or None
        Its files; ``None`` keeps the object in this process's own memory.
    on_complete : Callable or None
        Called once, from whichever thread, when every block is in the files; must not block.
    on_close : Callable or None
        Called once, when the blob is closed or garbage.
    """

    def __init__(
        self,
        name: str,
        size: int,
        place: Place | None = None,
        on_complete: Callable[[], None] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.size = size
        self.place = place
        blocks = block_count(size)
        self._have = bytearray(blocks)
        self._claimed = bytearray(blocks)
        self._private = bytearray(blocks)
        self._changed = threading.Condition()
        self._changes = 0
        self._on_complete = on_complete
        self._closing = None if on_close is None else weakref.finalize(self, on_close)
        self.view = self._map()
        renew_in_child(self)
        self._refresh(0, blocks)
        self.paging = self._begin_paging()

    def _begin_paging(self) -> Paging | None:
        """Return what sees to reading from the disk: what is found here may have left memory again."""
        path = self.place.data_path if self.place is not None else ""
        if not path or self._have.find(1, 1) < 0:  # the first block comes with every opening
            return None
        return Paging(path, 0 if 0 in self._have else self.size)

    def _map(self) -> memoryview:
        if self.place is None:
            return map_anonymous(self.size)
        fd = self.place.open_data()
        try:
            return map_private(fd, self.size, self.place.data_at)
        finally:
            close_own(fd)

    def ready(self, span: ByteRange) -> bool:
        """Say whether all of ``span`` can be used, after a look at what other processes did."""
        return not self.missing(span)

    def missing(self, span: ByteRange, *, look: bool = True) -> list[ByteRange]:
        """Return the runs of blocks of ``span`` that cannot be used yet, as byte ranges.

        ``look=False`` leaves out the look at what other processes did.
        """
        first, last = self._block_numbers(span)
        if self._have.find(0, first, last) < 0:
            return []
        if look:
            self._refresh(first, last)
        runs = []
        with self._changed:
            start = self._have.find(0, first, last)
            while start >= 0:
                stop = _end(self._have.find(1, start, last), last)
                runs.append(self._bytes(start, stop))
                start = self._have.find(0, stop, last)
        return runs

    def look(self, span: ByteRange) -> None:
        """See which blocks of ``span`` other processes have brought."""
        first, last = self._block_numbers(span)
        if self._have.find(0, first, last) >= 0:
            self._refresh(first, last)

    def changes(self) -> int:
        """Return a number that grows whenever blocks become usable or free."""
        return self._changes

    def wait(self, changes: int, seconds: float) -> None:
        """Wait until `changes` differs from ``changes``, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != changes, seconds)

    def claim(self, span: ByteRange, *, private: bool = False) -> Claim | None:
        """Claim the first run of blocks of ``span`` that are missing and that nobody else is filling.

        ``private`` takes no notice of other processes and fills this process's own pages.

        Returns
        -------
        Claim or None
            ``None`` when nothing is missing, or all that is missing is being filled.
        """
        first, last = self._block_numbers(span)
        while (run := self._reserve(first, last)) is not None:
            first, stop, own_pages = run
            try:
                claim = self._claim_run(first, stop, own_pages or private)
            except BaseException:
                self._release(first, stop)
                raise
            if claim is not None:
                return claim
            self._release(first, stop)
            first = stop
        return None

    def claimable(self, span: ByteRange) -> bool:
        """Say whether `claim` would probably find something: cheaper than trying."""
        first, last = self._block_numbers(span)
        with self._changed:
            runs = list(self._free_runs(first, last))
        place = self.place
        if place is None or not runs:
            return bool(runs)
        try:
            fd = place.open_map()
        except (OSError, GoneError):
            return True
        try:
            taken = (conflict(fd, place.map_at + run[0], run[1] - run[0]) for run in runs)
            return any(
                lock is None or lock.nbytes < run[1] - run[0] for lock, run in zip(taken, runs, strict=True)
            )
        finally:
            close_own(fd)

    def demand(self, span: ByteRange) -> int | None:
        """Let the processes that fill ``span`` know that this thread is blocked on it.

        Returns
        -------
        int or None
            A descriptor that carries the message until `close_own`, or death; ``None``: nobody to tell.
        """
        place = self.place  # another thread may spill
        if place is None:
            return None
        try:
            fd = place.open_map()
        except (OSError, GoneError):
            return None
        first, last = self._block_numbers(span)
        if last > first:
            try_lock(fd, DEMAND_AT + place.map_at + first, last - first, shared=True)
        return fd

    def deposit(self, data: bytes) -> None:
        """Take the object's first bytes, which arrived with a look at it; what is there already stays."""
        if len(data) < min(BLOCK, self.size):
            return
        whole = ByteRange(0, len(data) if len(data) == self.size else len(data) // BLOCK * BLOCK)
        with memoryview(data) as view:
            while (claim := self.claim(whole)) is not None:
                try:
                    span = claim.range
                    claim.write(span.start, view[span.start : min(span.stop, whole.stop)])
                finally:
                    claim.close()

    def nudge(self) -> None:
        """Wake the threads that wait for this blob, so that they look again."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def spill(self, reason: Exception | None = None) -> None:
        """Use this process's own memory for whatever is still missing."""
        if reason is not None and self.place is not None:
            warn_once(f"{self.name} is kept in memory from here on: {reason}", "spill")
        self.place = None

    def close(self) -> None:
        """Stop using the files; what has arrived stays usable through views of it."""
        self.spill()
        if self._closing is not None:
            self._closing()

    def _block_numbers(self, span: ByteRange) -> tuple[int, int]:
        wide = to_blocks(span, self.size)
        return wide.start // BLOCK, -(-wide.stop // BLOCK)

    def _bytes(self, first: int, last: int) -> ByteRange:
        return ByteRange(first * BLOCK, min(last * BLOCK, self.size))

    def _refresh(self, first: int, last: int) -> None:
        place = self.place
        if place is None or first == last:
            return
        try:
            fd = place.open_map()
        except GoneError as error:
            self.spill(error)
            return
        except OSError:
            return  # out of descriptors: no news for now
        try:
            found = os.pread(fd, last - first, place.map_at + first)
        finally:
            close_own(fd)
        self._merge(first, found)

    def _merge(self, first: int, found: bytes) -> None:
        with self._changed:
            last = first + len(found)
            old = int.from_bytes(self._have[first:last])
            trusted = int.from_bytes(found.translate(_ONES)) & ~int.from_bytes(self._private[first:last])
            new = old | trusted
            if new == old:
                return
            self._have[first:last] = new.to_bytes(len(found))
            self._notify()

    def _notify(self) -> None:
        self._changes += 1
        self._changed.notify_all()
        if self._on_complete is not None and 0 not in self._have and 1 not in self._private:
            done, self._on_complete = self._on_complete, None
            done()

    def _free_runs(self, first: int, last: int) -> Iterator[tuple[int, int, bool]]:
        """Yield runs of blocks that are missing and unclaimed: from, to, and whether in own pages."""
        while (first := self._have.find(0, first, last)) >= 0:
            if self._claimed[first]:
                first = _end(self._claimed.find(0, first, last), last)
                continue
            own_pages = self._private[first]
            stop = min(
                _end(self._have.find(1, first, last), last),
                _end(self._claimed.find(1, first, last), last),
                _end(self._private.find(1 - own_pages, first, last), last),
            )
            yield first, stop, bool(own_pages)
            first = stop

    def reserve_all(self) -> bool:
        """Claim every block for the caller, in this process only; ``False`` when one is claimed."""
        with self._changed:
            if 1 in self._claimed:
                return False
            self._claimed[:] = b"\1" * len(self._claimed)
            return True

    def _reserve(self, first: int, last: int) -> tuple[int, int, bool] | None:
        with self._changed:
            run = next(self._free_runs(first, last), None)
            if run is not None:
                self._claimed[run[0] : run[1]] = b"\1" * (run[1] - run[0])
            return run

    def _release(self, first: int, stop: int) -> None:
        with self._changed:
            self._claimed[first:stop] = bytes(stop - first)
            self._changes += 1
            self._changed.notify_all()

    def _claim_run(self, first: int, stop: int, private: bool) -> "Claim | None":
        place = self.place
        if private or place is None:
            return PrivateClaim(self, self._bytes(first, stop))
        try:
            map_fd = place.open_map()
        except GoneError as error:
            self.spill(error)
            return PrivateClaim(self, self._bytes(first, stop))
        try:
            run = self._lock_run(place, map_fd, first, stop)
            if run is not None:
                claim = SharedClaim(self, place, map_fd, self._bytes(*run))
                # Only the part that is locked stays reserved.
                self._release(first, run[0])
                self._release(run[1], stop)
                return claim
        except GoneError as error:
            self.spill(error)
            close_own(map_fd)
            return PrivateClaim(self, self._bytes(first, stop))
        except BaseException:
            close_own(map_fd)
            raise
        close_own(map_fd)
        return None

    def _lock_run(self, place: Place, map_fd: int, first: int, stop: int) -> tuple[int, int] | None:
        """Lock the first run of blocks in ``first`` to ``stop`` that nobody fills and that is missing."""
        base = place.map_at
        while first < stop:
            end = stop
            while not try_lock(map_fd, base + first, end - first):
                taken = conflict(map_fd, base + first, end - first)
                if taken is None:
                    continue
                if taken.start > base + first:
                    end = taken.start - base
                else:
                    first = taken.stop - base
                    end = stop
                if first >= end:
                    return None
            marks = os.pread(map_fd, end - first, base + first).translate(_ONES)
            self._merge(first, marks)
            free = marks.find(0)
            if free >= 0:
                run = first + free, first + _end(marks.find(1, free), end - first)
                if run[1] < end:
                    unlock(map_fd, base + run[1], end - run[1])
                return run
            unlock(map_fd, base + first, end - first)
            first = end
        return None

    def mark(self, first: int, stop: int) -> None:
        """Record that blocks ``first`` to ``stop`` are in the files; for claims."""
        with self._changed:
            self._have[first:stop] = b"\1" * (stop - first)
            self._notify()

    def store_private(self, first: int, data: memoryview) -> None:
        """Put whole blocks into this process's own pages, if they are still missing; for claims."""
        stop = first + block_count(len(data))
        with self._changed:
            start = self._have.find(0, first, stop)
            while start >= 0:
                end = _end(self._have.find(1, start, stop), stop)
                span = self._bytes(start, end)
                self._private[start:end] = b"\1" * (end - start)
                replace_by_anonymous(self.view, span.start, span.stop)
                self.view[span.start : span.stop] = data[
                    span.start - first * BLOCK : span.stop - first * BLOCK
                ]
                self._have[start:end] = b"\1" * (end - start)
                start = self._have.find(0, end, stop)
            self._notify()

    def unreserve(self, span: ByteRange) -> None:
        """Record that a claim on ``span`` has ended; for claims."""
        self._release(*self._block_numbers(span))

    def reset_in_child(self) -> None:
        """Forget the parent's claims; what had arrived stays usable."""
        self._changed = threading.Condition()
        self._claimed = bytearray(len(self._have))


def _end(found: int, last: int) -> int:
    return last if found < 0 else found
