"""In which order a model needs its tensors, and which requests bring them: pure, from names and ranges.

The order follows a forward pass: embeddings, the layers from the first to the last (attention and norms in
file order, then what a mixture of experts may not need at all: its experts), the final norm, the head. It
is only a guess that makes waiting short; nothing depends on it being right.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, Protocol, TypeVar

from loadstone.loader.format.gcpause import paused_gc
from loadstone.loader.ranges import ByteRange, coalesce, split, to_blocks

_EMBEDDING = re.compile(
    r"(^|\.)(embed\w*|wte|wpe|shared|patch_embed\w*|word_embeddings?|tok_embeddings)(\.|$)"
)
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?|block)\.(\d+)\.")
_EXPERT = re.compile(r"(?:^|\.)experts?(?:\.|_|$)")
_HEAD = re.compile(r"(^|\.)(lm_head|output|embed_out|score|classifier|cls|qa_outputs|pooler)(\.|$)")
_NORM = re.compile(r"(^|\.)(\w*norm\w*|ln_f|ln_\w+)(\.|$)", re.IGNORECASE)
_DECODER = re.compile(r"(^|\.)decoder(\.|$)")
_OBJECT = 200  # bytes, about, of what is made of each tensor to sort them


class Named(Protocol):
    """What is known of a tensor."""

    @property
    def name(self) -> str:
        """Its name in the checkpoint."""
        ...

    @property
    def file(self) -> str:
        """The file that holds it."""
        ...

    @property
    def offset(self) -> int:
        """Where it begins in that file."""
        ...


NamedInfo = TypeVar("NamedInfo", bound=Named)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Bytes to bring.

    Attributes
    ----------
    blob : int
        Which object, by a number of the caller's.
    size : int
        That object's length.
    range : ByteRange
        Which bytes of it.
    """

    blob: int
    size: int
    range: ByteRange


class _Rank(NamedTuple):
    """Where a tensor comes in a forward pass; compared as a tuple, since there may be 100,000 of them."""

    decoder: bool
    stage: int
    layer: int
    expert: bool
    file: str
    offset: int
    name: str


_FIRST, _LAYERS, _UNKNOWN, _FINAL, _LAST = range(5)


def fetch_order(infos: Iterable[Named]) -> list[str]:
    """Return the tensors' names in the order in which a forward pass reads them."""
    return [info.name for info in as_read(infos)]


def as_read(infos: Iterable[NamedInfo]) -> list[NamedInfo]:
    """Return tensors in the order in which a forward pass reads them."""
    return [info for _, info in _ranked(infos)]


def first_layer(infos: Iterable[NamedInfo]) -> list[NamedInfo]:
    """Return the tensors that a forward pass reads up to the end of its first layer, in that order.

    Of a model whose names show no layers, that is everything.
    """
    ranked = _ranked(infos)
    lowest = min((rank.layer for rank, _ in ranked if rank.stage == _LAYERS), default=None)
    if lowest is None:
        return [info for _, info in ranked]
    return [
        info
        for rank, info in ranked
        if rank.stage == _FIRST or (rank.stage == _LAYERS and rank.layer == lowest)
    ]


def requests(spans: Iterable[ByteRange], size: int, limit: int) -> list[ByteRange]:
    """Return whole-block requests of at most ``limit`` bytes that cover ``spans`` of one object.

    Spans that touch once they are widened to blocks become one; nothing that was not asked for is added.

    Parameters
    ----------
    spans : Iterable
        Wanted bytes.
    size : int
        Length of the object.
    limit : int
        A multiple of the block size.
    """
    whole = coalesce(to_blocks(span, size) for span in spans)
    return [piece for span in whole for piece in split(span, limit)]


def plan(wanted: Sequence[Wanted], limit: int) -> list[Wanted]:
    """Return requests that bring ``wanted``, nearly in its order and in few pieces.

    Neighbours in ``wanted`` are taken together until they make up one request, so that order is kept from
    one request to the next, while tensors that lie side by side in a file travel side by side.

    Parameters
    ----------
    wanted : Sequence
        What to bring, most urgent first.
    limit : int
        Bytes in a request: a multiple of the block size.
    """
    planned: list[Wanted] = []
    batch: dict[int, list[Wanted]] = {}
    nbytes = 0
    for want in wanted:
        batch.setdefault(want.blob, []).append(want)
        nbytes += want.range.nbytes
        if nbytes >= limit:
            planned += _merged(batch, limit)
            batch, nbytes = {}, 0
    return planned + _merged(batch, limit)


def _merged(batch: dict[int, list[Wanted]], limit: int) -> list[Wanted]:
    return [
        Wanted(blob, wants[0].size, span)
        for blob, wants in batch.items()
        for span in requests([want.range for want in wants], wants[0].size, limit)
    ]


def _ranked(infos: Iterable[NamedInfo]) -> list[tuple[_Rank, NamedInfo]]:
    infos = list(infos)
    with paused_gc(_OBJECT * len(infos)):
        return sorted([(_rank(info), info) for info in infos], key=itemgetter(0))


def _rank(info: Named) -> _Rank:
    name = info.name
    layer = _LAYER.search(name)
    stage, number = _UNKNOWN, 0
    if layer is not None:
        stage, number = _LAYERS, int(layer[1])
    elif _EMBEDDING.search(name):
        stage = _FIRST
    elif _HEAD.search(name):
        stage = _LAST
    elif _NORM.search(name):
        stage = _FINAL
    # An encoder runs to its end before the decoder begins; the shared head comes after both.
    decoder = stage == _LAST or _DECODER.search(name) is not None
    return _Rank(decoder, stage, number, _EXPERT.search(name) is not None, info.file, info.offset, name)
