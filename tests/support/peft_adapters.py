"""Small models, and adapters for them made and merged by PEFT itself: the oracle of the adapter tests."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

VOCABULARY = 40
Model = TypeVar("Model", bound=nn.Module)


def llama(*, tied: bool = False, dtype: torch.dtype = torch.float32, bias: bool = False) -> LlamaForCausalLM:
    """Make a two-layer Llama with random weights."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        attention_bias=bias,
    )
    return _ready(LlamaForCausalLM(config), dtype)


def gpt2() -> GPT2LMHeadModel:
    """Make a one-layer GPT-2, whose linear layers are `Conv1D`, one of them square."""
    torch.manual_seed(2)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    return _ready(GPT2LMHeadModel(config), torch.float32)


def mixtral() -> MixtralForCausalLM:
    """Make a one-layer Mixtral, whose experts are two fused parameters."""
    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        max_position_embeddings=32,
    )
    return _ready(MixtralForCausalLM(config), torch.float32)


def qwen2_moe() -> Qwen2MoeForCausalLM:
    """Make a one-layer Qwen2-MoE, whose experts stand beside a shared one that gets all tokens."""
    torch.manual_seed(6)
    config = Qwen2MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
    )
    return _ready(Qwen2MoeForCausalLM(config), torch.float32)


def _ready(model: Model, dtype: torch.dtype) -> Model:
    model.to(dtype=dtype).eval()
    for parameter in model.parameters():
        # Norms start as ones and biases as zeros, which would hide mistakes.
        nn.init.normal_(parameter.data, std=0.5)
    return model


@dataclass(frozen=True, slots=True)
class Made:
    """A base and an adapter on disk.

    Attributes
    ----------
    base, adapter : Path
        Their folders.
    before, merged : dict[str, torch.Tensor]
        The base's parameters, and what PEFT's ``merge_and_unload`` makes of them.
    """

    base: Path
    adapter: Path
    before: dict[str, torch.Tensor]
    merged: dict[str, torch.Tensor]


def make(
    folder: Path,
    model: Callable[[], PreTrainedModel],
    *,
    save_dtype: torch.dtype | None = None,
    **config: Any,
) -> Made:
    """Train nothing, but save a base and an adapter with random values, and merge them with PEFT.

    Parameters
    ----------
    folder
        Where ``base`` and ``adapter`` are written.
    model
        Makes the base; called twice, so it must make the same model each time.
    save_dtype
        The adapter's dtype on disk; by default what PEFT saves.
    config
        For `LoraConfig`.
    """
    base, adapter = folder / "base", folder / "adapter"
    original = model()
    before = {name: value.clone() for name, value in original.state_dict().items()}
    save_base(original, base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(model(), LoraConfig(**{"r": 4, "lora_alpha": 6, **config}))
        randomise(peft)
        if save_dtype is not None:
            peft = peft.to(save_dtype)
        peft.save_pretrained(str(adapter))
        loaded = PeftModel.from_pretrained(original, adapter).eval()
        result = loaded.merge_and_unload()
    merged = {name: value.clone() for name, value in result.state_dict().items()}
    return Made(base, adapter, before, merged)


def save_base(model: PreTrainedModel, folder: Path) -> None:
    """Write a model as it is in memory, without the renaming that transformers does for some models."""
    model.save_pretrained(folder, save_original_format=False)


def randomise(peft: nn.Module) -> None:
    """Give every tensor that belongs to the adapter random values, magnitudes positive ones."""
    torch.manual_seed(4)
    for name, parameter in peft.named_parameters():
        if "lora_magnitude" in name:
            parameter.data.mul_(torch.rand_like(parameter) + 0.5)
        elif "lora_" in name or "modules_to_save" in name or "trainable_tokens" in name:
            nn.init.normal_(parameter.data, std=0.3)


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Write an adapter by hand; ``config`` changes a plain rank-2 config over every ``q_proj``."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**plain, **config}))
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def write_checkpoint(folder: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """Write a base by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def pair(module: str, *, inside: int = 8, outside: int = 8, rank: int = 2) -> dict[str, torch.Tensor]:
    """Make the two tensors of one linear module, with PEFT's keys."""
    generator = torch.Generator().manual_seed(len(module) + inside + outside)
    return {
        f"base_model.model.{module}.lora_A.weight": torch.randn(rank, inside, generator=generator),
        f"base_model.model.{module}.lora_B.weight": torch.randn(outside, rank, generator=generator),
    }
