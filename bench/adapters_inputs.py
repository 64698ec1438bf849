"""Writes what the adapters benchmark reads, by the format's own writer: ``adapters_inputs FOLDER SIZE``.

- ``llama``: a Llama in one file of bf16, at least SIZE bytes;
- ``roots/adapters/aNN``: adapters of rank 16 over all of its linear layers, each with values of its own;
- ``roots/crowd/nNNNN``: adapters of rank 1, of which many fit; those beyond the ones that get mapped share
  the weights of others, by hard links.

Weights are random. The adapters are about as strong as the base, so that a wrong one shows in an answer.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from loadstone.bench.loader_inputs import llama_config, write_llama

if TYPE_CHECKING:
    import torch

FULL_SIZE = 1280 * 1024**2
"""Bytes of the base from which on the benchmark's bars are meant: its adapters then have 25 MB."""

RANK = 16

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything is done.

    Attributes
    ----------
    layers : int
        Layers of the base.
    rows : int
        Adapters of rank 16, and rows of the mixed batch.
    loads : int
        Loads that are timed.
    held : int
        Adapters attached at a time, to see what one takes.
    registered, mapped : int
        Adapters of the crowd.
    cycles : int
        Times that an adapter is loaded, used and unloaded.
    phases, steps : int
        Phases of decoding, every other one while adapters load, and steps of each.
    batches : int
        Mixed batches that are timed.
    """

    layers: int
    rows: int
    loads: int
    held: int
    registered: int
    mapped: int
    cycles: int
    phases: int
    steps: int
    batches: int


FULL = Scale(
    layers=30,
    rows=16,
    loads=100,
    held=10,
    registered=1000,
    mapped=200,
    cycles=200,
    phases=30,
    steps=20,
    batches=40,
)
SMALL = Scale(
    layers=2, rows=4, loads=4, held=2, registered=20, mapped=8, cycles=6, phases=2, steps=4, batches=3
)


def scale_of(size: int) -> Scale:
    """Return how much is done for a base of ``size`` bytes."""
    return FULL if size >= FULL_SIZE else SMALL


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where everything lies."""

    folder: Path
    scale: Scale

    @property
    def llama(self) -> Path:
        """The base's folder."""
        return self.folder / "llama"

    @property
    def weights(self) -> Path:
        """The base's weights."""
        return self.llama / "model.safetensors"

    @property
    def roots(self) -> Path:
        """The root of all adapters."""
        return self.folder / "roots"

    def adapter(self, number: int) -> Path:
        """Return one of the adapters of rank 16; numbers beyond the last begin again."""
        return self.roots / "adapters" / f"a{number % self.scale.rows:02}"

    def one_of_crowd(self, number: int) -> Path:
        """Return one of the adapters of rank 1."""
        return self.roots / "crowd" / f"n{number:04}"

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the weights of one adapter of rank 16."""
        return (self.adapter(0) / _WEIGHTS).stat().st_size

    def files(self) -> list[Path]:
        """Return every weights file, each content once."""
        folders = [self.adapter(number) for number in range(self.scale.rows)]
        folders += [self.one_of_crowd(number) for number in range(self.scale.mapped)]
        return [self.weights, *(folder / _WEIGHTS for folder in folders)]

    def crowd_bytes(self, number: int) -> int:
        """Return the bytes of the weights of one adapter of rank 1."""
        return (self.one_of_crowd(number) / _WEIGHTS).stat().st_size


def make_inputs(folder: Path, size: int) -> Inputs:
    """Write everything below ``folder``, which is empty."""
    inputs = Inputs(folder, scale_of(size))
    config = llama_config(inputs.scale.layers, size)
    write_llama(inputs.llama, config, 1)
    linears = dict(_linears(config))
    for number in range(inputs.scale.rows):
        _write_adapter(inputs.adapter(number), linears, RANK, number)
    for number in range(inputs.scale.registered):
        crowd, original = inputs.one_of_crowd(number), number % inputs.scale.mapped
        if number == original:
            _write_adapter(crowd, linears, 1, 10_000 + number)
        else:
            crowd.mkdir()
            for name in (_CONFIG, _WEIGHTS):
                os.link(inputs.one_of_crowd(original) / name, crowd / name)
    return inputs


def _linears(config: dict[str, object]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield each linear layer's name, and its sizes outside and inside."""
    width, inner = int(str(config["hidden_size"])), int(str(config["intermediate_size"]))
    sizes = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    for layer in range(int(str(config["num_hidden_layers"]))):
        for name in _MODULES:
            block = "mlp" if name in sizes else "self_attn"
            yield f"model.layers.{layer}.{block}.{name}", sizes.get(name, (width, width))


def _write_adapter(folder: Path, linears: dict[str, tuple[int, int]], rank: int, seed: int) -> None:
    import torch  # noqa: PLC0415  the parent process does without
    from safetensors.torch import save_file  # noqa: PLC0415  as above

    random = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> "torch.Tensor":
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.05, generator=random)

    tensors = {}
    for module, (outside, inside) in linears.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = values(rank, inside)
        tensors[f"base_model.model.{module}.lora_B.weight"] = values(outside, rank)
    folder.mkdir(parents=True)
    save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
    config = {
        "base_model_name_or_path": "llama",
        "bias": "none",
        "lora_alpha": rank,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(_MODULES),
        "task_type": "CAUSAL_LM",
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2))


def main() -> int:
    """Write the inputs and print how many bytes they have."""
    folder = Path(sys.argv[1])
    inputs = make_inputs(folder, int(sys.argv[2]))
    print(json.dumps({"adapter_bytes": inputs.adapter_bytes, "base_bytes": inputs.weights.stat().st_size}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
