"""One base and one adapter for it, and what a refusal looks like: for the tests of what is checked."""

from pathlib import Path
from typing import Any

import pytest
import torch

from loadstone.adapters.reader import read_adapter
from loadstone.errors import LoadstoneError
from tests.support.peft_adapters import pair, write_adapter

Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.0.self_attn.v_proj"
PREFIX = "base_model.model."
TENSORS = {
    "model.embed_tokens.weight": torch.arange(128.0).reshape(16, 8),
    f"{Q}.weight": torch.ones(8, 8),
    f"{V}.weight": torch.ones(4, 8),
    f"{V}.bias": torch.ones(4),
    "model.norm.weight": torch.ones(8),
    "lm_head.weight": torch.zeros(16, 8),
}


def refuse(kind: type[LoadstoneError], says: str, adapter: Path, base: Path | None, **options: Any) -> str:
    with pytest.raises(kind, match=says) as caught:
        read_adapter(adapter, base=base, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def with_tensors(tmp_path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    return write_adapter(tmp_path / "adapter", {**pair(Q), **tensors}, **config)
