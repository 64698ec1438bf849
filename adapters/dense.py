"""Updates as dense tensors: what they add, and the parameters that result. Pure, no I/O.

Order of operations and dtypes are PEFT's (0.21): an adapter computes in the base's dtype, or in float32 when
the base is of half precision, and the sum is rounded to the base's dtype once, at the end.
"""

from collections.abc import Callable
from functools import singledispatch

import torch

from loadstone.adapters.updates import (
    EmbeddingLowRank,
    ExpertsLowRank,
    LowRank,
    Replacement,
    TokenRows,
    Update,
)

Parameters = dict[str, torch.Tensor]
Base = Callable[[str], torch.Tensor]
"""Gives a parameter of the module by its name inside it."""


def compute_dtype(base: torch.dtype) -> torch.dtype:
    """Return the dtype that an adapter over a base of dtype ``base`` computes in."""
    return torch.float32 if base in (torch.float16, torch.bfloat16) else base


def low_rank(update: LowRank | EmbeddingLowRank | ExpertsLowRank, dtype: torch.dtype) -> torch.Tensor:
    """Return the dense product of ``update``, scaled, in the shape that its weight is stored in.

    For DoRA it is the part before the rows are set to their length.
    """
    a, b = update.a.to(dtype), update.b.to(dtype)
    if isinstance(update, ExpertsLowRank):
        return _experts(update, a, b) * update.scale
    product = b @ a
    transposed = isinstance(update, EmbeddingLowRank) or update.transposed
    return (product.T if transposed else product) * update.scale


def _experts(update: ExpertsLowRank, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if update.experts == 1:
        product = b @ a
        return product.T if update.orientation == "in_out" else product
    stacked_a = a.reshape(update.experts, -1, a.shape[-1])
    stacked_b = b.reshape(b.shape[0], -1, update.experts)
    form = "o r e, e r i -> e i o" if update.orientation == "in_out" else "o r e, e r i -> e o i"
    return torch.einsum(form, stacked_b, stacked_a)


@singledispatch
def updated(update: Update, base: Base) -> Parameters:
    """Return the parameters that ``update`` changes, as they become, in the base's dtype.

    Parameters
    ----------
    update
        What happens to the module.
    base
        Gives the base's parameters; they are not written.
    """
    raise NotImplementedError(type(update).__name__)


@updated.register
def _(update: LowRank, base: Base) -> Parameters:
    weight = base("weight")
    dtype = compute_dtype(weight.dtype)
    delta = low_rank(update, dtype)
    changed = {"weight": _added(weight, delta, update.magnitude, rows=not update.transposed)}
    if update.bias is not None:
        bias = base("bias")
        changed["bias"] = (bias + update.bias.to(compute_dtype(bias.dtype)) * update.scale).to(bias.dtype)
    return changed


@updated.register
def _(update: EmbeddingLowRank, base: Base) -> Parameters:
    weight = base("weight")
    delta = low_rank(update, compute_dtype(weight.dtype))
    if update.magnitude is None:
        # PEFT rounds an embedding's delta before it adds it, unlike a linear layer's.
        delta = delta.to(weight.dtype)
    return {"weight": _added(weight, delta, update.magnitude, rows=False)}


@updated.register
def _(update: ExpertsLowRank, base: Base) -> Parameters:
    weight = base(update.parameter)
    delta = low_rank(update, compute_dtype(weight.dtype)).reshape(weight.shape)
    return {update.parameter: weight + delta.to(weight.dtype)}


@updated.register
def _(update: Replacement, base: Base) -> Parameters:
    return {name: value.to(base(name).dtype) for name, value in update.parameters.items()}


@updated.register
def _(update: TokenRows, base: Base) -> Parameters:
    weight = base("weight")
    return {"weight": weight.index_copy(0, torch.tensor(update.rows), update.values.to(weight.dtype))}


def _added(
    weight: torch.Tensor, delta: torch.Tensor, magnitude: torch.Tensor | None, *, rows: bool
) -> torch.Tensor:
    """Return ``weight + delta``; with DoRA, each row or column set to its length in ``magnitude``."""
    total = weight + delta
    if magnitude is None:
        return total.to(weight.dtype)
    vectors = total if rows else total.T
    factor: torch.Tensor = magnitude.to(delta.dtype) / torch.linalg.norm(vectors, dim=1)
    factor = factor.view(-1, 1) if rows else factor.view(1, -1)
    return (factor * total).to(weight.dtype)
