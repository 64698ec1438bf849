"""The version that each object last had, as far as a cache folder knows: one small file for each.

A file is replaced as a whole, so there is nothing to lock; whatever it says is checked with the store before
it is used. While a draft of a file is written, a lease says so: one without was left by a process that died,
and is removed with such drafts of blobs (`blobfolder.sweep`).
"""

import hashlib
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

from loadstone.errors import CacheError
from loadstone.loader.node.blobfolder import write_new
from loadstone.loader.node.leases import Leases
from loadstone.loader.stores.store import Version


class References:
    """The references in one cache folder.

    Parameters
    ----------
    folder : Path
        The cache folder.
    leases : Leases or None
        Those of the folder; without, nothing is written.
    """

    def __init__(self, folder: Path, leases: Leases | None) -> None:
        # Opening many objects comes here many times: path objects would take longer than the files.
        self._folder = f"{folder}/refs"
        self._leases = leases

    def read(self, identity: str) -> Version | None:
        """Return the version that an object last had, ``None`` when that is not known."""
        try:
            with open(self._path(identity), encoding="utf-8") as file:  # noqa: PTH123  see above
                found = json.loads(file.read())
            return Version(str(found["tag"]), int(found["size"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, identity: str, version: Version, meta: str) -> None:
        """Remember the version that an object has now, if the disk takes it.

        Parameters
        ----------
        identity : str
            The object.
        version : Version
            What it has now.
        meta : str
            Where a blob of that version describes itself, perhaps: it says the same, and a second name for
            it costs less than a second file.
        """
        with suppress(OSError):
            os.link(meta, self._path(identity))
            return
        key = _key(identity)
        with suppress(OSError, CacheError):
            if self._leases is not None and self._leases.take(key, 0):
                try:
                    self._replace(key, json.dumps({"tag": version.tag, "size": version.size}).encode())
                finally:
                    self._leases.drop(key)

    def _replace(self, key: str, data: bytes) -> None:
        draft = f"{self._folder}/tmp-{key}-{secrets.token_hex(4)}"  # noqa: S108  nobody else writes there
        try:
            write_new(draft, data)
            os.replace(draft, f"{self._folder}/{key}.json")  # noqa: PTH105  see above
        except OSError:
            with suppress(OSError):
                os.unlink(draft)  # noqa: PTH108  likewise

    def _path(self, identity: str) -> str:
        return f"{self._folder}/{_key(identity)}.json"


def _key(identity: str) -> str:
    return hashlib.sha256(identity.encode()).hexdigest()
