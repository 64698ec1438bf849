"""Checks the entries of a safetensors header: dtypes, shapes and spans.

An entry is right when its dtype is known, its shape is a list of 64-bit sizes, its span is exactly as long as
they say, and, all entries sorted by span, it begins where the one before it ends.

A header may have 100,000 entries, so there are two ways to the same answer: all at once, column by column,
for what every writer writes; and one by one, for the rest and to name what is wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from math import prod
from sys import intern
from typing import Any, TypeGuard

from loadstone.errors import HeaderError
from loadstone.loader.format.dtypes import BITS
from loadstone.loader.format.naming import quote
from loadstone.loader.format.strictjson import Pairs, Repeated, plain_object, unreadable

_FIELDS = ("dtype", "shape", "data_offsets")
_WORD = 2**64
_FEW_SIZES = 16
_FIELD_DEPTH = 3


@dataclass(frozen=True, slots=True)
class Columns:
    """The checked entries in the order of their bytes, as one sequence for each of their parts.

    The first tensor begins at byte 0 of the data, each other one where the one before it ends.
    """

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    ends: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def make_entry(pairs: Pairs) -> object:
    """Make less than a ``dict`` of an entry as every writer writes it: dtype, shape, first byte and end.

    Half of the time that a large header takes goes into memory, and most of that into these objects.
    """
    if len(pairs) == len(_FIELDS):
        (first, dtype), (second, shape), (third, span) = pairs
        if (
            first == "dtype"
            and second == "shape"
            and third == "data_offsets"
            and type(shape) is list
            and type(span) is list
            and len(span) == 2
            and type(span[0]) is int
            and type(span[1]) is int
        ):
            return dtype, tuple(shape), span[0], span[1]
    return plain_object(pairs)


def expand(value: object) -> object:
    """Return the JSON object that `make_entry` made less of; any other value as it is."""
    if not isinstance(value, tuple):
        return value
    dtype, shape, begin, end = value
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def check_entries(document: Mapping[str, object], where: str) -> Columns:
    """Check the tensors of a header.

    Parameters
    ----------
    document : Mapping[str, object]
        The header's JSON object without its metadata, its objects made by `make_entry`.
    where : str
        The file's name, for messages.

    Raises
    ------
    HeaderError
        An entry breaks a rule; the message names the tensor.
    """
    return _all_at_once(document) or _one_by_one(document, where)


def describe(value: object) -> str:
    """Say what kind of JSON value ``value`` is."""
    kinds = {
        dict: "an object",
        tuple: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return next((kinds[kind] for kind in kinds if isinstance(value, kind)), "a number")


def _all_at_once(document: Mapping[str, object]) -> Columns | None:
    """Check the usual header five times faster than `_one_by_one`.

    Never refuses: it gives up, with ``None``, at the first sign of anything unusual.
    """
    if set(map(type, document.values())) != {tuple}:
        return None
    entries: Any = document.values()
    dtypes, shapes, begins, ends = zip(*entries, strict=True)
    if set(map(type, dtypes)) != {str} or not set(map(type, chain.from_iterable(shapes))) <= {int}:
        return None
    # A model has few distinct shapes: each is looked at once, and kept once.
    kinds = list(zip(dtypes, shapes, strict=True))
    known = {kind: (*kind, _nbytes(*kind)) for kind in set(kinds)}
    dtypes, shapes, sizes = zip(*map(known.__getitem__, kinds), strict=True)
    if None in sizes or ends != tuple(accumulate(sizes)) or begins != (0, *ends[:-1]):
        return None
    return Columns(list(document), dtypes, shapes, ends)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    if dtype not in BITS or len(shape) > _FEW_SIZES or min(shape, default=1) < 1:
        return None
    nbits = prod(shape) * BITS[dtype]
    return nbits // 8 if nbits % 8 == 0 and nbits < _WORD else None


def _one_by_one(document: Mapping[str, object], where: str) -> Columns:
    entries = [_entry(name, value, where) for name, value in document.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    reached, before = 0, ""
    for entry in entries:
        if entry.begin != reached:
            raise _misplaced(entry, before, reached, where)
        reached, before = entry.end, entry.name
    return Columns(
        [entry.name for entry in entries],
        [entry.dtype for entry in entries],
        [entry.shape for entry in entries],
        [entry.end for entry in entries],
    )


def _entry(name: str, value: object, where: str) -> _Entry:
    fields = _fields(name, value, where)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if type(dtype) is not str or dtype not in BITS:
        raise _bad(where, name, f"the unknown dtype {quote(dtype)}", f"expected one of {', '.join(BITS)}")
    if not _are_sizes(shape):
        raise _bad(where, name, f"the shape {quote(shape)}", "expected a list of integers from 0 to 2**64-1")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(
            where,
            name,
            f"the data_offsets {quote(offsets)}",
            "expected two integers, its first byte and its end",
        )
    begin, end = offsets
    if _nbits(shape, BITS[dtype]) != 8 * (end - begin):
        raise _wrong_size(name, dtype, shape, end - begin, where)
    return _Entry(name, intern(dtype), tuple(shape), begin, end)


def _fields(name: str, value: object, where: str) -> dict[str, object]:
    value = expand(value)
    if not isinstance(value, dict):
        raise _bad(where, name, f"an entry that is {describe(value)}", "expected an object")
    if isinstance(value, Repeated):
        raise _bad(where, name, f"a duplicate field {quote(value.key)}", "each may come only once")
    missing = [field for field in _FIELDS if field not in value]
    if missing:
        raise _bad(where, name, f"no {' and no '.join(missing)}", "every tensor needs them")
    for field in value.keys() - _FIELDS:
        problem = unreadable(field, 0) or unreadable(value[field], _FIELD_DEPTH)
        if problem:
            raise _bad(where, name, f"a field {quote(field)} that {problem}", "expected plain JSON")
    return value


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return type(value) is list and all(type(item) is int and 0 <= item < _WORD for item in value)


def _nbits(shape: Sequence[int], bits: int) -> int | None:
    """Return the size of a tensor in bits; ``None`` where the reference's 64-bit arithmetic overflows."""
    elements = 1
    for size in shape:
        # Step by step, since a zero later on hides an overflow only from whoever multiplies everything first,
        # and a long list of sizes must not build an ever longer number.
        elements *= size
        if elements >= _WORD:
            return None
    return elements * bits


def _wrong_size(name: str, dtype: str, shape: Sequence[int], nbytes: int, where: str) -> HeaderError:
    nbits = _nbits(shape, BITS[dtype])
    if nbits is None or nbits >= _WORD:
        needs = "more bits than 64 bits can count"
    else:
        needs = f"{nbits // 8} bytes" if nbits % 8 == 0 else f"{nbits} bits, which fill no whole bytes"
    return _bad(where, name, f"{nbytes} bytes", f"its shape {quote(shape)} of {dtype} needs {needs}")


def _misplaced(entry: _Entry, before: str, reached: int, where: str) -> HeaderError:
    found = f"its first byte at {entry.begin}"
    if reached == 0 and entry.begin > 0:
        return _bad(where, entry.name, found, "the first tensor's belongs at 0")
    fault = "overlaps" if entry.begin < reached else "leaves a hole after"
    return _bad(where, entry.name, f"{found} and {fault} {quote(before)}", f"which ends at {reached}")


def _bad(where: str, name: str, found: str, expected: str) -> HeaderError:
    return HeaderError(
        f"{where}: tensor {quote(name)} has {found}, {expected}; "
        "the file is damaged or was written wrongly, fetch or write it again"
    )
