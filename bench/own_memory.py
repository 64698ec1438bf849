"""Free memory that costs every run the same to take.

A virtual machine may hand free memory back to its host, within seconds and in blocks of 2 MiB or more; who
takes such a block next waits for it to be fetched again, longer than a fast transfer takes. Then who ran just
before decides which way looks fast. So free memory is touched once, and given back to the kernel in pieces
smaller than that, by keeping one page of every 2 MiB: they stay this machine's own.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

from loadstone.display import human_bytes
from loadstone.loader.files import memory

BLOCK = 2 * 1024 * 1024
"""Bytes of the smallest block that a host is given back."""

_STEP = 64 * BLOCK
_SHARE = 0.5  # of the memory that this process may still take
_MADV_NOHUGEPAGE = 15  # mmap has the name only where Python was built on a kernel that knows it


@contextmanager
def own_memory(nbytes: int) -> Iterator[str]:
    """Keep about ``nbytes`` of free memory this machine's own; gives words for what that is."""
    size = int(min(nbytes, _SHARE * memory.available())) // BLOCK * BLOCK
    if not size:
        yield "free memory as it is"
        return
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) as kept:
        kept.madvise(_MADV_NOHUGEPAGE)  # a huge page would be given back whole or not at all
        for start in range(0, size, _STEP):
            stop = min(start + _STEP, size)
            kept[start : stop : mmap.PAGESIZE] = bytes((stop - start) // mmap.PAGESIZE)
        for start in range(0, size, BLOCK):
            kept.madvise(mmap.MADV_DONTNEED, start + mmap.PAGESIZE, BLOCK - mmap.PAGESIZE)
        yield f"{human_bytes(size)} of free memory touched, in pieces under {human_bytes(BLOCK)}"
