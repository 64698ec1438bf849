"""``loadstone.json``: the sizes and digests that a publisher writes beside a checkpoint's files.

``{"format": 1, "files": {"model.safetensors": {"size": 123, "sha256": "…64 hex digits…"}}}``; other keys are
left alone, so that publishers may add their own.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from loadstone.errors import FormatError, IntegrityError
from loadstone.loader.locations import check_name

MANIFEST = "loadstone.json"
FORMAT = 1
"""The newest format that is understood here."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the publisher says of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the publisher says of each file, by its name in the folder."""

    files: Mapping[str, FileRecord]

    def to_json(self) -> str:
        """Return the text of ``loadstone.json``."""
        files = {
            name: {"size": record.size, "sha256": record.sha256}
            for name, record in sorted(self.files.items())
        }
        return json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n"

    def check_sizes(self, sizes: Mapping[str, int], where: str) -> None:
        """Compare sizes of files, for those that the manifest lists.

        Raises
        ------
        IntegrityError
            A size differs; every such file is named.
        """
        wrong = [
            f"{name} has {size} bytes instead of {self.files[name].size}"
            for name, size in sizes.items()
            if name in self.files and size != self.files[name].size
        ]
        if wrong:
            raise IntegrityError(
                f"{where} is not what {MANIFEST} lists: {'; '.join(wrong)}; fetch or publish it again"
            )


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Read the text of ``loadstone.json``.

    Raises
    ------
    FormatError
        It is not a manifest, or one of a newer format.
    LocationError
        It names a file outside its folder.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where} is not JSON ({error}); publish the checkpoint again") from None
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict):
        raise FormatError(f"{where} has no 'files' object; publish the checkpoint again")
    version = document.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FormatError(f"{where} has format {version!r}; expected a number from 1 on")
    if version > FORMAT:
        raise FormatError(f"{where} has format {version}, newer than {FORMAT}; update loadstone")
    return Manifest({name: _record(name, value, where) for name, value in document["files"].items()})


def _record(name: str, value: object, where: str) -> FileRecord:
    check_name(name, where)
    if isinstance(value, dict):
        size, digest = value.get("size"), value.get("sha256")
        if isinstance(size, int) and not isinstance(size, bool) and size >= 0:  # noqa: SIM102
            if isinstance(digest, str) and _SHA256.fullmatch(digest):
                return FileRecord(size, digest)
    raise FormatError(
        f"{where} says {str(value)[:80]!r} of {name!r}; expected a size and a sha256 of 64 hex digits"
    )
