"""Parts of an adapter beyond low rank on linear layers: whole parameters, rows of tokens, experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapter_checks import PREFIX, TENSORS, Q, V, refuse, with_tensors
from tests.support.peft_adapters import pair, write_adapter, write_checkpoint

from loadstone.adapters.experts import Experts
from loadstone.adapters.reader import read_adapter
from loadstone.adapters.updates import ExpertsLowRank, Replacement, TokenRows
from loadstone.errors import (
    AdapterBaseError,
    AdapterFormatError,
    AdapterUnsupportedError,
    LoadstoneWarning,
)
from loadstone.settings import Settings

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny", TENSORS, vocab_size=16)


# Whole parameters


def test_a_whole_parameter_that_is_not_declared_is_refused(tmp_path: Path, base: Path) -> None:
    other = {f"{PREFIX}lm_head.weight": torch.ones(16, 8)}
    refuse(AdapterBaseError, r"lm_head.*overwrite the base", with_tensors(tmp_path, other), base)
    refuse(AdapterFormatError, "modules_to_save does not name", with_tensors(tmp_path, other), None)
    unknown = {f"{PREFIX}score.weight": torch.ones(3, 8)}
    refuse(AdapterFormatError, "score.weight", with_tensors(tmp_path, unknown), base)


@pytest.mark.parametrize("key", ["model.embed_tokens.base_layer.weight", "model.embed_tokens.weight"])
def test_a_copy_of_a_base_parameter_is_left_out(key: str, tmp_path: Path, base: Path) -> None:
    copy = TENSORS["model.embed_tokens.weight"]
    with pytest.warns(LoadstoneWarning, match="left out"):
        adapter = read_adapter(with_tensors(tmp_path, {PREFIX + key: copy}), base=base)
    assert list(adapter.updates) == [Q]
    adapter.close()
    refuse(AdapterBaseError, "embed_tokens", with_tensors(tmp_path, {PREFIX + key: copy + 1}), base)


def test_modules_to_save_are_complete(tmp_path: Path, base: Path) -> None:
    weight = {f"{PREFIX}{V}.weight": torch.zeros(4, 8)}
    refuse(
        AdapterFormatError,
        "without its 'bias'",
        with_tensors(tmp_path, weight, modules_to_save=["v_proj"]),
        base,
    )
    both = {**weight, f"{PREFIX}{V}.bias": torch.zeros(4)}
    with read_adapter(with_tensors(tmp_path, both, modules_to_save=["v_proj"]), base=base) as adapter:
        (update,) = adapter.updates[V]
        assert isinstance(update, Replacement)
        assert set(update.parameters) == {"weight", "bias"}
    extra = {**both, f"{PREFIX}{V}.scale": torch.zeros(4)}
    refuse(AdapterBaseError, "scale", with_tensors(tmp_path, extra, modules_to_save=["v_proj"]), base)
    refuse(
        AdapterFormatError,
        "no tensor for it",
        with_tensors(tmp_path, both, modules_to_save=["v_proj", "norm"]),
        base,
    )


# Tokens


def test_rows_of_tokens(tmp_path: Path, base: Path) -> None:
    rows = {f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(2, 8)}
    with read_adapter(with_tensors(tmp_path, rows, trainable_token_indices=[3, 1]), base=base) as adapter:
        (update,) = adapter.updates["model.embed_tokens"]
        assert isinstance(update, TokenRows)
        assert update.rows == (3, 1)
        assert adapter.delta("model.embed_tokens")[3, 0] == 1 - 24.0
    refuse(AdapterFormatError, "does not say which", with_tensors(tmp_path, rows), base)
    refuse(AdapterFormatError, "lists 1", with_tensors(tmp_path, rows, trainable_token_indices=[1]), base)
    refuse(AdapterBaseError, "token 16", with_tensors(tmp_path, rows, trainable_token_indices=[16, 1]), base)
    none = {name: tensor[:0] for name, tensor in rows.items()}
    refuse(AdapterFormatError, "lists 0", with_tensors(tmp_path, none, trainable_token_indices=[]), base)
    named = {"lm_head": [1, 2]}
    refuse(
        AdapterFormatError, "does not name", with_tensors(tmp_path, rows, trainable_token_indices=named), base
    )
    both = {**rows, f"{PREFIX}model.embed_tokens.weight": torch.ones(16, 8)}
    config = {"trainable_token_indices": [1, 2], "modules_to_save": ["embed_tokens"]}
    refuse(AdapterUnsupportedError, "another update", with_tensors(tmp_path, both, **config), base)
    missing = {"embed_tokens": [1, 2], "lm_head": [1, 2]}
    refuse(
        AdapterFormatError, "'lm_head'", with_tensors(tmp_path, rows, trainable_token_indices=missing), base
    )


# Experts


def experts_adapter(tmp_path: Path, *, inside: int, outside: int, **config: Any) -> Path:
    tensors = pair(EXPERTS, inside=inside, outside=outside, rank=6)
    settings = {"target_modules": [], "target_parameters": ["experts.gate_up_proj"], **config}
    return write_adapter(tmp_path / "adapter", tensors, **settings)


def experts_base(tmp_path: Path, *shape: int) -> Path:
    return write_checkpoint(tmp_path / "tiny", {f"{EXPERTS}.gate_up_proj": torch.ones(shape)})


@pytest.mark.parametrize(("inside", "outside", "way"), [(8, 12, "in_out"), (12, 8, "out_in")])
def test_the_orientation_of_experts_is_told_by_shapes(
    inside: int, outside: int, way: str, tmp_path: Path
) -> None:
    folder = experts_adapter(tmp_path, inside=inside, outside=outside)
    with read_adapter(folder, base=experts_base(tmp_path, 3, 8, 12)) as adapter:
        (update,) = adapter.updates[EXPERTS]
        assert isinstance(update, ExpertsLowRank)
        assert (update.orientation, update.experts, update.rank) == (way, 3, 2)
        delta = adapter.delta(EXPERTS)
    assert delta.shape == (3, 8, 12)
    for expert in range(3):
        a, b = update.a[2 * expert : 2 * expert + 2], update.b[:, expert::3]
        dense = update.scale * (b @ a)
        torch.testing.assert_close(delta[expert], dense.T if way == "in_out" else dense)


def test_square_experts_need_a_declared_orientation(tmp_path: Path) -> None:
    base = experts_base(tmp_path, 3, 8, 8)
    folder = experts_adapter(tmp_path, inside=8, outside=8)
    refuse(AdapterFormatError, "ambiguous", folder, base)
    deltas = {}
    ways: tuple[Experts, ...] = ("in_out", "out_in")
    for way in ways:
        with read_adapter(folder, base=base, experts=way) as adapter:
            deltas[way] = adapter.delta(EXPERTS)
        by_setting = Settings.from_env({"LOADSTONE_ADAPTER_EXPERTS": way})
        with read_adapter(folder, base=base, settings=by_setting) as adapter:
            assert torch.equal(adapter.delta(EXPERTS), deltas[way])
    assert torch.equal(deltas["in_out"], deltas["out_in"].transpose(1, 2))


def test_experts_that_fit_nothing_are_refused(tmp_path: Path) -> None:
    folder = experts_adapter(tmp_path, inside=8, outside=11)
    refuse(AdapterBaseError, r"\[6, 8\].*\[11, 6\].*\[3, 8, 12\]", folder, experts_base(tmp_path, 3, 8, 12))
    refuse(AdapterFormatError, "give the base", folder, None)
