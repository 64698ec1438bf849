"""Part of a stored tensor, by indexing: brings only the bytes that the index needs."""

from collections.abc import Callable

import torch

from loadstone.errors import SliceError
from loadstone.loader.format.header import TensorInfo
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import Blob
from loadstone.loader.tensors import slices, views

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorSlice:
    """What `Checkpoint.slice` returns: ``ckpt.slice(name)[index]`` equals ``ckpt[name][index]``.

    Every index that torch takes is taken. Of basic ones (integers, slices, ``...``, ``None``) only the bytes
    needed are brought, by the rule in `loadstone.loader.tensors.slices`. A result that is one run of bytes
    (rows) is a view of just them; any other is a compact copy, so that no byte that was not brought can be
    reached through it. F4 is indexed in torch's packed shape.
    """

    def __init__(
        self, info: TensorInfo, blob: Blob, ensure: Callable[[list[ByteRange]], None], copy: bool
    ) -> None:
        self._info = info
        self._blob = blob
        self._ensure = ensure
        self._copy = copy
        self._dtype = views.torch_dtype(info)
        self._shape = views.torch_shape(info)

    def get_shape(self) -> list[int]:
        """Return the shape as the file spells it."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """Return the dtype as the file spells it, ``"BF16"``."""
        return self._info.dtype

    def ranges(self, index: object) -> list[ByteRange]:
        """Return the bytes of the file that ``index`` needs.

        Raises
        ------
        SliceError
            The index does not fit the tensor's shape.
        """
        return self._in_file(self._plan(_with_masks(index))[0])

    def __getitem__(self, index: object) -> torch.Tensor:
        index = _with_masks(index)
        plan, shape = self._plan(index)
        self._ensure(self._in_file(plan))
        if self._info.nbytes == 0:  # torch looks at the numbers in a list only where there is memory
            return self._index(torch.empty(self._shape, dtype=self._dtype, device="cpu"), index)
        if not plan.ranges:
            return torch.empty(shape, dtype=self._dtype, device="cpu")
        if plan.exact and (self._copy or views.is_aligned(self._info)):
            return self._rows(plan.ranges[0], shape)
        return self._gather(plan, index, shape)

    def _plan(self, index: object) -> tuple[slices.SlicePlan, tuple[int, ...]]:
        # On a tensor without memory: does the index fit, and what shape results, before any byte moves.
        probe = torch.empty(self._shape, dtype=torch.uint8, device="meta")
        shape = tuple(self._index(probe, index).shape)
        return slices.plan(self._shape, self._dtype.itemsize, index), shape

    def _in_file(self, plan: slices.SlicePlan) -> list[ByteRange]:
        offset = self._info.offset
        return [ByteRange(offset + part.start, offset + part.stop) for part in plan.ranges]

    def _index(self, tensor: torch.Tensor, index: object) -> torch.Tensor:
        """Return ``tensor[index]``, with torch's own verdict on the index."""
        try:
            return tensor[index]  # type: ignore[index]  # torch judges what an index is
        except (IndexError, ValueError, TypeError, RuntimeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SliceError(
                f"index {index!r} does not fit {self._info.name!r} of shape {list(self._shape)}: {reason}"
            ) from None

    def _rows(self, part: ByteRange, shape: tuple[int, ...]) -> torch.Tensor:
        start = self._info.offset + part.start
        memory = memoryview(bytearray(part.nbytes)) if self._copy else self._blob.buffer()
        if self._copy:
            views.fill(memory, self._blob, start)
            start = 0
        count = part.nbytes // self._dtype.itemsize
        return torch.frombuffer(memory, dtype=self._dtype, count=count, offset=start).view(shape)

    def _gather(self, plan: slices.SlicePlan, index: object, shape: tuple[int, ...]) -> torch.Tensor:
        if self._copy:
            memory, start = memoryview(bytearray(self._info.nbytes)), 0
            for part in plan.ranges:
                views.fill(memory[part.start : part.stop], self._blob, self._info.offset + part.start)
        else:
            memory, start = self._blob.buffer(), self._info.offset
        # Picked as integers of the same width, which torch can index whatever the dtype.
        width = self._dtype.itemsize
        if start % width == 0:
            count = self._info.nbytes // width
            whole = torch.frombuffer(memory, dtype=_INTEGERS[width], count=count, offset=start).view(
                self._shape
            )
        else:  # unaligned: as single bytes, in a dimension of their own at the end
            flat = torch.frombuffer(memory, dtype=torch.uint8, count=self._info.nbytes, offset=start)
            whole = flat.view(*self._shape, width)
            index = _with_last(index)
        picked = self._index(whole, index).clone(memory_format=torch.contiguous_format)
        return picked.view(self._dtype).view(shape)


def _with_masks(index: object) -> object:
    """Return ``index`` with masks as tensors: those in lists torch cannot count without memory."""
    return tuple(map(_mask, index)) if isinstance(index, tuple) else _mask(index)


def _mask(item: object) -> object:
    if isinstance(item, torch.Tensor) or not (isinstance(item, list) or hasattr(item, "__array__")):
        return item
    try:
        made = torch.as_tensor(item, device="cpu")
    except (ValueError, TypeError, RuntimeError):  # not one: whoever indexes says so
        return item
    return made if made.dtype == torch.bool else item


def _with_last(index: object) -> tuple[object, ...]:
    """Return ``index`` for a tensor that has one more dimension at the end, all of which is taken."""
    items = index if isinstance(index, tuple) else (index,)
    return (*items, slice(None)) if any(item is Ellipsis for item in items) else (*items, Ellipsis)
