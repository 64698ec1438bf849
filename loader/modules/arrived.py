"""Which tensors of a checkpoint are here already. Imports no torch."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from loadstone.loader.files.local import LocalSource

if TYPE_CHECKING:
    from loadstone.loader.checkpoint import Checkpoint


def arrived(checkpoint: "Checkpoint", names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that can be used without waiting: on this machine's own disk, all of them."""
    if isinstance(checkpoint.source, LocalSource):
        return list(names)
    return [name for name in names if checkpoint.is_ready(name)]
