"""Handing out tensors while they arrive."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from loadstone.loader.tensors.selection import Order, in_order

if TYPE_CHECKING:
    import torch

    from loadstone.loader.checkpoint import Checkpoint

_LOOK = 256  # how many tensors ahead are asked whether they have arrived
_PAUSE = 0.005  # seconds between two looks


def stream(
    checkpoint: "Checkpoint", names: Sequence[str], order: Order, *, copy: bool
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield (name, tensor) in ``order``, while everything is being brought here."""
    infos = [checkpoint.info(name) for name in names]
    pending = in_order(infos, order)
    handle = checkpoint.prefetch_names(pending)
    read = checkpoint.copy if copy else checkpoint.__getitem__
    try:
        if order != "arrival":
            for name in pending:
                yield name, read(name)
            return
        while pending:
            ready = [name for name in pending[:_LOOK] if checkpoint.is_ready(name)]
            if not ready and handle.done():
                ready = pending[:1]  # reading it brings it, or raises what stopped the rest
            for name in ready:
                yield name, read(name)
            taken = set(ready)
            pending = [name for name in pending if name not in taken]
            if not ready:
                handle.wait(_PAUSE)
    finally:
        handle.cancel()
