"""What an update does to the output of its module: one class for each kind, in PEFT's order of operations.

An operation is applied to some rows of a batch: ``operation(module, x, result)`` takes the module's input
and output for those rows and returns the new output. A `Substitute` stands in for the module instead.

Precision: an update is computed in the widest of its own dtypes and the base weight's, and the result
returns to the module's output dtype at the end. So a bf16 adapter over a bf16 base is computed in bf16 from
the mapped file, and an adapter as wide as its base or wider is never copied. Only one that is narrower (bf16
over an fp32 base), or whose base is on another device, gets a copy when it is attached, which `copy_bytes`
counts and budgets include.

What depends on the base's bytes (DoRA's norm) is computed at the first use, never before, because they may
not have arrived. Operations are used by one thread at a time: whoever holds the pool's forward lock.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812  the name everybody gives it
from torch import Tensor, nn

from loadstone.adapters.updates import (
    EmbeddingLowRank,
    ExpertsLowRank,
    LowRank,
    Replacement,
    TokenRows,
    Update,
)


class Operation(Protocol):
    """Adds an update to the output of a module."""

    def __call__(self, module: nn.Module, x: Tensor, result: Tensor) -> Tensor:
        """Return the module's new output for the rows ``x``, given its own output ``result``."""
        ...


class Substitute(Protocol):
    """Stands in for a module's own forward."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return what the module would, had it the adapter's parameters."""
        ...


def copy_bytes(update: Update, module: nn.Module) -> int:
    """Return how many bytes `attach`ing ``update`` to ``module`` takes beyond the adapter's own file."""
    if isinstance(update, ExpertsLowRank):
        # The sums with the base live for one call.
        device = getattr(module, update.parameter).device
        return _converted([(tensor, device, tensor.dtype) for tensor in update.tensors])
    if isinstance(update, Replacement):
        own = tensors_of(module)
        pairs = [(tensor, own[name].device, own[name].dtype) for name, tensor in update.parameters.items()]
        return _converted(pairs)
    if isinstance(update, TokenRows):
        weight = weight_of(module)
        return _converted([(update.values, weight.device, weight.dtype)])
    device, dtype = _kind(update, module)
    norms = 0 if update.magnitude is None else update.magnitude.numel() * dtype.itemsize
    return norms + _converted([(tensor, device, dtype) for tensor in update.tensors])


def _converted(pairs: Iterable[tuple[Tensor, torch.device, torch.dtype]]) -> int:
    return sum(
        tensor.numel() * dtype.itemsize
        for tensor, device, dtype in pairs
        if tensor.dtype != dtype or tensor.device != device
    )


def weight_of(module: nn.Module) -> Tensor:
    """Return the module's ``weight``, which may still be waiting for its bytes."""
    weight = module._parameters.get("weight")
    if weight is None:
        other = module.weight  # computed by a parametrisation
        assert isinstance(other, Tensor)
        return other
    return weight


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers, by their names inside it."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is stored ``[in, out]``: transformers' ``Conv1D``."""
    return type(module).__name__ == "Conv1D"


class Linear:
    """LoRA or DoRA on a linear layer.

    Attributes
    ----------
    a, b, scale, bias : torch.Tensor, torch.Tensor, float, torch.Tensor or None
        As in `LowRank`, in the dtype that is computed in.
    """

    __slots__ = ("_factor", "_magnitude", "a", "b", "bias", "scale")

    def __init__(self, update: LowRank, module: nn.Module) -> None:
        device, dtype = _kind(update, module)
        self.a = _cast(update.a, device, dtype)
        self.b = _cast(update.b, device, dtype)
        self.scale = update.scale
        self.bias = None if update.bias is None else _cast(update.bias, device, dtype)
        self._magnitude = None if update.magnitude is None else _cast(update.magnitude, device, dtype)
        self._factor: Tensor | None = None

    @property
    def is_dora(self) -> bool:
        """Whether it has a magnitude, and so needs `factor`."""
        return self._magnitude is not None

    @property
    def nbytes(self) -> int:
        """Bytes of ``a``, ``b`` and ``bias``."""
        return sum(tensor.nbytes for tensor in (self.a, self.b, self.bias) if tensor is not None)

    def __call__(self, module: nn.Module, x: Tensor, result: Tensor) -> Tensor:
        """Add ``scale * (b a) x``; with DoRA, rescale the sum."""
        update = F.linear(F.linear(x.to(self.a.dtype), self.a), self.b, self.bias)
        factor = self.factor(module) if self._magnitude is not None else None
        return combine(module, result, update, self.scale, factor)

    def factor(self, module: nn.Module) -> Tensor:
        """Return DoRA's ``magnitude / norm``, ``[out]``, computed once from the base's weight."""
        if self._factor is not None:
            return self._factor
        assert self._magnitude is not None
        with lasting():
            eye = torch.eye(self.a.shape[1], dtype=self.a.dtype, device=self.a.device)
            delta = F.linear(F.linear(eye, self.a), self.b, self.bias).T
            weight = weight_of(module).to(self.a.dtype)
            weight = (weight.T if is_transposed(module) else weight) + self.scale * delta
            self._factor = self._magnitude / torch.linalg.norm(weight, dim=1).to(weight.dtype)
            return self._factor


@contextmanager
def lasting() -> Iterator[None]:
    """Make tensors that can be kept for later calls, even when this one is in inference mode."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def combine(
    module: nn.Module, result: Tensor, update: Tensor, scale: float | Tensor, factor: Tensor | None
) -> Tensor:
    """Return ``result`` with a low-rank ``update`` added, as PEFT's ``Linear`` and ``DoraLinear`` do it."""
    if factor is None:
        new = result + _scaled(update, scale)
    else:
        bias = module.bias
        own = result - bias if isinstance(bias, Tensor) else result
        new = result + ((factor - 1) * own + _scaled(factor * update, scale))
    return new.to(result.dtype)


def _scaled(update: Tensor, scale: float | Tensor) -> Tensor:
    # A tensor of scales is fp32, so that its product with a bf16 update is rounded once, as a float's is.
    return (update * scale).to(update.dtype)


class Embedding:
    """LoRA or DoRA on an embedding."""

    __slots__ = ("_a", "_b", "_factor", "_magnitude", "_scale")

    def __init__(self, update: EmbeddingLowRank, module: nn.Module) -> None:
        device, dtype = _kind(update, module)
        self._a = _cast(update.a, device, dtype).T
        self._b = _cast(update.b, device, dtype).T
        self._scale = update.scale
        self._magnitude = None if update.magnitude is None else _cast(update.magnitude, device, dtype)
        self._factor: Tensor | None = None

    def __call__(self, module: nn.Module, x: Tensor, result: Tensor) -> Tensor:
        """Add the rows of ``(scale b a).T`` that ``x`` names."""
        update = F.embedding(x, self._a) @ self._b
        stretch = _embed_scale(module)
        if self._magnitude is None:
            update = update * self._scale
            new = result + (update if stretch is None else update * stretch.to(update.dtype))
        else:
            factor = self._get_factor(module)
            update = factor * update * self._scale
            new = factor * result + (update if stretch is None else update * stretch.to(update.dtype))
        return new.to(result.dtype)

    def _get_factor(self, module: nn.Module) -> Tensor:
        if self._factor is not None:
            return self._factor
        assert self._magnitude is not None
        with lasting():
            weight = weight_of(module).T + self._scale * (self._a @ self._b).T
            self._factor = self._magnitude / torch.linalg.norm(weight, dim=1).to(weight.dtype)
            return self._factor


class Tokens:
    """Rows of an embedding replaced; on a linear layer (a tied head), the same rows of its weight.

    PEFT's forward of such a head leaves out the head's own bias, with which the adapter was trained, so this
    one does too.
    """

    __slots__ = ("_lookup", "_rows", "_values")

    def __init__(self, update: TokenRows, module: nn.Module) -> None:
        values = update.values.to(weight_of(module).device, weight_of(module).dtype)
        self._rows, order = torch.tensor(update.rows, device=values.device).sort()
        in_order = bool((order[1:] > order[:-1]).all())
        self._values = values if in_order else values[order]
        self._lookup = isinstance(module, nn.Embedding)

    def __call__(self, module: nn.Module, x: Tensor, result: Tensor) -> Tensor:
        """Put the new rows, or the outputs that they give, in place of the base's."""
        if not self._lookup:
            bias = module.bias
            own = result - bias if isinstance(bias, Tensor) else result
            return own.index_copy(-1, self._rows, F.linear(x, self._values))
        position = torch.searchsorted(self._rows, x).clamp_(max=len(self._rows) - 1)
        found = (self._rows[position] == x).unsqueeze(-1)
        new = F.embedding(position, self._values)
        stretch = _embed_scale(module)
        return torch.where(found, new if stretch is None else new * stretch.to(new.dtype), result)


class Replaced:
    """A module with the adapter's parameters in place of its own; it shares everything else.

    Attributes
    ----------
    pairs : list of pairs of torch.nn.Module
        The module and those inside that have parameters or buffers themselves, each with its clone.
    """

    __slots__ = ("_clone", "_module", "pairs")

    def __init__(self, clone: nn.Module, module: nn.Module) -> None:
        self._clone = clone
        self._module = module
        self.pairs = [
            (module.get_submodule(name), part)
            for name, part in clone.named_modules()
            if part._parameters or part._buffers
        ]

    @classmethod
    def of(cls, update: Replacement, module: nn.Module) -> "Replaced":
        """Put an adapter's parameters in place of a module's."""
        own = tensors_of(module)
        values = update.parameters.items()
        given = {name: value.to(own[name].device, own[name].dtype) for name, value in values}
        return cls(clone_with(module, given), module)

    def parts(self) -> dict[str, "Replaced"]:
        """Return the modules inside that have parameters themselves, by their names inside."""
        return {
            name: Replaced(part, self._module.get_submodule(name))
            for name, part in self._clone.named_modules()
            if part._parameters
        }

    @property
    def is_layer(self) -> bool:
        """Whether it is a plain layer, which nobody computes with but by calling it."""
        layers = nn.Linear | nn.Embedding | nn.LayerNorm
        return (
            isinstance(self._clone, layers)
            or is_transposed(self._clone)
            or (type(self._clone).__name__.endswith("Norm"))
        )

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the clone's forward."""
        return self._clone.forward(*args, **kwargs)


class Experts:
    """A module some of whose parameters get a low-rank update, added at each use, as PEFT does."""

    __slots__ = ("_module", "_updates")

    def __init__(self, updates: Iterable[ExpertsLowRank], module: nn.Module) -> None:
        # Only moved: its sum with the base is converted at each call, as the base's dtype says.
        self._updates = tuple(_beside(module, update) for update in updates)
        self._module = module

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the module with ``W + scale * delta``, which lives as long as the call."""
        sums: dict[str, Tensor] = {}
        for update in self._updates:
            base = sums.get(update.parameter, getattr(self._module, update.parameter))
            sums[update.parameter] = _add_experts(base, update)
        return clone_with(self._module, sums).forward(*args, **kwargs)


def _beside(module: nn.Module, update: ExpertsLowRank) -> ExpertsLowRank:
    device = getattr(module, update.parameter).device
    return replace(update, a=update.a.to(device), b=update.b.to(device))


def _add_experts(base: Tensor, update: ExpertsLowRank) -> Tensor:
    if update.experts == 1 and base.dim() == 2:
        # Rounded once, to the base's dtype: an adapter narrower than its base must not make the sum narrow.
        wide = torch.promote_types(torch.promote_types(update.a.dtype, update.b.dtype), torch.float32)
        delta = update.b.to(wide) @ update.a.to(wide) * update.scale
        return base + delta.to(base.dtype)
    a = update.a.reshape(update.experts, -1, update.a.shape[-1])
    b = update.b.reshape(update.b.shape[0], -1, update.experts).permute(2, 0, 1)
    left, right = (b, a) if update.orientation == "out_in" else (a.transpose(1, 2), b.transpose(1, 2))
    return torch.baddbmm(base, left.to(base.dtype), right.to(base.dtype), alpha=update.scale)


def clone_with(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Return a shallow copy of ``module`` with ``tensors`` for what has those (dotted) names inside it.

    Nothing is copied but the objects that lead to them; ``module`` itself is not changed.
    """
    clone = module.__class__.__new__(module.__class__)
    clone.__dict__.update(module.__dict__)
    clone.__dict__.pop(
        "forward", None
    )  # one set on the instance would compute with the original's parameters
    clone.__dict__["_parameters"] = dict(module._parameters)
    if not module._buffers.keys().isdisjoint(tensors):
        clone.__dict__["_buffers"] = dict(module._buffers)
    clone.__dict__["_modules"] = dict(module._modules)
    inner: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        head, _, rest = name.partition(".")
        if rest:
            inner.setdefault(head, {})[rest] = tensor
        else:
            clone.__dict__["_buffers" if head in module._buffers else "_parameters"][head] = tensor
    for head, below in inner.items():
        child = module._modules[head]
        assert child is not None
        clone.__dict__["_modules"][head] = clone_with(child, below)
    return clone


def _kind(update: LowRank | EmbeddingLowRank, module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return where, and in which dtype, ``update`` is computed."""
    weight = weight_of(module)
    dtype, a, b = weight.dtype, update.a.dtype, update.b.dtype
    if not dtype == a == b:
        dtype = torch.promote_types(torch.promote_types(a, b), dtype)
    return weight.device, dtype


def _cast(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Hundreds of tensors for each adapter, nearly all of them right: asking `to` costs ten times the look.
    return tensor if tensor.dtype == dtype and tensor.device == device else tensor.to(device, dtype)


def _embed_scale(module: nn.Module) -> Tensor | None:
    """Return what some embeddings (Gemma's) multiply their output by."""
    scale = getattr(module, "embed_scale", None)
    return torch.tensor(scale) if isinstance(scale, int | float) else scale
