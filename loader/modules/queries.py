"""What can be asked of a tensor without its bytes: which torch functions only look at its shape and kind."""

from typing import Any

import torch

# What is not here waits for the bytes: forgetting one costs only time.
_PROPERTIES = """
    device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_mkldnn is_mps is_nested is_quantized is_sparse
    is_sparse_csr is_xla is_xpu itemsize layout nbytes ndim output_nr requires_grad retains_grad shape
"""
_METHODS = """
    __hash__ __len__ dim element_size get_device is_complex is_contiguous is_floating_point is_inference
    is_same_size is_signed ndimension nelement numel requires_grad_ size storage_offset stride
"""
_FUNCTIONS = "get_device is_complex is_floating_point is_inference is_same_size is_signed numel"


def _descriptor(name: str) -> Any:
    return getattr(torch.Tensor, name)


WITHOUT_BYTES: frozenset[Any] = frozenset(
    [_descriptor(name).__get__ for name in _PROPERTIES.split()]
    + [_descriptor(name) for name in _METHODS.split()]
    + [getattr(torch, name) for name in _FUNCTIONS.split()]
    + [_descriptor("requires_grad").__set__, torch._has_compatible_shallow_copy_type]
)
"""The functions, as `__torch_function__` is given them."""

_SET_DATA = _descriptor("data").__set__


def changes_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """Say whether a call gives its first argument back as it is, so that `nn.Module.to` need not wait.

    These are ``tensor.to(...)`` what the tensor already is, and ``tensor.data = tensor``, with which
    `nn.Module.to` ends. If in doubt, the answer is no.
    """
    if func is torch.Tensor.to:
        target = parse_to(args[1:], kwargs)
        return (
            target is not None and target[0] in (None, args[0].device) and target[1] in (None, args[0].dtype)
        )
    return func == _SET_DATA and args[0] is args[1]


def parse_to(
    args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> tuple[torch.device | None, torch.dtype | None] | None:
    """Return the device and dtype that ``to(*args, **kwargs)`` asks for; ``None`` when it asks for more."""
    given = kwargs or {}
    most = 2 if args and isinstance(args[0], torch.dtype) else 3  # one more is ``copy``
    if len(args) > most or not given.keys() <= {"device", "dtype", "non_blocking"}:
        return None
    if any(isinstance(value, torch.Tensor) for value in (*args, *given.values())):
        return None
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **given)
    return (device, dtype) if memory_format is None else None
