"""The parts of a pool that people see: an adapter's versions, leases on them, and their status.

All mutable state here is guarded by the lock of the pool that it belongs to.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from types import TracebackType
from typing import Protocol, Self

from loadstone.adapters.fit import Updates
from loadstone.errors import AdapterError

_keys = count(1)


class State(StrEnum):
    """Where an adapter stands.

    ``registered``: its name and place are known, its file is not mapped; the next lease reads it.
    ``loading``. ``ready``. ``failed``: the next load, or a lease a little later, tries again. ``draining``:
    no new leases, waiting for those that run.
    """

    REGISTERED = "registered"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """What is known of one adapter.

    Attributes
    ----------
    name, state
        Its name, and where it stands.
    source : str
        Where it was read from, without credentials.
    digest : str
        Hash of its content; empty until it was read.
    mapped_bytes, attached_bytes : int
        Bytes of its file that are mapped, and bytes in use, where the model computes, while it is attached;
        0 when it is not.
    load_seconds : float
        How long the last successful load took.
    uses : int
        How many leases it had.
    last_use : float or None
        When the last of them began, in seconds since 1970.
    holders : tuple of str
        Labels of the leases that hold it now.
    aliases : tuple of str
        Other names for it.
    pinned : bool
        It is kept mapped, and not unloaded.
    error : str
        Why the last load failed, if it did.
    warnings : tuple of str
        What reading it found doubtful.
    """

    name: str
    state: State
    source: str
    digest: str
    mapped_bytes: int
    attached_bytes: int
    load_seconds: float
    uses: int
    last_use: float | None
    holders: tuple[str, ...]
    aliases: tuple[str, ...]
    pinned: bool
    error: str
    warnings: tuple[str, ...]


class Readable(Protocol):
    """An adapter that was read and checked: what `read_adapter` returns."""

    @property
    def updates(self) -> Updates:
        """What it does to each module."""
        ...

    @property
    def digest(self) -> str:
        """Hash of its content."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is doubtful about it."""
        ...

    def is_altered(self) -> bool:
        """Say whether its file was overwritten in place since it was read."""
        ...

    def close(self) -> None:
        """Let go of its file."""
        ...


class Version:
    """One content of an adapter, mapped; shared by every name that has this content.

    Attributes
    ----------
    uid : int
        Never used for another version of any pool.
    names : set of str
        Adapters whose current content it is.
    holds : int
        Leases and batches that use it.
    """

    __slots__ = ("_adapter", "attached_bytes", "digest", "holds", "names", "nbytes", "uid", "warnings")

    def __init__(self, uid: int, adapter: Readable, attached_bytes: int) -> None:
        self.uid = uid
        self.digest = adapter.digest
        self.nbytes = adapter.nbytes
        self.attached_bytes = attached_bytes
        self.warnings = adapter.warnings
        self.names: set[str] = set()
        self.holds = 0
        self._adapter: Readable | None = adapter

    @property
    def updates(self) -> Updates:
        """What it does to each module."""
        if self._adapter is None:
            raise AdapterError(f"adapter version {self.digest[:12]} was freed; take a lease before using it")
        return self._adapter.updates

    def is_altered(self) -> bool:
        """Say whether its file was overwritten in place since it was read."""
        adapter = self._adapter
        return adapter is not None and adapter.is_altered()

    def free(self) -> None:
        """Let go of its file; the memory returns when the last view of it goes."""
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            adapter.close()


@dataclass(frozen=True, slots=True, eq=False)
class LeasedVersion:
    """A row's adapter: the version that its lease holds.

    Attributes
    ----------
    name : str
        The adapter's name when it was leased.
    digest : str
        Hash of the version's content.
    """

    name: str
    digest: str
    version: Version
    lease: "Lease"


class Lease:
    """Holds adapter versions for one request, from its beginning to its end.

    A newer version of an adapter does not reach a lease that began before it, and an unload waits for it.
    Leaving the ``with`` block, or `release`, ends it.

    Attributes
    ----------
    label : str
        Who holds it, for messages.
    rows : tuple of LeasedVersion or None
        One for each name that was asked for.
    key : int
        Never used for another lease.
    released : bool
        It has ended.
    """

    __slots__ = ("_release", "key", "label", "released", "rows")

    def __init__(
        self, names: Sequence[tuple[str, Version] | None], label: str, release: "Callable[[Lease], None]"
    ) -> None:
        self.key = next(_keys)
        self.label = label
        self.released = False
        self._release = release
        self.rows: tuple[LeasedVersion | None, ...] = tuple(
            None if pair is None else LeasedVersion(pair[0], pair[1].digest, pair[1], self) for pair in names
        )

    def release(self) -> None:
        """End the lease; again does nothing."""
        self._release(self)

    def __del__(self) -> None:
        # Releasing here could take the pool's lock inside any other code that holds it.
        if not getattr(self, "released", True):
            warnings.warn(
                f"a lease ({self.label or 'unnamed'}) was dropped without release", ResourceWarning, 2
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
