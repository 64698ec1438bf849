"""Compares files with the digests that somebody published for them.

Digests come from ``loadstone.json``, from an HF cache, whose blobs of large files are named by their sha256,
and from a store whose ETags are digests (S3's of objects stored in one request, or in parts whose sizes are
told). Files are read from end to end, two at a time; local ones by ``pread``, never through their maps.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from loadstone.errors import IntegrityError, LoadstoneError
from loadstone.loader.layout.manifest import MANIFEST, FileRecord, Manifest
from loadstone.loader.ranges import ByteRange, split
from loadstone.loader.source import Blob, Source, Span, StatedDigest
from loadstone.loader.together import side_by_side

Result = TypeVar("Result")

_PIECE = 4 * 1024 * 1024
_READERS = 2
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What was found for one file.

    Attributes
    ----------
    name : str
        The file's name in the folder.
    size : int
        Its length in bytes.
    sha256 : str
        Its digest, empty when it was not computed.
    etag : str
        What an S3 ETag of these bytes would be, without quotes; empty when it was not computed.
    published : str
        Where the digest to compare with came from; empty when nobody published one.
    reason : str
        Why there is none to compare with; empty when there is one.
    """

    name: str
    size: int
    sha256: str
    etag: str
    published: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Every file of a checkpoint, and whether there was a digest to compare it with."""

    files: tuple[FileCheck, ...]

    @property
    def verified(self) -> tuple[FileCheck, ...]:
        """Files whose digest was compared, and matches."""
        return tuple(file for file in self.files if file.published)

    @property
    def unknown(self) -> tuple[FileCheck, ...]:
        """Files that nobody published a digest of."""
        return tuple(file for file in self.files if not file.published)

    @property
    def nbytes(self) -> int:
        """Bytes that were compared."""
        return sum(file.size for file in self.verified)


@dataclass(frozen=True, slots=True)
class _Published:
    """A digest that a file should have: a sha256, or what a store stated of an ETag."""

    digest: str = ""
    by: str = ""
    stated: StatedDigest | None = None
    reason: str = ""

    def of(self, blob: Blob) -> str:
        """Compute the digest that ``blob`` has."""
        return _sha256(blob) if self.stated is None else etag_of(blob, self.stated.parts)

    def surer(self) -> "_Published | None":
        """Ask for what this digest presumes, where it presumes anything."""
        if self.stated is None or self.stated.surer is None:
            return None
        return _of_store(self.stated.surer())

    def told(self, name: str, found: str) -> str:
        """Say that ``found`` is another digest."""
        if self.stated is None:
            return f"{name} has sha256 {found}, but {self.by} says {self.digest}"
        return f"{name} has an MD5 ETag of {found}, but {self.by} is {self.digest}"

    def check(self, name: str, size: int, found: str) -> FileCheck:
        """Return what is reported of a file."""
        plain = self.stated is None
        return FileCheck(
            name, size, found if plain else "", "" if plain else found, self.by, reason=self.reason
        )


def verify_files(
    source: Source, blobs: Mapping[str, Blob], manifest: Manifest | None, where: str
) -> VerifyReport:
    """Compare the weight files, and all that the manifest lists, with their digests.

    Raises
    ------
    IntegrityError
        Sizes or digests differ; every such file is named.
    LoadstoneError
        A file cannot be read.
    """
    listed = manifest.files if manifest is not None else {}
    names = [*blobs, *(name for name in listed if name not in blobs)]
    opened = dict(_opened(source.open(names)))
    if manifest is not None:
        manifest.check_sizes({name: blob.size for name, blob in opened.items()}, where)
    asked = _together(lambda name: _published(source, name, opened[name], listed), opened)
    known = dict(zip(opened, asked, strict=True))
    _bring(source, [opened[name] for name in opened if known[name].digest])
    compared = _together(lambda name: _compare(opened[name], known[name]), opened)
    known = {name: published for name, (published, _) in zip(opened, compared, strict=True)}
    found = {name: digest for name, (_, digest) in zip(opened, compared, strict=True)}
    wrong = [name for name, published in known.items() if found[name] != published.digest]
    if wrong:
        told = "; ".join(known[name].told(name, found[name]) for name in wrong)
        raise IntegrityError(
            f"{where} is damaged: {told}; fetch it again (from a store: after `loadstone cache remove`)"
        )
    return VerifyReport(
        tuple(known[name].check(name, blob.size, found[name]) for name, blob in opened.items())
    )


def _compare(blob: Blob, published: _Published) -> tuple[_Published, str]:
    """Return the digest a file should have, asked for more closely where need be, and the one it has."""
    found = published.of(blob) if published.digest else ""
    surer = published.surer() if found != published.digest else None
    return (published, found) if surer is None else _compare(blob, surer)


def _together(work: Callable[[str], Result], names: Iterable[str]) -> list[Result]:
    return side_by_side(work, names, _READERS, "loadstone-verify")


def etag_of(blob: Blob, parts: Sequence[ByteRange]) -> str:
    """Return what S3's ETag of ``blob`` is when it was stored in ``parts``; none: in one request."""
    if not parts:
        return _md5(blob, ByteRange(0, blob.size)).hexdigest()
    digests = b"".join(_md5(blob, part).digest() for part in parts)
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"


def _opened(found: Mapping[str, Blob | LoadstoneError]) -> Iterable[tuple[str, Blob]]:
    for name, blob in found.items():
        if isinstance(blob, LoadstoneError):
            raise blob
        yield name, blob


def _published(source: Source, name: str, blob: Blob, listed: Mapping[str, FileRecord]) -> _Published:
    """Return the digest a file should have and who says so, both empty when nobody does."""
    if name in listed:
        return _Published(listed[name].sha256, MANIFEST)
    # An HF cache keeps files as links to blobs; those of large files are named by their sha256.
    link = Path(blob.name)
    if link.is_symlink():
        target = link.resolve()
        if target.parent.name == "blobs" and _SHA256.fullmatch(target.name):
            return _Published(target.name, "the HF cache's blob name")
    return _of_store(source.stated_digest(blob))


def _of_store(stated: StatedDigest) -> _Published:
    if not stated.etag:
        return _Published(reason=stated.reason)
    return _Published(stated.etag, "the store's ETag", stated)


def _bring(source: Source, blobs: Iterable[Blob]) -> None:
    """Bring remote files here side by side; local ones are just read."""
    whole = [Span(blob, ByteRange(0, blob.size)) for blob in blobs]
    late = [span for span in whole if not span.blob.ready(span.range)]
    if late:
        source.prefetch(late).wait()


def _sha256(blob: Blob) -> str:
    digest = hashlib.sha256()
    for part in split(ByteRange(0, blob.size), _PIECE):
        digest.update(blob.read(part))
    return digest.hexdigest()


def _md5(blob: Blob, span: ByteRange) -> "hashlib._Hash":
    digest = hashlib.md5(usedforsecurity=False)
    for part in split(span, _PIECE):
        digest.update(blob.read(part))
    return digest
