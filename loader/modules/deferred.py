"""Tensors on which transformers may carry out a checkpoint's conversion before the bytes are here.

While a model is being loaded, its tensors are renamed, cast, stacked and split (experts of a mixture stored
one by one become one parameter, for example). A `Deferred` tensor notes such a function down, with the shape
and dtype that the meta device says it will give, and carries it out when the result is first used. What
cannot be noted down, because its result is no tensor or it writes in place, waits for the bytes instead.

`finish` turns the deferred tensors of the loaded module into ordinary pending ones.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from loadstone.loader.modules.pending import (
    Arrival,
    Pending,
    PendingBuffer,
    PendingParameter,
    pending,
    replace_tensors,
    settled,
)
from loadstone.loader.modules.queries import WITHOUT_BYTES, parse_to


class Deferred(Pending):
    """A tensor of a checkpoint, or the result of functions of several, while a model is being loaded."""

    _is_param = False  # `nn.Parameter(deferred)` sets it on the instance
    _plain = torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note ``func`` down where that is possible."""
        kwargs = kwargs or {}
        if func in WITHOUT_BYTES:
            return super().__torch_function__(func, types, args, kwargs)
        if _changes_nothing(func, args, kwargs):
            return args[0]
        if func is torch.equal:
            # Asked before tying two tensors that are both stored. Each keeps its own: right, equal or not.
            return False
        target = parse_to(args[1:], kwargs) if func is torch.Tensor.to else None
        if target is not None:
            return _cast(args[0], target[0] or args[0].device, target[1] or args[0].dtype)
        noted = None if _writes(func) else _note(func, args, kwargs)
        return super().__torch_function__(func, types, args, kwargs) if noted is None else noted


def deferred(arrival: Arrival, like: torch.Tensor, device: torch.device) -> Deferred:
    """Return a deferred tensor with the shape and dtype of ``like``."""
    tensor = pending(Deferred, arrival, like.shape, like.dtype, device)
    assert isinstance(tensor, Deferred)
    return tensor


def finish(module: nn.Module) -> None:
    """Turn the deferred parameters and buffers of ``module`` into pending ones, in place."""
    tensors: list[Any] = [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        if isinstance(tensor, Deferred):
            is_parameter = tensor.__dict__.pop("_is_param", False)
            _set_class(tensor, PendingParameter if is_parameter else PendingBuffer)


def _set_class(tensor: Any, kind: type[Pending]) -> None:
    tensor.__class__ = kind


def _changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether ``func`` gives the tensor itself: ``t[...]``, and ``detach`` inside ``nn.Parameter``."""
    if func is torch.Tensor.__getitem__:
        return args[1] is Ellipsis
    return func is torch.Tensor.detach or (func is torch.Tensor.contiguous and not kwargs and len(args) == 1)


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__set__", "__setitem__", "__delete__") or (
        name.endswith("_") and not name.endswith("__")
    )


def _cast(tensor: Deferred, device: torch.device, dtype: torch.dtype) -> Deferred:
    if device == tensor.device and dtype == tensor.dtype:
        return tensor
    arrival = _parts(tensor).then(lambda real: real.to(device=device, dtype=dtype))
    return deferred(arrival, torch.empty(tensor.shape, dtype=dtype, device="meta"), device)


def _parts(tensor: Deferred) -> Arrival:
    """Return an arrival that gives ``tensor``, settled."""
    arrival = tensor._arrival
    return Arrival(arrival.checkpoint, arrival.names, lambda: settled(tensor))


def _note(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what ``func`` will give, as deferred tensors; ``None`` when it cannot be put off."""
    inputs = [value for value in _tensors((args, kwargs)) if isinstance(value, Deferred)]
    try:
        shapes = func(*replace_tensors(args, _as_meta), **replace_tensors(kwargs, _as_meta))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    arrival = inputs[0]._arrival
    names = tuple(dict.fromkeys(name for tensor in inputs for name in tensor._arrival.names))
    once = _Once(func, args, kwargs)
    device = inputs[0].device
    if isinstance(shapes, torch.Tensor):
        return deferred(Arrival(arrival.checkpoint, names, once.result), shapes, device)
    if isinstance(shapes, (tuple, list)) and all(isinstance(shape, torch.Tensor) for shape in shapes):
        return type(shapes)(
            deferred(Arrival(arrival.checkpoint, names, once.part(index)), shape, device)
            for index, shape in enumerate(shapes)
        )
    return None


class _Once:
    """One call put off; its result is shared by everything that was taken from it."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = (func, args, kwargs)
        self._result: Any = None
        self._lock = threading.Lock()

    def result(self) -> Any:
        with self._lock:
            if self._call is not None:
                func, args, kwargs = self._call
                self._result = func(*replace_tensors(args, settled), **replace_tensors(kwargs, settled))
                self._call = None  # lets go of the inputs
            return self._result

    def part(self, index: int) -> Callable[[], torch.Tensor]:
        return lambda: self.result()[index]


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
