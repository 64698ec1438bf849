"""Where adapters may come from: a few configured roots, and nothing else.

A root is a local folder or a prefix in a store. Adapters are asked for by name, which is looked for in each
root in turn, or by a location, which must lie inside one. Everything that can be refused by looking at the
text is refused before any I/O; links of a local root are followed by `os.path.realpath`, which reads no file,
and must end inside the root they began in. Whoever may write into a local root is trusted not to exchange a
link between this check and the read.

A location is always rebuilt from its root, so the root's user name and signature are used and those of the
request never are.
"""

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from loadstone.adapters.names import check_name
from loadstone.errors import LocationError, NotFoundError
from loadstone.loader.locations import Location, parse_location, redact

_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one adapter lies, inside a root.

    Attributes
    ----------
    text : str
        For messages and listings.
    address : str
        For reading; may hold the root's credentials.
    """

    text: str
    address: str = field(repr=False)


class Roots:
    """The configured roots, immutable and shared by all threads.

    Parameters
    ----------
    roots : sequence of str
        Local folders, or prefixes such as ``s3://bucket/adapters``.
    """

    def __init__(self, roots: Sequence[str | os.PathLike[str]] = ()) -> None:
        self._roots = tuple(parse_location(root) for root in roots)
        for root in self._roots:
            if root.is_local and not stat.S_ISDIR(_mode(root.path)):
                raise NotFoundError(
                    f"the adapter root {root.text} is not a folder; create it or correct its path"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The roots, as messages show them."""
        return tuple(root.text for root in self._roots)

    def candidates(self, name: str) -> list[Place]:
        """Return where an adapter called ``name`` may lie, in the order of the roots.

        Local folders are listed only when they exist; whether a store has the adapter is seen by reading it.

        Raises
        ------
        AdapterError
            The name is not allowed.
        LocationError
            There is no root, or a link in one leads out of it.
        """
        name = check_name(name)
        self._require()
        return [
            _place(root, name)
            for root in self._roots
            if not root.is_local or stat.S_ISDIR(_mode(f"{root.path}/{name}"))
        ]

    def place(self, location: str | os.PathLike[str]) -> list[Place]:
        """Return the places that ``location`` may mean: one, or for a relative path one for each root.

        Raises
        ------
        LocationError
            It lies outside every root, or holds anything by which it could leave one.
        """
        text = os.fspath(location)
        self._require()
        if not _SCHEME.match(text) and not text.startswith(("/", "~")):
            parts = _inner(text, text, encoded=False)
            found = [
                root
                for root in self._roots
                if not root.is_local or stat.S_ISDIR(_mode("/".join((root.path, *parts))))
            ]
            if not found:
                raise NotFoundError(f"no adapter root has a folder {text!r}; the roots are {self._listed()}")
            return [_place(root, "/".join(parts)) for root in found]
        parsed = parse_location(text)
        for root in self._roots:
            inside = _remainder(parsed, root)
            if inside is not None:
                _check_secrets(parsed, root)
                return [_place(root, "/".join(_inner(inside, parsed.text, encoded=root.is_web)))]
        raise LocationError(f"{parsed.text} lies outside the adapter roots; they are {self._listed()}")

    def _listed(self) -> str:
        return ", ".join(self.names)

    def _require(self) -> None:
        if not self._roots:
            raise LocationError(
                "no adapter root is configured, so no adapter can be read; give at least one root"
            )


def _remainder(location: Location, root: Location) -> str | None:
    """Return what follows the root in ``location``, or ``None`` when it lies elsewhere."""
    if (location.scheme, location.authority) != (root.scheme, root.authority):
        return None
    prefix = root.path.rstrip("/") + "/"
    return location.path[len(prefix) :] if location.path.startswith(prefix) else None


def _inner(path: str, shown: str, *, encoded: bool) -> list[str]:
    """Split a path below a root into folder names, refusing whatever could lead out of it."""
    parts = path.rstrip("/").split("/")
    if encoded:
        parts = [unquote(part) for part in parts]
    for part in parts:
        if part in ("", ".", "..") or "/" in part or "\\" in part or not part.isprintable():
            raise LocationError(
                f"{redact(shown)!r} has the part {part!r}, which could lead out of its root; write it plainly"
            )
        if _ENCODED.search(part):
            raise LocationError(f"{redact(shown)!r} has the encoded part {part!r}; write it plainly")
    return parts


def _check_secrets(location: Location, root: Location) -> None:
    for own, allowed in (
        (location.secrets.query, root.secrets.query),
        (location.secrets.userinfo, root.secrets.userinfo),
    ):
        if own and own != allowed:
            raise LocationError(
                f"{location.text} brings its own credentials; they belong into the configured root"
            )


def _place(root: Location, inner: str) -> Place:
    location = root.child(inner)
    if root.is_local:
        _check_links(root.path, location.path)
        return Place(location.text, location.path)
    if root.is_web:
        return Place(location.text, location.url())
    login = f"{root.secrets.userinfo}@" if root.secrets.userinfo else ""
    return Place(location.text, f"{location.scheme}://{login}{location.path}")


def _check_links(root: str, folder: str) -> None:
    real = os.path.realpath(root)
    for path in (folder, *(f"{folder}/{name}" for name in _FILES)):
        target = os.path.realpath(path)
        if target != real and not target.startswith(real.rstrip("/") + "/"):
            raise LocationError(
                f"{path} leads out of the adapter root {root} through a link; copy the adapter into the root"
            )
        if path is not folder and _mode(target) and not stat.S_ISREG(_mode(target)):
            raise LocationError(f"{path} is not a regular file; an adapter is made of plain files")


def _mode(path: str) -> int:
    """Return the mode of what lies at ``path``, links followed; 0 when nothing can be seen there."""
    try:
        return Path(path).stat().st_mode
    except OSError:
        return 0
