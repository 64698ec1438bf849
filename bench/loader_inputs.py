"""Writes what the loader benchmark reads, by the format's own writer: ``loader_inputs FOLDER SIZE``.

- ``sharded``: a Llama of 32 layers in four shards of bf16, at least SIZE bytes;
- ``llama``: a Llama of 24 layers in one file, about two thirds of that;
- ``many/model.safetensors``: 100,000 tensors of four bytes (fewer when SIZE is small);
- ``tensorized/model.tensors``: the tensors of ``sharded`` as tensorizer writes them, where it is installed.

Weights are random, norms are ones, so that the models compute finite numbers.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LAYERS = 32
SHARDS = 4
FULL_SIZE = 2 * 1024**3
"""Bytes of ``sharded`` from which on the benchmark's bars are meant."""

_MANY = 100_000
_MODEL_LAYERS = 24
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where everything lies."""

    folder: Path

    @property
    def sharded(self) -> Path:
        """The checkpoint of four shards."""
        return self.folder / "sharded"

    @property
    def shards(self) -> list[Path]:
        """Its weight files."""
        return sorted(self.sharded.glob("*.safetensors"))

    @property
    def llama(self) -> Path:
        """The model's folder."""
        return self.folder / "llama"

    @property
    def many(self) -> Path:
        """The file of many tensors."""
        return self.folder / "many" / "model.safetensors"

    @property
    def tensorized(self) -> Path:
        """The tensors of `sharded`, for tensorizer."""
        return self.folder / "tensorized" / "model.tensors"

    @property
    def cache(self) -> Path:
        """The node cache that holds `sharded`; see `loadstone.bench.loader_cached`."""
        return self.folder / "cache"

    @property
    def cached(self) -> list[Path]:
        """The weight files in it."""
        return [path for path in sorted(self.cache.glob("blobs/*/data")) if _holds_tensors(path)]

    @property
    def url_file(self) -> Path:
        """Where it is written under which URL it is in there."""
        return self.folder / "url"


def _holds_tensors(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"  # the index beside them has it at its beginning


def many_tensors(size: int) -> int:
    """Return how many tensors the file of many gets."""
    return max(100, min(_MANY, _MANY * size // FULL_SIZE))


def llama_config(layers: int, size: int) -> dict[str, object]:
    """Return the narrowest Llama of so many layers that has at least ``size`` bytes in bf16."""
    # Attention is 4 squares of the width, the MLP 9, embedding and head 16 each.
    width = next(w for w in count(64, 64) if 2 * (layers * 13 + 32) * w * w >= size)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "vocab_size": 16 * width,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }


def make_inputs(folder: Path, size: int) -> Inputs:
    """Write everything below ``folder``, which is empty."""
    inputs = Inputs(folder)
    write_llama(inputs.sharded, llama_config(LAYERS, size), SHARDS)
    write_llama(inputs.llama, llama_config(_MODEL_LAYERS, size * 5 // 8), 1)
    _write_many(inputs.many, many_tensors(size))
    _write_tensorized(inputs)
    return inputs


def write_llama(folder: Path, config: dict[str, object], shards: int) -> None:
    """Write a Llama of ``config`` with random weights into ``folder``, which is made."""
    from safetensors.torch import save_file  # noqa: PLC0415  imports torch, which the parent process does without

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    shapes = dict(_shapes(config))
    values = _Values()
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = [name for name in shapes if _shard_of(name, config, shards) == shard]
        save_file({name: values.take(shapes[name]) for name in names}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if shards > 1:
        total = 2 * sum(math.prod(shape) for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2))


def _shapes(config: dict[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, vocab, layers = (
        int(str(config[key]))
        for key in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    )
    yield "model.embed_tokens.weight", (vocab, width)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name in "qkvo":
            yield f"{at}.self_attn.{name}_proj.weight", (width, width)
        yield f"{at}.mlp.gate_proj.weight", (inner, width)
        yield f"{at}.mlp.up_proj.weight", (inner, width)
        yield f"{at}.mlp.down_proj.weight", (width, inner)
        yield f"{at}.input_layernorm.weight", (width,)
        yield f"{at}.post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (vocab, width)


def _shard_of(name: str, config: dict[str, object], shards: int) -> int:
    if name.startswith("model.layers."):
        return int(name.split(".")[2]) * shards // int(str(config["num_hidden_layers"]))
    return 0 if name.startswith("model.embed") else shards - 1


class _Values:
    """Random numbers, taken from one pool in ever other places: no loader looks at them."""

    def __init__(self) -> None:
        import torch  # noqa: PLC0415  as above

        self._pool = torch.empty(16 * 1024 * 1024, dtype=torch.bfloat16)
        self._pool.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        self._taken = 0

    def take(self, shape: tuple[int, ...]) -> "torch.Tensor":
        """Return a tensor of ``shape``: weights, or ones for a norm."""
        import torch  # noqa: PLC0415  as above

        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        self._taken = (self._taken + 4099) % len(self._pool)
        size = shape[0] * shape[1]
        parts = [self._pool[self._taken :], *[self._pool] * (size // len(self._pool) + 1)]
        return torch.cat([part[:size] for part in parts])[:size].reshape(shape).clone()


def _write_many(file: Path, how_many: int) -> None:
    import torch  # noqa: PLC0415  as above
    from safetensors.torch import save_file  # noqa: PLC0415  as above

    file.parent.mkdir()
    save_file({f"model.layers.{at}.weight": torch.full((1,), float(at)) for at in range(how_many)}, file)


def _write_tensorized(inputs: Inputs) -> None:
    try:
        from tensorizer import TensorSerializer  # noqa: PLC0415  a peer that need not be here
    except ImportError:
        return
    from safetensors import safe_open  # noqa: PLC0415  as above

    inputs.tensorized.parent.mkdir()
    serializer = TensorSerializer(str(inputs.tensorized))
    for shard in inputs.shards:
        with safe_open(shard, "pt") as file:
            serializer.write_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  no dict
    serializer.close()


def main() -> int:
    """Write the inputs and print how many bytes they have."""
    folder = Path(sys.argv[1])
    make_inputs(folder, int(sys.argv[2]))
    written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(json.dumps({"written_bytes": written}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
