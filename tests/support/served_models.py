"""Small real models: a random Llama with a byte-level tokenizer of its own, and PEFT adapters for it."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXTS = [
    "The lodestone turns toward the north whenever a ship is lost.",
    "A harbour, a lantern and a map: whoever comes first may read them.",
    "Grüße aus Köln, naïve façade, crème brûlée — 磁石は北を指す。 🧲🧭",
] * 4


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer that begins every prompt with ``<s>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
    )
    # transformers gives its tokenizers no types.
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    )


def make_llama(folder: Path, seed: int = 0, *, max_shard_size: str = "100KB") -> Path:
    """Write a random Llama, in several shards, with its tokenizer."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return folder


def make_adapter(folder: Path, base: Path, seed: int, *, rank: int = 4, scale: float = 1.0) -> Path:
    """Write a LoRA adapter that visibly changes what the model at ``base`` says."""
    model = LlamaForCausalLM.from_pretrained(base)
    targets = ["q_proj", "v_proj", "down_proj"]
    tuned = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 * scale)
    tuned.save_pretrained(str(folder))
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return folder


def reference(
    base: Path,
    prompt: str,
    adapter: Path | None = None,
    tokens: int = 12,
    *,
    device: str = "cpu",
    **options: Any,
) -> str:
    """Return what transformers, or PEFT, says on a copy of its own."""
    model: Any = LlamaForCausalLM.from_pretrained(base)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter))
    model = model.to(device)
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
    output = model.generate(input_ids=ids, max_new_tokens=tokens, **({"do_sample": False} | options))
    whole = str(tokenizer.decode(output[0], skip_special_tokens=True))
    assert whole.startswith(prompt)
    return whole[len(prompt) :]
