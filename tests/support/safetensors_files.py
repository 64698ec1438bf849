"""Makes safetensors files, good ones and every kind of bad one, byte by byte and without any library.

The reading code is tested against what is made here, so nothing here may use it.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from random import Random

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
    b"size 4976698672\n"
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file that must be refused, and the words that its error must hold, in any case of letters."""

    data: bytes
    mentions: tuple[str, ...]


def raw_file(header: str | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """Put a file together from a header written out in full; ``length`` lies about it."""
    text = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(rng: Random, name: str, dtype: str, shape: Sequence[int]) -> Tensor:
    """Make a tensor of random bytes (zeros and ones, for BOOL)."""
    nbytes = prod(shape) * BITS[dtype] // 8
    data = bytes(rng.randrange(2) for _ in range(nbytes)) if dtype == "BOOL" else rng.randbytes(nbytes)
    return Tensor(name, dtype, tuple(shape), data)


def entries(tensors: Sequence[Tensor], start: int = 0) -> dict[str, object]:
    """Return the header's entries for tensors that lie one after the other."""
    document: dict[str, object] = {}
    for item in tensors:
        stop = start + len(item.data)
        document[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": [start, stop]}
        start = stop
    return document


def tensors_file(
    tensors: Sequence[Tensor], metadata: Mapping[str, str] | None = None, align: int = 8
) -> bytes:
    """Write tensors as a valid file whose data begins at a multiple of ``align``."""
    document: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    text = json.dumps({**document, **entries(tensors)}, separators=(",", ":"))
    text += " " * (-len(text) % align)
    return raw_file(text, b"".join(item.data for item in tensors))


def random_tensors(rng: Random, most: int = 6) -> list[Tensor]:
    """Make up to ``most`` tensors: all dtypes, odd names, scalars, empty ones."""
    names = rng.sample(ODD_NAMES, rng.randint(0, min(most, len(ODD_NAMES))))
    made = []
    for name in names:
        dtype = rng.choice(list(BITS))
        shape = [rng.choice((0, 1, 1, 2, 3, 4, 8)) for _ in range(rng.randint(0, 3))]
        if BITS[dtype] < 8:
            shape.append(4 * rng.randint(0, 2))
        made.append(tensor(rng, name, dtype, shape))
    return made


ODD_NAMES = (
    *("w", "a.weight", "b.weight", "", " ", "..", "a/b", "a:b", "{}", "[0]", "-0", "null", "__metadata"),
    *("привет.вес", "层.0", "emoji.🧪", "e\u0301", "\u00e9"),
    *('quo"te', "back\\slash", "a\nb", "tab\t", "\x7f", "nul\0", "x" * 300),
)


def good_files() -> Iterator[tuple[str, bytes]]:
    """Yield files that must open, by what is special about them."""
    rng = Random(1)
    a, b = tensor(rng, "a", "F32", (4, 3)), tensor(rng, "b", "F16", (5,))
    plain = json.dumps(entries([a, b]))
    data = a.data + b.data
    yield "plain", tensors_file([a, b])
    yield "unaligned", tensors_file([tensor(rng, "odd", "U8", (3,)), a], align=1)
    yield "newline padding", raw_file(plain + "\n\t \r\n ", data)
    yield "no tensors", raw_file('{"__metadata__":{"k":"v"}}')
    yield "metadata like an entry", raw_file('{"__metadata__":{"dtype":"U8","shape":"1","data_offsets":"0"}}')
    fields = [tensor(rng, name, "U8", (1,)) for name in ("dtype", "shape", "data_offsets")]
    yield "tensors called like fields", tensors_file(fields)
    yield "a field like an entry", raw_file(_with_field(_entry()), b"x")
    nested = '{"dtype":0,"shape":[' * 62 + '],"data_offsets":[0,0]}' * 62
    yield "a field like entries in entries", raw_file(_with_field(nested), b"x")
    yield "nothing", raw_file("{}")
    yield "null metadata", raw_file('{"__metadata__":null}')
    yield "ignored field", raw_file('{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"note":[1]}}', b"x")
    yield "deepest ignored field", raw_file(_with_field("[" * 125 + "]" * 125), b"x")
    yield "fields in another order", raw_file('{"a":{"data_offsets":[0,1],"shape":[1],"dtype":"U8"}}', b"x")
    yield (
        "escaped names",
        raw_file('{"\\u0061\\ud83e\\uddea":{"dtyp\\u0065":"U8","shape":[],"data_offsets":[0,1]}}', b"x"),
    )
    yield "entries out of order", raw_file(json.dumps(dict(reversed(entries([a, b]).items()))), data)
    yield "scalars and empty ones", tensors_file(
        [tensor(rng, "s", "F32", ()), tensor(rng, "e", "F16", (3, 0, 2)), tensor(rng, "f", "I64", ()),
         tensor(rng, "g", "BF16", (0,))]
    )  # fmt: skip
    yield (
        "empty with a huge side",
        raw_file('{"a":{"dtype":"U8","shape":[0,9223372036854775808],"data_offsets":[0,0]}}'),
    )
    yield "twenty dimensions", tensors_file([tensor(rng, "a", "U8", (1,) * 20)])
    yield "odd names", tensors_file([tensor(rng, name, "U8", (1,)) for name in ODD_NAMES])
    for dtype in BITS:
        yield f"dtype {dtype}", tensors_file([tensor(rng, "w", dtype, (2, 8))])
    for size in (65_527, 65_528, 65_529, 99_992, 100_000):
        yield f"header of {size} bytes", raw_file(plain.ljust(size), data)


def bad_files() -> Iterator[tuple[str, BadFile]]:
    """Yield files that must be refused, by what is wrong with them."""
    yield from _bad_kinds()
    yield from _bad_lengths()
    yield from _bad_json()
    yield from _bad_entries()
    yield from _bad_layouts()


def _with_field(value: str) -> str:
    return f'{{"a":{{"dtype":"U8","shape":[1],"data_offsets":[0,1],"note":{value}}}}}'


def _entry(dtype: str = '"U8"', shape: str = "[1]", offsets: str = "[0,1]", name: str = '"tensor_a"') -> str:
    return f'{{{name}:{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}'


def _bad_kinds() -> Iterator[tuple[str, BadFile]]:
    html = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
    xml = b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code><Message>No</Message></Error>'
    yield "LFS pointer", BadFile(LFS_POINTER, ("lfs", "4976698672"))
    yield "HTML page", BadFile(html, ("html", "Sign in"))
    yield "HTML page after white space", BadFile(b"\r\n\r\n  <html><body>no</body></html>", ("html",))
    yield "XML error", BadFile(xml, ("xml", "AccessDenied"))
    yield (
        "XML error without a declaration",
        BadFile(b"<Error><Code>NoSuchKey</Code></Error>", ("xml", "NoSuchKey")),
    )
    yield (
        "XML error in a namespace",
        BadFile(
            b'<Error xmlns="http://s3.amazonaws.com/doc/"><Code>Expired</Code></Error>', ("xml", "Expired")
        ),
    )
    yield "LFS pointer from Windows", BadFile(LFS_POINTER.replace(b"\n", b"\r\n"), ("lfs", "4976698672"))
    yield "JSON error", BadFile(b'{"error":"Repository not found"}', ("json", "Repository not found"))
    yield "nested JSON error", BadFile(b'{"error":{"message":"gone","code":404}}', ("json", "gone"))
    yield "JSON list", BadFile(b'["no","such","file"]', ("json",))
    yield "cut JSON error", BadFile(b'{"error":"Reposito', ("json",))
    yield "text", BadFile(b"Entry not found\n", ("Entry not found",))
    yield "flattened link", BadFile(b"../../blobs/" + b"0f" * 32, ("link",))
    yield (
        "torch zip",
        BadFile(b"PK\x03\x04" + bytes(26) + b"archive/data.pkl" + bytes(99), ("torch", "pickle", "zip")),
    )
    yield "other zip", BadFile(b"PK\x03\x04" + bytes(99), ("zip",))
    yield "pickle", BadFile(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", ("pickle",))
    yield "small pickle", BadFile(b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00}\x94.", ("pickle",))
    yield "GGUF", BadFile(b"GGUF\x03" + bytes(19), ("gguf",))
    yield "HDF5", BadFile(b"\x89HDF\r\n\x1a\n" + bytes(99), ("hdf5",))
    yield "NumPy", BadFile(b"\x93NUMPY\x01\x00v\x00{'descr'", ("numpy",))
    yield "gzip", BadFile(b"\x1f\x8b\x08\x00" + bytes(20), ("gzip",))
    yield "zstd", BadFile(b"\x28\xb5\x2f\xfd" + bytes(20), ("zstd",))


def _bad_lengths() -> Iterator[tuple[str, BadFile]]:
    whole = raw_file(_entry(), b"x")
    yield "empty", BadFile(b"", ("empty", "0 bytes"))
    for count in (1, 5, 7):
        yield f"{count} bytes", BadFile(whole[:count], ("truncated", f"{count} bytes", "8"))
    yield "length only", BadFile(whole[:8], ("truncated", "8 bytes", str(len(whole) - 1)))
    yield "half a header", BadFile(whole[:40], ("truncated", "40 bytes", str(len(whole) - 1)))
    yield "no data", BadFile(whole[:-1], ("truncated", str(len(whole) - 1), str(len(whole))))
    yield "half a header of 640 bytes", BadFile(raw_file(_entry(), length=640), ("truncated",))
    yield "zeros", BadFile(bytes(4096), ("0 bytes",))
    yield "no header", BadFile(raw_file(b""), ("0 bytes",))
    for length in (100_000_001, 132_095_296, 2**31, 2**63, 2**64 - 1):
        yield f"length {length}", BadFile(raw_file(_entry(), b"x", length), ("too large", str(length)))
    yield "a longest header", BadFile(raw_file(_entry(), b"x", 100_000_000), ("truncated", "100000008"))
    swapped = struct.pack(">Q", len(_entry())) + _entry().encode() + b"x"
    yield "big-endian", BadFile(swapped, ("big-endian",))


def _bad_json() -> Iterator[tuple[str, BadFile]]:
    for start in (" ", "\n", "\ufeff", "["):
        yield f"beginning with {start!r}", BadFile(raw_file(f"{start}{_entry()}", b"x"), ("header", "{"))
    yield "NUL padding", BadFile(raw_file(_entry() + "\0\0", b"x"), ("json",))
    yield "text after the header", BadFile(raw_file(_entry() + "{}", b"x"), ("json",))
    yield "cut JSON", BadFile(raw_file('{"a":{"dtype"'), ("json",))
    yield "not UTF-8", BadFile(raw_file(b'{"\xff":1}'), ("utf-8",))
    yield "a surrogate in UTF-8", BadFile(raw_file(b'{"\xed\xa0\x80":1}'), ("utf-8",))
    yield "half a surrogate pair", BadFile(raw_file(_entry(name='"\\ud800"'), b"x"), ("surrogate",))
    yield "half a pair in metadata", BadFile(raw_file('{"__metadata__":{"a":"\\udc00"}}'), ("surrogate",))
    yield "a tab in a string", BadFile(raw_file(_entry(name='"a\tb"'), b"x"), ("json",))
    yield "an unknown escape", BadFile(raw_file(_entry(name='"a\\x"'), b"x"), ("json",))
    for literal in ("NaN", "Infinity", "-Infinity"):
        yield f"{literal} as a size", BadFile(raw_file(_entry(shape=f"[{literal}]"), b"x"), (literal,))
        yield f"{literal} in metadata", BadFile(raw_file(f'{{"__metadata__":{{"a":{literal}}}}}'), (literal,))
    for depth in (200, 2_000, 100_000):
        deep = '{"a":' * depth + "1" + "}" * depth
        lists = "[" * depth + "]" * depth
        yield f"metadata {depth} deep", BadFile(raw_file(f'{{"__metadata__":{deep}}}'), ())
        yield f"a field {depth} deep", BadFile(raw_file(_with_field(lists), b"x"), ("127",))
        yield f"a shape {depth} deep", BadFile(raw_file(_entry(shape=lists), b"x"), ())
    nested = '{"dtype":0,"shape":[' * 63 + '],"data_offsets":[0,0]}' * 63
    yield "too deep entries in a field", BadFile(raw_file(_with_field(nested), b"x"), ("127",))
    yield (
        "a header like an entry",
        BadFile(raw_file('{"dtype":{},"shape":[],"data_offsets":[0,0]}'), ("'dtype'",)),
    )
    yield "too deep a field", BadFile(raw_file(_with_field("[" * 126 + "]" * 126), b"x"), ("127",))
    yield "a size of 5000 digits", BadFile(raw_file(_entry(shape=f"[{'9' * 5000}]"), b"x"), ("digits",))
    yield "a field of 400 digits", BadFile(raw_file(_with_field("9" * 400), b"x"), ("out of range",))
    yield "a field of 1e999", BadFile(raw_file(_with_field("1e999"), b"x"), ("out of range",))
    yield "half a pair in a field", BadFile(raw_file(_with_field('"\\ud800"'), b"x"), ("surrogate",))


def _bad_entries() -> Iterator[tuple[str, BadFile]]:
    one = _entry()[1:-1]
    yield "duplicate name", BadFile(raw_file(f"{{{one},{one}}}", b"x"), ("duplicate", "tensor_a"))
    escaped = one.replace("tensor_a", "tensor\\u005fa")
    yield "duplicate escaped name", BadFile(raw_file(f"{{{escaped},{one}}}", b"x"), ("duplicate", "tensor_a"))
    hidden = raw_file(f'{{"tensor_a":[],{one}}}', b"x")
    yield "duplicate name of another kind", BadFile(hidden, ("duplicate", "tensor_a"))
    yield (
        "duplicate field",
        BadFile(raw_file(_entry(shape='[2],"shape":[1]'), b"x"), ("duplicate", "shape", "tensor_a")),
    )
    yield (
        "duplicate escaped field",
        BadFile(raw_file(_entry(shape='[2],"\\u0073hape":[1]'), b"x"), ("duplicate", "shape", "tensor_a")),
    )
    yield "duplicate ignored field", BadFile(raw_file(_with_field('1,"note":2'), b"x"), ("duplicate", "note"))
    yield (
        "duplicate key in an ignored field",
        BadFile(raw_file(_with_field('{"k":1,"k":2}'), b"x"), ("duplicate", "'k'")),
    )
    yield (
        "duplicate metadata",
        BadFile(raw_file('{"__metadata__":{},"__metadata__":{}}'), ("duplicate", "metadata")),
    )
    yield (
        "duplicate metadata key",
        BadFile(raw_file('{"__metadata__":{"k":"1","k":"1"}}'), ("duplicate", "'k'")),
    )
    for value in ("[]", '"x"', "1", "false", '{"k":1}', '{"k":null}', one[len('"tensor_a":') :]):
        yield f"metadata {value[:9]}", BadFile(raw_file(f'{{"__metadata__":{value}}}', b"x"), ("metadata",))
    for value in ("[]", "null", "1", '"x"', '["U8",[1],[0,1]]', "{}", '{"dtype":"U8","shape":[1]}'):
        yield f"entry {value}", BadFile(raw_file(f'{{"tensor_a":{value}}}', b"x"), ("tensor_a",))
    for dtype in ('""', "null", "1", '"u8"', '"F7_E3M3"', '"F8_E4M3FN"', '{"U8":null}', '"U8 "', "[[[]]]"):
        yield f"dtype {dtype}", BadFile(raw_file(_entry(dtype=dtype), b"x"), ("tensor_a", "dtype"))
    for shape in ("null", "1", "[1.0]", "[true]", "[-1,-1]", "[-1]", '["1"]', "[1e0]", "{}", "[[1]]",
                  "[18446744073709551616]", "[null]"):  # fmt: skip
        yield f"shape {shape}", BadFile(raw_file(_entry(shape=shape), b"x"), ("tensor_a", "shape"))
    for offsets in ("null", "[]", "[0]", "[0,1,2]", '["0","1"]', "[-1,0]", "[1,0]", "[0,1.0]", "[false,1]",
                    "[0,18446744073709551616]"):  # fmt: skip
        yield (
            f"offsets {offsets}",
            BadFile(raw_file(_entry(offsets=offsets), b"x"), ("tensor_a", "data_offsets")),
        )
    yield "minus zero", BadFile(raw_file(_entry(shape="[-0]", offsets="[0,0]")), ("tensor_a", "shape"))


def _bad_layouts() -> Iterator[tuple[str, BadFile]]:
    def two(first: str, second: str, data: bytes) -> bytes:
        a = _entry(offsets=first, shape="[4]")[1:-1]
        b = _entry(offsets=second, shape="[4]", name='"tensor_b"')[1:-1]
        return raw_file(f"{{{b},{a}}}", data)

    both = ("tensor_a", "tensor_b")
    yield "one span twice", BadFile(two("[0,4]", "[0,4]", b"1234"), (*both, "overlaps"))
    yield "overlap", BadFile(two("[0,4]", "[2,6]", b"123456"), (*both, "overlaps"))
    yield "hole", BadFile(two("[0,4]", "[5,9]", b"123456789"), (*both, "hole"))
    yield "hole at the start", BadFile(raw_file(_entry(offsets="[1,2]"), b"xx"), ("tensor_a", "0"))
    one, empty = _entry()[1:-1], _entry('"U16"', "[0]", "[2,2]", '"z"')[1:-1]
    yield "an empty tensor elsewhere", BadFile(raw_file(f"{{{one},{empty}}}", b"xx"), ("'z'",))
    yield "bytes at the end", BadFile(raw_file(_entry(), b"xyz"), ("2 bytes follow",))
    yield "too few bytes for the shape", BadFile(raw_file(_entry(shape="[2]"), b"x"), ("tensor_a", "2 bytes"))
    yield (
        "too many bytes for the shape",
        BadFile(raw_file(_entry(shape="[1]", offsets="[0,2]"), b"xx"), ("tensor_a", "1 bytes")),
    )
    yield "half a byte", BadFile(raw_file(_entry('"F4"', "[1]"), b"x"), ("tensor_a", "4 bits"))
    yield "18 bits", BadFile(raw_file(_entry('"F6_E2M3"', "[3]", "[0,3]"), b"xxx"), ("tensor_a", "18 bits"))
    for shape in ("[9223372036854775808,2,0]", "[4294967296,4294967296]", "[2305843009213693952]"):
        data = raw_file(_entry('"F64"', shape, "[0,0]"))
        yield f"overflow {shape}", BadFile(data, ("tensor_a", "64 bits"))
    long = "[" + ",".join(["9223372036854775807"] * 50_000) + "]"
    yield "a very long shape", BadFile(raw_file(_entry(shape=long), b"x"), ("tensor_a", "64 bits"))


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write files into a new folder."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def index_json(weight_map: Mapping[str, object], total_size: object = None) -> bytes:
    """Write an index; ``total_size`` is left out when ``None``."""
    metadata = {} if total_size is None else {"metadata": {"total_size": total_size}}
    return json.dumps({**metadata, "weight_map": dict(weight_map)}).encode()
