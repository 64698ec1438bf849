"""What one adapter does to one module of its base: plain, frozen data.

The tensors are views of the adapter's own file, in the file's dtype, and must never be written. An update
is shared by every thread without a lock. Updates compare by identity: comparing tensors would be slow and
ambiguous.

In the shapes below ``r`` is the rank, ``W`` the weight of the base.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Orientation = Literal["in_out", "out_in"]
"""How one expert's matrix is stored in a fused parameter: ``[in, out]`` or ``[out, in]``."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """LoRA, or DoRA when ``magnitude`` is there, on a linear layer.

    Attributes
    ----------
    a, b : torch.Tensor
        ``[r, in]`` and ``[out, r]``.
    scale : float
        What ``b @ a`` is multiplied by.
    magnitude : torch.Tensor or None
        DoRA's length for each of the ``out`` rows.
    bias : torch.Tensor or None
        ``[out]``, added to ``b``'s output before the scale (PEFT's ``lora_bias``).
    transposed : bool
        ``W`` is stored ``[in, out]``, as transformers' ``Conv1D`` does.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    transposed: bool = False

    @property
    def rank(self) -> int:
        """The rank ``r``."""
        return self.a.shape[0]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor of the update."""
        return tuple(t for t in (self.a, self.b, self.magnitude, self.bias) if t is not None)


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingLowRank:
    """LoRA, or DoRA when ``magnitude`` is there, on an embedding whose ``W`` is ``[vocab, dim]``.

    Attributes
    ----------
    a, b : torch.Tensor
        ``[r, vocab]`` and ``[dim, r]``.
    scale : float
        What ``(b @ a).T`` is multiplied by.
    magnitude : torch.Tensor or None
        DoRA's length for each of the ``dim`` columns.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """The rank ``r``."""
        return self.a.shape[0]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor of the update."""
        return (self.a, self.b) if self.magnitude is None else (self.a, self.b, self.magnitude)


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """The adapter's own copy of a whole module, used instead of the base's (``modules_to_save``).

    Attributes
    ----------
    parameters : Mapping[str, torch.Tensor]
        Every parameter of the module, and every buffer that is stored with it, by its name inside it:
        ``weight``, ``bias``, ``dense.weight``.
    """

    parameters: Mapping[str, torch.Tensor]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor of the update."""
        return tuple(self.parameters.values())


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """New rows for some tokens of an embedding, or of a head tied to it (``trainable_token_indices``).

    Attributes
    ----------
    rows : tuple[int, ...]
        Which rows of ``W``, no row twice.
    values : torch.Tensor
        ``[len(rows), dim]``: what stands in them.
    """

    rows: tuple[int, ...]
    values: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor of the update."""
        return (self.values,)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsLowRank:
    """LoRA on a parameter that is not a module's ``weight`` (``target_parameters``), often fused experts.

    Attributes
    ----------
    parameter : str
        The parameter's name inside its module, such as ``gate_up_proj``.
    a, b : torch.Tensor
        ``[experts * r, in]``, each expert's rows together, and ``[out, r * experts]``, in which the
        experts alternate: column ``k * experts + e`` belongs to expert ``e``.
    scale : float
        What ``b @ a`` is multiplied by.
    experts : int
        How many experts the parameter holds; 1 when it is a plain matrix ``[out, in]``.
    orientation : str
        ``in_out`` when ``W`` is ``[experts, in, out]``, ``out_in`` when it is ``[experts, out, in]``.
    """

    parameter: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    experts: int
    orientation: Orientation

    @property
    def rank(self) -> int:
        """The rank ``r`` of one expert."""
        return self.a.shape[0] // self.experts

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor of the update."""
        return (self.a, self.b)


Update = LowRank | EmbeddingLowRank | Replacement | TokenRows | ExpertsLowRank
"""One way to change a module; a module may have several, applied in order."""


def over(update: Update, tensor: Callable[[torch.Tensor], torch.Tensor]) -> Update:
    """Return the same update of other tensors: each is replaced by what ``tensor`` makes of it."""
    if isinstance(update, LowRank):
        magnitude = None if update.magnitude is None else tensor(update.magnitude)
        bias = None if update.bias is None else tensor(update.bias)
        a, b = tensor(update.a), tensor(update.b)
        return LowRank(a, b, update.scale, magnitude, bias, update.transposed)
    if isinstance(update, EmbeddingLowRank):
        magnitude = None if update.magnitude is None else tensor(update.magnitude)
        return EmbeddingLowRank(tensor(update.a), tensor(update.b), update.scale, magnitude)
    if isinstance(update, Replacement):
        return Replacement({name: tensor(own) for name, own in update.parameters.items()})
    if isinstance(update, TokenRows):
        return TokenRows(update.rows, tensor(update.values))
    a, b = tensor(update.a), tensor(update.b)
    return ExpertsLowRank(update.parameter, a, b, update.scale, update.experts, update.orientation)
