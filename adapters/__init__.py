"""LoRA adapters: read, checked against the base, versioned, attached over the shared base."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadstone.adapters.adapter import Adapter
    from loadstone.adapters.check import CheckReport, check_adapter
    from loadstone.adapters.merge import merge_into
    from loadstone.adapters.pool import AdapterPool
    from loadstone.adapters.reader import read_adapter
    from loadstone.adapters.stamp import record_base

__all__ = [
    "Adapter",
    "AdapterPool",
    "CheckReport",
    "check_adapter",
    "merge_into",
    "read_adapter",
    "record_base",
]

# Resolved on first use: rules for names and roots are needed where torch is not.
_LAZY = {
    "Adapter": "loadstone.adapters.adapter",
    "AdapterPool": "loadstone.adapters.pool",
    "CheckReport": "loadstone.adapters.check",
    "check_adapter": "loadstone.adapters.check",
    "merge_into": "loadstone.adapters.merge",
    "read_adapter": "loadstone.adapters.reader",
    "record_base": "loadstone.adapters.stamp",
}


def __getattr__(name: str) -> object:
    import importlib  # noqa: PLC0415

    if name not in _LAZY:
        raise AttributeError(f"module 'loadstone.adapters' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
