"""Rows of their own for some tokens, where the embedding is tied to a head: as in PEFT."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.adapter_zoo import applied, build_zoo
from tests.support.peft_adapters import VOCABULARY, llama
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    PreTrainedModel,
)

from loadstone.adapters.merge import merge_into
from loadstone.adapters.reader import read_adapter
from loadstone.errors import AdapterBaseError, AdapterUnsupportedError
from loadstone.loader.modules.load import load_model

IDS = torch.tensor([[7, 2, 30, 1], [3, 4, 5, 7]])
ROWS = [7, 1, 30]


def tied() -> PreTrainedModel:
    return llama(tied=True)


def _bert(kind: Any) -> PreTrainedModel:
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    model: PreTrainedModel = kind(config)
    model.train(mode=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter.data, std=0.5)
    return model


def masked() -> PreTrainedModel:
    return _bert(BertForMaskedLM)


def classifier() -> PreTrainedModel:
    return _bert(BertForSequenceClassification)


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (tied, {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": {"embed_tokens": ROWS}}),
        (tied, {"target_modules": ["lm_head"], "trainable_token_indices": ROWS}),
        # A head with a bias, which PEFT leaves out when the head's rows are new.
        (masked, {"target_modules": ["query"], "trainable_token_indices": {"word_embeddings": ROWS}}),
        (masked, {"target_modules": ["decoder"], "trainable_token_indices": {"word_embeddings": ROWS}}),
        # A model without the head to which its config ties the embedding.
        (
            classifier,
            {
                "target_modules": ["query"],
                "trainable_token_indices": {"word_embeddings": ROWS},
                "modules_to_save": ["classifier"],
            },
        ),
    ],
    ids=["lora on the head", "only on the head", "a biased head", "lora on a biased head", "no head"],
)
def test_new_rows_and_a_tied_head_answer_as_in_peft(
    tmp_path: Path, make: Callable[[], PreTrainedModel], config: Mapping[str, Any]
) -> None:
    zoo = build_zoo(tmp_path, make, {"t": config})
    model = zoo.make()
    wanted, base = zoo.answer("t", IDS), zoo.answer(None, IDS)
    with zoo.pool(model) as pool:
        alone = applied(pool, model, ["t", "t"], IDS)
        mixed = applied(pool, model, ["t", None], IDS)
    # PEFT multiplies by a whole new head, this by the new rows alone: the last bit may differ.
    torch.testing.assert_close(alone, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mixed, torch.stack([wanted[0], base[1]]), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(wanted, base)


def test_new_rows_and_lora_on_the_head_are_merged_into_a_head_of_its_own(tmp_path: Path) -> None:
    config = {"target_modules": ["lm_head"], "trainable_token_indices": {"embed_tokens": ROWS}}
    zoo = build_zoo(tmp_path, tied, {"t": config})
    with read_adapter(zoo.root / "t", base=zoo.base, cache=None) as adapter:
        assert adapter.base is not None
        merge_into(adapter, adapter.base, tmp_path / "merged")
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert not torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    got = logits(load_model(tmp_path / "merged", cache=None, wait=True), IDS)
    torch.testing.assert_close(got, zoo.answer("t", IDS), rtol=1e-4, atol=1e-4)


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(ids).logits
    return out


def test_dora_on_a_head_with_new_rows_is_refused_as_peft_cannot_run_it(tmp_path: Path) -> None:
    config = {"target_modules": ["lm_head"], "use_dora": True, "trainable_token_indices": ROWS}
    zoo = build_zoo(tmp_path, tied, {"t": config})
    with pytest.raises(AttributeError, match="bias"):
        zoo.answer("t", IDS)
    with pytest.raises(AdapterUnsupportedError, match=r"lm_head.*without DoRA"):
        read_adapter(zoo.root / "t", base=zoo.base, cache=None)


def test_a_model_without_the_embedding_does_not_pass_for_one_without_its_head(tmp_path: Path) -> None:
    zoo = build_zoo(
        tmp_path,
        masked,
        {"t": {"target_modules": ["query"], "trainable_token_indices": {"word_embeddings": ROWS}}},
    )
    with zoo.pool(llama()) as pool, pytest.raises(AdapterBaseError, match="which the model does not have"):
        pool.load("t")
