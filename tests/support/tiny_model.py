"""A tiny sharded checkpoint with a config and a tokenizer, written with safetensors itself."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_tiny_checkpoint(folder: Path, layers: int = 2, seed: int = 0) -> Path:
    """Write two shards and an index of random fp32 tensors, named as a Llama names them."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {"model.embed_tokens.weight": torch.randn(64, 32, generator=generator)}
    for layer in range(layers):
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.randn(32, 32, generator=generator)
    tensors["model.norm.weight"] = torch.randn(32, generator=generator)
    tensors["lm_head.weight"] = torch.randn(64, 32, generator=generator)
    names = list(tensors)
    shards = {
        "model-00001-of-00002.safetensors": names[: len(names) // 2],
        "model-00002-of-00002.safetensors": names[len(names) // 2 :],
    }
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", "tie_word_embeddings": False}))
    return folder
