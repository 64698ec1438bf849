"""How names that a file brought along appear in messages: on one line, printable, and of bounded length."""

from collections.abc import Sequence
from reprlib import Repr

_SHOWN = 160
_brief = Repr()
_brief.maxlevel = 2


def shorten(text: str, limit: int = _SHOWN) -> str:
    """Return ``text`` with what cannot be printed replaced, and cut to ``limit`` characters."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(letter if letter.isprintable() else "?" for letter in cut)


def quote(value: object, limit: int = _SHOWN) -> str:
    """Return ``value`` as Python writes it, so that odd characters show; what is long loses its middle."""
    if not isinstance(value, str):
        return _brief.repr(value)
    if len(value) > limit:
        value = f"{value[: limit // 2]}…{value[-limit // 2 :]}"
    return repr(value) if value.isprintable() else ascii(value)


def enumerate_names(names: Sequence[str], most: int) -> str:
    """Return the first ``most`` names, quoted, and how many more there are."""
    shown = ", ".join(quote(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
