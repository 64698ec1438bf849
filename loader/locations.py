"""Where a checkpoint lies: one parsed, checked form of what people write.

A `Location` is a folder or a file. Its ``text`` is what messages and logs show: user names, passwords and
query strings (where signatures live) are kept apart from it and never printed. Parsing does no I/O.

- ``model/``, ``/data/model``, ``~/model``, ``file:///data/model``: local.
- ``s3://bucket/key``: the key is taken literally; ``%``, ``#`` and ``?`` are ordinary characters of it.
- ``https://host/path?query``: as a URL; a query (a signature) is repeated for every file below.
- ``gs://``, ``az://``, ``memory://`` and whatever else fsspec knows: the rest is taken literally.
"""

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from loadstone.errors import LocationError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udc7f\udd00-\udfff]")  # and what no file system can spell
_UNDECODED = re.compile(r"[\udc80-\udcff]")  # as Python reads file names and arguments that are not UTF-8
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_PATH_SAFE = "/~!$&'()*+,;=:@-._"
"""Characters a URL path may hold as they are; the rest is percent-encoded."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """The parts of a URL that must never be printed."""

    userinfo: str = field(default="", repr=False)
    query: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Location:
    """A folder or file, local or in a store.

    Attributes
    ----------
    scheme : str
        ``file``, ``http``, ``https``, ``s3``, or an fsspec protocol.
    text : str
        How it is written in messages, without anything secret.
    path : str
        A local absolute path (links are not resolved), ``bucket/key``, or the path of a URL as it is sent.
    authority : str
        ``host`` or ``host:port`` of a URL.
    secrets : Secrets
        User name, password and query of a URL.
    """

    scheme: str
    text: str
    path: str
    authority: str = ""
    secrets: Secrets = field(default=Secrets(), repr=False)

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine's file systems."""
        return self.scheme == "file"

    @property
    def is_web(self) -> bool:
        """Whether it is a plain URL."""
        return self.scheme in ("http", "https")

    def child(self, name: str) -> "Location":
        """Return the location of ``name`` (``/`` allowed) below this folder.

        Raises
        ------
        LocationError
            ``name`` would lead out of the folder.
        """
        check_name(name, self.text)
        part = quote(name, safe=_PATH_SAFE) if self.is_web else name
        return self._with_path(f"{self.path.rstrip('/')}/{part}")

    def parent(self) -> "tuple[Location, str]":
        """Return the folder that holds this file, and the file's name in it."""
        path, _, name = self.path.rstrip("/").rpartition("/")
        if self.is_web:
            name = unquote(name)
        if not name or (not path and not self.is_local and not self.is_web):
            raise LocationError(f"{self.text} names no file; write the file's name after the folder's")
        if "/" in name:
            raise LocationError(
                f"{self.text} has an encoded slash in its file name, which no folder can hold"
            )
        return self._with_path(path or "/"), name

    def url(self) -> str:
        """Return the full URL, secrets included: for making requests, never for messages."""
        login = f"{self.secrets.userinfo}@" if self.secrets.userinfo else ""
        query = f"?{self.secrets.query}" if self.secrets.query else ""
        return f"{self.scheme}://{login}{self.authority}{self.path}{query}"

    def _with_path(self, path: str) -> "Location":
        if self.is_local:
            return replace(self, text=path, path=path)
        text = f"{self.scheme}://{self.authority}{path}" + ("?…" if self.secrets.query else "")
        return replace(self, text=text, path=path)


def parse_location(location: str | os.PathLike[str]) -> Location:
    """Understand what a person wrote.

    Raises
    ------
    LocationError
        It is empty, misspelt, or of a kind that nothing here can read.
    """
    text = os.fspath(location) if isinstance(location, os.PathLike) else location
    if not isinstance(text, str):
        raise LocationError(f"a location is text, got {type(text).__name__}; give a path or a URL")
    if not text.strip():
        raise LocationError("the location is empty; give a folder, a file or a URL")
    if _CONTROL.search(text):
        raise LocationError(
            f"{redact(text)!r} holds characters that no path can; a location is one line of plain text"
        )
    match = _SCHEME.match(text)
    if match is None:
        if "://" in text:
            raise LocationError(f"{redact(text)!r} holds :// but does not begin with a scheme such as s3://")
        return _local(text)
    scheme, rest = match[1].lower(), text[match.end() :]
    if scheme == "file":
        return _file_url(text)
    if _UNDECODED.search(text):
        raise LocationError(f"{redact(text)!r} holds bytes that are not UTF-8, which a URL cannot")
    if scheme in ("http", "https"):
        return _web(text)
    if scheme in ("s3", "s3a"):
        return _bucket(rest)
    return _other(scheme, rest)


def check_name(name: str, where: str) -> None:
    """Refuse a file name that would not stay inside the folder ``where``."""
    parts = name.split("/")
    if not name or _CONTROL.search(name) or any(part in ("", ".", "..") for part in parts):
        raise LocationError(f"{name!r} is not the name of a file inside {where}")


def redact(text: str) -> str:
    """Return ``text`` without user names, passwords and query strings of the URLs in it."""
    text = re.sub(r"(?<=://)[^/\s@?#]+@", "", text)
    return re.sub(r"(\w://[^\s?'\"<>]*)\?[^\s'\"<>]*", r"\1?…", text)


def _local(text: str) -> Location:
    try:
        path = str(Path(text).expanduser().absolute())
    except RuntimeError:
        raise LocationError(f"{text} begins with ~ but that user has no home folder") from None
    return Location("file", path, path)


def _file_url(text: str) -> Location:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise LocationError(f"{redact(text)} is not a local file; write file:///absolute/path")
    path = unquote(parts.path)
    if _CONTROL.search(path):
        raise LocationError(f"{text} holds encoded control characters; a path is plain text")
    return _local(path)


def _web(text: str) -> Location:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise LocationError(f"{redact(text)} is not a URL: {error}") from None
    if not parts.hostname:
        raise LocationError(f"{redact(text)} names no host; write {parts.scheme}://host/path")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    authority = host if port is None else f"{host}:{port}"
    userinfo = parts.netloc.rpartition("@")[0]
    path = quote(parts.path, safe=_PATH_SAFE + "%").rstrip("/") or "/"
    base = Location(parts.scheme.lower(), "", path, authority, Secrets(userinfo, parts.query))
    return base._with_path(path)


def _bucket(rest: str) -> Location:
    bucket, _, key = rest.partition("/")
    if "@" in bucket:
        raise LocationError(
            "an s3:// location holds no credentials; put them in the environment or a profile"
        )
    if bucket.startswith("arn:"):
        raise LocationError(f"s3://{bucket} is an ARN; use the access point's alias as the bucket")
    if not _BUCKET.fullmatch(bucket):
        raise LocationError(f"s3://{rest} names no valid bucket; write s3://bucket/folder")
    path = f"{bucket}/{key}".rstrip("/")
    return Location("s3", f"s3://{path}", path)


def _other(scheme: str, rest: str) -> Location:
    if "::" in rest:
        raise LocationError(f"{scheme}://{redact(rest)} chains protocols; give the innermost location only")
    if not _known(scheme):
        raise LocationError(
            f"{scheme}:// is not a kind of store that is known here; use s3, http, https, gs, az, file, or a "
            "protocol that fsspec has"
        )
    login, at, path = rest.rpartition("@")
    if "/" in login or scheme in ("abfs", "abfss", "wasb", "wasbs"):
        login, at, path = "", "", rest
    path = path.rstrip("/") or "/"
    return Location(scheme, f"{scheme}://{path}", path, secrets=Secrets(userinfo=login if at else ""))


def _known(scheme: str) -> bool:
    import fsspec  # noqa: PLC0415  a tenth of a second that only unusual protocols pay

    return scheme in fsspec.registry or scheme in fsspec.available_protocols()
