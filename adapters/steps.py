"""What a module does while a batch is applied: one `Step` for each touched module.

A `Uniform` step serves a batch of one adapter, whatever the shapes. A `Mixed` step needs the batch's rows in
the first dimension of the module's input: low-rank updates of many adapters go through a `Stacked` part, one
pair of products for all of them, and everything else is computed for each adapter on its own rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from loadstone.adapters.compute import Experts, Linear, Operation, Replaced, combine, lasting
from loadstone.adapters.stacks import Bucket
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

Forward = Callable[..., object]
Args = tuple[object, ...]
Kwargs = dict[str, object]


class Step(Protocol):
    """Runs a module's part of a batch."""

    def __call__(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Return the module's output; ``forward`` is its own forward."""
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


class Part(Protocol):
    """Changes some rows of a module's output."""

    def __call__(self, module: nn.Module, x: Tensor, result: Tensor) -> Tensor:
        """Return the whole output."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that a replacement (or, when ``None``, the module itself) computes."""

    replacement: Replaced | None
    rows: Tensor


class Mixed:
    """Rows have different adapters."""

    __slots__ = ("_count", "_name", "_parts", "_runs")

    def __init__(self, name: str, count: int, runs: Sequence[Run], parts: Sequence[Part]) -> None:
        self._name = name
        self._count = count
        self._runs = runs
        self._parts = parts

    def __call__(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> object:
        """Run the module, or for some rows replacements, and then each part on its rows."""
        x = _first(args, kwargs)
        if len(x) != self._count:
            raise AdapterUnsupportedError(
                f"{self._name} got an input of {len(x)} rows in a mixed batch of {self._count} rows, so "
                "whose they are cannot be told; run these adapters in batches of their own"
            )
        if not self._runs:
            result = _tensor(forward(*args, **kwargs))
        elif len(args) + len(kwargs) == 1:
            result = self._run_apart(forward, x)
        else:
            raise AdapterUnsupportedError(
                f"{self._name} takes more than one input, so its replacement cannot share a batch; run these "
                "adapters in batches of their own"
            )
        for part in self._parts:
            result = part(module, x, result)
        return result

    def _run_apart(self, forward: Forward, x: Tensor) -> Tensor:
        pieces = [_tensor((run.replacement or forward)(x.index_select(0, run.rows))) for run in self._runs]
        order = torch.cat([run.rows for run in self._runs]).argsort()
        return torch.cat(pieces).index_select(0, order)


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


def _first(args: Args, kwargs: Kwargs) -> Tensor:
    return _tensor(args[0] if args else next(iter(kwargs.values())))


def _tensor(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise AdapterUnsupportedError(
            f"a module that an adapter changes works on {type(value).__name__}, not on one tensor; such a "
            "module can only be replaced, in a batch of one adapter"
        )
    return value
