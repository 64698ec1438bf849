"""Claims: blocks of a blob that one thread is filling, and the two places their bytes can go to.

Ownership: a claim is used by the thread that made it and by nobody else. It tells its blob (the `Ledger`)
which blocks have become usable; the blob's own lock orders that.
"""

import errno
import os
from typing import Protocol

from loadstone.errors import CacheError, TransferError
from loadstone.loader.node.filesystem import reserve
from loadstone.loader.node.locks import close_own, conflict
from loadstone.loader.node.places import Place
from loadstone.loader.ranges import BLOCK, ByteRange, block_count

DEMAND_AT = 1 << 40
"""Locks from here on in a map file say which blocks somebody is blocked on."""

_RESERVED = 1024 * 1024  # claims from this size on reserve their room on the disk beforehand
# Bytes of one write. The page cache takes each in as one folio. Larger ones cost more on virtual machines
# that hand large free blocks back to their host, and the writes they would save are cheap.
_PIECE = BLOCK
_FULL = {errno.ENOSPC, errno.EDQUOT}


class StorageError(CacheError):
    """The cache's file system did not take bytes."""


class NoRoomError(StorageError):
    """It is full."""


class Ledger(Protocol):
    """What a claim tells its blob."""

    @property
    def name(self) -> str:
        """The object, for messages."""
        ...

    def mark(self, first: int, stop: int) -> None:
        """Record that blocks ``first`` to ``stop`` are in the files now."""
        ...

    def store_private(self, first: int, data: memoryview) -> None:
        """Put whole blocks, from ``first``, into this process's own pages."""
        ...

    def unreserve(self, span: ByteRange) -> None:
        """Take back the claim on ``span``, which has ended."""
        ...


class Claim(Protocol):
    """Blocks that the calling thread alone fills now."""

    @property
    def range(self) -> ByteRange:
        """The bytes to bring, whole blocks."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Take the next bytes, in order; blocks become usable as they fill up."""
        ...

    def finish(self) -> None:
        """Check that every byte has come; raises `TransferError`."""
        ...

    def demanded(self, rest: ByteRange) -> bool:
        """Say whether a thread of any process is blocked on ``rest``, a part of this claim."""
        ...

    def close(self) -> None:
        """Let go; blocks that are not complete are free for others."""
        ...


class _Cursor:
    """Checks that a claim's bytes come in order, each once."""

    def __init__(self, name: str, span: ByteRange) -> None:
        self.range = span
        self.at = span.start
        self._name = name

    def advance(self, offset: int, count: int) -> None:
        if offset != self.at or offset + count > self.range.stop:
            raise TransferError(
                f"{self._name}: {count} bytes at {offset} were delivered where {self.at} to "
                f"{self.range.stop} were due; they are dropped, try again"
            )
        self.at += count

    def finish(self) -> None:
        if self.at != self.range.stop:
            raise TransferError(
                f"{self._name}: {self.at - self.range.start} of {self.range.nbytes} bytes were delivered; "
                "those are kept, try again"
            )


class SharedClaim:
    """A claim whose bytes go to the files, for every process of the node.

    Parameters
    ----------
    ledger : Ledger
        The blob.
    place : Place
        Its files.
    map_fd : int
        A description of the map file that holds the lock on the claimed blocks; closed with the claim.
    span : ByteRange
        The claimed blocks.
    """

    def __init__(self, ledger: Ledger, place: Place, map_fd: int, span: ByteRange) -> None:
        self._ledger, self._place = ledger, place
        self._first, self._stop = span.start // BLOCK, block_count(span.stop)
        self._marked = self._first
        self._cursor = _Cursor(ledger.name, span)
        self._map_fd, self._data_fd = map_fd, place.open_data()
        if span.nbytes >= _RESERVED:
            reserve(self._data_fd, place.data_at + span.start, span.nbytes)

    @property
    def range(self) -> ByteRange:
        """The bytes to bring, whole blocks."""
        return self._cursor.range

    def write(self, offset: int, data: memoryview) -> None:
        """Take the next bytes, in order."""
        self._cursor.advance(offset, len(data))
        _pwrite(self._data_fd, data, self._place.data_at + offset)
        at = self._cursor.at
        done = self._stop if at == self.range.stop else at // BLOCK
        if done > self._marked:
            ones = memoryview(b"\1" * (done - self._marked))
            _pwrite(self._map_fd, ones, self._place.map_at + self._marked)
            self._ledger.mark(self._marked, done)
            self._marked = done

    def finish(self) -> None:
        """Check that every byte has come."""
        self._cursor.finish()

    def demanded(self, rest: ByteRange) -> bool:
        """Say whether a thread of any process is blocked on ``rest``."""
        first, stop = rest.start // BLOCK, block_count(rest.stop)
        if first >= stop:
            return False
        return conflict(self._map_fd, DEMAND_AT + self._place.map_at + first, stop - first) is not None

    def close(self) -> None:
        """Let go of the blocks."""
        close_own(self._map_fd)
        close_own(self._data_fd)
        self._ledger.unreserve(self.range)


class PrivateClaim:
    """A claim whose bytes go to this process's own pages.

    Parameters
    ----------
    ledger : Ledger
        The blob.
    span : ByteRange
        The claimed blocks.
    """

    def __init__(self, ledger: Ledger, span: ByteRange) -> None:
        self._ledger = ledger
        self._cursor = _Cursor(ledger.name, span)
        self._part = bytearray()

    @property
    def range(self) -> ByteRange:
        """The bytes to bring, whole blocks."""
        return self._cursor.range

    def write(self, offset: int, data: memoryview) -> None:
        """Take the next bytes, in order."""
        self._cursor.advance(offset, len(data))
        if self._part:
            rest = min(len(data), BLOCK - len(self._part))
            self._part += data[:rest]
            offset, data = offset + rest, data[rest:]
            start = offset - len(self._part)
            if len(self._part) < BLOCK and offset < self.range.stop:
                return
            with memoryview(self._part) as whole:
                self._ledger.store_private(start // BLOCK, whole)
            self._part = bytearray()
        whole_bytes = len(data) if offset + len(data) == self.range.stop else len(data) // BLOCK * BLOCK
        if whole_bytes:
            self._ledger.store_private(offset // BLOCK, data[:whole_bytes])
        self._part += data[whole_bytes:]

    def finish(self) -> None:
        """Check that every byte has come."""
        self._cursor.finish()

    def demanded(self, rest: ByteRange) -> bool:  # noqa: ARG002  no other process sees these pages
        """Say whether a thread of another process is blocked on ``rest``."""
        return False

    def close(self) -> None:
        """Let go of the blocks."""
        self._ledger.unreserve(self.range)


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    while data:
        try:
            count = os.pwrite(fd, data[:_PIECE], offset)
        except OSError as error:
            kind = NoRoomError if error.errno in _FULL else StorageError
            raise kind(f"the node cache cannot take more bytes: {error.strerror}; free some space") from error
        offset += count
        data = data[count:]
