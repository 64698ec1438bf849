"""Parts of a batch: some rows of a module's inputs, and the outputs of all parts put together again.

A part is split off where it is certain which inputs have the batch first. Where it is not (a mask of
``[tokens, tokens]`` may have as many tokens as the batch has rows), every part is computed for the whole
batch and its own rows are taken from the output: slower, never wrong. Pure; no state.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from loadstone.errors import AdapterUnsupportedError

Forward = Callable[..., object]
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


def run_apart(
    calls: Sequence[tuple[Forward, Tensor]],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    *,
    count: int,
    name: str,
) -> object:
    """Run each function on its own rows of a module's inputs, and join what they return.

    Parameters
    ----------
    calls : sequence of (callable, torch.Tensor)
        What to run, and on which rows; together they have every row once.
    args, kwargs
        What the module was called with.
    count : int
        How many rows the batch has.
    name : str
        The module's, for messages.

    Raises
    ------
    AdapterUnsupportedError
        Which part of an input or output belongs to which row cannot be told.
    """
    tensors = list(_tensors((args, kwargs), name))
    found = len(tensors[0]) if tensors and tensors[0].dim() else 0
    if found != count:
        raise not_by_row(name, found, count)
    splits = all(_is_certain(tensor, tensors[0], count) for tensor in tensors[1:])
    pieces = []
    for forward, rows in calls:
        if splits:
            taken: tuple[Any, Any] = _taken((args, kwargs), rows, count)
            pieces.append(forward(*taken[0], **taken[1]))
        else:
            pieces.append(_rows_of(forward(*args, **kwargs), rows, count, name))
    order = torch.cat([rows for _, rows in calls])
    return _joined(pieces, [len(rows) for _, rows in calls], order.argsort(), name)


def not_by_row(name: str, found: int, count: int) -> AdapterUnsupportedError:
    """Return the error for a module whose input has ``found`` rows in a batch of ``count``."""
    return AdapterUnsupportedError(
        f"{name} got an input of {found} rows in a mixed batch of {count} rows, so whose they are cannot be "
        "told; run these adapters in batches of their own"
    )


def _tensors(value: object, name: str) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (tuple, list, dict):
        for each in value.values() if isinstance(value, dict) else value:  # type: ignore[attr-defined]  # as the line above says
            yield from _tensors(each, name)
    elif not isinstance(value, _PLAIN):
        raise AdapterUnsupportedError(
            f"{name} is called with a {type(value).__name__}, which cannot be split by row, so it cannot be "
            "replaced in a mixed batch; run these adapters in batches of their own"
        )


def _is_certain(tensor: Tensor, first: Tensor, count: int) -> bool:
    """Say whether a tensor's first dimension surely is, or surely is not, the batch."""
    if tensor.dim() == 0 or len(tensor) == 1:
        return True
    return len(tensor) == count and count not in first.shape[1:]


def _taken(value: Any, rows: Tensor, count: int) -> Any:
    if isinstance(value, Tensor):
        return value.index_select(0, rows.to(value.device)) if value.dim() and len(value) == count else value
    if isinstance(value, dict):
        return {key: _taken(each, rows, count) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_taken(each, rows, count) for each in value)
    return value


def _rows_of(output: Any, rows: Tensor, count: int, name: str) -> Any:
    """Return some rows of the output for a whole batch."""
    if isinstance(output, Tensor):
        by_row = _by_row(output, count, name).index_select(0, rows)
        return by_row.flatten(0, 1)
    if type(output) in (tuple, list):
        return type(output)(_rows_of(each, rows, count, name) for each in output)
    return output


def _by_row(output: Tensor, count: int, name: str) -> Tensor:
    """Return an output as ``[rows, what each row has, …]``: tokens of all rows may stand in one dimension."""
    if output.dim() == 0 or len(output) % count:
        raise AdapterUnsupportedError(
            f"{name} returns a tensor of shape {list(output.shape)} for {count} rows, so whose is what "
            "cannot be told; run these adapters in batches of their own"
        )
    return output.reshape(count, len(output) // count, *output.shape[1:])


def _joined(pieces: Sequence[Any], counts: Sequence[int], order: Tensor, name: str) -> Any:
    first = pieces[0]
    if isinstance(first, Tensor):
        parts = [_by_row(piece, count, name) for piece, count in zip(pieces, counts, strict=True)]
        return torch.cat(parts).index_select(0, order).flatten(0, 1)
    if type(first) in (tuple, list):
        return type(first)(_joined(each, counts, order, name) for each in zip(*pieces, strict=True))
    if isinstance(first, _PLAIN) and all(piece == first for piece in pieces):
        return first
    raise AdapterUnsupportedError(
        f"{name} returns a {type(first).__name__}, which cannot be put together from rows, so it cannot be "
        "replaced in a mixed batch; run these adapters in batches of their own"
    )
