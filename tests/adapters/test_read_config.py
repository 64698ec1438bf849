"""The config is understood, or refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from loadstone.adapters.config import canonical, parse_config
from loadstone.errors import AdapterFormatError, AdapterUnsupportedError


def text(**config: Any) -> str:
    return json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], **config})


def test_what_peft_writes_is_understood(tmp_path: Path) -> None:
    from peft import LoraConfig

    LoraConfig(r=3, lora_alpha=7, target_modules=["v", "q"], use_rslora=True).save_pretrained(str(tmp_path))
    found = parse_config((tmp_path / "adapter_config.json").read_bytes(), "here")
    assert (found.rank, found.alpha, set(found.target_modules or ())) == (3, 7, {"q", "v"})
    assert found.scale(3, 7) == 7 / math.sqrt(3)


def test_an_alpha_may_be_a_fraction() -> None:
    assert parse_config(text(lora_alpha=6.5), "here").scale(4, 6.5) == 1.625


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_an_unknown_key_that_is_off_passes(value: object) -> None:
    assert parse_config(text(some_new_switch=value), "here").rank == 4


@pytest.mark.parametrize("value", [True, 1, "on", [1], {"a": None}])
def test_an_unknown_key_that_is_on_is_refused(value: object) -> None:
    with pytest.raises(AdapterUnsupportedError, match=r"some_new_switch.*not known"):
        parse_config(text(some_new_switch=value), "here")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "LOKR"),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "OLoRA"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "something new"),
        ("layer_replication", [[0, 1], [0, 1]]),
        ("alora_invocation_tokens", [1, 2]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("arrow_config", {"top_k": 1}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"samples": 1}),
        ("velora_config", {"num_groups": 4}),
        ("megatron_config", {"a": 1}),
        ("ensure_weight_tying", True),
    ],
)
def test_what_is_not_applied_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(AdapterUnsupportedError, match=key) as caught:
        parse_config(text(**{key: value}), "here")
    assert str(caught.value).startswith("here: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_what_only_initialises_passes(value: object) -> None:
    assert parse_config(text(init_lora_weights=value), "here").rank == 4


@pytest.mark.parametrize("key", ["eva_config", "corda_config", "loftq_config", "lora_ga_config"])
def test_data_of_an_initialisation_that_is_not_used_passes(key: str) -> None:
    assert parse_config(text(**{key: {"rho": 2.0}}), "here").rank == 4


@pytest.mark.parametrize("key", ["use_dora", "lora_bias", "fan_in_fan_out"])
def test_target_parameters_go_with_no_variant(key: str) -> None:
    with pytest.raises(AdapterUnsupportedError, match=key):
        parse_config(text(target_parameters=["experts.down_proj"], **{key: True}), "here")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 0),
        ("r", -1),
        ("r", "2"),
        ("r", 2.0),
        ("r", True),
        ("lora_alpha", "6"),
        ("lora_alpha", True),
        ("lora_alpha", None),
        ("lora_alpha", 10**400),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", {"q_proj": "x"}),
        ("target_modules", 5),
        ("target_modules", ["a", 5]),
        ("modules_to_save", "lm_head"),
        ("use_dora", "yes"),
        ("use_rslora", 1),
        ("layers_to_transform", [-1]),
        ("layers_to_transform", ["0"]),
        ("trainable_token_indices", [1, 1]),
        ("trainable_token_indices", {"embed_tokens": [True]}),
        ("base_model_name_or_path", 5),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(AdapterFormatError, match=key):
        parse_config(text(**{key: value}), "here")


@pytest.mark.parametrize(
    "document",
    ["", "{", "[]", "null", '{"r": NaN}', '{"r": 1, "r": 2}', "\ufeff{}", "[" * 100_000, b"\xff\xfe\x00"],
)
def test_what_is_not_json_is_refused(document: str | bytes) -> None:
    with pytest.raises(AdapterFormatError, match="here"):
        parse_config(document, "here")


def test_an_absurdly_long_config_is_refused() -> None:
    with pytest.raises(AdapterFormatError, match="bytes"):
        parse_config(text(target_modules=["a" * 1_100_000]), "here")


def test_tokens_and_a_module_to_save_do_not_share_a_module() -> None:
    with pytest.raises(AdapterFormatError, match="embed_tokens"):
        parse_config(
            text(trainable_token_indices={"embed_tokens": [1]}, modules_to_save=["embed_tokens"]), "here"
        )


def test_the_canonical_form_ignores_order_and_spacing() -> None:
    one = parse_config('{"peft_type": "LORA", "r": 4,  "lora_alpha": 6}', "here")
    other = parse_config('{"lora_alpha":6,"r":4,"peft_type":"LORA"}', "there")
    assert canonical(one) == canonical(other)
    assert canonical(one) != canonical(parse_config(text(), "here"))
