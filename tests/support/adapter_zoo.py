"""Many PEFT-made adapters over one small base, on disk, and what PEFT itself answers with them."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from loadstone.adapters.pool import AdapterPool
from loadstone.loader.checkpoint import Checkpoint, open_checkpoint
from loadstone.settings import Settings
from tests.support.peft_adapters import VOCABULARY, randomise, save_base

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True)
class Zoo:
    """A base and adapters on disk.

    Attributes
    ----------
    make : callable
        Makes the base model anew.
    base, root : Path
        The base's folder; the folder of adapter folders.
    oracles : dict
        PEFT's models that were made already.
    """

    make: Callable[[], PreTrainedModel]
    base: Path
    root: Path
    oracles: dict[tuple[object, ...], PeftModel] = field(default_factory=dict)

    def peft(self, *names: str, **options: Any) -> PeftModel:
        """Return PEFT's own model with these adapters loaded, the first one active; made once."""
        key = (*names, *options.items())
        if key not in self.oracles:
            self.oracles[key] = self._peft(names, options)
        return self.oracles[key]

    def _peft(self, names: Sequence[str], options: Mapping[str, Any]) -> PeftModel:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(
                self.make(), self.root / names[0], adapter_name=names[0], **options
            )
            for name in names[1:]:
                model.load_adapter(str(self.root / name), adapter_name=name, **options)
        return model.eval()

    def answer(self, name: str | None, ids: Tensor, **options: Any) -> Tensor:
        """Return PEFT's logits with one adapter, or the base's."""
        model: nn.Module = self.make() if name is None else self.peft(name, **options)
        with torch.no_grad():
            logits: Tensor = model(ids).logits
        return logits

    def pool(self, model: nn.Module, **options: Any) -> AdapterPool:
        """Return a pool over ``model`` whose root holds the adapters."""
        options.setdefault("settings", Settings(cache_dir="none", adapter_bytes=1 << 30))
        return AdapterPool(model, self.open(), roots=[str(self.root)], **options)

    def open(self) -> Checkpoint:
        """Open the base."""
        return open_checkpoint(self.base, cache=None)


def build_zoo(
    folder: Path, make: Callable[[], PreTrainedModel], configs: Mapping[str, Mapping[str, Any]]
) -> Zoo:
    """Save the base and one adapter with random values for each config, all by PEFT."""
    save_base(make(), folder / "base")
    for number, (name, config) in enumerate(configs.items()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft = get_peft_model(make(), LoraConfig(**{"r": 4, "lora_alpha": 6, **config}))
            randomise(peft)
            shift(peft, number)
            peft.save_pretrained(str(folder / "root" / name), save_embedding_layers=False)
    return Zoo(make, folder / "base", folder / "root")


def shift(peft: nn.Module, number: int) -> None:
    """Make the values of this adapter different from the others'."""
    for name, parameter in peft.named_parameters():
        if "lora_" in name or "modules_to_save" in name or "trainable_tokens" in name:
            parameter.data.add_(torch.randn(parameter.shape) * 0.05 * number)
            if "lora_magnitude" in name:
                parameter.data.abs_()


def some_ids(rows: int, length: int = 7, seed: int = 0) -> Tensor:
    """Return random tokens."""
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def applied(pool: AdapterPool, model: nn.Module, names: Sequence[str | None], ids: Tensor) -> Tensor:
    """Return the model's logits with the adapter of each row applied."""
    with pool.lease(names, "test") as lease, pool.apply(lease.rows), torch.no_grad():
        logits: Tensor = model(ids).logits
    return logits
