"""What is read of a replaced module without calling it.

Some models compute with a layer's weight themselves, as those with a convolution do from the second token on.
While the rows of one adapter are computed, such a read must find that adapter's parameters (`worn`). While
rows of several are, there is no right answer: the read gets a tensor that has a dtype and a shape, and that
refuses to be computed with (`Guard`).

Only a module's tables of parameters and buffers are exchanged, for the time of one batch; no tensor is
written. Used by whoever holds the pool's forward lock.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from loadstone.adapters.compute import Replaced
from loadstone.errors import AdapterUnsupportedError

_Table = dict[str, Any]

_KINDS = ("_parameters", "_buffers")
"""Where `torch.nn.Module` keeps tensors."""

_FACTS = frozenset(
    {"device", "dim", "dtype", "is_cuda", "is_floating_point", "ndim", "requires_grad", "shape", "size"}
)
"""What may be asked of a weight that must not be computed with."""


@contextmanager
def worn(replaced: Iterable[Replaced]) -> Iterator[None]:
    """Let modules have an adapter's parameters."""
    pairs = [pair for each in replaced for pair in each.pairs]
    with _exchanged([(module, kind, clone.__dict__[kind]) for module, clone in pairs for kind in _KINDS]):
        yield


class Guard:
    """Keeps the parameters of modules from whoever reads them without calling the modules.

    Attributes
    ----------
    is_open : bool
        They are being called.
    name : str
        What is guarded, for messages.
    """

    __slots__ = ("_tables", "is_open", "name")

    def __init__(self, name: str, replaced: Iterable[Replaced]) -> None:
        self.name = name
        self.is_open = False
        pairs = [pair for each in replaced for pair in each.pairs]
        self._tables = dict.fromkeys(
            (module, kind)
            for module, clone in pairs
            for kind in _KINDS
            if clone.__dict__[kind] is not module.__dict__[kind]
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Guard them."""
        self.is_open = False
        guarded = [(module, kind, _Guarded(module.__dict__[kind], self)) for module, kind in self._tables]
        with _exchanged(guarded):
            yield

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Let them be read."""
        before, self.is_open = self.is_open, True
        try:
            yield
        finally:
            self.is_open = before


class _Guarded(_Table):
    """A module's parameters or buffers; `torch.nn.Module` looks here for what is read as an attribute."""

    def __init__(self, own: _Table, guard: Guard) -> None:
        super().__init__(own)
        self._guard = guard

    def __getitem__(self, name: str) -> Any:
        own = super().__getitem__(name)
        return own if own is None or self._guard.is_open else _Unread.of(own, name, self._guard.name)


class _Unread(Tensor):
    """Stands for a parameter that is not to be computed with."""

    _device: torch.device
    _name: str

    @classmethod
    def of(cls, own: Tensor, name: str, module: str) -> "_Unread":
        """Stand for one parameter of a module."""
        stand = torch.empty(own.shape, dtype=own.dtype, device="meta").as_subclass(cls)
        stand._device = own.device
        stand._name = f"{name} of {module}"
        return stand

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Tell what it is like; refuse everything else."""
        fact = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if fact == "device":
            return args[0]._device
        if fact == "is_cuda":
            return args[0]._device.type == "cuda"
        if fact in _FACTS:
            # torch gives this method no types.
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        name = next((each._name for each in args if isinstance(each, cls)), "a weight")
        raise AdapterUnsupportedError(
            f"the model computes with {name} without calling it, so it cannot be replaced in a mixed batch; "
            "run these adapters in batches of their own"
        )


@contextmanager
def _exchanged(tables: Iterable[tuple[nn.Module, str, _Table]]) -> Iterator[None]:
    before: list[tuple[nn.Module, str, _Table]] = []
    try:
        for module, kind, table in tables:
            before.append((module, kind, module.__dict__[kind]))
            module.__dict__[kind] = table
        yield
    finally:
        for module, kind, own in reversed(before):
            module.__dict__[kind] = own
