"""Where a blob's bytes and its map are kept: two files of a folder, found again by path and checked by inode.

No descriptor stays open between uses, so the number of blobs is not bounded by ``ulimit -n``.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loadstone.errors import CacheError
from loadstone.loader.node.locks import close_own, open_own

_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR}


class GoneError(CacheError):
    """A blob's files are no longer where they were, or cannot be written any more."""


class Place(Protocol):
    """Where a blob's data and map are stored. Each call opens a fresh description, by `open_own`."""

    data_at: int
    map_at: int

    @property
    def data_path(self) -> str:
        """Where the data file can be opened to read ahead in it; empty: its bytes are in memory."""
        ...

    def open_data(self) -> int:
        """Open the data file; `GoneError` when it is no longer there."""
        ...

    def open_map(self) -> int:
        """Open the map file; `GoneError` when it is no longer there."""
        ...


@dataclass(frozen=True, slots=True)
class FileId:
    """What a path must still lead to."""

    device: int
    inode: int

    @classmethod
    def of(cls, fd: int) -> "FileId":
        """Identify an open file."""
        info = os.fstat(fd)
        return cls(info.st_dev, info.st_ino)


class FolderPlace:
    """The files ``data`` and ``map`` in one folder.

    Raises
    ------
    GoneError
        They do not exist.
    """

    data_at = 0
    map_at = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ids: dict[str, FileId] = {}
        for name in ("data", "map"):
            path = f"{folder}/{name}"
            try:
                info = os.lstat(path)
            except OSError as error:
                raise GoneError(f"{path} of the node cache is not there: {error.strerror}") from None
            self._ids[name] = FileId(info.st_dev, info.st_ino)

    @property
    def data_path(self) -> str:
        """The data file."""
        return f"{self.folder}/data"

    def open_data(self) -> int:
        """Open the data file."""
        return self._open("data")

    def open_map(self) -> int:
        """Open the map file."""
        return self._open("map")

    def _open(self, name: str) -> int:
        path = f"{self.folder}/{name}"
        try:
            fd = open_own(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in _PASSING:
                raise
            # Not there any more, not ours any more, or on a disk that has become read-only.
            raise GoneError(f"{path} of the node cache cannot be opened any more: {error.strerror}") from None
        if self._ids.get(name) not in {None, FileId.of(fd)}:
            close_own(fd)
            raise GoneError(f"{path} of the node cache was replaced by another file")
        return fd
