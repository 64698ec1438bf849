"""Counts pages of a file in the page cache, and drops them."""

import ctypes
import mmap
import os
from pathlib import Path

import pytest

_MIB = 1024 * 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident(path: Path) -> int:
    """Return how many bytes of a file are in the page cache, by ``mincore`` over a map of its own."""
    size = path.stat().st_size
    fd = os.open(path, os.O_RDONLY)
    try:
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    try:
        assert _libc.mincore(address, size, pages) == 0
    finally:
        _libc.munmap(address, size)
    return sum(page & 1 for page in pages.raw) * mmap.PAGESIZE


def drop(path: Path) -> None:
    """Write a file's pages back and drop them from the page cache; nothing may have it mapped in."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def cold_file(folder: Path, size: int) -> Path:
    """Write a file that is on the disk and not in the page cache; skip where pages cannot be dropped."""
    path = folder / "data"
    with path.open("wb") as file:
        for number in range(-(-size // _MIB)):
            file.write(bytes([number % 251]) * min(_MIB, size - number * _MIB))
    drop(path)
    if resident(path) > _MIB:
        pytest.skip("this file system keeps its pages: tmpfs cannot be cold")
    return path
