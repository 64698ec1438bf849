"""From the adapter of each row to a step for each module: worked out once for each membership of a batch.

Most modules are run once for the whole batch. A module is run apart, once for each adapter that changes
anything in it, where rows cannot be told inside: a block of experts, whose tokens are flattened and sorted by
expert, and a module that one adapter replaces while another changes something in it. A module that is called
with a cache cannot be: where an adapter replaces it, its layers are replaced one by one.
"""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from loadstone.adapters.compute import Experts, Linear, Replaced, lasting
from loadstone.adapters.stacks import Bucket, Stack
from loadstone.adapters.steps import (
    Apart,
    Arrangement,
    Change,
    Changes,
    Group,
    Inside,
    Mixed,
    OwnRows,
    Part,
    Run,
    Stacked,
    Step,
    Turn,
    Uniform,
)
from loadstone.errors import AdapterUnsupportedError

Plan = Mapping[str, Step]
"""A step for each module that any adapter of the batch changes."""

_CACHE = re.compile("cache|cache_params|layer_past|past_.*")
"""What transformers' modules call the cache that they are given."""

_BY_POSITION = "relative_attention_bias"
"""What the transformers models that have one call an embedding of distances, which has no rows of a batch."""

_NOT_BY_ROW = re.compile("(XLNet|Longformer|LED|FSMT|RecurrentGemma)[A-Z]")
"""Classes of transformers models whose layers get tokens before rows, or keep what the last rows had."""

_CROWDED = 2
"""An adapter with this many times the usual number of rows is computed by itself, not in a group."""


def uniform(changes: Changes) -> Plan:
    """Plan a batch whose every row has the adapter of ``changes``."""
    return {name: Uniform(change) for name, change in changes.items()}


def mixed(
    rows: Sequence[int | None],
    adapters: Mapping[int, Changes],
    stack: Stack | None,
    device: torch.device,
    modules: Mapping[str, nn.Module],
) -> Plan:
    """Plan a batch of different adapters.

    Parameters
    ----------
    rows : sequence of int or None
        The adapter of each row.
    adapters : mapping
        What each of them changes.
    stack : Stack or None
        Holds the low-rank operations of all of them; without one, each is computed by itself.
    device : torch.device
        Where the model computes.
    modules : mapping
        The model's, by name.

    Raises
    ------
    AdapterUnsupportedError
        An adapter changes what only a batch of its own can compute.
    """
    odd = [name for name in {type(each).__name__ for each in modules.values()} if _NOT_BY_ROW.match(name)]
    if odd:
        raise AdapterUnsupportedError(
            f"the layers of {min(odd)} do not work row by row, so whose rows they get cannot be told in a "
            "mixed batch; run these adapters in batches of their own"
        )
    adapters = {key: _in_layers(changes, modules) for key, changes in adapters.items()}
    names = dict.fromkeys(name for changes in adapters.values() for name in changes)
    above = _run_apart(names, adapters, modules)
    with lasting():
        planner = _Planner(rows, adapters, stack, device)
        steps: dict[str, Step] = {name: planner.step(name) for name in names if name not in above}
        for root in dict.fromkeys(above.values()):
            steps |= planner.apart(
                root, [name for name, own in above.items() if own == root and name != root]
            )
        return steps


class _Planner:
    """Builds the steps of one mixed batch; arrangements are shared between modules."""

    def __init__(
        self,
        rows: Sequence[int | None],
        adapters: Mapping[int, Changes],
        stack: Stack | None,
        device: torch.device,
    ) -> None:
        self._rows = rows
        self._adapters = adapters
        self._stack = stack
        self._device = device
        self._own = {key: self._tensor([i for i, row in enumerate(rows) if row == key]) for key in adapters}
        self._known: dict[tuple[int | None, ...], Arrangement] = {}

    def step(self, name: str) -> Mixed:
        if name.endswith(_BY_POSITION):
            raise AdapterUnsupportedError(
                f"an adapter of this batch changes {name}, which is looked up by position and serves all "
                "rows; run it in a batch of its own"
            )
        changes = {key: each[name] for key, each in self._adapters.items() if name in each}
        stacked: dict[int, tuple[Bucket, dict[int, Linear]]] = {}
        parts: list[Part] = []
        for key, change in changes.items():
            if self._stack is not None and change.low_rank is not None:
                bucket = self._stack.bucket(name, change.low_rank)
                stacked.setdefault(id(bucket), (bucket, {}))[1][key] = change.low_rank
            elif change.operations:
                parts.append(OwnRows(change.operations, self._own[key]))
        for bucket, operations in stacked.values():
            parts += self._parts(bucket, operations)
        return Mixed(name, len(self._rows), self._runs(changes), parts)

    def apart(self, root: str, inner: Sequence[str]) -> dict[str, Step]:
        """Return the steps of a module that is run apart, and of the changed modules ``inner`` below it."""
        users = {
            key: each
            for key, each in self._adapters.items()
            if root in each or any(name in each for name in inner)
        }
        groups = [
            Group(
                key,
                Uniform(each[root]) if root in each else None,
                self._own[key],
                [r for name in (root, *inner) if name in each for r in Uniform(each[name]).replaced],
            )
            for key, each in users.items()
        ]
        others = [i for i, row in enumerate(self._rows) if row not in users]
        if others:
            groups.append(Group(None, None, self._tensor(others)))
        turn = Turn()
        steps: dict[str, Step] = {root: Apart(root, len(self._rows), turn, groups)}
        for name in inner:
            own = {key: Uniform(each[name]) for key, each in users.items() if name in each}
            steps[name] = Inside(name, turn, own)
        return steps

    def _parts(self, bucket: Bucket, operations: dict[int, Linear]) -> list[Part]:
        counts = {key: len(self._own[key]) for key in operations}
        usual = sum(counts.values()) / len(counts)
        crowded = {key for key, count in counts.items() if count > _CROWDED * usual or len(counts) == 1}
        parts: list[Part] = [OwnRows((operations[key],), self._own[key]) for key in crowded]
        grouped = [row if row in operations and row not in crowded else None for row in self._rows]
        each_row = [operations[row] for row in grouped if row is not None]
        if each_row:
            slots = tuple(None if row is None else bucket.slots[row] for row in grouped)
            if slots not in self._known:
                self._known[slots] = self._arrange(slots)
            parts.append(Stacked(bucket, self._known[slots], each_row))
        return parts

    def _arrange(self, slots: Sequence[int | None]) -> Arrangement:
        by_slot: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            if slot is not None:
                by_slot.setdefault(slot, []).append(row)
        low, high = min(by_slot), max(by_slot) + 1
        width = max(map(len, by_slot.values()))
        gather: list[int] = []
        place: dict[int, int] = {}
        for slot in range(low, high):
            group = by_slot.get(slot, [])
            place.update((row, len(gather) + k) for k, row in enumerate(group))
            gather += group + [0] * (width - len(group))
        written = sorted(place)
        return Arrangement(
            low,
            high - low,
            self._index(gather, len(slots)),
            self._index([place[row] for row in written], len(gather)),
            self._index(written, len(slots)),
        )

    def _runs(self, changes: Mapping[int, Change]) -> list[Run]:
        runs: list[Run] = []
        for key, change in changes.items():
            if change.substitute is not None:
                runs.append(Run(change.substitute, self._own[key]))
        replaced = {key for key, change in changes.items() if change.substitute is not None}
        others = [i for i, row in enumerate(self._rows) if row not in replaced]
        if runs and others:
            runs.append(Run(None, self._tensor(others)))
        return runs

    def _index(self, wanted: list[int], size: int) -> torch.Tensor | None:
        """Return an index, or ``None`` when it would take all of ``size`` rows in order."""
        return None if wanted == list(range(size)) else self._tensor(wanted)

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def _in_layers(changes: Changes, modules: Mapping[str, nn.Module]) -> Changes:
    """Replace modules that are called with a cache layer by layer, where they consist of plain layers."""
    found: dict[str, Change] = {}
    for name, change in changes.items():
        whole = change.substitute
        parts = whole.parts() if isinstance(whole, Replaced) and _takes_cache(modules[name]) else {}
        if parts and all(
            part.is_layer or _block(f"{name}.{inner}", modules) for inner, part in parts.items()
        ):
            found |= {f"{name}.{inner}": Change(part) for inner, part in parts.items()}
        else:
            found[name] = change
    return found


def _takes_cache(module: nn.Module) -> bool:
    return any(_CACHE.fullmatch(name) for name in inspect.signature(type(module).forward).parameters)


def _run_apart(
    names: Iterable[str], adapters: Mapping[int, Changes], modules: Mapping[str, nn.Module]
) -> dict[str, str]:
    """Return the changed modules that lie in a module that has to be run apart, with that module."""
    names = tuple(names)
    roots = {block for name in names if (block := _block(name, modules))}
    for changes in adapters.values():
        for name, change in changes.items():
            if isinstance(change.substitute, Experts):
                roots.add(_caller(name, modules))
            elif change.substitute is not None and any(other.startswith(name + ".") for other in names):
                roots.add(name)
    found = {}
    for name in names:
        above = [root for root in roots if name == root or name.startswith(root + ".")]
        if above:
            found[name] = min(above, key=len)
    return found


def _block(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the block of experts that a module lies in: it has ``experts``, and one input; or nothing."""
    while name:
        name = name.rpartition(".")[0]
        module = modules.get(name)
        if name and module is not None and "experts" in module._modules and _has_one_input(module):
            return name
    return ""


def _has_one_input(module: nn.Module) -> bool:
    parameters = inspect.signature(type(module).forward).parameters.values()
    return (
        sum(each.default is each.empty and each.kind == each.POSITIONAL_OR_KEYWORD for each in parameters)
        == 2
    )


def _caller(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the module to run apart for one whose parameters an adapter changes.

    Where it is no plain layer, its parent: it may get the tokens of all rows in one dimension.
    """
    parent = name.rpartition(".")[0]
    plain = isinstance(modules[name], nn.Linear | nn.Embedding)
    return name if plain or not parent else parent
