"""Applied adapters answer as PEFT's own do, alone and mixed, bit for bit over an fp32 base."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapter_zoo import ALL_LINEAR, Zoo, applied, build_zoo, some_ids
from tests.support.peft_adapters import gpt2, llama, mixtral, qwen2_moe
from torch import Tensor
from transformers import PreTrainedModel

LLAMA: Mapping[str, Mapping[str, Any]] = {
    "plain": {"target_modules": ALL_LINEAR},
    "plain2": {"target_modules": ALL_LINEAR, "lora_alpha": 10},
    "plain3": {"target_modules": ALL_LINEAR, "use_rslora": True},
    "narrow": {"target_modules": ["q_proj", "v_proj"], "r": 2},
    "pattern": {"target_modules": ALL_LINEAR, "rank_pattern": {"v_proj": 3}, "alpha_pattern": {"q_proj": 9}},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "dora2": {"target_modules": ["q_proj", "v_proj"], "use_dora": True, "lora_alpha": 3},
    "dora3": {"target_modules": ["q_proj"], "use_dora": True},
    "biased": {"target_modules": ["q_proj", "up_proj"], "lora_bias": True},
    "biased2": {"target_modules": ["q_proj", "up_proj"], "lora_bias": True},
    "biased3": {"target_modules": ["q_proj"], "lora_bias": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "embedding-dora": {"target_modules": ["embed_tokens"], "use_dora": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved3": {"target_modules": ["k_proj"], "modules_to_save": ["lm_head", "norm"]},
    "saved2": {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]},
    "attention": {"target_modules": ["up_proj"], "modules_to_save": ["self_attn"]},
    "layer": {"target_modules": ["lm_head"], "modules_to_save": ["layers.1"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [7, 1, 30]}},
}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return build_zoo(tmp_path_factory.mktemp("llama"), biased_llama, LLAMA)


def biased_llama() -> PreTrainedModel:
    return llama(bias=True)


def reference(zoo: Zoo, names: list[str | None], ids: Tensor) -> Tensor:
    """Return PEFT's answer for each row, each computed by itself."""
    return torch.cat([zoo.answer(name, ids[i : i + 1]) for i, name in enumerate(names)])


@pytest.mark.parametrize("name", LLAMA)
def test_one_adapter_answers_bit_for_bit_as_in_peft(zoo: Zoo, name: str) -> None:
    model = zoo.make()
    ids = some_ids(3)
    with zoo.pool(model) as pool:
        assert torch.equal(applied(pool, model, [name] * 3, ids), zoo.answer(name, ids))
        assert not torch.equal(zoo.answer(name, ids), zoo.answer(None, ids))


def mixtures(*batches: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("names", [pytest.param(batch.split(), id=batch) for batch in batches])


def mixed_by_peft(zoo: Zoo, names: list[str], ids: Tensor) -> Tensor:
    oracle = zoo.peft(*sorted(set(names) - {"base"}))
    with torch.no_grad():
        logits: Tensor = oracle(
            ids, adapter_names=["__base__" if name == "base" else name for name in names]
        ).logits
    return logits


@mixtures(
    "plain base",
    "plain plain2",
    "plain plain plain2",
    "embedding base",
    "saved base",
    "saved base saved",
    "tokens base tokens",
)
def test_mixed_batches_of_few_answer_bit_for_bit_as_peft(zoo: Zoo, names: list[str]) -> None:
    model = zoo.make()
    ids = some_ids(len(names), seed=len(names))
    with zoo.pool(model) as pool:
        assert torch.equal(applied(pool, model, rows_of(names), ids), mixed_by_peft(zoo, names, ids))


@mixtures(
    "plain plain2 plain3",
    "plain3 plain plain2 base narrow",
    "plain narrow pattern plain2",
    "plain biased biased2 biased3 base",
    "embedding base plain plain2",
    "plain2 plain plain3 plain",
    "plain plain plain plain plain plain2 plain3 pattern",
)
def test_stacked_batches_answer_as_peft_but_for_rounding(zoo: Zoo, names: list[str]) -> None:
    model = zoo.make()
    ids = some_ids(len(names), seed=len(names))
    with zoo.pool(model) as pool:
        got = applied(pool, model, rows_of(names), ids)
    torch.testing.assert_close(got, mixed_by_peft(zoo, names, ids), rtol=1e-5, atol=1e-5)


def rows_of(names: list[str]) -> list[str | None]:
    return [None if name == "base" else name for name in names]


@mixtures(
    "dora base",
    "dora dora2 dora3 base plain",
    "dora dora dora2 dora3",
    "embedding-dora embedding base dora",
    "saved saved2 base saved3",
    "tokens base plain tokens",
    "saved dora saved2 tokens biased plain pattern base",
    "attention base attention layer",
    "attention plain layer dora plain2 saved plain3",
)
def test_mixed_batches_that_peft_refuses_answer_as_each_row_alone(zoo: Zoo, names: list[str]) -> None:
    model = zoo.make()
    ids = some_ids(len(names), seed=len(names))
    with zoo.pool(model) as pool:
        got = applied(pool, model, rows_of(names), ids)
    # A product over several rows may be summed in another order than over one: a few units in the last place.
    torch.testing.assert_close(got, reference(zoo, rows_of(names), ids), rtol=1e-5, atol=1e-5)


def test_one_pool_serves_changing_batches(zoo: Zoo) -> None:
    model = zoo.make()
    names = [name for name in LLAMA if not name.startswith("embedding-")]
    generator = torch.Generator().manual_seed(5)
    ids = some_ids(1)
    alone = {name: zoo.answer(name, ids) for name in names}
    with zoo.pool(model) as pool:
        for _ in range(40):
            count = int(torch.randint(1, 9, (1,), generator=generator))
            rows = [names[int(i)] for i in torch.randint(0, len(names), (count,), generator=generator)]
            got = applied(pool, model, rows, ids.expand(count, -1))
            torch.testing.assert_close(got, torch.cat([alone[name] for name in rows]), rtol=1e-5, atol=1e-5)


def test_generation_with_a_mixed_batch_gives_each_row_its_own_text(zoo: Zoo) -> None:
    model = zoo.make()
    ids = some_ids(3, length=4)
    names = ["plain", "dora", None]
    with zoo.pool(model) as pool, pool.lease(names) as lease, pool.apply(lease.rows):
        got = generated(model, ids)
    for row, name in enumerate(names):
        alone = generated(zoo.peft(name) if name else zoo.make(), ids[row : row + 1])
        assert torch.equal(got[row], alone[0])


def generated(model: Any, ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    tokens: Tensor = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return tokens


def test_conv1d_adapters_answer_as_in_peft(tmp_path: Path) -> None:
    configs = {
        "c": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
        "d": {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
    }
    zoo = build_zoo(tmp_path, gpt2, configs)
    model = zoo.make()
    ids = some_ids(2)
    with zoo.pool(model) as pool:
        for name in configs:
            assert torch.equal(applied(pool, model, [name] * 2, ids), zoo.answer(name, ids))
        mixed = applied(pool, model, ["c", "d"], ids)
    torch.testing.assert_close(mixed, reference(zoo, ["c", "d"], ids), rtol=1e-5, atol=1e-5)


def test_new_tokens_reach_a_head_that_is_tied_to_the_embedding(tmp_path: Path) -> None:
    def tied() -> PreTrainedModel:
        return llama(tied=True)

    configs = {"t": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [7, 1, 30]}}}
    zoo = build_zoo(tmp_path, tied, configs)
    model = zoo.make()
    ids = torch.tensor([[7, 2, 30, 1], [3, 4, 5, 6]])
    with zoo.pool(model) as pool:
        got = applied(pool, model, ["t", None], ids)
    # PEFT multiplies by a whole new head, this by the new rows alone: the last bit may differ.
    torch.testing.assert_close(got, reference(zoo, ["t", None], ids), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(got[0], zoo.answer(None, ids)[0])


EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "experts": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "down": {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"], "r": 2},
    "gate": {"target_modules": ["v_proj"], "target_parameters": ["mlp.gate.weight"]},
    "block": {"target_modules": ["v_proj"], "modules_to_save": ["mlp"]},
    "layer": {"target_modules": ["lm_head"], "modules_to_save": ["layers.0"]},
    "plain": {"target_modules": ["q_proj", "k_proj"]},
    "dora": {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return build_zoo(tmp_path_factory.mktemp("mixtral"), mixtral, EXPERTS)


@pytest.mark.parametrize("name", EXPERTS)
def test_an_adapter_of_experts_answers_bit_for_bit_as_in_peft(experts: Zoo, name: str) -> None:
    model = experts.make()
    ids = some_ids(2)
    with experts.pool(model) as pool:
        assert torch.equal(applied(pool, model, [name] * 2, ids), experts.answer(name, ids))


@mixtures(
    "experts plain",
    "experts base",
    "down experts down base",
    "gate base experts",
    "block experts base gate block",
    "experts plain down dora gate block base experts",
    "layer base experts layer block",
)
def test_rows_with_experts_of_their_own_share_a_batch(experts: Zoo, names: list[str]) -> None:
    model = experts.make()
    with experts.pool(model) as pool:
        for length in (1, len(names), 7):
            ids = some_ids(len(names), length)
            got = applied(pool, model, rows_of(names), ids)
            wanted = reference(experts, rows_of(names), ids)
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_layers_of_a_shared_expert_know_whose_tokens_they_get(tmp_path: Path) -> None:
    configs: Mapping[str, Mapping[str, Any]] = {
        "shared": {"target_modules": ["q_proj", "shared_expert.up_proj", "shared_expert_gate"]},
        "dora": {"target_modules": ["shared_expert.down_proj"], "use_dora": True},
        "down": {"target_modules": ["v_proj"], "target_parameters": ["experts.down_proj"]},
        "saved": {"target_modules": ["v_proj"], "modules_to_save": ["shared_expert"]},
    }
    zoo = build_zoo(tmp_path, qwen2_moe, configs)
    model = zoo.make()
    names = ["shared", None, "dora", "down", "saved", "shared"]
    with zoo.pool(model) as pool:
        for length in (1, 6, 7):
            ids = some_ids(len(names), length)
            got = applied(pool, model, names, ids)
            torch.testing.assert_close(got, reference(zoo, names, ids), rtol=1e-5, atol=1e-5)


def test_generation_gives_each_row_the_text_of_its_own_experts(experts: Zoo) -> None:
    model = experts.make()
    ids = some_ids(4, length=4)
    names = ["experts", None, "down", "plain"]
    with experts.pool(model) as pool, pool.lease(names) as lease, pool.apply(lease.rows):
        got = generated(model, ids)
    for row, name in enumerate(names):
        alone = generated(experts.peft(name) if name else experts.make(), ids[row : row + 1])
        assert torch.equal(got[row], alone[0])


def test_a_plain_parameter_of_a_narrower_adapter_answers_as_in_peft(tmp_path: Path) -> None:
    zoo = build_zoo(
        tmp_path, mixtral, {"gate": {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}}
    )
    _convert(zoo, torch.bfloat16)
    model = zoo.make()
    ids = some_ids(2)
    with zoo.pool(model) as pool:
        assert torch.equal(applied(pool, model, ["gate"] * 2, ids), zoo.answer("gate", ids))


@pytest.mark.parametrize(
    ("base", "adapter", "autocast"),
    [
        (torch.bfloat16, torch.bfloat16, False),  # all in bf16
        (torch.bfloat16, torch.float32, True),  # the adapter's fp32 is kept, as PEFT does by default
        (torch.float32, torch.bfloat16, True),  # widened, which is exact
    ],
    ids=["bf16-bf16", "bf16-fp32", "fp32-bf16"],
)
def test_dtypes_are_computed_as_the_policy_says(
    tmp_path: Path, base: torch.dtype, adapter: torch.dtype, autocast: bool
) -> None:
    def make() -> PreTrainedModel:
        return llama(dtype=base)

    configs = {
        name: {"target_modules": ALL_LINEAR, "lora_alpha": alpha}
        for name, alpha in (("a", 6), ("b", 7), ("c", 8))
    }
    zoo = build_zoo(tmp_path, make, configs)
    _convert(zoo, adapter)
    model = zoo.make()
    ids = some_ids(3)
    with zoo.pool(model) as pool:
        got = applied(pool, model, ["a"] * 3, ids)
        mixed = applied(pool, model, ["a", "b", "c"], ids)
        assert got.dtype == base
        assert torch.equal(got, zoo.answer("a", ids, autocast_adapter_dtype=autocast))
        wanted = reference_rows(zoo, ["a", "b", "c"], ids, autocast)
    near = 3e-2 if base == torch.bfloat16 else 1e-5
    torch.testing.assert_close(mixed, wanted, rtol=near, atol=near)


def reference_rows(zoo: Zoo, names: list[str], ids: Tensor, autocast: bool) -> Tensor:
    answers = [
        zoo.answer(name, ids[i : i + 1], autocast_adapter_dtype=autocast) for i, name in enumerate(names)
    ]
    return torch.cat(answers)


def _convert(zoo: Zoo, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file, save_file

    for file in zoo.root.glob("*/adapter_model.safetensors"):
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
