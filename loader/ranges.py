"""Byte ranges and blocks: pure arithmetic, no I/O.

A *block* is 64 KiB of one object, the unit in which arrival is recorded. The size of a *request* is a
separate policy (several MiB), so that a small read moves few bytes and a large one needs few requests.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

BLOCK = 64 * 1024
"""Bytes in a block: a multiple of every page size in use, so a complete block never shares a page."""

_START = attrgetter("start")


@dataclass(frozen=True, slots=True, order=True)
class ByteRange:
    """Bytes ``start`` to ``stop`` (exclusive) of one object."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a byte range runs from 0 upwards, got {self.start}..{self.stop}")

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.stop - self.start


def block_count(size: int) -> int:
    """Return how many blocks an object of ``size`` bytes has; the last one may be short."""
    return -(-size // BLOCK)


def to_blocks(span: ByteRange, size: int) -> ByteRange:
    """Widen ``span`` to whole blocks of an object of ``size`` bytes; an empty span stays empty."""
    if span.start == span.stop:
        return span
    return ByteRange(span.start // BLOCK * BLOCK, min(-(-span.stop // BLOCK) * BLOCK, size))


def coalesce(spans: Iterable[ByteRange], gap: int = 0) -> list[ByteRange]:
    """Sort ``spans`` and join those that overlap, touch, or lie at most ``gap`` bytes apart."""
    joined: list[ByteRange] = []
    for span in sorted([span for span in spans if span.stop > span.start], key=_START):
        if joined and span.start - joined[-1].stop <= gap:
            joined[-1] = ByteRange(joined[-1].start, max(joined[-1].stop, span.stop))
        else:
            joined.append(span)
    return joined


def split(span: ByteRange, limit: int) -> list[ByteRange]:
    """Cut ``span`` into pieces of at most ``limit`` bytes."""
    starts = range(span.start, span.stop, limit)
    return [ByteRange(start, min(start + limit, span.stop)) for start in starts]


def split_at(span: ByteRange, step: int) -> list[ByteRange]:
    """Cut ``span`` at every multiple of ``step`` bytes."""
    cuts = [span.start, *range((span.start // step + 1) * step, span.stop, step), span.stop]
    return [ByteRange(start, stop) for start, stop in itertools.pairwise(cuts) if start < stop]
