"""What reading all of an adapter's bytes shows: its digest, and values that are not numbers or all zero.

Remembered for as long as the process lives, by the file's identity: device, inode, size and both times of a
local file, the pinned version of a stored one. The memory is bounded and shared by all threads under one
lock; two threads may look at the same file at once, and find the same.
"""

import hashlib
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch

from loadstone.loader.files.local import Identity
from loadstone.loader.format.header import TensorInfo
from loadstone.loader.source import Blob
from loadstone.loader.tensors.views import DTYPES, is_aligned

_MOST = 16_384
_SAMPLE = 1024
"""Values that show nearly always that a tensor is not all zero."""
_PIECE = 256 * 1024
"""Values that are looked at one by one at a time."""
_SETTLED = 2.0
"""Seconds after its last change from which on a file's times tell every later change from it."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a file's bytes show.

    Attributes
    ----------
    sha256 : bytes
        Digest of the whole file.
    nonfinite : tuple[str, ...]
        Tensors with a NaN or an infinity.
    zero : frozenset[str]
        Tensors in which every value is zero.
    """

    sha256: bytes
    nonfinite: tuple[str, ...]
    zero: frozenset[str]


_lock = threading.Lock()
_seen: OrderedDict[tuple[object, ...], Look] = OrderedDict()


def look_at(blob: Blob, infos: Iterable[TensorInfo], views: Callable[[], Mapping[str, torch.Tensor]]) -> Look:
    """Return what the bytes of ``blob`` show.

    Parameters
    ----------
    blob : Blob
        The file; all of it must be ready.
    infos : iterable of TensorInfo
        Its tensors.
    views : callable
        Gives them, by name.
    """
    identity = _identity(blob)
    with _lock:
        known = _seen.get(identity)
        if known is not None:
            _seen.move_to_end(identity)
            return known
    tensors = views()
    found = Look(
        sha256=hashlib.sha256(blob.buffer()).digest(),
        nonfinite=_nonfinite(blob, infos, tensors),
        zero=frozenset(name for name, tensor in tensors.items() if _is_zero(tensor)),
    )
    if identity and _identity(blob) == identity:
        with _lock:
            _seen[identity] = found
            while len(_seen) > _MOST:
                _seen.popitem(last=False)
    return found


def _identity(blob: Blob) -> tuple[object, ...]:
    """Return what tells this version of the file from every other, empty when nothing surely does."""
    try:
        status = os.stat(blob.name)  # noqa: PTH116  the name may be a location that is no path
    except (OSError, ValueError):
        return (blob.name, blob.version) if blob.version else ()
    if Identity.of(status).text != blob.version:
        return ()  # the path leads to another file by now, of which nothing was seen
    changed = max(status.st_mtime, status.st_ctime)
    if not 0 <= time.time() - changed < _SETTLED:
        return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return ()


def _nonfinite(
    blob: Blob, infos: Iterable[TensorInfo], tensors: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    # All at once first. One by one each tensor is work for several cores that wait for each other at its
    # end: on a machine that computes already, that takes longer than the work.
    if all(_is_finite(run) for run in _runs(blob, infos)):
        return ()
    return tuple(name for name, tensor in tensors.items() if not _is_finite(tensor))


def _runs(blob: Blob, infos: Iterable[TensorInfo]) -> Iterator[torch.Tensor]:
    """Yield the file's values, tensors of one dtype that lie behind each other as one."""
    buffer = blob.buffer()
    in_order = sorted((info for info in infos if info.nbytes), key=lambda info: info.offset)
    for name, same in groupby(in_order, key=lambda info: info.dtype):
        several, dtype = list(same), DTYPES[name]
        nbytes = sum(info.nbytes for info in several)  # the format has no holes
        data = buffer[several[0].offset : several[0].offset + nbytes]
        if is_aligned(several[0]):
            yield torch.frombuffer(data, dtype=dtype)
        else:
            yield torch.frombuffer(bytearray(data), dtype=dtype)


def _is_finite(values: torch.Tensor) -> bool:
    # A sum is finite only if every term is; in the values' own dtype it takes no copy, but may overflow. Then
    # each value is looked at, in pieces: what that takes of memory would otherwise stay with the process.
    return math.isfinite(values.sum().item()) or all(
        bool(torch.isfinite(piece).all()) for piece in torch.split(values.reshape(-1), _PIECE)
    )


def _is_zero(tensor: torch.Tensor) -> bool:
    flat = tensor.reshape(-1)
    return not flat[:_SAMPLE].any() and not flat.any()
