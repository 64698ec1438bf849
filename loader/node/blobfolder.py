"""One blob's folder in the node cache: what is written in which order, and when it can be trusted.

``data`` (sparse, the object's own layout), ``map`` (one byte for each block), ``meta.json`` (which object,
which version, which boot) and, once everything is on the disk for certain, ``sealed``. A folder is built
under another name and renamed into place, so that it is complete from the moment it is seen.

After a power cut the map may have reached the disk without the data. So a blob without ``sealed`` counts
only in the boot that made it, and a blob of another machine does not count at all, unless it was made in
this very boot (containers of one machine may have several machine ids).
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from loadstone.errors import CacheError
from loadstone.loader.ranges import BLOCK, block_count

KEY_LENGTH = 64
"""Characters of a blob's key, its folder's name."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MACHINE_ID = Path("/etc/machine-id")
_HEX = re.compile(r"[0-9a-f]{16,}")  # what names a lease
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Host:
    """Where and since when this process runs; empty text where the machine does not tell."""

    boot: str
    machine: str


@cache
def this_host() -> Host:
    """Return the machine's id and that of its present boot."""
    return Host(_line(_BOOT_ID), _line(_MACHINE_ID))


@dataclass(frozen=True, slots=True)
class Meta:
    """What ``meta.json`` says.

    Attributes
    ----------
    location : str
        The object, for people; nothing secret.
    tag, size : str, int
        Its version.
    boot, machine : str
        Where the blob was begun.
    format : int
        Of this file.
    """

    location: str
    tag: str
    size: int
    boot: str
    machine: str
    format: int = _FORMAT


def create(folder: Path, meta: Meta, first: bytes = b"") -> None:
    """Make a blob at ``folder``; one that is there already stays as it is.

    Parameters
    ----------
    folder : Path
        Where.
    meta : Meta
        Which object.
    first : bytes
        Its first bytes; those that fill blocks are kept.

    Raises
    ------
    OSError
        There is no room, or no right to.
    """
    first = first if len(first) == meta.size else first[: len(first) // BLOCK * BLOCK]
    full = block_count(len(first))
    # No hole in the map: its bytes find room later, and can be read.
    marks = b"\1" * full + bytes(block_count(meta.size) - full)
    draft = f"{folder.parent}{os.sep}tmp-{folder.name}-{secrets.token_hex(4)}"
    os.mkdir(draft, 0o700)  # noqa: PTH102  many are made at once: path objects double the time
    try:
        write_new(f"{draft}/data", first, meta.size)
        write_new(f"{draft}/map", marks, len(marks))
        write_new(
            f"{draft}/meta.json", json.dumps({name: getattr(meta, name) for name in Meta.__slots__}).encode()
        )
        os.rename(draft, folder)  # noqa: PTH104  likewise
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not folder.is_dir():
            raise


def write_new(path: str, data: bytes, size: int = 0) -> None:
    """Write a new file that begins with ``data`` and has at least ``size`` bytes."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        at = 0
        while at < len(data):
            at += os.write(fd, data[at:])
        if size > at:
            os.ftruncate(fd, size)
    finally:
        os.close(fd)


def read_meta(folder: Path) -> Meta | None:
    """Return what ``meta.json`` says, or ``None`` when it is missing or damaged."""
    try:
        meta = Meta(**json.loads((folder / "meta.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return meta if meta.format == _FORMAT and type(meta.size) is int and meta.size >= 0 else None


def trusted(folder: Path, expected: Meta, host: Host) -> bool:
    """Say whether what ``folder`` says has arrived can be relied on to be there.

    Parameters
    ----------
    folder : Path
        A blob's folder.
    expected : Meta
        The version it should hold.
    host : Host
        This machine.
    """
    meta = read_meta(folder)
    if meta is None or (meta.tag, meta.size) != (expected.tag, expected.size):
        return False
    try:
        sizes = (folder / "data").lstat().st_size, (folder / "map").lstat().st_size
    except OSError:
        return False
    if sizes != (meta.size, block_count(meta.size)):
        return False
    same_boot = meta.boot == host.boot != ""
    return same_boot or (is_sealed(folder) and meta.machine == host.machine != "")


def is_sealed(folder: Path) -> bool:
    """Say whether every byte was seen to reach the disk."""
    return os.path.exists(f"{folder}/sealed")  # noqa: PTH110  a folder that may not be entered has none


def seal(folder: Path) -> None:
    """Make sure that a complete blob survives a power cut, and say so.

    Raises
    ------
    OSError
        The disk did not take the bytes; what the folder holds can no longer be relied on.
    CacheError
        The blob is not complete.
    """
    marks = (folder / "map").read_bytes()
    if marks.count(1) != len(marks):
        raise CacheError(
            f"{folder} holds {marks.count(1)} of {len(marks)} blocks; only a complete one is sealed"
        )
    for name in ("data", "map", "meta.json"):
        _sync(folder / name)
    draft = folder / f"sealed-{secrets.token_hex(4)}"
    draft.touch()
    draft.rename(folder / "sealed")
    _sync(folder)
    _sync(folder.parent)


def drop(folder: Path) -> None:
    """Remove a blob, in one step for those who look for it; maps of it stay valid."""
    gone = folder.parent / f"gone-{folder.name}-{secrets.token_hex(4)}"
    with suppress(FileNotFoundError):
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def sweep(folder: Path, alone: Callable[[str], AbstractContextManager[bool]]) -> None:
    """Remove from a cache folder what dead processes left half made or half removed.

    Parameters
    ----------
    folder : Path
        The cache folder.
    alone : Callable
        Says whether nobody uses the blob, or writes the reference, of a key (`Leases.alone`).
    """
    for part in ("blobs", "refs"):
        with suppress(OSError):
            for path in (folder / part).iterdir():
                kind, _, rest = path.name.partition("-")
                key = rest[:KEY_LENGTH]
                if kind == "gone":
                    drop(path)
                elif kind == "tmp" and _HEX.fullmatch(key):
                    with alone(key) as nobody:
                        if nobody:
                            _discard(path)


def _discard(draft: Path) -> None:
    if draft.is_dir():
        drop(draft)
    else:
        draft.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
