"""JSON as the format's reference implementation reads it, not as Python's ``json`` does.

Python accepts what the reference refuses: ``NaN``, lone surrogates, ``-0`` and numbers beyond 64 bits as
integers. It merges repeated keys in silence, and answers deep nesting with a ``RecursionError``, or with a
crash of the process where the recursion limit was raised. Here all of these are clean errors, or, for
repeated keys, a mark that the caller turns into one.
"""

import json
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from loadstone.errors import FormatError

DEPTH_LIMIT = 127
"""Deepest nesting that is read, as in the reference."""

_SAFE_RECURSION = 10_000
"""Up to this recursion limit Python's scanner stops well before the thread's stack ends."""

_FEW_DIGITS = 4300
"""Python's own limit on the digits of an integer, unless it was lifted; beyond it ``int`` takes too long."""

_LARGEST = int(sys.float_info.max)
_LONGEST_INTEGER = len(str(2**64 - 1))
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)


class Repeated(dict[str, object]):
    """A JSON object in which a key came twice.

    Attributes
    ----------
    key : str
        The first key that came again.
    """

    key: str


Pairs = list[tuple[str, object]]
"""A JSON object as its keys and values, before repeated keys are merged."""


def plain_object(pairs: Pairs) -> dict[str, object]:
    """Make a ``dict`` of a JSON object, a `Repeated` if a key comes twice."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    marked = Repeated(found)
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            marked.key = key
            break
        seen.add(key)
    return marked


def parse_json(
    text: str, what: str, error: type[FormatError], make: Callable[[Pairs], object] = plain_object
) -> object:
    """Parse ``text``.

    Parameters
    ----------
    text : str
        The document.
    what : str
        What it is and where, to begin a message with: ``"x.safetensors: the header"``.
    error : type[FormatError]
        Which error to raise.
    make : callable
        What each JSON object becomes: a ``dict``, or, where it can do with less, a ``tuple`` of its values.

    Returns
    -------
    object
        What ``json.loads`` returns, with two differences: an object with repeated keys is a `Repeated`, and
        ``-0`` is a ``float``, as in the reference, so that it is no integer to any check.

    Raises
    ------
    FormatError
        Of the class ``error``: the text is not JSON, or nests too deep to be read.
    """

    def refuse_constant(name: str) -> NoReturn:
        raise error(f"{what} holds {name}, which is not JSON; write the file again with its own library")

    if sys.getrecursionlimit() > _SAFE_RECURSION:
        _refuse_depth(text, what, error)
    # Looking at every integer costs a third of the time, and almost no document needs it.
    unlimited = not 0 < sys.get_int_max_str_digits() <= _FEW_DIGITS
    integer = _integer if unlimited or "-0" in text else int
    try:
        return json.loads(text, object_pairs_hook=make, parse_int=integer, parse_constant=refuse_constant)
    except error:
        raise
    except json.JSONDecodeError as problem:
        raise error(
            f"{what} is not valid JSON ({problem.msg} at character {problem.pos} of {len(text)}); "
            "the file is damaged, fetch it again"
        ) from None
    except ValueError:
        raise error(f"{what} holds an integer of thousands of digits; do not use the file") from None
    except RecursionError:
        raise _too_deep(what, error) from None


def unreadable(value: object, depth: int) -> str | None:
    """Say why the reference would not read ``value``, found at nesting ``depth``; ``None`` when it would.

    For values that are otherwise ignored: nothing else looks at them.
    """
    pending = [(value, depth)]
    while pending:
        item, level = pending.pop()
        if isinstance(item, dict | list | tuple) and level > DEPTH_LIMIT:
            return f"nests deeper than {DEPTH_LIMIT} levels"
        if isinstance(item, Repeated):
            return f"has a duplicate key {item.key!r}"
        if isinstance(item, dict):
            pending += [(part, level + 1) for part in (*item.keys(), *item.values())]
        elif isinstance(item, list | tuple):
            pending += [(part, level + 1) for part in item]
        elif isinstance(item, str) and not is_unicode(item):
            return "has half of a surrogate pair"
        elif isinstance(item, int | float) and not -_LARGEST <= item <= _LARGEST:
            return "has a number that is out of range"
    return None


def is_unicode(text: str) -> bool:
    """Say whether ``text`` can be written as UTF-8, that is, holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _integer(digits: str) -> int | float:
    # A long run of digits costs `int` quadratic time; `float` is linear, and what the reference makes of it.
    if len(digits) > _LONGEST_INTEGER or digits == "-0":
        return float(digits)
    return int(digits)


def _refuse_depth(text: str, what: str, error: type[FormatError]) -> None:
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in ("{", "["):
            depth += 1
            if depth > DEPTH_LIMIT:
                raise _too_deep(what, error)
        elif token in ("}", "]"):
            depth -= 1


def _too_deep(what: str, error: type[FormatError]) -> FormatError:
    return error(
        f"{what} nests deeper than {DEPTH_LIMIT} levels, where three are expected; "
        "it was not written by a safetensors library, do not use it"
    )
