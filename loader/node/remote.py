"""Folders in object stores, as sources: probed once, kept in the node cache, fetched on demand or ahead.

Opening an object is one small request: its first 64 KiB, and with them its version. Where this node knows
the object already, the request asks whether it is still that version, and an answer that it is moves no
bytes. Processes that open the same object at the same moment take turns, so that the first request serves
them all.

Ownership: a `RemoteSource` is used by all threads. ``_lock`` guards its table of blobs, ``_opening`` lets one
`open` at a time through, ``_tidy`` one of its threads at a time at the node cache (many small file operations
side by side would spend more time on passing the interpreter's lock around). Threads that probe work for
`open` alone, and have nothing left to do for it when it returns. A forked child uses its copy as the parent
does; connections, threads and locks are renewed below.
"""

import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from loadstone.errors import ClosedError, FormatError, LoadstoneError, TransferError
from loadstone.loader.locations import Location
from loadstone.loader.node import fetchers, helpers
from loadstone.loader.node.blob import StoredBlob
from loadstone.loader.node.cache import NodeCache
from loadstone.loader.node.cached import bring_into_memory
from loadstone.loader.node.claims import StorageError
from loadstone.loader.node.forks import renew_in_child
from loadstone.loader.node.handles import PrefetchHandle
from loadstone.loader.node.prefetch import Fetcher
from loadstone.loader.node.waiting import wait_for
from loadstone.loader.node.whole import WholeBlob
from loadstone.loader.ranges import BLOCK, ByteRange
from loadstone.loader.source import Blob, Span, StatedDigest
from loadstone.loader.stores.store import Gate, Probe, RemoteObject, Sink, Store, Version, open_store
from loadstone.settings import Settings

_PROBES = 32
_AT_ONCE = 0.01  # seconds in which first answers come from a store that is near
_LARGEST = 1 << 44  # the map of blocks takes memory in proportion, on the word of the store alone


class RemoteBlob:
    """One version of one object of a store; see `source.Blob`."""

    def __init__(
        self, source: "RemoteSource", obj: RemoteObject, version: Version, stored: StoredBlob
    ) -> None:
        self._source = source
        self._object = obj
        self._version = version
        self.stored = stored
        self.closed = False

    @property
    def name(self) -> str:
        """Its location."""
        return self._object.name

    @property
    def size(self) -> int:
        """Its length."""
        return self._version.size

    @property
    def version(self) -> str:
        """Its ETag and size."""
        return self._version.key

    def buffer(self) -> memoryview:
        """Return the whole object as private memory; see `source.Blob.buffer`."""
        self.check_open()
        return self.stored.view

    def ready(self, span: ByteRange) -> bool:
        """Say whether ``span`` can be used now."""
        return self.stored.ready(span)

    def ensure(self, spans: Sequence[ByteRange], timeout: float | None = None) -> None:
        """Block until ``spans`` are ready; see `source.Blob.ensure`."""
        self.check_open()
        for span in spans:
            if span.stop > self.size:
                raise TransferError(
                    f"{self.name} has {self.size} bytes; {span.start} to {span.stop} do not exist"
                )
        wait_for(self._source.fetcher, self, spans, timeout)
        if self.stored.paging is not None:
            self.stored.paging.begin(self.stored.view, spans)

    def read(self, span: ByteRange) -> bytes:
        """Return a copy of ``span``'s bytes, waiting for them."""
        self.ensure([span])
        return bytes(self.stored.view[span.start : span.stop])

    def close(self) -> None:
        """Let go of it; see `source.Blob.close`."""
        self.closing()
        self._source.fetcher.quiet(lambda blob: blob is self)
        self.stored.close()

    def closing(self) -> None:
        """End what is going on with it, without waiting for that."""
        self.closed = True
        self.stored.nudge()

    def check_open(self) -> None:
        """Raise when it was closed."""
        if self.closed:
            raise ClosedError(f"{self.name} was closed; open the checkpoint again")

    def stated_digest(self) -> StatedDigest:
        """Ask the store for a digest of this version."""
        self.check_open()
        if not self._version.pinned:
            return StatedDigest(reason="its store gives no strong ETag")
        return self._source.store.transport.stated_digest(
            self._object, self._version, _ProbeGate(self._source)
        )

    # What the fetcher asks (see `jobs.Fillable`).

    def fill(self, span: ByteRange, sink: Sink, gate: Gate) -> None:
        """Fetch ``span``."""
        transport = self._source.store.transport
        if isinstance(self.stored, WholeBlob):
            transport.fetch_whole(self._object, self.size, sink, gate)
        else:
            transport.fetch(self._object, self._version, span, sink, gate)

    def make_room(self, nbytes: int) -> bool:
        """Evict what nobody uses."""
        return self._source.cache.make_room(nbytes)

    def foreign_demand(self) -> bool:
        """Say whether a thread of another process is blocked on bytes."""
        return self._source.cache.foreign_demand()

    def begin_demand(self) -> None:
        """Tell other processes that a thread of this one is blocked."""
        self._source.cache.begin_demand()

    def end_demand(self) -> None:
        """Undo one `begin_demand`."""
        self._source.cache.end_demand()


@dataclass(frozen=True, slots=True)
class _Round:
    """Objects that are opened together: names are taken by any thread, the last to end one says so."""

    names: deque[str]
    count: int
    found: dict[str, Blob | LoadstoneError] = field(default_factory=dict)
    ended: deque[str] = field(default_factory=deque)
    done: threading.Event = field(default_factory=threading.Event)

    def end(self, name: str) -> None:
        self.ended.append(name)
        if len(self.ended) == self.count:
            self.done.set()


class RemoteSource:
    """A folder in an object store.

    Parameters
    ----------
    store : Store
        Where it is; closed with the source.
    settings : Settings
        Limits.
    cache : NodeCache
        Where bytes are kept.
    """

    def __init__(self, store: Store, settings: Settings, cache: NodeCache) -> None:
        self.store = store
        self.cache = cache
        self.fetcher: Fetcher = fetchers.acquire(settings)
        self._settings = settings
        self._blobs: dict[str, RemoteBlob] = {}
        self._handles: list[PrefetchHandle] = []
        self._helpers = helpers.acquire(self)
        self._probes = min(_PROBES, self.fetcher.limit)
        self._closed = False
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._tidy = threading.Lock()
        renew_in_child(self)

    @property
    def name(self) -> str:
        """Where it is."""
        return self.store.name

    def names(self) -> tuple[str, ...] | None:
        """Return the names of the files directly inside, or ``None`` when the store cannot list."""
        self._check_open()
        return self.store.names()

    def open(self, names: Sequence[str]) -> dict[str, Blob | LoadstoneError]:
        """Open several objects side by side; see `source.Source.open`."""
        with self._opening:
            self._check_open()
            with self._lock:
                new = dict.fromkeys(name for name in names if not self._is_open(name))
                first = not self._blobs
            work = _Round(deque(new), len(new))
            if len(new) > 1:
                with suppress(RuntimeError):  # no more threads to be had: those that run do all of it
                    self._open_by_helpers(work, first)
            self._open_some(work)
            if new:
                work.done.wait()
            with self._lock:
                self._blobs.update(
                    {name: blob for name, blob in work.found.items() if isinstance(blob, RemoteBlob)}
                )
                return {name: work.found.get(name) or self._blobs[name] for name in names}

    def prefetch(self, spans: Sequence[Span], *, warm: bool = True) -> PrefetchHandle:
        """Start to bring ``spans`` here, in their order, in the background; see `source.Source.prefetch`."""
        self._check_open()
        wanted = []
        for span in spans:
            if not isinstance(span.blob, RemoteBlob):
                raise TransferError(
                    f"{span.blob.name} is not an object of {self.name}; prefetch it where it is"
                )
            wanted.append((span.blob, span.range))
        handle = self.fetcher.prefetch(wanted)
        if warm:
            handle.resident = bring_into_memory(wanted)
        with self._lock:
            self._handles = [old for old in self._handles if not old.done()] + [handle]
        return handle

    def stated_digest(self, blob: Blob) -> StatedDigest:
        """Ask the store for a digest of ``blob``; see `source.Source.stated_digest`."""
        self._check_open()
        if not isinstance(blob, RemoteBlob):
            return StatedDigest(reason=f"it is no object of {self.name}")
        return blob.stated_digest()

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until complete blobs are sealed; ``False`` when ``timeout`` seconds went by first."""
        return self.cache.settle(timeout)

    def passing(self, names: Collection[str] | None = None) -> str:
        """Say why its bytes go with this process; see `source.Source.passing`."""
        with self._lock:
            chosen = [blob for name, blob in self._blobs.items() if names is None or name in names]
        blobs = [blob for blob in chosen if blob.size and not blob.closed]
        if any(isinstance(blob.stored, WholeBlob) for blob in blobs):
            return "the store gives no strong ETag that would tell versions apart"
        return "" if all(self.cache.keeps(blob.stored) for blob in blobs) else self.cache.lack

    def close(self) -> None:
        """Stop every prefetch and close every blob."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            blobs, handles = list(self._blobs.values()), self._handles
        for blob in blobs:
            blob.closing()
        self.store.close()
        helpers.release(self)
        for handle in handles:
            handle.cancel()
        for blob in blobs:
            blob.close()
        with self._lock:  # they know this source: without the cycle, memory comes back at once
            self._blobs.clear()
            self._handles.clear()
        fetchers.release(self.fetcher)

    def reset_in_child(self) -> None:
        """Forget who held the locks."""
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._tidy = threading.Lock()

    def _is_open(self, name: str) -> bool:
        blob = self._blobs.get(name)
        return blob is not None and not blob.closed

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.name} was closed; open the checkpoint again")

    def _open_by_helpers(self, work: _Round, first: bool) -> None:
        for _ in range(min(work.count, self._probes)):
            self._helpers.run(partial(self._open_some, work))
        if first:
            self._helpers.run(partial(self._reach_out, work))

    def _reach_out(self, work: _Round) -> None:
        """Make connections for what is opened next.

        Who begins with several objects of a folder goes on with more of them, as soon as their names are
        known: new connections would then cost round trips of their own. Where answers come at once, round
        trips are short, and making connections takes longer than they save.
        """
        if work.done.wait(_AT_ONCE):
            return
        with suppress(LoadstoneError, RuntimeError):  # requests will say why; no more threads to be had
            connector = self.store.connector()
            if connector is None:
                return
            for _ in range(min(connector.most, self._probes - work.count - 1)):
                if work.done.is_set():
                    return
                self._helpers.run(connector.connect)

    def _open_some(self, work: _Round) -> None:
        while True:
            try:
                name = work.names.popleft()
            except IndexError:
                return
            try:
                work.found[name] = self._open_one(name)
            except LoadstoneError as error:
                work.found[name] = error.with_traceback(None)  # it would lead back to ``work``
            except Exception as error:  # noqa: BLE001  one object's failure must not hide the others
                work.found[name] = TransferError(
                    f"{self.name.rstrip('/')}/{name}: opening failed unexpectedly: {error!r}"
                )
            finally:
                work.end(name)

    def _open_one(self, name: str) -> RemoteBlob:
        obj = self.store.object(name)
        with self.cache.opening(obj.identity):
            with self._tidy:
                known = self.cache.ref(obj.identity)
                if known is not None and not self.cache.holds(obj.identity, known):
                    known = None
            probe = self.store.transport.probe(obj, BLOCK, known, _ProbeGate(self))
            with self._tidy:
                if probe.not_modified and known is not None:
                    blob = RemoteBlob(self, obj, known, self.cache.blob(obj.name, obj.identity, known))
                else:
                    blob = self._admit(obj, probe)
        blob.ensure([ByteRange(0, min(BLOCK, blob.size))])
        return blob

    def _admit(self, obj: RemoteObject, probe: Probe) -> RemoteBlob:
        version = probe.version
        if version is not None and version.size > _LARGEST:
            raise FormatError(
                f"{obj.name} has {version.size} bytes, as the store says, where at most {_LARGEST} are "
                "handled; check the server"
            )
        if version is None:
            raise TransferError(f"{obj.name}: the store says it is unchanged, though nothing was known of it")
        if not version.pinned:
            stored: StoredBlob = WholeBlob(obj.name, version.size)
            stored.deposit(probe.data)
            return RemoteBlob(self, obj, version, stored)
        stored = self.cache.blob(obj.name, obj.identity, version, probe.data)
        try:
            stored.deposit(probe.data)
        except StorageError as error:
            stored.spill(error)
            stored.deposit(probe.data)
        self.cache.set_ref(obj.identity, version)
        return RemoteBlob(self, obj, version, stored)


class _ProbeGate:
    """Ends a probe when its source is closed."""

    def __init__(self, source: RemoteSource) -> None:
        self._source = source

    def admit(self, nbytes: int) -> None:  # noqa: ARG002  a probe is too small to be held back
        self._source._check_open()

    def throttled(self, retry_after: float | None) -> None:  # noqa: ARG002  the transport itself waits
        self._source.fetcher.slow_down()


def open_remote(
    location: Location,
    storage_options: Mapping[str, object] | None,
    settings: Settings,
    cache: NodeCache | None,
) -> RemoteSource:
    """Return the folder ``location`` of an object store as a source. Does no I/O.

    Parameters
    ----------
    location : Location
        A folder that is not local.
    storage_options : Mapping
        For the store; see `stores.open_store`.
    settings : Settings
        Limits.
    cache : NodeCache or None
        Where bytes are kept; ``None``: in this process's memory.
    """
    store = open_store(location, storage_options, settings)
    return RemoteSource(store, settings, cache or NodeCache(replace(settings, cache_dir="none")))
