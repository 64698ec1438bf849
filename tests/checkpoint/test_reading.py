"""Every tensor equals what safetensors gives, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.support.checkpoints import BITS, data_for, minilm, model_tensors, write_file, write_sharded

import loadstone
from loadstone.errors import (
    ClosedError,
    LocationError,
    NotFoundError,
    TensorNotFoundError,
    UnsupportedDtypeError,
)

TORCH = sorted(set(BITS) - {"F6_E2M3", "F6_E3M2"})


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare dtype, shape and bits (NaN equals itself)."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.numel():
        return True
    return torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("shape", [(4, 8), (8,), (0, 8), (3, 0), (1, 1, 2)])
@pytest.mark.parametrize("pad", [0, 1, 2, 4])
def test_every_dtype_and_alignment(tmp_path: Path, dtype: str, shape: tuple[int, ...], pad: int) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"odd": ("U8", (3,)), "w": (dtype, shape)}, pad=pad)
    if (dtype, shape) == ("F4", (3, 0)):
        shape = (3, 2)
    with loadstone.open(path) as ckpt, safe_open(path, "pt") as reference:
        tensor = ckpt["w"]
        assert same(tensor, reference.get_tensor("w"))
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % max(tensor.element_size(), 1) == 0
        assert same(ckpt.copy("w"), tensor)
        assert same(ckpt.view("w"), tensor)
        assert (
            bytes(ckpt.raw("w").tolist())
            == path.read_bytes()[-ckpt.info("w").nbytes or path.stat().st_size :]
        )
        aligned = ckpt.info("w").offset % tensor.element_size() == 0 or not tensor.numel()
        assert ckpt.stats.copied_tensors == (0 if aligned else 1)
        assert ckpt.stats.copied_bytes == (0 if aligned else tensor.nbytes)


@pytest.mark.parametrize("dtype", [one for one in TORCH if one != "F4"])
def test_scalars(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"w": (dtype, ())})
    with loadstone.open(path) as ckpt, safe_open(path, "pt") as reference:
        assert same(ckpt["w"], reference.get_tensor("w"))


@pytest.mark.parametrize(("dtype", "shape"), [("F6_E2M3", (2, 8)), ("F6_E3M2", (4,)), ("F4", (2, 3))])
def test_what_torch_lacks_is_available_raw(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"w": (dtype, shape)})
    with loadstone.open(path) as ckpt:
        for read in (ckpt.__getitem__, ckpt.copy, ckpt.view, lambda name: ckpt.slice(name)[0]):
            with pytest.raises(UnsupportedDtypeError, match=r"raw\(name\) gives its bytes"):
                read("w")
        assert bytes(ckpt.raw("w").tolist()) == data_for(dtype, shape)
        assert ckpt.raw("w").dtype == torch.uint8
        assert ckpt.info("w").shape == shape


def test_third_party_checkpoint_equals_safetensors() -> None:
    path = minilm() / "model.safetensors"
    with loadstone.open(minilm()) as ckpt, safe_open(path, "pt") as reference:
        assert sorted(ckpt) == reference.keys()
        assert ckpt.file_order() == reference.offset_keys()
        assert dict(ckpt.metadata) == reference.metadata()
        for name, tensor in ckpt.get(list(ckpt)).items():
            assert same(tensor, reference.get_tensor(name))
        config = ckpt.config()
        assert config is not None
        assert config["model_type"] == "bert"
        assert ckpt.read_file("vocab.txt") == (minilm() / "vocab.txt").read_bytes()


def test_sharded_folder(tmp_path: Path) -> None:
    tensors = model_tensors()
    folder = write_sharded(tmp_path / "m", tensors, shards=3)
    for location in (folder, folder / "model.safetensors.index.json", f"file://{folder}"):
        with loadstone.open(location) as ckpt:
            assert set(ckpt) == set(tensors)
            assert len(ckpt) == len(tensors)
            assert len(ckpt.files) == 3
            assert ckpt.nbytes == sum(tensor.nbytes for tensor in tensors.values())
            assert all(same(ckpt[name], tensor) for name, tensor in tensors.items())
            assert all(same(tensor, tensors[name]) for name, tensor in ckpt.items())


def test_views_are_private_writable_shared_and_outlive_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"a": ("F32", (4,)), "b": ("F32", (4,))})
    before = path.read_bytes()
    ckpt = loadstone.open(path)
    one, other, copy = ckpt["a"], ckpt["a"], ckpt.copy("a")
    one.fill_(7)
    assert other.tolist() == [7.0] * 4
    assert not torch.equal(copy, one)
    assert path.read_bytes() == before
    assert one.untyped_storage().nbytes() == one.nbytes
    ckpt.close()
    assert other.tolist() == [7.0] * 4
    with pytest.raises(ClosedError, match="open it again"):
        ckpt["a"]
    with pytest.raises(ClosedError):
        ckpt.view("a")
    with pytest.raises(ClosedError):
        ckpt.prefetch_names(["a"])
    with pytest.raises(ClosedError):
        ckpt.prefetch()


def test_copies_on_request(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"a": ("F32", (4,)), "b": ("F32", (4,))})
    with loadstone.open(path, copy=True) as ckpt:
        first, second = ckpt["a"], ckpt["a"]
        assert same(first, second)
        assert first.data_ptr() != second.data_ptr()
        assert ckpt.raw("a").data_ptr() != ckpt.raw("a").data_ptr()
        assert same(ckpt.slice("a")[1:3], first[1:3])
        assert same(ckpt.slice("a")[::2], first[::2])
    with loadstone.open(path) as ckpt:
        copies = ckpt.get(["a", "b"], copy=True)
        assert copies["a"].data_ptr() != ckpt["a"].data_ptr()
        assert same(copies["b"], ckpt["b"])


def test_mapping_manners(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"some.weight": ("F32", (4,))}, metadata={"format": "pt"})
    with loadstone.open(path) as ckpt, loadstone.open(path) as other:
        again = ckpt
        assert ckpt == again
        assert "some.weight" in ckpt
        assert "x" not in ckpt
        assert 3 not in ckpt  # type: ignore[comparison-overlap]  # as a caller without types may ask
        assert ckpt.get("x") is None
        assert ckpt.get("x", 5) == 5
        assert isinstance(ckpt.get("some.weight", copy=True), torch.Tensor)
        assert ckpt != other
        assert hash(ckpt) == hash(ckpt)
        assert dict(ckpt.metadata) == {"format": "pt"}
        assert "1 tensors" in repr(ckpt)
        assert ckpt.fingerprint() == other.fingerprint()
        with pytest.raises(TensorNotFoundError, match=r"did you mean 'some\.weight'"):
            ckpt["some.weigth"]
        with pytest.raises(KeyError):
            ckpt.get(["x"])


def test_tied_head_gives_the_embedding(tmp_path: Path) -> None:
    tensors = model_tensors()
    del tensors["lm_head.weight"]
    folder = write_sharded(tmp_path / "m", tensors)
    (folder / "config.json").write_text('{"tie_word_embeddings": true, "model_type": "llama"}')
    with loadstone.open(folder) as ckpt:
        assert dict(ckpt.tied) == {"lm_head.weight": "model.embed_tokens.weight"}
        assert "lm_head.weight" in ckpt
        assert "lm_head.weight" not in list(ckpt)
        assert ckpt["lm_head.weight"].data_ptr() == ckpt["model.embed_tokens.weight"].data_ptr()
        assert ckpt.info("lm_head.weight").name == "model.embed_tokens.weight"
        assert ckpt.match("lm_head.weight") == ["model.embed_tokens.weight"]


def test_small_files(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", model_tensors())
    with loadstone.open(folder) as ckpt:
        assert b"llama" in ckpt.read_file("config.json")
        with pytest.raises(NotFoundError, match=r"no file 'nope\.txt'"):
            ckpt.read_file("nope.txt")
        for name in ("../secret", "/etc/passwd", "a/../../b", ""):
            with pytest.raises(LocationError):
                ckpt.read_file(name)
    (folder / "config.json").unlink()
    with loadstone.open(folder) as ckpt:
        assert ckpt.config() is None


def test_opening_imports_no_torch(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", model_tensors())
    program = (
        "import sys, loadstone\n"
        f"ckpt = loadstone.open({str(folder)!r})\n"
        "ckpt.prefetch().wait(); ckpt.wait(); ckpt.info('lm_head.weight'); ckpt.save_order(); ckpt.verify()\n"
        "print(sorted({'torch', 'numpy', 'transformers', 's3fs', 'botocore'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("shape", [(0, 2**64 - 1), (2**63, 0), (0, 2**62, 2**62), (0, 2**31, 2**31, 2**31)])
def test_empty_shapes_that_torch_cannot_count_are_named(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"w": ("F32", shape), "v": ("U8", (1,))})
    for copy in (False, True):
        with loadstone.open(path, copy=copy) as ckpt:
            assert ckpt.info("w").shape == shape
            assert ckpt.raw("w").shape == (0,)
            for read in (ckpt.__getitem__, ckpt.copy, ckpt.slice, ckpt.view, lambda name: ckpt.get([name])):
                with pytest.raises(UnsupportedDtypeError, match=r"'w' in x\.safetensors"):
                    read("w")
            assert ckpt["v"].shape == (1,)
