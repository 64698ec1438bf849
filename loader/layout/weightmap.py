"""Reads the index of a sharded checkpoint: which file holds which tensor.

An index comes with the checkpoint, from whoever made it, so its file names are only ever taken as names of
files beside it. Anything that could lead elsewhere is refused before any of the files is touched.
"""

from dataclasses import dataclass

from loadstone.errors import IndexFileError
from loadstone.loader.format.gcpause import paused_gc
from loadstone.loader.format.naming import quote
from loadstone.loader.format.sniff import sniff
from loadstone.loader.format.strictjson import Repeated, is_unicode, parse_json
from loadstone.loader.layout.filenames import is_pickle

_LONGEST_NAME = 255


@dataclass(frozen=True, slots=True)
class WeightMap:
    """The content of an index.

    Attributes
    ----------
    files : dict[str, str]
        Tensor name to file name, never empty.
    total_size : int or None
        What it says the tensors' bytes amount to. Advisory: many indexes lie or are silent about it.
    """

    files: dict[str, str]
    total_size: int | None


def parse_index(data: bytes, where: str) -> WeightMap:
    """Parse and check an index.

    Parameters
    ----------
    data : bytes
        The whole file.
    where : str
        Its name, for messages.

    Raises
    ------
    IndexFileError
        It is not an index, or sends the reader out of its folder; the message names the tensor.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise IndexFileError(
            f"{where}: the index is not UTF-8 at byte {problem.start}; it is damaged, fetch it again"
        ) from None
    if not text.lstrip().startswith(("{", "[")):
        what = sniff(data) or ("something else" if data else "an empty file, fetch it again")
        raise IndexFileError(f"{where}: expected the JSON of an index, but it is {what}")
    with paused_gc(len(data)):
        document = parse_json(text, f"{where}: the index", IndexFileError)
    files = _weight_map(document, where)
    metadata = document.get("metadata") if isinstance(document, dict) else None
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return WeightMap(files, total if type(total) is int else None)


def _weight_map(document: object, where: str) -> dict[str, str]:
    files = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(files, dict) or not files:
        raise IndexFileError(
            f"{where}: the index has no weight_map with any tensor in it; it is damaged, fetch it again"
        )
    for level, name in ((document, "the index"), (files, "its weight_map")):
        if isinstance(level, Repeated):
            raise IndexFileError(
                f"{where}: duplicate name {quote(level.key)} in {name}, each may come only once; "
                "it does not say which file is meant, fetch or write the index again"
            )
    checked: set[object] = set()
    for tensor, file in files.items():
        if type(file) is not str or file not in checked:
            fault = _fault(file)
            if fault:
                raise IndexFileError(
                    f"{where}: the index places {quote(tensor)} in {quote(file)}, {fault}, expected the name "
                    "of a file beside the index; do not use this checkpoint, or correct its index"
                )
            checked.add(file)
    return files


def _fault(file: object) -> str | None:
    if not isinstance(file, str):
        return "which is not a string"
    if not file.strip():
        return "which is empty"
    if file in (".", ".."):
        return "which is a folder"
    if "://" in file:
        return "which is a URL"
    if file.startswith(("/", "\\", "~")):
        return "which is an absolute path"
    if "/" in file or "\\" in file:
        return "which is a path"
    if not file.isprintable() or not is_unicode(file):
        return "which holds characters no file name should"
    if len(file.encode()) > _LONGEST_NAME:
        return f"which is longer than {_LONGEST_NAME} bytes"
    if is_pickle(file):
        return "which is a pickle, can run code when loaded and is never opened"
    return None
