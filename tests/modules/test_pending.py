"""A pending tensor waits at every use that needs its bytes, and is an ordinary one from then on."""

import copy
import functools
import io
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from loadstone.errors import TransferError
from loadstone.loader.modules.pending import (
    Arrival,
    Pending,
    PendingBuffer,
    PendingParameter,
    pending,
    settle,
)

untyped: Any = torch  # for what torch leaves without types
TRUE = torch.arange(1.0, 21.0).view(4, 5)


class Delivery:
    """Bytes that arrive when told to."""

    def __init__(self) -> None:
        self.arrived = threading.Event()
        self.failures: list[Exception] = []
        self.asked = 0

    def wait(self, names: Iterable[str] | None = None, timeout: float | None = None) -> None:
        self.take()

    def take(self) -> torch.Tensor:
        self.asked += 1
        if self.failures:
            raise self.failures.pop()
        assert self.arrived.wait(30), "the bytes were never released"
        return TRUE.clone()

    def tensor(self, kind: type[Pending] = PendingParameter) -> Any:
        return pending(kind, Arrival(self, ["t"], self.take), (4, 5), torch.float32, torch.device("cpu"))


def is_pending(value: object) -> bool:
    return isinstance(value, Pending)


def without_torch_function(use: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make ``use`` the way C++ code does: `__torch_function__` is not asked."""

    def inner(tensor: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return use(tensor)

    return inner


def saved_and_loaded(tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save({"t": tensor}, file)
    file.seek(0)
    return torch.load(file)["t"]


def filled(tensor: Any) -> Any:
    tensor.zero_()
    return tensor


def part_set(tensor: Any) -> Any:
    tensor[1:3, 2] = 7.0
    return tensor


def data_set(tensor: Any) -> Any:
    tensor.data = torch.full((4, 5), 3.0)
    return tensor


def storage_bytes(tensor: Any) -> Any:
    return torch.tensor(list(tensor.untyped_storage()), dtype=torch.uint8)


READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda t: t.sum(),
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "item": lambda t: t[1, 2].item(),
    "tolist": lambda t: t.tolist(),
    "iterate": list,
    "truth": lambda t: bool((t > 0).all()),
    "compare": lambda t: t == 3.0,
    "in place": filled,
    "setitem": part_set,
    "set data": data_set,
    "set_": lambda t: t.set_(torch.ones(3)),
    "source of set_": lambda t: torch.empty(0).set_(t),
    "left of matmul": lambda t: t @ torch.ones(5),
    "right of matmul": lambda t: torch.ones(4) @ t,
    "numpy": lambda t: t.numpy().copy(),
    "asarray": lambda t: np.asarray(t).copy(),
    "in numpy's list": lambda t: np.stack([np.zeros((4, 5)), t]),
    "in a list": lambda t: torch.cat([torch.zeros(1, 5), t]),
    "in nested lists": lambda t: untyped.block_diag(*[t, t]),
    "by keyword": lambda t: torch.add(input=torch.zeros(4, 5), other=t),
    "as out=": lambda t: torch.add(torch.ones(4, 5), 1, out=t),
    "as an index": lambda t: torch.arange(30)[t.long()],
    "linear": lambda t: nn.functional.linear(torch.ones(2, 5), t),
    "embedding": lambda t: nn.functional.embedding(torch.tensor([0, 3]), t),
    "to": lambda t: t.to(torch.float64),
    "half": lambda t: t.half(),
    "tensor": lambda t: torch.as_tensor(t).sum(),
    "copy_ from": lambda t: torch.zeros(4, 5).copy_(t),
    "nn.Parameter": lambda t: nn.Parameter(t, requires_grad=False),
    "as_subclass": lambda t: t.as_subclass(torch.Tensor).sum(),
    "deepcopy": copy.deepcopy,
    "copy": lambda t: copy.copy(t).sum(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "torch.save": saved_and_loaded,
    "from_dlpack": untyped.from_dlpack,
    "numpy dlpack": lambda t: np.from_dlpack(t).copy(),
    "storage": storage_bytes,
    "share_memory_": lambda t: t.share_memory_(),
    "vmap": torch.vmap(lambda row: row.sum()),
    "aten operator": torch.ops.aten.sum.default,
    "C++: operator": without_torch_function(lambda t: t.sum()),
    "C++: linear": without_torch_function(lambda t: nn.functional.linear(torch.ones(2, 5), t)),
    "C++: clone": without_torch_function(lambda t: t.clone()),
    "C++: in place": without_torch_function(filled),
    "C++: view": without_torch_function(lambda t: t.view(-1)[3:]),
}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return bool(torch.equal(left, right))
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right))
    if isinstance(left, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def run_late(delivery: Delivery, use: Callable[[], Any]) -> Any:
    """Return what ``use`` gives when the bytes arrive only after it is seen to wait."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(use())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 30
    while not delivery.asked and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.0005)
    thread.join(0.01)
    waited = thread.is_alive() and not results
    delivery.arrived.set()
    thread.join(30)
    if errors:
        raise errors[0]
    assert waited, "it did not wait for its bytes"
    return results[0]


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("kind", [PendingParameter, PendingBuffer])
def test_a_read_waits_and_is_right(name: str, kind: type[Pending]) -> None:
    use = READS[name]
    plain = nn.Parameter(TRUE.clone(), requires_grad=False) if kind is PendingParameter else TRUE.clone()
    want = use(plain)
    delivery = Delivery()
    tensor = delivery.tensor(kind)
    got = run_late(delivery, lambda: use(tensor))
    assert same(want, got)
    assert type(tensor) is type(plain)
    assert torch.equal(tensor, plain)
    assert delivery.asked == 1
    assert not is_pending(got)


@pytest.mark.parametrize("kind", [PendingParameter, PendingBuffer])
def test_what_needs_no_bytes_does_not_wait(kind: type[Pending]) -> None:
    delivery = Delivery()
    tensor = delivery.tensor(kind)
    assert tensor.shape == (4, 5)
    assert (tensor.dtype, tensor.device, tensor.layout) == (
        torch.float32,
        torch.device("cpu"),
        torch.strided,
    )
    assert (tensor.ndim, tensor.dim(), len(tensor), tensor.numel(), tensor.nelement()) == (2, 2, 4, 20, 20)
    assert (tensor.size(), tensor.size(1), tensor.stride(), tensor.storage_offset()) == ((4, 5), 5, (5, 1), 0)
    assert (tensor.nbytes, tensor.itemsize, tensor.element_size()) == (80, 4, 4)
    assert tensor.is_contiguous()
    assert tensor.is_floating_point()
    assert not tensor.is_complex()
    assert not tensor.is_meta
    assert not tensor.is_cuda
    assert torch.is_floating_point(tensor)
    assert torch.numel(tensor) == 20
    assert tensor.grad is None
    assert tensor.is_leaf
    assert tensor in {tensor}
    assert hash(tensor) == id(tensor)
    assert isinstance(tensor, nn.Parameter) is (kind is PendingParameter)
    assert "not read yet" in repr(tensor)
    tensor.requires_grad_(True)
    tensor.requires_grad = True
    assert tensor.requires_grad
    assert is_pending(tensor)
    assert delivery.asked == 0


def test_a_conversion_to_what_it_is_already_does_not_wait() -> None:
    delivery = Delivery()
    layer = nn.Linear(5, 4, bias=False)
    layer.weight = tensor = delivery.tensor()
    for done in (
        tensor.to("cpu"),
        tensor.to(torch.float32),
        tensor.to(device="cpu", dtype=torch.float32),
        tensor.to("cpu", torch.float32, True),
    ):
        assert done is tensor
    assert layer.to("cpu").to(torch.float32).to("cpu", torch.float32).weight is tensor
    assert delivery.asked == 0
    delivery.arrived.set()
    assert delivery.tensor().to("cpu", copy=True).data_ptr() != 0
    assert delivery.tensor().to(torch.ones(1)).sum() == TRUE.sum()
    assert delivery.tensor().to(torch.float64).dtype == torch.float64
    assert torch.equal(layer.double().weight, TRUE.double())


def under_inference_mode(x: torch.Tensor, tensor: Any) -> Any:
    with torch.inference_mode():
        return (x @ tensor).clone()


def under_default_device(x: torch.Tensor, tensor: Any) -> Any:
    with torch.device("meta"):
        return x @ tensor


def under_dispatch_mode(x: torch.Tensor, tensor: Any) -> Any:
    with FlopCounterMode(display=False):
        return x @ tensor


MODES: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "inference": under_inference_mode,
    "default device": under_default_device,
    "dispatch mode": under_dispatch_mode,
    "grad": lambda x, t: torch.func.grad(lambda y: (y @ t).sum())(x).sum() * 0 + x @ t,
    "jvp": lambda x, t: torch.func.jvp(lambda y: y @ t, (x,), (x,))[1],
    "vmap": lambda x, t: torch.vmap(lambda row: row @ t)(x),
    "functionalize": lambda x, t: torch.func.functionalize(lambda y: y @ t)(x),
    "make_fx": lambda x, t: make_fx(lambda y: y @ t)(x)(x),
    "trace": lambda x, t: untyped.jit.trace(lambda y: y @ t, (x,), check_trace=False)(x),
    "aot": lambda x, t: torch.compile(lambda y: y @ t, backend="aot_eager")(x),
}


@pytest.mark.parametrize("name", MODES)
def test_the_mode_of_its_first_use_leaves_no_mark(name: str) -> None:
    torch.compiler.reset()
    delivery = Delivery()
    tensor = delivery.tensor()
    x = torch.linspace(-1, 1, 8).view(2, 4)
    result = run_late(delivery, lambda: MODES[name](x, tensor))
    assert torch.equal(result, x @ TRUE)
    assert type(tensor) is nn.Parameter
    assert torch._C._dispatch_keys(tensor) == torch._C._dispatch_keys(nn.Parameter(TRUE))
    with torch.no_grad():
        tensor.add_(1)
    tensor.requires_grad_(True)
    total: Any = (x @ tensor).sum()
    total.backward()
    assert tensor.grad is not None
    assert torch.equal(tensor.detach(), TRUE + 1)


def test_requires_grad_set_while_pending_trains_the_parameter() -> None:
    delivery = Delivery()
    tensor = delivery.tensor().requires_grad_(True)
    delivery.arrived.set()
    (tensor * 2).sum().backward()
    assert torch.equal(tensor.grad, torch.full((4, 5), 2.0))
    assert type(tensor) is nn.Parameter


def test_nothing_of_it_is_left_afterwards() -> None:
    delivery = Delivery()
    tensor = delivery.tensor()
    tensor.note = "kept"
    delivery.arrived.set()
    settle(tensor)
    assert type(tensor) is nn.Parameter
    assert vars(tensor) == {"note": "kept"}
    assert torch._C._dispatch_keys(tensor) == torch._C._dispatch_keys(nn.Parameter(TRUE))
    settle(tensor)  # a plain tensor stays as it is
    assert delivery.asked == 1


def test_threads_racing_the_first_read_wait_once_and_all_are_right() -> None:
    for _ in range(20):
        delivery = Delivery()
        tensor = delivery.tensor()
        results: list[torch.Tensor] = []
        start = threading.Barrier(16)

        def read(
            tensor: Any = tensor, results: list[torch.Tensor] = results, start: threading.Barrier = start
        ) -> None:
            start.wait(30)
            results.append(torch.ones(4) @ tensor)

        threads = [threading.Thread(target=read) for _ in range(16)]
        for thread in threads:
            thread.start()
        time.sleep(0.005)
        delivery.arrived.set()
        for thread in threads:
            thread.join(30)
        assert len(results) == 16
        assert all(torch.equal(result, torch.ones(4) @ TRUE) for result in results)
        assert delivery.asked == 1
        assert type(tensor) is nn.Parameter


def test_an_error_reaches_the_reader_and_a_retry_works() -> None:
    delivery = Delivery()
    delivery.failures = [TransferError("the store is away")]
    tensor = delivery.tensor()
    with pytest.raises(TransferError, match="the store is away"):
        tensor.sum()
    assert type(tensor) is PendingParameter
    delivery.arrived.set()
    assert tensor.sum() == TRUE.sum()
    assert type(tensor) is nn.Parameter


def test_waiting_uses_no_processor_and_lets_other_threads_run() -> None:
    delivery = Delivery()
    tensor = delivery.tensor()
    readers = [threading.Thread(target=tensor.sum) for _ in range(4)]
    for reader in readers:
        reader.start()
    while not delivery.asked:
        time.sleep(0.001)
    before, began = time.process_time(), time.monotonic()
    time.sleep(0.3)
    assert time.monotonic() - began < 1.0  # this thread got the interpreter back at once
    assert time.process_time() - before < 0.15
    delivery.arrived.set()
    for reader in readers:
        reader.join(30)
    assert type(tensor) is nn.Parameter


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_not_held_up_by_a_thread_it_does_not_have() -> None:
    delivery = Delivery()
    tensor = delivery.tensor()
    reader = threading.Thread(target=tensor.sum)
    reader.start()
    while not delivery.asked:
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        tensor._arrival.make = TRUE.clone  # its own source of bytes; the parent's thread still holds the lock
        os._exit(0 if tensor.sum().item() == 210.0 else 1)
    deadline = time.monotonic() + 20
    status: tuple[int, int] = (0, 0)
    while status[0] == 0 and time.monotonic() < deadline:
        status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.005)
    if status[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    delivery.arrived.set()
    reader.join(30)
    assert status == (child, 0)


POINTERS: dict[str, Callable[[Any], Any]] = {
    "data_ptr in C++": without_torch_function(lambda t: t.data_ptr()),
    "numpy in C++": without_torch_function(lambda t: t.numpy()),
    "dlpack in C++": untyped.utils.dlpack.to_dlpack,
    "buffer protocol": memoryview,
}


@pytest.mark.parametrize("name", POINTERS)
def test_code_that_takes_the_pointer_fails_loudly(name: str) -> None:
    delivery = Delivery()
    delivery.arrived.set()
    tensor = delivery.tensor()
    with pytest.raises((RuntimeError, TypeError)):
        POINTERS[name](tensor)
    assert is_pending(tensor)
    assert tensor.sum() == TRUE.sum()


def test_a_tensor_that_torch_will_not_exchange_still_reads_right() -> None:
    delivery = Delivery()
    delivery.arrived.set()
    tensor = delivery.tensor()
    weak = untyped._C._WeakTensorRef(tensor)  # what makes the exchange impossible
    assert tensor.sum() == TRUE.sum()
    assert is_pending(tensor)
    with torch.no_grad():
        tensor.add_(1)
    assert torch.equal(tensor.detach(), TRUE + 1)
    assert delivery.asked == 1
    del weak
    assert torch.equal(tensor, TRUE + 1)
    assert type(tensor) is nn.Parameter


def test_compiled_code_runs_right_and_full_graphs_are_refused_until_it_has_arrived() -> None:
    torch.compiler.reset()
    delivery = Delivery()
    layer = nn.Linear(5, 4)
    layer.weight = delivery.tensor()
    layer.requires_grad_(False)
    want = nn.functional.linear(torch.ones(2, 5), TRUE, layer.bias)
    whole = torch.compile(layer, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="bytes are not here yet"):
        whole(torch.ones(2, 5))
    assert is_pending(layer.weight)
    assert torch.equal(
        run_late(delivery, lambda: torch.compile(layer, backend="eager")(torch.ones(2, 5))), want
    )
    assert not is_pending(layer.weight)
    torch.compiler.reset()
    assert torch.equal(torch.compile(layer, backend="eager", fullgraph=True)(torch.ones(2, 5)), want)


def test_traced_and_exported_modules_hold_the_right_values() -> None:
    def trace(layer: nn.Module) -> Any:
        return untyped.jit.trace(layer, torch.ones(2, 5), check_trace=False)

    def export(layer: nn.Module) -> Any:
        return torch.export.export(layer, (torch.ones(2, 5),), strict=False).module()

    for make in (trace, export):
        delivery = Delivery()
        layer = nn.Linear(5, 4).requires_grad_(False)
        layer.weight = delivery.tensor()
        want = nn.functional.linear(torch.ones(2, 5), TRUE, layer.bias)
        made = run_late(delivery, functools.partial(make, layer))
        assert torch.equal(made(torch.ones(2, 5)), want)
