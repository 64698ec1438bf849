"""Model weights sooner and for less memory: lazy, verified checkpoints and hot-loaded LoRA adapters."""

from typing import TYPE_CHECKING

from loadstone.errors import LoadstoneError
from loadstone.settings import Settings

if TYPE_CHECKING:
    from loadstone.loader.checkpoint import Checkpoint
    from loadstone.loader.checkpoint import open_checkpoint as open  # noqa: A004  the name people call
    from loadstone.loader.modules.load import load_model

__version__ = "0.1.0"
__all__ = ["Checkpoint", "LoadstoneError", "Settings", "__version__", "load_model", "open"]

# Resolved on first use: `import loadstone` must cost milliseconds, and never torch.
_LAZY = {
    "Checkpoint": ("loadstone.loader.checkpoint", "Checkpoint"),
    "load_model": ("loadstone.loader.modules.load", "load_model"),
    "open": ("loadstone.loader.checkpoint", "open_checkpoint"),
}


def __getattr__(name: str) -> object:
    import importlib  # noqa: PLC0415

    if name not in _LAZY:
        raise AttributeError(f"module 'loadstone' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
