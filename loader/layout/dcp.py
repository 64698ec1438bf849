"""Recognises safetensors files written by torch's distributed checkpoint (DCP), which may hold slices.

`HuggingFaceStorageWriter` writes files of its own for every rank. Each carries, in its header's metadata
under ``DCP_SHARDING_INFO``, a JSON object ``{tensor: {"saved_offsets": [row, column, …]}}``: where in the
whole tensor its piece begins. A tensor's name is then found in several files, and none of them is the tensor.

Pieces are refused, not put together: how large the whole tensor is stands nowhere, so without the last rank's
file a shorter tensor would come out, and nothing would be amiss. For the same reason a tensor that is found
once, from its beginning on, is taken for whole with a warning only.
"""

import json
from collections.abc import Mapping

from loadstone.errors import IndexFileError
from loadstone.loader.format.header import Header
from loadstone.loader.format.naming import quote

SHARDING_INFO = "DCP_SHARDING_INFO"
RANK_FILE = "shard-"
"""How names of files begin that are one rank's."""

_FOLDER = "sharded"  # what the writer calls the folder of pieces below the one of whole tensors
_REMEDY = (
    "merge the pieces first: save with HuggingFaceStorageWriter(enable_consolidation=True), "
    "or load with torch.distributed.checkpoint and save again"
)


def refuse_slices(headers: Mapping[str, Header], where: str) -> None:
    """Refuse files that hold pieces of tensors, rather than take one piece for the whole.

    Raises
    ------
    IndexFileError
        A tensor is there in pieces; the message names it and its files.
    """
    remedy = _REMEDY
    if where.rstrip("/").endswith(f"/{_FOLDER}"):
        remedy = f"open the folder above {_FOLDER}/, where the writer puts whole tensors; else {_REMEDY}"
    seen: dict[str, str] = {}
    for file, header in headers.items():
        if SHARDING_INFO not in header.metadata:
            continue
        offsets = _offsets(header.metadata[SHARDING_INFO])
        for name in header.tensors:
            if name in seen:
                raise IndexFileError(
                    f"{where}: duplicate name: {quote(seen[name])} and {quote(file)} each hold a slice of "
                    f"tensor {quote(name)}, as torch's distributed checkpoint (DCP) writes them; {remedy}"
                )
            if offsets.get(name):
                raise IndexFileError(
                    f"{where}: {quote(file)} holds only a slice of tensor {quote(name)}, written by torch's "
                    f"distributed checkpoint (DCP), and the file before it is missing; {remedy}"
                )
            seen[name] = file


def lone_file_warnings(file: str, header: Header, where: str) -> tuple[str, ...]:
    """Return a warning for a file that was opened by itself and may hold pieces of tensors."""
    info = header.metadata.get(SHARDING_INFO)
    if info is None:
        return ()
    slices = [name for name, begins_later in _offsets(info).items() if begins_later]
    if not slices and not file.startswith(RANK_FILE):
        return ()
    known = f", and of {quote(slices[0])} it is one" if slices else ""
    return (
        f"{where}: one rank's file of torch's distributed checkpoint (DCP): what it holds may be slices of "
        f"tensors{known}; {_REMEDY}",
    )


def _offsets(text: str) -> dict[str, bool]:
    """Say for each tensor whether its piece begins elsewhere than at the tensor's own beginning."""
    try:
        info = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(info, dict):
        return {}
    found: dict[str, bool] = {}
    for name, entry in info.items():
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        found[name] = isinstance(offsets, list) and any(offset != 0 for offset in offsets)
    return found
