"""Choosing tensors by name, and in which order: pure, no bytes."""

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, get_args

from loadstone.errors import SettingsError, TensorNotFoundError
from loadstone.loader.format.header import TensorInfo
from loadstone.loader.order import as_read
from loadstone.loader.ranges import BLOCK, ByteRange, coalesce

Order = Literal["arrival", "layer", "file"]

_GAP = BLOCK - 1  # gaps that hold no whole block are asked for too: whole blocks are what moves
_BATCH = 1024 * 1024  # bytes within which many small tensors are taken in the order of the files
_NEAR = 20_000  # up to this many names, a misspelt one is compared with all of them


def missing(name: object, names: Collection[str], where: str) -> TensorNotFoundError:
    """Return the error for a name that is not there, with the nearest one that is."""
    near = difflib.get_close_matches(str(name), names, 1) if len(names) <= _NEAR else []
    hint = f"did you mean {near[0]!r}?" if near else "keys() lists its names"
    return TensorNotFoundError(f"{where} has no tensor {name!r} among its {len(names)}; {hint}")


def match(
    names: Iterable[str], tied: Mapping[str, str], patterns: str | Iterable[str] | None, where: str
) -> list[str]:
    """Return the names that match one of the ``fnmatch`` patterns, case counting, in their own order.

    ``None`` matches all of them.

    Raises
    ------
    TensorNotFoundError
        A pattern matches nothing.
    """
    if patterns is None:
        return list(names)
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    stored = dict.fromkeys(names)
    chosen: set[str] = set()
    for pattern in wanted:
        if pattern in stored or pattern in tied:
            chosen.add(tied.get(pattern, pattern))
            continue
        matches = re.compile(fnmatch.translate(pattern)).match
        found = [name for name in stored if matches(name)]
        if not found:
            raise TensorNotFoundError(f"no tensor of {where} matches {pattern!r}; keys() lists their names")
        chosen.update(found)
    return [name for name in stored if name in chosen]


def in_order(infos: Sequence[TensorInfo], order: Order) -> list[TensorInfo]:
    """Return tensors by layer, or as they lie in the files.

    Raises
    ------
    SettingsError
        There is no such order.
    """
    if order not in get_args(Order):
        raise SettingsError(f"order {order!r} is not one that is known; use one of {get_args(Order)}")
    if order == "file":
        return sorted(infos, key=lambda info: (info.file, info.offset, info.name))
    return as_read(infos)


def join_neighbours(infos: Iterable[TensorInfo]) -> list[tuple[str, ByteRange]]:
    """Return (file, bytes) of tensors in their order; ones that lie side by side in a file as one range.

    Order is kept from one `_BATCH` of bytes to the next: a hundred thousand small tensors, in an order that
    is not the file's, must not be a hundred thousand requests.
    """
    joined: list[tuple[str, ByteRange]] = []
    batch: dict[str, list[ByteRange]] = {}
    nbytes = 0
    for info in infos:
        if info.nbytes:
            batch.setdefault(info.file, []).append(info.range)
            nbytes += info.nbytes
            if nbytes >= _BATCH:
                _append(joined, batch)
                batch, nbytes = {}, 0
    _append(joined, batch)
    return joined


def _append(joined: list[tuple[str, ByteRange]], batch: dict[str, list[ByteRange]]) -> None:
    for file, spans in batch.items():
        for span in coalesce(spans, _GAP):
            last_file, last = joined[-1] if joined else ("", span)
            if last_file == file and last.start <= span.start <= last.stop + _GAP:
                joined[-1] = (file, ByteRange(last.start, max(last.stop, span.stop)))
            else:
                joined.append((file, span))
