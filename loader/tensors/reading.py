"""Turns stored tensors into torch tensors: views of the file's memory, or copies.

The part of a checkpoint that needs torch; `loadstone.loader.checkpoint` imports it at the first tensor.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from loadstone.loader.format.gcpause import paused_gc
from loadstone.loader.format.header import TensorInfo
from loadstone.loader.ranges import ByteRange
from loadstone.loader.source import Blob
from loadstone.loader.tensors import views
from loadstone.loader.tensors.tensor_slice import TensorSlice

Ensure = Callable[[Mapping[str, Sequence[ByteRange]]], None]
"""Waits for byte ranges of files."""

_OBJECT = 200  # bytes, about, of a tensor's Python object


class Reader:
    """Reads tensors of one checkpoint.

    Parameters
    ----------
    blobs : mapping of str to Blob
        The weight files.
    ensure : callable
        Waits for byte ranges of files, given by file.
    always_copy : bool
        Give copies where a view would do.
    copied : set of str
        Takes the names of tensors that had to be copied because their data is not aligned.
    """

    def __init__(
        self, blobs: Mapping[str, Blob], ensure: Ensure, always_copy: bool, copied: set[str]
    ) -> None:
        self._blobs = blobs
        self._ensure = ensure
        self._always_copy = always_copy
        self._copied = copied

    def tensors(self, infos: Iterable[TensorInfo]) -> list[torch.Tensor]:
        """Wait for tensors, all together, and return them."""
        infos = list(infos)
        for info in infos:
            views.torch_dtype(info)
        self._wait(infos)
        with paused_gc(0 if self._always_copy else _OBJECT * len(infos)):
            return [self._arrived(info) for info in infos]

    def copies(self, infos: Iterable[TensorInfo]) -> list[torch.Tensor]:
        """Wait for tensors, all together, and return copies, read without going through a map."""
        infos = list(infos)
        for info in infos:
            views.torch_dtype(info)
        self._wait(infos)
        return [views.copied(info, self._blobs[info.file]) for info in infos]

    def is_ready(self, info: TensorInfo) -> bool:
        """Say whether a tensor can be used without waiting."""
        return self._blobs[info.file].ready(info.range)

    def view(self, info: TensorInfo) -> torch.Tensor:
        """Return a tensor without waiting for it, unless it has to be copied."""
        if self._always_copy or not views.is_aligned(info):
            return self.tensors([info])[0]
        self._ensure({info.file: []})  # nothing to wait for, but the file must be the one opened
        return views.view(info, self._blobs[info.file].buffer())

    def raw(self, info: TensorInfo) -> torch.Tensor:
        """Wait for a tensor and return its bytes."""
        self._wait([info])
        blob = self._blobs[info.file]
        return views.raw_copy(info, blob) if self._always_copy else views.raw(info, blob.buffer())

    def part(self, info: TensorInfo) -> TensorSlice:
        """Return what can be indexed to read a part of a tensor."""
        return TensorSlice(
            info, self._blobs[info.file], lambda spans: self._ensure({info.file: spans}), self._always_copy
        )

    def _wait(self, infos: Iterable[TensorInfo]) -> None:
        spans: dict[str, list[ByteRange]] = {}
        for info in infos:
            spans.setdefault(info.file, []).append(info.range)
        self._ensure(spans)

    def _arrived(self, info: TensorInfo) -> torch.Tensor:
        blob = self._blobs[info.file]
        if self._always_copy:
            return views.copied(info, blob)
        if views.is_aligned(info):
            return views.view(info, blob.buffer())
        self._copied.add(info.name)
        return views.copied(info, blob)
