"""Tensors over a file's memory: the only module between a byte range and torch.

A view is one ``torch.frombuffer`` over the file's map: its storage is exactly the tensor's bytes, and keeps
the map alive. Data that does not lie at a multiple of its element's size is copied instead, since torch's
kernels may assume alignment. What each dtype becomes, F4's packed shape included, is what ``safetensors``
gives.
"""

import math
from dataclasses import replace

import torch

from loadstone.errors import UnsupportedDtypeError
from loadstone.loader.format.header import TensorInfo
from loadstone.loader.ranges import ByteRange, split
from loadstone.loader.source import Blob

_PIECE = 4 * 1024 * 1024

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
"""What torch calls each dtype of the format; newer ones are there when this torch has them."""

for _name, _attribute in (("F8_E8M0", "float8_e8m0fnu"), ("F4", "float4_e2m1fn_x2")):
    if hasattr(torch, _attribute):
        DTYPES[_name] = getattr(torch, _attribute)


def torch_dtype(info: TensorInfo) -> torch.dtype:
    """Return the torch dtype of a tensor.

    Raises
    ------
    UnsupportedDtypeError
        Torch has none for it, or cannot hold this shape in it.
    """
    dtype = DTYPES.get(info.dtype)
    if info.nbytes == 0:
        _check_empty(info)
    if dtype is None:
        raise UnsupportedDtypeError(
            f"torch {torch.__version__} has no dtype for {info.dtype} (tensor {info.name!r} in {info.file}); "
            "raw(name) gives its bytes"
        )
    if info.dtype == "F4" and (not info.shape or info.shape[-1] % 2):
        raise UnsupportedDtypeError(
            f"torch packs two F4 values in a byte, so the last dimension must be even; {info.name!r} in "
            f"{info.file} has shape {list(info.shape)}; raw(name) gives its bytes"
        )
    return dtype


def _check_empty(info: TensorInfo) -> None:
    try:
        torch.empty(info.shape, device="meta")
    except (TypeError, RuntimeError):
        raise UnsupportedDtypeError(
            f"torch counts with 63 bits, too few for the shape {list(info.shape)} of {info.name!r} in "
            f"{info.file}, which holds no element; leave this tensor out"
        ) from None


def torch_shape(info: TensorInfo) -> tuple[int, ...]:
    """Return the shape that torch gives it: the file's own, but for F4, of which torch packs pairs."""
    if info.dtype == "F4":
        return (*info.shape[:-1], info.shape[-1] // 2)
    return info.shape


def is_aligned(info: TensorInfo) -> bool:
    """Say whether its data lies at a multiple of its element's size, so that it can be a view."""
    dtype = DTYPES.get(info.dtype)
    return dtype is None or info.nbytes == 0 or info.offset % dtype.itemsize == 0


def from_buffer(info: TensorInfo, buffer: memoryview) -> torch.Tensor:
    """Return a tensor whose memory is ``buffer``, which holds exactly the tensor's bytes, aligned."""
    dtype, shape = torch_dtype(info), torch_shape(info)
    if info.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape)).view(shape)


def view(info: TensorInfo, buffer: memoryview) -> torch.Tensor:
    """Return a tensor over its own bytes of the whole file's ``buffer``; they may still be arriving."""
    dtype, shape = torch_dtype(info), torch_shape(info)
    if info.nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=info.offset)
    return flat.view(shape)


def copied(info: TensorInfo, blob: Blob) -> torch.Tensor:
    """Return a tensor of its own memory, filled by reads of ``blob`` that do not go through its map."""
    data = memoryview(bytearray(info.nbytes))
    fill(data, blob, info.offset)
    return from_buffer(info, data)


def fill(into: memoryview, blob: Blob, offset: int) -> None:
    """Fill ``into`` with ``blob``'s bytes from ``offset`` on, a piece at a time."""
    for part in split(ByteRange(0, len(into)), _PIECE):
        into[part.start : part.stop] = blob.read(ByteRange(offset + part.start, offset + part.stop))


def raw(info: TensorInfo, buffer: memoryview) -> torch.Tensor:
    """Return its bytes as a 1-D uint8 tensor over the file's ``buffer``."""
    if info.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(buffer, dtype=torch.uint8, count=info.nbytes, offset=info.offset)


def raw_copy(info: TensorInfo, blob: Blob) -> torch.Tensor:
    """Return its bytes as a 1-D uint8 tensor of its own memory."""
    data = memoryview(bytearray(info.nbytes))
    fill(data, blob, info.offset)
    return raw(replace(info, offset=0), data)
