"""A cache folder that cannot be written: sealed blobs are read where they are, and nothing else is.

Such is a node cache that is mounted read-only, is part of an image, or is another user's to fill. Nothing
is created there: no blob, no reference, no time of last use. A blob counts when it is sealed and every block
is marked, so that nobody writes to it any more, and only for the version that the store has just confirmed.
One that is not sealed may be in the middle of being filled, or of a boot that ended with the power: it does
not count, whoever made it.

The machine's id does not matter here, as it does for folders that are written. A seal says that the bytes
had reached the disk before the seal did: for a mount of that very disk, by a container with an id of its own
or after another boot, it is as good as where it was made. For a copy it is as good as the copy, and those
who bake one into an image have its digests checked.

Another mount of the same disk may be written to, and blobs be evicted there. That takes their names away,
never their bytes, from whoever has mapped them (network file systems, where it would, are refused); and all
that is looked at is reached through one descriptor of the blob's folder, so that no other blob that gets its
name meanwhile is mistaken for it. Where the file of leases can be opened, shared locks, which need no right
to write, keep evictions off all the same, so that room counted as freed is free.

Ownership: a `SealedFolder` is used by all threads and has no state of its own. A forked child uses its copy.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from loadstone.errors import CacheError
from loadstone.loader.node import blobfolder
from loadstone.loader.node.blob import StoredBlob
from loadstone.loader.node.leases import Leases, shared_leases
from loadstone.loader.node.locks import close_own, open_own
from loadstone.loader.node.places import GoneError
from loadstone.loader.ranges import block_count
from loadstone.loader.stores.store import Version

_EVICTION_SECONDS = 10.0


class SealedPlace:
    """The files of a sealed blob, within reach only while the blob is made: a complete one needs no more.

    Parameters
    ----------
    folder : str
        The blob's folder, by a path that leads there for now.
    data_path : str
        Where the data file can be opened later, to read ahead in it.
    """

    data_at = 0
    map_at = 0

    def __init__(self, folder: str, data_path: str) -> None:
        self._folder: str | None = folder
        self.data_path = data_path

    def open_data(self) -> int:
        """Open the data file, for reading."""
        return self._open("data")

    def open_map(self) -> int:
        """Open the map file, for reading."""
        return self._open("map")

    def leave(self) -> None:
        """Open nothing any more."""
        self._folder = None

    def _open(self, name: str) -> int:
        if self._folder is None:
            raise GoneError("a sealed blob is opened once, and complete then")
        return open_own(f"{self._folder}/{name}", os.O_RDONLY | os.O_NOFOLLOW)


class SealedFolder:
    """The sealed blobs of a cache folder.

    Parameters
    ----------
    folder : Path
        The cache folder; see `usable`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.leases: Leases | None = None
        with suppress(OSError):  # never written to, or not ours to read: see the module's description
            self.leases = shared_leases(folder / "leases", os.O_RDONLY)

    def holds(self, key: str) -> bool:
        """Say whether a sealed blob is here."""
        return blobfolder.is_sealed(self.folder / "blobs" / key)

    def blob(self, name: str, key: str, version: Version) -> StoredBlob | None:
        """Return a blob that is complete; ``None`` when it is not here, or not to be relied on.

        Parameters
        ----------
        name : str
            The object, for messages.
        key : str
            The blob's.
        version : Version
            What it must hold.
        """
        if not self.holds(key):
            return None
        leased = self.leases
        try:
            if leased is not None and not leased.take(key, _EVICTION_SECONDS):
                return None
        except (OSError, CacheError):
            leased = None
        found = None
        try:
            found = self._open(name, key, version, leased)
        except (OSError, CacheError):
            pass  # it has just been evicted, or is not readable
        finally:
            if found is None and leased is not None:
                leased.drop(key)
        return found

    def _open(self, name: str, key: str, version: Version, leased: Leases | None) -> StoredBlob | None:
        own = open_own(self.folder / "blobs" / key, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            folder = f"/proc/self/fd/{own}"
            if not _complete(Path(folder), version):
                return None
            place = SealedPlace(folder, f"{self.folder}/blobs/{key}/data")
            end = None if leased is None else lambda: leased.drop(key)
            blob = StoredBlob(name, version.size, place, on_close=end)
            place.leave()
            return blob
        finally:
            close_own(own)


def usable(folder: Path) -> bool:
    """Say whether a cache folder that cannot be written has blobs that can be read, and no stranger put."""
    try:
        return _ours((folder / "blobs").stat()) and os.access(folder / "blobs", os.R_OK | os.X_OK)
    except OSError:
        return False


def _complete(folder: Path, version: Version) -> bool:
    meta = blobfolder.read_meta(folder)
    if meta is None or (meta.tag, meta.size) != (version.tag, version.size):
        return False
    data = (folder / "data").lstat()
    marks = (folder / "map").read_bytes()
    return (
        blobfolder.is_sealed(folder)
        and stat.S_ISREG(data.st_mode)
        and _ours(data)
        and data.st_size == version.size
        and marks == b"\1" * block_count(version.size)
    )


def _ours(info: os.stat_result) -> bool:
    """Say whether only this user, or root, can change it."""
    return info.st_uid in {0, os.geteuid()} and not info.st_mode & 0o022
