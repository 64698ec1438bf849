"""The node cache without a folder: anonymous shared memory, one ``memfd`` for any number of objects.

The file begins with a log of records, which say where each object's data and map lie and which version an
object last had; a record counts when its digest is right, so that one cut short by a death is written over.
Everything behind the log is as in a blob's folder: data at its own layout, a map of one byte per block, and
locks on that map. A process that inherits the descriptor and is told its number (``memfd:7`` as the cache
folder) joins in: so `loadstone run` hands over what it fetched where there is no disk to keep it.

Memory comes back when the last map of it is gone. Nothing is ever evicted.

Ownership: the descriptor is closed with the `Arena` that made it. Everything else goes through descriptions
of its own, opened by ``/proc``. Appending to the log is serialised by a lock on byte 0 of the file; what this
process has read of it is guarded by ``_lock``.
"""

import errno
import hashlib
import json
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from loadstone.errors import CacheError
from loadstone.loader.node.blob import StoredBlob
from loadstone.loader.node.forks import renew_in_child
from loadstone.loader.node.leases import Leases
from loadstone.loader.node.locks import close_own, open_own, wait_for_turn
from loadstone.loader.node.places import FileId, GoneError
from loadstone.loader.ranges import BLOCK, block_count
from loadstone.loader.stores.store import Version

PREFIX = "memfd:"
"""Begins the name of a cache folder that is an inherited descriptor."""

_NAME = "loadstone"
_LOG_BYTES = 4 * 1024 * 1024
_PIECE = 64 * 1024
_LONGEST = 1 << 39  # what lies behind has no locks of its own any more
_HEAD = struct.Struct("<I32s")
_SECONDS = 10.0
_TURNS = 1 << 61


@dataclass(frozen=True, slots=True)
class _Record:
    """What the log says about one object: where the blob ``key`` lies, or the version of identity ``key``."""

    kind: str
    key: str
    tag: str = ""
    size: int = 0
    at: int = 0
    end: int = 0


class _Log:
    """What this process has read of the log so far; what is written is never changed."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], _Record] = {}
        self.data_end = _LOG_BYTES
        self._at = 0

    def read_on(self, fd: int) -> None:
        """Take in what was added, up to the first record that is not whole."""
        part = b""
        while self._at + len(part) < _LOG_BYTES:
            length, digest = _HEAD.unpack_from(part) if len(part) >= _HEAD.size else (_PIECE, b"")
            stop = _HEAD.size + length
            if stop > len(part):
                more = os.pread(fd, _PIECE, self._at + len(part))
                if not more or stop > _LOG_BYTES:
                    return
                part += more
                continue
            body = part[_HEAD.size : stop]
            if not length or hashlib.sha256(body).digest() != digest:
                return
            self._take(_Record(**json.loads(body)))
            self._at += stop
            part = part[stop:]

    def append(self, fd: int, record: _Record) -> None:
        """Write one more record, over what a death may have left there; the caller holds the lock."""
        body = json.dumps(asdict(record)).encode()
        entry = _HEAD.pack(len(body), hashlib.sha256(body).digest()) + body
        if self._at + len(entry) > _LOG_BYTES:
            raise CacheError("the shared memory holds too many objects; use a cache folder")
        if os.pwrite(fd, entry, self._at) != len(entry):
            raise CacheError("the shared memory is full; use a cache folder")
        self._at += len(entry)
        self._take(record)

    def _take(self, record: _Record) -> None:
        self.records[record.kind, record.key] = record
        self.data_end = max(self.data_end, record.end)


class ArenaPlace:
    """Where one object lies in the memory.

    Parameters
    ----------
    arena : Arena
        The memory.
    data_at, map_at : int
        Where in it.
    """

    def __init__(self, arena: "Arena", data_at: int, map_at: int) -> None:
        self.data_at = data_at
        self.map_at = map_at
        self._arena = arena  # whose descriptor must stay open

    @property
    def data_path(self) -> str:
        """Nowhere."""
        return ""

    def open_data(self) -> int:
        """Open the memory."""
        return self._arena.reopen()

    def open_map(self) -> int:
        """Open the memory."""
        return self._arena.reopen()


class Arena:
    """Shared memory for objects.

    Parameters
    ----------
    fd : int or None
        The descriptor of another process's arena, inherited; ``None`` makes one.

    Raises
    ------
    CacheError
        ``fd`` is no such thing, or there is no shared memory.
    """

    def __init__(self, fd: int | None = None) -> None:
        try:
            if fd is None:
                fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
                weakref.finalize(self, os.close, fd).atexit = False
                os.ftruncate(fd, _LOG_BYTES)
            elif not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith(f"/memfd:{_NAME} "):
                raise CacheError(f"descriptor {fd} is not memory of loadstone's; remove LOADSTONE_CACHE_DIR")
            self.fd = fd
            self.reopen = _reopener(fd)
            self.leases = Leases(self.reopen)
            self._lock = threading.Lock()
            self._log = _Log()
            renew_in_child(self)
        except OSError as error:
            raise CacheError(f"no shared memory can be had: {error.strerror}; use a cache folder") from None

    @property
    def address(self) -> str:
        """What a process that inherits the descriptor takes as its cache folder."""
        return f"{PREFIX}{self.fd}"

    @property
    def inherited(self) -> bool:
        """Say whether another process made it and handed it over, who has then said why."""
        return os.get_inheritable(self.fd)

    def blob(self, name: str, key: str, size: int) -> StoredBlob:
        """Return the blob ``key``, made if need be.

        Raises
        ------
        CacheError
            There is no place for it.
        """
        with self._appending() as fd:
            found = self._log.records.get(("blob", key))
            if found is None:
                at = self._log.data_end
                end = -(-(at + block_count(size) * (BLOCK + 1)) // BLOCK) * BLOCK
                if end > _LONGEST:
                    raise CacheError(f"{name} does not fit into memory that is shared; use a cache folder")
                os.ftruncate(fd, max(end, os.fstat(fd).st_size))
                found = _Record("blob", key, size=size, at=at, end=end)
                self._log.append(fd, found)
        place = ArenaPlace(self, found.at, found.at + block_count(size) * BLOCK)
        return StoredBlob(name, size, place)

    def holds(self, key: str) -> bool:
        """Say whether the blob ``key`` is here, complete or not."""
        return self._look("blob", key) is not None

    def ref(self, identity: str) -> Version | None:
        """Return the version that an object last had."""
        found = self._look("ref", _digest(identity))
        return Version(found.tag, found.size) if found else None

    def set_ref(self, identity: str, version: Version) -> None:
        """Remember the version that an object has now."""
        if self.ref(identity) != version:
            record = _Record("ref", _digest(identity), tag=version.tag, size=version.size)
            with self._appending() as fd:
                self._log.append(fd, record)

    @contextmanager
    def opening(self, identity: str, seconds: float) -> Iterator[None]:
        """Let one opener of an object at a time look at it; nobody waits longer than ``seconds``."""
        fd = self.reopen()
        try:
            wait_for_turn(fd, _TURNS + int(_digest(identity)[:12], 16), seconds)
            yield
        finally:
            close_own(fd)

    def reset_in_child(self) -> None:
        """Renew the lock, and read the log anew: the parent may have been in the middle of that."""
        self._lock = threading.Lock()
        self._log = _Log()

    def _look(self, kind: str, key: str) -> _Record | None:
        fd = self.reopen()
        try:
            with self._lock:
                self._log.read_on(fd)
                return self._log.records.get((kind, key))
        finally:
            close_own(fd)

    @contextmanager
    def _appending(self) -> Iterator[int]:
        fd = self.reopen()
        try:
            if not wait_for_turn(fd, 0, _SECONDS):
                raise CacheError("another process holds the shared memory's log and does not move; end it")
            with self._lock:
                self._log.read_on(fd)
                yield fd
        finally:
            close_own(fd)


def adopt(address: str) -> Arena:
    """Join the arena that ``address`` (`Arena.address`) names.

    Raises
    ------
    CacheError
        This process did not inherit it.
    """
    try:
        return Arena(int(address.removeprefix(PREFIX)))
    except (ValueError, CacheError):
        raise CacheError(
            f"{address} was not inherited here; let no program between `loadstone run` and this one close it"
        ) from None


def join(address: str, folder: Path) -> str:
    """Return an address that names a cache folder as well, which is read before the memory is filled."""
    return f"{address}:{folder.absolute()}"


def split(address: str) -> tuple[str, str]:
    """Return what `join` was given; the folder is empty where there was none."""
    number, _, folder = address.removeprefix(PREFIX).partition(":")
    return f"{PREFIX}{number}", folder


def _reopener(fd: int) -> Callable[[], int]:
    expected = FileId.of(fd)

    def reopen() -> int:
        try:
            own = open_own(f"/proc/self/fd/{fd}")
        except OSError as error:
            if error.errno in {errno.EMFILE, errno.ENFILE}:
                raise
            raise GoneError(f"the shared memory cannot be opened any more: {error.strerror}") from None
        if FileId.of(own) != expected:  # somebody closed the descriptor, and its number serves another file
            close_own(own)
            raise GoneError("the shared memory was closed by another part of this process")
        return own

    return reopen


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
