"""The node cache: a folder of blobs that all processes of a machine fill and read together.

``blobs/<key>/`` holds one version of one object (see `blobfolder`), ``refs/`` the last known version of
each object, ``leases`` and ``opens`` carry locks and no bytes. There is no index and no daemon: what is on
the disk is the truth, and death at any instant leaves nothing to repair but drafts to sweep away.

A folder that cannot be used, or has no room, is no failure: objects then live in memory (see `arena`), and
one warning says why. Of a folder that cannot be written, what is complete is used (see `sealed`).

Ownership: a `NodeCache` is used by all threads; ``_lock`` guards what it remembers of the room that is left.
"""

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loadstone.errors import CacheError
from loadstone.loader.node import blobfolder
from loadstone.loader.node.arena import PREFIX, Arena, adopt, join, split
from loadstone.loader.node.blob import StoredBlob
from loadstone.loader.node.cachelist import CacheEntry, Removal, by_last_use, listing
from loadstone.loader.node.filesystem import free_bytes, read_only, refusal
from loadstone.loader.node.forks import renew_in_child
from loadstone.loader.node.leases import Leases, shared_leases
from loadstone.loader.node.locks import close_own, open_own, wait_for_turn
from loadstone.loader.node.notices import warn_once
from loadstone.loader.node.places import FolderPlace, GoneError
from loadstone.loader.node.refs import References
from loadstone.loader.node.sealed import SealedFolder, SealedPlace, usable
from loadstone.loader.node.sealing import Sealer
from loadstone.loader.stores.store import Version
from loadstone.settings import Settings

__all__ = ["CacheEntry", "NodeCache", "Removal"]

_EVICTION_SECONDS = 10.0
_COUNT_SECONDS = 2.0  # for so long, a count of what the folder holds is relied on


class NodeCache:
    """The node cache in the folder that ``settings`` names.

    Parameters
    ----------
    settings : Settings
        ``cache_path`` and ``cache_bytes`` matter here.
    warn : bool
        Write a warning when the folder cannot be used; `problem` says why in any case.
    """

    def __init__(self, settings: Settings, *, warn: bool = True) -> None:
        self._warn = warn
        self._settings = settings
        self._sealer = Sealer()
        self._lock = threading.Lock()
        self._left, self._counted_at = 0, -_COUNT_SECONDS
        renew_in_child(self)
        self.folder: Path | None = None
        self.sealed: SealedFolder | None = None
        self.problem = ""
        self._refused = ""
        self._refs: References | None = None
        self._arena: Arena | None = None
        self._leases: Leases | None = None
        if settings.cache_dir.startswith(PREFIX):
            self._join(settings.cache_dir)
        elif settings.cache_path is not None:
            self._use(settings.cache_path)
        if self.folder is None and self._arena is None:
            with suppress(CacheError):  # without shared memory, memory of this process will do
                self._arena = Arena()
        if self._arena is not None:
            self._leases = self._arena.leases

    def _join(self, address: str) -> None:
        address, folder = split(address)
        if folder:
            self._read_from(Path(folder))
        try:
            self._arena = adopt(address)
        except CacheError as error:
            self.problem = str(error)
            warn_once(f"{self.problem}; fetched bytes stay in memory")

    def _use(self, path: Path) -> None:
        reason = refusal(path)
        if reason is None and read_only(path):
            if self._read_from(path):
                return
            reason = "it is read-only, and holds nothing that can be used"
        try:
            if reason is None:
                for name in ("blobs", "refs"):
                    (path / name).mkdir(mode=0o700, exist_ok=True)
                self._leases = shared_leases(path / "leases")
        except (OSError, CacheError) as error:
            reason = str(error)
        if reason is not None:
            self.problem = f"the node cache {path} is not used: {reason}"
            if self._warn:
                warn_once(f"{self.problem}; fetched bytes stay in memory")
            return
        self.folder = path
        self._refs = References(path, self._leases)
        blobfolder.sweep(path, self._leased.alone)

    def _read_from(self, path: Path) -> bool:
        """Use what a folder that cannot be written holds; ``False`` when that is nothing."""
        if refusal(path) is not None or not usable(path):
            return False
        self.sealed = SealedFolder(path)
        self._refs = References(path, None)
        return True

    def handed_over(self, arena: Arena) -> str:
        """Return what a process that inherits ``arena`` takes as its cache folder."""
        return arena.address if self.sealed is None else join(arena.address, self.sealed.folder)

    def keeps(self, blob: StoredBlob) -> bool:
        """Say whether other processes find what ``blob`` holds: in the folder, or in memory they inherit."""
        if blob.place is None:
            return False
        return self.folder is not None or self._inherited or isinstance(blob.place, SealedPlace)

    @property
    def lack(self) -> str:
        """Say why `keeps` can be untrue."""
        if self.sealed is not None:
            return f"the node cache {self.sealed.folder} is read-only, and not all of it is there"
        if self.folder is None and not self._inherited:
            return self.problem or "the node cache is switched off (LOADSTONE_CACHE_DIR=none)"
        return "the node cache took not all of it" + (self._refused and f": {self._refused}")

    @property
    def _inherited(self) -> bool:
        return self._settings.cache_dir.startswith(PREFIX) and not self.problem

    def blob(self, name: str, identity: str, version: Version, first: bytes = b"") -> StoredBlob:
        """Return the blob of one version of an object, made if need be.

        Parameters
        ----------
        name : str
            The object, for messages.
        identity : str
            What distinguishes it from all others.
        version : Version
            A pinned version. Any other is kept in memory, like everything when the folder is of no use.
        first : bytes
            What is known of its beginning; it may go into a blob that is made, not into one that is here.
        """
        if not version.pinned or version.size == 0:
            return StoredBlob(name, version.size)
        key = _key(identity, version)
        if self.folder is None:
            return self._without_room(name, key, version)
        try:
            taken = self._leased.take(key, _EVICTION_SECONDS)
        except OSError as error:
            return self._in_memory(name, version, str(error))
        if not taken:
            return self._in_memory(name, version, "it is being evicted at the same time, again and again")
        folder = self.folder / "blobs" / key
        try:
            place = self._place(folder, key, name, version, first)
            return StoredBlob(
                name,
                version.size,
                place,
                on_complete=lambda: self._sealer.add(folder),
                on_close=lambda: self._leased.drop(key),
            )
        except (OSError, CacheError) as error:
            self._leased.drop(key)
            return self._in_memory(name, version, str(error))

    def holds(self, identity: str, version: Version) -> bool:
        """Say whether a blob of that version is here, complete or not."""
        key = _key(identity, version)
        if self.sealed is not None and self.sealed.holds(key):
            return True
        if self._arena is not None:
            return self._arena.holds(key)
        return self.folder is not None and (self.folder / "blobs" / key).is_dir()

    def ref(self, identity: str) -> Version | None:
        """Return the version that an object last had, as far as this node knows."""
        found = None if self._arena is None else self._arena.ref(identity)
        return self._refs.read(identity) if found is None and self._refs is not None else found

    def set_ref(self, identity: str, version: Version) -> None:
        """Remember the version that an object has now."""
        if not version.pinned:
            return
        if self._arena is not None:
            with suppress(CacheError):  # it will be asked for again, that is all
                self._arena.set_ref(identity, version)
        if self.folder is not None and self._refs is not None:
            self._refs.write(identity, version, f"{self.folder}/blobs/{_key(identity, version)}/meta.json")

    @contextmanager
    def opening(self, identity: str) -> Iterator[None]:
        """Let one opener of an object at a time look at it, over all processes of the node.

        One that takes longer than ``Settings.stall_timeout`` is no longer waited for: both then look.
        """
        seconds = self._settings.stall_timeout
        if self._arena is not None:
            with self._arena.opening(identity, seconds):
                yield
            return
        if self.folder is None:
            yield
            return
        fd = -1
        # Where the folder was removed or is full, nobody is waited for, and bytes go to memory by and by.
        with suppress(OSError):
            fd = open_own(self.folder / "opens", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            if fd >= 0:
                wait_for_turn(fd, int(hashlib.sha256(identity.encode()).hexdigest()[:15], 16), seconds)
            yield
        finally:
            close_own(fd)

    def make_room(self, nbytes: int) -> bool:
        """Evict blobs that nobody uses, least recently used first; ``False`` when nothing could be."""
        if self.folder is None:
            return False
        freed = 0
        for entry in by_last_use(self.entries()):
            if freed >= nbytes:
                break
            if self._evict(entry):
                freed += entry.allocated
        return freed > 0

    def entries(self) -> list[CacheEntry]:
        """Return every blob, in the order of their locations; of a folder that is only read, those of use."""
        if self.sealed is not None:
            return listing(self.sealed.folder, self.sealed.leases, sealed=True)
        return [] if self.folder is None else listing(self.folder, self._leased)

    def trim(self, max_bytes: int) -> Removal:
        """Evict, least recently used first, until at most ``max_bytes`` are taken."""
        removed, in_use = [], []
        entries = by_last_use(self.entries())
        taken = sum(entry.allocated for entry in entries)
        for entry in entries:
            if taken <= max_bytes:
                break
            if self._evict(entry):
                taken -= entry.allocated
                removed.append(entry)
            else:
                in_use.append(entry)
        return Removal(tuple(removed), tuple(in_use))

    def remove(self, which: str) -> Removal:
        """Evict the blobs whose key begins with ``which``, or that lie at or below the location ``which``."""
        below = which.rstrip("/") + "/"
        chosen = [
            entry
            for entry in self.entries()
            if entry.key.startswith(which) or entry.location == which or entry.location.startswith(below)
        ]
        evicted = {entry for entry in chosen if self._evict(entry)}
        return Removal(
            tuple(entry for entry in chosen if entry in evicted),
            tuple(entry for entry in chosen if entry not in evicted),
        )

    def begin_demand(self) -> None:
        """Tell other processes that a thread of this one is blocked on bytes."""
        if self._leases is not None:
            self._leases.begin_demand()

    def end_demand(self) -> None:
        """Undo one `begin_demand`."""
        if self._leases is not None:
            self._leases.end_demand()

    def foreign_demand(self) -> bool:
        """Say whether a thread of another process is blocked on bytes."""
        return self._leases is not None and self._leases.foreign_demand()

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until complete blobs are sealed; ``False`` when ``timeout`` seconds went by first."""
        return self._sealer.settle(timeout)

    def reset_in_child(self) -> None:
        """Renew the lock."""
        self._lock = threading.Lock()

    @property
    def _leased(self) -> Leases:
        assert self._leases is not None
        return self._leases

    def _without_room(self, name: str, key: str, version: Version) -> StoredBlob:
        found = None if self.sealed is None else self.sealed.blob(name, key, version)
        if found is not None:
            return found
        if self.sealed is not None and not (self._arena is not None and self._arena.inherited):
            folder = str(self.sealed.folder)
            warn_once(
                f"{name} is kept in memory: the node cache {folder} is read-only, and has no complete copy "
                "of this version that can be read",
                folder,
            )
        return self._in_arena(name, key, version.size)

    def _in_arena(self, name: str, key: str, size: int) -> StoredBlob:
        if self._arena is not None:
            try:
                return self._arena.blob(name, key, size)
            except (OSError, CacheError) as error:
                warn_once(f"{name} is kept in memory of this process alone: {error}", "arena")
        return StoredBlob(name, size)

    def _in_memory(self, name: str, version: Version, reason: str) -> StoredBlob:
        self._refused = reason
        warn_once(f"{name} is kept in memory and not in the node cache: {reason}", str(self.folder))
        return StoredBlob(name, version.size)

    def _place(self, folder: Path, key: str, name: str, version: Version, first: bytes) -> FolderPlace:
        host = blobfolder.this_host()
        meta = blobfolder.Meta(name, version.tag, version.size, host.boot, host.machine)
        here = folder.is_dir()
        if here and not blobfolder.trusted(folder, meta, host):
            self._replace(folder, key, meta, host)
            here = folder.is_dir()
        if here:
            os.utime(f"{folder}/meta.json")
        else:
            self._reserve(version.size)
            blobfolder.create(folder, meta, first)
        return FolderPlace(folder)

    def _replace(self, folder: Path, key: str, meta: blobfolder.Meta, host: blobfolder.Host) -> None:
        """Drop a blob that cannot be trusted; the caller's own lease is lifted meanwhile."""
        self._leased.drop(key)
        try:
            with self._leased.alone(key) as nobody:
                if nobody and not blobfolder.trusted(folder, meta, host):
                    blobfolder.drop(folder)
        finally:
            if not self._leased.take(key, _EVICTION_SECONDS):
                raise GoneError(f"{folder} is being replaced by another process, again and again")
        if folder.is_dir() and not blobfolder.trusted(folder, meta, host):
            raise GoneError(f"{folder} is damaged and in use; stop the processes that use it")

    def _reserve(self, nbytes: int) -> None:
        """Make sure that ``nbytes`` more fit the budget and the disk."""
        with self._lock:
            now = time.monotonic()
            if now - self._counted_at < _COUNT_SECONDS and nbytes <= self._left:
                self._left -= nbytes
                return
            self._left = self._count(nbytes) - nbytes
            self._counted_at = now

    def _count(self, nbytes: int) -> int:
        """Count what is left of the budget, evicting until ``nbytes`` fit."""
        assert self.folder is not None
        entries = by_last_use(self.entries())
        # A blob in use may still be filled up; what nobody uses stays as it is.
        held = sum(max(entry.allocated, entry.size) for entry in entries if entry.pids)
        taken = held + sum(entry.allocated for entry in entries if not entry.pids)
        room = free_bytes(self.folder) + sum(entry.allocated for entry in entries)
        budget = min(self._settings.cache_bytes or int(room * 0.9), room)
        for entry in entries:
            if taken + nbytes <= budget or held + nbytes > budget:  # enough, or all of it in vain
                break
            if not entry.pids and self._evict(entry):
                taken -= entry.allocated
        if taken + nbytes > budget:
            raise CacheError(
                f"it takes {nbytes} bytes, and the node cache {self.folder} has {max(0, budget - taken)} of "
                f"{budget} left; raise LOADSTONE_CACHE_BYTES or free some disk"
            )
        return budget - taken

    def _evict(self, entry: CacheEntry) -> bool:
        if self.folder is None:  # what is only read stays
            return False
        with self._leased.alone(entry.key) as nobody:
            if nobody:
                blobfolder.drop(self.folder / "blobs" / entry.key)
            return nobody


def _key(identity: str, version: Version) -> str:
    return hashlib.sha256(f"{identity}\0{version.key}".encode()).hexdigest()
