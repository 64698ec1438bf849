"""``safe_open`` of this project beside the one of safetensors."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from tests.support.checkpoints import BITS, minilm, write_file

from loadstone.errors import (
    ClosedError,
    NotFoundError,
    SettingsError,
    TensorNotFoundError,
    UnsupportedDtypeError,
)
from loadstone.loader import safe_open


def test_same_answers_for_a_real_file() -> None:
    path = minilm() / "model.safetensors"
    for options in ({"framework": "pt"}, {"framework": "pt", "device": "cpu"}, {"framework": "np"}):
        with safe_open(path, **options) as mine, safetensors.safe_open(path, **options) as theirs:
            assert mine.keys() == theirs.keys()
            assert mine.offset_keys() == theirs.offset_keys()
            assert mine.metadata() == theirs.metadata()
            everything, reference = mine.get_tensors(), theirs.get_tensors()
            assert list(everything) == list(reference)
            for name in reference:
                one, other = mine.get_tensor(name), theirs.get_tensor(name)
                assert type(one) is type(other)
                assert one.dtype == other.dtype
                assert (one == other).all()
                assert everything[name].shape == reference[name].shape
                part, whole = mine.get_slice(name), theirs.get_slice(name)
                assert part.get_shape() == whole.get_shape()
                assert part.get_dtype() == whole.get_dtype()
                assert (part[:1] == whole[:1]).all()
                assert (part[..., ::3] == whole[..., ::3]).all()


@pytest.mark.parametrize("framework", ["pt", "torch", "pytorch", "np", "numpy"])
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_frameworks_and_backends(tmp_path: Path, framework: str, backend: str) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"b": ("F32", (4, 2)), "a": ("U16", (3,)), "c": ("BOOL", ())})
    with safe_open(path, framework, backend=backend) as mine:
        theirs: Any = safetensors.safe_open(path, framework)
        assert mine.keys() == ["a", "b", "c"]
        assert mine.offset_keys() == ["b", "a", "c"]
        assert mine.metadata() is None
        for name in "abc":
            assert (mine.get_tensor(name) == theirs.get_tensor(name)).all()
        assert isinstance(mine.get_tensor("b"), torch.Tensor if framework[0] in "pt" else np.ndarray)


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_numpy_gives_the_dtypes_it_has(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"w": (dtype, (2, 4))})
    reference: Any = safetensors.safe_open(path, "np")
    with safe_open(path, "np") as mine:
        try:
            expected = reference.get_tensor("w")
        except Exception:  # noqa: BLE001  whatever it raises for what numpy lacks
            with pytest.raises(UnsupportedDtypeError):
                mine.get_tensor("w")
            return
        assert mine.get_tensor("w").dtype == expected.dtype
        assert np.array_equal(mine.get_tensor("w").view(np.uint8), expected.view(np.uint8))


def test_what_code_for_safetensors_catches_it_still_does(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"w": ("F32", (4,))})
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(path.read_bytes()[:-1])
    fronts: list[Any] = [safe_open, safetensors.safe_open]
    for front in fronts:
        for use in (
            partial(front, bad, "pt"),
            partial(front(path, "pt").get_tensor, "nope"),
            partial(front(path, "pt").get_slice, "nope"),
        ):
            with pytest.raises(safetensors.SafetensorError) as caught:
                use()
            assert isinstance(pickle.loads(pickle.dumps(caught.value)), type(caught.value))


def test_devices(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"w": ("F32", (4,))})
    for device in ("cpu", None, torch.device("cpu")):
        with safe_open(path, "pt", device=device) as file, safe_open(path, "np", device=device) as other:
            assert file.get_tensor("w").device == torch.device("cpu")
            assert isinstance(other.get_tensor("w"), np.ndarray)
    with safe_open(path, "pt", device="meta") as file:
        assert {file.get_tensor("w").device.type, file.get_slice("w")[1:].device.type} == {"meta"}
        assert file.get_tensors()["w"].device.type == "meta"
    with pytest.raises(SettingsError, match="numpy"):
        safe_open(path, "np", device="meta")


def test_wrong_uses(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_file(path, {"w": ("F32", (4,))})
    with pytest.raises(NotFoundError) as missing:
        safe_open(tmp_path / "none.safetensors", "pt")
    assert isinstance(missing.value, FileNotFoundError)
    with pytest.raises(SettingsError, match="framework"):
        safe_open(path, "tf")
    with pytest.raises(SettingsError, match="backend"):
        safe_open(path, "pt", backend="magic")
    with safe_open(path) as file:
        for read in (file.get_tensor, file.get_slice):
            with pytest.raises(TensorNotFoundError, match="'nope'"):
                read("nope")
        tensor, part = file.get_tensor("w"), file.get_slice("w")
    for late in (lambda: file.get_tensor("w"), lambda: part[0], file.get_tensors):
        with pytest.raises(ClosedError):
            late()
    assert tensor.shape == (4,)
