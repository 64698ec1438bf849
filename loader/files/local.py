"""Folders and files of this machine as a source: each file mapped once, and watched for changes.

A local file is a blob whose every byte is ready. What can go wrong is the file itself: it may be replaced,
overwritten or cut under the map. So each access first compares what the path leads to now (device, inode,
size, modification time) with what was opened, and a difference is a `ChangedError`. A file that was merely
deleted stays usable: the map keeps its data alive, unchanged. What no check can catch is a file cut while
a tensor already handed out is being read: the kernel ends the process with SIGBUS. Where that may happen,
read with ``copy=True``: copies are read by ``pread``, never through the map.

Not noticed is an overwriting in place, at the same length, that leaves the modification time as it was: one
that puts the time back afterwards, or falls into the same tick of the file system's clock (some milliseconds)
as the write before the opening. The time of the last status change would tell; but it also moves when a file
is linked, renamed, or changes owner or mode, which caches do to files in use. Against such writers,
``verify=True`` compares contents where digests are published.

Ownership: a `LocalBlob` is complete when its constructor returns, and never changes but for ``close``; so it
needs no lock. It keeps no file descriptor. The map is a private one, and a forked child has its own. The
table of blobs is only ever added to, by ``dict.setdefault``; running prefetches belong to `LocalSource`.
"""

import errno
import os
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadstone.errors import (
    AccessError,
    ChangedError,
    ClosedError,
    FormatError,
    LoadstoneError,
    LocationError,
    NotFoundError,
)
from loadstone.loader.files.mapping import map_private
from loadstone.loader.files.paging import Paging
from loadstone.loader.files.residency import Residency, Window
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import Blob, Prefetch, Span, StatedDigest
from loadstone.loader.together import side_by_side

_OPENERS = 8  # files opened side by side: hides latency of network file systems, few descriptors


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells one version of a file from another."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Identity":
        """Take the identity out of a ``stat`` result."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    @property
    def text(self) -> str:
        """All of it, as a blob's ``version`` has it."""
        return f"{self.device:x}-{self.inode:x}-{self.size:x}-{self.mtime_ns:x}"


class LocalBlob:
    """One file of this machine, mapped; see `loadstone.loader.source.Blob` for the methods."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._closed = False
        fd = _open(path)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                kind = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                raise FormatError(f"{path} is {kind}; expected a file")
            self._identity = Identity.of(status)
            self._buffer = map_private(fd, status.st_size)
            self._paging = Paging(path, status.st_size)
        finally:
            os.close(fd)

    @property
    def name(self) -> str:
        """The path."""
        return self._path

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self._identity.size

    @property
    def version(self) -> str:
        """Device, inode, size and modification time."""
        return self._identity.text

    def buffer(self) -> memoryview:
        """Return the file as private, writable, lazily read memory."""
        buffer = self._buffer  # taken before the look at the flag: `close` sets that first
        if self._closed:
            raise self._is_closed()
        return buffer

    def ready(self, span: ByteRange) -> bool:
        """Say whether ``span`` can be used now: always, for a local file."""
        return span.stop <= self.size

    def ensure(self, spans: Sequence[ByteRange], timeout: float | None = None) -> None:  # noqa: ARG002 - nothing here can take long
        """Check that the file is still the one opened, and prepare the reading of ``spans``."""
        self.check()
        self._paging.begin(self._buffer, spans)

    def check(self) -> None:
        """Raise unless the path still leads to the file that was opened, unchanged, or to nothing."""
        if self._closed:
            raise self._is_closed()
        try:
            found = os.stat(self._path)  # noqa: PTH116 - twice as fast, and done for every tensor
        except FileNotFoundError:
            return
        except OSError as error:
            raise _translate(error, self._path) from None
        # Field by field, since making an `Identity` takes as long as asking the kernel.
        it = self._identity
        same = found.st_ino == it.inode and found.st_mtime_ns == it.mtime_ns
        if not (same and found.st_size == it.size and found.st_dev == it.device):
            raise self._changed(Identity.of(found))

    def is_altered(self) -> bool:
        """Say whether the opened file itself was written to or cut; another one in its place does no harm."""
        try:
            now = Identity.of(os.stat(self._path))  # noqa: PTH116 - done for every batch
        except OSError:
            return False
        was = self._identity
        return now != was and (now.device, now.inode) == (was.device, was.inode)

    def read(self, span: ByteRange) -> bytes:
        """Return a copy of ``span``'s bytes, read with ``pread``: safe whatever happens to the file."""
        data = bytearray(span.nbytes)
        self.read_into(span.start, memoryview(data), ahead=False)
        return bytes(data)

    def read_into(self, offset: int, into: memoryview, *, ahead: bool = True) -> None:
        """Fill ``into`` from ``offset`` on, and check before and after that the file is the one opened.

        With ``ahead`` the kernel may read beyond, as suits a file that is read from end to end.
        """
        self.check()
        fd = _open(self._path)
        try:
            if not ahead:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            done = 0
            while done < len(into):
                count = os.preadv(fd, [into[done:]], offset + done)
                if count == 0:
                    break
                done += count
            now = Identity.of(os.fstat(fd))
        except OSError as error:
            raise _translate(error, self._path) from None
        finally:
            os.close(fd)
        if now != self._identity or done < len(into):
            raise self._changed(now)

    def close(self) -> None:
        """Refuse further use. Memory handed out stays valid, and is unmapped with its last user."""
        self._closed = True
        self._buffer = memoryview(b"")

    def _is_closed(self) -> ClosedError:
        return ClosedError(f"{self._path} was closed; open the checkpoint again")

    def _changed(self, now: Identity) -> ChangedError:
        was = self._identity
        if (now.device, now.inode) != (was.device, was.inode):
            what = "was replaced by another file"
        elif now.size != was.size:
            what = f"changed from {was.size} to {now.size} bytes"
        else:
            what = "was overwritten in place"
        return ChangedError(f"{self._path} {what} after it was opened; open the checkpoint again")


class LocalSource:
    """A folder of this machine; see `loadstone.loader.source.Source` for the methods."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._blobs: dict[str, Blob] = {}
        self._running: list[Residency] = []
        self._closed = False

    @property
    def name(self) -> str:
        """The folder's path."""
        return self._folder

    def names(self) -> tuple[str, ...] | None:
        """Return the names of the files directly inside, links (dangling ones too) included."""
        try:
            with os.scandir(self._folder) as entries:
                return tuple(sorted(entry.name for entry in entries if not _is_folder(entry)))
        except OSError as error:
            raise _translate(error, self._folder) from None

    def open(self, names: Sequence[str]) -> dict[str, Blob | LoadstoneError]:
        """Open files, several side by side; each name gives its blob or the error met."""
        self._check_open()
        if len(names) < _OPENERS:
            return {name: self._open(name) for name in names}
        return dict(zip(names, side_by_side(self._open, names, _OPENERS, "loadstone-open"), strict=True))

    def prefetch(self, spans: Sequence[Span], *, warm: bool = True) -> Prefetch:  # noqa: ARG002  all there is to do
        """Start to make ``spans`` resident, in their order."""
        self._check_open()
        windows = [Window(span.blob, span.range) for span in spans if isinstance(span.blob, LocalBlob)]
        self._running = [one for one in self._running if not one.done()]
        prefetch = Residency(windows)
        self._running.append(prefetch)
        return prefetch

    def stated_digest(self, blob: Blob) -> StatedDigest:  # noqa: ARG002  a protocol's argument
        """Return none: a folder knows no digests."""
        return StatedDigest(reason="nobody published a digest of it")

    def settle(self, timeout: float | None = None) -> bool:  # noqa: ARG002  a protocol's argument
        """Return at once: nothing is written here."""
        return True

    def passing(self, names: Collection[str] | None = None) -> str:  # noqa: ARG002  the same for all
        """Return nothing: the files are here for everybody."""
        return ""

    def close(self) -> None:
        """Stop every prefetch and close every blob."""
        self._closed = True
        for prefetch in self._running:
            prefetch.cancel()
        for blob in self._blobs.values():
            blob.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._folder} was closed; open the checkpoint again")

    def _open(self, name: str) -> Blob | LoadstoneError:
        known = self._blobs.get(name)
        if known is not None:
            return known
        try:
            return self._blobs.setdefault(name, LocalBlob(os.path.join(self._folder, name)))  # noqa: PTH118 - Path drops dots
        except LoadstoneError as error:
            return error


def resolve_folder(path: str) -> str:
    """Return the snapshot that an HF-cache repository folder's ``main`` leads to; other folders as they are.

    Raises
    ------
    LocationError
        It is a repository folder, and which snapshot is meant cannot be told.
    """
    snapshots, main = Path(path, "snapshots"), Path(path, "refs", "main")
    try:
        found = sorted(entry.name for entry in snapshots.iterdir() if entry.is_dir())
        main.parent.stat()
    except OSError:
        return path
    try:
        commit = main.read_text(errors="replace").strip()
    except OSError:
        commit = ""
    if not commit and len(found) == 1:
        commit = found[0]
    if commit not in found:
        raise LocationError(
            f"{path} is an HF-cache repository without a snapshot for {commit or 'refs/main'}; "
            f"name one of snapshots/: {', '.join(found) or 'none there'}"
        )
    return str(snapshots / commit)


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself: whoever opens it is told
        return False


def _open(path: str) -> int:
    try:
        # Non-blocking, so that a pipe of that name is refused instead of waited for.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _translate(error, path) from None


def _translate(error: OSError, path: str) -> LoadstoneError:
    if isinstance(error, FileNotFoundError):
        if os.path.islink(path):  # noqa: PTH114 - the path is text all along
            target = os.readlink(path)  # noqa: PTH115
            return NotFoundError(f"{path} links to {target}, which does not exist; download that file again")
        return NotFoundError(f"nothing is stored at {path}; check the path")
    if isinstance(error, PermissionError):
        return AccessError(f"{path} may not be read: {error.strerror}; check its owner and mode")
    if error.errno in {errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}:
        return LocationError(f"{path} is not a usable path: {error.strerror}")
    few = error.errno in {errno.EMFILE, errno.ENFILE}
    advice = (
        "close some, or raise the limit (ulimit -n)" if few else "check the disk, or where it is mounted from"
    )
    return AccessError(f"{path} cannot be read: {error.strerror}; {advice}")
