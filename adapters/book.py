"""A pool's records: which names exist, which version each has, and who holds what.

No lock and no I/O of its own: the pool calls everything here with its lock held, and frees the versions that
are handed back (`take_freed`) after it has let go of the lock.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import count

from loadstone.adapters.roots import Place
from loadstone.adapters.versions import AdapterStatus, State, Version
from loadstone.errors import (
    AdapterBusyError,
    AdapterError,
    AdapterLoadedError,
    AdapterNotFoundError,
    ClosedError,
)

_SHOWN_HOLDERS = 5


class Entry:
    """One name.

    Attributes
    ----------
    places : sequence of Place
        Where it is read from, in order.
    version : Version or None
        What a lease gets now.
    loading : Future or None
        Done when the load that runs has ended.
    asked : object
        What that load was asked for; the same again may wait for it.
    holders : dict
        Labels of its leases, of all versions.
    """

    __slots__ = (
        "asked",
        "digest",
        "draining",
        "error",
        "failed_at",
        "holders",
        "last_use",
        "load_seconds",
        "loading",
        "name",
        "pinned",
        "places",
        "turn",
        "uses",
        "version",
    )

    def __init__(self, name: str, places: Sequence[Place]) -> None:
        self.name = name
        self.places = places
        self.version: Version | None = None
        self.digest = ""
        self.loading: Future[None] | None = None
        self.asked: object = None
        self.error: Exception | None = None
        self.failed_at = 0.0
        self.draining = False
        self.pinned = False
        self.holders: dict[int, str] = {}
        self.uses = 0
        self.turn = 0
        self.last_use: float | None = None
        self.load_seconds = 0.0

    @property
    def state(self) -> State:
        """Where it stands; a name that is being loaded anew stays ready with its old version."""
        if self.draining:
            return State.DRAINING
        if self.version is not None:
            return State.READY
        if self.loading is not None:
            return State.LOADING
        return State.REGISTERED if self.error is None else State.FAILED


class Book:
    """All records of one pool.

    Parameters
    ----------
    mapped_limit : int
        Most bytes of adapters mapped.
    leased_limit : int
        Most bytes of adapters that leases may hold at a time.
    names_limit : int
        Most names.
    """

    def __init__(self, mapped_limit: int, leased_limit: int, names_limit: int) -> None:
        self._mapped_limit = mapped_limit
        self._leased_limit = leased_limit
        self._names_limit = names_limit
        self._turns = count(1)
        self._versions: dict[str, Version] = {}
        self._alive: dict[int, Version] = {}
        self._freed: list[Version] = []
        self.entries: dict[str, Entry] = {}
        self.aliases: dict[str, str] = {}
        self._revoked: dict[str, None] = {}
        self.closed = False

    def check_open(self) -> None:
        """Refuse what a closed pool cannot do."""
        if self.closed:
            raise ClosedError("the adapter pool is closed; make a new one")

    # Names

    def resolve(self, name: str) -> str:
        """Return the name that ``name`` is an alias of, or itself."""
        return self.aliases.get(name, name)

    def find(self, name: str) -> Entry:
        """Return an entry; `AdapterNotFoundError` when there is none."""
        entry = self.entries.get(name)
        if entry is None:
            raise AdapterNotFoundError(f"no adapter {name!r} is loaded; load it first")
        return entry

    def enter(self, name: str, places: Sequence[Place]) -> Entry:
        """Return the entry of ``name``, made if need be."""
        if name in self.aliases:
            raise AdapterError(
                f"{name!r} is an alias of {self.aliases[name]!r}; load that, or unload the alias first"
            )
        entry = self.entries.get(name)
        if entry is None:
            if len(self.entries) >= self._names_limit:
                raise AdapterBusyError(
                    f"{len(self.entries)} adapters are registered, which is the limit; unload some"
                )
            entry = self.entries[name] = Entry(name, places)
            self._revoked.pop(name, None)
        return entry

    def revoke(self, name: str) -> None:
        """Note that a name was unloaded: it must not come back because a request asks for it."""
        self._revoked[name] = None
        if len(self._revoked) > self._names_limit:
            del self._revoked[next(iter(self._revoked))]

    def check_not_revoked(self, name: str) -> None:
        """Refuse a name that was unloaded and not loaded since."""
        if name in self._revoked:
            raise AdapterNotFoundError(f"adapter {name!r} was unloaded; load it again before using it")

    def remove(self, entry: Entry) -> None:
        """Forget a name and its aliases."""
        del self.entries[entry.name]
        self.aliases = {alias: name for alias, name in self.aliases.items() if name != entry.name}
        self._unname(entry)

    def touch(self, entry: Entry) -> None:
        """Make an entry the most recently used."""
        entry.turn = next(self._turns)

    # Versions

    def version_of(self, digest: str) -> Version | None:
        """Return the mapped version with that content."""
        return self._versions.get(digest)

    def install(self, entry: Entry, version: Version, *, replace: bool) -> None:
        """Make ``version`` what new leases of ``entry`` get, in one step."""
        if entry.version is version:
            return
        if not replace and entry.digest not in ("", version.digest):
            raise AdapterLoadedError(
                f"adapter {entry.name!r} has other content already, from {entry.places[0].text}; unload it "
                "first, or ask for it to be replaced"
            )
        if version.uid not in self._alive:
            self._make_room(version.nbytes)
            self._alive[version.uid] = version
            self._versions[version.digest] = version
        self._unname(entry)
        version.names.add(entry.name)
        entry.version, entry.digest = version, version.digest

    def hold(self, versions: Iterable[Version]) -> None:
        """Keep versions alive, once more each."""
        for version in versions:
            version.holds += 1

    def unhold(self, versions: Iterable[Version]) -> None:
        """Undo `hold`."""
        for version in versions:
            version.holds -= 1
            self._free_unused(version)

    def is_alive(self, version: Version) -> bool:
        """Say whether a version of this pool has not been freed."""
        return self._alive.get(version.uid) is version

    def admit(self, versions: Iterable[Version]) -> None:
        """Refuse a lease that would hold more than can be attached at a time."""
        wanted = {version.uid: version for version in versions if not version.holds}
        held = sum(version.attached_bytes for version in self._alive.values() if version.holds)
        new = sum(version.attached_bytes for version in wanted.values())
        if wanted and held + new > self._leased_limit:
            raise AdapterBusyError(
                f"these adapters need {new} bytes, {held} of the {self._leased_limit} are in use "
                f"by {self._holders() or 'nobody'}; try again later, or raise adapter_bytes"
            )

    def take_freed(self) -> list[Version]:
        """Return the versions to free, once."""
        freed, self._freed = self._freed, []
        return freed

    def _unname(self, entry: Entry) -> None:
        version, entry.version = entry.version, None
        if version is not None:
            version.names.discard(entry.name)
            self._free_unused(version)

    def _free_unused(self, version: Version) -> None:
        if not version.holds and not version.names and self._alive.pop(version.uid, None) is not None:
            if self._versions.get(version.digest) is version:
                del self._versions[version.digest]
            self._freed.append(version)

    def _make_room(self, nbytes: int) -> None:
        """Unmap the least recently used idle adapters until ``nbytes`` more fit; none when they cannot."""
        used = sum(version.nbytes for version in self._alive.values())
        if used + nbytes <= self._mapped_limit:
            return
        idle = [v for v in self._alive.values() if not v.holds and not self._is_pinned(v)]
        busy = used - sum(version.nbytes for version in idle)
        if busy + nbytes > self._mapped_limit:
            raise AdapterBusyError(
                f"the adapter needs {nbytes} bytes, {busy} of the {self._mapped_limit} that may be mapped "
                f"are pinned or in use by {self._holders() or 'nobody'}; unload or unpin some"
            )
        for version in sorted(idle, key=self._last_turn):
            if used + nbytes <= self._mapped_limit:
                break
            used -= version.nbytes
            for name in list(version.names):
                self._unname(self.entries[name])

    def _is_pinned(self, version: Version) -> bool:
        return any(self.entries[name].pinned for name in version.names)

    def _last_turn(self, version: Version) -> int:
        return max((self.entries[name].turn for name in version.names), default=0)

    def _holders(self) -> str:
        return describe(label for entry in self.entries.values() for label in entry.holders.values())

    # Status

    def status(self, entry: Entry, aliases: Sequence[str], *, attached: bool) -> AdapterStatus:
        """Describe one entry."""
        version = entry.version
        return AdapterStatus(
            name=entry.name,
            state=entry.state,
            source=entry.places[0].text if entry.places else "",
            digest=entry.digest,
            mapped_bytes=version.nbytes if version else 0,
            attached_bytes=version.attached_bytes if version and attached else 0,
            load_seconds=entry.load_seconds,
            uses=entry.uses,
            last_use=entry.last_use,
            holders=tuple(entry.holders.values()),
            aliases=tuple(aliases),
            pinned=entry.pinned,
            error=str(entry.error) if entry.error else "",
            warnings=version.warnings if version else (),
        )


def describe(labels: Iterable[str]) -> str:
    """Name some holders."""
    some = [label or "an unnamed lease" for label in labels]
    more = f" and {len(some) - _SHOWN_HOLDERS} more" if len(some) > _SHOWN_HOLDERS else ""
    return ", ".join(some[:_SHOWN_HOLDERS]) + more
