"""Which tensors, in which order, and handing them out while they arrive."""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from loadstone.errors import TensorNotFoundError
from loadstone.loader.header import TensorInfo
from loadstone.loader.order import fetch_order
from loadstone.loader.ranges import ByteRange

if TYPE_CHECKING:
    import torch

    from loadstone.loader.checkpoint import Checkpoint

Order = Literal["arrival", "layer", "file"]

_LOOK = 256  # how many tensors ahead are asked whether they have arrived
_PAUSE = 0.005  # seconds between two looks
_GAP = 4096  # neighbours in a file that are this close are asked for together


def match(
    names: Iterable[str], tied: Mapping[str, str], patterns: str | Iterable[str], where: str
) -> list[str]:
    """Return the names that match one of the ``fnmatch`` patterns, case counting, in their own order.

    Raises
    ------
    TensorNotFoundError
        A pattern matches nothing.
    """
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


def in_order(infos: Sequence[TensorInfo], order: Order) -> list[str]:
    """Return names by layer, or as they lie in the files."""
    if order == "file":
        return [info.name for info in sorted(infos, key=lambda info: (info.file, info.offset, info.name))]
    return fetch_order(infos)


def join_neighbours(infos: Iterable[TensorInfo]) -> list[tuple[str, ByteRange]]:
    """Return (file, bytes) of tensors in their order; ones that follow each other in a file as one range."""
    joined: list[tuple[str, ByteRange]] = []
    for info in infos:
        if info.nbytes == 0:
            continue
        if joined:
            file, last = joined[-1]
            if file == info.file and last.start <= info.offset <= last.stop + _GAP:
                joined[-1] = (file, ByteRange(last.start, max(last.stop, info.offset + info.nbytes)))
                continue
        joined.append((info.file, info.range))
    return joined


def stream(
    checkpoint: "Checkpoint", names: Sequence[str], order: Order, *, copy: bool
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield (name, tensor) in ``order``, while everything is being brought here."""
    infos = [checkpoint.info(name) for name in names]
    pending = in_order(infos, order)
    handle = checkpoint.prefetch_names(pending)
    read = checkpoint.copy if copy else checkpoint.__getitem__
    try:
        if order != "arrival":
            for name in pending:
                yield name, read(name)
            return
        while pending:
            ready = [name for name in pending[:_LOOK] if checkpoint.is_ready(name)]
            if not ready and handle.done():
                ready = pending[:1]  # reading it brings it, or raises what stopped the rest
            for name in ready:
                yield name, read(name)
            taken = set(ready)
            pending = [name for name in pending if name not in taken]
            if not ready:
                handle.wait(_PAUSE)
    finally:
        handle.cancel()
