"""Differential tests: what is read and merged equals what PEFT makes of the same files, bit by bit."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.peft_adapters import Made, gpt2, llama, make, mixtral
from transformers import PreTrainedModel

import loadstone
from loadstone.adapters.merge import merge_into
from loadstone.adapters.reader import read_adapter
from loadstone.errors import LoadstoneWarning

Factory = Callable[[], PreTrainedModel]

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def tied_llama() -> PreTrainedModel:
    return llama(tied=True)


def biased_llama() -> PreTrainedModel:
    return llama(bias=True)


FORMS: dict[str, tuple[Factory, dict[str, Any]]] = {
    "linear": (llama, {"target_modules": ALL_LINEAR}),
    "dropout": (llama, {"target_modules": ["q_proj"], "lora_dropout": 0.3}),
    "all-linear": (llama, {"target_modules": "all-linear"}),
    "targets by regex": (llama, {"target_modules": r".*\.layers\.(0|1)\.self_attn\.(q|v)_proj"}),
    "targets by path": (llama, {"target_modules": ["model.layers.1.self_attn.q_proj"]}),
    "excluded": (llama, {"target_modules": ["q_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]}),
    "excluded by regex": (llama, {"target_modules": ["q_proj"], "exclude_modules": r".*layers\.1\..*"}),
    "some layers": (llama, {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "one layer of a pattern": (
        llama,
        {"target_modules": ["v_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    ),
    "rank and alpha patterns": (
        llama,
        {
            "target_modules": ALL_LINEAR,
            "rank_pattern": {"q_proj": 2, r"^model\.layers\.1.*v_proj": 6, "layers.0.mlp.up_proj": 3},
            "alpha_pattern": {r"model.layers.\d+.mlp.(up|down)_proj": 5, "self_attn.q_proj": 9},
        },
    ),
    "the first pattern counts": (
        llama,
        {"target_modules": ["q_proj"], "rank_pattern": {r".*q_proj": 3, r"layers\.0\.self_attn\.q_proj": 5}},
    ),
    "rslora": (llama, {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
    "gaussian": (llama, {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"}),
    "orthogonal": (llama, {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"}),
    "mica": (llama, {"target_modules": ["q_proj"], "init_lora_weights": "mica"}),
    "dora": (llama, {"target_modules": ALL_LINEAR, "use_dora": True}),
    "dora and rslora": (llama, {"target_modules": ["o_proj"], "use_dora": True, "use_rslora": True}),
    "embedding": (llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding with dora": (llama, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "head": (llama, {"target_modules": ["lm_head", "q_proj"]}),
    "modules to save": (
        llama,
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "norms to save": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    "a layer to save": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["layers.1.mlp"]}),
    "tokens": (llama, {"target_modules": ["q_proj"], "trainable_token_indices": [7, 3, 39]}),
    "tokens by module": (
        llama,
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1], "lm_head": [2, 4]}},
    ),
    "tokens of a tied embedding": (
        tied_llama,
        {"target_modules": ["q_proj"], "trainable_token_indices": [0, 9]},
    ),
    "bias of lora": (biased_llama, {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
    "conv1d": (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "conv1d with dora": (gpt2, {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "conv1d with a bias": (gpt2, {"target_modules": ["c_attn", "attn.c_proj"], "lora_bias": True}),
    "experts": (mixtral, {"target_modules": [], "target_parameters": EXPERTS}),
    "some experts": (mixtral, {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:]}),
    "experts with ranks of their own": (
        mixtral,
        {
            "target_modules": [],
            "target_parameters": EXPERTS,
            "rank_pattern": {"experts.down_proj": 2},
            "alpha_pattern": {"gate_up_proj": 11},
        },
    ),
    "a plain parameter": (llama, {"target_modules": [], "target_parameters": ["q_proj.weight"]}),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The base lies in a folder of another name than PEFT recorded, which is a warning every time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LoadstoneWarning)
        yield


def assert_same(made: Made) -> None:
    """Compare every parameter of the merged model with PEFT's, bit by bit."""
    with loadstone.open(made.base) as base, read_adapter(made.adapter, base=base) as adapter:
        touched = set()
        for module in adapter.updates:
            for name, value in adapter.updated(module).items():
                touched.add(f"{module}.{name}")
                assert torch.equal(value, made.merged[f"{module}.{name}"]), f"{module}.{name}"
        changed = {n for n, value in made.merged.items() if not torch.equal(value, made.before[n])}
        assert touched == changed


@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_peft(form: str, tmp_path: Path) -> None:
    model, config = FORMS[form]
    assert_same(make(tmp_path, model, **config))


@pytest.mark.parametrize("save_dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_an_adapter_of_another_dtype_equals_peft(save_dtype: torch.dtype, tmp_path: Path) -> None:
    assert_same(make(tmp_path, llama, save_dtype=save_dtype, target_modules=ALL_LINEAR))


@pytest.mark.parametrize("base_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["linear", "dora", "embedding", "modules to save"],
)
def test_a_base_of_half_precision_equals_peft(
    base_dtype: torch.dtype, config: dict[str, Any], tmp_path: Path
) -> None:
    assert_same(make(tmp_path, lambda: llama(dtype=base_dtype), **config))


def test_delta_is_what_merging_adds(tmp_path: Path) -> None:
    made = make(tmp_path, llama, target_modules=["q_proj", "embed_tokens"], use_dora=True)
    with read_adapter(made.adapter, base=made.base) as adapter:
        for module in adapter.updates:
            delta = adapter.delta(module)
            assert torch.equal(delta, made.merged[f"{module}.weight"] - made.before[f"{module}.weight"])


def test_merged_checkpoint_equals_peft(tmp_path: Path) -> None:
    made = make(tmp_path, llama, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    with loadstone.open(made.base) as base, read_adapter(made.adapter, base=base) as adapter:
        merge_into(adapter, base, tmp_path / "merged")
    with loadstone.open(tmp_path / "merged") as merged:
        assert set(merged) == set(made.merged)
        for name in merged:
            assert torch.equal(merged[name], made.merged[name]), name
