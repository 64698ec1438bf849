"""Reads whole 2 MiB blocks of a local file into the page cache, each by one request and as one large page.

Read-ahead by advice (``WILLNEED``) fills the page cache page by page: half a million pages for 2 GB, which
cost more to allocate and to map than a fast disk takes to deliver them. But a page fault in a map under
``MADV_HUGEPAGE`` reads the whole block around it, and with ``MADV_RANDOM`` nothing else: as one large page
where the file system keeps such (ext4 and xfs do), by one request in any case (Linux 5.18 and later,
``do_sync_mmap_readahead`` in ``mm/filemap.c``). It needs no read-ahead setting of the device.

A prefetch gives the advice on a map of its own (`BlockReader`); use gives it on those parts of the map that
tensors live in where it pays (`loadstone.loader.files.paging`), and elsewhere there a fault reads one page.

Ownership: a `BlockReader` never changes once made, and any thread may read by it; its map goes with it.
"""

import functools
import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from loadstone.errors import LoadstoneError
from loadstone.loader.files.mapping import map_private
from loadstone.loader.files.readahead import POPULATE_READ, advise
from loadstone.loader.ranges import ByteRange, coalesce

BLOCK = 2 * 1024 * 1024
"""Bytes of a block: the huge page of every machine whose small page is 4 KiB."""

_NORMAL, _HUGEPAGE = 0, 14
_KERNEL = (5, 18)
_SIZE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


class BlockReader:
    """One file, ready to have its blocks read.

    Parameters
    ----------
    path : str
        The file.
    wanted : sequence of ByteRange
        All that is going to be read of it: a block may be read when any part of it is asked for, if all of it
        is wanted.
    """

    def __init__(self, path: str, wanted: Sequence[ByteRange]) -> None:
        self._view = memoryview(b"")
        self._wanted = coalesce(wanted)
        self._starts = [run.start for run in self._wanted]
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return
        try:
            view = map_private(fd, os.fstat(fd).st_size)
        except LoadstoneError:  # no address space is left: reading by advice needs none
            return
        finally:
            os.close(fd)
        if read_when_touched(view, ByteRange(0, len(view))):
            self._view = view

    def read(self, span: ByteRange) -> list[ByteRange]:
        """Bring the blocks of ``span``, a part of what is wanted, into the page cache; return the rest."""
        run = self._wanted[bisect_right(self._starts, span.start) - 1]
        start = max(span.start // BLOCK, -(-run.start // BLOCK)) * BLOCK
        stop = min(-(-span.stop // BLOCK), run.stop // BLOCK) * BLOCK
        if start >= stop or stop > len(self._view):
            return [span]
        advise(self._view, ByteRange(start, stop), POPULATE_READ)
        ends = (span.start, min(start, span.stop)), (max(stop, span.start), span.stop)
        return [ByteRange(*end) for end in ends if end[0] < end[1]]


def within(span: ByteRange) -> ByteRange:
    """Return the whole blocks of ``span``, an empty range where there are none."""
    start = min(-(-span.start // BLOCK) * BLOCK, span.stop)
    return ByteRange(start, max(start, span.stop // BLOCK * BLOCK))


def read_when_touched(view: memoryview, span: ByteRange, *, ahead: bool = False) -> bool:
    """Let a fault in ``span`` of a map read the block around it, with ``ahead`` also what follows.

    Returns
    -------
    bool
        Whether the kernel can.
    """
    if ahead:
        advise(view, span, _NORMAL)
    return advise(view, span, _HUGEPAGE)


@functools.cache
def are_known() -> bool:
    """Say whether this kernel reads blocks of that size; where huge pages are of another size it does not."""
    try:
        release = tuple(int(part) for part in os.uname().release.split(".")[:2])
        return release >= _KERNEL and int(_SIZE_FILE.read_text()) == BLOCK
    except (OSError, ValueError):
        return False
