"""Private maps of files that outlive every handle on the file.

Python's own ``mmap`` keeps a duplicate of the file descriptor for as long as the map lives (before 3.13
always), which runs into ``ulimit -n`` at a few dozen shards. Here the file is mapped by ``mmap(2)`` itself
over an anonymous map that a Python ``mmap`` object owns: that object keeps no descriptor, refuses to be
closed while views of it exist, and unmaps when the last view is gone.
"""

import ctypes
import mmap
import os

from loadstone.errors import CacheError

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_HUGE = 2 * 1024 * 1024
_FLAGS = mmap.MAP_PRIVATE | _MAP_NORESERVE
_PROTECTION = mmap.PROT_READ | mmap.PROT_WRITE

_libc_mmap = ctypes.CDLL(None, use_errno=True).mmap
_libc_mmap.restype = ctypes.c_void_p
_libc_mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip


def map_private(fd: int, size: int, offset: int = 0) -> memoryview:
    """Map ``size`` bytes of a file as private, writable, lazily read memory.

    Writes stay in this process; later writes to the file show through on pages that this process has not
    written. Nothing is read ahead (``MADV_RANDOM``) and nothing is reserved, so a file may be larger than
    memory. ``fd`` can be closed at once.

    Parameters
    ----------
    fd : int
        The file, open for reading, at least ``offset + size`` bytes long.
    size : int
        Bytes to map; 0 gives an empty view.
    offset : int
        Where they begin: a multiple of the page size.

    Returns
    -------
    memoryview
        Its ``obj`` is the owning ``mmap`` object, whose ``madvise`` works as usual. The memory stays mapped
        until nothing refers to this view or anything made from it.

    Raises
    ------
    CacheError
        The kernel refused the map.
    """
    if size == 0:
        return memoryview(bytearray())
    # The kernel puts an anonymous map of whole huge pages where a huge page may begin. Then it maps a large
    # page of the file by one entry, without a fault for each of its small pages.
    whole = -(-size // _HUGE) * _HUGE
    try:
        owner = mmap.mmap(-1, whole if size >= _HUGE else size, flags=_FLAGS, prot=_PROTECTION)
    except OSError as error:
        raise _refused(size, error.errno or 0) from None
    address = ctypes.addressof(ctypes.c_char.from_buffer(owner))
    # MAP_FIXED replaces pages of the anonymous map just made, and nothing else.
    if _libc_mmap(address, size, _PROTECTION, _FLAGS | _MAP_FIXED, fd, offset) != address:
        raise _refused(size, ctypes.get_errno())
    owner.madvise(mmap.MADV_RANDOM)
    return memoryview(owner)[:size]


def map_anonymous(size: int) -> memoryview:
    """Map ``size`` zero bytes of private memory that belongs to no file; nothing is reserved."""
    if size == 0:
        return memoryview(bytearray())
    try:
        return memoryview(mmap.mmap(-1, size, flags=_FLAGS, prot=_PROTECTION))
    except OSError as error:
        raise _refused(size, error.errno or 0) from None


def replace_by_anonymous(view: memoryview, start: int, stop: int) -> None:
    """Turn bytes ``start`` to ``stop`` of a whole `map_private` view into zeros that belong to no file.

    Writing such bytes touches no page of the file. That matters where the file has a hole and its file
    system is full: a private write to it would first fetch the page, and on tmpfs that is a SIGBUS.

    Parameters
    ----------
    view : memoryview
        As returned by `map_private`.
    start, stop : int
        ``start`` lies on a page boundary; ``stop`` does too or is the end of the view.
    """
    base = ctypes.addressof(ctypes.c_char.from_buffer(view))
    flags = _FLAGS | _MAP_FIXED | mmap.MAP_ANONYMOUS
    if _libc_mmap(base + start, stop - start, _PROTECTION, flags, -1, 0) != base + start:
        raise _refused(stop - start, ctypes.get_errno())


def _refused(size: int, code: int) -> CacheError:
    return CacheError(
        f"cannot map a file of {size} bytes: {os.strerror(code)}; "
        "raise the address space limit (ulimit -v) or vm.max_map_count"
    )
