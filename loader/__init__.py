"""Reads checkpoints: headers, byte ranges, stores, the node cache, tensors as views."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadstone.loader.tensors.compat import safe_open

__all__ = ["safe_open"]


def __getattr__(name: str) -> object:
    if name != "safe_open":
        raise AttributeError(f"module 'loadstone.loader' has no attribute {name!r}")
    from loadstone.loader.tensors.compat import safe_open  # noqa: PLC0415  resolved on first use

    return safe_open
