"""An adapter that has been read and checked: its updates, and what they make of the base.

Ownership: an `Adapter` is immutable and may be used by any thread. Its tensors are views of its file, made
when its updates are looked at, and stay valid after `close`.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch

from loadstone.adapters import dense
from loadstone.adapters.base import index_of
from loadstone.adapters.config import AdapterConfig
from loadstone.adapters.layout import FileUpdates
from loadstone.adapters.updates import EmbeddingLowRank, ExpertsLowRank, LowRank, Replacement, Update
from loadstone.errors import AdapterBaseError, AdapterFormatError
from loadstone.loader.checkpoint import Checkpoint
from loadstone.loader.files.local import LocalBlob
from loadstone.loader.source import Blob


class Adapter:
    """One adapter, read and checked.

    Parameters are for `read_adapter`, which makes it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        updates: FileUpdates,
        warnings: Sequence[str],
        digest: str,
        base: Checkpoint | None,
        *,
        owns_base: bool,
        blob: Blob,
    ) -> None:
        self._checkpoint = checkpoint
        self._blob = blob
        self._base = base
        self._owns_base = owns_base
        self.updates = updates
        self.warnings: tuple[str, ...] = tuple(warnings)
        self.digest = digest
        self.source = checkpoint.source.name

    @property
    def config(self) -> AdapterConfig:
        """What it says about itself."""
        return self.updates.layout.config

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.updates.layout.nbytes

    def is_altered(self) -> bool:
        """Say whether its file was overwritten in place since, so that its tensors are not what was read."""
        return isinstance(self._blob, LocalBlob) and self._blob.is_altered()

    def __repr__(self) -> str:
        return f"<Adapter {self.source}: {len(self.updates)} modules, {self.nbytes} bytes>"

    @property
    def base(self) -> Checkpoint | None:
        """The base it was checked against."""
        return self._base

    def parameters(self, module: str) -> tuple[str, ...]:
        """Return which parameters of ``module`` the adapter changes, by their names inside it."""
        return tuple(dict.fromkeys(name for update in self._updates_of(module) for name in _changes(update)))

    def updated(self, module: str, base: Checkpoint | None = None) -> dict[str, torch.Tensor]:
        """Return the parameters of ``module`` that the adapter changes, as they become.

        Parameters
        ----------
        module
            A key of `updates`.
        base
            The base, by default the one that the adapter was checked against.

        Raises
        ------
        AdapterFormatError
            The adapter has no update for ``module``.
        AdapterBaseError
            There is no base, or it lacks a parameter.
        """
        changed: dict[str, torch.Tensor] = {}

        def current(name: str) -> torch.Tensor:
            return changed[name] if name in changed else self._parameter(module, name, base)

        for update in self._updates_of(module):
            changed |= dense.updated(update, current)
        return changed

    def delta(self, module: str, parameter: str | None = None) -> torch.Tensor:
        """Return what the adapter adds to one parameter, dense, in the base parameter's shape.

        Parameters
        ----------
        module
            A key of `updates`.
        parameter
            The parameter's name inside the module; by default ``weight``, or the only one there is.

        Raises
        ------
        AdapterFormatError
            The adapter has no update for it.
        AdapterBaseError
            It depends on the base (DoRA, replaced modules and rows, experts), and there is none.
        """
        updates = self._updates_of(module)
        if len(updates) == 1 and parameter in (None, "weight") and _adds_only(updates[0]):
            # Not the difference of two sums: that would round twice.
            assert isinstance(updates[0], LowRank | EmbeddingLowRank)
            return dense.low_rank(updates[0], self._compute_dtype(module, updates[0].a))
        for update in updates:
            if isinstance(update, ExpertsLowRank) and parameter in (None, update.parameter):
                if parameter is None and len(updates) > 1:
                    break
                weight = self._parameter(module, update.parameter, None)
                return dense.low_rank(update, dense.compute_dtype(weight.dtype)).reshape(weight.shape)
        changed = self.updated(module)
        name = parameter or ("weight" if len(changed) > 1 else next(iter(changed)))
        if name not in changed:
            raise AdapterFormatError(
                f"{self.source}: module {module!r} has no update of {name!r}, only of {', '.join(changed)}"
            )
        return changed[name] - self._parameter(module, name, None)

    def close(self) -> None:
        """Let go of files. Tensors of the updates stay valid."""
        self._checkpoint.close()
        if self._owns_base and self._base is not None:
            self._base.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _updates_of(self, module: str) -> tuple[Update, ...]:
        updates = self.updates.get(module)
        if updates is None:
            some = next(iter(self.updates), "none")
            raise AdapterFormatError(
                f"{self.source}: no update for module {module!r} among its {len(self.updates)}, such as"
                f" {some!r}"
            )
        return updates

    def _parameter(self, module: str, name: str, base: Checkpoint | None) -> torch.Tensor:
        base = self._base if base is None else base
        if base is None:
            raise AdapterBaseError(
                f"{self.source}: the result for module {module!r} depends on the base; read it with base="
            )
        stored = index_of(base).stored(f"{module}.{name}")
        if stored is None:
            raise AdapterBaseError(
                f"{self.source}: the base {base.name} stores no {module}.{name} to update; if the model has"
                " it, it is converted while it is loaded: save the loaded model, and use that as the base"
            )
        return base[stored]

    def _compute_dtype(self, module: str, own: torch.Tensor) -> torch.dtype:
        weight = own if self._base is None else self._parameter(module, "weight", None)
        return dense.compute_dtype(weight.dtype)


def _adds_only(update: Update) -> bool:
    """Say whether an update adds the same to its weight whatever the weight is."""
    return isinstance(update, LowRank | EmbeddingLowRank) and update.magnitude is None


def _changes(update: Update) -> tuple[str, ...]:
    """Return the names of the parameters that an update changes."""
    if isinstance(update, Replacement):
        return tuple(update.parameters)
    if isinstance(update, ExpertsLowRank):
        return (update.parameter,)
    return ("weight", "bias") if isinstance(update, LowRank) and update.bias is not None else ("weight",)
