"""From basic indexing to byte ranges: pure arithmetic, no tensors.

The rule: leading dimensions that are taken by an integer, or by one run of neighbouring indices with whole
rows below, give exactly their bytes. Where an index leaves gaps (a step, columns of a matrix), gaps shorter
than a block (64 KiB) are joined: blocks are what moves, and such a gap never holds one whole. Longer gaps
are left out. Anything that is not basic indexing (lists, masks, tensors) takes the whole tensor.
"""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from loadstone.loader.ranges import BLOCK, ByteRange

GAP = BLOCK - 1
"""Gaps up to this many bytes are joined."""


@dataclass(frozen=True, slots=True)
class Pick:
    """The indices taken along one dimension: ``start``, ``start + step``, … ``count`` of them."""

    start: int
    step: int
    count: int


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """Which bytes of a tensor an index needs.

    Attributes
    ----------
    ranges : tuple of ByteRange
        Relative to the tensor's first byte, in order.
    exact : bool
        The result's elements are one range of bytes, in order: it can be a view of just them.
    """

    ranges: tuple[ByteRange, ...]
    exact: bool


def plan(shape: Sequence[int], itemsize: int, index: object, gap: int = GAP) -> SlicePlan:
    """Return the bytes that ``tensor[index]`` needs, for an index that torch accepts for this shape.

    Parameters
    ----------
    shape : sequence of int
        The tensor's shape.
    itemsize : int
        Bytes of an element.
    index : object
        What is written between the brackets.
    gap : int
        Gaps of up to this many bytes are joined.
    """
    size = itemsize
    for length in shape:
        size *= length
    if size == 0:
        return SlicePlan((), exact=False)
    picks = _picks(shape, index)
    if picks is None:
        return SlicePlan((ByteRange(0, size),), exact=False)
    if any(pick.count == 0 for pick in picks):
        return SlicePlan((), exact=False)
    ranges, inner, taken = [ByteRange(0, itemsize)], itemsize, itemsize
    for pick, length in zip(reversed(picks), reversed(shape), strict=True):
        ranges = _repeat(ranges, inner, pick, gap)
        inner *= length
        taken *= pick.count
    return SlicePlan(tuple(ranges), exact=len(ranges) == 1 and ranges[0].nbytes == taken)


def _repeat(ranges: list[ByteRange], inner: int, pick: Pick, gap: int) -> list[ByteRange]:
    """Repeat the ranges of one inner block for every index picked in the dimension around it."""
    stride = pick.step * inner
    first = pick.start * inner
    if len(ranges) == 1:
        only = ranges[0]
        if pick.count == 1 or stride - only.nbytes <= gap:
            last = first + (pick.count - 1) * stride
            return [ByteRange(first + only.start, last + only.stop)]
    out: list[ByteRange] = []
    for number in range(pick.count):
        base = first + number * stride
        for one in ranges:
            if out and base + one.start - out[-1].stop <= gap:
                out[-1] = ByteRange(out[-1].start, base + one.stop)
            else:
                out.append(ByteRange(base + one.start, base + one.stop))
    return out


def _picks(shape: Sequence[int], index: object) -> list[Pick] | None:
    """Return what is taken along each dimension; ``None`` when the index is not a basic one."""
    items = list(index) if isinstance(index, tuple) else [index]
    items = [item for item in items if item is not None]
    if sum(item is Ellipsis for item in items) > 1:
        return None
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    at = next(number for number, item in enumerate(items) if item is Ellipsis)
    rest = len(shape) - (len(items) - 1)
    if rest < 0:
        return None
    items[at : at + 1] = [slice(None)] * rest
    picks = [_pick(length, item) for length, item in zip(shape, items, strict=True)]
    known = [pick for pick in picks if pick is not None]
    return known if len(known) == len(picks) else None


def _pick(length: int, item: object) -> Pick | None:
    if isinstance(item, slice):
        start, stop, step = item.indices(length)
        return Pick(start, step, len(range(start, stop, step))) if step > 0 else None
    if isinstance(item, numbers.Integral) and not isinstance(item, bool):
        number = int(item)
        return Pick(number % length, 1, 1) if -length <= number < length else None
    return None
