"""What a scan of all bytes tells of a file's values."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.autograd.profiler import profile

import loadstone
from loadstone.adapters.look import Look, look_at
from loadstone.loader.checkpoint import Checkpoint


def look(folder: Path, tensors: dict[str, torch.Tensor], *, odd: bool = False) -> Look:
    path = folder / "model.safetensors"
    save_file(tensors, path)
    if odd:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length] + b" "
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    with loadstone.open(path) as checkpoint:
        return _look(checkpoint)


def _look(checkpoint: Checkpoint) -> Look:
    blob = checkpoint.source.open(["model.safetensors"])["model.safetensors"]
    assert not isinstance(blob, Exception)
    infos = [checkpoint.info(name) for name in checkpoint]
    return look_at(blob, infos, lambda: {name: checkpoint.view(name) for name in checkpoint})


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_value_that_is_no_number_is_found_among_all_dtypes(
    dtype: torch.dtype, value: float, odd: bool, tmp_path: Path
) -> None:
    tensors = {
        str(each).removeprefix("torch."): torch.ones(3, 7, dtype=each)
        for each in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    name = str(dtype).removeprefix("torch.")
    tensors[name][2, 6] = value
    assert look(tmp_path, tensors, odd=odd).nonfinite == (name,)


def test_opposite_infinities_are_found(tmp_path: Path) -> None:
    assert look(tmp_path, {"a": torch.tensor([torch.inf]), "b": torch.tensor([-torch.inf])}).nonfinite == (
        "a",
        "b",
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_whose_sum_overflows_are_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    large = torch.finfo(dtype).max
    tensors = {"a": torch.full((8,), large, dtype=dtype), "b": torch.full((8,), -large, dtype=dtype)}
    assert look(tmp_path, tensors).nonfinite == ()
    tensors["b"][3] = torch.nan
    assert look(tmp_path, tensors).nonfinite == ("b",)


@pytest.mark.parametrize("largest", [False, True])
def test_a_look_takes_little_memory_even_for_a_moment(largest: bool, tmp_path: Path) -> None:
    tensors = {"a": torch.ones(1024, 1024, dtype=torch.bfloat16)}
    if largest:
        tensors["a"].fill_(torch.finfo(torch.bfloat16).max)  # their sum overflows
    with profile(profile_memory=True, use_cpu=True) as seen:
        found = look(tmp_path, tensors)
    assert found.nonfinite == ()
    events = seen.function_events
    assert events is not None
    assert max(event.self_cpu_memory_usage for event in events) < tensors["a"].nbytes / 2


def test_a_tensor_is_zero_only_if_all_of_it_is(tmp_path: Path) -> None:
    late = torch.zeros(5000)
    late[-1] = 1
    tensors = {"all": torch.zeros(5000), "late": late, "none": torch.ones(2), "empty": torch.empty(0)}
    assert look(tmp_path, tensors).zero == {"all", "empty"}
