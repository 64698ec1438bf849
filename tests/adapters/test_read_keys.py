"""Every key is taken apart, or refused by name."""

import pytest

from loadstone.adapters.keys import Key, parse_key, parse_keys
from loadstone.errors import AdapterError, AdapterFormatError, AdapterUnsupportedError


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
@pytest.mark.parametrize("name", ["", ".default"])
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("lora_A{}.weight", "A"),
        ("lora_B{}.weight", "B"),
        ("lora_B{}.bias", "B_bias"),
        ("lora_embedding_A{}", "embedding_A"),
        ("lora_embedding_B{}", "embedding_B"),
        ("lora_magnitude_vector{}", "magnitude"),
        ("lora_magnitude_vector{}.weight", "magnitude"),
        ("token_adapter.trainable_tokens_delta{}", "token_rows"),
    ],
)
def test_all_spellings_of_a_key(prefix: str, name: str, form: str, kind: str) -> None:
    key = parse_key(f"{prefix}model.layers.0.q_proj.{form.format(name)}", "here")
    assert (key.kind, key.module, key.depth) == (kind, "model.layers.0.q_proj", 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base_model.model.lm_head.weight", ("full", "lm_head.weight", "", 0)),
        ("lm_head.modules_to_save.weight", ("full", "lm_head.weight", "", 0)),
        ("lm_head.modules_to_save.default.weight", ("full", "lm_head.weight", "", 0)),
        ("embed_tokens.base_layer.weight", ("base", "embed_tokens", "weight", 0)),
        ("m.experts.lora_A.weight", ("A", "m.experts", "", 0)),
        ("m.experts.base_layer.base_layer.lora_B.weight", ("B", "m.experts", "", 2)),
    ],
)
def test_other_keys(text: str, expected: tuple[str, str, str, int]) -> None:
    key = parse_key(text, "here")
    assert (key.kind, key.module, key.name, key.depth) == expected


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("lora_unet_down_0.lora_down.weight", AdapterUnsupportedError, "Kohya"),
        ("lora_te1_text.alpha", AdapterUnsupportedError, "Kohya"),
        ("unet.to_q.lora.down.weight", AdapterUnsupportedError, "Kohya"),
        ("a.q_proj.lora_up.weight", AdapterUnsupportedError, "Kohya"),
        ("a.q_proj.lokr_w1", AdapterUnsupportedError, "lokr_w1"),
        ("a.q_proj.hada_w1_a", AdapterUnsupportedError, "hada_w1_a"),
        ("a.q_proj.ia3_l", AdapterUnsupportedError, "ia3_l"),
        ("a.q_proj.lora_E", AdapterUnsupportedError, "lora_E"),
        ("a.q_proj.lora_A.other.weight", AdapterFormatError, "'other'"),
        ("a.q_proj.lora_embedding_A.other", AdapterFormatError, "'other'"),
        ("a.q_proj.lora_velora_embed", AdapterFormatError, "none of the kinds"),
        ("a.q_proj.lora_A.bias", AdapterFormatError, "none of the kinds"),
        ("a.q_proj.lora_A.default.default.weight", AdapterFormatError, "none of the kinds"),
        ("lm_head.original_module.weight", AdapterFormatError, "the base's own"),
        ("a.base_layer.lora_magnitude_vector", AdapterFormatError, "wrapped"),
    ],
)
def test_what_is_no_key_of_an_adapter_is_refused(text: str, error: type[AdapterError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        parse_key(text, "here")
    assert repr(text) in str(caught.value)


def test_two_spellings_of_one_tensor_are_refused() -> None:
    with pytest.raises(AdapterFormatError, match="same tensor"):
        parse_keys(["a.q.lora_A.weight", "base_model.model.a.q.lora_A.default.weight"], "here")


def test_an_absurdly_long_key_is_refused() -> None:
    with pytest.raises(AdapterFormatError, match="characters"):
        parse_keys(["a" * 1001], "here")


def test_keys_keep_their_text() -> None:
    assert parse_keys(["a.q.lora_A.weight"], "here") == [Key("a.q.lora_A.weight", "A", "a.q")]
