"""Updates of parameters that are no module's ``weight`` (``target_parameters``). Pure, no I/O.

Two things are not written in the file. *Which parameter* a pair belongs to: PEFT wraps the parameters of one
module into each other, in the order in which the model registers them, and a key only says how deep its
wrapper lies. *Which way round* an expert's matrix is stored: PEFT 0.18 took ``[experts, in, out]``, later
versions take ``[experts, out, in]`` unless the model's class says otherwise. Shapes decide both; what they do
not decide is refused, never guessed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Literal

from loadstone.adapters.base import BaseIndex, Shape
from loadstone.adapters.parts import Parts
from loadstone.adapters.updates import ExpertsLowRank, Orientation
from loadstone.errors import AdapterBaseError, AdapterFormatError

Experts = Literal["auto", "in_out", "out_in"]

_REGISTERED = ("gate_up_proj", "down_proj")
"""The order in which transformers' models register their experts' parameters."""
_MOST = 4


@dataclass(frozen=True, slots=True)
class Group:
    """All wrapped parameters of one module.

    Attributes
    ----------
    module : str
        The module's name.
    layers : Sequence[Parts]
        Its pairs, the outermost wrapper first.
    parameters : Mapping[str, Shape]
        The parameters that the config targets, with their shapes in the base.
    """

    module: str
    layers: Sequence[Parts]
    parameters: Mapping[str, Shape]


def targeted_parameters(base: BaseIndex, module: str, targets: Sequence[str]) -> dict[str, Shape]:
    """Return the parameters directly in ``module`` that ``target_parameters`` chooses."""
    return {
        name: shape
        for name, shape in base.parameters(module).items()
        if "." not in name
        and any(f"{module}.{name}" == t or f"{module}.{name}".endswith(f".{t}") for t in targets)
    }


def build_experts(groups: Sequence[Group], wanted: Experts, where: str) -> dict[str, list[ExpertsLowRank]]:
    """Make the updates of all groups of one adapter, all stored the same way round.

    Raises
    ------
    AdapterFormatError
        The orientation, or which pair belongs to which parameter, cannot be told.
    AdapterBaseError
        The shapes fit no parameter of the base.
    """
    possible: list[Orientation] = ["out_in", "in_out"] if wanted == "auto" else [wanted]
    found = {way: [_assignments(group, way) for group in groups] for way in possible}
    fitting = [way for way in possible if all(found[way])]
    if not fitting:
        raise _no_fit(groups, possible, found, where)
    if len(fitting) > 1 and any(len(s) == 3 for group in groups for s in group.parameters.values()):
        group = groups[0]
        name, shape = next(iter(group.parameters.items()))
        raise AdapterFormatError(
            f"{where}: the orientation of target_parameters is ambiguous: {group.module}.{name} has shape"
            f" {list(shape)}, which PEFT 0.18 reads as [experts, in, out] and later versions as"
            " [experts, out, in]; say which with experts='in_out' or experts='out_in'"
        )
    way = fitting[0]
    return {
        group.module: _build(group, _choose(group, choices, where), way)
        for group, choices in zip(groups, found[way], strict=True)
    }


def _assignments(group: Group, way: Orientation) -> list[tuple[str, ...]]:
    """Return the orders of the parameters, outermost first, that fit all pairs of ``group``."""
    if len(group.parameters) != len(group.layers) or len(group.layers) > _MOST:
        return []
    return [
        order
        for order in permutations(group.parameters)
        if all(
            _fits(parts, group.parameters[name], way) for parts, name in zip(group.layers, order, strict=True)
        )
    ]


def _fits(parts: Parts, shape: Shape, way: Orientation) -> bool:
    a, b = parts.shape("A"), parts.shape("B")
    if len(shape) == 2:
        return (b[0], a[1]) == shape
    if len(shape) != 3 or shape[0] == 0 or a[0] % shape[0]:
        return False
    return ((b[0], a[1]) if way == "out_in" else (a[1], b[0])) == shape[1:]


def _choose(group: Group, orders: Sequence[tuple[str, ...]], where: str) -> tuple[str, ...]:
    """Return the order to use: the only one, or the one that transformers' models register."""
    if len(orders) == 1:
        return orders[0]
    usual = tuple(reversed(_REGISTERED))
    if set(group.parameters) == set(usual):
        return usual
    raise AdapterFormatError(
        f"{where}: module {group.module!r} has target_parameters of equal shapes ({_list(group.parameters)});"
        " the file does not say which tensors belong to which"
    )


def _build(group: Group, order: Iterable[str], way: Orientation) -> list[ExpertsLowRank]:
    updates = []
    for parts, name in zip(group.layers, order, strict=True):
        shape = group.parameters[name]
        experts = shape[0] if len(shape) == 3 else 1
        updates.append(
            ExpertsLowRank(
                parameter=name,
                a=parts.tensor(parts.keys["A"].text),
                b=parts.tensor(parts.keys["B"].text),
                scale=parts.scale(f"{group.module}.{name}", parts.shape("A")[0] // experts),
                experts=experts,
                orientation=way if len(shape) == 3 else "out_in",
            )
        )
    return updates


def _no_fit(
    groups: Sequence[Group],
    possible: Sequence[Orientation],
    found: Mapping[Orientation, Sequence[Sequence[object]]],
    where: str,
) -> AdapterBaseError:
    worst = next(
        (i for i in range(len(groups)) if not any(found[way][i] for way in possible)),
        None,
    )
    if worst is None:
        return AdapterBaseError(
            f"{where}: its target_parameters fit the base only in different orientations;"
            " the adapter was trained on another base"
        )
    group = groups[worst]
    pairs = ", ".join(f"{list(p.shape('A'))} and {list(p.shape('B'))}" for p in group.layers)
    return AdapterBaseError(
        f"{where}: module {group.module!r} has lora_A and lora_B of shapes {pairs}, which fit none of the"
        f" base's targeted parameters: {_list(group.parameters)}"
    )


def _list(parameters: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in parameters.items()) or "there are none"
