"""Records in an adapter which base it was made for, so that a base of another structure is noticed.

The structural fingerprint goes into the metadata of the weights file, where every other reader ignores it.
The tensors stay as they are; the file is replaced in one step.
"""

import json
import os
from pathlib import Path
from typing import BinaryIO

from loadstone.adapters.config import WEIGHTS_NAME
from loadstone.adapters.reader import FINGERPRINT_KEY, read_adapter
from loadstone.errors import LocationError
from loadstone.loader.checkpoint import Checkpoint

_PIECE = 1024 * 1024


def record_base(folder: str | os.PathLike[str], base: Checkpoint) -> None:
    """Write the fingerprint of ``base`` into the adapter in ``folder``, a folder of this machine.

    The adapter is read and checked against ``base`` first.

    Raises
    ------
    LoadstoneError
        It does not fit ``base``, or is not a folder of this machine.
    """
    path = Path(folder)
    if not path.is_dir():
        raise LocationError(f"{path} is not a folder of this machine; record the base before publishing")
    read_adapter(path, base=base).close()
    weights = path / WEIGHTS_NAME
    fresh = weights.with_name(f".{WEIGHTS_NAME}.{os.getpid()}")
    try:
        with weights.open("rb") as old, fresh.open("wb") as new:
            new.write(_header(old, base.fingerprint()))
            while piece := old.read(_PIECE):
                new.write(piece)
            new.flush()
            os.fsync(new.fileno())
        fresh.replace(weights)
    finally:
        fresh.unlink(missing_ok=True)


def _header(file: BinaryIO, fingerprint: str) -> bytes:
    """Read a header that is known to be valid, and return it with the fingerprint in its metadata."""
    length = int.from_bytes(file.read(8), "little")
    document = json.loads(file.read(length))
    document["__metadata__"] = {**document.get("__metadata__", {}), FINGERPRINT_KEY: fingerprint}
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
