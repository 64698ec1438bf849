"""Tensors that stand in for bytes on their way, and become ordinary tensors at their first use.

A pending tensor knows its shape, dtype and device from the start. Any other use of it, from Python or
through a torch function, waits for its own bytes; then the very same object turns into a plain
``nn.Parameter`` (or ``torch.Tensor``), so every owner, tied ones too, holds the plain one from then on.

Until then its storage is empty and refuses to be written: code that torch functions cannot see (a C++
extension that takes the pointer) gets an exception or a null pointer, never zeros.

Concurrency: each `Arrival` has a lock, held while one thread waits for the bytes and swaps them in;
threads racing it block on that lock and then find a plain tensor. A failed wait leaves the tensor pending,
so the next use tries again. A forked child gets fresh locks.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import nn

from loadstone.errors import TransferError
from loadstone.loader.modules.queries import WITHOUT_BYTES, changes_nothing

_compiler: Any = torch._C._dynamo.eval_frame


class Waiting(Protocol):
    """What waits for bytes; a checkpoint."""

    def wait(self, names: Iterable[str] | None = None, timeout: float | None = None) -> None:
        """Block until the bytes of ``names`` are here."""
        ...


class Arrival:
    """How one tensor gets its bytes.

    Parameters
    ----------
    checkpoint : Waiting
        Where they come from.
    names : iterable of str
        The checkpoint's tensors that it is made of.
    make : callable
        Waits for them and returns the real tensor.
    """

    __slots__ = ("_lock", "_pid", "checkpoint", "make", "names")

    def __init__(self, checkpoint: Waiting, names: Iterable[str], make: Callable[[], torch.Tensor]) -> None:
        self.checkpoint = checkpoint
        self.names = tuple(names)
        self.make = make
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def then(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Arrival":
        """Return the same arrival followed by ``change``."""
        make = self.make
        return Arrival(self.checkpoint, self.names, lambda: change(make()))

    def lock(self) -> threading.Lock:
        """Return the lock; a new one in a forked child, where the thread that held it does not exist."""
        if self._pid != os.getpid():
            self._lock, self._pid = threading.Lock(), os.getpid()
        return self._lock


class Pending(torch.Tensor):
    """What pending parameters and buffers share; never used by itself."""

    _arrival: Arrival
    _plain: type[torch.Tensor]
    _real: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what needs no bytes at once; let anything else wait for them."""
        if func in WITHOUT_BYTES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if changes_nothing(func, args, kwargs):
            return args[0]
        result = func(*replace_tensors(args, settled), **replace_tensors(kwargs or {}, settled))
        if func is torch.Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            # `nn.Parameter(tensor)` insists that a subclass detaches to the class that ``tensor`` by now has.
            result.__class__ = type(settled(args[0]))
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub forgets that it is a class method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait where `__torch_function__` was not asked: in C++ code, or where a caller switched it off."""
        return func(*replace_tensors(args, settled), **replace_tensors(kwargs or {}, settled))

    # These two read the data, or copy this class, before torch asks `__torch_function__`.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        plain: Any = settled(self)
        return plain.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = settled(self)
        return plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        # A debugger or a log line must not block on the network.
        kind = type(self).__name__
        return f"{kind}({list(self.shape)}, dtype={self.dtype}, device={self.device!s}, not read yet)"


class PendingParameter(Pending, nn.Parameter):
    """A parameter whose bytes nobody has used yet."""

    _plain = nn.Parameter


class PendingBuffer(Pending):
    """A buffer whose bytes nobody has used yet."""

    _plain = torch.Tensor


def pending(
    kind: type[Pending], arrival: Arrival, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Pending:
    """Make a pending tensor of class ``kind``."""
    tensor = torch.Tensor._make_subclass(kind, _placeholder(shape, dtype, device), False)
    tensor._arrival = arrival
    return tensor


def _placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of that shape with no memory behind it, whose pointer torch refuses to give."""
    tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def settle(tensor: torch.Tensor) -> None:
    """Wait for the bytes of ``tensor`` and make it an ordinary tensor, in place; a plain one stays as it is.

    Raises
    ------
    LoadstoneError
        The bytes cannot be had. The tensor stays pending; another use tries again.
    """
    arrival = tensor.__dict__.get("_arrival")
    if arrival is None:
        return
    with arrival.lock():
        if isinstance(tensor, Pending) and "_arrival" in tensor.__dict__:  # no other thread was faster
            if "_real" not in tensor.__dict__:
                tensor._real = _undisturbed(lambda: _plain_of(tensor, arrival.make()))
            _become(tensor, tensor._real)


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as an ordinary tensor, waiting for its bytes: the same object, where that can be."""
    settle(tensor)
    real: torch.Tensor = tensor.__dict__.get("_real", tensor)
    return real


def _plain_of(tensor: Pending, real: torch.Tensor) -> torch.Tensor:
    return torch.Tensor._make_subclass(tensor._plain, real, tensor.requires_grad)


def _undisturbed(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call ``make`` as if the caller had switched nothing on.

    In inference mode, and inside a function transform (`torch.func`), a trace or a mode, new tensors are of a
    kind that must not outlive it. All of these belong to a thread; so where there is one, another does it.
    """
    c: Any = torch._C
    if (
        c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or c._get_tracing_state() is not None
        or c._functorch.peek_interpreter_stack() is not None
        or torch.is_inference_mode_enabled()
    ):
        return _elsewhere(make)
    compiling = _compiler.set_eval_frame(None)  # torch.compile looks into every function called
    try:
        return make()
    finally:
        _compiler.set_eval_frame(compiling)


def _elsewhere(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Call ``make`` in a new thread. It is a daemon, so that an interrupt need not wait for the network."""
    made: Future[torch.Tensor] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:  # noqa: BLE001  raised again in the thread that asked
            made.set_exception(error)

    try:
        threading.Thread(target=run, name="loadstone-settle", daemon=True).start()
    except RuntimeError as error:
        raise TransferError(
            f"no thread can be started to bring a parameter with ({error}); raise the limit on this user's "
            "or container's processes, or load with wait=True"
        ) from None
    return made.result()


def redirect(tensor: Pending, device: torch.device) -> None:
    """Let ``tensor`` become a copy on ``device``; for use before any other thread knows it."""
    tensor._arrival = tensor._arrival.then(lambda real: real.to(device))
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = _placeholder(tensor.shape, tensor.dtype, device)


def replace_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``value``, the arguments of a torch function, with every tensor in it replaced."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)([replace_tensors(item, change) for item in value])
    if type(value) is dict:
        return {key: replace_tensors(item, change) for key, item in value.items()}
    return value


def _become(tensor: Any, real: Any) -> None:
    """Make ``tensor`` the plain tensor that ``real`` is; it stays the same Python object.

    The two objects exchange what is behind them in C++. Code in C++ that still holds the former inside of
    ``tensor`` finds ``real`` there, by then a pending tensor, which leads it to ``tensor``.
    """
    try:
        torch._C._swap_tensor_impl(tensor, real)  # what `torch.utils.swap_tensors` is made of
    except RuntimeError:
        return  # C++ refers to one of them weakly, as in `torch.jit.trace`: ``real`` serves till the next use
    real._real = tensor
    real.__class__, tensor.__class__ = type(tensor), type(real)
    del tensor.__dict__["_real"], tensor.__dict__["_arrival"]  # the arrival last: until then others wait


def _leave_uncompiled(functions: Iterable[Any]) -> None:
    """Let torch.compile run ``functions`` as they are. `torch.compiler.disable` takes seconds to import."""
    if hasattr(_compiler, "set_code_exec_strategy"):
        skip = _compiler._FrameExecStrategy(_compiler._FrameAction.SKIP, _compiler._FrameAction.DEFAULT)
        for function in functions:
            _compiler.set_code_exec_strategy(function.__code__, skip)
            function._torchdynamo_disable = True
            function._torchdynamo_disable_msg = "a parameter's bytes are not here yet: load with wait=True"


_intercepting: list[Any] = [Pending.__torch_function__, Pending.__torch_dispatch__]
_leave_uncompiled(method.__func__ for method in _intercepting)
_leave_uncompiled([changes_nothing, replace_tensors, settle, settled, _become, _plain_of, _undisturbed])
