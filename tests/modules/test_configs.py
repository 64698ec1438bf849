"""Configurations are what transformers reads from the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig

import loadstone
from loadstone.loader.modules.architectures import read_configs
from loadstone.loader.modules.families import PLAIN


def _both(folder: Path, values: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return a folder's configurations as read here, and as transformers reads them."""
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    with loadstone.open(folder) as checkpoint:
        ours = list(read_configs(checkpoint))
    has_own = (folder / "generation_config.json").exists()
    name: dict[str, Any] = {} if has_own else {"config_file_name": "config.json", "_from_model_config": True}
    theirs = [AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder, **name)]
    theirs[0].name_or_path = ours[0].name_or_path  # `load_model` gives it the location
    return ours, theirs


def _same(folder: Path, values: dict[str, Any]) -> bool:
    ours, theirs = _both(folder, values)
    return all(
        type(one) is type(other) and repr(vars(one)) == repr(vars(other))
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("family", sorted(PLAIN))
def test_a_family_has_transformers_own_configuration(family: str, tmp_path: Path) -> None:
    values = json.loads(json.dumps(CONFIG_MAPPING[family]().to_dict()))
    values |= {"architectures": ["Some"], "dtype": "bfloat16", "unknown": {"a": [1]}, "model_type": family}
    assert _same(tmp_path, values)


@pytest.mark.parametrize(
    "more",
    [
        {"max_length": 50, "num_beams": 4, "bos_token_id": 5},
        {"torch_dtype": "float16", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"auto_map": {"AutoConfig": "code.Config"}},
        {"_name_or_path": "elsewhere", "transformers_version": "4.1.0"},
    ],
)
def test_old_and_odd_values_mean_the_same(more: dict[str, Any], tmp_path: Path) -> None:
    assert _same(tmp_path, {"model_type": "llama", "hidden_size": 64, **more})


def test_infinity_as_transformers_writes_it(tmp_path: Path) -> None:
    CONFIG_MAPPING["mamba2"]().save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert "__float__" in str(values["time_step_limit"])
    (ours, _), (theirs, _) = _both(tmp_path, values)
    assert ours.time_step_limit == theirs.time_step_limit
    assert ours.time_step_limit[1] == float("inf")


def test_a_generation_configuration_of_its_own_comes_first(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 7}))
    values = {"model_type": "llama", "top_k": 9}
    assert _same(tmp_path, values)
    assert _both(tmp_path, values)[0][1].top_k == 7


def test_a_mistral_with_kinds_of_layers_is_a_ministral(tmp_path: Path) -> None:
    values = {"model_type": "mistral", "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    assert _same(tmp_path, values)
    assert _both(tmp_path, values)[0][0].model_type == "ministral"
