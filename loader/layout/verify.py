"""Compares files with the digests that somebody published for them.

Digests come from ``loadstone.json``, and from an HF cache, whose blobs of large files are named by their
sha256. Files are read from end to end, two at a time; local ones by ``pread``, never through their maps.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from loadstone.errors import IntegrityError, LoadstoneError
from loadstone.loader.layout.manifest import MANIFEST, FileRecord, Manifest
from loadstone.loader.ranges import ByteRange, split
from loadstone.loader.source import Blob, Source, Span
from loadstone.loader.together import side_by_side

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
    published : str
        Where the digest to compare with came from; empty when nobody published one.
    """

    name: str
    size: int
    sha256: str
    published: str


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
    known = {name: _published(name, blob, listed) for name, blob in opened.items()}
    _bring(source, [opened[name] for name, (digest, _) in known.items() if digest])
    compared = [name for name in known if known[name][0]]
    found = side_by_side(lambda name: _digest(opened[name]), compared, _READERS, "loadstone-verify")
    digests = dict(zip(compared, found, strict=True))
    wrong = [name for name, digest in digests.items() if digest != known[name][0]]
    if wrong:
        raise IntegrityError(
            f"{where} is damaged: "
            + "; ".join(
                f"{name} has sha256 {digests[name]}, but {known[name][1]} says {known[name][0]}"
                for name in wrong
            )
            + "; fetch it again"
        )
    return VerifyReport(
        tuple(
            FileCheck(name, blob.size, digests.get(name, ""), known[name][1]) for name, blob in opened.items()
        )
    )


def _opened(found: Mapping[str, Blob | LoadstoneError]) -> Iterable[tuple[str, Blob]]:
    for name, blob in found.items():
        if isinstance(blob, LoadstoneError):
            raise blob
        yield name, blob


def _published(name: str, blob: Blob, listed: Mapping[str, FileRecord]) -> tuple[str, str]:
    """Return the digest a file should have and who says so, both empty when nobody does."""
    if name in listed:
        return listed[name].sha256, MANIFEST
    # An HF cache keeps files as links to blobs; those of large files are named by their sha256.
    link = Path(blob.name)
    if link.is_symlink():
        target = link.resolve()
        if target.parent.name == "blobs" and _SHA256.fullmatch(target.name):
            return target.name, "the HF cache's blob name"
    return "", ""


def _bring(source: Source, blobs: Iterable[Blob]) -> None:
    """Bring remote files here side by side; local ones are just read."""
    whole = [Span(blob, ByteRange(0, blob.size)) for blob in blobs]
    late = [span for span in whole if not span.blob.ready(span.range)]
    if late:
        source.prefetch(late).wait()


def _digest(blob: Blob) -> str:
    digest = hashlib.sha256()
    for part in split(ByteRange(0, blob.size), _PIECE):
        digest.update(blob.read(part))
    return digest.hexdigest()
