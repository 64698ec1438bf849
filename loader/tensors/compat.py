"""A front with the methods of ``safetensors.safe_open``, so that existing code changes one import.

Differences, all on the safe side: headers are checked more strictly; errors are loadstone's own, of which
those about a file's content and about missing tensors are a ``SafetensorError`` besides; tensors are private,
writable views that stay valid after the file is closed; any location that loadstone can open may be given; a
slice brings only the bytes it needs, and takes every index that torch takes, for numpy too; a device that is
not there is refused when the file is opened. Frameworks other than torch and numpy are not given.
"""

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from loadstone.errors import SettingsError, UnsupportedDtypeError
from loadstone.loader.checkpoint import Checkpoint, open_checkpoint
from loadstone.loader.tensors.device import parse_device

if TYPE_CHECKING:
    import torch

    from loadstone.loader.tensors.tensor_slice import TensorSlice

_TORCH = frozenset({"pt", "torch", "pytorch"})
_NUMPY = frozenset({"np", "numpy"})


class safe_open:  # noqa: N801  the name that existing code calls
    """Open one safetensors file lazily.

    Parameters
    ----------
    filename : str or path
        The file.
    framework : str
        ``"pt"`` gives torch tensors, ``"np"`` numpy arrays.
    device : str, int, torch.device or None
        Where torch tensors are put; ``None`` is the CPU.
    backend : str
        ``"mmap"`` gives views, ``"pread"`` copies.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str = "pt",
        device: "str | int | torch.device | None" = "cpu",
        *,
        backend: str = "mmap",
    ) -> None:
        if framework not in _TORCH | _NUMPY:
            raise SettingsError(f"framework {framework!r} is not one that is known; use 'pt' or 'np'")
        if backend not in ("mmap", "pread"):
            raise SettingsError(f"backend {backend!r} is not one that is known; use 'mmap' or 'pread'")
        self._numpy = framework in _NUMPY
        self._device = parse_device("cpu" if device is None else device)
        if self._numpy and self._device.type != "cpu":
            raise SettingsError(f"numpy arrays cannot be on device {device!r}; use 'cpu', or framework='pt'")
        self._checkpoint: Checkpoint = open_checkpoint(filename, copy=backend == "pread")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._checkpoint.close()

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._checkpoint)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order of their bytes."""
        return self._checkpoint.file_order()

    def metadata(self) -> dict[str, str] | None:
        """Return the header's ``__metadata__``, ``None`` when it has none."""
        return dict(self._checkpoint.metadata) or None

    def get_tensor(self, name: str) -> Any:
        """Return a whole tensor."""
        return self._give(self._checkpoint[name])

    def get_tensors(self) -> dict[str, Any]:
        """Return every tensor, in the order of their bytes."""
        if self._numpy:
            return {name: self.get_tensor(name) for name in self.offset_keys()}
        return dict(self._checkpoint.stream(order="file", device=self._device))

    def get_slice(self, name: str) -> "SafeSlice":
        """Return what can be indexed to read a part of a tensor."""
        return SafeSlice(self, self._checkpoint.slice(name))

    def _give(self, tensor: "torch.Tensor") -> Any:
        if self._numpy:
            return _to_numpy(tensor)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


class SafeSlice:
    """A tensor of an open file that is read by indexing."""

    def __init__(self, file: safe_open, part: "TensorSlice") -> None:
        self._file = file
        self._part = part

    def get_shape(self) -> list[int]:
        """Return the shape as the file spells it."""
        return self._part.get_shape()

    def get_dtype(self) -> str:
        """Return the dtype as the file spells it."""
        return self._part.get_dtype()

    def __getitem__(self, index: object) -> Any:
        return self._file._give(self._part[index])


def _to_numpy(tensor: "torch.Tensor") -> Any:
    try:
        return tensor.numpy()
    except TypeError:
        raise UnsupportedDtypeError(
            f"numpy has no dtype for {tensor.dtype}; open the file with framework='pt'"
        ) from None
