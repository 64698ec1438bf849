"""Ranged reads through fsspec, for stores that have no HTTP form (memory, SFTP, HDFS).

fsspec has no conditional reads, so a version is what ``info`` says (an ETag, a checksum, a time of
modification), compared before and after each window is read and before any of it is handed on. A replacement
that leaves all of that as it was (same size, within one tick of a coarse clock) cannot be seen; where
``info`` says nothing but the size, objects count as unpinned and are taken whole. How long a read may hang is
up to the file system's own library.

Ownership: file systems that are not asynchronous are not known to be thread-safe, so each thread has its
own, and a forked child makes new ones.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from loadstone.errors import (
    ChangedError,
    ClosedError,
    MissingExtraError,
    NotFoundError,
    SettingsError,
    TransferError,
)
from loadstone.loader.locations import Location, redact
from loadstone.loader.ranges import ByteRange, split
from loadstone.loader.source import StatedDigest
from loadstone.loader.stores.answers import changed
from loadstone.loader.stores.backoff import Manners, TemporaryError, Work
from loadstone.loader.stores.fserrors import persist, translated
from loadstone.loader.stores.slots import Share
from loadstone.loader.stores.store import CHUNK, Gate, Probe, RemoteObject, Sink, Version
from loadstone.settings import Settings

_T = TypeVar("_T")
_WINDOW = 4 * CHUNK
_FACTS = (
    "ETag",
    "etag",
    "checksum",
    "md5Hash",
    "md5",
    "content_md5",
    "generation",
    "blob_id",
    "sha",
    "mtime",
    "modified",
    "LastModified",
    "last_modified",
    "last_commit",
    "updated",
    "created",
)
"""What file systems call the things that change when a file does."""


@dataclass(frozen=True, slots=True)
class FsspecObject:
    """An object that is read through fsspec; see `RemoteObject`."""

    name: str
    identity: str
    path: str


class FileSystems:
    """The fsspec file systems of one location, one for each thread and process."""

    def __init__(self, location: Location, options: Mapping[str, object]) -> None:
        self._location = location
        self._options = dict(options)
        self._local = threading.local()

    def get(self) -> Any:
        """Return this thread's file system.

        Raises
        ------
        MissingExtraError
            The package that knows the protocol is not installed.
        """
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.fs = self._make()
            self._local.pid = os.getpid()
        return self._local.fs

    def _make(self) -> Any:
        import fsspec  # noqa: PLC0415  a tenth of a second that only these stores pay

        scheme = self._location.scheme
        try:
            kind = fsspec.get_filesystem_class(scheme)
            login = self._location.secrets.userinfo
            url = f"{scheme}://{login}@{self._location.path}" if login else self._location.text
            options = {**kind._get_kwargs_from_urls(url), **self._options}
            return kind(**options, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            raise MissingExtraError(
                f"{scheme}:// needs a package that is not installed: {error}; install it (extras: gcs, azure)"
            ) from None
        except (TypeError, ValueError) as error:
            raise SettingsError(
                f"{scheme}:// cannot be opened with these storage_options: {redact(str(error))}"
            ) from None


class FsspecTransport:
    """Ranged reads through fsspec; see `Transport`."""

    def __init__(self, systems: FileSystems, settings: Settings) -> None:
        self._systems = systems
        self._settings = settings
        self._manners = Manners()
        self._share = Share(settings.max_connections)
        self._closed = False

    def probe(self, obj: RemoteObject, count: int, known: Version | None, gate: Gate) -> Probe:
        """Look at ``obj`` once; see `Transport.probe`."""

        def look() -> Probe:
            version = self._version(obj)
            if known is not None and known.pinned and version == known:
                return Probe(None, b"", not_modified=True, whole=False)
            gate.admit(min(count, version.size))
            data = self._read(obj, ByteRange(0, min(count, version.size)))
            if self._version(obj) != version:
                raise TemporaryError(f"{obj.name} changed while it was being opened")
            return Probe(version, data, not_modified=False, whole=len(data) == version.size)

        return self._persist(obj, gate, look)

    def fetch(self, obj: RemoteObject, version: Version, span: ByteRange, sink: Sink, gate: Gate) -> None:
        """Deliver ``span`` of ``version``; see `Transport.fetch`."""
        if not version.pinned:
            raise TransferError(f"{obj.name} has nothing that tells its versions apart; read it whole")
        for window in split(span, _WINDOW):
            gate.admit(min(window.nbytes, CHUNK))
            data = self._persist(obj, gate, partial(self._pinned_read, obj, version, window))
            _deliver(data, window.start, sink, gate)

    def fetch_whole(self, obj: RemoteObject, size_hint: int, sink: Sink, gate: Gate) -> Version:
        """Deliver an object from one open file; see `Transport.fetch_whole`."""

        def once() -> Version:
            version = self._version(obj)
            if size_hint >= 0 and version.size != size_hint:
                raise ChangedError(
                    f"{obj.name} was replaced: it has {version.size} bytes, not {size_hint}; open it again"
                )
            at = 0
            with self._open(obj) as file:
                while at < version.size:
                    gate.admit(min(CHUNK, version.size - at))
                    with translated(obj.name):
                        data = file.read(min(CHUNK, version.size - at))
                    if not data:
                        raise TemporaryError(f"{obj.name} ended after {at} of {version.size} bytes")
                    sink(at, memoryview(data))
                    at += len(data)
            if self._version(obj) != version:
                raise TemporaryError(f"{obj.name} changed while it was being read")
            return version

        return self._persist(obj, gate, once)

    def stated_digest(self, obj: RemoteObject, version: Version, gate: Gate) -> StatedDigest:  # noqa: ARG002
        """Return none; see `Transport.stated_digest`."""
        return StatedDigest(reason="a digest of it is not known for this kind of store")

    def close(self) -> None:
        """Refuse further work; see `Transport.close`."""
        self._closed = True
        self._share.retire()

    def _persist(self, obj: RemoteObject, gate: Gate, step: Callable[[], _T]) -> _T:
        work = Work(obj.name, self._settings.retry_seconds, self._manners, gate)

        def once() -> _T:
            if self._closed:
                raise ClosedError(f"{obj.name}: its store was closed; open the checkpoint again")
            with self._share.one(work.waiting):
                return step()

        return persist(work, once)

    def _pinned_read(self, obj: RemoteObject, version: Version, span: ByteRange) -> bytes:
        data = self._read(obj, span)
        now = self._version(obj)
        if now != version:
            raise changed(obj.name, version, f"it is now {now.tag[:80]} with {now.size} bytes")
        return data

    def _read(self, obj: RemoteObject, span: ByteRange) -> bytes:
        if not span.nbytes:
            return b""
        with self._open(obj) as file, translated(obj.name):
            file.seek(span.start)
            data = file.read(span.nbytes)
        if len(data) != span.nbytes:
            raise TemporaryError(f"{obj.name}: {len(data)} bytes came where {span.nbytes} were asked for")
        return bytes(data)

    def _version(self, obj: RemoteObject) -> Version:
        with translated(obj.name):
            info = self._systems.get().info(_path_of(obj))
        size = info.get("size")
        if info.get("type") == "directory" or not isinstance(size, int):
            raise NotFoundError(f"{obj.name} is not a file of known size; check the spelling")
        facts = [f"{key}={info[key]!r}" for key in _FACTS if info.get(key) is not None]
        digest = hashlib.sha256(f"{size} {facts}".encode()).hexdigest()[:32]
        return Version(f'"{digest}"' if facts else "", size)

    def _open(self, obj: RemoteObject) -> Any:
        with translated(obj.name):
            return self._systems.get().open(_path_of(obj), "rb", cache_type="none")


def _deliver(data: bytes, start: int, sink: Sink, gate: Gate) -> None:
    view = memoryview(data)
    for at in range(0, len(view), CHUNK):
        part = view[at : at + CHUNK]
        if at:
            gate.admit(len(part))
        sink(start + at, part)


def _path_of(obj: RemoteObject) -> str:
    path: str = getattr(obj, "path")  # noqa: B009  a store hands its own objects to its own transport
    return path
