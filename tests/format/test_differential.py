"""The same verdict as the reference on thousands of random headers, valid and mutated.

Where the verdicts may differ is listed here, and nowhere else: the reference opens the file and this project
refuses it, since the format's text rules it out and readers disagree about what it means.
"""

import json
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.reference import Content, reference_content
from tests.support.safetensors_files import BITS, entries, random_tensors, raw_file

from loadstone.errors import HeaderError, TruncatedError
from loadstone.loader.format.header import parse_header

SEEDS = 40
FILES_A_SEED = 100
MUTATIONS_A_FILE = 4

Verdict = Callable[[str], bool]


def _repeats_a_key(text: str) -> bool:
    found: list[bool] = []

    def look(pairs: list[tuple[str, object]]) -> dict[str, object]:
        document = dict(pairs)
        found.append(len(document) < len(pairs))
        return document

    json.loads(text, object_pairs_hook=look)
    return any(found)


def _has_list_entry(text: str) -> bool:
    return any(isinstance(entry, list) for entry in json.loads(text).values())


def _has_object_dtype(text: str) -> bool:
    return any(
        isinstance(entry, dict) and isinstance(entry.get("dtype"), dict)
        for entry in json.loads(text).values()
    )


EXCEPTIONS: dict[str, Verdict] = {
    "a key comes twice": _repeats_a_key,
    "the header begins with white space": lambda text: text[:1] in " \t\r\n",
    "an entry is a list of values": _has_list_entry,
    "a dtype is an object": _has_object_dtype,
}
"""What the reference reads and this project refuses, and how to tell that a header has it."""


def our_content(data: bytes) -> Content | None:
    try:
        header = parse_header(data, len(data), "f", "f")
    except (HeaderError, TruncatedError):
        return None
    return {
        name: (info.dtype, info.shape, data[info.offset : info.offset + info.nbytes])
        for name, info in header.tensors.items()
    }


def agree(data: bytes) -> bool:
    """Compare both verdicts on one file; ``True`` when the file opens."""
    ours, theirs = our_content(data), reference_content(data)
    if ours != theirs:
        assert ours is None, f"only this project opens {data!r}"
        text = data[8 : 8 + int.from_bytes(data[:8], "little")].decode()
        assert any(applies(text) for applies in EXCEPTIONS.values()), f"only the reference opens {data!r}"
    return ours is not None


def write(rng: Random, document: dict[str, object]) -> str:
    """Write a header in one of the many ways that JSON allows."""
    separators = rng.choice(((",", ":"), (", ", ": "), (" ,\n", "\t:\r ")))
    text = json.dumps(document, separators=separators, ensure_ascii=rng.random() < 0.5)
    return text + " " * rng.randrange(9)


def random_document(rng: Random) -> tuple[dict[str, object], bytes]:
    tensors = random_tensors(rng)
    document = entries(tensors)
    if rng.random() < 0.3:
        names = rng.sample(list(document), len(document))
        document = {name: document[name] for name in names}
    if rng.random() < 0.5:
        document["__metadata__"] = rng.choice([None, {}, {"format": "pt"}, {"é": "\n", "k": '"'}])
    if document and rng.random() < 0.2:
        entry = document[rng.choice(list(document))]
        if isinstance(entry, dict) and "dtype" in entry:
            entry[rng.choice(["note", "x", "é"])] = rng.choice([None, 1.5, [[]], {"k": True}, "text", 2**70])
    return document, b"".join(item.data for item in tensors)


TOKENS = (
    *("NaN", "-0", "0", "1", "-1", "1.0", "1e0", "1E400", "18446744073709551615", "18446744073709551616"),
    *("true", "false", "null", '"1"', '""', "[]", "{}", "[0]", "[0,0]", "{}}", "[[", '"U8"', '"F4"', '"I64"'),
    *(
        '"dtype":"U8",',
        '"shape":[],',
        '"k":1,',
        '"__metadata__":{},',
        '"w":[],',
        "\\u0041",
        "\\ud800",
        "\\",
        '"',
    ),
)


def mutate(rng: Random, header: bytes) -> bytes:
    """Change a header a little, mostly so that it stays nearly right."""
    kind = rng.randrange(8)
    at = rng.randrange(len(header) + 1)
    stop = min(len(header), at + rng.choice((1, 1, 2, 5, 20)))
    if kind == 0:
        return header[:at] + bytes([rng.choice(b'{}[]",:0123456789 -.eE\\u\n\t\0\xff')]) + header[at:]
    if kind == 1:
        return header[:at] + header[stop:]
    if kind == 2:
        return header[:stop] + header[at:stop] + header[stop:]
    if kind == 3:
        return header[:at] + rng.choice(TOKENS).encode() + header[at:]
    if kind == 4:
        return header[:at] + rng.choice(TOKENS).encode() + header[stop:]
    if kind == 5:
        return header[:at] + rng.choice((b" ", b"\n", b"\t \r", b"\x0b", b"\xc2\xa0")) + header[at:]
    digits = [place for place, letter in enumerate(header) if letter in b"0123456789"]
    if kind == 6 and digits:
        at = rng.choice(digits)
        return header[:at] + str(rng.randrange(10)).encode() + header[at + 1 :]
    return header.replace(
        *rng.choice(((b"U8", b"I8"), (b"F32", b"F64"), (b"[", b"[0,"), (b'"', b"'"), (b"}", b"}}")))
    )


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_files_and_their_mutations_get_the_reference_verdict(seed: int) -> None:
    rng = Random(seed)
    opened = 0
    for _ in range(FILES_A_SEED):
        document, body = random_document(rng)
        header = write(rng, document).encode()
        assert agree(raw_file(header, body)), "a valid header must open"
        for _ in range(MUTATIONS_A_FILE):
            mutated = header
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                mutated = mutate(rng, mutated)
            opened += agree(raw_file(mutated, body))
    assert opened > 10, "mutations that are still valid must be among them, or nothing was compared"


@pytest.mark.parametrize("seed", range(4))
def test_cut_and_lengthened_files_get_the_reference_verdict(seed: int) -> None:
    rng = Random(seed)
    for _ in range(60):
        document, body = random_document(rng)
        data = raw_file(write(rng, document), body)
        for _ in range(10):
            agree(data[: rng.randrange(len(data))])
        agree(data + bytes(rng.randrange(1, 9)))
        agree(
            (int.from_bytes(data[:8], "little") + rng.randint(-3, 3)).to_bytes(8, "little", signed=True)
            + data[8:]
        )


sizes = st.one_of(
    st.integers(-1, 9), st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1, 2**64, 1.0, True, None, "1", -0.0])
)
anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
an_entry = st.one_of(
    anything,
    st.fixed_dictionaries(
        {
            "dtype": st.one_of(st.sampled_from([*BITS, "f32", "", "C128"]), anything),
            "shape": st.one_of(st.lists(sizes, max_size=4), anything),
            "data_offsets": st.one_of(st.lists(sizes, min_size=1, max_size=3), anything),
        },
        optional={"note": anything},
    ),
)
good_entry = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F4", "F32"]),
        "shape": st.lists(st.integers(0, 3), max_size=3),
        "data_offsets": st.lists(st.integers(0, 6), min_size=2, max_size=2),
    },
    optional={"note": anything},
)
names = st.one_of(
    st.sampled_from(["w", "v", "__metadata__", "dtype", "shape", "data_offsets"]), st.text(max_size=4)
)


@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    document=st.one_of(
        anything, st.dictionaries(names, an_entry, max_size=3), st.dictionaries(names, good_entry, max_size=3)
    ),
    length=st.integers(0, 8),
)
def test_documents_of_any_shape_get_the_reference_verdict(document: object, length: int) -> None:
    agree(raw_file(json.dumps(document), bytes(length)))


@settings(max_examples=800, deadline=None)
@given(header=st.binary(max_size=40), data=st.binary(max_size=8), brace=st.booleans())
def test_bytes_of_any_kind_get_the_reference_verdict(header: bytes, data: bytes, brace: bool) -> None:
    agree(raw_file(b"{" + header if brace else header, data))


def test_every_exception_is_a_file_that_only_the_reference_opens() -> None:
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    examples = {
        "a key comes twice": f'{{"w":{entry},"w":{entry}}}',
        "the header begins with white space": f' {{"w":{entry}}}',
        "an entry is a list of values": '{"w":["U8",[1],[0,1]]}',
        "a dtype is an object": '{"w":{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}}',
    }
    assert examples.keys() == EXCEPTIONS.keys()
    for name, text in examples.items():
        data = raw_file(text, b"x")
        assert our_content(data) is None
        assert reference_content(data) == {"w": ("U8", (1,), b"x")}
        assert EXCEPTIONS[name](text)
