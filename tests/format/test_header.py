"""Single files: what opens, with which tensors, and what is refused, with which words."""

import json
import struct
import tracemalloc
from pathlib import Path
from random import Random

import pytest
from tests.support.reference import reference_content
from tests.support.safetensors_files import (
    ODD_NAMES,
    BadFile,
    bad_files,
    entries,
    good_files,
    random_tensors,
    raw_file,
    tensor,
    tensors_file,
)

from loadstone.errors import FormatError, HeaderError, LoadstoneError, TruncatedError
from loadstone.loader.format.dtypes import BITS
from loadstone.loader.format.header import HEADER_LIMIT, Header, TensorInfo, header_length, parse_header
from loadstone.loader.ranges import ByteRange

# The reference reads these files, the format's text and this project do not.
STRICTER = (
    "beginning with ' '",
    "beginning with '\\n'",
    "duplicate name",
    "duplicate escaped name",
    "duplicate ignored field",
    "duplicate key in an ignored field",
    "duplicate metadata key",
    'entry ["U8",[1],[0,1]]',
    'dtype {"U8":null}',
)


def read(data: bytes, file: str = "m.safetensors") -> Header:
    return parse_header(data, len(data), file, file)


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in good_files()])
def test_good_files_open_with_the_reference_content(data: bytes) -> None:
    header = read(data)
    found = {
        name: (info.dtype, info.shape, data[info.offset : info.offset + info.nbytes])
        for name, info in header.tensors.items()
    }
    assert found == reference_content(data)


@pytest.mark.parametrize("bad", [pytest.param(bad, id=name) for name, bad in bad_files()])
def test_bad_files_are_refused_in_one_line_that_says_why(bad: BadFile) -> None:
    with pytest.raises(FormatError) as caught:
        read(bad.data)
    message = str(caught.value)
    assert isinstance(caught.value, HeaderError | TruncatedError)
    assert message.startswith("m.safetensors: ")
    assert "\n" not in message
    assert len(message) < 1000
    assert [word for word in bad.mentions if word.lower() not in message.lower()] == []


@pytest.mark.parametrize("name", [name for name, _ in bad_files()])
def test_the_reference_refuses_them_too_but_for_the_documented_exceptions(name: str) -> None:
    assert (reference_content(dict(bad_files())[name].data) is not None) == (name in STRICTER)


def test_an_unknown_entry_is_refused_wherever_it_stands() -> None:
    rng = Random(5)
    tensors = [tensor(rng, f"t{number}", "F32", (2,)) for number in range(50)]
    for position in range(0, 50, 7):
        document = entries(tensors)
        document[f"t{position}"] = {
            "dtype": "F32",
            "shape": [2],
            "data_offsets": [8 * position, 8 * position + 9],
        }
        with pytest.raises(HeaderError, match=f"'t{position}'"):
            read(raw_file(json.dumps(document), bytes(400)))


def test_dtypes_are_those_of_the_format() -> None:
    for dtype, bits in BITS.items():
        text = f'{{"w":{{"dtype":"{dtype}","shape":[8],"data_offsets":[0,{bits}]}}}}'
        assert reference_content(raw_file(text, bytes(bits))) == {"w": (dtype, (8,), bytes(bits))}
        assert read(raw_file(text, bytes(bits))).tensors["w"].nbytes == bits


def test_a_header_gives_names_metadata_and_places() -> None:
    rng = Random(2)
    a, b = tensor(rng, "a", "F32", (4, 3)), tensor(rng, "b", "F16", (5,))
    data = tensors_file([a, b], {"format": "pt", "ключ": "значение"})
    header = read(data, "model.safetensors")
    assert header.metadata == {"format": "pt", "ключ": "значение"}
    assert header.data_start == 8 + struct.unpack("<Q", data[:8])[0]
    assert header.file_size == len(data)
    assert list(header.tensors) == ["a", "b"]
    info = header.tensors["b"]
    assert info == TensorInfo("b", "F16", (5,), "model.safetensors", header.data_start + 48, 10)
    assert info.range == ByteRange(header.data_start + 48, len(data))
    assert "c" not in header.tensors
    with pytest.raises(KeyError):
        header.tensors["c"]


def test_tensors_come_in_the_order_of_their_bytes() -> None:
    rng = Random(3)
    tensors = [tensor(rng, name, "U8", (3,)) for name in ("z", "a", "m")]
    document = entries(tensors)
    shuffled = {name: document[name] for name in ("a", "m", "z")}
    assert list(read(raw_file(json.dumps(shuffled), bytes(9))).tensors) == ["z", "a", "m"]


def test_odd_names_stay_distinct() -> None:
    rng = Random(4)
    header = read(tensors_file([tensor(rng, name, "U8", (1,)) for name in ODD_NAMES]))
    assert list(header.tensors) == list(ODD_NAMES)


def test_an_ignored_field_changes_nothing() -> None:
    # One unusual entry sends the whole header down the careful path; it must give the very same answer.
    rng = Random(6)
    for _ in range(200):
        tensors = random_tensors(rng)
        data = b"".join(item.data for item in tensors)
        document = entries(tensors)
        plain = read(raw_file(json.dumps(document), data))
        for entry in document.values():
            assert isinstance(entry, dict)
            entry["note"] = {"any": [1, 2.5, "thing"]}
        noted = read(raw_file(json.dumps(document), data))
        shift = noted.data_start - plain.data_start
        assert list(noted.tensors) == list(plain.tensors)
        for name, info in noted.tensors.items():
            other = plain.tensors[name]
            assert (info.dtype, info.shape, info.offset, info.nbytes) == (
                other.dtype, other.shape, other.offset + shift, other.nbytes,
            )  # fmt: skip


def test_the_length_needs_eight_bytes_only() -> None:
    data = tensors_file([tensor(Random(7), "a", "F32", (4,))])
    length = struct.unpack("<Q", data[:8])[0]
    assert header_length(data[:8], len(data), "m") == length
    assert header_length(data, len(data), "m") == length
    assert parse_header(memoryview(data)[: 8 + length], len(data), "m", "m").tensors["a"].nbytes == 16
    with pytest.raises(TruncatedError, match="were read"):
        parse_header(data[: 7 + length], len(data), "m", "m")


def test_a_length_allocates_nothing() -> None:
    lies = [raw_file(b"{}", length=length) for length in (HEADER_LIMIT, HEADER_LIMIT + 1, 2**63, 2**64 - 1)]
    tracemalloc.start()
    try:
        for data in lies:
            with pytest.raises(LoadstoneError):
                header_length(data, len(data), "m")
            with pytest.raises(LoadstoneError):
                read(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000


def test_a_message_is_one_bounded_line_whatever_the_name() -> None:
    for name in ("x" * 100_000, "a\nb\x1b[31m", "\u2028", "\\ud800", "🧪" * 1000):
        text = f'{{"{json.dumps(name)[1:-1]}":{{"dtype":"F7","shape":[],"data_offsets":[0,0]}}}}'
        with pytest.raises(HeaderError) as caught:
            read(raw_file(text))
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 1500


def test_names_are_never_touched_as_paths(tmp_path: Path) -> None:
    data = tensors_file([tensor(Random(8), str(tmp_path / "made"), "U8", (1,))])
    read(data)
    assert list(tmp_path.iterdir()) == []
