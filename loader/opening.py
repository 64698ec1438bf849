"""From a location to a table of tensors: finds the files, reads their headers, joins them.

Everything that opening a checkpoint costs is here, in two rounds: one listing and the small JSON files, then
the first 64 KiB of each weight file, side by side.
"""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

from loadstone.errors import AccessError, FormatError, LoadstoneError, NotFoundError
from loadstone.loader.files.local import LocalSource, resolve_folder
from loadstone.loader.format.header import Header, TensorInfo, header_length, parse_header
from loadstone.loader.layout import index
from loadstone.loader.layout.dcp import lone_file_warnings
from loadstone.loader.layout.manifest import MANIFEST, Manifest, parse_manifest
from loadstone.loader.locations import Location, parse_location
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import Blob, Source, Span
from loadstone.settings import Settings

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FIRST = 64 * 1024  # what `Source.open` makes ready of each blob
_COMPANIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_USUAL_COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
_SMALL = 100_000_000  # most bytes of a JSON file beside the weights: the same limit as for a header


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint's files and tensors.

    Attributes
    ----------
    source : Source
        The folder.
    name : str
        Where it is, for messages.
    blobs : mapping of str to Blob
        The weight files, by their name in the folder.
    infos : mapping of str to TensorInfo
        Every tensor.
    metadata : mapping of str to str
        What the files' headers say about themselves; where files disagree, the first one's word.
    tied : mapping of str to str
        Names that are not stored, and the stored tensor that each stands for.
    manifest : Manifest or None
        The publisher's sizes and digests.
    warnings : tuple of str
        What is suspect.
    companions : tuple of str
        Small files that a model's user reads beside the weights: configuration, tokenizer.
    """

    source: Source
    name: str
    blobs: Mapping[str, Blob]
    infos: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    tied: Mapping[str, str]
    manifest: Manifest | None
    warnings: tuple[str, ...]
    companions: tuple[str, ...] = ()


def open_source(
    location: str | os.PathLike[str],
    cache: str | os.PathLike[str] | None,
    storage_options: Mapping[str, object] | None,
    settings: Settings,
) -> tuple[Source, str, str | None]:
    """Return the folder behind a location, its name for messages, and the one file meant, if it is a file."""
    place = parse_location(location)
    if place.is_local:
        return _open_local(place)
    from loadstone.loader.node.cache import NodeCache  # noqa: PLC0415  local files need none of it
    from loadstone.loader.node.remote import open_remote  # noqa: PLC0415

    folder, file = place, None
    if place.path.endswith((".safetensors", ".json")):
        folder, file = place.parent()
    if cache is None:
        settings = replace(settings, cache_dir="none")
    elif cache != "auto":
        settings = replace(settings, cache_dir=os.fspath(cache))
    shared = NodeCache(settings) if settings.cache_path is not None else None
    source = open_remote(folder, storage_options, settings, shared)
    return source, place.text, None if file == INDEX else file


def read_checkpoint(source: Source, name: str, file: str | None, variant: str | None) -> Opened:
    """Read what the folder, or the one file of it, holds."""
    if file is not None:
        blobs, headers = _read_headers(source, [file], name)
        (header,) = headers.values()
        suspect = lone_file_warnings(file, header, name)
        return Opened(source, name, blobs, header.tensors, header.metadata, {}, None, suspect)
    reader = _SmallFiles(source)
    layout = index.choose_layout(reader.listed, reader.read, variant, name)
    blobs, headers = _read_headers(source, layout.files, name)
    infos, warnings = index.join(layout, headers, name)
    warnings = [*layout.warnings, *warnings]
    config = reader.config()
    tied: dict[str, str] = {}
    if config is not None:
        tied, more = index.tied(config, infos.keys())
        warnings += more
    manifest = reader.manifest()
    if manifest is not None:
        manifest.check_sizes({file: blob.size for file, blob in blobs.items()}, name)
    metadata: dict[str, str] = {}
    for header in headers.values():
        metadata = {**header.metadata, **metadata}
    return Opened(source, name, blobs, infos, metadata, tied, manifest, tuple(warnings), reader.companions())


def companion_spans(opened: Opened) -> list[Span]:
    """Open the small files beside the weights; return all their bytes. Local files need no fetching."""
    if isinstance(opened.source, LocalSource) or not opened.companions:
        return []
    found = opened.source.open(opened.companions).values()
    # One that is not there, or cannot be read, matters only to whoever reads it, and is reported then.
    blobs = [blob for blob in found if not isinstance(blob, LoadstoneError) and blob.size <= _SMALL]
    return [Span(blob, ByteRange(0, blob.size)) for blob in blobs]


def read_config(source: Source, where: str) -> dict[str, object] | None:
    """Return the folder's ``config.json``, ``None`` when there is none."""
    data = read_small(source, CONFIG)
    return None if data is None else _parse_config(data, where)


def read_manifest(source: Source, files: Collection[str]) -> Manifest | None:
    """Return what the folder's manifest says of ``files``, ``None`` when there is no manifest."""
    data = read_small(source, MANIFEST)
    if data is None:
        return None
    listed = parse_manifest(data, _in(source, MANIFEST)).files
    return Manifest({name: record for name, record in listed.items() if name in files})


def read_small(source: Source, name: str) -> bytes | None:
    """Return a whole small file of the folder; ``None`` when there is none of that name."""
    blob = source.open([name])[name]
    # Where one may not list, S3 answers "access denied" for whatever does not exist.
    if isinstance(blob, NotFoundError) or (isinstance(blob, AccessError) and source.names() is None):
        return None
    return _whole(blob)


def _in(source: Source, name: str) -> str:
    return f"{source.name.rstrip('/')}/{name}"


def _parse_config(data: bytes, where: str) -> dict[str, object]:
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{CONFIG} in {where} is not JSON ({error}); fetch the file again") from None
    if not isinstance(config, dict):
        raise FormatError(f"{CONFIG} in {where} is a JSON {type(config).__name__}; expected an object")
    return config


def _whole(blob: Blob | LoadstoneError) -> bytes:
    if isinstance(blob, LoadstoneError):
        raise blob
    if blob.size > _SMALL:
        raise FormatError(f"{blob.name} has {blob.size} bytes; read_file is for files up to {_SMALL} bytes")
    return blob.read(ByteRange(0, blob.size))


class _SmallFiles:
    """The JSON files beside the weights, looked for side by side, each only once."""

    def __init__(self, source: Source) -> None:
        self._source = source
        usual = [INDEX, CONFIG, MANIFEST, SINGLE]  # the last is most likely the weights of a small model
        if isinstance(source, LocalSource):
            self.listed = source.names()
            self._found = source.open([name for name in usual if self.listed is None or name in self.listed])
            return
        # Asking for what may not be there costs an answer or two; waiting for the listing, round trips.
        listing: Future[tuple[str, ...] | None] | None = None
        with ThreadPoolExecutor(1, "loadstone-list") as lister:
            with suppress(RuntimeError):  # no thread can be started: one after the other, then
                listing = lister.submit(source.names)
            self._found = source.open(usual)
        self.listed = source.names() if listing is None else listing.result()

    def read(self, name: str) -> bytes | None:
        """Return a file; ``None`` when there is none. A link that leads nowhere is an error."""
        if self.listed is not None and name not in self.listed:
            return None
        blob = self._found.get(name)
        if blob is None or (self.listed is not None and isinstance(blob, NotFoundError)):
            blob = self._source.open([name])[name]  # also one that came between the two
        if self.listed is None and isinstance(blob, NotFoundError | AccessError):
            return None  # see `read_small`
        return _whole(blob)

    def config(self) -> dict[str, object] | None:
        """Return the parsed ``config.json``."""
        data = self.read(CONFIG)
        return None if data is None else _parse_config(data, self._source.name)

    def companions(self) -> tuple[str, ...]:
        """Return the names of the folder's other small files; the usual ones where the store cannot list."""
        if self.listed is None:
            return _USUAL_COMPANIONS
        return tuple(name for name in self.listed if name.endswith(_COMPANIONS) and name not in self._found)

    def manifest(self) -> Manifest | None:
        """Return the publisher's manifest."""
        data = self.read(MANIFEST)
        return None if data is None else parse_manifest(data, _in(self._source, MANIFEST))


def _open_local(place: Location) -> tuple[Source, str, str | None]:
    if os.path.isdir(place.path):  # noqa: PTH112  Path.is_dir raises on paths that cannot be
        folder = resolve_folder(place.path)
        return LocalSource(folder), folder, None
    folder, file = os.path.split(place.path)
    if file == INDEX:
        return LocalSource(folder), folder, None
    return LocalSource(folder), place.path, file


def _read_headers(
    source: Source, files: Sequence[str], where: str
) -> tuple[dict[str, Blob], dict[str, Header]]:
    opened = source.open(files)
    _raise_failed(opened, where)
    blobs = {file: cast("Blob", opened[file]) for file in files}
    firsts = {file: blob.read(ByteRange(0, min(_FIRST, blob.size))) for file, blob in blobs.items()}
    lengths = {file: header_length(firsts[file], blob.size, blob.name) for file, blob in blobs.items()}
    rest = {file: ByteRange(_FIRST, 8 + length) for file, length in lengths.items() if 8 + length > _FIRST}
    waiting = (
        source.prefetch([Span(blobs[file], span) for file, span in rest.items()]) if len(rest) > 1 else None
    )
    headers: dict[str, Header] = {}
    for file, blob in blobs.items():
        data = firsts[file] + blob.read(rest[file]) if file in rest else firsts[file][: 8 + lengths[file]]
        headers[file] = parse_header(data, blob.size, file, blob.name)
    if waiting is not None:
        waiting.wait()
    return blobs, headers


def _raise_failed(opened: Mapping[str, Blob | LoadstoneError], where: str) -> None:
    failed = {file: error for file, error in opened.items() if isinstance(error, LoadstoneError)}
    if not failed:
        return
    missing = [file for file, error in failed.items() if isinstance(error, NotFoundError)]
    if len(opened) == 1 or len(missing) < len(failed):
        raise next(
            error for error in failed.values() if len(opened) == 1 or not isinstance(error, NotFoundError)
        )
    if len(missing) == 1:
        raise NotFoundError(f"one of {len(opened)} weight files of {where} is missing: {failed[missing[0]]}")
    raise NotFoundError(
        f"{len(missing)} of {len(opened)} weight files of {where} are missing: "
        + "; ".join(str(failed[file]) if "links to" in str(failed[file]) else file for file in missing)
    )
