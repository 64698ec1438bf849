"""Whether a folder can hold the node cache: its owner, its mode, its kind of file system, its room."""

import ctypes
import os
from pathlib import Path

_EXT4 = 0xEF53
_TMPFS = 0x01021994
# Only file systems whose maps, writes and locks are coherent between processes of one machine.
_LOCAL = {
    _EXT4: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0xCA451A4E: "bcachefs",
    0x3153464A: "jfs",
    0x794C7630: "overlayfs",
    0x858458F6: "ramfs",
    _TMPFS: "tmpfs",
}
# Images: nobody writes to them at all, so they are as good for reading.
_IMAGES = {0x73717368: "squashfs", 0xE0F5E1E2: "erofs"}

_libc = ctypes.CDLL(None, use_errno=True)
_statfs = _libc.statfs
_fstatfs = _libc.fstatfs
_fallocate = _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def refusal(folder: Path) -> str | None:
    """Return why ``folder`` cannot be used as a node cache, or ``None``; creates it when it is missing.

    One that is not refused may still be there for reading alone: see `read_only`.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
    except OSError as error:
        return f"it cannot be created: {error.strerror}"
    if info.st_uid not in {0, os.geteuid()}:
        return f"it belongs to user {info.st_uid}, who could change what is stored there"
    if info.st_mode & 0o022:
        return (
            f"its mode is {info.st_mode & 0o777:o}: others could change what is stored there (chmod go-w, or "
            "name a new folder inside it)"
        )
    kind = filesystem_type(folder)
    if kind not in _LOCAL and kind not in _IMAGES:
        return f"its file system (type {kind:#x}) is not a local one, so processes would not see each other"
    if not os.access(folder, os.R_OK | os.X_OK):
        return f"its mode is {info.st_mode & 0o777:o}, which lets user {os.geteuid()} not read it"
    return None


def read_only(folder: Path) -> bool:
    """Say whether this process cannot write to ``folder``."""
    return not os.access(folder, os.W_OK) or bool(os.statvfs(folder).f_flag & os.ST_RDONLY)


def filesystem_type(path: Path) -> int:
    """Return the magic number of the file system that holds ``path`` (see statfs(2)); 0 when unknown."""
    answer = ctypes.create_string_buffer(256)
    if _statfs(os.fsencode(path), answer) != 0:
        return 0
    return ctypes.c_ulong.from_buffer(answer).value


def free_bytes(path: Path) -> int:
    """Return how many bytes can still be written to the file system that holds ``path``."""
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def reserve(fd: int, offset: int, nbytes: int) -> None:
    """Reserve room for bytes of a file that are about to be written, where that makes writing cheaper.

    It does on ext4, which otherwise looks for room page by page; on tmpfs it would fill the pages with zeros
    first. Nothing depends on it: whether there is room is for the writes to find out.
    """
    answer = ctypes.create_string_buffer(256)
    if _fstatfs(fd, answer) == 0 and ctypes.c_ulong.from_buffer(answer).value == _EXT4:
        _fallocate(fd, 0, offset, nbytes)
