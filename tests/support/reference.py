"""The format's reference implementation as a judge: what does safetensors make of these bytes?"""

from collections.abc import Callable
from typing import Any

import safetensors

Content = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Tensor name to dtype, shape and bytes."""

_deserialize: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = safetensors.deserialize


def reference_content(data: bytes) -> Content | None:
    """Return the tensors that the reference reads in a file; ``None`` when it refuses the file."""
    try:
        items = _deserialize(data)
    except safetensors.SafetensorError:
        return None
    return {name: (item["dtype"], tuple(item["shape"]), bytes(item["data"])) for name, item in items}
