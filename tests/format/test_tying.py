"""Tied weights: which names stand for which stored tensor, and when to warn."""

import pytest

from loadstone.loader.layout.index import tied

LLAMA = ["model.embed_tokens.weight", "model.norm.weight"]


def test_a_tied_head_stands_for_the_embedding() -> None:
    assert tied({"tie_word_embeddings": True}, LLAMA) == ({"lm_head.weight": LLAMA[0]}, [])


def test_a_stored_head_is_nobodys_alias() -> None:
    assert tied({"tie_word_embeddings": True}, [*LLAMA, "lm_head.weight"]) == ({}, [])
    assert tied({"tie_word_embeddings": False}, [*LLAMA, "lm_head.weight"]) == ({}, [])


@pytest.mark.parametrize("architectures", [None, [], ["LlamaForCausalLM"], "odd"])
def test_an_absent_head_that_is_not_tied_is_a_warning(architectures: object) -> None:
    aliases, warnings = tied({"tie_word_embeddings": False, "architectures": architectures}, LLAMA)
    assert aliases == {}
    assert len(warnings) == 1
    assert "lm_head.weight" in warnings[0]


def test_a_model_without_a_head_needs_no_warning() -> None:
    for name in ("LlamaModel", "LlamaForSequenceClassification"):
        assert tied({"tie_word_embeddings": False, "architectures": [name]}, LLAMA) == ({}, [])


def test_a_silent_config_means_what_its_model_type_means() -> None:
    gpt2 = ["transformer.wte.weight", "transformer.h.0.ln_1.weight"]
    assert tied({"model_type": "gpt2"}, gpt2) == ({"lm_head.weight": gpt2[0]}, [])
    assert tied({"model_type": "llama"}, LLAMA) == ({}, [])
    assert tied({"tie_word_embeddings": "yes"}, LLAMA) == ({}, [])


@pytest.mark.parametrize(
    ("kind", "embedding", "head"),
    [
        ("mamba", "backbone.embeddings.weight", "lm_head.weight"),
        ("biogpt", "biogpt.embed_tokens.weight", "output_projection.weight"),
        ("xlm", "transformer.embeddings.weight", "pred_layer.proj.weight"),
    ],
)
def test_heads_go_by_many_names(kind: str, embedding: str, head: str) -> None:
    assert tied({"model_type": kind}, [embedding]) == ({head: embedding}, [])
    assert tied({"model_type": kind, "tie_word_embeddings": False}, [embedding, head]) == ({}, [])


def test_the_language_models_own_setting_counts_in_a_larger_model() -> None:
    name = "language_model.model.embed_tokens.weight"
    config = {"text_config": {"tie_word_embeddings": True}}
    assert tied(config, [name]) == ({"language_model.lm_head.weight": name}, [])
    assert tied({**config, "tie_word_embeddings": False}, [name])[0] == {}


def test_t5_shares_one_embedding_three_times() -> None:
    aliases, _ = tied({"model_type": "t5", "tie_word_embeddings": True}, ["shared.weight"])
    assert set(aliases) == {"lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}
    assert set(aliases.values()) == {"shared.weight"}


def test_no_embedding_means_nothing_to_say() -> None:
    assert tied({"tie_word_embeddings": True}, ["conv.weight"]) == ({}, [])
