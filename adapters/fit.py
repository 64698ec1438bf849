"""Checks an adapter's updates against the modules of a model, and turns them into operations.

Neither reads or writes a base weight: only shapes, dtypes and module types are looked at, so an adapter can
be checked and attached while the base's bytes are still arriving.
"""

import re
from collections.abc import Mapping, Sequence

from torch import nn

from loadstone.adapters.compute import (
    Embedding,
    Experts,
    Linear,
    Operation,
    Replaced,
    Tokens,
    copy_bytes,
    is_transposed,
    tensors_of,
    weight_of,
)
from loadstone.adapters.steps import Change, Changes
from loadstone.adapters.updates import (
    EmbeddingLowRank,
    ExpertsLowRank,
    LowRank,
    Replacement,
    TokenRows,
    Update,
)
from loadstone.errors import AdapterBaseError, AdapterError, AdapterUnsupportedError

Modules = Mapping[str, nn.Module]
"""The model's modules by name."""

Updates = Mapping[str, Sequence[Update]]
"""An adapter's updates by module, in order."""

_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


def check(modules: Modules, updates: Updates) -> int:
    """Make sure that every update can be applied to its module.

    Returns
    -------
    int
        Bytes that attaching takes beyond the adapter's own file.

    Raises
    ------
    AdapterBaseError
        The model lacks a module, or a shape differs.
    AdapterUnsupportedError
        A module is of a kind whose output cannot be changed.
    """
    replaced = [name for name, some in updates.items() if any(isinstance(each, Replacement) for each in some)]
    total = 0
    for name, some in updates.items():
        module = modules.get(name)
        if module is None and _is_unused_head(some, modules, updates):
            continue
        if module is None:
            raise _absent(name, modules)
        outer = next((other for other in replaced if name.startswith(other + ".")), None)
        if outer is not None:
            raise AdapterUnsupportedError(f"the adapter replaces {outer} and also changes {name} inside it")
        if (
            len(some) > 1
            and len({type(each) for each in some}) == 1
            and not isinstance(some[0], ExpertsLowRank)
        ):
            raise AdapterUnsupportedError(f"the adapter changes {name} twice in the same way")
        for update in some:
            _check_kind(modules, name, module, update)
            if isinstance(update, TokenRows):
                _check_shared(modules, name, module, updates)
            total += copy_bytes(update, module)
    return total


def _absent(name: str, modules: Modules) -> AdapterError:
    if _ONE_EXPERT.search(name) and any(each.endswith("experts") for each in modules):
        return AdapterUnsupportedError(
            f"the adapter changes {name}, one expert by itself, but this model holds all experts' weights in"
            " one parameter; merge the adapter into the base (loadstone.adapters.merge_into), or train it on"
            " this model with target_parameters"
        )
    return AdapterBaseError(
        f"the adapter changes {name}, which the model does not have; it was made for another base"
    )


def build(modules: Modules, updates: Updates) -> Changes:
    """Turn checked updates into what each module does; this is where converted copies are made."""
    return {name: _change(modules[name], some) for name, some in updates.items() if name in modules}


def _is_unused_head(some: Sequence[Update], modules: Modules, updates: Updates) -> bool:
    """Say whether only new rows of a present embedding are for a module: a model may lack its tied head."""
    rows = [update.rows for update in some if isinstance(update, TokenRows)]
    return len(rows) == len(some) == 1 and any(
        isinstance(update, TokenRows) and update.rows is rows[0]
        for name, others in updates.items()
        if name in modules
        for update in others
    )


def _change(module: nn.Module, updates: Sequence[Update]) -> Change:
    operations: list[Operation] = []
    substitute: Replaced | Experts | None = None
    for update in updates:
        if isinstance(update, LowRank):
            operations.append(Linear(update, module))
        elif isinstance(update, EmbeddingLowRank):
            operations.append(Embedding(update, module))
        elif isinstance(update, TokenRows):
            operations.append(Tokens(update, module))
        elif isinstance(update, Replacement):
            substitute = Replaced.of(update, module)
    experts = [update for update in updates if isinstance(update, ExpertsLowRank)]
    return Change(Experts(experts, module) if experts else substitute, tuple(operations))


def _check_kind(modules: Modules, name: str, module: nn.Module, update: Update) -> None:
    if isinstance(update, LowRank):
        _require(name, module, isinstance(module, nn.Linear) or is_transposed(module), "a linear layer")
        parent = modules.get(name.rpartition(".")[0])
        if isinstance(parent, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            raise AdapterUnsupportedError(
                f"{name} is part of a {type(parent).__name__}, which reads its weights without calling it"
            )
        shape = (update.b.shape[0], update.a.shape[1])
        _same(f"{name}.weight", weight_of(module).shape, shape[::-1] if is_transposed(module) else shape)
    elif isinstance(update, EmbeddingLowRank):
        _require(name, module, isinstance(module, nn.Embedding), "an embedding")
        _same(f"{name}.weight", weight_of(module).shape, (update.a.shape[1], update.b.shape[0]))
    elif isinstance(update, TokenRows):
        _require(name, module, isinstance(module, nn.Embedding | nn.Linear), "an embedding or its head")
        rows, width = weight_of(module).shape
        _same(f"the rows of {name}.weight", (width,), update.values.shape[1:])
        last = max(update.rows, default=0)
        if last >= rows:
            raise AdapterBaseError(
                f"the adapter changes token {last} of {name}, which has {rows}; its vocabulary was resized"
            )
    elif isinstance(update, Replacement):
        _check_replacement(name, module, update)
    else:
        _check_experts(name, module, update)


def _check_shared(modules: Modules, name: str, module: nn.Module, updates: Updates) -> None:
    """Refuse new rows for only some of the modules that share a weight: answers would be wrong."""
    weight = module._parameters.get("weight")
    for other, each in modules.items():
        shared = weight is not None and each is not module and each._parameters.get("weight") is weight
        if shared and not any(isinstance(update, TokenRows) for update in updates.get(other, ())):
            raise AdapterUnsupportedError(
                f"the adapter changes tokens of {name}, whose weight {other} shares, but the base does not"
                " say so in its config; save it with a weight of its own for each"
            )


def _check_replacement(name: str, module: nn.Module, update: Replacement) -> None:
    own, given = tensors_of(module), update.parameters.keys()
    needed = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if not needed <= given <= own.keys():
        odd = min((needed - given) | (given - own.keys()))
        raise AdapterBaseError(
            f"the adapter replaces {name}, but only one of the two has {odd}; it was made for another base"
        )
    for key, tensor in update.parameters.items():
        _same(f"{name}.{key}", own[key].shape, tensor.shape)


def _check_experts(name: str, module: nn.Module, update: ExpertsLowRank) -> None:
    parameter = dict(module.named_parameters(recurse=False)).get(update.parameter)
    if parameter is None:
        raise AdapterBaseError(
            f"the adapter changes {name}.{update.parameter}, which the model does not have; it was made for "
            "another base"
        )
    sides = [update.b.shape[0], update.a.shape[1]]
    sides = sides if update.orientation == "out_in" else sides[::-1]
    shape = (update.experts, *sides) if parameter.dim() == 3 else tuple(sides)
    _same(f"{name}.{update.parameter}", parameter.shape, shape)


def _require(name: str, module: nn.Module, holds: bool, kind: str) -> None:
    if not holds:
        raise AdapterUnsupportedError(
            f"the adapter's update of {name} is for {kind}, but in this model it is a {type(module).__name__}"
        )


def _same(name: str, base: Sequence[int], adapter: Sequence[int]) -> None:
    if tuple(base) != tuple(adapter):
        raise AdapterBaseError(
            f"{name} has shape {list(base)} in the model, but the adapter's is {list(adapter)}; it was made "
            "for another base"
        )
