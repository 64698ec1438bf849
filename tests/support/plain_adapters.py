"""The smallest adapters over the smallest base, for what is about holding them and not about their maths."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from loadstone.adapters.fit import Updates
from loadstone.adapters.pool import AdapterPool
from loadstone.adapters.reader import read_adapter
from loadstone.adapters.updates import LowRank
from loadstone.adapters.versions import Readable
from loadstone.settings import Settings

WIDTH = 8
RANK = 2
FILE_BYTES = 2 * 2 * RANK * WIDTH * 4
"""Bytes of one adapter: A and B of two layers, in fp32."""


class Base(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Run both."""
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


def write(root: Path, name: str, seed: int) -> Path:
    """Write an adapter whose values depend on ``seed``; an older one of that name is replaced."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in ("first", "second"):
        tensors[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(RANK, WIDTH, generator=generator)
        tensors[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(WIDTH, RANK, generator=generator)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["first", "second"]}
    save_file(tensors, folder / "new.safetensors")
    (folder / "new.safetensors").replace(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def answer(model: nn.Module, folder: Path | None, x: Tensor) -> Tensor:
    """Return what the base gives with the adapter in ``folder``, worked out by hand from its dense update."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if folder is not None:
        adapter = read_adapter(folder, base=None, cache=None)
        for layer, (update, *_) in adapter.updates.items():
            assert isinstance(update, LowRank)
            weights[f"{layer}.weight"] += update.scale * (update.b @ update.a)
        adapter.close()
    out: Tensor = torch.func.functional_call(model, weights, (x,))
    return out.detach()


class Reads:
    """Reads adapters as the pool does, counts, and can be held up."""

    def __init__(self) -> None:
        self.count = 0
        self.addresses: list[str] = []
        self.closed = 0
        self._opened = 0
        self.gate: threading.Event | None = None
        self.started = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, address: str) -> Readable:
        """Read one."""
        with self._lock:
            self.count += 1
            self.addresses.append(address)
        self.started.set()
        if self.gate is not None:
            assert self.gate.wait(20)
        adapter = read_adapter(address, base=None, cache=None)
        with self._lock:
            self._opened += 1
        return _Counted(adapter, self._close)

    def _close(self) -> None:
        with self._lock:
            self.closed += 1

    @property
    def open(self) -> int:
        """How many adapters have not been closed."""
        return self._opened - self.closed


class _Counted:
    def __init__(self, adapter: Readable, closed: Callable[[], None]) -> None:
        self._adapter = adapter
        self._closed = closed
        self.digest, self.nbytes, self.warnings = adapter.digest, adapter.nbytes, adapter.warnings

    @property
    def updates(self) -> Updates:
        return self._adapter.updates

    def is_altered(self) -> bool:
        return self._adapter.is_altered()

    def close(self) -> None:
        self._adapter.close()
        self._closed()


def pool_over(model: nn.Module, root: Path, read: Reads | None = None, **options: object) -> AdapterPool:
    """Return a pool whose root is ``root``."""
    settings = options.pop("settings", None) or Settings(cache_dir="none", adapter_bytes=1 << 20)
    return AdapterPool(model, None, roots=[str(root)], read=read or Reads(), settings=settings, **options)  # type: ignore[arg-type]


def run(pool: AdapterPool, model: nn.Module, names: list[str | None], x: Tensor) -> Tensor:
    """Return the model's output with the adapter of each row."""
    with pool.lease(names, "run") as lease, pool.apply(lease.rows), torch.no_grad():
        out: Tensor = model(x)
    return out


def inputs(rows: int = 1) -> Tensor:
    """Return an input of that many rows."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(7))
