"""Handing out tensors while they arrive."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from loadstone.loader.format.header import TensorInfo
from loadstone.loader.source import Prefetch
from loadstone.loader.tensors.selection import Order, in_order

if TYPE_CHECKING:
    import torch

    from loadstone.loader.tensors.reading import Reader

_LOOK = 256  # how many tensors ahead are asked whether they have arrived
_TOGETHER = 1024 * 1024  # bytes of small tensors that are waited for, and checked, in one go
_PAUSE = 0.005  # seconds between two looks


def stream(
    infos: Sequence[TensorInfo],
    order: Order,
    reader: "Reader",
    begin: Callable[[Iterable[TensorInfo]], Prefetch],
    *,
    copy: bool,
) -> "Iterator[list[tuple[str, torch.Tensor]]]":
    """Yield lists of (name, tensor) in ``order``, while everything is being brought here.

    An empty list says that what comes next has not arrived yet: asking for it will wait.

    Parameters
    ----------
    infos : sequence of TensorInfo
        What to yield.
    order : {"arrival", "layer", "file"}
        In which order.
    reader : Reader
        Reads them.
    begin : callable
        Begins to bring tensors here, in the order given.
    copy : bool
        Give private copies.
    """
    pending = in_order(infos, order)
    handle = begin(pending)
    read = reader.copies if copy else reader.tensors
    try:
        for batch in _arriving(pending, reader, handle) if order == "arrival" else [pending]:
            if not batch:
                yield []
            for few in _in_pieces(batch):
                if order != "arrival" and not all(map(reader.is_ready, few)):
                    yield []
                yield list(zip([info.name for info in few], read(few), strict=True))
    finally:
        handle.cancel()


def _arriving(
    pending: Sequence[TensorInfo], reader: "Reader", handle: Prefetch
) -> Iterator[list[TensorInfo]]:
    """Yield what can be used by now, again and again, until that was everything; nothing ahead of a wait."""
    rest = iter(pending)
    near: list[TensorInfo] = []
    while near := [*near, *islice(rest, _LOOK - len(near))]:
        ready: list[TensorInfo] = []
        late: list[TensorInfo] = []
        for info in near:
            (ready if reader.is_ready(info) else late).append(info)
        if not ready and handle.done():
            ready, late = near[:1], near[1:]  # reading it brings it, or raises what stopped the rest
        yield ready
        if not ready:
            handle.wait(_PAUSE)
        near = late


def _in_pieces(infos: Iterable[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Cut tensors into lists of few bytes: of several tensors only where they are small."""
    piece: list[TensorInfo] = []
    nbytes = 0
    for info in infos:
        if piece and (nbytes + info.nbytes > _TOGETHER or len(piece) == _LOOK):
            yield piece
            piece, nbytes = [], 0
        piece.append(info)
        nbytes += info.nbytes
    if piece:
        yield piece
