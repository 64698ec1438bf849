"""Moves tensors to other devices while others are still arriving.

Ownership: the iterator that `to_device` returns belongs to one thread, as does the writer inside.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence

import torch

from loadstone.errors import SettingsError
from loadstone.loader.tensors.device_writer import DeviceWriter

Named = tuple[str, torch.Tensor]
Batches = Iterable[Sequence[Named]]
"""Named tensors as they come; an empty sequence says that the next one will take a while."""


def parse_device(device: str | int | torch.device) -> torch.device:
    """Return a torch device; a plain number is that CUDA device.

    Raises
    ------
    SettingsError
        Torch knows no such device, or it is not on this machine.
    """
    try:
        parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SettingsError(f"device {device!r} is not one that torch knows: {_first_line(error)}") from None
    if parsed.type == "cuda":
        _check_cuda(parsed)
    elif parsed.type not in ("cpu", "meta"):
        try:
            torch.empty(0, device=parsed)
        except (RuntimeError, AssertionError, ImportError) as error:
            raise SettingsError(
                f"device {device!r} cannot be used: {_first_line(error)}; use 'cpu'"
            ) from None
    return parsed


def to_device(batches: Batches, device: torch.device) -> Iterator[Named]:
    """Yield named tensors on ``device``, in the order in which they come; on the CPU, as they are.

    For CUDA, some are begun ahead of the one that is yielded, except across an empty batch.
    """
    if device.type == "cuda":
        return _written(batches, device)
    return ((name, tensor.to(device)) for batch in batches for name, tensor in batch)


def _written(batches: Batches, device: torch.device) -> Generator[Named]:
    writer = DeviceWriter(device)
    begun: deque[tuple[str, torch.Tensor, int]] = deque()

    def hand_out(*, everything: bool) -> Iterator[Named]:
        while begun and (everything or writer.finished(begun[0][2])):
            name, tensor, turn = begun.popleft()
            writer.finish(turn)
            yield name, tensor

    try:
        for batch in batches:
            for name, tensor in batch:
                begun.append((name, *writer.begin(tensor)))
                yield from hand_out(everything=False)
            if not batch:
                yield from hand_out(everything=True)
        yield from hand_out(everything=True)
    finally:
        writer.close()


def _check_cuda(device: torch.device) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise SettingsError(f"device '{device}' is not there: this torch sees no CUDA device; use 'cpu'")
    if device.index is not None and device.index >= count:
        raise SettingsError(f"device '{device}' is not there: this torch sees {count}, numbered from 0")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
