"""Adapters of models whose checkpoint stores each expert by itself, under older names than the model has."""

from pathlib import Path

import pytest
import torch
from tests.support.adapter_zoo import Zoo, applied, build_zoo, some_ids
from tests.support.peft_adapters import mixtral, pair, write_adapter, write_checkpoint

from loadstone.adapters.merge import merge_into
from loadstone.adapters.reader import read_adapter
from loadstone.errors import AdapterBaseError, AdapterUnsupportedError
from loadstone.loader.checkpoint import open_checkpoint
from loadstone.loader.modules.load import load_model

CONFIGS = {
    "fused": {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
    "gate": {"target_modules": ["v_proj"], "target_parameters": ["mlp.gate.weight"]},
    "saved": {"target_modules": ["v_proj"], "modules_to_save": ["gate"]},
    "block": {"target_modules": ["v_proj"], "modules_to_save": ["mlp"]},
    "plain": {"target_modules": ["q_proj", "lm_head"]},
}
W1 = "model.layers.0.block_sparse_moe.experts.{}.w1"


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    folder = tmp_path_factory.mktemp("converted")
    zoo = build_zoo(folder, mixtral, CONFIGS)
    mixtral().save_pretrained(zoo.base)  # now with one tensor for each expert
    with open_checkpoint(zoo.base, cache=None) as base:
        assert f"{W1.format(2)}.weight" in base
    return zoo


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_trained_on_the_loaded_model_answers_as_in_peft(zoo: Zoo, name: str) -> None:
    model = load_model(zoo.base, cache=None)
    ids = some_ids(2)
    with zoo.pool(model) as pool:
        assert torch.equal(applied(pool, model, [name, name], ids), zoo.answer(name, ids))


def test_its_shapes_are_checked_against_the_loaded_model(zoo: Zoo, tmp_path: Path) -> None:
    wrong = pair("model.layers.0.mlp.experts", inside=9, outside=16, rank=6)
    folder = write_adapter(tmp_path, wrong, r=2, target_modules=[], target_parameters=["experts.down_proj"])
    with pytest.raises(AdapterBaseError, match=r"\[6, 9\].*down_proj \[3, 16, 24\]"):
        read_adapter(folder, base=zoo.base, cache=None)


def test_what_is_stored_in_another_form_has_no_dense_update(zoo: Zoo) -> None:
    with read_adapter(zoo.root / "fused", base=zoo.base, cache=None) as adapter:
        assert adapter.delta("model.layers.0.self_attn.q_proj").shape == (16, 16)
        with pytest.raises(AdapterBaseError, match="save the loaded model, and use that as the base"):
            adapter.delta("model.layers.0.mlp.experts", "down_proj")
        assert adapter.base is not None
        with pytest.raises(AdapterBaseError, match="down_proj to merge into"):
            merge_into(adapter, adapter.base, zoo.root.parent / "merged")


def test_an_adapter_of_single_experts_can_only_be_merged(zoo: Zoo, tmp_path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for expert in range(3):
        tensors |= pair(W1.format(expert), inside=16, outside=24)
    folder = write_adapter(zoo.root / "old", tensors, target_modules=["w1"])
    model = load_model(zoo.base, cache=None)
    with (
        zoo.pool(model) as pool,
        pytest.raises(AdapterUnsupportedError, match=r"experts\.0\.w1, one expert by itself.*merge_into"),
    ):
        pool.load("old")
    with read_adapter(folder, base=zoo.base, cache=None) as adapter:
        delta = adapter.delta(W1.format(2))
        assert adapter.base is not None
        merge_into(adapter, adapter.base, tmp_path / "merged")
    merged = load_model(tmp_path / "merged", cache=None, wait=True)
    before = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")[2, :24]
    after = merged.get_parameter("model.layers.0.mlp.experts.gate_up_proj")[2, :24]
    torch.testing.assert_close(after, before + delta)


def test_a_base_that_transformers_cannot_make_keeps_the_first_reason(tmp_path: Path) -> None:
    weights = {"layers.0.q_proj.weight": torch.ones(8, 8)}
    base = write_checkpoint(tmp_path / "base", weights, model_type="unheard-of")
    folder = write_adapter(tmp_path / "adapter", pair("model.layers.0.mlp.gate"), target_modules=["gate"])
    with pytest.raises(AdapterBaseError, match="no key matches the base"):
        read_adapter(folder, base=base, cache=None)
