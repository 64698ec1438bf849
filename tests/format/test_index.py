"""Folders: which files are chosen, which tensors come out, and what is refused."""

from collections.abc import Mapping

import pytest
from tests.support.memory_folder import Folder, weights
from tests.support.safetensors_files import LFS_POINTER, index_json

from loadstone.errors import FormatError, IndexFileError, LoadstoneError, LocationError, NotFoundError
from loadstone.loader.layout.index import Layout, choose_layout, join

INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GOOD = index_json({"a": ONE, "b": TWO}, 16)


SHARDS = {ONE: weights("a"), TWO: weights("b")}


def places(files: Mapping[str, bytes], variant: str | None = None) -> dict[str, str]:
    """Open a folder that must open without a warning; give each tensor's file."""
    infos, warnings = Folder(files).open(variant)
    assert warnings == []
    return {name: info.file for name, info in infos.items()}


# --- which files ---------------------------------------------------------------------------------------


def test_the_index_places_every_tensor() -> None:
    assert places({INDEX: GOOD, **SHARDS, "config.json": b"{}"}) == {"a": ONE, "b": TWO}


def test_only_the_index_is_read() -> None:
    folder = Folder({INDEX: GOOD, **SHARDS, "pytorch_model.bin": b"", "config.json": b"{}"})
    folder.layout()
    assert folder.read_names == [INDEX]


def test_a_single_file_needs_no_index() -> None:
    assert places({"model.safetensors": weights("a"), "pytorch_model.bin": b""}) == {"a": "model.safetensors"}


def test_shard_names_come_from_the_index_and_from_no_pattern() -> None:
    odd = {"x.st": weights("a"), "model-00002-of-000002.safetensors": weights("b")}
    index = index_json({"a": "x.st", "b": "model-00002-of-000002.safetensors"})
    assert places({INDEX: index, **odd})["a"] == "x.st"


def test_the_index_wins_over_a_stale_single_file() -> None:
    infos, warnings = Folder({INDEX: GOOD, **SHARDS, "model.safetensors": weights("old")}).open()
    assert set(infos) == {"a", "b"}
    assert len(warnings) == 1
    assert "'model.safetensors'" in warnings[0]


def test_files_beside_the_chosen_ones_are_left_alone_with_a_warning() -> None:
    stale = {"model-00003-of-00003.safetensors": weights("old"), "mtp.safetensors": weights("m")}
    infos, warnings = Folder({INDEX: GOOD, **SHARDS, **stale}).open()
    assert set(infos) == {"a", "b"}
    assert all(name in warnings[0] for name in stale)
    infos, warnings = Folder({"model.safetensors": weights("a"), **stale}).open()
    assert set(infos) == {"a"}
    assert all(name in warnings[0] for name in stale)


def test_shards_without_an_index_are_taken_together() -> None:
    assert places(SHARDS) == {"a": ONE, "b": TWO}


def test_shards_without_an_index_must_all_be_there() -> None:
    with pytest.raises(NotFoundError) as caught:
        Folder({"model-00002-of-00005.safetensors": weights("a")}).layout()
    assert all(f"model-0000{part}-of-00005" in str(caught.value) for part in (1, 3, 4, 5))
    assert "00002" not in str(caught.value)


def test_a_hostile_shard_count_is_no_work() -> None:
    with pytest.raises(NotFoundError) as caught:
        Folder({"model-1-of-99999.safetensors": weights("a")}).layout()
    assert len(str(caught.value)) < 10_000


@pytest.mark.parametrize("stem", ["diffusion_pytorch_model", "pytorch_model", "adapter_model", "llama"])
def test_other_libraries_names_open_too(stem: str) -> None:
    single = f"{stem}.safetensors"
    assert places({single: weights("a")}) == {"a": single}
    shards = {f"{stem}-00001-of-00001.safetensors": weights("a")}
    assert places(shards) == {"a": next(iter(shards))}
    index = index_json({"a": next(iter(shards))})
    assert places({f"{stem}.safetensors.index.json": index, **shards}) == {"a": next(iter(shards))}


def test_two_unknown_indexes_are_one_too_many() -> None:
    files = {"x.safetensors.index.json": GOOD, "y.safetensors.index.json": GOOD, **SHARDS}
    assert places({"x.safetensors.index.json": index_json({"a": ONE}), ONE: weights("a")}) == {"a": ONE}
    with pytest.raises(IndexFileError, match=r"'x\.safetensors\.index\.json', 'y\.safetensors"):
        Folder(files).layout()
    assert Folder({INDEX: GOOD, **files}).layout().index == INDEX


def test_consolidated_weights_are_a_second_copy() -> None:
    second = {
        "consolidated.safetensors": weights("old"),
        "consolidated.safetensors.index.json": index_json({"old": "consolidated.safetensors"}),
    }
    assert places({INDEX: GOOD, **SHARDS, **second}) == {"a": ONE, "b": TWO}
    assert places({"model.safetensors": weights("a"), **second}) == {"a": "model.safetensors"}
    assert places({"llama.safetensors": weights("a"), **second}) == {"a": "llama.safetensors"}
    assert places(second) == {"old": "consolidated.safetensors"}
    assert places({"consolidated.safetensors": weights("old")}) == {"old": "consolidated.safetensors"}


# --- variants ------------------------------------------------------------------------------------------


def test_variants_are_never_mixed() -> None:
    files = {"model.safetensors": weights("a"), "model.fp16.safetensors": weights("h")}
    assert places(files) == {"a": "model.safetensors"}
    assert places(files, "fp16") == {"h": "model.fp16.safetensors"}


@pytest.mark.parametrize("pattern", ["model.{v}-0000{n}-of-00002", "model-0000{n}-of-00002.{v}"])
@pytest.mark.parametrize(
    "index", ["model.safetensors.index.{v}.json", "model.{v}.safetensors.index.json", None]
)
def test_sharded_variants_in_both_spellings(pattern: str, index: str | None) -> None:
    first, second = (pattern.format(v="fp16", n=number) + ".safetensors" for number in (1, 2))
    files = {first: weights("a"), second: weights("b"), INDEX: GOOD, **SHARDS}
    if index is not None:
        files[index.format(v="fp16")] = index_json({"a": first, "b": second})
    assert places(files, "fp16") == {"a": first, "b": second}
    assert places(files) == {"a": ONE, "b": TWO}


def test_a_missing_variant_names_the_ones_there_are() -> None:
    files = {"model.fp16.safetensors": weights("a"), "model.int8-00001-of-00001.safetensors": weights("a")}
    for variant in (None, "bf16"):
        with pytest.raises(NotFoundError, match=r"fp16.*int8"):
            Folder(files).layout(variant)
    with pytest.raises(NotFoundError, match="None"):
        Folder({"model.safetensors": weights("a")}).layout("fp16")


@pytest.mark.parametrize("variant", ["", "../x", "a/b", "a.b", "fp16\0", "é"])
def test_a_variant_is_a_plain_word(variant: str) -> None:
    folder = Folder({"model.safetensors": weights("a")})
    with pytest.raises(LocationError, match="variant"):
        folder.layout(variant)
    assert folder.read_names == []


# --- stores that cannot list ---------------------------------------------------------------------------


def test_without_a_listing_the_index_is_tried_first() -> None:
    folder = Folder({INDEX: GOOD, **SHARDS})
    assert folder.layout(listed=False) == Layout((ONE, TWO), {"a": ONE, "b": TWO}, INDEX, (), 16)
    alone = Folder({"model.safetensors": weights("a")})
    assert alone.layout(listed=False) == Layout(("model.safetensors",))
    assert alone.read_names == [INDEX]
    assert alone.layout("fp16", listed=False) == Layout(("model.fp16.safetensors",))


# --- the index -----------------------------------------------------------------------------------------

OUTSIDE: list[object] = [
    *("/etc/hostname", "../secret.safetensors", "sub/../../secret.safetensors", "sub/x.safetensors", "./x"),
    *("http://127.0.0.1:9/x", "s3://other/x", "file:///etc/hostname", "//host/x", "x/", "~/x"),
    *("..", ".", "", " ", "a\0b", "x\n", "\ud800", "\u202ex", "x" * 256, "C:\\x", "..\\x", "\\\\host\\x"),
    *(None, 1, ["x"], {}),
]


@pytest.mark.parametrize("value", OUTSIDE, ids=lambda value: ascii(value)[:20])
@pytest.mark.parametrize("listed", [True, False])
def test_a_name_that_leaves_the_folder_is_refused_before_anything_is_touched(
    value: object, listed: bool
) -> None:
    folder = Folder({INDEX: index_json({"a": ONE, "b": value}), **SHARDS})
    with pytest.raises(IndexFileError, match="'b'") as caught:
        folder.layout(listed=listed)
    assert folder.read_names == [INDEX]
    assert "\n" not in str(caught.value)


def test_a_pickle_in_an_index_is_refused() -> None:
    folder = Folder({INDEX: index_json({"a": "pytorch_model.bin"}), "pytorch_model.bin": b""})
    with pytest.raises(IndexFileError, match="pickle"):
        folder.layout()


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (GOOD[:-9], "json"),
        (b"[]", "weight_map"),
        (b"{}", "weight_map"),
        (b'{"weight_map":{}}', "weight_map"),
        (b'{"weight_map":[]}', "weight_map"),
        (b"", "expected"),
        (b"null", "expected"),
        (b"\0" * 100, "expected"),
        (b"\xff\xfe{", "utf-8"),
        (LFS_POINTER, "lfs"),
        (b"<!DOCTYPE html><title>Sign in</title>", "html"),
        (b'{"weight_map":' * 5000, "127 levels"),
        (b'{"weight_map":{"a":NaN}}', "nan"),
        (b'{"weight_map":{"a":"x","b":"x","a":"y"}}', "duplicate name 'a'"),
        (b'{"weight_map":{"a":"x"},"weight_map":{"a":"y"}}', "duplicate"),
    ],
)
def test_an_unreadable_index_is_an_error_and_no_reason_to_guess(content: bytes, word: str) -> None:
    with pytest.raises(IndexFileError) as caught:
        Folder({INDEX: content, **SHARDS}).layout()
    assert word in str(caught.value).lower()
    assert "index" in str(caught.value)


def test_an_index_may_begin_with_a_byte_order_mark() -> None:
    assert Folder({INDEX: b"\xef\xbb\xbf" + GOOD, **SHARDS}).layout().files == (ONE, TWO)


def test_all_missing_shards_are_named_at_once_with_what_is_there_instead() -> None:
    names = [f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)]
    index = index_json({name: name for name in names})
    there = {names[0]: b"", names[1].upper(): b"", f"{names[2]}.incomplete": b""}
    with pytest.raises(NotFoundError) as caught:
        Folder({INDEX: index, **there}).layout()
    message = str(caught.value)
    assert all(name in message for name in (*names[1:], names[1].upper(), "case", "unfinished download"))
    assert names[0] not in message


def test_an_index_that_vanishes_is_an_error() -> None:
    with pytest.raises(IndexFileError, match="gone"):
        choose_layout([INDEX, ONE, TWO], lambda _: None, None, "folder")


@pytest.mark.parametrize("total", [None, "16", 16.0, True, {}, [16]])
def test_index_metadata_is_advisory(total: object) -> None:
    assert places({INDEX: index_json({"a": ONE, "b": TWO}, total), **SHARDS}) == {"a": ONE, "b": TWO}


def test_a_wrong_total_size_is_a_warning() -> None:
    infos, warnings = Folder({INDEX: index_json({"a": ONE, "b": TWO}, 17), **SHARDS}).open()
    assert set(infos) == {"a", "b"}
    assert len(warnings) == 1
    assert "17 bytes" in warnings[0]
    assert "16" in warnings[0]


# --- joining -------------------------------------------------------------------------------------------


def test_a_tensor_the_index_does_not_list_stays_out() -> None:
    infos, warnings = Folder({INDEX: GOOD, ONE: weights("a", "extra"), TWO: weights("b", "a")}).open()
    assert {name: info.file for name, info in infos.items()} == {"a": ONE, "b": TWO}
    assert len(warnings) == 2
    assert "'extra'" in warnings[0]
    assert "'a'" in warnings[1]


def test_a_tensor_that_is_not_where_the_index_says_is_an_error() -> None:
    with pytest.raises(IndexFileError) as caught:
        Folder({INDEX: index_json({"a": TWO, "b": TWO, "c": ONE}), **SHARDS}).open()
    message = str(caught.value)
    assert all(word in message for word in ("'a'", "'c'", ONE, TWO, f"'a' is in '{ONE}' instead"))


def test_a_name_in_two_files_without_an_index_is_refused() -> None:
    with pytest.raises(IndexFileError, match=r"'w' is in 'a\.safetensors' and in 'b\.safetensors'"):
        Folder({"a.safetensors": weights("w"), "b.safetensors": weights("v", "w")}).open()


def test_tensors_come_file_by_file_in_the_order_of_their_bytes() -> None:
    index = index_json({"z": TWO, "c": ONE, "b": TWO, "a": ONE})
    infos, _ = Folder({INDEX: index, ONE: weights("c", "a"), TWO: weights("z", "b")}).open()
    assert list(infos) == ["c", "a", "z", "b"]
    assert infos["b"].offset > infos["z"].offset


def test_the_joined_table_is_a_mapping() -> None:
    layout = Folder(SHARDS).layout()
    infos, _ = join(layout, Folder(SHARDS).headers(layout), "folder")
    assert len(infos) == 2
    assert "a" in infos
    assert "c" not in infos
    assert infos.keys() == {"a", "b"}
    with pytest.raises(KeyError):
        infos["c"]


# --- other formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["pytorch_model.bin", "config.json"], ("pickle", ".bin", "convert")),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], ("pickle", "convert")),
        (["consolidated.00.pth"], ("pickle", ".pth")),
        (["__0_0.distcp", "__1_0.distcp", ".metadata"], ("dcp", "distributed", "convert")),
        (["llama.Q4_0.gguf"], ("gguf", "llama.Q4_0.gguf")),
        (["flax_model.msgpack"], ("flax", "convert")),
        (["tf_model.h5"], ("hdf5", "convert")),
    ],
)
def test_other_formats_are_refused_by_name_and_never_read(names: list[str], words: tuple[str, ...]) -> None:
    folder = Folder(dict.fromkeys(names, b""))
    with pytest.raises(FormatError) as caught:
        folder.layout()
    assert [word for word in words if word.lower() not in str(caught.value).lower()] == []
    assert folder.read_names == []


@pytest.mark.parametrize(
    ("names", "word"),
    [
        ([], "nothing"),
        (["README.md"], "README.md"),
        (["model_index.json"], "diffusers"),
        ([f"{number}.txt" for number in range(99)], "91 more"),
    ],
)
def test_a_folder_without_weights_says_what_it_holds(names: list[str], word: str) -> None:
    with pytest.raises(NotFoundError, match=word):
        Folder(dict.fromkeys(names, b"")).layout()


@pytest.mark.parametrize("names", [["model.safetensors"], [INDEX]])
def test_every_error_is_one_of_ours(names: list[str]) -> None:
    with pytest.raises(LoadstoneError):
        Folder(dict.fromkeys(names, b"")).open()


def test_shards_of_two_generations_are_not_one_model() -> None:
    files = {f"model-0000{part}-of-0000{count}.safetensors": weights(f"{part}{count}")
             for part, count in ((1, 1), (1, 2), (2, 2))}  # fmt: skip
    with pytest.raises(IndexFileError, match=r"2 sets, 'model-…-of-00001', 'model-…-of-00002'"):
        Folder(files).open()
    index = index_json({"11": "model-00001-of-00001.safetensors"})
    infos, said = Folder({**files, "model.safetensors.index.json": index}).open()
    assert list(infos) == ["11"]
    assert "left alone" in said[0]


def test_hidden_files_are_no_weights() -> None:
    infos, said = Folder({"a.safetensors": weights("a"), "._a.safetensors": b"Mac OS X"}).open()
    assert list(infos) == ["a"]
    assert said == []


def test_an_empty_index_is_called_that() -> None:
    with pytest.raises(IndexFileError, match="an empty file"):
        Folder({"a.safetensors": weights("a"), "model.safetensors.index.json": b""}).open()
