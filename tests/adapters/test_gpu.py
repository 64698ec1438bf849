"""Adapters over a base that is not on the CPU: PEFT's answers, on its device, and nothing kept there."""

import gc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.adapter_zoo import ALL_LINEAR, Zoo, applied, build_zoo, some_ids
from tests.support.peft_adapters import llama, mixtral
from torch import Tensor, nn
from transformers import PreTrainedModel

from loadstone.loader.modules.load import load_model

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LLAMA: Mapping[str, Mapping[str, Any]] = {
    "plain": {"target_modules": ALL_LINEAR},
    "plain2": {"target_modules": ALL_LINEAR, "lora_alpha": 10},
    "plain3": {"target_modules": ALL_LINEAR, "use_rslora": True},
    "narrow": {"target_modules": ["q_proj", "v_proj"], "r": 2},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "dora2": {"target_modules": ["q_proj"], "use_dora": True, "lora_alpha": 3},
    "dora3": {"target_modules": ["q_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "embedding-dora": {"target_modules": ["embed_tokens"], "use_dora": True},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "attention": {"target_modules": ["up_proj"], "modules_to_save": ["self_attn"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [7, 1, 30]}},
}
MIXTURES = [
    ["plain", None],
    ["plain", "plain2", "plain3", None, "plain"],
    ["dora", "dora2", "dora3", None, "dora"],
    ["embedding", "embedding-dora", "narrow", None],
    ["saved", "tokens", "attention", None, "dora", "plain", "saved"],
]
EXPERTS: Mapping[str, Mapping[str, Any]] = {
    "experts": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj"]},
    "down": {"target_modules": [], "target_parameters": ["experts.down_proj"]},
    "gate": {"target_modules": [], "target_parameters": ["mlp.gate.weight"]},
    "plain": {"target_modules": ["q_proj", "k_proj"]},
}
ROUNDING = 512
"""CUDA memory is given in pieces of this size."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    return build_zoo(tmp_path_factory.mktemp("llama"), llama, LLAMA)


@pytest.fixture(scope="module")
def zoo(made: Zoo) -> Zoo:
    """Return adapters whose oracle is PEFT on the GPU."""
    return on_cuda(made, llama)


def on_cuda(made: Zoo, make: Any) -> Zoo:
    def moved() -> PreTrainedModel:
        model: PreTrainedModel = make().to("cuda")
        return model

    return replace(made, make=moved, oracles={})


def on_meta(model: nn.Module) -> nn.Module:
    return model.to("meta")


def tokens(rows: int) -> Tensor:
    return some_ids(rows, seed=rows).to("cuda")


def reference(zoo: Zoo, names: list[str | None], ids: Tensor) -> Tensor:
    """Return PEFT's answer for each row, each computed by itself."""
    return torch.cat([zoo.answer(name, ids[i : i + 1]) for i, name in enumerate(names)])


def check_near(got: Tensor, wanted: Tensor) -> None:
    # A product over several rows may be summed in another order than over one: a few units in the last place.
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def allocated() -> int:
    """Return the bytes of the GPU's memory that tensors have."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("name", [name for name in LLAMA if name != "tokens"])
def test_attached_elsewhere_only_the_copies_count(made: Zoo, name: str) -> None:
    """Without a GPU: torch's meta device has shapes and dtypes, and refuses to compute with the CPU's."""
    here, there = made.make(), on_meta(made.make())
    ids = some_ids(2)
    with made.pool(here) as near, made.pool(there) as far:
        applied(near, here, [name] * 2, ids)
        assert applied(far, there, [name] * 2, ids.to("meta")).is_meta
        assert far.attached_bytes == near.attached_bytes == far.status(name).attached_bytes
        assert far.attached_bytes >= far.status(name).mapped_bytes
        far.unload(name)
        assert far.attached_bytes == 0


@pytest.mark.parametrize("names", [["plain", "plain2", "plain3", None, "plain"], ["dora", "saved", None]])
def test_mixed_batches_stay_on_the_bases_device(made: Zoo, names: list[str | None]) -> None:
    model = on_meta(made.make())
    with made.pool(model) as pool:
        assert applied(pool, model, names, some_ids(len(names)).to("meta")).is_meta


def test_copies_of_experts_count(tmp_path_factory: pytest.TempPathFactory) -> None:
    experts = build_zoo(tmp_path_factory.mktemp("mixtral"), mixtral, EXPERTS)
    model = on_meta(experts.make())
    with experts.pool(model) as pool:
        for name in EXPERTS:
            pool.load(name)
            with pool.lease([name]) as lease, pool.apply(lease.rows):
                assert pool.status(name).attached_bytes == pool.status(name).mapped_bytes > 0


@gpu
@needs_cuda
@pytest.mark.parametrize("name", LLAMA)
@pytest.mark.parametrize("wait", [True, False])
def test_one_adapter_on_cuda_answers_as_in_peft(zoo: Zoo, name: str, wait: bool) -> None:
    model = load_model(str(zoo.base), device="cuda", cache=None, wait=wait)
    ids = tokens(3)
    with zoo.pool(model) as pool:
        got = applied(pool, model, [name] * 3, ids)
    assert got.is_cuda
    check_near(got, zoo.answer(name, ids))
    assert not torch.allclose(got, zoo.answer(None, ids))


@gpu
@needs_cuda
@pytest.mark.parametrize("names", MIXTURES)
def test_mixed_batches_on_cuda_answer_as_each_row_in_peft(zoo: Zoo, names: list[str | None]) -> None:
    model = zoo.make()
    ids = tokens(len(names))
    with zoo.pool(model) as pool:
        got = applied(pool, model, names, ids)
    check_near(got, reference(zoo, names, ids))


@gpu
@needs_cuda
def test_experts_on_cuda_answer_as_in_peft(tmp_path_factory: pytest.TempPathFactory) -> None:
    zoo = on_cuda(build_zoo(tmp_path_factory.mktemp("mixtral"), mixtral, EXPERTS), mixtral)
    model = zoo.make()
    names = ["experts", None, "down", "gate", "plain", "experts"]
    ids = tokens(len(names))
    with zoo.pool(model) as pool:
        for name in EXPERTS:
            got = applied(pool, model, [name] * 2, ids[:2])
            check_near(got, zoo.answer(name, ids[:2]))
        got = applied(pool, model, names, ids)
    check_near(got, reference(zoo, names, ids))


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_counted_is_what_is_taken_on_cuda(zoo: Zoo, dtype: torch.dtype) -> None:
    model: nn.Module = zoo.make()
    model.to(dtype=dtype)
    ids = tokens(2)
    with zoo.pool(model) as pool:
        for name in LLAMA:  # what libraries take at the first use of a kernel
            applied(pool, model, [name] * 2, ids)
            pool.unload(name)
        for name in LLAMA:
            before = allocated()
            pool.load(name)
            applied(pool, model, [name] * 2, ids)
            taken = allocated() - before
            assert pool.attached_bytes <= taken <= pool.attached_bytes + 60 * ROUNDING
            pool.unload(name)
            assert allocated() == before


@gpu
@needs_cuda
def test_two_hundred_loads_and_unloads_leave_no_bytes_on_cuda(zoo: Zoo) -> None:
    model = load_model(str(zoo.base), device="cuda", cache=None, wait=True)
    ids = tokens(max(map(len, MIXTURES)))
    with zoo.pool(model) as pool:

        def cycle(number: int) -> None:
            names = MIXTURES[number % len(MIXTURES)]
            loaded = {name for name in names if name is not None}
            for name in sorted(loaded):
                pool.load(name)
                applied(pool, model, [name], ids[:1])
            applied(pool, model, names, ids[: len(names)])
            assert pool.attached_bytes > 0
            for name in sorted(loaded):
                pool.unload(name)

        for number in range(len(MIXTURES)):
            cycle(number)
        before = allocated()
        for number in range(200):
            cycle(number)
        assert pool.attached_bytes == 0
        assert allocated() == before
