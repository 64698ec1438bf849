"""Which names an adapter may have: text that is safe as a folder, in a URL, in a log and on a terminal."""

import re
import unicodedata

from loadstone.errors import AdapterError

NAME_LIMIT = 128
"""Most characters in a name."""

_BYTE_LIMIT = 255  # what file systems take for one component
_MARKS = " ._-"
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
"""Letters and marks that show nothing, by Unicode's own list: two names with and without one look alike."""


def check_name(name: str) -> str:
    """Return ``name`` in its composed Unicode form, so that two spellings of one name are one adapter.

    Letters and digits of any script are allowed, and inside a name spaces, ``.``, ``_`` and ``-``.

    Raises
    ------
    AdapterError
        The name is empty, too long, begins with a dot, has spaces at an end, is reserved, or holds any other
        character: no path separator, no ``%``, no control character, nothing invisible.
    """
    if not isinstance(name, str):
        raise AdapterError(f"an adapter's name is text, got {type(name).__name__}")
    reason = _fault(name)
    if reason:
        shown = name if len(name) <= NAME_LIMIT else name[:32] + "…"
        raise AdapterError(
            f"{shown!r} is not an adapter name: {reason}; use letters, digits, '.', '_', '-' and inner spaces"
        )
    return unicodedata.normalize("NFC", name)


def _fault(name: str) -> str:
    if not name:
        return "it is empty"
    if len(name) > NAME_LIMIT:
        return f"it has {len(name)} characters, more than {NAME_LIMIT}"
    for character in name:
        if (
            character not in _MARKS
            and unicodedata.category(character)[0] not in "LM"
            and unicodedata.category(character) != "Nd"
        ) or _INVISIBLE.match(character):
            return f"it holds {character!r}"
    if name != name.strip(" "):
        return "it begins or ends with a space"
    if name[0] == "." or unicodedata.category(name[0])[0] == "M":
        return f"it begins with {name[0]!r}"
    if name.startswith("__") and name.endswith("__"):
        return "names between double underscores are reserved"
    if len(name.encode()) > _BYTE_LIMIT:
        return f"it has {len(name.encode())} bytes, more than {_BYTE_LIMIT}"
    return ""
