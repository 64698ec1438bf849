"""Safetensors headers: eight bytes of length, a JSON object, then the tensors' bytes.

The rules are those of the reference implementation (safetensors 0.8): the length is an unsigned 64-bit
little-endian number of at most 100,000,000; every entry has a known dtype, a shape and a span of bytes;
sorted by their spans the tensors cover the data from its first byte to its last, without a hole or an
overlap; each span is exactly as long as shape and dtype say; ``__metadata__`` maps strings to strings.
Unknown fields of an entry are ignored.

Where the format's text is stricter than the reference, the text is followed, because what it rules out means
different things to different readers:

- a key that comes twice is refused, at any level (the reference keeps the last one);
- the header begins with ``{`` (the reference skips white space);
- an entry is an object, its dtype a string (the reference also takes a list of values in field order, and
  ``{"F32": null}``).

Nothing is read or allocated because a header says so: its length is first held against the file's size.
"""

from array import array
from collections.abc import Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass

from loadstone.errors import HeaderError, TruncatedError
from loadstone.loader.format.entries import Columns, check_entries, describe, expand, make_entry
from loadstone.loader.format.gcpause import paused_gc
from loadstone.loader.format.naming import quote
from loadstone.loader.format.sniff import sniff
from loadstone.loader.format.strictjson import Repeated, is_unicode, parse_json
from loadstone.loader.ranges import ByteRange

HEADER_LIMIT = 100_000_000
"""Most bytes a header may have."""

METADATA = "__metadata__"
"""The key that holds free strings instead of a tensor."""

_PREFIX = 8
_SNIFFED = 64 * 1024


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor without reading its bytes.

    Attributes
    ----------
    name, dtype : str
        Its name; its dtype in the format's own spelling, such as ``"BF16"``.
    shape : tuple[int, ...]
        Its shape, in elements, also where an element is smaller than a byte.
    file : str
        The file that holds it.
    offset, nbytes : int
        Where its bytes begin, counted from the start of the file; how many there are.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int

    @property
    def range(self) -> ByteRange:
        """Its bytes, within its file."""
        return ByteRange(self.offset, self.offset + self.nbytes)


class TensorTable(Mapping[str, TensorInfo]):
    """The tensors of one file by name, in the order of their bytes.

    Opening a file of 100,000 tensors must not cost 100,000 objects nobody asks for: a `TensorInfo` is made
    when it is looked up. Since there are no holes, a tensor ends where the next one begins.
    """

    __slots__ = ("_bounds", "_dtypes", "_file", "_index", "_shapes")

    def __init__(self, columns: Columns, file: str, data_start: int) -> None:
        self._index = dict(zip(columns.names, range(len(columns.names)), strict=True))
        self._dtypes = columns.dtypes
        self._shapes = columns.shapes
        self._bounds = array("Q", [data_start, *[data_start + end for end in columns.ends]])
        self._file = file

    def __getitem__(self, name: str) -> TensorInfo:
        at = self._index[name]
        begin, end = self._bounds[at], self._bounds[at + 1]
        return TensorInfo(name, self._dtypes[at], self._shapes[at], self._file, begin, end - begin)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def __repr__(self) -> str:
        return f"TensorTable({len(self)} tensors of {self._file!r})"

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self._index.keys()


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header.

    Attributes
    ----------
    tensors : Mapping[str, TensorInfo]
        The tensors by name, in the order of their bytes.
    metadata : Mapping[str, str]
        The free strings of the header; empty when there are none.
    data_start : int
        Where the tensors' bytes begin in the file.
    file_size : int
        Length of the file.
    """

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_start: int
    file_size: int


def header_length(first: bytes, file_size: int, where: str) -> int:
    """Return how many bytes of JSON follow the eight bytes of length.

    Parameters
    ----------
    first : bytes
        The file's first bytes: eight are enough for the length; with more of them (64 KiB are plenty) a file
        of another kind is told by name.
    file_size : int
        Length of the whole file.
    where : str
        The file's name, for messages.

    Raises
    ------
    TruncatedError
        The file ends before its header does.
    HeaderError
        The file is of another kind, or the length is impossible.
    """
    length = int.from_bytes(first[:_PREFIX], "little")
    plausible = min(len(first), file_size) >= _PREFIX and length <= HEADER_LIMIT
    if plausible and length and first[_PREFIX : _PREFIX + 1] in (b"{", b""):
        if _PREFIX + length <= file_size:
            return length
        raise TruncatedError(
            f"{where}: truncated: {file_size} bytes are there, {_PREFIX + length} are expected for the "
            "header alone; fetch the file again"
        )
    what = sniff(first)
    if what is not None:
        raise HeaderError(f"{where}: expected a safetensors file, but it is {what}")
    if not plausible:
        raise _impossible(first, file_size, where)
    if length == 0:
        raise HeaderError(
            f"{where}: the header has 0 bytes where at least '{{}}' is expected; "
            "an interrupted download can leave such zeros, fetch the file again"
        )
    raise HeaderError(
        f"{where}: the header must begin with '{{', but begins with {first[_PREFIX : _PREFIX + 1]!r}; "
        "it is not a safetensors file, or is damaged, fetch it again"
    )


def _impossible(first: bytes, file_size: int, where: str) -> Exception:
    if min(len(first), file_size) < _PREFIX:
        state = "the file is empty" if file_size == 0 else "truncated"
        return TruncatedError(
            f"{where}: {state}: {file_size} bytes are there, expected at least {_PREFIX} for the header's "
            "length; fetch the file again"
        )
    length = int.from_bytes(first[:_PREFIX], "little")
    swapped = int.from_bytes(first[:_PREFIX], "big")
    hint = "; it was written in big-endian order" if _PREFIX + swapped <= file_size else ""
    return HeaderError(
        f"{where}: header too large: its length is given as {length} bytes in a file of {file_size}, at most "
        f"{HEADER_LIMIT} are allowed{hint}; it is not a safetensors file, or is damaged, fetch it again"
    )


def parse_header(data: bytes | memoryview, file_size: int, file: str, where: str) -> Header:
    """Parse and check a header.

    Parameters
    ----------
    data : bytes | memoryview
        The file's beginning, up to the end of its header at least.
    file_size : int
        Length of the whole file.
    file : str
        What goes into `TensorInfo.file`.
    where : str
        The file's name, for messages.

    Raises
    ------
    TruncatedError
        The file ends before its header or its tensors do.
    HeaderError
        The header breaks a rule of the format; the message names the tensor.
    """
    length = header_length(bytes(data[:_SNIFFED]), file_size, where)
    stop = _PREFIX + length
    if len(data) < stop:
        raise TruncatedError(
            f"{where}: truncated: {len(data)} bytes were read, its header has {stop}; fetch the file again"
        )
    try:
        text = str(data[_PREFIX:stop], "utf-8")
    except UnicodeDecodeError as problem:
        raise HeaderError(
            f"{where}: the header is not UTF-8 at byte {_PREFIX + problem.start}; "
            "the file is damaged, fetch it again"
        ) from None
    with paused_gc(length):
        document = _object(parse_json(text, f"{where}: the header", HeaderError, make_entry), where)
        metadata = _metadata(document.pop(METADATA, None), where)
        if "\\u" in text:
            _check_unicode([*document, *metadata.keys(), *metadata.values()], where)
        columns = check_entries(document, where)
        del document
        _check_size(stop + (columns.ends[-1] if columns.ends else 0), file_size, where)
        table = TensorTable(columns, file, stop)
    return Header(table, metadata, stop, file_size)


def _object(parsed: object, where: str) -> dict[str, object]:
    parsed = expand(parsed)
    if not isinstance(parsed, dict):
        raise HeaderError(f"{where}: the header is not a JSON object; the file is damaged, fetch it again")
    if isinstance(parsed, Repeated):
        raise HeaderError(
            f"{where}: duplicate name {quote(parsed.key)} in the header, each may come only once; "
            "readers would disagree about it, write the file again with distinct names"
        )
    return parsed


def _metadata(value: object, where: str) -> dict[str, str]:
    value = expand(value)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise HeaderError(
            f"{where}: {METADATA} is {describe(value)}, expected an object of strings; write the file again"
        )
    if isinstance(value, Repeated):
        raise HeaderError(
            f"{where}: duplicate key {quote(value.key)} in {METADATA}; write the file again without it"
        )
    for key, text in value.items():
        if type(text) is not str:
            raise HeaderError(
                f"{where}: {METADATA} has {describe(text)} under {quote(key)}, only strings are allowed "
                f"({METADATA} is reserved and cannot name a tensor); write the file again"
            )
    return value


def _check_unicode(texts: Iterable[str], where: str) -> None:
    for text in texts:
        if not is_unicode(text):
            raise HeaderError(
                f"{where}: {quote(text)} holds half of a surrogate pair, which is not Unicode text; "
                "write the file again with proper names"
            )


def _check_size(needed: int, file_size: int, where: str) -> None:
    if file_size < needed:
        raise TruncatedError(
            f"{where}: truncated: {file_size} bytes are there, {needed} are expected; fetch the file again"
        )
    if file_size > needed:
        raise HeaderError(
            f"{where}: {file_size - needed} bytes follow the last tensor, expected a file of {needed} bytes "
            f"and found {file_size}; it is damaged or was appended to, fetch it again"
        )
