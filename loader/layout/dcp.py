"""Recognises safetensors files written by torch's distributed checkpoint (DCP), which may hold slices.

`HuggingFaceStorageWriter` writes one file per rank. Each carries, in its header's metadata under
``DCP_SHARDING_INFO``, a JSON object ``{tensor: {"saved_offsets": [row, column, …]}}``: where in the whole
tensor its piece begins. A tensor's name is then found in several files, and none of them is the tensor.
"""

import json
from collections.abc import Mapping

from loadstone.errors import IndexFileError
from loadstone.loader.format.header import Header
from loadstone.loader.format.naming import quote

SHARDING_INFO = "DCP_SHARDING_INFO"

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
    seen: dict[str, str] = {}
    for file, header in headers.items():
        if SHARDING_INFO not in header.metadata:
            continue
        offsets = _offsets(header.metadata[SHARDING_INFO])
        for name in header.tensors:
            if name in seen:
                raise IndexFileError(
                    f"{where}: duplicate name: {quote(seen[name])} and {quote(file)} each hold a slice of "
                    f"tensor {quote(name)}, as torch's distributed checkpoint (DCP) writes them; {_REMEDY}"
                )
            if offsets.get(name):
                raise IndexFileError(
                    f"{where}: {quote(file)} holds only a slice of tensor {quote(name)}, written by torch's "
                    f"distributed checkpoint (DCP), and the file before it is missing; {_REMEDY}"
                )
            seen[name] = file


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
