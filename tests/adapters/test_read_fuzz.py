"""Whatever an adapter's files hold, they are read or refused by one of loadstone's own errors."""

import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.support.peft_adapters import write_checkpoint

import loadstone
from loadstone.adapters.adapter import Adapter
from loadstone.adapters.reader import read_adapter
from loadstone.errors import LoadstoneError, LoadstoneWarning
from loadstone.loader.checkpoint import Checkpoint

BASE = {
    "model.embed_tokens.weight": torch.ones(6, 4),
    "model.layers.0.q_proj.weight": torch.ones(4, 4),
    "model.layers.0.q_proj.bias": torch.ones(4),
    "model.layers.0.experts.gate_up_proj": torch.ones(2, 6, 4),
    "model.layers.0.experts.down_proj": torch.ones(2, 4, 3),
    "model.norm.weight": torch.ones(4),
}
MODULES = [
    "model.layers.0.q_proj",
    "model.embed_tokens",
    "lm_head",
    "model.layers.0.experts",
    "model.norm",
    "x",
    "",
]
ENDINGS = [
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_A.default.weight",
    "lora_A.other.weight",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "base_layer.lora_A.weight",
    "base_layer.lora_B.weight",
    "base_layer.weight",
    "token_adapter.trainable_tokens_delta",
    "modules_to_save.weight",
    "weight",
    "bias",
    "alpha",
    "",
]
KEYS = st.builds(
    lambda prefix, module, ending: f"{prefix}{module}.{ending}",
    st.sampled_from(["base_model.model.", ""]),
    st.sampled_from(MODULES),
    st.sampled_from(ENDINGS),
)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 12]), max_size=3).map(tuple)
NAMES = st.sampled_from(["q_proj", "embed_tokens", "lm_head", "experts", "norm", "experts.gate_up_proj"])
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.floats(),
    st.text(max_size=5),
    st.just([]),
    st.just({"a": 1}),
)
Q, EMBED, EXPERTS = "model.layers.0.q_proj", "model.embed_tokens", "model.layers.0.experts"
GROUPS: list[tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = [
    ({f"{Q}.lora_A.weight": (2, 4), f"{Q}.lora_B.weight": (4, 2)}, {"target_modules": ["q_proj"]}),
    (
        {f"{EMBED}.lora_embedding_A": (2, 6), f"{EMBED}.lora_embedding_B": (4, 2)},
        {"target_modules": ["embed_tokens"]},
    ),
    ({"lm_head.lora_A.weight": (2, 4), "lm_head.lora_B.weight": (6, 2)}, {"target_modules": ["lm_head"]}),
    ({"model.norm.weight": (4,)}, {"modules_to_save": ["norm"]}),
    ({f"{EMBED}.token_adapter.trainable_tokens_delta": (2, 4)}, {"trainable_token_indices": [5, 1]}),
    (
        {
            f"{EXPERTS}.base_layer.lora_A.weight": (4, 4),
            f"{EXPERTS}.base_layer.lora_B.weight": (6, 4),
            f"{EXPERTS}.lora_A.weight": (4, 3),
            f"{EXPERTS}.lora_B.weight": (4, 4),
        },
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
]
"""Sound adapters, each with the config that it needs; any of them go together."""

CHANGED = "r lora_alpha use_dora lora_bias fan_in_fan_out layers_to_transform layers_pattern exclude_modules"
CHANGED += " init_lora_weights rank_pattern modules_to_save target_modules new_key"
CHANGES = st.dictionaries(
    st.sampled_from(CHANGED.split()),
    st.one_of(ODD, st.lists(NAMES, max_size=2), st.dictionaries(NAMES, st.integers(0, 3), max_size=2)),
    max_size=1,
)


@st.composite
def adapters(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], dict[str, Any]]:
    """Draw some sound adapters put together, with a few things wrong, or none."""
    tensors: dict[str, tuple[int, ...]] = {}
    config: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": []}
    for number in draw(st.sets(st.integers(0, len(GROUPS) - 1), max_size=4)):
        tensors |= GROUPS[number][0]
        for key, value in GROUPS[number][1].items():
            config[key] = config.get(key, []) + value
    if draw(st.booleans()):
        tensors |= draw(st.dictionaries(KEYS, SHAPES, max_size=2))
        config |= draw(CHANGES)
    return tensors, config


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder = write_checkpoint(tmp_path_factory.mktemp("base"), BASE, tie_word_embeddings=True)
    with loadstone.open(folder) as checkpoint:
        yield checkpoint


@settings(max_examples=250, deadline=None)
@given(made=adapters(), with_base=st.booleans())
def test_it_is_read_or_refused(
    base: Checkpoint, made: tuple[dict[str, tuple[int, ...]], dict[str, Any]], with_base: bool
) -> None:
    tensors, config = made
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", LoadstoneWarning)
        folder = Path(name)
        save_file(
            {key: torch.ones(shape) for key, shape in tensors.items()}, folder / "adapter_model.safetensors"
        )
        (folder / "adapter_config.json").write_text(json.dumps(config))
        try:
            adapter = read_adapter(folder, base=base if with_base else None)
        except LoadstoneError as error:
            message = str(error)
        else:
            message = "read"
            _use(adapter, tensors, with_base=with_base)
        assert message
        assert "\n" not in message


def _use(adapter: Adapter, tensors: dict[str, tuple[int, ...]], *, with_base: bool) -> None:
    with adapter:
        used = {t.data_ptr() for us in adapter.updates.values() for u in us for t in u.tensors}
        assert len(used) <= len(tensors)
        for module in adapter.updates if with_base else ():
            for parameter in adapter.parameters(module):
                assert adapter.delta(module, parameter).ndim in (1, 2, 3)
