"""What a module does while a batch is applied: one `Step` for each touched module.

A `Uniform` step serves a batch of one adapter, whatever the shapes. A `Mixed` step needs the batch's rows in
the first dimension of the module's input: low-rank updates of many adapters go through a `Stacked` part, one
pair of products for all of them, and everything else is computed for each adapter on its own rows. Inside
some modules rows cannot be told apart, as a block of experts mixes the tokens of all of them: an `Apart` step
runs such a module once for each adapter, on that adapter's rows, and `Inside` steps know whose turn it is.

Used by one thread at a time: whoever holds the pool's forward lock.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from loadstone.adapters.compute import Experts, Linear, Operation, Replaced, combine, lasting
from loadstone.adapters.rows import Forward, not_by_row, run_apart
from loadstone.adapters.stacks import Bucket
from loadstone.adapters.stand import Guard, worn
from loadstone.errors import AdapterUnsupportedError


@dataclass(frozen=True, slots=True)
class Change:
    """What one adapter does to one module.

    Attributes
    ----------
    substitute : Replaced, Experts or None
        Runs instead of the module.
    operations : tuple of Operation
        Applied to the output, in order.
    """

    substitute: Replaced | Experts | None = None
    operations: tuple[Operation, ...] = ()

    @property
    def low_rank(self) -> Linear | None:
        """The low-rank operation, when that is all there is: what a stack can hold."""
        only = self.operations[0] if len(self.operations) == 1 and self.substitute is None else None
        return only if isinstance(only, Linear) else None


Changes = Mapping[str, Change]
"""One adapter's changes, by module."""

Args = tuple[object, ...]
Kwargs = dict[str, object]


class Step(Protocol):
    """Runs a module's part of a batch."""

    def __call__(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Return the module's output; ``forward`` is its own forward."""
        ...

    def during(self) -> AbstractContextManager[None] | None:
        """Return what has to hold for as long as the batch is applied, if anything."""
        ...


class Uniform:
    """Every row has the same adapter."""

    __slots__ = ("_operations", "_substitute")

    def __init__(self, change: Change) -> None:
        self._substitute = change.substitute
        self._operations = change.operations

    def __call__(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Run the substitute, or the module, and then the operations."""
        result = (self._substitute or forward)(*args, **kwargs)
        if self._operations:
            x, changed = _first(args, kwargs), _tensor(result)
            for operation in self._operations:
                changed = operation(module, x, changed)
            return changed
        return result

    @property
    def replaced(self) -> list[Replaced]:
        """What stands in for the module, if anything does."""
        return [self._substitute] if isinstance(self._substitute, Replaced) else []

    def during(self) -> AbstractContextManager[None] | None:
        """Let the module have the adapter's parameters."""
        return worn(self.replaced) if self.replaced else None


class Part(Protocol):
    """Changes some rows of a module's output."""

    def __call__(self, module: nn.Module, x: Tensor, result: Tensor) -> Tensor:
        """Return the whole output."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that a replacement (or, when ``None``, the module itself) computes."""

    replacement: Forward | None
    rows: Tensor


class _ByRow(ABC):
    """Serves rows that differ, and keeps what is replaced for some of them from all but the module itself."""

    __slots__ = ("_count", "_guard", "_name")

    def __init__(self, name: str, count: int, replaced: Iterable[object]) -> None:
        self._name = name
        self._count = count
        self._guard = _guard(name, replaced)

    def __call__(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Run the module for all rows."""
        with self._guard.opened() if self._guard else nullcontext():
            return self._run(module, forward, args, kwargs)

    def during(self) -> AbstractContextManager[None] | None:
        """Keep what is replaced from others while the batch is applied."""
        return self._guard.held() if self._guard else None

    @abstractmethod
    def _run(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object: ...


class Mixed(_ByRow):
    """Rows have different adapters: the module or replacements run, and then each part on its rows."""

    __slots__ = ("_parts", "_runs")

    def __init__(self, name: str, count: int, runs: Sequence[Run], parts: Sequence[Part]) -> None:
        super().__init__(name, count, (run.replacement for run in runs))
        self._runs = runs
        self._parts = parts

    def _run(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        if not self._runs or isinstance(module, nn.Embedding):
            rows = _rows(module, _first(args, kwargs))
            if rows != self._count:
                raise not_by_row(self._name, rows, self._count)
        if self._runs:
            calls: list[tuple[Forward, Tensor]] = [
                (run.replacement or forward, run.rows) for run in self._runs
            ]
            result = run_apart(calls, args, kwargs, count=self._count, name=self._name)
        else:
            result = forward(*args, **kwargs)
        if self._parts:
            x, changed = _first(args, kwargs), _tensor(result)
            for part in self._parts:
                changed = part(module, x, changed)
            return changed
        return result


class Turn:
    """Whose rows a module is run for now; shared by an `Apart` step and the `Inside` steps below it."""

    __slots__ = ("is_on", "key")

    def __init__(self) -> None:
        self.is_on = False
        self.key: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one adapter, or (``key`` is ``None``) of all for whom nothing changes in a module.

    ``replaced`` has what stands in for the module, or for modules inside.
    """

    key: int | None
    step: Step | None
    rows: Tensor
    replaced: Sequence[Replaced] = ()


class Apart(_ByRow):
    """A module is run once for each adapter that changes anything in it."""

    __slots__ = ("_groups", "_turn")

    def __init__(self, name: str, count: int, turn: Turn, groups: Sequence[Group]) -> None:
        super().__init__(name, count, (each for group in groups for each in group.replaced))
        self._turn = turn
        self._groups = groups

    def _run(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        calls: list[tuple[Forward, Tensor]] = [
            (partial(self._run_group, module, forward, group), group.rows) for group in self._groups
        ]
        return run_apart(calls, args, kwargs, count=self._count, name=self._name)

    def _run_group(
        self, module: nn.Module, forward: Forward, group: Group, *args: object, **kwargs: object
    ) -> object:
        turn = self._turn
        before = turn.is_on, turn.key
        turn.is_on, turn.key = True, group.key
        try:
            with worn(group.replaced) if group.replaced else nullcontext():
                if group.step is None:
                    return forward(*args, **kwargs)
                return group.step(module, forward, args, kwargs)
        finally:
            turn.is_on, turn.key = before


class Inside:
    """A module below one that is run apart: it has the changes of the adapter whose turn it is."""

    __slots__ = ("_name", "_steps", "_turn")

    def __init__(self, name: str, turn: Turn, steps: Mapping[int, Step]) -> None:
        self._name = name
        self._turn = turn
        self._steps = steps

    def __call__(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Run the module with those changes."""
        if not self._turn.is_on:
            raise AdapterUnsupportedError(
                f"{self._name} was called from outside the module that it belongs to, so whose rows it got "
                "cannot be told; run these adapters in batches of their own"
            )
        key = self._turn.key
        step = None if key is None else self._steps.get(key)
        return forward(*args, **kwargs) if step is None else step(module, forward, args, kwargs)

    def during(self) -> AbstractContextManager[None] | None:
        """Return nothing: the module above takes care of it."""
        return None


def _guard(name: str, substitutes: Iterable[object]) -> Guard | None:
    replaced = [each for each in substitutes if isinstance(each, Replaced)]
    return Guard(name, replaced) if replaced else None


class OwnRows:
    """One adapter's operations on its own rows."""

    __slots__ = ("_operations", "_rows")

    def __init__(self, operations: Sequence[Operation], rows: Tensor) -> None:
        self._operations = operations
        self._rows = rows

    def __call__(self, module: nn.Module, x: Tensor, result: Tensor) -> Tensor:
        """Change those rows."""
        own, inputs = result.index_select(0, self._rows), x.index_select(0, self._rows)
        for operation in self._operations:
            own = operation(module, inputs, own)
        return result.index_copy(0, self._rows, own)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How rows are gathered for a bucket's slots ``low`` to ``low + groups``, and scattered back.

    Every group is as wide as the widest: ``gather`` fills it up with any row, and ``pick`` takes only the
    wanted ones out again. An index that would change nothing is ``None``.
    """

    low: int
    groups: int
    gather: Tensor | None
    pick: Tensor | None
    rows: Tensor | None


class Stacked:
    """Many adapters' low-rank operations at once.

    Parameters
    ----------
    bucket : Bucket
        Their matrices.
    at : Arrangement
        Which rows meet which of them.
    operations : sequence of Linear
        The operation of each row that is changed, in the order of the rows.
    """

    __slots__ = ("_at", "_bucket", "_factors", "_operations", "_scale")

    def __init__(self, bucket: Bucket, at: Arrangement, operations: Sequence[Linear]) -> None:
        self._bucket = bucket
        self._at = at
        self._operations = operations
        scales = [operation.scale for operation in operations]
        wide = torch.promote_types(bucket.a.dtype, torch.float32)
        same = len(set(scales)) == 1
        self._scale = scales[0] if same else torch.tensor(scales, dtype=wide, device=bucket.a.device)
        self._factors: Tensor | None = None

    def __call__(self, module: nn.Module, x: Tensor, result: Tensor) -> Tensor:
        """Change the rows that take part."""
        at, bucket = self._at, self._bucket
        inputs = x.to(bucket.a.dtype)
        inputs = inputs if at.gather is None else inputs.index_select(0, at.gather)
        grouped = inputs.reshape(at.groups, -1, inputs.shape[-1])
        update = torch.bmm(grouped, bucket.a.narrow(0, at.low, at.groups).transpose(1, 2))
        update = torch.bmm(update, bucket.b.narrow(0, at.low, at.groups).transpose(1, 2))
        if bucket.bias is not None:
            update = update + bucket.bias.narrow(0, at.low, at.groups)
        update = update.reshape(*inputs.shape[:-1], update.shape[-1])
        update = update if at.pick is None else update.index_select(0, at.pick)
        own = result if at.rows is None else result.index_select(0, at.rows)
        own = combine(module, own, update, self._scales(own.dim()), self._rescale(module, own.dim()))
        return own if at.rows is None else result.index_copy(0, at.rows, own)

    def _scales(self, dims: int) -> float | Tensor:
        return self._scale.view(-1, *[1] * (dims - 1)) if isinstance(self._scale, Tensor) else self._scale

    def _rescale(self, module: nn.Module, dims: int) -> Tensor | None:
        if not self._operations[0].is_dora:
            return None
        if self._factors is None:
            with lasting():
                self._factors = torch.stack([operation.factor(module) for operation in self._operations])
        return self._factors.view(len(self._factors), *[1] * (dims - 2), -1)


def _rows(module: nn.Module, x: Tensor) -> int:
    """Return how many rows an input has; positions that are looked up for all rows together are one."""
    return 1 if x.dim() == 0 or (isinstance(module, nn.Embedding) and x.dim() == 1) else len(x)


def _first(args: Args, kwargs: Kwargs) -> Tensor:
    return _tensor(args[0] if args else next(iter(kwargs.values())))


def _tensor(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise AdapterUnsupportedError(
            f"a module that an adapter changes works on {type(value).__name__}, not on one tensor; such a "
            "module can only be replaced as a whole (modules_to_save)"
        )
    return value
