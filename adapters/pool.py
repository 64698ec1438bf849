"""Many adapters over one base: loaded, versioned, leased and applied.

A name stands for a version, which is identified by the hash of its content. A request takes a lease and keeps
the versions that it began with; loading a name again changes what new leases get, in one step, and the old
version is freed when its last lease ends. Adapters live in tiers, each with a budget of its own and the least
recently used leaving first: registered (a name and a place), mapped (its file, read and checked) and attached
(ready to be applied). A lease brings its adapters up from any tier.

A mapped adapter is its own file, never a copy; attached to a model on an accelerator it is a copy there, and
that is what counts as attached. One whose file was overwritten in place is refused at the next lease or
batch; no check can catch one that is cut while a batch reads it: the kernel ends the process with SIGBUS. So
new versions must be renamed into place, or come from a store.

Concurrency: the pool's lock guards the records (`Book`) and is held for microseconds only: never while
reading, attaching or running the model. The attacher's own lock serialises applying and forward passes;
whoever holds that one may take the pool's, never the other way round. Every method may be called from any
thread.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from torch import nn

from loadstone.adapters.attach import Attacher
from loadstone.adapters.book import Book, Entry, describe
from loadstone.adapters.loads import Loads, Reader
from loadstone.adapters.names import check_name
from loadstone.adapters.reader import read_adapter
from loadstone.adapters.roots import Roots
from loadstone.adapters.versions import AdapterStatus, Lease, LeasedVersion, Readable, Version
from loadstone.errors import (
    AdapterBusyError,
    AdapterError,
    ChangedError,
    LoadstoneError,
)
from loadstone.loader.checkpoint import Checkpoint
from loadstone.loader.files import memory
from loadstone.settings import Settings

_Statuses = list[AdapterStatus]
_ATTEMPTS = 16  # a lease whose adapters are unmapped again by others before it gets them all


class AdapterPool:
    """The adapters of one model.

    Parameters
    ----------
    model : torch.nn.Module
        The base, shared by all adapters and never written.
    base : Checkpoint or None
        What ``model`` was made from; adapters are checked against it.
    roots : sequence of str
        Local folders and prefixes in stores that adapters may come from; nothing else is read.
    settings : Settings, optional
        ``adapter_bytes`` bounds what is attached at a time.
    storage_options : mapping, optional
        For the stores of ``roots``.
    mapped_bytes : int
        Most bytes of adapters mapped; 0: twice ``adapter_bytes``, or else half of this process's memory.
    max_names : int
        Most adapters registered.
    absent_seconds : float
        For how long a name that could not be read is not looked for again by leases.
    read : callable, optional
        Reads an adapter; by default `read_adapter` with ``base``.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Checkpoint | None,
        *,
        roots: Sequence[str] = (),
        settings: Settings | None = None,
        storage_options: Mapping[str, object] | None = None,
        mapped_bytes: int = 0,
        max_names: int = 10_000,
        absent_seconds: float = 5.0,
        read: Reader | None = None,
    ) -> None:
        settings = Settings.from_env() if settings is None else settings
        self._attacher = Attacher(model, settings.adapter_bytes)
        mapped_bytes = mapped_bytes or 2 * (settings.adapter_bytes or memory.limit() // 4)
        self._book = Book(mapped_bytes, self._attacher.limit, max_names)
        self._changed = threading.Condition(threading.Lock())
        self._loads = Loads(
            self._book,
            self._changed,
            Roots(roots),
            read=read or _reader(base, storage_options, settings),
            check=self._attacher.size,
            free=self._free,
            busy=self._attacher.runs_elsewhere,
            absent_seconds=absent_seconds,
        )

    # Loading

    def load(self, name: str, location: str | None = None, *, replace: bool = True) -> AdapterStatus:
        """Read an adapter, or read it again: new leases get what is read now.

        Parameters
        ----------
        name : str
            What requests will call it.
        location : str, optional
            Where it lies, inside a root. By default where it was read from last, else the roots are searched
            for a folder of that name.
        replace : bool
            Take the place of another content that is loaded under this name.

        Returns
        -------
        AdapterStatus
            Ready. When the content is the one that was loaded already, nothing was changed.

        Raises
        ------
        LoadstoneError
            It cannot be used, or would replace what it must not (`AdapterLoadedError`). A version that was
            ready before stays so.
        """
        name = check_name(name)
        self._loads.load(name, self._loads.places(name, location), replace=replace)
        return self.status(name)

    def register(self, name: str, location: str | None = None) -> AdapterStatus:
        """Make a name known without reading anything but its place; the first lease loads it."""
        name = check_name(name)
        places = self._loads.places(name, location)
        with self._changed:
            self._book.check_open()
            entry = self._book.enter(name, places)
            if entry.version is None:
                entry.places = places
        return self.status(name)

    # Using

    def lease(self, names: Sequence[str | None], label: str = "") -> Lease:
        """Hold the adapters of a request's rows, loading those that are not mapped.

        Parameters
        ----------
        names : sequence of str or None
            The adapter of each row; ``None`` for the base alone.
        label : str
            Who holds them: shown by `list`, and when something has to wait for this lease.

        Raises
        ------
        AdapterNotFoundError
            No root has such an adapter, or it is being unloaded.
        AdapterBusyError
            The budget is full of adapters in use.
        ChangedError
            An adapter's file was overwritten in place after it was loaded.
        LoadstoneError
            An adapter cannot be used.
        """
        wanted = [None if name is None else check_name(name) for name in names]
        for _ in range(_ATTEMPTS):
            for name in dict.fromkeys(wanted):
                if name is not None:
                    self._loads.ensure(name)
            lease = self._try_lease(wanted, label)
            if lease is not None:
                try:
                    _check_unaltered(lease.rows)
                except LoadstoneError:
                    lease.release()
                    raise
                return lease
        raise AdapterBusyError(
            f"{', '.join(name for name in wanted if name)} were unmapped by others before this lease got all "
            "of them; raise the budget of mapped adapters"
        )

    def _try_lease(self, names: Sequence[str | None], label: str) -> Lease | None:
        with self._changed:
            self._book.check_open()
            pairs: list[tuple[Entry, Version] | None] = []
            for name in names:
                entry = None if name is None else self._book.entries.get(self._book.resolve(name))
                if name is not None and (entry is None or entry.version is None or entry.draining):
                    return None
                pairs.append(None if entry is None or entry.version is None else (entry, entry.version))
            versions = [pair[1] for pair in pairs if pair is not None]
            self._book.admit(versions)
            self._book.hold(versions)
            rows = [None if pair is None else (pair[0].name, pair[1]) for pair in pairs]
            lease = Lease(rows, label, self._release)
            for entry in {id(pair[0]): pair[0] for pair in pairs if pair is not None}.values():
                entry.holders[lease.key] = label
                entry.uses += 1
                entry.last_use = time.time()
                self._book.touch(entry)
            return lease

    def _release(self, lease: Lease) -> None:
        with self._changed:
            if lease.released:
                return
            lease.released = True
            for row in lease.rows:
                entry = None if row is None else self._book.entries.get(row.name)
                if entry is not None:
                    entry.holders.pop(lease.key, None)
            self._book.unhold(row.version for row in lease.rows if row is not None)
            self._changed.notify_all()
        self._free()

    @contextmanager
    def apply(self, rows: Sequence[LeasedVersion | None]) -> Iterator[None]:
        """Let each row of the batches that the model runs inside have its own adapter, or none.

        One thread at a time; others wait here. The model must be run by the thread that entered.

        Parameters
        ----------
        rows : sequence of LeasedVersion or None
            One for each row of the batch, from `Lease.rows`, perhaps of several leases. A batch of one
            adapter may have any number of rows.

        Raises
        ------
        AdapterUnsupportedError
            These adapters cannot share a batch; each can be run in a batch of its own.
        AdapterError
            A lease has ended, or is another pool's.
        ChangedError
            An adapter's file was overwritten in place after it was loaded.
        """
        _check_unaltered(rows)
        versions = [None if row is None else row.version for row in rows]
        held = [version for version in versions if version is not None]
        with self._changed:
            self._book.check_open()
            for row in rows:
                if row is not None and (row.lease.released or not self._book.is_alive(row.version)):
                    raise AdapterError(f"the lease on adapter {row.name!r} has ended; take a new one")
            self._book.hold(held)
        try:
            with self._attacher.apply(versions):
                yield
        finally:
            with self._changed:
                self._book.unhold(held)
            self._free()

    # Managing

    def unload(self, name: str, timeout: float | None = 30.0) -> None:
        """Take an adapter away: no new leases at once, gone when its last lease ends. An alias just goes.

        Only `load` or `register` bring it back; a lease does not find it in the roots again.

        Parameters
        ----------
        timeout : float or None
            Seconds to wait for leases; ``None``: without limit.

        Raises
        ------
        AdapterNotFoundError
            No adapter has that name.
        AdapterBusyError
            It is pinned, or still held after ``timeout`` seconds, and by whom; it then stays loaded.
        """
        name = check_name(name)
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._book.check_open()
            if self._book.aliases.pop(name, None) is not None:
                return
            entry = self._book.find(name)
            if entry.pinned or entry.draining:
                why = "pinned; unpin it first" if entry.pinned else "being unloaded already"
                raise AdapterBusyError(f"adapter {name!r} is {why}")
            entry.draining = True
            try:
                self._drain(entry, end)
                self._book.remove(entry)
                self._book.revoke(name)
            finally:
                entry.draining = False
                self._changed.notify_all()
        self._free()

    def _drain(self, entry: Entry, end: float | None) -> None:
        while entry.loading is not None or entry.holders:
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                what = f"held by {describe(entry.holders.values())}" if entry.holders else "loading"
                raise AdapterBusyError(
                    f"adapter {entry.name!r} is still {what}; it stays loaded, unload it later"
                )
            self._changed.wait(left)
            self._book.check_open()

    def pin(self, name: str, *, pinned: bool = True) -> None:
        """Keep an adapter mapped, loading it if need be; with ``pinned=False`` let it leave again."""
        name = check_name(name)
        if pinned:
            self.lease([name], "pin").release()
        with self._changed:
            self._book.find(self._book.resolve(name)).pinned = pinned

    def alias(self, alias: str, name: str) -> None:
        """Let ``alias`` mean whatever ``name`` stands for; an alias that exists is pointed anew."""
        alias, name = check_name(alias), check_name(name)
        with self._changed:
            self._book.check_open()
            target = self._book.find(self._book.resolve(name)).name
            if alias in self._book.entries:
                raise AdapterError(f"{alias!r} is an adapter; unload it before using its name as an alias")
            self._book.aliases[alias] = target

    def status(self, name: str) -> AdapterStatus:
        """Describe one adapter, also by an alias."""
        name = check_name(name)
        with self._changed:
            entry = self._book.find(self._book.resolve(name))
            return self._statuses([entry])[0]

    def list(self) -> _Statuses:
        """Describe every adapter, by name."""
        with self._changed:
            return self._statuses(sorted(self._book.entries.values(), key=lambda entry: entry.name))

    def _statuses(self, entries: Iterable[Entry]) -> _Statuses:
        aliases: dict[str, list[str]] = {}
        for alias, name in self._book.aliases.items():
            aliases.setdefault(name, []).append(alias)
        attached = self._attacher.is_attached
        return [
            self._book.status(
                entry,
                sorted(aliases.get(entry.name, ())),
                attached=entry.version is not None and attached(entry.version.uid),
            )
            for entry in entries
        ]

    @property
    def attached_bytes(self) -> int:
        """Bytes in use by attached adapters and by the stacks of mixed batches."""
        return self._attacher.nbytes

    def close(self) -> None:
        """Let every adapter go; what leases hold goes when they end."""
        with self._changed:
            self._book.closed = True
            for entry in list(self._book.entries.values()):
                self._book.remove(entry)
            self._changed.notify_all()
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _free(self) -> None:
        with self._changed:
            freed = self._book.take_freed()
        for version in freed:
            version.free()
            self._attacher.forget(version.uid)


def _check_unaltered(rows: Iterable[LeasedVersion | None]) -> None:
    """Refuse adapters whose mapped file was written to: other content, or none, which ends the process."""
    for row in {row.version.uid: row for row in rows if row is not None}.values():
        if row.version.is_altered():
            raise ChangedError(
                f"the file of adapter {row.name!r} was overwritten in place after it was loaded; load it"
                " again, and publish a new version by renaming its files into place"
            )


def _reader(
    base: Checkpoint | None, storage_options: Mapping[str, object] | None, settings: Settings
) -> Reader:
    def read(address: str) -> Readable:
        return read_adapter(address, base=base, storage_options=storage_options, settings=settings)

    return read
