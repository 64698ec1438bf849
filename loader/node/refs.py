"""The version that each object last had, as far as a cache folder knows: one small file for each.

A file is replaced as a whole, so there is nothing to lock; whatever it says is checked with the store before
it is used.
"""

import hashlib
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

from loadstone.loader.node.blobfolder import write_new
from loadstone.loader.stores.store import Version


class References:
    """The references in one cache folder.

    Parameters
    ----------
    folder : Path
        The cache folder.
    """

    def __init__(self, folder: Path) -> None:
        # Opening many objects comes here many times: path objects would take longer than the files.
        self._folder = f"{folder}/refs"

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
        draft = f"{self._folder}/tmp-{secrets.token_hex(8)}"  # noqa: S108  nobody else writes to this folder
        try:
            write_new(draft, json.dumps({"tag": version.tag, "size": version.size}).encode())
            os.replace(draft, self._path(identity))  # noqa: PTH105  see above
        except OSError:
            with suppress(OSError):
                os.unlink(draft)  # noqa: PTH108  likewise

    def _path(self, identity: str) -> str:
        return f"{self._folder}/{hashlib.sha256(identity.encode()).hexdigest()}.json"
