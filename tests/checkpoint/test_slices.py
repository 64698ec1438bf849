"""Slices equal torch's own indexing, and bring the bytes that the rule says."""

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tests.support.checkpoints import BITS, minilm, write_file

import loadstone
from loadstone.errors import LoadstoneError, SliceError
from loadstone.loader.ranges import ByteRange
from loadstone.loader.tensors import slices
from loadstone.loader.tensors.slices import plan

BLOCK = 64 * 1024


@st.composite
def shapes_and_indices(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    items: list[Any] = []
    for length in shape[: draw(st.integers(0, len(shape)))]:
        bound = st.none() | st.integers(-length - 2, length + 2)
        piece = st.builds(slice, bound, bound, st.none() | st.integers(1, 3))
        items.append(draw(piece | st.integers(-length, length - 1) if length else piece))
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), Ellipsis)
    for _ in range(draw(st.integers(0, 2))):
        items.insert(draw(st.integers(0, len(items))), None)
    return shape, tuple(items)


@settings(max_examples=400, deadline=None)
@given(case=shapes_and_indices(), gap=st.sampled_from([0, 8, 40, slices.GAP]))
def test_plan_holds_what_is_needed_and_no_longer_gap(
    case: tuple[tuple[int, ...], tuple[Any, ...]], gap: int
) -> None:
    shape, index = case
    whole = torch.arange(math.prod(shape)).view(shape)
    try:
        needed = whole[index].reshape(-1).tolist()
    except IndexError:  # an ellipsis put an index on another dimension
        return
    got = plan(shape, 8, index, gap)
    held = [number for part in got.ranges for number in range(part.start // 8, part.stop // 8)]
    assert set(needed) <= set(held)
    assert gap or held == sorted(needed)
    assert all(
        later.start - earlier.stop > gap for earlier, later in zip(got.ranges, got.ranges[1:], strict=False)
    )
    assert got.exact == (bool(needed) and needed == list(range(needed[0], needed[0] + len(needed))))


@pytest.mark.parametrize(
    ("index", "ranges"),
    [
        (slice(10, 20), [(10 * 8192, 20 * 8192)]),
        (5, [(5 * 8192, 6 * 8192)]),
        ((5, slice(100, 200)), [(5 * 8192 + 200, 5 * 8192 + 400)]),
        (slice(0, 32, 16), [(0, 8192), (16 * 8192, 17 * 8192)]),  # gaps of 120 KiB are left out
        (slice(0, 32, 8), [(0, 25 * 8192)]),  # gaps of 56 KiB are joined
        ((slice(None), 0), [(0, 999 * 8192 + 2)]),  # a column: its gaps are shorter than a block
        ([1, 2], [(0, 1000 * 8192)]),  # not basic indexing: all of it
        (slice(20, 10), []),
        (slice(-1, None), [(999 * 8192, 1000 * 8192)]),
    ],
)
def test_the_rule(index: object, ranges: list[tuple[int, int]]) -> None:
    assert list(plan((1000, 4096), 2, index).ranges) == [ByteRange(*pair) for pair in ranges]


def test_joining_a_gap_never_adds_a_block() -> None:
    for step in range(1, 40):
        index = (slice(3, None, step), slice(1, 3000, 1500))
        apart = plan((200, 4096), 2, index, 0).ranges
        joined = plan((200, 4096), 2, index).ranges
        blocks = [
            {b for part in some for b in range(part.start // BLOCK, (part.stop - 1) // BLOCK + 1)}
            for some in (apart, joined)
        ]
        assert blocks[0] == blocks[1]


INDICES: list[object] = [
    0, -1, slice(None), ..., slice(0, 2), slice(None, None, 2), (0, 1), (0, 1, 2), (..., 0), (..., ...), None,
    (slice(None), ..., 2), (None, 0), (0, None, slice(1, 3)), True, [0, 1], (slice(None), [0, 1]), (),
    slice(3, 1), np.int64(1), slice(-2, None), slice(0, 9),
    (slice(None), slice(1, 5, 3), slice(None, None, 2)),
    torch.tensor([0, 3]), torch.tensor(1), np.array([1, 2]), (-1, -1, -1), slice(-100, -50), (slice(1, 3), 0),
    (..., slice(2, 5)), torch.tensor([True, False, True, False]), slice(np.int64(1), np.int64(3)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", sorted(set(BITS) - {"F6_E2M3", "F6_E3M2", "F4"}))
@pytest.mark.parametrize("pad", [0, 1])
def test_equal_to_safetensors_for_every_index(tmp_path: Path, dtype: str, pad: int) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"w": (dtype, (4, 5, 6))}, pad=pad)
    with loadstone.open(path) as ckpt, safe_open(path, "pt") as reference, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of lists as indices
        part, other = ckpt.slice("w"), reference.get_slice("w")
        assert part.get_shape() == other.get_shape()
        assert part.get_dtype() == other.get_dtype() == dtype
        for index in INDICES:
            mine = part[index]
            width = mine.element_size()
            whole = reference.get_tensor("w").view(torch.uint8).view(4, 5, 6, width)
            theirs = whole[_with_all_bytes(index)]
            assert mine.dtype == reference.get_tensor("w").dtype
            assert mine.shape == theirs.shape[:-1]
            assert mine.is_contiguous()
            assert torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1))
            assert mine.untyped_storage().nbytes() == mine.nbytes


def _with_all_bytes(index: object) -> tuple[object, ...]:
    items = index if isinstance(index, tuple) else (index,)
    return (*items, slice(None)) if any(item is ... for item in items) else (*items, ...)


@pytest.mark.parametrize(
    "index",
    [
        4,
        -5,
        (0, 1, 2, 3),
        slice(None, None, -1),
        slice(0, 2, 0),
        "a",
        1.0,
        (0, 9),
        (..., -7),
        torch.tensor([9]),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, index: object) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"w": ("F32", (4, 5, 6)), "s": ("F32", ())})
    with loadstone.open(path) as ckpt:
        with pytest.raises(SliceError, match=r"does not fit 'w' of shape \[4, 5, 6\]"):
            ckpt.slice("w")[index]
        with pytest.raises(IndexError):
            ckpt.slice("s")[0]
        assert ckpt.slice("s")[...].shape == ()


def masks() -> list[object]:
    plain: list[object] = [
        [True, False, True],
        np.array([True, False, True]),
        torch.tensor([True, False, True]),
    ]
    return [
        *plain,
        *[(slice(1, None), ..., [True, False, True, True])],
        *[(None, mask) for mask in plain],
        *[[False] * 3, np.array([2, 0]), np.int64(1), torch.ones(3, 2, 4, dtype=torch.bool)],
    ]


@pytest.mark.parametrize("pad", [0, 1])
@pytest.mark.parametrize("number", range(len(masks())))
def test_masks_in_any_form(tmp_path: Path, number: int, pad: int) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"w": ("I32", (3, 2, 4))}, pad=pad)
    with loadstone.open(path) as ckpt:
        index: Any = masks()[number]
        assert torch.equal(ckpt.slice("w")[index], ckpt["w"][index])
        for wrong in ([True], [[True, False], [True]], np.array(["a"]), [True, False, True, True]):
            with pytest.raises(SliceError):
                ckpt.slice("w")[wrong]


@pytest.mark.parametrize("copy", [False, True])
def test_a_default_device_changes_nothing(tmp_path: Path, copy: bool) -> None:
    path = tmp_path / "x.safetensors"
    write_file(
        path, {"w": ("F32", (3, 2)), "empty": ("F32", (0, 2)), "odd": ("U8", (1,)), "u": ("I16", (2,))}
    )
    with torch.device("meta"), loadstone.open(path, copy=copy) as ckpt:
        tensors = [*ckpt.values(), *map(ckpt.raw, ckpt), *(ckpt.slice(name)[:0] for name in ckpt)]
        tensors += [ckpt.slice("w")[1:], ckpt.slice("w")[:, 0], ckpt.slice("w")[[True, False, True]]]
        tensors += [ckpt.slice("empty")[:, 1], *dict(ckpt.stream()).values(), *map(ckpt.view, ckpt)]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_packed_f4_is_indexed_as_torch_has_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"w": ("F4", (6, 8))})
    with loadstone.open(path) as ckpt:
        whole = ckpt["w"].view(torch.uint8)
        for index in (0, slice(1, 3), (slice(None), slice(0, 2)), (..., 1)):
            part = ckpt.slice("w")[index]
            assert part.dtype == torch.float4_e2m1fn_x2
            assert torch.equal(part.view(torch.uint8), whole[index])


def test_rows_are_views_and_the_rest_is_compact() -> None:
    with loadstone.open(minilm()) as ckpt:
        name = "embeddings.word_embeddings.weight"
        whole = ckpt[name]
        rows, columns = ckpt.slice(name)[10:20], ckpt.slice(name)[:, 3:5]
        assert rows.data_ptr() == whole[10:20].data_ptr()
        assert rows.untyped_storage().nbytes() == rows.nbytes
        assert torch.equal(rows, whole[10:20])
        assert torch.equal(columns, whole[:, 3:5])
        assert columns.untyped_storage().nbytes() == columns.nbytes
        with pytest.raises(LoadstoneError):
            ckpt.slice("nope")


def test_numbers_in_a_list_do_not_make_elements_of_nothing(tmp_path: Path) -> None:
    write_file(tmp_path / "x.safetensors", {"w": ("F32", (0,)), "v": ("F32", (2, 0))})
    with loadstone.open(tmp_path / "x.safetensors") as ckpt:
        for index in ([0], [0, -1], torch.tensor([0])):
            with pytest.raises(SliceError):
                ckpt.slice("w")[index]
        assert ckpt.slice("w")[[]].shape == (0,)
        assert ckpt.slice("v")[[1, 0, 1]].shape == (3, 0)
