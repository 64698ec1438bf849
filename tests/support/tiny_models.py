"""Small random transformers models, one of each kind that reads its weights in its own way."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 100
IDS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, slots=True)
class Tiny:
    """How to make a model, and how to call it."""

    model: str
    config: str
    options: dict[str, Any]
    call: Callable[[Any], torch.Tensor]

    def build(self) -> Any:
        torch.manual_seed(1)
        config = getattr(transformers, self.config)(**self.options)
        model = getattr(transformers, self.model)(config)
        with torch.no_grad():  # what is initialised to a constant would hide an error
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        return model.to(config.dtype or torch.float32)

    def save(self, folder: Path, max_shard_size: str = "5GB") -> Path:
        self.build().save_pretrained(folder, max_shard_size=max_shard_size)
        return folder

    def run(self, model: Any) -> torch.Tensor:
        with torch.no_grad():
            return self.call(model)


def _llama(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": None,
        "pad_token_id": 0,
        **more,
    }


def _logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(IDS.to(model.device)).logits
    return logits


def _hidden(model: Any) -> torch.Tensor:
    hidden: torch.Tensor = model(IDS.to(model.device)).last_hidden_state
    return hidden


def _seq2seq(model: Any) -> torch.Tensor:
    ids = IDS.to(model.device)
    logits: torch.Tensor = model(input_ids=ids, decoder_input_ids=ids[:, :4]).logits
    return logits


def _image(model: Any) -> torch.Tensor:
    image = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)
    hidden: torch.Tensor = model(image.to(model.device)).last_hidden_state
    return hidden


_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 32,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VIT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2}
_T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}

TINY = {
    "llama": Tiny("LlamaForCausalLM", "LlamaConfig", _llama(), _logits),
    "llama-tied": Tiny("LlamaForCausalLM", "LlamaConfig", _llama(tie_word_embeddings=True), _logits),
    "llama-bf16": Tiny("LlamaForCausalLM", "LlamaConfig", _llama(dtype="bfloat16"), _logits),
    "qwen2": Tiny("Qwen2ForCausalLM", "Qwen2Config", _llama(), _logits),
    "gpt2": Tiny("GPT2LMHeadModel", "GPT2Config", _GPT2, _logits),
    "mixtral": Tiny("MixtralForCausalLM", "MixtralConfig", _llama(num_local_experts=4), _logits),
    "bert": Tiny("BertModel", "BertConfig", _BERT, _hidden),
    "t5": Tiny("T5ForConditionalGeneration", "T5Config", _T5, _seq2seq),
    "mamba": Tiny("MambaForCausalLM", "MambaConfig", _MAMBA, _logits),
    "vit": Tiny("ViTModel", "ViTConfig", _VIT, _image),
}


def usual(folder: Path, model: str) -> Any:
    """Return the model as transformers loads it, with nothing left to arrive."""
    loaded = getattr(transformers, model).from_pretrained(folder)
    return loaded.requires_grad_(False)
