"""What is known of each blob in the node cache, for listing and for choosing what to evict."""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loadstone.loader.node import blobfolder
from loadstone.loader.node.leases import Leases
from loadstone.loader.ranges import BLOCK


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One blob of the node cache.

    Attributes
    ----------
    key : str
        Its folder's name.
    location : str
        The object it holds.
    size, stored : int
        Bytes of the object, and how many of them have arrived.
    allocated : int
        Bytes it takes on the disk.
    sealed : bool
        It is complete, and survives a power cut.
    last_use : float
        Seconds since the epoch.
    pids : tuple
        The processes that use it now.
    """

    key: str
    location: str
    size: int
    stored: int
    allocated: int
    sealed: bool
    last_use: float
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Removal:
    """What was removed from the node cache, and what was not because it is in use."""

    removed: tuple[CacheEntry, ...]
    in_use: tuple[CacheEntry, ...]


def by_last_use(entries: Iterable[CacheEntry]) -> list[CacheEntry]:
    """Return ``entries``, least recently used first.

    What seems to have been used in the future was used before the clock was set back: that is long ago.
    """
    now = time.time()
    return sorted(entries, key=lambda entry: (entry.last_use <= now, entry.last_use))


def listing(folder: Path, leases: Leases | None, *, sealed: bool = False) -> list[CacheEntry]:
    """Return the blobs of a cache folder, or its sealed ones, in the order of their locations."""
    folders: list[Path] = []
    with suppress(FileNotFoundError):  # removed under this process
        folders = [path for path in (folder / "blobs").iterdir() if len(path.name) == blobfolder.KEY_LENGTH]
    found = [entry for path in folders if (entry := describe(path, leases)) is not None]
    return sorted(
        (entry for entry in found if entry.sealed or not sealed),
        key=lambda entry: (entry.location, entry.key),
    )


def describe(folder: Path, leases: Leases | None) -> CacheEntry | None:
    """Look at one blob's folder; ``None`` when it has just gone away. Without leases no users are seen."""
    meta = blobfolder.read_meta(folder)
    marks = b""
    try:
        allocated = sum(path.lstat().st_blocks * 512 for path in folder.iterdir())
        last_use = folder.lstat().st_mtime
        with suppress(FileNotFoundError):
            marks = (folder / "map").read_bytes()
            last_use = (folder / "meta.json").lstat().st_mtime
    except OSError:
        return None
    return CacheEntry(
        key=folder.name,
        location=meta.location if meta else "(damaged)",
        size=meta.size if meta else 0,
        stored=min(meta.size, marks.count(1) * BLOCK) if meta else 0,
        allocated=allocated,
        sealed=blobfolder.is_sealed(folder),
        last_use=last_use,
        pids=() if leases is None else tuple(leases.users(folder.name)),
    )
