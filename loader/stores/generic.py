"""Every kind of store but S3 and the web, through fsspec: by signed URLs where it can sign, else by reads.

A file system that can sign (Google, Azure) only makes URLs here; the bytes then come over the same HTTP
transport as S3's. One that cannot is read through fsspec itself.
"""

import threading
from collections.abc import Mapping
from typing import Any

from loadstone.errors import AccessError
from loadstone.loader.locations import Location, check_name
from loadstone.loader.stores.access import HttpObject
from loadstone.loader.stores.backoff import Manners, Work
from loadstone.loader.stores.exchange import Pool
from loadstone.loader.stores.fserrors import persist, translated
from loadstone.loader.stores.fsreads import FileSystems, FsspecObject, FsspecTransport
from loadstone.loader.stores.signed import SIGNED_FOR, SignedAccess
from loadstone.loader.stores.store import OpenGate, RemoteObject, Transport
from loadstone.loader.stores.transfer import HttpTransport
from loadstone.settings import Settings


class FsspecStore:
    """A folder of an fsspec file system."""

    def __init__(self, location: Location, options: Mapping[str, object], settings: Settings) -> None:
        self.name = location.text
        self._location = location
        self._settings = settings
        self._systems = FileSystems(location, options)
        self._lock = threading.Lock()
        self._signed: SignedAccess | None = None
        self._transport: Transport | None = None

    @property
    def transport(self) -> Transport:
        """What moves the bytes."""
        with self._lock:
            if self._transport is None:
                fs = self._systems.get()
                if self._can_sign(fs):
                    self._signed = SignedAccess(self._sign)
                    self._transport = HttpTransport(Pool(self._settings), self._settings)
                else:
                    self._transport = FsspecTransport(self._systems, self._settings)
            return self._transport

    def object(self, name: str) -> RemoteObject:
        """Return the object of that name in this folder."""
        check_name(name, self.name)
        path, where = self._path(name), f"{self.name.rstrip('/')}/{name}"
        if isinstance(self.transport, HttpTransport) and self._signed is not None:
            return HttpObject(where, where, self._signed, path)
        return FsspecObject(where, where, path)

    def names(self) -> tuple[str, ...] | None:
        """List the folder; ``None`` when that is not possible or not allowed."""
        work = Work(self.name, self._settings.retry_seconds, Manners(), OpenGate())
        try:
            entries = persist(work, self._entries)
        except AccessError:
            return None
        files = (str(entry["name"]).rstrip("/") for entry in entries if entry.get("type") == "file")
        return tuple(name.rpartition("/")[2] for name in files if name.rpartition("/")[2])

    def _entries(self) -> list[dict[str, Any]]:
        with translated(self.name):
            return list(self._systems.get().ls(self._path(""), detail=True))

    def connector(self) -> None:
        """Return ``None``: only its library knows where its connections lead; see `Store.connector`."""

    def close(self) -> None:
        """Drop every connection."""
        with self._lock:
            if self._transport is not None:
                self._transport.close()

    def _path(self, name: str) -> str:
        full = f"{self.name.rstrip('/')}/{name}" if name else self.name
        return str(self._systems.get()._strip_protocol(full))

    def _sign(self, path: str) -> str:
        with translated(self.name):
            return str(self._systems.get().sign(path, expiration=SIGNED_FOR))

    def _can_sign(self, fs: Any) -> bool:
        import fsspec  # noqa: PLC0415

        if type(fs).sign is fsspec.AbstractFileSystem.sign:
            return False
        try:
            return str(fs.sign(self._path("config.json"), expiration=SIGNED_FOR)).startswith("http")
        except Exception:  # noqa: BLE001  libraries differ in how they say that they cannot
            return False
