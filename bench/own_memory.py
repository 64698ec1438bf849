"""Free memory that costs every run the same to take.

A virtual machine may hand free memory back to its host, within seconds and in blocks of 2 MiB or more; who
takes such a block next waits for it to be fetched again, longer than a fast transfer takes. Then who ran just
before decides which way looks fast. So free memory is made this machine's own first, in one of two ways:

- `own_memory` touches it once, and gives it back to the kernel in pieces smaller than that, by keeping one
  page of every 2 MiB. They stay, but nobody gets a huge page out of them;
- `touch_free_memory` touches it and gives it back whole, for work that takes huge pages and begins at once.
"""

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from loadstone.display import human_bytes
from loadstone.loader.files import memory
from loadstone.loader.files.readahead import advise
from loadstone.loader.ranges import ByteRange, split

BLOCK = 2 * 1024 * 1024
"""Bytes of the smallest block that a host is given back."""

_STEP = 64 * BLOCK
_SHARE = 0.5  # of the memory that this process may still take
_HUGEPAGE, _NOHUGEPAGE, _POPULATE_WRITE = 14, 15, 23  # mmap has names only for what its own kernel knew


@contextmanager
def own_memory(nbytes: int) -> Iterator[str]:
    """Keep about ``nbytes`` of free memory this machine's own; gives words for what that is."""
    size = _to_take(nbytes)
    if not size:
        yield "free memory as it is"
        return
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) as kept:
        kept.madvise(_NOHUGEPAGE)  # a huge page would be given back whole or not at all
        for start in range(0, size, _STEP):
            stop = min(start + _STEP, size)
            kept[start : stop : mmap.PAGESIZE] = bytes((stop - start) // mmap.PAGESIZE)
        for start in range(0, size, BLOCK):
            kept.madvise(mmap.MADV_DONTNEED, start + mmap.PAGESIZE, BLOCK - mmap.PAGESIZE)
        yield f"{human_bytes(size)} of free memory touched, in pieces under {human_bytes(BLOCK)}"


def touch_free_memory(nbytes: int) -> None:
    """Take about ``nbytes`` of free memory, in huge pages where there are such, and give it back at once."""
    size = _to_take(nbytes)
    if not size:
        return
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) as taken, memoryview(taken) as view:
        advise(view, ByteRange(0, size), _HUGEPAGE)
        with ThreadPoolExecutor() as pool:
            pieces = split(ByteRange(0, size), _STEP)
            # Before Linux 5.14 nothing happens: free memory is as it is, for every way alike.
            list(pool.map(lambda piece: advise(view, piece, _POPULATE_WRITE), pieces))


def _to_take(nbytes: int) -> int:
    return int(min(nbytes, _SHARE * memory.available())) // BLOCK * BLOCK
