"""Bringing adapters into a pool: one read for all who ask at a time, and failures that can be repaired.

Concurrency: the records belong to the pool, whose lock is the condition given here; it is never held while
reading. A load reads in the thread that asked; whoever asks for the same name meanwhile waits for it. A load
that fails leaves what was there before, and the next one starts afresh.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count

from loadstone.adapters.book import Book, Entry
from loadstone.adapters.pace import Pace
from loadstone.adapters.roots import Place, Roots
from loadstone.adapters.versions import Readable, Version
from loadstone.errors import (
    AdapterBusyError,
    AdapterError,
    AdapterLoadedError,
    AdapterNotFoundError,
    ChangedError,
    LoadstoneError,
    NotFoundError,
)

Reader = Callable[[str], Readable]
"""Reads and checks the adapter at an address."""

_ABSENT_LIMIT = 1024
"""Most names remembered as not there."""

_READS = 3
"""Most reads of one adapter whose files keep changing."""

_uids = count(1)


class Loads:
    """Loads of one pool.

    Parameters
    ----------
    book : Book
        The pool's records.
    changed : threading.Condition
        Guards them, and is notified when a load ends.
    roots : Roots
        Where adapters may come from.
    read : callable
        Reads the adapter at an address.
    check : callable
        Checks an adapter against the model, and returns the bytes that it takes when attached.
    free : callable
        Frees what the records have let go of; called without the lock.
    busy : callable
        Says whether another thread is running batches.
    absent_seconds : float
        For how long `ensure` does not try again what failed.
    """

    def __init__(
        self,
        book: Book,
        changed: threading.Condition,
        roots: Roots,
        *,
        read: Reader,
        check: Callable[[Readable], int],
        free: Callable[[], None],
        busy: Callable[[], bool],
        absent_seconds: float,
    ) -> None:
        self._book = book
        self._changed = changed
        self._roots = roots
        self._read = read
        self._check = check
        self._free = free
        self._pace = Pace(busy)
        self._absent: OrderedDict[str, tuple[float, Exception]] = OrderedDict()
        self._absent_seconds = absent_seconds

    def places(self, name: str, location: str | None) -> Sequence[Place]:
        """Return where to read ``name`` from: ``location``, else its place of before, else the roots."""
        if location is not None:
            return self._roots.place(location)
        with self._changed:
            entry = self._book.entries.get(name)
        places = entry.places if entry is not None else self._roots.candidates(name)
        if not places:
            raise AdapterNotFoundError(
                f"no adapter {name!r} in the roots {', '.join(self._roots.names)}; put it there, or give its "
                "location"
            )
        return places

    def load(self, name: str, places: Sequence[Place], *, demand: bool = False, replace: bool = True) -> None:
        """Load in this thread, or wait for the same load in another one.

        ``demand`` takes whatever load is running, and leaves no failed record of a name that had none.
        Without ``replace``, other content than the name has now is refused.
        """
        asked = (tuple(places), replace)
        mine: Future[None] = Future()
        while True:
            with self._changed:
                self._book.check_open()
                if demand:
                    self._book.check_not_revoked(name)
                created = name not in self._book.entries
                entry = self._book.enter(name, places)
                if entry.draining:
                    raise AdapterBusyError(f"adapter {name!r} is being unloaded; load it when that is done")
                running = entry.loading
                if running is None:
                    entry.loading, entry.asked = mine, asked
                    break
                same = demand or entry.asked == asked
            error = running.exception()
            if same and error is not None:
                raise again(error)
            if same:
                return
        try:
            self._read_into(entry, places, replace=replace)
        except BaseException as error:
            self._fail(entry, error, forget=demand and created)
            mine.set_exception(again(error))
            raise
        mine.set_result(None)
        self._free()

    def ensure(self, name: str) -> None:
        """Load an adapter (also by an alias) unless it is ready, or could not be loaded a moment ago."""
        with self._changed:
            self._book.check_open()
            name = self._book.resolve(name)
            entry = self._book.entries.get(name)
            if entry is not None and entry.draining:
                raise AdapterNotFoundError(f"adapter {name!r} is being unloaded; it takes no more requests")
            if entry is not None and entry.version is not None:
                return
            if entry is None:
                failed = self._absent.get(name)
            else:
                failed = None if entry.error is None else (entry.failed_at, entry.error)
            if failed is not None and time.monotonic() - failed[0] < self._absent_seconds:
                raise again(failed[1])
        if entry is None and not self._roots.names:
            raise AdapterNotFoundError(f"no adapter {name!r} is loaded, and there is no root to look in")
        try:
            self.load(name, self.places(name, None), demand=True)
        except (AdapterError, NotFoundError) as error:
            if not isinstance(error, AdapterBusyError):
                self._note(name, error)
            raise

    def _note(self, name: str, error: Exception) -> None:
        with self._changed:
            self._absent[name] = time.monotonic(), again(error)
            self._absent.move_to_end(name)
            while len(self._absent) > _ABSENT_LIMIT:
                self._absent.popitem(last=False)

    def _read_into(self, entry: Entry, places: Sequence[Place], *, replace: bool) -> None:
        start = time.perf_counter()
        with self._pace.turn():
            place, adapter = self._read_first(entry.name, places)
        try:
            fresh = Version(next(_uids), adapter, self._check(adapter))
            with self._changed:
                known = self._book.version_of(adapter.digest)
            if known is not None and known.is_altered():
                known = fresh  # that one's bytes are not what they were
            with self._changed:
                self._book.check_open()
                version = known if known is fresh else self._book.version_of(adapter.digest) or fresh
                self._book.install(entry, version, replace=replace)
                self._book.touch(entry)
                entry.places, entry.error, entry.loading = [place], None, None
                entry.load_seconds = time.perf_counter() - start
                self._absent.pop(entry.name, None)
                self._changed.notify_all()
        except BaseException:
            adapter.close()
            raise
        if version is not fresh:
            fresh.free()

    def _read_first(self, name: str, places: Sequence[Place]) -> tuple[Place, Readable]:
        for place in places:
            try:
                return place, self._read_unchanging(place.address)
            except NotFoundError as error:
                missing = error
        raise AdapterNotFoundError(f"adapter {name!r} is not there: {missing}") from missing

    def _read_unchanging(self, address: str) -> Readable:
        """Read an adapter, and once more when its files were replaced meanwhile: the new ones are wanted."""
        for _ in range(_READS - 1):
            try:
                return self._read(address)
            except ChangedError:
                continue
        return self._read(address)

    def _fail(self, entry: Entry, error: BaseException, *, forget: bool) -> None:
        with self._changed:
            entry.loading = None
            if not isinstance(error, AdapterLoadedError):
                entry.error, entry.failed_at = again(error), time.monotonic()
            if forget and self._book.entries.get(entry.name) is entry:
                self._book.remove(entry)
            self._changed.notify_all()
        self._free()


def again(error: BaseException) -> Exception:
    """Return an error to raise in another thread or later: a new one, without the first one's frames."""
    if isinstance(error, LoadstoneError):
        return type(error)(*error.args)
    if isinstance(error, Exception):
        return AdapterError(f"the adapter could not be loaded: {type(error).__name__}: {error}")
    return AdapterError("loading the adapter was interrupted; load it again")
