"""Replaced modules whose weights a model reads without calling them: the row's own are found, or none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.adapter_zoo import applied, build_zoo, some_ids
from tests.support.peft_adapters import VOCABULARY
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    XLNetConfig,
    XLNetLMHeadModel,
)

from loadstone.adapters import fit
from loadstone.adapters.attach import Attacher
from loadstone.adapters.updates import LowRank, Replacement, TokenRows, Update
from loadstone.errors import AdapterUnsupportedError

WIDTH = 6
Compute = Callable[["Reader", Tensor], Tensor]


class Reader(nn.Module):
    """Uses a layer in a way that each test chooses."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.other = nn.Linear(WIDTH, WIDTH)
        self._compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self._compute(self, x))  # type: ignore[no-any-return]  # torch gives modules no types


class Model(nn.Module):
    """Holds one."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reader = Reader(compute)

    def forward(self, x: Tensor) -> Tensor:
        return self.reader(x)  # type: ignore[no-any-return]  # as above


class Version:
    attached_bytes = 1

    def __init__(self, uid: int, **updates: Update) -> None:
        self.uid = uid
        self.updates = {f"reader.{name}" if name else "reader": (update,) for name, update in updates.items()}


def replaced(uid: int) -> Version:
    return Version(uid, layer=Replacement({"weight": torch.randn(WIDTH, WIDTH)}))


def read(reader: Reader, x: Tensor) -> Tensor:
    return x @ reader.layer.weight.T


def call(reader: Reader, x: Tensor) -> Tensor:
    out: Tensor = reader.layer(x.to(reader.layer.weight.dtype, copy=True))
    assert reader.layer.weight.shape == (WIDTH, WIDTH)
    assert reader.layer.weight.device == x.device
    return out


def wanted(model: Model, version: Version | None, x: Tensor) -> Tensor:
    weight = model.reader.layer.weight
    if version is not None:
        (update,) = version.updates["reader.layer"]
        assert isinstance(update, Replacement)
        weight = update.parameters["weight"]
    return model.reader.other(x @ weight.T)  # type: ignore[no-any-return]  # as above


def tables(model: nn.Module) -> list[Any]:
    return [module._parameters for module in model.modules()]


@pytest.mark.parametrize("compute", [read, call])
def test_a_read_finds_the_one_adapters_weight(compute: Compute) -> None:
    model = Model(compute).requires_grad_(requires_grad=False)
    before, version, x = tables(model), replaced(1), torch.randn(3, 2, WIDTH)
    with Attacher(model, 1 << 20).apply([version] * 3):
        got = model(x)
    torch.testing.assert_close(got, wanted(model, version, x))
    torch.testing.assert_close(model(x), wanted(model, None, x))
    assert all(one is other for one, other in zip(before, tables(model), strict=True))


def test_a_read_in_a_mixed_batch_is_refused_and_leaves_nothing() -> None:
    model = Model(read).requires_grad_(requires_grad=False)
    before, version, x = tables(model), replaced(1), torch.randn(2, WIDTH)
    attacher = Attacher(model, 1 << 20)
    message = r"computes with weight of reader\.layer without calling it"
    with pytest.raises(AdapterUnsupportedError, match=message), attacher.apply([version, None]):
        model(x)
    assert all(one is other for one, other in zip(before, tables(model), strict=True))
    torch.testing.assert_close(model(x), wanted(model, None, x))


def test_what_a_weight_is_like_may_be_asked_in_a_mixed_batch() -> None:
    model = Model(call).requires_grad_(requires_grad=False)
    version, x = replaced(1), torch.randn(2, WIDTH)
    with Attacher(model, 1 << 20).apply([version, None]):
        got = model(x)
    torch.testing.assert_close(got, torch.stack([wanted(model, version, x)[0], wanted(model, None, x)[1]]))


def test_a_read_inside_a_module_that_runs_apart_finds_each_rows_weight() -> None:
    model = Model(read).requires_grad_(requires_grad=False)
    whole, inner = Model(read).requires_grad_(requires_grad=False), replaced(2)
    nn.init.normal_(whole.reader.layer.weight)
    rank = LowRank(torch.randn(2, WIDTH), torch.randn(WIDTH, 2), 1.0)
    third = Version(3, other=rank)
    first = Version(1, **{"": Replacement(dict(whole.reader.named_parameters()))})
    rows, x = [first, inner, None, third], torch.randn(4, WIDTH)
    with Attacher(model, 1 << 20).apply(rows):
        got = model(x)
    expected = [whole(x)[0], wanted(model, inner, x)[1], model(x)[2]]
    torch.testing.assert_close(got[:3], torch.stack(expected))
    hidden = read(model.reader, x)[3]
    torch.testing.assert_close(got[3], model(x)[3] + hidden @ rank.a.T @ rank.b.T)


def mamba() -> PreTrainedModel:
    """Make a small Mamba: it reads its convolution's weight, and its head is tied to its embedding."""
    torch.manual_seed(1)
    return _ready(MambaForCausalLM(MambaConfig(**SMALL, num_hidden_layers=1, hidden_size=16, state_size=4)))


def deepseek() -> PreTrainedModel:
    """Make a small DeepSeek, whose router has a buffer that the module around it reads."""
    torch.manual_seed(1)
    config = DeepseekV3Config(
        **SMALL,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
        first_k_dense_replace=0,
    )
    return _ready(DeepseekV3ForCausalLM(config))


def xlnet() -> PreTrainedModel:
    """Make a small XLNet, whose layers get tokens first and rows second."""
    torch.manual_seed(1)
    return _ready(XLNetLMHeadModel(XLNetConfig(**SMALL, d_model=16, n_layer=1, n_head=2, d_inner=24)))


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    model.train(mode=False)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape) * 0.1)
    return model


def test_a_mambas_own_convolution_and_its_tied_head_are_as_in_peft(tmp_path: Path) -> None:
    configs: dict[str, dict[str, Any]] = {
        "saved": {"target_modules": ["in_proj"], "modules_to_save": ["conv1d"]},
        "tokens": {"target_modules": ["in_proj"], "trainable_token_indices": [7, 1, 30]},
        "head": {"target_modules": ["lm_head"]},
    }
    zoo = build_zoo(tmp_path, mamba, configs)
    model, ids = zoo.make(), some_ids(2)
    with zoo.pool(model) as pool:
        for name in configs:
            torch.testing.assert_close(applied(pool, model, [name] * 2, ids), zoo.answer(name, ids))
        got = applied(pool, model, ["tokens", "head"], ids)
    torch.testing.assert_close(got, torch.stack([zoo.answer("tokens", ids)[0], zoo.answer("head", ids)[1]]))


def test_a_routers_buffer_is_saved_and_used_with_it(tmp_path: Path) -> None:
    configs = {"own": {"target_modules": ["o_proj"], "modules_to_save": ["gate"]}}
    zoo = build_zoo(tmp_path, deepseek, configs)
    file = tmp_path / "root" / "own" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(each for each in tensors if each.endswith("gate.e_score_correction_bias"))
    save_file({**tensors, name: torch.tensor([9.0, 0.0, -9.0, 0.0])}, file, metadata={"format": "pt"})
    model, ids = zoo.make(), some_ids(3)
    with zoo.pool(model) as pool:
        got = applied(pool, model, ["own"] * 3, ids)
        mixed = applied(pool, model, ["own", None, "own"], ids)
    torch.testing.assert_close(got, zoo.answer("own", ids))
    torch.testing.assert_close(mixed, torch.stack([got[0], zoo.answer(None, ids)[1], got[2]]))
    save_file(tensors, file, metadata={"format": "pt"})
    with zoo.pool(model) as pool:
        assert not torch.allclose(applied(pool, model, ["own"] * 3, ids), got)


@pytest.mark.parametrize("tokens", [2, 5])
def test_layers_that_get_tokens_before_rows_run_no_mixed_batch(tmp_path: Path, tokens: int) -> None:
    zoo = build_zoo(tmp_path, xlnet, {"a": {"target_modules": ["layer_1"]}})
    model, ids = zoo.make(), some_ids(2, tokens)
    with zoo.pool(model) as pool:
        torch.testing.assert_close(applied(pool, model, ["a", "a"], ids), zoo.answer("a", ids))
        with pytest.raises(AdapterUnsupportedError, match=r"XLNet.* do not work row by row"):
            applied(pool, model, ["a", None], ids)


def test_new_tokens_of_a_weight_that_another_module_shares_need_both() -> None:
    model = nn.Module()
    model.embedding, model.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9, bias=False)
    model.head.weight = model.embedding.weight
    modules, rows = dict(model.named_modules()), TokenRows((3,), torch.ones(1, WIDTH))
    assert fit.check(modules, {"embedding": (rows,), "head": (rows,)}) == 0
    with pytest.raises(AdapterUnsupportedError, match="tokens of embedding, whose weight head shares"):
        fit.check(modules, {"embedding": (rows,)})
