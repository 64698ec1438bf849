"""From the adapter of each row to a step for each module: worked out once for each membership of a batch."""

from collections.abc import Mapping, Sequence

import torch

from loadstone.adapters.compute import Experts, Linear, lasting
from loadstone.adapters.stacks import Bucket, Stack
from loadstone.adapters.steps import (
    Arrangement,
    Change,
    Changes,
    Mixed,
    OwnRows,
    Part,
    Run,
    Stacked,
    Step,
    Uniform,
)
from loadstone.errors import AdapterUnsupportedError

Plan = Mapping[str, Step]
"""A step for each module that any adapter of the batch changes."""

_CROWDED = 2
"""An adapter with this many times the usual number of rows is computed by itself, not in a group."""


def uniform(changes: Changes) -> Plan:
    """Plan a batch whose every row has the adapter of ``changes``."""
    return {name: Uniform(change) for name, change in changes.items()}


def mixed(
    rows: Sequence[int | None], adapters: Mapping[int, Changes], stack: Stack | None, device: torch.device
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

    Raises
    ------
    AdapterUnsupportedError
        An adapter changes what only a batch of its own can compute.
    """
    names = dict.fromkeys(name for changes in adapters.values() for name in changes)
    _check_nested(names, adapters)
    with lasting():
        planner = _Planner(rows, adapters, stack, device)
        return {name: planner.step(name) for name in names}


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
        return Mixed(name, len(self._rows), self._runs(name, changes), parts)

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

    def _runs(self, name: str, changes: Mapping[int, Change]) -> list[Run]:
        runs: list[Run] = []
        for key, change in changes.items():
            if isinstance(change.substitute, Experts):
                raise AdapterUnsupportedError(
                    f"an adapter of this batch changes parameters of {name} (target_parameters), whose "
                    "tokens cannot be told apart by row; run it in a batch of its own"
                )
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


def _check_nested(names: Mapping[str, None], adapters: Mapping[int, Changes]) -> None:
    """Refuse changes inside a module that another adapter replaces: whose rows arrive there is not known."""
    replaced = {
        name
        for changes in adapters.values()
        for name, change in changes.items()
        if change.substitute is not None
    }
    for outer in replaced:
        inner = next((name for name in names if name.startswith(outer + ".")), None)
        if inner is not None:
            raise AdapterUnsupportedError(
                f"one adapter of the batch replaces {outer} and another changes {inner} inside it; run "
                "them in batches of their own"
            )
