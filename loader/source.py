"""The seam between a checkpoint and where its bytes live.

A *source* is a folder of objects: a local folder, an HF-cache snapshot, a prefix in a store. A *blob* is
one object of it, pinned to one version. Both are protocols, so that a checkpoint never asks where it is:
a local file is simply a blob whose every byte is ready.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from loadstone.errors import LoadstoneError
from loadstone.loader.ranges import ByteRange


@dataclass(frozen=True, slots=True)
class Span:
    """A byte range of one blob."""

    blob: "Blob"
    range: ByteRange


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prefetch has come.

    Attributes
    ----------
    total, ready : int
        Bytes asked for, and how many of them can be used now.
    moved : int
        Bytes this process itself brought over the network for it.
    seconds : float
        Time since the prefetch began.
    """

    total: int
    ready: int
    moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StatedDigest:
    """What a store itself says of an object's bytes.

    Attributes
    ----------
    etag : str
        An MD5 in hex digits, followed by ``-N`` where it is one of the N parts' MD5s; empty when nothing is
        known that is a digest.
    parts : tuple of ByteRange
        What each of the parts is; empty: the digest is of the whole.
    reason : str
        Why nothing is known.
    surer : callable or None
        Asks for the size of every part, where ``parts`` were told from a few of them: for a digest that does
        not match. ``None``: there is nothing left to ask.
    """

    etag: str = ""
    parts: tuple[ByteRange, ...] = ()
    reason: str = ""
    surer: "Callable[[], StatedDigest] | None" = None


class Blob(Protocol):
    """One object, pinned to one version."""

    @property
    def name(self) -> str:
        """Where it is, for messages: a path, or a URL without credentials."""
        ...

    @property
    def size(self) -> int:
        """Length in bytes."""
        ...

    @property
    def version(self) -> str:
        """What identifies this version (an ETag and size; inode, mtime and size of a local file)."""
        ...

    def buffer(self) -> memoryview:
        """Return the whole object as private, writable, lazily read memory, mapped once.

        Bytes that are not ready read as zeros: call `ensure` before any use. The memory stays valid for
        as long as anything refers to the returned view, also after `close`. Writes stay in this process.
        """
        ...

    def ready(self, span: ByteRange) -> bool:
        """Say whether every byte of ``span`` can be used now. Never blocks, never moves bytes."""
        ...

    def ensure(self, spans: Sequence[ByteRange], timeout: float | None = None) -> None:
        """Block until every byte of ``spans`` is ready, ahead of any prefetch.

        Raises
        ------
        LoadstoneError
            The bytes cannot be had (`TransferError`), the object was replaced (`ChangedError`), the blob
            was closed (`ClosedError`), or ``timeout`` seconds went by (`StalledError`).
        """
        ...

    def read(self, span: ByteRange) -> bytes:
        """Return a copy of ``span``'s bytes, waiting for them."""
        ...

    def close(self) -> None:
        """Let go of files and locks. Memory handed out by `buffer` stays valid."""
        ...


class Prefetch(Protocol):
    """Bytes on their way, ahead of use."""

    def progress(self) -> Progress:
        """Return how far it has come."""
        ...

    def done(self) -> bool:
        """Say whether it has ended: complete, failed or cancelled."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has ended; ``False`` when ``timeout`` seconds went by first.

        Raises
        ------
        LoadstoneError
            What stopped it.
        """
        ...

    def cancel(self) -> None:
        """Stop it; nothing of it is running when this returns."""
        ...


class Source(Protocol):
    """A folder of objects."""

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        ...

    def names(self) -> tuple[str, ...] | None:
        """Return the names of the files directly inside, or ``None`` when the store cannot list."""
        ...

    def open(self, names: Sequence[str]) -> "dict[str, Blob | LoadstoneError]":
        """Open several objects side by side; each name gives its blob or the error that it met.

        The first 64 KiB of each (all of it, when smaller) are ready when this returns, so that headers
        cost one round trip. Blobs are shared: opening a name again returns the same blob.
        """
        ...

    def prefetch(self, spans: Sequence[Span], *, warm: bool = True) -> Prefetch:
        """Start to bring ``spans`` here, in their order, in the background.

        Those that are on this machine's disk already are read into memory; with ``warm=False`` only those
        of local files, and what the node cache holds stays where it is.
        """
        ...

    def stated_digest(self, blob: Blob) -> StatedDigest:
        """Return what the store says of the digest of one of its blobs.

        Raises
        ------
        ChangedError
            The object is another version now.
        """
        ...

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until what is complete would survive a power cut; ``False`` when ``timeout`` passed first."""
        ...

    def passing(self, names: Collection[str] | None = None) -> str:
        """Say why what is brought here goes with this process; empty when other processes find it too.

        ``names`` asks about those open objects alone.
        """
        ...

    def close(self) -> None:
        """Stop every prefetch and close every blob."""
        ...
