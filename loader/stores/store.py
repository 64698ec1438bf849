"""The seam between the node cache and object stores.

A `Store` is one folder in an object store: it lists and names objects, and does nothing else. A `Transport`
moves their bytes. The cache above sees only these protocols: whether bytes come from S3, a web server, a
signed URL or an fsspec file system is decided once, in `open_store`.

Ownership: a store and its transport may be used from any number of threads; a `Gate` is called from the
thread that called the transport. After a fork the child's transport starts with no connections.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from loadstone.errors import LocationError
from loadstone.loader.locations import Location
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import StatedDigest
from loadstone.settings import Settings

CHUNK = 1024 * 1024
"""Most bytes handed to a sink at once, and received between two calls of a gate."""

Sink = Callable[[int, memoryview], None]
"""Takes (offset in the object, bytes); the memory is reused once it returns."""


@dataclass(frozen=True, slots=True)
class Version:
    """One version of an object.

    Attributes
    ----------
    tag : str
        A strong validator as the store writes it (an ETag, quotes included); empty when the store has none.
    size : int
        Length in bytes.
    """

    tag: str
    size: int

    @property
    def pinned(self) -> bool:
        """Whether ranges of this version can be told apart from those of another version."""
        return self.tag != ""

    @property
    def key(self) -> str:
        """Text that differs between versions of one object."""
        return f"{self.size}-{self.tag}"


@dataclass(frozen=True, slots=True)
class Probe:
    """What a first look at an object found.

    Attributes
    ----------
    version : Version or None
        ``None`` when the object is still the version that was known.
    data : bytes
        The object's first bytes.
    not_modified : bool
        The object is still the version that was known; nothing was moved.
    whole : bool
        ``data`` is all of it.
    """

    version: Version | None
    data: bytes
    not_modified: bool
    whole: bool


class Gate(Protocol):
    """How the caller of a transport steers it; called from the transport's working thread."""

    def admit(self, nbytes: int) -> None:
        """Allow ``nbytes`` (at most `CHUNK`) to be received: may block, or raise to end the transfer.

        Also called with 0 while the transport waits for a store, so that a cancelled transfer ends soon.
        """
        ...

    def throttled(self, retry_after: float | None) -> None:
        """Take note that the store asked to slow down, with the seconds it named."""
        ...


class OpenGate:
    """A gate that never holds anything back."""

    def admit(self, nbytes: int) -> None:
        """Let ``nbytes`` through."""

    def throttled(self, retry_after: float | None) -> None:
        """Take note of nothing."""


class RemoteObject(Protocol):
    """One object of a store, by name; it need not exist."""

    @property
    def name(self) -> str:
        """Where it is, for messages: without anything secret."""
        ...

    @property
    def identity(self) -> str:
        """What distinguishes it from every other object of every store, without anything secret."""
        ...


class Transport(Protocol):
    """Moves bytes of objects. Safe to use from many threads at a time."""

    def probe(self, obj: RemoteObject, count: int, known: Version | None, gate: Gate) -> Probe:
        """Look at ``obj`` once: its version, and up to ``count`` of its first bytes.

        With ``known``, an object that is still that version answers ``not_modified`` and moves no bytes.

        Raises
        ------
        NotFoundError, AccessError
            At once; the message names the likely cause.
        TransferError
            Temporary failures outlasted ``Settings.retry_seconds``.
        FormatError
            The store answered something that cannot be the object's own bytes (an encoded body).
        """
        ...

    def fetch(self, obj: RemoteObject, version: Version, span: ByteRange, sink: Sink, gate: Gate) -> None:
        """Deliver every byte of ``span`` of the pinned ``version``: in order, each exactly once.

        Faults on the way are resumed at the byte that was reached. What the sink or the gate raises
        passes through untouched.

        Raises
        ------
        ChangedError
            The object is another version now.
        NotFoundError, AccessError, TransferError, FormatError
            As for `probe`.
        """
        ...

    def fetch_whole(self, obj: RemoteObject, size_hint: int, sink: Sink, gate: Gate) -> Version:
        """Deliver an object from one single answer, so that it is one version even without a validator.

        After a fault it begins again: the sink then sees offset 0 again, and what it was given before is
        void. ``size_hint`` is the size the caller expects, -1 for unknown; another size is a `ChangedError`.
        """
        ...

    def stated_digest(self, obj: RemoteObject, version: Version, gate: Gate) -> StatedDigest:
        """Return what the store says of the digest of the pinned ``version``; moves no bytes of it.

        Raises
        ------
        ChangedError
            The object is another version now.
        """
        ...

    def close(self) -> None:
        """Drop every connection. Transfers that are still running end with an error."""
        ...


@dataclass(frozen=True, slots=True)
class Connector:
    """Makes connections ahead of the requests that will need them.

    Attributes
    ----------
    connect : Callable
        Makes one. It raises nothing: whoever needs the connection is told.
    most : int
        How many are worth while.
    """

    connect: Callable[[], None]
    most: int


class Store(Protocol):
    """One folder in an object store."""

    @property
    def name(self) -> str:
        """Where it is, for messages."""
        ...

    @property
    def transport(self) -> Transport:
        """What moves the bytes of its objects."""
        ...

    def names(self) -> tuple[str, ...] | None:
        """Return the names of the files directly inside; ``None`` when it cannot or may not be listed."""
        ...

    def object(self, name: str) -> RemoteObject:
        """Return the object called ``name`` in this folder. Does no I/O."""
        ...

    def connector(self) -> Connector | None:
        """Return what makes connections ahead of the requests that need them, as far as the bound allows.

        ``None`` where that is of no use, or might do harm, as with a web server that has a few workers and
        lets each wait for what a connection will ask.
        """
        ...

    def close(self) -> None:
        """Drop every connection."""
        ...


def open_store(location: Location, storage_options: Mapping[str, object] | None, settings: Settings) -> Store:
    """Return the store behind a folder's location. Does no I/O.

    Parameters
    ----------
    location : Location
        A folder that is not local.
    storage_options : Mapping
        As fsspec spells them: ``anon``, ``key``, ``secret``, ``token``, ``endpoint_url``, ``profile``,
        ``requester_pays``, ``client_kwargs`` for S3, ``headers`` for the web.
    settings : Settings
        Time-outs and limits.
    """
    options = dict(storage_options or {})
    if location.is_local:
        raise LocationError(f"{location.text} is a local folder, which is mapped in place and not fetched")
    if location.scheme == "s3":
        from loadstone.loader.stores.s3 import S3Store  # noqa: PLC0415  botocore is loaded for S3 only

        return S3Store(location, options, settings)
    if location.is_web:
        from loadstone.loader.stores.web import WebStore  # noqa: PLC0415  likewise

        return WebStore(location, options, settings)
    from loadstone.loader.stores.generic import FsspecStore  # noqa: PLC0415  fsspec is loaded for the rest only

    return FsspecStore(location, options, settings)
